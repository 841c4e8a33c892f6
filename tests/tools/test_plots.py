"""Every plot of the committed results says what it shows: units, titles, whole steps, no empty panel."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from verl_prefix.tools import plots
from verl_prefix.tools.ab import options as ab_options
from verl_prefix.tools.ab import render, runs
from verl_prefix.tools.bench import options as bench_options
from verl_prefix.tools.bench import report as bench

ROOT = Path(__file__).resolve().parents[2]
RESULTS = {path.name: path for path in (ROOT / "examples" / "results").glob("*.json")}
WITHOUT_STEPS = ("ab_tiny_cpu.json", "ab_bf16_cpu.json")  # examples/ab_figures.py cut them
KINDS = ("ab_", "bench_", "demo_", "learn_")


def _load(name: str) -> dict[str, Any]:
    return json.loads(RESULTS[name].read_text())


def _two_runs() -> dict[str, Any]:
    arms = _load("demo_smollm2_cpu.json")["arms"]
    steps = [{step["step"]: step["data"] for step in arms[name]["steps"]} for name in ("stock", "prefix")]
    return runs.build(["stock/metrics.jsonl", "ours/metrics.jsonl"], steps)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: (self.canvas.draw(), found.append(self)))
    return found


def _bar_heights(axes: Any) -> list[float]:
    return [patch.get_height() for patch in axes.patches]


@pytest.mark.parametrize(
    "name", sorted(name for name in RESULTS.keys() - {*WITHOUT_STEPS} if name.startswith(KINDS)) + ["runs"]
)
def test_every_axis_has_a_unit_every_panel_data_and_a_title(
    drawn: list[Figure], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import demo_report
    import learn_report

    kinds = {"ab": render, "bench": bench, "demo": demo_report, "learn": learn_report}
    kind = kinds.get(name.split("_")[0], runs)
    found = _two_runs() if kind is runs else _load(name)
    assert kind.draw(found, Path("unused.png"))
    (figure,) = drawn
    check(figure)
    check_colors(figure)
    if kind is bench:
        assert len(figure.axes) == (2 if found["config"]["memory"] else 1)
        assert f"medians of n = {found['config']['repeats']} rounds" in figure.axes[0].get_title()
        assert "FLOP ratio" in [text.get_text() for text in figure.legends[0].get_texts()]
    if kind is demo_report:
        counts = [f"n = {len(row['ratios'])}" for row in found["ratios"].values()]
        assert [text.get_text().split("\n")[-1] for text in figure.axes[0].get_xticklabels()] == counts
    if kind is render:
        counts = {"log_probs": len(found["steps"]), "update": len(found["steps"]), "optimizer": len(found["steps"]) - 1}
        shown = [text.get_text() for text in figure.axes[3].get_xticklabels()]
        assert shown == [f"{name}, n = {count}" for name, count in counts.items()]
        # Where an optimizer's memory is not known, as of format 1, it has no place there.
        known = [name for name in counts if found["passes"]["stock"][name]["added_gib"] is not None]
        assert [text.get_text() for text in figure.axes[4].get_xticklabels()] == known


def check_colors(figure: Figure) -> None:
    """An arm's is that of the palette, paler in its second run; what is no arm is black."""
    seen: set[str] = set()
    (legend,) = figure.legends
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
        arm = text.get_text().partition(",")[0]
        shown = to_rgb(handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor())
        if arm == "FLOP ratio":
            assert shown == (0, 0, 0)
        elif arm.startswith("tolerance"):
            assert shown == to_rgb("tab:red")
        elif arm not in seen:
            assert shown == to_rgb(plots.COLORS[arm]), text
        else:
            assert all(pale > full for pale, full in zip(shown, to_rgb(plots.COLORS[arm]), strict=True)), text
        seen.add(arm)


def _titles(draw: Callable[[dict, Path], bool], report: dict[str, Any], drawn: list[Figure]) -> list[str]:
    assert draw(report, Path("unused.png"))
    return [axes.get_title() for axes in drawn.pop().axes]


def test_titles_say_what_the_report_says(drawn: list[Figure]) -> None:
    report = _load("ab_smollm2_cpu.json")
    assert "Gradients: within 6.5e-06 of stock's" in _titles(render.draw, report, drawn)
    report["steps"][3]["arms"]["auto"]["same_weights"]["grads"] = 0.25
    assert "Gradients: within 2.5e-01 of stock's" in _titles(render.draw, report, drawn)
    report = _load("bench_cpu.json")
    assert "packed is 1.3 to 4.9 times as fast" in _titles(bench.draw, report, drawn)[0]
    report["rows"][3]["arms"]["packed"]["speedup"] = 0.5
    assert "packed is 0.5 to 4.9 times as fast" in _titles(bench.draw, report, drawn)[0]
    report["rows"][3]["arms"]["packed"]["seconds"]["update"] *= 7  # a quick row has more rounds
    report["rows"][0]["arms"]["packed"] = {"failed": "no memory", "seconds": {"update": []}}
    assert "medians of n = 2 to 14 rounds" in _titles(bench.draw, report, drawn)[0]


