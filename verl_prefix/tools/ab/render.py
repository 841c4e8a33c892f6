"""The report of `verl-prefix ab` for the eye: lines while it runs, Markdown, plots, and the files of both."""

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from verl_prefix.files import write_whole
from verl_prefix.tools.ab.verdict import PASSES, as_ratio, shared_steps, timed
from verl_prefix.tools.plots import Bars, Curves, save
from verl_prefix.tools.report import Table, code_of, show
from verl_prefix.tools.report import markdown as as_markdown

STEPS = "steps.jsonl"  # the steps that are measured, until report.json holds them all
FILES = ("report.json", "report.md", "report.png", STEPS)


def refuse_overwrite(output: Path, force: bool) -> None:
    """Raises ValueError where `output` holds a report, or the steps of a replay that was killed."""
    for path in (output / name for name in FILES):
        if path.exists() and path.stat().st_size and not force:
            raise ValueError(f"{path} exists; add --force to replace it, or give another --out")


def print_step(step: dict[str, Any], arms: tuple[str, ...]) -> None:
    """Prints a step's figures: differences from stock, seconds of the update and stock's over them."""
    stock = step["arms"]["stock"]["seconds"]["update"]
    for name in arms:
        arm = step["arms"][name]
        same, seconds = arm["same_weights"], arm["seconds"]["update"]
        tqdm.write(
            f"step {step['step']} {name}: grads {same['grads']:.1e}, log-probs {same['log_probs']:.1e} from the same "
            f"weights, weights {arm['own_weights']['params']['max_fp32']:.1e}, update {seconds:.2f} s, "
            f"{stock / seconds:.2f}x",
            file=sys.stdout,
        )
        sys.stdout.flush()


def blocks(report: dict[str, Any]) -> list[str | Table]:
    """Text and tables of report.md."""
    steps, dtype = report["steps"], report["dtype"]
    verdict = "every tolerance holds" if report["holds"] else "NOT every tolerance holds"
    failed = {t["arm"] for t in report["tolerances"] if not t["holds"]}
    checked = [
        (t["arm"], t["name"], f"{t['value']:.2e}", f"{t['limit']:.2e}", t["step"] or "all",
         "yes" if t["holds"] else "**no**")
        for t in report["tolerances"] if t["arm"] in failed
    ]  # fmt: skip
    where = f"{report['ranks']} rank{'s' * (report['ranks'] > 1)}, {dtype}"
    lines: list[str | Table] = [
        f"# A/B against the stock actor: {verdict}",
        f"{len(steps)} step{'s' * (len(steps) > 1)}, {where}, {report['device']}, {code_of(report)}; "
        f"model {report['model']['name']}.",
    ]
    for arm in dict.fromkeys(t["arm"] for t in report["tolerances"]):
        holds = [t["holds"] for t in report["tolerances"] if t["arm"] == arm]
        worst = max(step["arms"][arm]["same_weights"]["grads"] for step in steps)
        lines.append(
            f"{arm}: {sum(holds)} of {len(holds)} tolerances hold; gradients within {worst:.1e} of stock's; "
            f"{shared_steps(steps, arm)} of {len(steps)} steps shared a prefix."
        )
    if checked:
        lines.append(Table(("arm", "tolerance", "worst value", "limit", "step", "holds"), checked))
    for arm, where in report["first_diverging"].items():
        at = f"step {where['step']}, {where['quantity']} of {where['layer']}"
        lines.append(f"First divergence of {arm}: {at}, relative error {where['error']:.2e}.")
    lines += [f"Note: {note}." for note in report["notes"]]
    passes = [
        (arm, name, n := len(timed(steps, name)), f"{row['median_s']:.3f}", f"{row['min_s']:.3f} to {row['max_s']:.3f}",
         as_ratio(row["speedup"], n), "-" if row["added_gib"] is None else f"{row['added_gib']:.3f}")
        for arm, of_arm in report["passes"].items() for name, row in of_arm.items()
    ]  # fmt: skip
    lines.append(Table(("arm", "pass", "n", "median s", "min to max", "speed-up", "added GiB"), passes))
    keys = ("max_fp32", "mean_fp32", "rmse_fp32", "max_bf16", "rmse_bf16")
    distances = {arm: steps[-1]["arms"][arm]["own_weights"]["params"] for arm in report["passes"] if arm != "stock"}
    drift = [(arm, *(f"{row[key]:.2e}" for key in keys)) for arm, row in distances.items()]
    lines.append(f"Weights after step {len(steps)}, difference from stock (every arm with its own optimizer state):")
    lines.append(Table(("arm", "max", "mean", "RMSE", "max after bf16 rounding", "RMSE after bf16 rounding"), drift))
    if errors := [step["truth_errors"] for step in steps if step["truth_errors"]]:
        above = "float64" if dtype == "fp32" else "fp32"
        lines.append(
            f"Mean relative error against a {above} truth over the first {len(errors)} steps, log-probs and gradients "
            "from the same weights, weights of runs of their own:"
        )
        kinds = ("log_probs", "grads", "params")
        means = [(arm, *(f"{statistics.fmean(e[arm][k] for e in errors):.2e}" for k in kinds)) for arm in errors[0]]
        lines.append(Table(("arm", "log-probs", "gradients", "weights"), means))
    return lines


