"""The set-up of every plot: panels of curves over whole steps, or of grouped bars, in one PNG.

matplotlib is imported here alone. It is optional: without it a report has no plot.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Values = Sequence[float | None]  # None and NaN: nothing is drawn there
LEAST = 0.05  # span of a linear axis over the largest value there: rounding must not fill it
# An arm has one colour in every plot; the engine as it comes is `auto`, also where it is called prefix or ours.
COLORS = {
    "stock": "0.5", "stock_lean": "0.75", "stock+checkpoint": "0.25", "stock_repacked": "tab:olive",
    "prefix_grouper": "tab:red", "one_level": "tab:cyan", "one level": "tab:cyan", "packed": "tab:blue",
    "phased": "tab:orange", "phased+offload": "tab:green", "phased+checkpoint": "tab:brown",
    "auto": "tab:purple", "prefix": "tab:purple", "ours": "tab:purple", "trees": "tab:purple",
}  # fmt: skip


def _known(values: Values) -> bool:
    return any(value is not None and math.isfinite(value) for value in values)


@dataclass(frozen=True)
class Curves:
    """Curves over steps, each as (label, its value at every step).

    Attributes:
        unit: of the y axis.
        limit: (name, tolerance that values have to stay within), a dotted red line; over so many first steps as
            `limited`, where it is not of all.
        zero: stands in a point's place where a value is 0, for which a log axis has none.
        least: span of the y axis, at the least; `LEAST` is another bound.
    """

    title: str
    unit: str
    steps: Sequence[int]
    curves: Sequence[tuple[str, Values]]
    x: str = "training step"
    log: bool = False
    limit: tuple[str, float] | None = None
    limited: int | None = None
    zero: str = ""
    least: float = 0.0

    def labels(self) -> list[str]:
        return [label for label, ys in self.curves if _known(ys)]

    def draw(self, axes: Any, colors: dict[str, Any]) -> None:
        from matplotlib.ticker import MaxNLocator

        of = {0.0} if self.zero else set[float]()  # no points
        shown = [
            (label, [math.nan if y is None or y in of else y for y in ys]) for label, ys in self.curves if _known(ys)
        ]
        for i, (label, ys) in enumerate(shown):
            # Equal curves must all stay visible: the first is the widest, the last is thin and dashed and on top.
            width = 1.5 + 1.5 * (len(shown) - 1 - i)
            style = dict(lw=width, ls="--" if 0 < i == len(shown) - 1 else "-", alpha=0.7)
            marker = dict(marker="o", markersize=3 + width) if len(ys) < 20 else {}  # one step alone is no line
            axes.plot(self.steps, ys, label=label, color=colors[label], **style, **marker)
        if self.limit is not None:
            name, limit = self.limit
            ends = (self.steps[0] - 0.5, self.steps[(self.limited or 0) - 1] + 0.5)
            axes.plot(ends, (limit, limit), color="tab:red", lw=1, ls=":", label=name)
        values = [abs(y) for _, ys in shown for y in ys if math.isfinite(y)]
        least = max([self.least, *(LEAST * y for y in values)])
        if self.log and (any(values) or (self.limit and self.zero)):
            axes.set_yscale("log")
            least = 0.0
            low, high = axes.get_ylim()
            if high < 10 * low:  # rounding must not fill the axis
                middle = math.sqrt(low * high)
                axes.set_ylim(middle / math.sqrt(10), middle * math.sqrt(10))
        pairs = (pair for _, ys in self.curves for pair in zip(self.steps, ys, strict=True))
        for step in {step for step, y in pairs if y == 0 and self.zero}:
            axes.text(step, 0.04, self.zero, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
        low, high = axes.get_ylim()
        if high - low < least:
            axes.set_ylim((low + high - least) / 2, (low + high + least) / 2)
        axes.set_xlim(self.steps[0] - 0.5, self.steps[-1] + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set(xlabel=self.x, ylabel=self.unit)
        axes.grid(alpha=0.3)


@dataclass(frozen=True)
class Bars:
    """Bars of several labels side by side at each of `ticks`; ticks without any bar are left out.

    Attributes:
        x: the unit of the ticks.
        bars: label -> height at every tick.
        lines: (name, label -> height of a black line over the bar of that label, at every tick).
        texts: to stand above each tick.
        numbers: format of the height that stands above each bar, as in "{:.0f}"; empty: none does.
    """

    title: str
    unit: str
    x: str
    ticks: Sequence[str]
    bars: Mapping[str, Values]
    lines: tuple[str, Mapping[str, Values]] = ("", {})
    texts: Sequence[str] = ()
    numbers: str = ""

    def labels(self) -> list[str]:
        return [label for label, heights in self.bars.items() if _known(heights)]

    def draw(self, axes: Any, colors: dict[str, Any]) -> None:
        shown = [i for i in range(len(self.ticks)) if _known([heights[i] for heights in self.bars.values()])]
        labels, (name, lines) = self.labels(), self.lines
        width = 0.8 / len(labels)
        for j, label in enumerate(labels):
            centers = [x + (j - (len(labels) - 1) / 2) * width for x in range(len(shown))]
            heights = [self.bars[label][i] or 0.0 for i in shown]
            drawn = axes.bar(centers, heights, width, color=colors[label], label=label)
            if self.numbers:
                axes.bar_label(drawn, fmt=self.numbers)
            for center, i in zip(centers, shown, strict=True):
                if label in lines and lines[label][i] is not None:
                    axes.hlines(lines[label][i], center - width / 2, center + width / 2, colors="black", label=name)
                    name = ""  # once in the legend
        if self.texts:
            for x, i in enumerate(shown):
                top = max(heights[i] or 0.0 for heights in self.bars.values())
                axes.text(x, top, self.texts[i], ha="center", va="bottom")
        axes.set_xticks(range(len(shown)), [self.ticks[i] for i in shown])
        axes.set(xlabel=self.x, ylabel=self.unit)
        axes.margins(y=0.15)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)


def colors_of(labels: Iterable[str]) -> dict[str, Any]:
    """The colour of each label, "arm" or "arm, run"; each further run of an arm is paler."""
    from matplotlib.colors import to_rgb

    colors: dict[str, Any] = {}
    runs: dict[str, int] = {}
    for label in dict.fromkeys(labels):
        arm = label.partition(",")[0]
        shade = 0.5 ** runs.setdefault(arm, 0)
        runs[arm] += 1
        # Black: an arm of an older report, which is no more.
        colors[label] = tuple(x + (1 - shade) * (1 - x) for x in to_rgb(COLORS.get(arm, "black")))
    return colors


def save(path: Path, title: str, panels: Iterable[Curves | Bars], columns: int = 2, width: float = 11.0) -> bool:
    """Writes the PNG, without panels that have no data; says so where it cannot. Returns whether there is one: an older
    one is removed."""
    panels = [panel for panel in panels if panel.labels()]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("the plot was left out: pip install matplotlib")
        panels = []
    if not panels:
        path.unlink(missing_ok=True)
        return False
    colors = colors_of(label for panel in panels for label in panel.labels())
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    figure = Figure(figsize=(width, 3.75 * len(rows)), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(len(rows), 6)  # 6: a row holds one, two or three panels
    handles: dict[str, Any] = {}
    for y, row in enumerate(rows):
        part = 6 // len(row)
        for x, panel in enumerate(row):
            axes = figure.add_subplot(grid[y, x * part : (x + 1) * part])
            panel.draw(axes, colors)
            axes.set_title(panel.title)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
    ncols = min(len(handles), round(width / 1.75))
    first = dict(sorted(handles.items(), key=lambda item: item[0].partition(",")[0] != "stock"))  # stock first
    figure.legend(list(first.values()), list(first), loc="outside lower center", ncols=ncols)
    figure.savefig(path, dpi=110)
    return True
