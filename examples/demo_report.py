"""What `make demo` says about its two runs: a table per step, report.json, report.png and a verdict.

Input is what verl's own `file` logger wrote, one JSON object `{"step": int, "data": {metric: number}}` per line.
Nothing here imports verl, and nothing is read from a log except its last lines when an arm failed.
"""

import json
import os
import statistics
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from verl_prefix.machine import device_name, git_state, versions

SCHEMA = "verl_prefix.demo/1"
Metrics = dict[str, float | None]

# Column title -> verl's metric.
CURVES = {"reward": "critic/rewards/mean", "loss": "actor/loss", "grad_norm": "actor/grad_norm"}
TIMINGS = {
    "update_actor": "timing_s/update_actor",
    "old_log_prob": "timing_s/old_log_prob",
    "ref": "timing_s/ref",
    "rollout": "timing_s/gen",
    "step": "timing_s/step",
}
PREFIX = ("prefix/reuse_fraction", "prefix/tokens_saved", "prefix/groups", "prefix/stock_rows")
# Both arms sampled the same responses if all of these are equal.
ROLLOUTS = tuple(
    f"{name}/{kind}"
    for name in ("critic/rewards", "response_length", "prompt_length")
    for kind in ("mean", "max", "min")
)
# Relative tolerance of step 1 in fp32. The floor keeps a loss that is zero but for rounding from counting as different.
TOLERANCE = {"actor/grad_norm": 1e-3, "actor/loss": 1e-3, "actor/entropy": 1e-3, "actor/pg_loss": 1e-3}
FLOOR = 1e-6
# Largest difference between a token's probability in the rollout and in the actor's own log-probs, in fp32: 3e-9 (tiny)
# and 2e-5 (SmolLM2) where the rollout has the actor's weights.
ROLLOUT_NOISE = 1e-4
# Above tokens saved, lm_head (not run on prefixes) and attention explain a part, about this much on small models.
SUSPICIOUS = 1.5
COLORS = {"stock": "#8a8a8a", "prefix": "#d1495b"}
PACKAGES = ("verl-prefix", "verl", "torch", "transformers", "ray", "tensordict", "TransferQueue")


@dataclass(frozen=True)
class Arm:
    """One finished run of `verl.trainer.main_ppo`.

    Attributes:
        error: why it counts as failed, in words; None if it exited with 0 in time.
        seconds: wall time of the whole process.
        memory_mib: the most RSS by role of a process, looked at once a second; of the ranks, the largest's.
    """

    name: str
    metrics_path: Path
    log_path: Path
    error: str | None
    seconds: float
    memory_mib: dict[str, float] = field(default_factory=dict)

    def steps(self) -> list[dict[str, Any]]:
        """Return the logged training steps, `{"step": int, "data": Metrics}`, in order; [] if there are none."""
        if not self.metrics_path.exists():
            return []
        lines = [json.loads(line) for line in self.metrics_path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if TIMINGS["step"] in line["data"]]


def find(metrics: Metrics, suffix: str) -> float | None:
    """Return the metric named `suffix`, or `<anything>/suffix` where verl routes it under its own name, else None."""
    return next((v for k, v in metrics.items() if k == suffix or k.endswith(f"/{suffix}")), None)


def build(stock: Arm, prefix: Arm, num_steps: int, config: dict[str, Any]) -> dict[str, Any]:
    """Return the report of both arms; its `problems` lists in words everything that makes the demo fail."""
    arms = {arm.name: {**_describe(arm), "steps": arm.steps()} for arm in (stock, prefix)}
    first_step = _compare_first_step(*(arm["steps"] for arm in arms.values()))
    report = {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(PACKAGES),
        "device": _device(),
        "git": git_state(),
        "config": config,
        "arms": arms,
        "first_step": first_step,
        "ratios": _ratios(*(arm["steps"] for arm in arms.values())),
        "token_ratio": _token_ratio(arms["prefix"]["steps"]),
    }
    report["notes"] = _notes(report)
    report["problems"] = _problems(stock, prefix, num_steps, first_step, config.get("rollout") != "vllm")
    return report


def _describe(arm: Arm) -> dict[str, Any]:
    memory = {role: round(mib) for role, mib in arm.memory_mib.items()}
    return {"error": arm.error, "seconds": round(arm.seconds, 1), "log": str(arm.log_path), "peak_rss_mib": memory}


