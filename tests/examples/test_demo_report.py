"""`make demo` ends with 0 only if both arms trained, agree at step 1, and ours shared something."""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from verl_prefix.testing import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
REUSE = {"actor/prefix/reuse_fraction": 0.8, "actor/prefix/tokens_saved": 9000.0, "actor/prefix/groups": 3.0}
Edit = dict[str, float | None]


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the picture of the test that looks at it alone: each takes most of a second."""
    if request.function is not test_equal_arms_pass_and_leave_a_report_and_a_picture:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **_: path.touch())


@pytest.fixture
def demo_verdict(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import demo_verdict

    return demo_verdict


@pytest.fixture
def run(demo_verdict: ModuleType, tmp_path: Path) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """Write both metric files, changed at step 1 by `stock` and `prefix`, stock's at step 3 by `last_stock`.

    Returns exit status, text and report.
    """
    import demo_report

    def metrics(name: str, step: int, edit: Edit) -> Edit:
        data = {key: 0.25 * step for key in demo_verdict.ROLLOUTS} | {"actor/pg_loss": 0.0, "actor/entropy": 2.5}
        data |= {"critic/rewards/mean": 0.1 * step, "actor/loss": -0.0025 * step, "actor/grad_norm": 0.4 / step}
        data |= {key: (4.0 if name == "stock" else 1.0) * step**2 for key in demo_verdict.TIMINGS.values()}
        data |= {"training/rollout_probs_diff_max": 3e-9}
        data |= REUSE if name == "prefix" else {}
        return {k: v for k, v in (data | edit).items() if v is not None}

    def run(
        stock: Edit | None = None,
        prefix: Edit | None = None,
        error: str | None = None,
        steps: int = 3,
        reuse: float = 0.8,
        rollout: str = "hf",
        last_stock: Edit | None = None,
        turns: int = 1,
        log: str = "",
    ) -> tuple[int, str, dict[str, Any]]:
        arms = []
        for name, edits in (("stock", {1: stock, 3: last_stock}), ("prefix", {1: prefix})):
            rows = [{"step": 0, "data": {"val-core/acc": 0.0}}]
            for step in range(1, (3 if name == "stock" else steps) + 1):
                drop = {"actor/prefix/reuse_fraction": reuse} if reuse else dict.fromkeys(REUSE)
                rows.append(
                    {
                        "step": step,
                        "data": metrics(name, step, (drop if name == "prefix" else {}) | (edits.get(step) or {})),
                    }
                )
            path, log_path = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.log"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            log_path.write_text(log + "".join(f"{name} line {i}\n" for i in range(99)))
            arms.append(demo_verdict.Arm(name, path, log_path, error if name == "prefix" else None, 60.0))
        text = io.StringIO()
        config = {"model": "none", "workload": "synthetic", "rollout": rollout, "size": {"turns": turns}}
        report = demo_verdict.build(*arms, num_steps=3, config=config)
        status = demo_report.finish(report, tmp_path, Console(file=text, width=200))
        return status, text.getvalue(), json.loads((tmp_path / "report.json").read_text())

    return run


def test_equal_arms_pass_and_leave_a_report_and_a_picture(run: Callable, tmp_path: Path) -> None:
    status, text, report = run()
    assert status == 0 and "FAILED" not in text and report["problems"] == []
    assert report["schema"] == "verl_prefix.demo/3"
    assert {"versions", "device", "git", "config", "arms", "ratios"} <= report.keys()
    assert [step["step"] for step in report["arms"]["prefix"]["steps"]] == [1, 2, 3]
    # Of steps 2 and 3, whose seconds differ and whose ratios do not.
    found = {"stock_s": 26.0, "prefix_s": 6.5, "ratio": 4.0, "ratios": [4.0, 4.0]}
    assert report["ratios"]["update_actor"] == found and "too uneven" not in text
    row = next(line for line in text.splitlines() if "old_log_prob" in line and "4.00x" in line)
    cells = [cell.strip() for cell in row.split("\u2502")]
    assert cells[2:-1] == ["2", "26.00 s", "6.50 s", "4.00x", "4.00 to 4.00"]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_rounding_noise_and_a_loss_of_zero_pass(run: Callable) -> None:
    assert run(prefix={"actor/grad_norm": 0.4 * (1 + 9e-4), "actor/pg_loss": 3e-8})[0] == 0


@pytest.mark.parametrize(
    ("metric", "value"), [("actor/grad_norm", 0.4 * (1 + 2e-3)), ("actor/loss", -0.0026), ("actor/entropy", 2.51)]
)
def test_another_number_at_step_one_fails_and_names_both(run: Callable, metric: str, value: float) -> None:
    status, text, report = run(prefix={metric: value})
    assert status == 1 and f"step 1 differs in {metric}" in text and str(value) in text
    assert not report["first_step"]["metrics"][metric]["agree"]


@pytest.mark.parametrize("metric", ["actor/grad_norm", "actor/loss"])
def test_a_number_that_is_not_there_is_not_agreement(run: Callable, metric: str) -> None:
    status, text, _ = run(stock={metric: None}, prefix={metric: None})
    assert status == 1 and f"step 1 differs in {metric}" in text


def test_other_rollouts_at_step_one_are_not_comparable_and_fail(run: Callable) -> None:
    status, text, report = run(prefix={"response_length/mean": 0.5, "actor/grad_norm": 9.0})
    assert status == 1 and "not comparable" in text and "response_length/mean 0.25 / 0.5" in text
    assert "differs in" not in text and not report["first_step"]["same_rollouts"]


def test_vllm_may_sample_other_responses_and_then_nothing_is_compared(run: Callable) -> None:
    status, text, _ = run(prefix={"response_length/mean": 0.5, "actor/grad_norm": 9.0}, rollout="vllm")
    assert status == 0 and "note: the arms sampled other responses" in text and "step 1 agrees" not in text
    assert run(prefix={"actor/grad_norm": 9.0}, rollout="vllm")[0] == 1


@pytest.mark.parametrize("rollout", ["hf", "vllm"])
@pytest.mark.parametrize("difference", [2e-4, float("nan"), None])
def test_a_rollout_with_other_weights_than_the_actor_fails(run: Callable, rollout: str, difference: float) -> None:
    status, text, _ = run(stock={"training/rollout_probs_diff_max": difference}, rollout=rollout)
    assert status == 1 and "step 1 of the stock arm: rollout and actor disagree" in text


@pytest.mark.parametrize("prefix", [{}, {"actor/prefix/reuse_fraction": 0.0}])
def test_an_arm_that_shares_nothing_fails(run: Callable, prefix: Edit) -> None:
    status, text, _ = run(prefix=prefix, reuse=0.0)
    assert status == 1 and "shared nothing" in text and "verl-prefix doctor" in text


@pytest.mark.parametrize("steps", [0, 2])
def test_a_failed_arm_shows_the_end_of_its_log(run: Callable, tmp_path: Path, steps: int) -> None:
    status, text, report = run(error="verl exited with status 1", steps=steps)
    assert status == 1 and "the prefix arm failed: verl exited with status 1" in text
    assert str(tmp_path / "prefix.log") in text and "prefix line 98" in text and "prefix line 9\n" not in text
    assert len(report["arms"]["prefix"]["steps"]) == steps


def test_an_arm_that_stops_early_without_an_error_fails(run: Callable) -> None:
    status, text, _ = run(steps=2)
    assert status == 1 and "the prefix arm logged 2 of 3 steps" in text


def test_a_ratio_beyond_the_saved_tokens_is_flagged(run: Callable) -> None:
    _, text, report = run()
    assert report["token_ratio"] == pytest.approx(5.0) and not any("is not sharing" in n for n in report["notes"])
    _, text, report = run(reuse=0.5)
    assert report["token_ratio"] == pytest.approx(2.0)
    assert "4.0x faster with 2.0x fewer tokens: the rest is not sharing" in text


def test_a_ratio_that_is_uneven_or_of_one_step_is_not_there(run: Callable) -> None:
    _, text, report = run(steps=2)
    assert report["ratios"]["step"]["ratio"] is None and report["ratios"]["step"]["ratios"] == [4.0]
    assert "note: less than two steps after the first were timed" in text and "4.00x" not in text
    _, text, report = run(steps=1)
    assert report["ratios"] == {} and "note: less than two steps after the first were timed" in text
    for last, even in ((5.9, True), (6.1, False)):
        _, text, report = run(last_stock={"timing_s/update_actor": 9 * last})
        assert report["ratios"]["update_actor"]["ratios"] == pytest.approx([4.0, last])
        assert (report["ratios"]["update_actor"]["ratio"] is not None) == even == ("uneven \u2502" not in text)
        assert ("update_actor is 4.00 to 6.10 over the steps: too uneven for a ratio" in text) == (not even)
        assert report["ratios"]["ref"]["ratio"] == 4.0


def test_tokens_of_turns_are_shown_and_trees_must_save_some(
    run: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the engine says them in the prefix arm's log, on its first rank."""
    from verl_prefix.config.options import PrefixConfig
    from verl_prefix.engine.metrics.sharing_advice import SharingAdvice

    backend = SimpleNamespace(ranks=SimpleNamespace(data_size=1), trains=True)

    def said(off: int, uid: int) -> str:
        caplog.clear()
        monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
        SharingAdvice(backend, PrefixConfig(), epochs=1)._tell_of_trees(9000, off, uid, 1900)
        return caplog.text

    status, text, report = run(turns=4, log=said(6000, 2000))
    assert status == 0 and report["tokens"] == {"stock": 9000, "one level": 6000, "trees": 2000}
    rows = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in text.splitlines()]
    found = [row for row in rows if row and row[0] in report["tokens"]]
    assert found == [["stock", "9000", "1.00x"], ["one level", "6000", "1.50x"], ["trees", "2000", "4.50x"]]
    for log in (said(6000, 6001), ""):
        status, text, _ = run(turns=4, log=log)
        assert status == 1 and "trees share no more than whole prompts do" in text
    assert "tokens" not in run(log=said(6000, 2000))[2]


