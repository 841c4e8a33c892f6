"""`verl-prefix ab --runs STOCK OURS`: two training runs' own metrics over each other.

Reads what verl logs: its `file` logger's JSON lines, or a folder of TensorBoard event files. Sampling multiplies one
rounding into another rollout, so only the first step of runs that sampled the same responses is judged, and only where
it is one update: which prompts share a mini-batch depends on the order in which rollouts end, in stock too.
"""

import math
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_prefix.files import parse_json
from verl_prefix.tools.ab.render import write
from verl_prefix.tools.ab.verdict import as_ratio, even_ratio, median_ratio
from verl_prefix.tools.plots import Curves, save
from verl_prefix.tools.report import Table, provenance

SCHEMA = "verl_prefix.runs/2"
# The runs sampled the same responses in step 1 if these agree, up to the order in which rewards are summed; then the
# others must, within a relative tolerance. The floor keeps a loss that is zero but for rounding from counting.
ROLLOUTS = ("response_length/mean", "prompt_length/mean", "critic/score/mean")
GRAD_NORM = "actor/grad_norm"  # of each step that updates the actor, which one of a critic's warm-up does not
JUDGED = (GRAD_NORM, "actor/entropy", "actor/kl_loss", "actor/pg_loss")
SAME, TOLERANCE, FLOOR = 1e-6, 1e-3, 1e-6
# Of one update of the policy that sampled, this is 0 but for rounding; a second update moves it.
OFF_POLICY, ROUNDING = "actor/ppo_kl", 1e-6
CURVES = {  # metric: title and unit
    "critic/score/mean": ("Score", "mean score"),
    GRAD_NORM: ("Gradient norm", "L2 norm"),
    "actor/entropy": ("Entropy", "nats"),
    "response_length/mean": ("Response length", "mean tokens"),
    "timing_s/update_actor": ("Update", "seconds"),
    "timing_s/step": ("Whole step", "seconds"),
}
Metrics = dict[str, float]
Steps = dict[int, Metrics]


def read_run(path: str) -> Steps:
    """Metrics per training step, from a JSON-lines file, or from the newest of these or event files in a folder.

    Raises:
        ValueError: there is nothing to read, or it is not what verl writes.
    """
    run = Path(path)
    steps = _read_events(run) if run.is_dir() and any(run.rglob("*tfevents*")) else _read_lines(run)
    training = {step: values for step, values in sorted(steps.items()) if "timing_s/step" in values}
    if not training:
        raise ValueError(f"{path} has no training step (no timing_s/step)")
    return training


def _read_lines(run: Path) -> Steps:
    files = sorted(run.glob("*.jsonl"), key=lambda f: f.stat().st_mtime) if run.is_dir() else [run]
    if not files or not files[-1].is_file():
        raise ValueError(f"{run}: no JSON-lines file and no TensorBoard events; set trainer.logger=[console,file]")
    steps: Steps = {}
    for number, line in enumerate(files[-1].read_bytes().splitlines(), 1):
        try:
            record = parse_json(line)
            # orjson, with which verl writes, has no NaN and no infinity: both become null.
            metrics = {k: math.nan if v is None else float(v) for k, v in record["data"].items()
                       if v is None or isinstance(v, int | float)}  # fmt: skip
            steps.setdefault(int(record["step"]), {}).update(metrics)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"{files[-1]}, line {number} is not what verl's file logger writes: {type(error).__name__}: {error}"
            ) from None
    return steps


