"""What `verl-prefix ab` says: tolerances and verdict, a table while it runs, report.json, report.md and report.png.

The tolerances are the project's.

1. Against a truth one precision above: log-probs and gradients (all of them, and the worst parameter's) from the same
   weights, and the weights after steps of their own, within 1.3 times stock's own error, in fp32 or within 5e-6.
2. Against stock from the same weights, at every step, log-probs of both passes, gradients and loss: in fp32 within
   5e-6, in bf16 within 2.3 = 1 + 1.3 times stock's own error: stock is 1 from the truth, ours at most 1.3.
3. Where stock itself, its micro-batches repacked, keeps the first rule and differs from stock by more than the second
   allows, within 1.3 times as much.

Why the first rule has 5e-6 in fp32: an error is a few roundings there, and how many depends on where a CPU's matmul
cuts its sums. Stock's lm_head also sums over the prompt's zeros, which cuts the sum over response tokens into more
pieces: by torch's own matmul alone, the weight's gradient over 8 rows of 16 response tokens is off by 9e-8 with those
zeros and by 2e-7 without them, as in ours; over 8 rows of 64 tokens 1.5e-7 and 2.4e-7 (AMD EPYC, AVX2, MKL 2024.2).

Why gradients are compared from the same weights: fp32 runs drift apart, since AdamW makes whole steps of gradients that
are rounding, and then differ by more than an engine does. Over ten recorded steps with each arm on its own weights,
stock with its micro-batches repacked missed a float64 run by 0.80 to 1.38 times as much as stock did (worst parameter,
three choices of MKL's and torch's kernels), ours by 0.83 to 1.15 times; from the same weights both by 0.98 to 1.05.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from verl_prefix.engine.trace import PACKAGES, TraceError
from verl_prefix.tools.plots import Bars, Curves, save
from verl_prefix.versions import device_name, git_state, package_versions

SCHEMA = "verl_prefix.tools.ab.command/2"  # 1: truth_errors were of every arm's own weights
RELATIVE = 5e-6
FACTOR = 1.3
PASSES = ("log_probs", "update", "optimizer")
STEPS = "steps.jsonl"  # what is measured, step by step, until report.json holds it
FILES = ("report.json", "report.md", "report.png", STEPS)
SAME_WEIGHTS = ("log_probs", "infer_log_probs", "grads", "worst_grad", "loss")
TRUTH = ("log_probs", "grads", "worst_grad", "params")


def refuse_overwrite(output: Path, force: bool) -> None:
    """Raises TraceError where `output` is a file, or holds a report or the steps of a replay that was killed."""
    if output.exists() and not output.is_dir():
        raise TraceError(f"--out {output} is a file; give a folder")
    for path in (output / name for name in FILES):
        if path.exists() and path.stat().st_size and not force:
            raise TraceError(f"{path} exists; add --force to replace it, or give another --out")


def same_weights_limits(
    dtype: str, stock_error: dict[str, float], repacked: dict[str, float] | None
) -> dict[str, float]:
    """How far each figure from the same weights may be from stock's; without those that there is nothing to judge by.

    Args:
        stock_error: stock's own against the truth, empty if unknown.
        repacked: the same figures of stock with its micro-batches repacked, None if it did not run; not counted where
            no truth tells whether it is right.
    """
    limits = {}
    for name in SAME_WEIGHTS:
        error = stock_error.get(name.removeprefix("infer_"))
        limit = RELATIVE if dtype == "fp32" else error and (1 + FACTOR) * error
        if limit:  # none of a low precision's loss: one number, by luck close or not
            limits[name] = max(limit, FACTOR * repacked[name]) if repacked and stock_error else limit
    return limits


def _truth_limits(dtype: str, stock_error: dict[str, float]) -> dict[str, float]:
    """How far each figure may be from the truth, by stock's own error."""
    floor = RELATIVE if dtype == "fp32" else 0.0
    return {name: max(floor, FACTOR * stock_error[name]) for name in TRUTH if name in stock_error}


