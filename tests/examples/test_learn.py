"""`make learn`: its worlds share nothing, a cut-off run goes on, and its verdict can be no."""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
STOCK_GROUP = """
import sft_cpu, torch.distributed as dist, verl.utils.distributed as verls
try:
    verls.initialize_global_process_group()
except ValueError as error:
    print("ANSWER", str(error).split("   ")[0], "/", sft_cpu.one_rank(), dist.get_world_size())
"""


@pytest.fixture
def learn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import learn

    monkeypatch.setattr(learn.learn_report, "draw", lambda report, path: None)
    return learn


def write_call(run: Path, number: int, steps: dict[int, dict[str, float]], end: str = "") -> None:
    run.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "data": data}) + "\n" for step, data in steps.items()]
    (run / f"call_{number:02d}.jsonl").write_text("".join(lines) + end)


def steps_of(
    learn: ModuleType, *rewards: float, first: int = 1, end: float | None = None
) -> dict[int, dict[str, float]]:
    steps = {
        i: {learn.learn_report.REWARD: reward, learn.learn_report.SECONDS: 30.0}
        for i, reward in enumerate(rewards, start=first)
    }
    if end is not None:
        steps[max(steps)][learn.learn_report.ACCURACY] = end
    return steps


@pytest.mark.more
def test_worlds_share_no_name_and_sft_is_taught_bare_answers(learn: ModuleType, tmp_path: Path) -> None:
    learn.make_data(tmp_path)
    names = {}
    for world, (num, _) in learn.WORLDS.items():
        questions = [json.loads(line) for line in (tmp_path / f"{world}.jsonl").read_text().splitlines()]
        assert len(questions) == num == pq.read_metadata(tmp_path / world / "train.parquet").num_rows
        titles = " ".join(p["title"] for question in questions for p in question["paragraphs"])
        names[world] = set(re.findall(r"\b[A-Z]\w{6}\b", titles)) - {"Printing"}
        assert len(names[world]) >= 50
    worlds = list(names)
    assert len(worlds) == 4
    for i, one in enumerate(worlds):
        for other in worlds[i + 1 :]:
            assert not names[one] & names[other], (one, other)
    rows = pq.read_table(tmp_path / "sft.parquet").to_pylist()
    prompt, answer = rows[0]["messages"]
    wanted = pq.read_table(tmp_path / "sft" / "train.parquet").to_pylist()[0]
    assert [prompt] == wanted["prompt"]
    assert answer == {"role": "assistant", "content": f"<answer>{wanted['reward_model']['ground_truth'][0]}</answer>"}


@pytest.mark.parametrize(
    ("start", "end", "enough"),
    [
        (0.25, 0.50, True),  # 0.041 is the standard error
        (0.25, 0.36, False),  # by more than 0.10, by less than 3 standard errors
        (0.01, 0.10, False),  # by more than 3 standard errors, by less than 0.10
        (0.50, 0.25, False),
        (0.0, 1.0, True),
    ],
)
def test_a_rise_is_enough_by_both_measures(learn: ModuleType, start: float, end: float, enough: bool) -> None:
    found = learn.learn_report.judge(start, end, 256)
    assert found["rise"] == end - start and found["enough"] is enough
    if (start, end) == (0.25, 0.50):
        assert found["standard_error"] == pytest.approx(((0.1875 + 0.25) / 256) ** 0.5)


def test_a_curve_goes_over_calls_and_the_later_one_counts(learn: ModuleType, tmp_path: Path) -> None:
    write_call(
        tmp_path, 1, {0: {learn.learn_report.ACCURACY: 0.25}} | steps_of(learn, 0.1, 0.2, 0.3), end='{"step": 4, "da'
    )
    write_call(tmp_path, 2, steps_of(learn, 0.4, 0.5, first=3, end=0.5))  # step 3 again
    curve = learn.learn_report.read(tmp_path)
    assert list(curve) == [0, 1, 2, 3, 4]
    assert [curve[step][learn.learn_report.REWARD] for step in (1, 2, 3, 4)] == [0.1, 0.2, 0.4, 0.5]
    assert learn.learn_report.finished(tmp_path, 4) and not learn.learn_report.finished(tmp_path, 3)


@pytest.fixture
def report(learn: ModuleType, tmp_path: Path) -> Callable:
    """The report of runs that start at 0.25, by the exact match that each ends with; None: its last step is missing."""

    def build(**ends: float | None) -> dict:
        for i, (name, end) in enumerate(ends.items()):
            steps = steps_of(learn, 0.2, 0.3, 0.4, *([0.5] if end is not None else []), end=end)
            if end is None:
                steps[3].pop(learn.learn_report.ACCURACY, None)
            write_call(tmp_path / name, 1, ({0: {learn.learn_report.ACCURACY: 0.25}} if i == 0 else {}) | steps)
        return learn.build(tmp_path, learn.replace(learn.SIZE, steps=4))

    return build


