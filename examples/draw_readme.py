"""The two pictures of the README: what is computed once, and what that gains.

    python examples/draw_readme.py      writes idea.png and speedups.png into examples/results

The second one is drawn from `bench_lengths_cpu.json` (measured), `simulated_tables.json` and `simulated_turns.json`.
"""

import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from verl_prefix.tools.plots import COLORS

RESULTS = Path(__file__).parent / "results"
PROMPT, RESPONSE, TOOL = "#8fb0d6", "#f2b66d", "#b9d8b0"
SIMULATED = {
    "MuSiQue": "20 paragraphs",
    "video": "video question",
    "tool schemas": "tool schemas",
    "long": "long document",
    "5 turns": "agent,\n4 sessions of 5 turns",
    "10 turns": "agent,\n4 sessions of 10 turns",
    "30 turns": "agent,\n4 sessions of 30 turns",
    "tree search, 20 leaves": "tree search,\n20 leaves",
}
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

    words = "Groups of any size: the prompt forward, then\nresponses in waves, then the prompt backward."
    draw_panel(phased, "phased", words, 4.2)
    for y, name, row in ((0, "A", [prompt]), (-1, "B", [response] * 2), (-2, "B", [response] * 2), (-3, "C", [prompt])):
        phased.text(0, y - 0.4, name, va="center", fontweight="bold")
        draw_rows(phased, 0.8 + 6 * (name == "B"), y, [row])
        if name != "B":
            phased.text(3.8, y - 0.4, "forward" if name == "A" else "backward", ha="center", va="center", fontsize=8.5)
    arrow = dict(arrowstyle="->", color="0.3")
    phased.annotate("", (-0.5, -3.9), (-0.5, 0.1), arrowprops=arrow, annotation_clip=False)
    phased.text(-0.8, -1.9, "time", rotation=90, fontsize=8.5, color="0.3", ha="center", va="center")
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
    figure.legend(handles=handles, loc="outside upper center", frameon=False, ncols=3)
    figure.savefig(path, dpi=110)


def draw_bars(axes: Axes, title: str, gains: dict[str, float]) -> None:
    """A bar for every workload: how many times as fast the update is as verl's own."""
    axes.barh(range(len(gains)), gains.values(), color=COLORS["packed"], height=0.72)
    for y, gain in enumerate(gains.values()):
        axes.text(gain - 0.08, y, f"{gain:.1f}x", va="center", ha="right", color="white", fontweight="bold")
    axes.axvline(1, color="0.3", lw=1, ls=":", zorder=0)
    axes.text(1.08, -0.48, "verl", fontsize=8.5, color="0.3", va="bottom")
    axes.set_yticks(range(len(gains)), gains)
    axes.set_ylim(len(gains) - 0.5, -0.8)
    axes.set_title(title, fontsize=10.5, fontweight="bold")
    axes.set(xlabel="update: times as fast as verl's own", xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)


def measured() -> dict[str, float]:
    """Speed-ups of packed updates of 8 responses on a CPU."""
    rows = json.loads((RESULTS / "bench_lengths_cpu.json").read_text())["rows"]
    return {
        f"prompt {row['prefix']},\n8 responses of {row['suffix']}": row["arms"]["packed"]["speedup"]
        for row in sorted(rows, key=lambda row: row["prefix"])
        if row["group"] == 8
    }


def simulated() -> dict[str, float]:
    """Speed-ups of the faster schedule in the settings that are named below, on simulated GPUs."""
    tables, turns = (json.loads((RESULTS / f"simulated_{name}.json").read_text()) for name in ("tables", "turns"))
    settings = tables["shapes"] | turns["settings"]
    found = {}
    for name, words in SIMULATED.items():
        seconds = {arm.split(", ")[-1]: x["update_seconds"] for arm, x in settings[name]["arms"].items()}
        prompt, response, group, _ = settings[name].get("P/S/G/groups", [0, 0, 0, 0])
        words += f"\nprompt {prompt}, {group} responses of {response}" if prompt else ""
        found[words] = seconds["stock"] / min(seconds["packed"], seconds["phased"])
    return found


def main() -> None:
    draw_idea(RESULTS / "idea.png")
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_bars(left, "Measured: a small model on two CPU cores", measured())
    draw_bars(right, "Simulated: 8B models on 8 H100s (no GPU ran)", simulated())
    figure.savefig(RESULTS / "speedups.png", dpi=110)


if __name__ == "__main__":
    main()
