"""The report in words and tables."""

from typing import Any

from verl_prefix.tools.plan.options import CRITIC_TIMINGS, TIMINGS
from verl_prefix.tools.plan.predict import PATHS
from verl_prefix.tools.report import Table
from verl_prefix.tools.simulate.command import tables


def blocks(report: dict[str, Any]) -> list[str | Table]:
    """Text and tables of a command that is not refused, the verdict first."""
    parts: list[str | Table] = [f"# {report['verdict']}", report["advice"], *_figures(report)]
    if "simulated" in report:
        parts += tables(report["simulated"])
    return [*parts, *(f"warning: {note}" for note in report["notes"])]


def _figures(report: dict[str, Any]) -> list[str | Table]:
    rows = {"prompt": "prompt_tokens", "response": "response_tokens", "prompt share of a row": "prefix_share_of_a_row",
            "groups per rank and mini-batch": "groups_per_rank_and_mini_batch"}  # fmt: skip
    lengths = [
        (title, *(f"{report[key][column]:.4g}" for column in ("p5", "p50", "p95", "mean")))
        for title, key in rows.items()
    ]
    gains = [
        (name, *(f"{report['speedup_by_schedule'][path][name]:.2f}" for path in PATHS)) for name in TIMINGS.values()
    ]
    added, critic = report["added_gib"], report.get("critic")
    memory = [
        ("added", *(f"{value:.2f}" for value in added.values())),
        ("resident", *(f"{report['resident_gib']:.2f}" for _ in added)),
    ]
    if critic:
        by = critic["speedup_by_schedule"]
        gains += [(name, *(f"{by[path][name]:.2f}" for path in PATHS)) for name in CRITIC_TIMINGS.values()]
        memory.append(("critic, added", *(f"{value:.2f}" for value in critic["added_gib"].values())))
        memory.append(("critic, resident", *(f"{critic['resident_gib']:.2f}" for _ in added)))
    tokens = report["tokens"]
    return [
        Table(("tokens", "p5", "median", "p95", "mean"), lengths, "lengths"),
        Table(("expected speed-up", *PATHS), gains, "FLOPs of verl's path over ours; the slowest rank counts"),
        *([_bubbles(report["bubbles"])] if report["bubbles"] else ()),
        *([_trees(report)] if report["turns"] else ()),
        Table(("GiB per rank", *added), memory, "weights, gradients, AdamW; what an update adds at its peak"),
        *(f"assumed: {assumption}" for assumption in report["assumed"]),
        f"tokens: {tokens['logical']} logical, {tokens['physical']} computed, {tokens['ratio']:.2f} to 1; "
        f"{tokens['ratio_without_exchange']:.2f} where rows stay on their ranks",
        f"schedule {report['schedule']}: {report['packed_groups']} groups packed, {report['phased_groups']} in phases",
        *([f"{overlong} prompts are over data.max_prompt_length and not counted"]
          if (overlong := report["prompt_tokens"]["overlong"]) else ()),
    ]  # fmt: skip


def _bubbles(of: dict[str, float]) -> Table:
    return Table(
        ("pipeline", *of), [("bubble", *(f"{x:.2f}" for x in of.values()))], "part of an update that stages wait"
    )


def _trees(report: dict[str, Any]) -> Table:
    head = ("prefix.trees", *(x for name in TIMINGS.values() for x in (f"tokens of {name}", "speed-up")), "added GiB")
    nothing = (report["tokens"]["logical"], "1.00") * len(TIMINGS)
    rows: list[tuple[object, ...]] = [("(stock)", *nothing, f"{report['added_gib']['stock']:.2f}")]
    for over, one in report["trees"].items():
        cells = (x for name in TIMINGS.values() for x in (one["tokens"][name], f"{one['speedup'][name]:.2f}"))
        rows.append((over + " (one level)" * (over == "off"), *cells, f"{one['added_gib']:.2f}"))
    title = (
        f"rows of turns, {report['turns']:.3g} of a session; updates of a step: {report['updates']}; schedule: "
        f"{report['schedule']}"
    )
    return Table(head, rows, title)
