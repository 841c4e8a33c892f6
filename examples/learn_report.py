"""What runs of `make learn` logged: curves by step, a verdict on the held-out questions, a plot and a table."""

import bisect
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo_verdict import CURVES, PREFIX, TIMINGS
from rich.console import Console
from rich.table import Table

from verl_prefix.tools.plots import Bars, Curves
from verl_prefix.tools.plots import save as save_plot
from verl_prefix.tools.report import provenance

SCHEMA = "verl_prefix.learn/1"
LEAST_RISE, LEAST_ERRORS, SEEDS = 0.10, 3.0, 2
WINDOW = 5  # steps whose mean reward is a run's reward at its start and at its end
ACCURACY = "val-core/musique/acc/mean@1"
REWARD, SECONDS = CURVES["reward"], TIMINGS["step"]
Curve = dict[int, dict[str, float]]  # what verl logged, by step; step 0 is the start after SFT


def read(run: Path) -> Curve:
    """Return what all calls of a run logged. A step that was lost with its call is in two of them: the later one
    counts. The line in which a call was cut off is passed over."""
    curve: Curve = {}
    for path in sorted(run.glob("call_*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                logged = json.loads(line)
            except json.JSONDecodeError:
                continue
            curve[logged["step"]] = curve.get(logged["step"], {}) | logged["data"]
    return dict(sorted(curve.items()))


def finished(run: Path, steps: int) -> bool:
    return ACCURACY in read(run).get(steps, {})


def runs(output: Path) -> dict[str, Curve]:
    """Return the curve of each run, by its name."""
    curves = {
        path.name: read(path) for path in sorted(output.iterdir()) if re.fullmatch(r"(stock|prefix)_\d+", path.name)
    }
    return {name: curve for name, curve in curves.items() if curve}


def start_accuracy(output: Path) -> float | None:
    """Return the exact match after SFT, from which every run starts; None where no run has measured it."""
    return next((curve[0][ACCURACY] for curve in runs(output).values() if 0 in curve), None)


def judge(start: float, end: float, questions: int) -> dict[str, Any]:
    """Return the rise of a share of `questions`, its standard error and whether it is enough.

    The error is that of two independent shares. Both are of the same questions, which makes the true one smaller.
    """
    rise, error = end - start, math.sqrt((start * (1 - start) + end * (1 - end)) / questions)
    return {"rise": rise, "standard_error": error, "enough": rise >= max(LEAST_RISE, LEAST_ERRORS * error)}


def describe(curve: Curve, start: float | None, steps: int, questions: int) -> dict[str, Any]:
    """Return a run's exact match and reward at its start and its end, and what was logged by step."""
    logged = {step: data for step, data in curve.items() if SECONDS in data}
    rewards = [data[REWARD] for data in logged.values()]
    end = curve.get(steps, {}).get(ACCURACY)
    return {
        "exact_match": {"start": start, "end": end},
        **(judge(start, end, questions) if start is not None and end is not None else {}),
        "reward": {"start": _spread(rewards[:WINDOW]), "end": _spread(rewards[-WINDOW:])},
        "minutes": sum(data[SECONDS] for data in logged.values()) / 60,
        "steps": [
            {"step": step} | {key: data[key] for key in sorted(data) if _kept(key)} for step, data in logged.items()
        ],
    }


def _spread(rewards: list[float]) -> dict[str, float] | None:
    """Return mean and standard deviation over steps."""
    if len(rewards) < 2:
        return None
    return {"mean": statistics.fmean(rewards), "deviation": statistics.stdev(rewards), "steps": len(rewards)}


def _kept(key: str) -> bool:
    shown = {*CURVES.values(), *TIMINGS.values(), "response_length/mean"}
    return key in shown or key.endswith(PREFIX)


def build(output: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the report; `problems` says in words what keeps it from success: what is missing, and what failed.

    Args:
        config: of the runs, with their "size" (its "steps"), the "worlds" and which of them is the "test".
    """
    start, steps = start_accuracy(output), config["size"]["steps"]
    questions = config["worlds"][config["test"]][0]
    described = {name: describe(curve, start, steps, questions) for name, curve in runs(output).items()}
    done = {name: run for name, run in described.items() if "rise" in run}
    missing = [
        f"{num} {arm} runs of {steps} steps are wanted, there are {there}"
        for arm, num in (("prefix", SEEDS), ("stock", 1))
        if (there := sum(name.startswith(arm) for name in done)) < num
    ]
    failed = [
        f"{name}: exact match rose by {run['rise']:.3f}, and {LEAST_RISE} and {LEAST_ERRORS:g} standard errors of "
        f"{run['standard_error']:.3f} are wanted"
        for name, run in done.items()
        if name.startswith("prefix") and not run["enough"]
    ]
    return {
        **provenance(SCHEMA),
        "config": config,
        "runs": described,
        "problems": {"missing": missing, "failed": failed},
    }


def draw(report: dict[str, Any], path: Path) -> bool:
    """Draw reward by step and by minute, seconds of each step, and exact match at both ends of each run."""
    runs_of = sorted(report["runs"].items(), key=lambda item: not item[0].startswith("stock"))  # stock's first
    named = {name.replace("_", ", seed "): run for name, run in runs_of if run["steps"]}
    if not named:
        return False
    steps = range(1, max(step["step"] for run in named.values() for step in run["steps"]) + 1)
    minutes = range(math.ceil(max(run["minutes"] for run in named.values())) + 1)

    def by_step(run: dict[str, Any], key: str) -> list[float | None]:
        values = {step["step"]: step[key] for step in run["steps"]}
        return [values.get(step) for step in steps]

    def by_minute(run: dict[str, Any]) -> list[float | None]:
        ends = list(itertools.accumulate(step[SECONDS] / 60 for step in run["steps"]))
        smooth = moving([step[REWARD] for step in run["steps"]])
        return [
            smooth[i - 1] if 0 < (i := bisect.bisect_right(ends, m)) and m <= ends[-1] + 1 else None for m in minutes
        ]

    def each(of: Callable[[dict[str, Any]], float | None], digits: int) -> str:
        """A number of every run, with its arm: "39 (stock), 8 and 9 (prefix)"."""
        arms: dict[str, list[str]] = {}
        for name, run in named.items():
            value = of(run)
            arms.setdefault(name.partition(",")[0], []).append("-" if value is None else f"{value:.{digits}f}")
        return ", ".join(f"{' and '.join(values)} ({arm})" for arm, values in arms.items())

    rewards = {name: moving(by_step(run, REWARD)) for name, run in named.items()}
    pairs = zip(rewards.get("prefix, seed 1", ()), rewards.get("stock, seed 1", ()), strict=False)
    apart = max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=math.nan)
    minutes_of = each(lambda run: run["minutes"], 0)
    seconds_of = each(lambda run: statistics.median(step[SECONDS] for step in run["steps"]), 0)
    exact_match = each(lambda run: run["exact_match"]["end"], 2)
    reward = f"mean reward of {WINDOW} steps"
    by_time = [(name, by_minute(run)) for name, run in named.items()]
    seconds = [(name, by_step(run, SECONDS)) for name, run in named.items()]
    panels = [
        Curves(f"Rewards of seed 1 are within {apart:.2f} of stock's", reward, steps, [*rewards.items()]),
        Curves(f"Minutes of all steps: {minutes_of}", reward, minutes, by_time, x="minutes of training"),
        Curves(f"Seconds of a step: {seconds_of}", "seconds", steps, seconds),
        Bars(
            f"Exact match rises to {exact_match}",
            f"share of {report['config']['worlds'][report['config']['test']][0]} held-out questions",
            "weights",
            ["after SFT", f"after {report['config']['size']['steps']} steps"],
            {name: [run["exact_match"]["start"], run["exact_match"]["end"]] for name, run in named.items()},
        ),
    ]
    return save_plot(path, "verl GRPO of SmolLM2-135M on a CPU, stock actor and shared prefix", panels)


def moving(values: list[float | None]) -> list[float | None]:
    """Return at each step the mean of what is known of the last `WINDOW` values; None where the value is unknown."""
    means: list[float | None] = []
    for i, value in enumerate(values):
        known = [v for v in values[max(0, i + 1 - WINDOW) : i + 1] if v is not None]
        means.append(None if value is None else statistics.fmean(known))
    return means


def show(report: dict[str, Any], console: Console) -> None:
    table = Table("mean (deviation)")
    rows: dict[str, list[str]] = {}
    for name, run in report["runs"].items():
        table.add_column(name, justify="right", no_wrap=True)
        cells = {"steps": str(len(run["steps"])), "minutes": f"{run['minutes']:.1f}"}
        cells |= {f"exact match, {end}": "-" if x is None else f"{x:.3f}" for end, x in run["exact_match"].items()}
        cells["rise (standard error)"] = f"{run['rise']:.3f} ({run['standard_error']:.3f})" if "rise" in run else "-"
        for end, s in run["reward"].items():
            cells[f"reward of {WINDOW} steps, {end}"] = f"{s['mean']:.2f} ({s['deviation']:.2f})" if s else "-"
        for title, cell in cells.items():
            rows.setdefault(title, []).append(cell)
    for title, row in rows.items():
        table.add_row(title, *row)
    console.print(table)
    for kind, problems in report["problems"].items():
        for problem in problems:
            console.print(f"{kind}: {problem}", highlight=False, soft_wrap=True)
    if not any(report["problems"].values()):
        console.print("OK: exact match rises enough in every run of the prefix arm")