def _compare_first_step(stock: list[dict[str, Any]], prefix: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Compare step 1, which starts from the same weights in both arms; None if an arm has no step.

    Later steps cannot be compared: a difference of one rounding in the weights changes a sampled token now and then.
    Two stock runs of SmolLM2 differ by 1 % in the entropy of step 2.
    """
    if not stock or not prefix:
        return None
    ours, theirs = prefix[0]["data"], stock[0]["data"]
    rollouts = {name: {"stock": theirs.get(name), "prefix": ours.get(name)} for name in ROLLOUTS}
    metrics = {}
    for name, tolerance in TOLERANCE.items():
        a, b = theirs.get(name), ours.get(name)
        difference = None if a is None or b is None else abs(a - b) / max(abs(a), abs(b), FLOOR / tolerance)
        agree = difference is not None and difference <= tolerance
        metrics[name] = {
            "stock": a,
            "prefix": b,
            "relative_difference": difference,
            "tolerance": tolerance,
            "agree": agree,
        }
    same = all(_close(pair["stock"], pair["prefix"]) for pair in rollouts.values())
    return {"same_rollouts": same, "rollouts": rollouts, "metrics": metrics}


def _close(a: float | None, b: float | None) -> bool:
    # The means of equal rewards differ by an ulp where the rows come in another order.
    return a is not None and b is not None and abs(a - b) <= 1e-6 * max(abs(a), abs(b))


def _ratios(stock: list[dict[str, Any]], prefix: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median seconds over the steps of both arms and stock/prefix, for each timing that both logged."""
    ratios = {}
    for title, name in TIMINGS.items():
        stock_s, prefix_s = ([s["data"][name] for s in steps if s["data"].get(name)] for steps in (stock, prefix))
        if stock_s and prefix_s:
            a, b = statistics.median(stock_s), statistics.median(prefix_s)
            ratios[title] = {"stock_s": a, "prefix_s": b, "ratio": a / b}
    return ratios


def _token_ratio(prefix: list[dict[str, Any]]) -> float | None:
    """Return logical tokens / computed tokens of the prefix arm, what a time ratio has to be read against."""
    shares = [share for step in prefix if (share := find(step["data"], PREFIX[0]))]
    return 1 / (1 - statistics.median(shares)) if shares else None


def _notes(report: dict[str, Any]) -> list[str]:
    """Return what a reader must know before quoting the ratios: times that the saved tokens or the steps don't bear."""
    notes = []
    if report["first_step"] and not report["first_step"]["same_rollouts"]:
        notes.append("the arms sampled other responses: losses and gradients of their steps are not comparable")
    notes += ["steps after the first start from weights that differ by rounding, and sampling multiplies that"]
    tokens, update = report["token_ratio"], report["ratios"].get("update_actor")
    if tokens and update and update["ratio"] > SUSPICIOUS * tokens:
        notes.append(
            f"update_actor is {update['ratio']:.1f}x faster with {tokens:.1f}x fewer tokens: the rest is not sharing, "
            "but other load on this machine or a slow stock path"
        )
    for name, arm in report["arms"].items():
        # Step 1 warms up.
        times = [seconds for step in arm["steps"][1:] if (seconds := step["data"].get(TIMINGS["update_actor"]))]
        if times and max(times) > SUSPICIOUS * min(times):
            notes.append(
                f"update_actor of the {name} arm takes {min(times):.2f} to {max(times):.2f} s: too uneven for a "
                "ratio that can be quoted; run again on an idle machine"
            )
    return notes


def _problems(
    stock: Arm, prefix: Arm, num_steps: int, first_step: dict[str, Any] | None, reproducible: bool
) -> list[str]:
    """`reproducible`: the rollout draws the same responses in both arms. vLLM's draws depend on what arrives when."""
    problems = []
    for arm in (stock, prefix):
        if arm.error:
            problems.append(f"the {arm.name} arm failed: {arm.error}; its log is {arm.log_path}")
        elif len(arm.steps()) != num_steps:
            problems.append(
                f"the {arm.name} arm logged {len(arm.steps())} of {num_steps} steps; its log is {arm.log_path}"
            )
        for step in arm.steps():
            difference = step["data"].get("training/rollout_probs_diff_max")
            if difference is None or not difference <= ROLLOUT_NOISE:
                problems.append(
                    f"step {step['step']} of the {arm.name} arm: rollout and actor disagree about a token's "
                    f"probability by {_number(difference)} > {ROLLOUT_NOISE:g}, so their weights are not the same"
                )
    if not prefix.error and not any(find(step["data"], PREFIX[0]) for step in prefix.steps()):
        problems.append(
            f"the prefix arm shared nothing: {PREFIX[0]} is 0 or missing in every step; "
            f"run `verl-prefix doctor` and read {prefix.log_path}"
        )
    if first_step and not first_step["same_rollouts"]:
        if not reproducible:
            return problems
        rows = [
            f"{k} {v['stock']} / {v['prefix']}" for k, v in first_step["rollouts"].items() if not _close(**_pair(v))
        ]
        problems.append(
            f"step 1 is not comparable, the arms sampled other responses (stock / prefix): {', '.join(rows)}"
        )
    elif first_step:
        for name, row in first_step["metrics"].items():
            if not row["agree"]:
                problems.append(
                    f"step 1 differs in {name}: stock {row['stock']}, prefix {row['prefix']}, "
                    f"relative difference {_number(row['relative_difference'])} > {row['tolerance']:g}"
                )
    return problems


def _pair(row: dict[str, float | None]) -> dict[str, float | None]:
    return {"a": row["stock"], "b": row["prefix"]}


def show(report: dict[str, Any], console: Console) -> None:
    """Print both arms' metrics step by step, the ratios of the medians, and step 1 of both arms."""
    table = Table(title="step by step, times in seconds")
    table.add_column("", no_wrap=True)
    steps = {name: arm["steps"] for name, arm in report["arms"].items()}
    for name, arm in steps.items():
        for step in arm:
            table.add_column(f"{name}\nstep {step['step']}", justify="right", no_wrap=True)
    rows = CURVES | TIMINGS | {name.removeprefix("prefix/"): name for name in PREFIX}
    for title, name in rows.items():
        table.add_row(title, *(_number(find(step["data"], name), 3) for arm in steps.values() for step in arm))
    console.print(table)

    medians = Table("median of the steps", title="stock / prefix")
    for title in ("stock", "prefix", "ratio"):
        medians.add_column(title, justify="right")
    for title, row in report["ratios"].items():
        medians.add_row(title, f"{row['stock_s']:.2f} s", f"{row['prefix_s']:.2f} s", f"{row['ratio']:.2f}x")
    memory = {name: arm["peak_rss_mib"] for name, arm in report["arms"].items()}
    for role in [role for role in memory["stock"] if role in memory["prefix"]]:
        medians.add_row(f"{role}, most RSS", *(f"{memory[name][role]} MiB" for name in ("stock", "prefix")), "")
    if report["token_ratio"]:
        medians.add_row("tokens computed", "", "", f"{report['token_ratio']:.2f}x")
    console.print(medians)

    if report["first_step"] and report["first_step"]["same_rollouts"]:
        first = Table("step 1", title="same weights, same responses")
        for title in ("stock", "prefix", "relative difference"):
            first.add_column(title, justify="right")
        for name, row in report["first_step"]["metrics"].items():
            values = (_number(row["stock"], 7), _number(row["prefix"], 7), _number(row["relative_difference"], 2))
            first.add_row(name, *values)
        console.print(first)
    for note in report["notes"]:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else str(round(value)) if value >= 1000 else f"{value:.{digits}g}"


def save(report: dict[str, Any], output: Path) -> None:
    """Write report.json, and report.png if both arms logged a step."""
    (output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    if all(arm["steps"] for arm in report["arms"].values()):
        draw(report, output / "report.png")


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw reward, loss and gradient norm of both arms over each other, and the median seconds side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    config = report["config"]
    figure.suptitle(f"verl GRPO, stock actor and shared prefix: {config['model']}, {config['workload']}")
    titles = ("Mean reward", "Loss", "Gradient norm")
    for ax, title, metric in zip(axes.flat, titles, CURVES.values(), strict=False):
        # Equal curves must both stay visible: stock is wide and pale underneath, ours thin and dashed on top.
        for name, style in (("stock", {"lw": 6, "alpha": 0.5}), ("prefix", {"lw": 1.5, "ls": "--", "marker": "o"})):
            steps = report["arms"][name]["steps"]
            ys = [step["data"].get(metric) for step in steps]
            ax.plot(
                [s["step"] for s in steps],
                [float("nan") if y is None else y for y in ys],
                color=COLORS[name],
                label=name,
                **style,
            )
        ax.set(title=title, xlabel="training step", ylabel=metric)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.3)
        ax.legend()
    ax = axes[1, 1]
    for shift, name in ((-0.2, "stock"), (0.2, "prefix")):
        heights = [row[f"{name}_s"] for row in report["ratios"].values()]
        ax.bar([i + shift for i in range(len(heights))], heights, width=0.4, color=COLORS[name], label=name)
    for i, row in enumerate(report["ratios"].values()):
        top = max(row["stock_s"], row["prefix_s"])
        ax.text(i, top, f"{row['ratio']:.2f}x", ha="center", va="bottom")
    ax.set_xticks(range(len(report["ratios"])), [title.replace("_", "\n", 1) for title in report["ratios"]])
    ax.set(title="Median time per step, and stock / prefix", ylabel="seconds")
    ax.margins(y=0.25)
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)
    ax.legend(loc="upper center", ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def finish(report: dict[str, Any], output: Path, console: Console) -> int:
    """Print and write the report; return the demo's exit status, 1 with every problem in words if there is one."""
    show(report, console)
    save(report, output)
    console.print(f"report: {output / 'report.json'} and report.png")
    for arm in report["arms"].values():
        log = Path(arm["log"])
        if arm["error"] and log.exists():
            console.print(f"last lines of {log}:", style="bold")
            tail = log.read_text(errors="replace").splitlines()[-25:]
            console.print("\n".join(tail), markup=False, highlight=False)
    for problem in report["problems"]:
        console.print(f"FAILED: {problem}", style="bold red", highlight=False, soft_wrap=True, markup=False)
    if not report["problems"]:
        agrees = ", step 1 agrees" if report["first_step"]["same_rollouts"] else ""
        console.print(f"OK: both arms trained{agrees}, and the prefix was shared", style="bold green")
    return 1 if report["problems"] else 0


def _device() -> dict[str, Any]:
    import torch

    return {
        "name": device_name(),
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
