"""`verl-prefix ab --runs`: what verl's loggers write is read; the verdict depends on the first step. No training."""

import json
import math
import shutil
import sys

import pytest

from verl_prefix import cli
from verl_prefix.tools.ab import runs, verdict

STEP = {
    "timing_s/step": 9.0, "timing_s/update_actor": 4.0, "actor/grad_norm": 1.5, "actor/entropy": 6.0,
    "actor/pg_loss": -0.2, "response_length/mean": 20.0, "prompt_length/mean": 400.0, "critic/score/mean": 0.5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Draws the picture of the test that looks at it alone: each takes most of a second."""
    if request.function is not test_equal_first_steps_hold_and_times_are_compared:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **_: path.touch())


def write(path, steps: dict[int, dict], every: dict = STEP) -> str:
    lines = [{"step": 0, "data": {"val/score": 0.1}}]  # validation alone is no training step
    lines += [{"step": step, "data": every | values} for step, values in steps.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def compare(tmp_path, a: dict, b: dict) -> tuple[int, dict]:
    paths = [write(tmp_path / "stock.jsonl", a), write(tmp_path / "ours.jsonl", b)]
    code = cli.main(["ab", "--runs", *paths, "--out", str(tmp_path / "out")])
    return code, json.loads((tmp_path / "out" / "report.json").read_text())


def test_equal_first_steps_hold_and_times_are_compared(tmp_path):
    later = {"actor/grad_norm": 1.9, "timing_s/update_actor": 2.0}
    ours = {1: {"timing_s/update_actor": 9.0}, 2: later, 3: later}
    code, report = compare(tmp_path, dict.fromkeys(range(1, 6), {}), ours)
    assert code == 0 and report["holds"] and report["common_steps"] == [1, 2, 3]
    # The first step warms up.
    assert report["timings"]["timing_s/update_actor"]["speedup"] == pytest.approx(4.0 / 2.0, rel=1e-5)
    assert report["notes"] == ["stock.jsonl has 2 more steps, 4 to 5; the other run has not"]
    assert report["notes"][0] in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "report.png").stat().st_size > 10_000


def test_a_speed_up_is_the_median_over_steps_of_one_number(tmp_path):
    """Steps have prompts of other lengths: seconds of one step are not to be held against those of another."""
    seconds = {1: (9, 9), 2: (10, 5), 3: (20, 8), 4: (40, 20)}
    stock, ours = ({i: {"timing_s/update_actor": float(pair[arm])} for i, pair in seconds.items()} for arm in (0, 1))
    code, found = compare(tmp_path, stock, ours)
    assert code == 0 and found["timings"]["timing_s/update_actor"]["n"] == 3
    assert found["timings"]["timing_s/update_actor"]["speedup"] == 2.0
    assert "| timing_s/update_actor | 3 | 20.000 | 8.000 | 2.00 |" in (tmp_path / "out" / "report.md").read_text()
    steps = [
        {"arms": {arm: {"seconds": dict.fromkeys(verdict.PASSES, s), "added_gib": {}}
                  for arm, s in zip(("stock", "ours"), pair, strict=True)}}
        for pair in seconds.values()
    ]  # fmt: skip
    assert verdict._passes(steps[1:], "ours")["update"]["speedup"] == 2.0
    assert verdict._passes(steps, "ours")["optimizer"]["speedup"] == 2.0, "the first step allocates its state"


def test_a_speed_up_that_is_uneven_or_of_one_step_is_none(tmp_path):
    for ours, says in (((9, 5, 5, 3.3), "uneven"), ((9, 5), "one step")):
        ours = {i: {"timing_s/update_actor": float(seconds)} for i, seconds in enumerate(ours, 1)}
        stock = dict.fromkeys(ours, {"timing_s/update_actor": 10.0})
        code, found = compare(tmp_path, stock, ours)
        assert code == 0 and found["timings"]["timing_s/update_actor"]["speedup"] is None
        line = next(x for x in (tmp_path / "out" / "report.md").read_text().splitlines() if "update_actor |" in x)
        assert line.endswith(f"| {says} |")
        shutil.rmtree(tmp_path / "out")
    assert verdict.even_ratio([2.0, 3.0, 2.5]) == 2.5 and verdict.even_ratio([2.0, 3.01, 2.5]) is None


def test_other_responses_make_a_speed_up_uneven_and_it_is_quoted_all_the_same(tmp_path):
    """As two runs of vLLM: the longer responses are, the longer a step takes."""
    ours = {i: {"timing_s/update_actor": seconds} for i, seconds in enumerate((9.0, 5.0, 4.0, 2.0), 1)}
    ours[3]["response_length/mean"] = 30.0
    _, found = compare(tmp_path, dict.fromkeys(ours, {}), ours)
    assert found["timings"]["timing_s/update_actor"]["speedup"] == pytest.approx(1.0, rel=1e-5)


def test_a_run_that_resumed_is_compared_from_there_and_the_step_is_named(tmp_path):
    other = {"response_length/mean": 21.0}
    code, found = compare(tmp_path, dict.fromkeys(range(1, 6), {}), {4: other, 5: {}})
    text = (tmp_path / "out" / "report.md").read_text()
    assert code == 3 and "the runs sampled different responses in step 4." in text
    assert "no step before 4 is in both. A run that resumes starts its file anew" in found["notes"][-1]
    assert found["device"] not in text, "the runs' device is not known, and that of `ab` is not theirs"


def test_a_report_without_a_plot_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.png").touch()  # of an older report
    paths = [write(tmp_path / f"{name}.jsonl", {1: {}}) for name in ("a", "b")]
    assert cli.main(["ab", "--runs", *paths, "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.json", "report.md"]
    out = capsys.readouterr().out
    assert "the plot was left out: pip install matplotlib" in out and out.endswith("report.json, report.md\n")


def test_another_first_step_from_the_same_rollouts_fails_by_name(tmp_path, capsys):
    code, report = compare(tmp_path, {1: {}}, {1: {"actor/grad_norm": 1.51}})
    assert code == 1 and not report["holds"]
    assert "FAILED: step 1: actor/grad_norm" in capsys.readouterr().out


@pytest.mark.parametrize("metric", ["actor/kl_loss", "actor/pg_loss"])
@pytest.mark.parametrize("value", [None, math.nan])
def test_a_metric_of_one_run_alone_or_not_finite_fails(tmp_path, capsys, metric, value):
    """None: NaN as verl's file logger writes it. STEP has pg_loss and no kl_loss: one run lacks it."""
    paths = [write(tmp_path / f"{name}.jsonl", {1: values}) for name, values in (("a", {}), ("b", {metric: value}))]
    assert cli.main(["ab", "--runs", *paths, "--out", str(tmp_path / "out")]) == 1
    assert f"FAILED: step 1: {metric}: nan" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)