def draw(report: dict[str, Any], path: Path) -> bool:
    """Gradients beside stock's, drift of the weights, errors against the truth, seconds and memory of each pass, with
    tolerances; False: see `plots.save`."""
    steps, arms = report["steps"], list(report["passes"])
    known = [step for step in steps if step["truth_errors"]]
    judged = dict.fromkeys(row["arm"] for row in report["tolerances"])
    limits = {row["name"]: ("tolerance", row["limit"]) for row in report["tolerances"]}

    def curves(title: str, unit: str, of_arm: Callable[[dict], float], tolerance: str = "") -> Curves:
        ys = [(arm, [of_arm(step["arms"][arm]) for step in steps]) for arm in arms[1:]]
        top = max(y for arm, values in ys for y in values if arm in judged)
        numbers, limit = [step["step"] for step in steps], limits.get(tolerance)
        return Curves(title.format(top), unit, numbers, ys, x="replayed step", log=True, limit=limit)

    def each(values: Iterable[float | None]) -> str:
        return " and ".join("?" if value is None else f"{value:.2g}" for value in values)

    updates = {arm: report["passes"][arm]["update"] for arm in ("stock", *judged)}
    faster = each(updates[arm]["speedup"] for arm in judged)
    added = updates["stock"]["added_gib"]
    more = each(None if not added or (x := updates[arm]["added_gib"]) is None else x / added for arm in judged)

    def bars(key: str, title: str, unit: str, ticks: list[str]) -> Bars:
        heights = {arm: [report["passes"][arm][name][key] for name in PASSES] for arm in arms}
        return Bars(title, unit, "pass", ticks, heights)

    truth = [(arm, [step["truth_errors"][arm]["params"] for step in known]) for arm in arms if known]
    means = {arm: statistics.fmean(values) for arm, values in truth}
    off = max((means[arm] / means["stock"] for arm in judged if means and means["stock"]), default=math.nan)
    panels: list[Curves | Bars] = [
        curves("Gradients: within {:.1e} of stock's", "relative difference",
               lambda arm: arm["same_weights"]["grads"], "same weights: grads"),
        curves("Weights of own runs: within {:.1e}", "largest difference from stock",
               lambda arm: arm["own_weights"]["params"]["max_fp32"]),
        Curves(
            f"Weights: {off:.2f} of stock's error", "distance from the truth, relative",
            [s["step"] for s in known], truth, x="replayed step", log=True,
        ),
        bars("median_s", f"An update is {faster} times as fast as stock's" if "?" not in faster else "Uneven seconds",
             "median seconds", [f"{p}, n = {len(timed(steps, p))}" for p in PASSES]),
        bars("added_gib", f"It adds {more} times stock's memory at its peak", "GiB", list(PASSES)),
    ]  # fmt: skip
    where = f"{report['ranks']} rank{'s' * (report['ranks'] > 1)}, {report['dtype']}"
    title = f"Replayed updates of {report['model']['name']}: {len(steps)} steps, {where}"
    return save(path, title, panels, columns=3, width=15)


def write_json(report: dict[str, Any], output: Path) -> None:
    """Writes report.json, floats with six digits: a report of many steps is for reading. JSON has no word for NaN and
    infinity but null. Raises OSError where it cannot."""
    short = json.loads(
        json.dumps(report), parse_float=lambda text: float(f"{float(text):.6g}"), parse_constant=lambda _: None
    )
    write_whole(output / "report.json", json.dumps(short) + "\n")


def write(
    report: dict[str, Any], words: Callable[[dict], list[str | Table]], plot: Callable[[dict, Path], bool], output: Path
) -> int:
    """Writes report.json, report.md and, if it can, report.png, and prints what failed; 0 where all holds, else 1."""
    text = words(report)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_json(report, output)
    finally:  # on a full disk too
        show(text)
        for row in report["tolerances"]:
            if not row["holds"]:
                where = f" at step {row['step']}" if row.get("step") else ""
                arm = f"{row['arm']}, " if "arm" in row else ""
                show([f"FAILED: {arm}{row['name']}: {row['value']:.3e} > {row['limit']:.3e}{where}"], "bold red")
    write_whole(output / "report.md", as_markdown(text) + "\n")
    drawn = plot(report, output / "report.png")
    show([f"report: {output / 'report.json'}, report.md{', report.png' if drawn else ''}"])
    return 0 if report["holds"] else 1