def test_committed_reports_hold_what_follows_from_their_steps(demo_verdict: ModuleType) -> None:
    found = [path for path in (ROOT / "examples" / "results").glob("*.json") if "demo/" in path.read_text()[:50]]
    assert len(found) >= 7
    for path in found:
        report = json.loads(path.read_text())
        demo_verdict.derive(again := json.loads(path.read_text()))
        assert report == again, f"run python examples/demo_report.py {path.relative_to(ROOT)}"


def test_a_training_uses_all_cores_unless_told_otherwise(
    demo_verdict: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import training_process

    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [training_process.environment(tmp_path, ranks)["OMP_NUM_THREADS"] for ranks in (1, 2, 8)] == ["5", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert training_process.environment(tmp_path, 2)["OMP_NUM_THREADS"] == "3"


def test_leaving_a_run_ends_what_it_started_in_other_process_groups(demo_verdict: ModuleType, tmp_path: Path) -> None:
    import training_process

    child = "import os, time; os.setpgid(0, 0); print(os.getpid(), flush=True); time.sleep(3600)"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]
    log = tmp_path / "log"
    with training_process.process_group(command, dict(os.environ), log) as process:
        while not log.read_text().endswith("\n") and process.poll() is None:
            time.sleep(0.05)
        pid = int(log.read_text())
        assert psutil.pid_exists(pid) and process.poll() is None
    assert process.poll() is not None  # ended, not waited for
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("seconds_per_step", "error"), [(700, None), (1200, "no progress for 900 s, at 'step 2'")])
def test_an_arm_that_is_slow_goes_on_and_one_that_stands_still_is_ended(
    demo_verdict: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_per_step: int, error: str | None
) -> None:
    """On a clock that jumps by 100 s; verl's place is taken by steps that appear in its metrics."""
    import demo
    from rich.progress import Progress

    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda _: setattr(clock, "now", clock.now + 100)
    metrics = tmp_path / "stock.jsonl"
    lines = [json.dumps({"step": step, "data": {"timing_s/step": 1.0}}) + "\n" for step in (1, 2, 3)]

    def poll() -> int | None:
        done = 1 + clock.now // seconds_per_step
        metrics.write_text("".join(lines[: int(done)]))
        return 0 if done > 3 else None

    @contextlib.contextmanager
    def process_group(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(poll=poll, pid=0, returncode=0)

    monkeypatch.setattr(demo, "time", clock)
    monkeypatch.setattr(demo, "process_group", process_group)
    monkeypatch.setattr(demo, "memory_mib", lambda _: {})
    arm = demo.run_arm("stock", [], tmp_path, demo.SIZES["smollm2"], 1, Progress(disable=True))
    assert arm.error == error


def test_a_second_demo_in_the_same_folder_is_refused(
    demo_verdict: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import demo

    monkeypatch.setattr(demo, "demonstrate", lambda *_: 0)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output", str(tmp_path)])
    assert demo.main() == 0
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as refused:
            demo.main()
    assert refused.value.code == 2 and "another demo is writing to" in capsys.readouterr().err


def test_a_run_leaves_the_report_of_another_alone_and_says_how_long_it_takes(
    demo_verdict: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import demo

    for name in ("run", "run-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(name)
    monkeypatch.setattr(demo, "run_arm", lambda *_: sys.exit(7))
    monkeypatch.setattr(demo, "smollm2", lambda _: "model")
    monkeypatch.setattr(os, "getloadavg", lambda: (5.2, 0.0, 0.0))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output", str(tmp_path / "run")])
    with pytest.raises(SystemExit):
        demo.main()
    assert {path.read_text() for path in tmp_path.rglob("report.json")} == {"run", "run-2"}
    said = capsys.readouterr().out
    assert f"report in {tmp_path}/run-3\nabout 4 minutes on two idle cores; other work keeps 5.2 cores busy" in said
    pages = [" ".join((ROOT / page).read_text().split()) for page in ("README.md", "examples/README.md")]
    assert "On two idle cores the demo then takes 4 to 6 minutes" in pages[0]
    assert "with its actor and with ours | 4 to 6 minutes;" in pages[1]


def test_numbers_that_are_zero_to_rounding_have_no_relative_difference(run: Callable) -> None:
    _, text, _ = run(stock={"actor/pg_loss": 1e-8}, prefix={"actor/pg_loss": -3e-8})
    (row,) = [line.split("\u2502")[1:-1] for line in text.splitlines() if "actor/pg_loss" in line]
    assert [cell.strip() for cell in row] == ["actor/pg_loss", "1e-08", "-3e-08", "both 0"]
    assert "equal" in next(line for line in text.splitlines() if "actor/entropy" in line)


def test_a_tiny_model_is_written_without_a_bar(
    demo_verdict: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import demo
    from transformers.utils.logging import enable_progress_bar

    enable_progress_bar()
    monkeypatch.setattr(demo, "run_arm", lambda *_: sys.exit(7))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--model", "tiny", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 7 and (tmp_path / "tiny" / "model.safetensors").is_file()
    assert "Writing model shards" not in capsys.readouterr().err


def test_arms_differ_in_the_engine_alone(demo_verdict: ModuleType, tmp_path: Path) -> None:
    import demo

    shared = demo.overrides("model", tmp_path, "hf", 1, demo.SIZES["tiny"])
    keys = [override.lstrip("+").split("=")[0] for override in shared]
    assert len(keys) == len(set(keys))
    assert set(demo.ARMS["stock"]) ^ set(demo.ARMS["prefix"]) == {"model_engine=dp", "model_engine=prefix"}
    assert not {override.split("=")[0] for arm in demo.ARMS.values() for override in arm} & set(keys)
    turns = demo.overrides("model", tmp_path, "hf", 1, dataclasses.replace(demo.SIZES["tiny"], turns=4))
    more = [override.lstrip("+").split("=")[0] for override in turns if override not in shared]
    assert len(turns) == len(shared) + len(more) - 1 and set(more) & set(keys) == {"actor_rollout_ref.rollout.n"}
    assert "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4" in turns


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_tiny_models_load_with_grouped_heads_and_chat_markup(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_tiny_model(tmp_path / family, family=family, num_hidden_layers=3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    config = model.config
    assert config.model_type == family and config.num_hidden_layers == 3 and config.max_position_embeddings == 8192
    assert config.num_attention_heads >= 2 * config.num_key_value_heads
    assert (tokenizer.eos_token, config.eos_token_id) == ("<|im_end|>", tokenizer.convert_tokens_to_ids("<|im_end|>"))
    assert tokenizer.pad_token_id == config.pad_token_id != tokenizer.eos_token_id
    messages = [{"role": "user", "content": "h\u00e9llo 1987"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nh\u00e9llo 1987<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tiny_models_are_the_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    def digest(name: str, seed: int) -> dict[str, str]:
        path = Path(write_tiny_model(tmp_path / name, seed=seed, texts=["one two three", "two three four"]))
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}

    first, again, other = digest("first", 3), digest("again", 3), digest("other", 4)
    assert first == again and first["model.safetensors"] != other["model.safetensors"]


def test_unknown_tiny_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family='gpt2' is unknown"):
        write_tiny_model(tmp_path, family="gpt2")