def test_a_demo_shows_its_reward_what_is_equal_and_its_tokens(
    drawn: list[Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import demo_report

    report = _load("demo_smollm2_cpu.json")
    report["arms"]["prefix"]["steps"][0]["data"]["actor/grad_norm"] = report["arms"]["stock"]["steps"][0]["data"][
        "actor/grad_norm"
    ]
    report["ratios"]["ref"]["ratio"] = None
    assert demo_report.draw(report, Path("unused.png"))
    seconds, equal, reward, *_ = drawn.pop().axes
    assert equal.get_title() == "Gradient norms are equal in step 1"
    assert [(text.get_position()[0], text.get_text()) for text in equal.texts] == [(1, "equal")]
    assert "uneven" in [text.get_text() for text in seconds.texts]
    low, high = reward.get_ylim()
    assert reward.get_title() == "Reward (critic/rewards/mean)" and high - low >= 0.1 > 0.01
    found = _titles(demo_report.draw, _load("demo_tiny_turns_cpu.json"), drawn)
    assert found[2] == "Trees compute 5.3 times fewer tokens"


def test_a_picture_of_learning_names_the_arm_of_each_number(
    drawn: list[Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import learn_report

    report = _load("learn_cpu.json")
    _, minutes, seconds, match = _titles(learn_report.draw, report, drawn)
    assert minutes == "Minutes of all steps: 39 (stock), 8 and 9 (prefix)"
    assert seconds == "Seconds of a step: 144 (stock), 29 and 30 (prefix)"
    assert match == "Exact match rises to 0.40 (stock), 0.41 and 0.41 (prefix)"


def test_stock_is_first_in_every_legend(drawn: list[Figure]) -> None:
    curves = plots.Curves("errors", "relative", [1, 2], [("packed", [1.0, 2.0]), ("stock, a run", [1.0, 2.0])])
    assert plots.save(Path("unused.png"), "title", [curves])
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["stock, a run", "packed"]


def test_a_tolerance_is_a_line(drawn: list[Figure]) -> None:
    curves = plots.Curves("errors", "relative", [1, 2], [("ours", [1e-7, 2e-7])], log=True, limit=("tolerance", 5e-6))
    assert plots.save(Path("unused.png"), "title", [curves])
    check_colors(drawn[0])
    assert [line.get_label() for line in drawn[0].axes[0].lines if set(line.get_ydata()) == {5e-6}] == ["tolerance"]


def test_every_arm_has_a_color_of_its_own() -> None:
    arms = {*bench_options.ARMS, "stock", *ab_options.ARMS}
    assert arms <= set(plots.COLORS) and {*plots.COLORS} - arms == {"prefix", "ours", "one level", "trees"}
    assert len({to_rgb(plots.COLORS[arm]) for arm in arms}) == len(arms)
    assert all(plots.COLORS[name] == plots.COLORS["auto"] for name in ("prefix", "ours"))


def check(figure: Figure) -> None:
    assert figure.get_suptitle() and figure.axes
    for axes in figure.axes:
        assert axes.get_title() and axes.get_xlabel() and axes.get_ylabel()
        assert any(line.get_xydata().size for line in axes.lines) or any(_bar_heights(axes))
        if "step" in axes.get_xlabel():
            ticks = axes.get_xticks()
            assert len(ticks) and all(tick == round(tick) for tick in ticks), ticks


def test_panels_without_data_are_left_out(drawn: list[Figure]) -> None:
    empty = plots.Curves("nothing", "s", [1, 2], [("stock", [None, float("nan")])])
    curves = plots.Curves("seconds", "s", [1, 2], [("stock", [1.0, None]), ("ours", [None, None])])
    bars = plots.Bars("bars", "s", "pass", ["a", "b"], {"stock": [None, 1.0], "ours": [None, 2.0]})
    assert plots.save(Path("unused.png"), "title", [empty, curves, bars])
    assert [axes.get_title() for axes in drawn[0].axes] == ["seconds", "bars"]
    assert [text.get_text() for text in drawn[0].axes[1].get_xticklabels()] == ["b"]
    assert not plots.save(Path("unused.png"), "title", [empty]) and len(drawn) == 1


def test_rounding_does_not_fill_an_axis(drawn: list[Figure]) -> None:
    """Of a loss and of one step whose difference is 0, as in a demo of turns; nor does an axis say 1e-8+1.2291e-3."""
    loss = plots.Curves("loss", "loss", [1], [("stock", [1.2291e-3]), ("prefix", [1.2291e-3 + 3e-8])])
    equal = plots.Curves(
        "equal", "relative", [1], [("prefix", [0.0])], log=True, limit=("tolerance", 1e-3), zero="equal"
    )
    assert plots.save(Path("unused.png"), "title", [loss, equal])
    of_loss, of_equal = drawn[0].axes
    low, high = of_loss.get_ylim()
    assert high - low >= 0.04 * high and low < 1.2291e-3 < high
    assert of_loss.yaxis.get_major_formatter().get_offset() == "" and of_equal.get_yscale() == "log"


def test_a_bar_has_its_number(drawn: list[Figure]) -> None:
    bars = plots.Bars("tokens", "tokens", "step", ["1"], {"stock": [24257], "trees": [4744]}, numbers="{:.0f}")
    assert plots.save(Path("unused.png"), "title", [bars])
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["24257", "4744"]


@pytest.mark.parametrize("log", [False, True])
def test_curves_of_zeros_and_of_one_step_are_seen(drawn: list[Figure], log: bool) -> None:
    curves = [plots.Curves(f"{y}", "s", [3], [("stock", [y]), ("ours", [y])], log=log) for y in (0.0, 2e-8)]
    assert plots.save(Path("unused.png"), "title", curves)
    check(drawn[0])
    for axes in drawn[0].axes:
        assert 3 in axes.get_xticks() and [line.get_marker() for line in axes.lines] == ["o", "o"]
        low, high = axes.get_ylim()
        assert low < axes.lines[0].get_ydata()[0] < high
    assert not log or high >= 9.99 * low, "rounding fills the axis"


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    draw: Callable[[dict, Path], bool] = bench.draw
    assert not draw(_load("bench_cpu.json"), tmp_path / "bench.png") and not list(tmp_path.iterdir())
    assert "the plot was left out: pip install matplotlib" in capsys.readouterr().out