def test_success_takes_two_seeds_of_ours_and_a_stock_run(report: Callable) -> None:
    found = report(prefix_1=0.5, prefix_2=0.45, stock_1=0.3)  # what stock reaches is not judged
    assert found["problems"] == {"missing": [], "failed": []}
    run = found["runs"]["prefix_2"]
    assert run["exact_match"] == {"start": 0.25, "end": 0.45}
    assert run["rise"] == pytest.approx(0.2) and run["minutes"] == 2.0
    assert run["reward"]["start"] == {
        "mean": pytest.approx(0.35),
        "deviation": pytest.approx(0.129, abs=1e-3),
        "steps": 4,
    }
    text = json.dumps(found)
    assert str(ROOT) not in text and "learn.py --arm stock --seed 1 --steps 4" in text


def test_one_seed_that_does_not_learn_fails(report: Callable) -> None:
    (failed,) = report(prefix_1=0.5, prefix_2=0.34, stock_1=0.5)["problems"]["failed"]
    assert "prefix_2: exact match rose by 0.090" in failed


def test_what_is_not_there_is_missing(report: Callable) -> None:
    problems = report(prefix_1=0.5, stock_1=None)["problems"]
    assert problems["failed"] == []
    assert problems["missing"] == [
        "2 prefix runs of 4 steps are wanted, there are 1",
        "1 stock runs of 4 steps are wanted, there are 0",
    ]


@pytest.fixture
def called(learn: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """What the next call of seed 1's run would ask of verl, as overrides; [] if nothing."""

    def train(arm: str = "prefix") -> list[str]:
        asked: list[str] = []
        monkeypatch.setattr(learn, "call", lambda module, overrides, metrics, deadline: asked.extend(overrides))
        args = argparse.Namespace(arm=arm, seed=1, test="test")
        with learn.alone(tmp_path / f"{arm}_1") as run:
            learn.train(args, run, Path("model"), learn.replace(learn.SIZE, steps=4), 0.0)
        return asked

    return train


def last_checkpoint(run: Path, step: int) -> None:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_the_start_is_measured_once_and_an_end_that_was_cut_off_is_measured_alone(
    learn: ModuleType, tmp_path: Path, called: Callable
) -> None:
    before, only = "trainer.val_before_train=true", "trainer.val_only=true"
    asked = called()
    assert before in asked and only not in asked and "trainer.resume_mode=auto" in asked
    write_call(tmp_path / "prefix_1", 1, {0: {learn.learn_report.ACCURACY: 0.25}} | steps_of(learn, 0.1, 0.2))
    last_checkpoint(tmp_path / "prefix_1", 2)
    assert before not in called() and before not in called("stock")
    write_call(tmp_path / "prefix_1", 2, steps_of(learn, 0.3, first=3))
    last_checkpoint(tmp_path / "prefix_1", 4)
    assert {before, only} <= set(called())
    write_call(tmp_path / "prefix_1", 3, {4: {learn.learn_report.ACCURACY: 0.5}})
    assert called() == []


def test_arms_differ_in_the_engine_and_its_micro_batches_alone(learn: ModuleType, tmp_path: Path) -> None:
    stock, prefix = (
        set(learn.grpo_overrides(arm, 1, "model", tmp_path, "test", tmp_path, learn.SIZE))
        for arm in ("stock", "prefix")
    )
    keys = {override.split("=")[0] for override in stock ^ prefix}
    assert keys == {"model_engine", "actor_rollout_ref.actor.use_dynamic_bsz"}


def test_a_call_ends_at_its_deadline_with_all_that_it_started(
    learn: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is past as soon as the process has said who it is."""
    code = (
        "import os, sys, time; print(os.getpid(), flush=True); "
        "time.sleep(3600 * (sys.argv[1] == 'long')); sys.exit(sys.argv[1] == 'bad')"
    )
    metrics = tmp_path / "call_01.jsonl"
    log = metrics.with_suffix(".log")

    def monotonic() -> float:
        while not log.read_text().endswith("\n"):
            time.sleep(0.01)
        return 0.0

    monkeypatch.setattr(learn, "time", SimpleNamespace(monotonic=monotonic))
    assert learn.call(["-c", code], ["long"], metrics, deadline=0.0) is False
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)
    assert learn.call(["-c", code], ["good"], metrics, deadline=600.0) is True
    with pytest.raises(SystemExit, match=r"status 1; its log is .*call_01\.log"):
        learn.call(["-c", code], ["bad"], metrics, deadline=600.0)


def test_other_settings_do_not_mix_with_the_runs_of_a_folder(learn: ModuleType, tmp_path: Path) -> None:
    args = argparse.Namespace(steps=4, lr=2e-5, test="test")
    learn.keep_settings(tmp_path, args)
    learn.keep_settings(tmp_path, args)
    args.lr = 1e-5
    with pytest.raises(SystemExit, match="give another --output"):
        learn.keep_settings(tmp_path, args)


def test_two_runs_go_at_once_and_one_run_only_once(learn: ModuleType, tmp_path: Path) -> None:
    with learn.alone(tmp_path / "prefix_1"), learn.alone(tmp_path / "stock_1"):
        with pytest.raises(SystemExit, match="another process is writing to .*prefix_1"):
            with learn.alone(tmp_path / "prefix_1"):
                pass


def test_verls_sft_trainer_cannot_make_its_group_on_a_cpu_and_ours_can(fresh, tmp_path: Path) -> None:
    env = os.environ | {"VERL_PLATFORM": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), *sys.path])}
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = fresh(STOCK_GROUP, tmp_path, env)
    assert "ANSWER Duplicate device type cpu / (0, 0, 1) 1" in done.stdout, done.stderr