def test_a_run_against_itself_and_the_events_of_two_runs_are_refused(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", {1: {}})
    assert cli.main(["ab", "--runs", path, f"{tmp_path}/./a.jsonl", "--out", str(tmp_path / "out")]) == 2
    assert "is one run twice" in capsys.readouterr().err
    for name in ("stock", "prefix"):
        (tmp_path / "events" / name).mkdir(parents=True)
        (tmp_path / "events" / name / "events.out.tfevents.1").touch()
    with pytest.raises(ValueError, match="holds the events of 2 runs; name one: .*prefix, .*stock"):
        runs.read_run(str(tmp_path / "events"))


def test_several_updates_in_the_first_step_are_not_judged(tmp_path, capsys):
    """As verl logs two mini-batches of other prompts: one rollout, other gradients."""
    update = {"actor/ppo_kl": 1.2e-3}
    code, report = compare(tmp_path, {1: update}, {1: update | {"actor/grad_norm": 1.54}})
    assert code == 3 and report["holds"] and report["same_rollouts_in_first_step"]
    assert "set ppo_mini_batch_size to data.train_batch_size" in capsys.readouterr().out
    paths = [write(tmp_path / f"{name}.jsonl", {1: {"actor/ppo_kl": kl, "actor/grad_norm": norm}})
             for name, kl, norm in (("a", 1e-8, 1.5), ("b", math.nan, 1.54))]  # fmt: skip
    assert cli.main(["ab", "--runs", *paths, "--out", str(tmp_path / "out"), "--force"]) == 1


@pytest.mark.parametrize(("norm", "code"), [(1.5, 3), (math.nan, 1), (None, 1)])
def test_steps_that_warm_up_a_critic_have_no_gradient_norm_to_be_finite(tmp_path, capsys, norm, code):
    """None: the second run has no norm, where the first one has. STEP's others are there, as verl logs entropy."""
    waits = {name: value for name, value in STEP.items() if name not in ("actor/grad_norm", "actor/pg_loss")}
    steps = {1: waits, 2: waits, 3: STEP}
    runs_of = (steps, steps | {3: waits if norm is None else STEP | {"actor/grad_norm": norm}})
    paths = [write(tmp_path / f"{name}.jsonl", run, {}) for name, run in zip("ab", runs_of, strict=True)]
    assert cli.main(["ab", "--runs", *paths, "--out", str(tmp_path / "out")]) == code
    out = capsys.readouterr().out
    assert ("FAILED: steps without a finite actor/grad_norm: 1.000e+00" in out) == (code == 1)
    assert "No update was judged: step 1 has none of the actor; set trainer.critic_warmup=0" in out
    paths = [write(tmp_path / f"{name}.jsonl", {1: waits, 2: waits}, {}) for name in "ab"]
    assert cli.main(["ab", "--runs", *paths, "--out", str(tmp_path / "out"), "--force"]) == 1, "no update at all"


def test_other_rollouts_are_not_judged_but_must_be_finite(tmp_path):
    other = {"response_length/mean": 21.0, "actor/grad_norm": 1.9}
    code, report = compare(tmp_path, {1: {}}, {1: other})
    assert code == 3 and report["holds"] and not report["same_rollouts_in_first_step"], "nothing was judged"
    assert cli.main(["ab", "--runs", "x", "y", "--out", str(tmp_path / "out")]) == 2, "the report is there already"
    paths = [write(tmp_path / "a.jsonl", {1: {}}), write(tmp_path / "b.jsonl", {1: other | {"actor/grad_norm": 1e999}})]
    assert cli.main(["ab", "--runs", *paths, "--out", str(tmp_path / "out"), "--force"]) == 1


@pytest.mark.parametrize("metric", runs.ROLLOUTS)
def test_without_what_tells_rollouts_apart_nothing_holds(tmp_path, capsys, metric):
    """A NaN there must not switch the judging off."""
    code, _ = compare(tmp_path, {1: {metric: math.nan}}, {1: {metric: math.nan, "actor/grad_norm": 99.0}})
    assert code == 1 and f"runs without a finite {metric}" in capsys.readouterr().out


def test_options_of_a_replay_are_refused(tmp_path, capsys):
    assert cli.main(["ab", "--runs", "a", "b", "--steps", "3", "--truth-steps", "1", "--out", str(tmp_path)]) == 2
    assert "--steps, --truth-steps is for a replay" in capsys.readouterr().err


def test_tensorboard_events_are_read(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "events") as writer:
        for step in (1, 2):
            for name, value in STEP.items():
                writer.add_scalar(name, value * step, step)
    found = runs.read_run(str(tmp_path / "events"))
    assert list(found) == [1, 2] and found[2]["actor/grad_norm"] == pytest.approx(3.0)
    same = runs.read_run(write(tmp_path / "run.jsonl", {1: {}}))
    assert runs.build(["a", "b"], [found, same])["holds"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"step": 1, "data": {"timing_s/step": 1}}\n{"step": 2', "line 2 is not what verl's file logger writes"),
        ('{"step": 0, "data": {"val/score": 0.1}}\n', "no training step"),
        ("[1]\n", "line 1 is not"),
        (None, "no JSON-lines file and no TensorBoard events"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, content, message):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        runs.read_run(str(path))


def test_runs_without_a_common_step_are_an_error(tmp_path):
    a, b = (runs.read_run(write(tmp_path / f"{step}.jsonl", {step: {}})) for step in (1, 2))
    with pytest.raises(ValueError, match="none in common"):
        runs.build(["a", "b"], [a, b])