def tolerances(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Every tolerance that was checked: arm, name, limit, value, the step of the worst value or None, and `holds`.

    Args:
        measured: dtype, judged (arms), num_steps (to be replayed) and steps (what `ab.replay` measured).
    """
    found = []

    def check(arm: str, name: str, value: float, limit: float, step: int | None) -> None:
        found.append(dict(arm=arm, name=name, value=value, limit=limit, step=step, holds=value <= limit < math.inf))

    steps = measured["steps"]
    errors = [step["truth_errors"] for step in steps if step["truth_errors"]]
    stock_error = {k: statistics.fmean(e["stock"][k] for e in errors) for k in errors[0]["stock"]} if errors else {}

    def worst(arm: str, name: str) -> tuple[float, int]:
        step = max(steps, key=lambda step: _rank(step["arms"][arm]["same_weights"][name]))
        return step["arms"][arm]["same_weights"][name], step["step"]

    def error(arm: str, name: str) -> float:
        return statistics.fmean(e[arm][name] for e in errors)

    repacked, truth_limits = None, _truth_limits(measured["dtype"], stock_error)
    if "stock_repacked" in steps[0]["arms"] and errors:
        right = all(error("stock_repacked", name) <= limit for name, limit in truth_limits.items())
        repacked = {name: worst("stock_repacked", name)[0] for name in SAME_WEIGHTS} if right else None
    limits = same_weights_limits(measured["dtype"], stock_error, repacked)
    for arm in measured["judged"]:
        for name, limit in limits.items():
            value, step = worst(arm, name)
            check(arm, f"same weights: {name}", value, limit, step)
        for name, limit in truth_limits.items():
            check(arm, f"error against the truth: {name}", error(arm, name), limit, None)
        figures = [
            [
                *step["arms"][arm]["same_weights"].values(),
                *(step["arms"][arm]["values"][k] for k in ("loss", "grad_norm")),
                *(step["arms"][arm]["own_weights"][k] for k in ("log_probs_max", "grads")),
                *step["arms"][arm]["own_weights"]["params"].values(),
            ]
            for step in steps
        ]
        bad = sum(not all(math.isfinite(x) for x in row) for row in figures)
        check(arm, "steps with figures that are not finite", float(bad), 0.0, None)
        # What compares nothing shows nothing.
        values = [(step["arms"]["stock"]["values"]["grad_norm"], step["arms"][arm]["values"]) for step in steps]
        norms = [norm for norm, _ in (values if measured["dtype"] == "fp32" else values[: len(errors)])]
        check(arm, "no step that is judged has a gradient", float(not any(norms)), 0.0, None)
        shared = any(ours.get("prefix/reuse_fraction") for _, ours in values)
        check(arm, "no step shares a prefix", float(not shared), 0.0, None)
        check(arm, "steps that were not replayed", float(measured["num_steps"] - len(steps)), 0.0, None)
    return found


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _timed(steps: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The steps whose seconds of this pass count: an optimizer's first step allocates its state."""
    return steps[1:] if name == "optimizer" and len(steps) > 1 else steps


def _passes(steps: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    """Medians with spread per pass, the median of stock's seconds over ours step by step (steps have prompts of other
    lengths), and the most memory that a pass added."""
    found = {}
    for name in PASSES:
        seconds, stock = ([step["arms"][a]["seconds"][name] for step in _timed(steps, name)] for a in (arm, "stock"))
        added = [step["arms"][arm]["added_gib"].get(name) for step in steps]
        found[name] = {
            "median_s": statistics.median(seconds),
            "min_s": min(seconds),
            "max_s": max(seconds),
            "speedup": statistics.median(a / b for a, b in zip(stock, seconds, strict=True)),
            "added_gib": None if None in added else max(added),
        }
    return found


def build(measured: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    """The report; `holds` is the verdict. measured: as in `tolerances`; described: what it was measured of and with."""
    steps = measured["steps"]
    checked = tolerances(measured)
    notes = []
    gap = steps[0].get("recorded_log_prob_gap")
    if (gap or 0.0) > 0.1:
        notes.append(
            f"stock's log-probs of step 1 are up to {gap:.3g} from the recorded old ones: the trace was recorded from "
            "other weights, or its first update was not on-policy"
        )
    failed = {row["arm"] for row in checked if not row["holds"]}
    missed = {row["name"].partition(":")[0] for row in checked if not row["holds"]}
    if missed == {"same weights"} and "stock_repacked" not in steps[0]["arms"]:
        notes.append(
            "only figures from the same weights are over their limits: add stock_repacked to --arms and --truth-steps "
            "of 1 or more to see how far stock is from itself, which then counts"
        )
    places = [(arm, {"step": step["step"]} | place) for step in steps for arm, place in step["first_diverging"].items()]
    return {
        "schema": SCHEMA,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **described,
        "notes": notes,
        "holds": bool(checked) and not failed,
        "tolerances": checked,
        "first_diverging": {arm: place for arm, place in places if arm in failed},
        "passes": {name: _passes(steps, name) for name in steps[0]["arms"]},
        "recorded_log_prob_gap": gap,
        "steps": steps,
    }


def provenance() -> dict[str, Any]:
    """Versions, device, and the commit of the checkout that this file is in."""
    return {
        "versions": package_versions(PACKAGES),
        "device": device_name(),
        "git": git_state(),
    }


class Display:
    """A table and a progress bar with ETA while the steps run; one line per step where there is no terminal."""

    def __init__(self, num_steps: int, arms: tuple[str, ...], shown: bool) -> None:
        self.arms, self.shown = arms, shown
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn())
        self.progress = Progress(TextColumn("step"), *columns)
        self.task = self.progress.add_task("", total=num_steps)
        self.table = Table("step", "arm", "grads, same weights", "log-probs, same weights", "weights, max", "update")
        self.live = Live(Group(self.table, self.progress), transient=False)

    def __enter__(self) -> "Display":
        if self.shown and self.live.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def step(self, record: dict[str, Any]) -> None:
        """Shows a step's figures: differences from stock, seconds of the update and stock's over them."""
        stock = record["arms"]["stock"]["seconds"]["update"]
        rows = []
        for name in self.arms:
            arm = record["arms"][name]
            same, update = arm["same_weights"], arm["seconds"]["update"]
            errors = (
                f"{same['grads']:.1e}",
                f"{same['log_probs']:.1e}",
                f"{arm['own_weights']['params']['max_fp32']:.1e}",
            )
            rows.append((str(record["step"]), name, *errors, f"{update:.2f} s, {stock / update:.2f}x"))
        for row in rows:
            self.table.add_row(*row)
        self.progress.advance(self.task)
        if self.shown and not self.live.console.is_terminal:
            for row in rows:
                print("step {} {}: grads {}, log-probs {}, weights {}, update {}".format(*row), flush=True)


def markdown(report: dict[str, Any]) -> str:
    """report.md."""
    steps, dtype = report["steps"], report["dtype"]
    verdict = "every tolerance holds" if report["holds"] else "NOT every tolerance holds"
    lines = [
        f"# A/B against the stock actor: {verdict}",
        "",
        f"{len(steps)} steps, {report['ranks']} ranks, {dtype}, {report['device']}, commit {report['git']['commit']}; "
        f"model {report['model']['name']}.",
        "",
        *table(
            ("arm", "tolerance", "worst value", "limit", "step", "holds"),
            [
                (t["arm"], t["name"], f"{t['value']:.2e}", f"{t['limit']:.2e}", t["step"] or "all", _yes(t["holds"]))
                for t in report["tolerances"]
            ],
        ),
    ]
    for arm, place in report["first_diverging"].items():
        lines += [
            f"First divergence of {arm}: step {place['step']}, {place['quantity']} of {place['layer']}, relative error "
            f"{place['error']:.2e}.",
            "",
        ]
    lines += [f"Note: {note}.\n" for note in report["notes"]]
    lines += table(
        ("arm", "pass", "n", "median s", "min to max", "speed-up", "added GiB"),
        [
            (arm, name, len(_timed(steps, name)), f"{row['median_s']:.3f}",
             f"{row['min_s']:.3f} to {row['max_s']:.3f}", f"{row['speedup']:.2f}",
             "-" if row["added_gib"] is None else f"{row['added_gib']:.3f}")
            for arm, passes in report["passes"].items() for name, row in passes.items()
        ],
    )  # fmt: skip
    last = {arm: steps[-1]["arms"][arm] for arm in report["passes"]}
    keys = ("max_fp32", "mean_fp32", "rmse_fp32", "max_bf16", "rmse_bf16")
    distances = {arm: result["own_weights"]["params"] for arm, result in last.items() if arm != "stock"}
    drift = [(arm, *(f"{row[key]:.2e}" for key in keys)) for arm, row in distances.items()]
    lines += [f"Weights after step {len(steps)}, difference from stock (every arm with its own optimizer state):", ""]
    lines += table(("arm", "max", "mean", "RMSE", "max after bf16 rounding", "RMSE after bf16 rounding"), drift)
    lines += [
        "What the steps report, stock's last value and every arm's largest difference from stock at any step:",
        "",
    ]
    lines += table(("metric", "stock", *distances), _metric_rows(steps, list(distances)))
    errors = [step["truth_errors"] for step in steps if step["truth_errors"]]
    if errors:
        above = "float64" if dtype == "fp32" else "fp32"
        lines += [
            f"Mean relative error against a {above} truth over the first {len(errors)} steps, log-probs and gradients "
            "from the same weights, weights of runs of their own:",
            "",
        ]
        means = {arm: {k: statistics.fmean(e[arm][k] for e in errors) for k in errors[0][arm]} for arm in errors[0]}
        lines += table(
            ("arm", "log-probs", "gradients", "weights"),
            [(arm, *(f"{row[k]:.2e}" for k in ("log_probs", "grads", "params"))) for arm, row in means.items()],
        )
    return "\n".join(lines)


def _metric_rows(steps: list[dict[str, Any]], arms: list[str]) -> list[tuple[str, ...]]:
    rows = []
    for name, last in steps[-1]["arms"]["stock"]["values"].items():
        cells = []
        for arm in arms:
            values = [[s["arms"][a]["values"].get(name) for a in (arm, "stock")] for s in steps]
            cells.append("-" if any(None in pair for pair in values) else f"{max(abs(a - b) for a, b in values):.1e}")
        rows.append((name, f"{last:.6g}", *cells))
    return rows


def _short(value: Any) -> Any:
    """Floats with six digits: a report of many steps is for reading. JSON has no word for NaN and infinity but null."""
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_short(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def table(head: tuple[str, ...], rows: list[tuple]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ("---",) * len(head), *rows)] + [""]


def draw(report: dict[str, Any], path: Path) -> bool:
    """Drift of the weights, errors against the truth, seconds and memory of each pass; False: see `plots.save`."""
    steps, arms = report["steps"], list(report["passes"])
    known = [step for step in steps if step["truth_errors"]]

    def drift(key: str, title: str) -> Curves:
        ys = [(arm, [step["arms"][arm]["own_weights"]["params"][key] for step in steps]) for arm in arms[1:]]
        return Curves(title, "difference of weights", [s["step"] for s in steps], ys, x="replayed step", log=True)

    def bars(key: str, title: str, unit: str, places: list[str]) -> Bars:
        heights = {arm: [report["passes"][arm][name][key] for name in PASSES] for arm in arms}
        return Bars(title, unit, "pass", places, heights)

    truth = [(arm, [step["truth_errors"][arm]["params"] for step in known]) for arm in arms if known]
    panels = [
        drift("max_fp32", "Weights: largest difference from stock"),
        drift("rmse_fp32", "Weights: RMSE from stock"),
        Curves(
            "Weights: error against the truth", "relative error", [s["step"] for s in known], truth,
            x="replayed step", log=True,
        ),
        bars("median_s", "Median seconds of a pass", "seconds", [f"{p}, n = {len(_timed(steps, p))}" for p in PASSES]),
        bars("added_gib", "Memory that a pass adds at its peak", "GiB", list(PASSES)),
    ]  # fmt: skip
    where = f"{report['ranks']} rank{'s' * (report['ranks'] > 1)}, {report['dtype']}"
    title = f"Replayed updates of {report['model']['name']}: {len(steps)} steps, {where}"
    return save(path, title, panels, columns=3, width=15)


def finish(output: Path, num_steps: int, judged: list[str], described: dict[str, Any], failure: str | None) -> int:
    """Writes and prints the report of the steps that were measured; returns the exit code, 2 after a `failure`.

    Raises:
        TraceError: none was.
    """
    steps = [json.loads(line) for line in (output / STEPS).read_text().splitlines()]
    if not steps:
        (output / STEPS).unlink()
        raise TraceError(failure)
    measured = {"dtype": described["dtype"], "judged": judged, "num_steps": num_steps, "steps": steps}
    code = write(build(measured, described), markdown, draw, output)
    (output / STEPS).unlink()
    if failure:
        print(f"the report is of the first {len(steps)} of {num_steps} steps: {failure}")
    return 2 if failure else code


def write(
    report: dict[str, Any], words: Callable[[dict], str], plot: Callable[[dict, Path], bool], output: Path
) -> int:
    """Writes report.json, report.md and, if it can, report.png, and prints what failed; 0 where all holds, else 1."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.json").write_text(json.dumps(_short(report)) + "\n")  # first: it is the measurement
    text = words(report)
    (output / "report.md").write_text(text)
    drawn = plot(report, output / "report.png")
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(text)
    for row in report["tolerances"]:
        if not row["holds"]:
            where = f" at step {row['step']}" if row.get("step") else ""
            arm = f"{row['arm']}, " if "arm" in row else ""
            console.print(
                f"FAILED: {arm}{row['name']}: {row['value']:.3e} > {row['limit']:.3e}{where}", style="bold red"
            )
    console.print(f"report: {output / 'report.json'}, report.md{', report.png' if drawn else ''}")
    return 0 if report["holds"] else 1
