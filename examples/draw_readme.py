"""The two pictures of the README: what is computed once, and what that gains.

    python examples/draw_readme.py      writes idea.png and speedups.png into examples/results

The second one is drawn from `bench_lengths_cpu.json` (measured), `simulated_tables.json` and `simulated_turns.json`.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from verl_prefix.tools.plots import COLORS

RESULTS = Path(__file__).parent / "results"
PROMPT, RESPONSE, TOOL = "#8fb0d6", "#f2b66d", "#b9d8b0"
NAMES = {PROMPT: "prompt", RESPONSE: "response", TOOL: "tool output"}
Blocks = list[tuple[float, str]]  # (length in some unit of tokens, colour)


def draw_rows(axes: Axes, x: float, y: float, rows: list[Blocks]) -> None:
    """Draws rows of blocks from the corner (x, y) downwards."""
    for number, row in enumerate(rows):
        start = x
        for length, color in row:
            corner = (start, y - number - 0.8)
            axes.add_patch(Rectangle(corner, length, 0.8, facecolor=color, edgecolor="white", lw=1.5))
            start += length


def draw_panel(axes: Axes, title: str, words: str, height: float) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.text(0, -height, words, va="top", fontsize=9.5, color="0.25")
    axes.set(xlim=(-0.1, 14.4), ylim=(-height - 1.5, 0.1))
    axes.axis("off")


def draw_idea(path: Path) -> None:
    """Four responses to one prompt, and two sessions of an agent, as verl computes them and as this plugin does."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(5, 7))
    stock, packed, phased = top.subplots(1, 3)
    turns, tree = bottom.subplots(1, 2)
    prompt, response = (6, PROMPT), (1.5, RESPONSE)

    draw_panel(stock, "verl", "Four responses to one prompt:\nthe prompt is computed four times.", 4.2)
    draw_rows(stock, 0, 0, [[prompt, response]] * 4)

    draw_panel(packed, "packed", "One graph: the prompt is computed once,\nand every response reads it.", 4.2)
    draw_rows(packed, 0, -1.5, [[prompt, *[response] * 4]])

    draw_panel(
        phased, "phased", "A group of any size: a prefix forward, waves\nof responses, one prefix backward.", 4.2
    )
    for y, name, row in ((0, "A", [prompt]), (-1, "B", [response] * 2), (-2, "B", [response] * 2), (-3, "C", [prompt])):
        phased.text(0, y - 0.4, name, va="center", fontweight="bold")
        draw_rows(phased, 0.8 + 6 * (name == "B"), y, [row])
    arrow = dict(arrowstyle="->", color="0.3")
    phased.annotate("", (6.7, -1.4), (4.6, -0.85), arrowprops=arrow)
    phased.annotate("", (4.6, -2.95), (6.7, -2.4), arrowprops=arrow)
    phased.text(5.0, -1.4, "keys, values", fontsize=8.5, color="0.3", ha="right", va="center")
    phased.text(5.0, -2.4, "their gradients", fontsize=8.5, color="0.3", ha="right", va="center")

    question, said, tool = (3.4, PROMPT), (1.2, RESPONSE), (0.9, TOOL)
    session = [said, tool, said, tool, said]
    words = (
        "Two sessions of an agent, a row per turn: each row begins\nwith all earlier turns, which are computed again."
    )
    draw_panel(turns, "verl, rows of turns", words, 6.2)
    for y in (0, -3.1):
        draw_rows(turns, 0, y, [[question, *session[: 2 * turn + 1]] for turn in range(3)])
    draw_panel(
        tree,
        "a tree",
        "What rows have in common is computed once, at any depth:\npacked or phased, in every pass.",
        6.2,
    )
    draw_rows(tree, 0, -2.5, [[question]])
    for y in (-1.5, -3.5):
        tree.plot([3.4, 3.9], [-2.9, y - 0.4], color="0.3", lw=1)
        draw_rows(tree, 3.9, y, [session])
    handles = [Patch(color=color, label=name) for color, name in NAMES.items()]
    tree.legend(handles=handles, loc="upper right", frameon=False, ncols=3)
    figure.savefig(path, dpi=110)


def shade(color: str, paler: float) -> tuple[float, ...]:
    return tuple(x + paler * (1 - x) for x in to_rgb(color))


