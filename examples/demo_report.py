"""The report of `make demo` for the eye: tables, report.json, report.png, and the last lines of a run that failed.

python examples/demo_report.py examples/results/demo_*.json     derives and draws again what follows from the steps
"""

import json
import sys
from pathlib import Path
from typing import Any

from demo_verdict import CURVES, PREFIX, TIMINGS, derive, find, number
from rich.console import Console
from rich.table import Table

from verl_prefix.files import write_whole
from verl_prefix.tools.ab.runs import FLOOR, TOLERANCE, relative_difference
from verl_prefix.tools.plots import Bars, Curves
from verl_prefix.tools.plots import save as save_plot

UNITS = {"reward": "mean reward", "loss": "loss", "gradient norm": "L2 norm"}
LEAST_SPAN = 0.1  # of the rewards' axis: a few steps move them little, and `make learn` has a run that learns


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
        if any(find(step["data"], name) is not None for arm in steps.values() for step in arm):
            table.add_row(title, *(number(find(step["data"], name), 3) for arm in steps.values() for step in arm))
    console.print(table)

    medians = Table("medians, without step 1", title="stock / prefix")
    for title in ("n", "stock", "prefix", "ratio", "min to max"):
        medians.add_column(title, justify="right")
    for title, row in report["ratios"].items():
        seconds = (f"{row['stock_s']:.2f} s", f"{row['prefix_s']:.2f} s")
        spread = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
        medians.add_row(title, str(len(row["ratios"])), *seconds, _ratio(row), spread)
    memory = {name: arm["peak_rss_mib"] for name, arm in report["arms"].items()}
    for role in [role for role in memory["stock"] if role in memory["prefix"]]:
        medians.add_row(f"{role}, most RSS", "", *(f"{memory[name][role]} MiB" for name in ("stock", "prefix")), "")
    if report["token_ratio"]:
        medians.add_row("tokens computed", "", "", "", _times(report["token_ratio"]))
    console.print(medians)

    if tokens := report.get("tokens"):
        counted = Table("tokens of step 1", "", "stock / this", title="computed once")
        for name, count in tokens.items():
            counted.add_row(name, str(count), _times(tokens["stock"] / count))
        console.print(counted)

    if report["first_step"] and report["first_step"]["same_rollouts"]:
        first = Table("step 1", title="same weights, same responses")
        for title in ("stock", "prefix", "relative difference"):
            first.add_column(title, justify="right")
        for name, row in report["first_step"]["metrics"].items():
            first.add_row(name, number(row["stock"], 7), number(row["prefix"], 7), _apart(row))
        console.print(first)
    for note in report["notes"]:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def _ratio(row: dict[str, Any]) -> str:
    """A timing's ratio; or why there is none."""
    if row["ratio"] is not None:
        return _times(row["ratio"])
    return "uneven" if len(row["ratios"]) > 1 else "one step"


def _apart(row: dict[str, Any]) -> str:
    """The relative difference of a metric of step 1; of numbers that are zero to rounding there is none."""
    both = [value for value in (row["stock"], row["prefix"]) if value is not None]
    if len(both) == 2 and max(map(abs, both)) <= FLOOR:
        return "both 0"
    return "equal" if row["relative_difference"] == 0 else number(row["relative_difference"], 2)


def save(report: dict[str, Any], output: Path) -> bool:
    """Write report.json, and report.png if both arms logged a step; return whether there is one."""
    write_whole(output / "report.json", json.dumps(report, indent=1) + "\n")
    return all(arm["steps"] for arm in report["arms"].values()) and draw(report, output / "report.png")


def draw(report: dict[str, Any], path: Path) -> bool:
    """Draw the median seconds side by side, how far gradient norms are apart, tokens of rows of turns, and both arms'
    reward, loss and gradient norm over each other."""
    config, arms = report["config"], report["arms"]
    steps = sorted({step["step"] for arm in arms.values() for step in arm["steps"]})

    def curve(title: str, metric: str) -> Curves:
        least = LEAST_SPAN if title == "reward" else 0.0
        return Curves(
            f"{title.capitalize()} ({metric})", UNITS[title], steps, list(logged(metric).items()), least=least
        )

    def logged(metric: str) -> dict[str, list[float | None]]:
        found = {name: {step["step"]: step["data"].get(metric) for step in arm["steps"]} for name, arm in arms.items()}
        return {name: [values.get(step) for step in steps] for name, values in found.items()}

    norms = zip(*logged(CURVES["gradient norm"]).values(), strict=True)
    apart = [None if None in pair else relative_difference(*pair) for pair in norms]
    first = {None: "are not known", 0: "are equal"}.get(apart[0], f"are {apart[0] or 0:.1e} apart")
    equal = Curves(
        f"Gradient norms {first} in step 1", "relative difference", steps, [("prefix", apart)], log=True,
        limit=("tolerance of step 1", TOLERANCE), limited=1, zero="equal",
    )  # fmt: skip
    ratios = report["ratios"]
    step = ratios.get("step", {}).get("ratio")
    seconds = Bars(
        "A step is " + (f"{step:.1f} times as fast as stock's" if step else "timed in seconds"),
        "median seconds without step 1",
        "timing",
        [title.replace("_", "\n", 1) + f"\nn = {len(row['ratios'])}" for title, row in ratios.items()],
        {name: [row[f"{name}_s"] for row in ratios.values()] for name in arms},
        texts=[_ratio(row) for row in ratios.values()],
    )
    tokens = report.get("tokens") or {}
    computed = Bars(
        "Trees compute " + (f"{tokens['stock'] / tokens['trees']:.1f} times fewer tokens" if tokens else ""),
        "tokens that a step computes", "rows of turns; one level shares whole prompts alone", ["step 1"],
        {name: [n] for name, n in tokens.items()}, numbers="{:.0f}",
    )  # fmt: skip
    title = f"verl GRPO, stock actor and shared prefix: {config['model']}, {config['workload']}"
    panels = [seconds, equal, computed, *(curve(*item) for item in CURVES.items())]
    return save_plot(path, title, panels, columns=3, width=15)


def finish(report: dict[str, Any], output: Path, console: Console) -> int:
    """Print and write the report; return the demo's exit status, 1 with every problem in words if there is one."""
    show(report, console)
    drawn = save(report, output)
    console.print(f"report: {output / 'report.json'}{' and report.png' if drawn else ''}")
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


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        saved = json.loads(path.read_text())
        derive(saved)
        write_whole(path, json.dumps(saved, indent=1) + "\n")
        if path.with_suffix(".png").exists():
            draw(saved, path.with_suffix(".png"))