def _read_events(folder: Path) -> Steps:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps: Steps = {}
    parts = sorted({file.parent for file in folder.rglob("*tfevents*")})
    if len(parts) > 1:
        raise ValueError(f"{folder} holds the events of {len(parts)} runs; name one: {', '.join(map(str, parts))}")
    events = EventAccumulator(str(parts[0]), size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            steps.setdefault(event.step, {})[name] = event.value
    return steps


def relative_difference(a: float | None, b: float | None, tolerance: float = TOLERANCE) -> float:
    """|a - b| over the larger one, of which at least so much is taken that FLOOR is within the tolerance; NaN, which is
    within none, where one is missing."""
    if a is None or b is None:
        return math.nan
    return abs(a - b) / max(abs(a), abs(b), FLOOR / tolerance)


def same_rollouts(stock: Metrics, ours: Metrics, names: Iterable[str] = ROLLOUTS) -> bool:
    """Whether both runs sampled the same responses in this step."""
    return all(relative_difference(stock.get(name), ours.get(name), SAME) <= SAME for name in names)


def compare_seconds(stock: Steps, ours: Steps, steps: Iterable[int], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Of each timing that both runs have in some of these steps: its medians, and stock's over ours step by step, since
    seconds follow the length of a step's prompts."""
    timings = {}
    for name in names:
        pairs = [(a, b) for step in steps if (a := stock[step].get(name)) and (b := ours[step].get(name))]
        if pairs:
            medians = [statistics.median(seconds) for seconds in zip(*pairs, strict=True)]
            timings[name] = {"stock_s": medians[0], "prefix_s": medians[1], "ratios": [a / b for a, b in pairs]}
    return timings


def build(paths: list[str], runs: list[Steps]) -> dict[str, Any]:
    """The report; `holds` is the verdict."""
    common = sorted(set(runs[0]) & set(runs[1]))
    if not common:
        raise ValueError(f"{paths[0]} has steps {list(runs[0])}, {paths[1]} has {list(runs[1])}: none in common")
    first = [run[common[0]] for run in runs]
    checked: list[dict[str, Any]] = []

    def check(name: str, value: float, limit: float) -> None:
        checked.append(dict(name=name, value=value, limit=limit, holds=value <= limit))

    for name in ROLLOUTS:  # without them nobody knows whether there is anything to judge
        if missing := sum(not math.isfinite(values.get(name, math.nan)) for values in first):
            check(f"step {common[0]}: runs without a finite {name}", float(missing), 0.0)
    same = not checked and same_rollouts(*first)
    one_update = not any(abs(values.get(OFF_POLICY, 0.0)) > ROUNDING for values in first)  # NaN does not excuse
    for name in JUDGED if same and one_update else ():
        if any(name in values for values in first):  # a metric that one run lacks is none that agrees
            error = relative_difference(first[0].get(name), first[1].get(name))
            check(f"step {common[0]}: {name}", error, TOLERANCE)
    updating = [step for step in common if any(GRAD_NORM in run[step] for run in runs)] or common
    bad = sum(not math.isfinite(run[step].get(GRAD_NORM, math.nan)) for run in runs for step in updating)
    check(f"steps without a finite {GRAD_NORM}", float(bad), 0.0)
    notes = [
        f"{Path(path).name} has {len(lonely)} more steps, {lonely[0]} to {lonely[-1]}; the other run has not"
        for path, run in zip(paths, runs, strict=True)
        if (lonely := sorted(set(run) - set(common)))
    ]
    if common[0] > 1:
        notes.append(
            f"no step before {common[0]} is in both. A run that resumes starts its file anew: keep the file of each "
            "part under another VERL_FILE_LOGGER_PATH"
        )
    timed = common[1:] or common  # the first step warms up, measures rates and checks itself
    names = sorted(name for name in runs[0][common[-1]] if name.startswith("timing_s/"))
    timings = compare_seconds(runs[0], runs[1], timed, names)
    # Where every step has the same responses in both runs, uneven ratios come of the machine; else of the responses.
    ratio = even_ratio if all(same_rollouts(runs[0][step], runs[1][step]) for step in timed) else median_ratio
    for row in timings.values():
        row |= {"n": len(row["ratios"]), "speedup": ratio(row["ratios"])}
    return {
        **provenance(SCHEMA),
        "runs": [Path(path).name for path in paths],
        "common_steps": common,
        "timed_steps": timed,
        "notes": notes,
        "same_rollouts_in_first_step": same,
        "update_in_first_step": any(GRAD_NORM in values for values in first),
        "one_update_in_first_step": one_update,
        "holds": all(row["holds"] for row in checked),
        "tolerances": checked,
        "timings": timings,
        "metrics": [{str(step): run[step] for step in common} for run in runs],
    }


def blocks(report: dict[str, Any]) -> list[str | Table]:
    """Text and tables of report.md."""
    a, b = report["runs"]
    common = report["common_steps"]
    checked = [(t["name"], f"{t['value']:.2e}", f"{t['limit']:.2e}", t["holds"]) for t in report["tolerances"]]
    timings = [
        (name, row["n"], f"{row['stock_s']:.3f}", f"{row['prefix_s']:.3f}", as_ratio(row["speedup"], row["n"]))
        for name, row in report["timings"].items()
    ]
    first, last = str(common[0]), str(common[-1])
    columns = [(run, step) for step in (first, last) for run in report["metrics"]]
    names = [name for name in (*CURVES, *JUDGED) if all(name in run[last] for run in report["metrics"])]
    rows = [(name, *(f"{run[step].get(name, math.nan):.6g}" for run, step in columns)) for name in dict.fromkeys(names)]
    return [
        f"# {a} against {b}: {'every tolerance holds' if report['holds'] else 'NOT every tolerance holds'}",
        f"{len(common)} steps in common ({common[0]} to {common[-1]}).",
        _unjudged(report) or f"The runs sampled the same responses in step {common[0]}: its metrics are judged.",
        *(f"Note: {note}." for note in report["notes"]),
        Table(("tolerance", "value", "limit", "holds"), checked),
        Table((f"median seconds, step {report['timed_steps'][0]} on", "n", a, b, "speed-up"), timings),
        Table(("metric", *(f"{run}, step {step}" for step in (first, last) for run in (a, b))), rows),
    ]


def _unjudged(report: dict[str, Any]) -> str | None:
    """The reason why no update is judged but for being finite, or None."""
    step = f"step {report['common_steps'][0]}"
    if not report["same_rollouts_in_first_step"]:
        return f"Only finiteness was judged: the runs sampled different responses in {step}."
    if not report["update_in_first_step"]:
        return (
            f"No update was judged: {step} has none of the actor; set trainer.critic_warmup=0 in both runs to compare "
            "it."
        )
    if not report["one_update_in_first_step"]:
        return (
            f"Only finiteness was judged: {step} has several updates ({OFF_POLICY} is not 0), and prompts come "
            "to their mini-batches in any order; set ppo_mini_batch_size to data.train_batch_size to compare it."
        )
    return None


def draw(report: dict[str, Any], path: Path) -> bool:
    """Four metrics of both runs over each other, and the seconds of update and step; False: see `plots.save`."""
    steps = report["common_steps"]
    labels = [f"{label}, {name}" for label, name in zip(("stock", "ours"), report["runs"], strict=True)]
    panels = [
        Curves(f"{title} ({name})", unit, steps, [(label, [values.get(name) for values in run.values()])
                                                  for label, run in zip(labels, report["metrics"], strict=True)])
        for name, (title, unit) in CURVES.items()
    ]  # fmt: skip
    return save(path, f"Two training runs, {len(steps)} steps", panels, columns=3, width=15)


def compare(paths: list[str], output: Path) -> int:
    """The command; returns its exit code: 0 only if every tolerance holds, 3 if there was nothing to judge: different
    responses from the start, or no update in the first step, or several.

    Raises:
        ValueError: a run cannot be read.
    """
    if os.path.realpath(paths[0]) == os.path.realpath(paths[1]):
        raise ValueError(f"--runs {paths[0]} {paths[1]} is one run twice; name the stock run and the other")
    report = build(paths, [read_run(path) for path in paths])
    failed = write(report, blocks, draw, output)
    return failed or (3 if _unjudged(report) else 0)