def draw_measured(axes: Axes, report: dict[str, Any]) -> None:
    """Speed-ups of the update over P/S, a curve of the FLOP ratio for each number of responses."""
    groups = sorted({row["group"] for row in report["rows"]})
    handles = []
    for i, group in enumerate(groups):
        rows = sorted((row for row in report["rows"] if row["group"] == group), key=lambda row: row["prefix"])
        ratios = [row["prefix"] / row["suffix"] for row in rows]
        color = shade(COLORS["packed"], 0.65 * (1 - i / (len(groups) - 1)))
        axes.plot(ratios, [row["arms"]["packed"]["ceiling"] for row in rows], color=color, lw=1.5)
        for arm, fill in (("packed", color), ("phased", "white")):
            axes.plot(ratios, [row["arms"][arm]["speedup"] for row in rows], "o", color=color, mfc=fill, ms=6)
        handles.append(Line2D([], [], color=color, lw=4, label=f"{group} responses"))
    handles += [
        Line2D([], [], color="0.3", lw=1.5, label="FLOP ratio"),
        Line2D([], [], color="0.3", marker="o", ls="", label="packed"),
        Line2D([], [], color="0.3", marker="o", mfc="white", ls="", label="phased"),
    ]
    axes.axhline(1, color=COLORS["stock"], lw=1, ls=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ratios, [f"{x:g}" for x in ratios])
    of_ceiling = [row["arms"]["packed"]["speedup"] / row["arms"]["packed"]["ceiling"] for row in report["rows"]]
    title = f"Measured on a CPU: packed gains {median(of_ceiling):.2f} of the FLOP ratio (median of {len(of_ceiling)})"
    axes.set_title(title, fontsize=10.5)
    axes.set(xlabel="prompt tokens / response tokens", ylabel="update: times as fast as verl's", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(handles=handles, fontsize=9)


def draw_simulated(axes: Axes, settings: dict[str, dict[str, Any]]) -> None:
    """Speed-ups of the update on GPUs, simulated, of the faster schedule, beside the ratio of FLOPs."""
    names, gains, ceilings, colors = [], [], [], []
    for name, report in settings.items():
        arm = min(("packed", "phased"), key=lambda arm: report[arm]["update_seconds"])
        names.append(name)
        gains.append(report["stock"]["update_seconds"] / report[arm]["update_seconds"])
        ceilings.append(report["stock"]["flops"] / report[arm]["flops"])
        colors.append(COLORS[arm])
    axes.barh(range(len(names)), gains, color=colors, height=0.65)
    for y, (gain, ceiling) in enumerate(zip(gains, ceilings, strict=True)):
        axes.vlines(ceiling, y - 0.4, y + 0.4, color="black")
        axes.text(max(gain, ceiling) + 0.1, y, f"{gain:.1f}x", va="center")
    axes.axvline(1, color=COLORS["stock"], lw=1, ls=":")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(
        f"Simulated on 8 H100s, no GPU ran: {min(gains):.1f} to {max(gains):.1f} times as fast", fontsize=10.5
    )
    axes.set(xlabel="update: times as fast as verl's", xlim=(0, 1.12 * max(gains + ceilings)))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(
        handles=[*(Patch(color=COLORS[arm], label=arm) for arm in ("packed", "phased") if COLORS[arm] in colors),
                 Line2D([], [], color="black", lw=1.5, label="FLOP ratio")],
        fontsize=9,
    )  # fmt: skip


def simulated() -> dict[str, dict[str, Any]]:
    """Every simulated setting: its name -> arms "stock", "packed" and "phased"."""
    tables, turns = (json.loads((RESULTS / f"simulated_{name}.json").read_text()) for name in ("tables", "turns"))
    found = {name: setting["arms"] for name, setting in tables["shapes"].items()}
    for name, setting in turns["settings"].items():
        found[name] = {arm.removeprefix("tree, "): values for arm, values in setting["arms"].items()}
    return found


def main() -> None:
    draw_idea(RESULTS / "idea.png")
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_measured(left, json.loads((RESULTS / "bench_lengths_cpu.json").read_text()))
    draw_simulated(right, simulated())
    figure.savefig(RESULTS / "speedups.png", dpi=110)


if __name__ == "__main__":
    main()
