"""What `make gpu-smoke` decides by, and that a wrong kernel fails it; with DRY_RUN=1, all of its steps."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from verl_prefix.core.kernels import cpu

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def smoke(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("gpu_smoke")


@pytest.mark.ray
@pytest.mark.full
def test_every_step_of_a_dry_run_holds(smoke, tmp_path, monkeypatch, warm_commands):
    for name in ("VERL_PLATFORM", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # which main sets
    monkeypatch.setattr(sys, "argv", ["gpu_smoke.py", "--dry-run", "--out", str(tmp_path)])
    assert smoke.main() == 0
    steps = json.loads((tmp_path / "gpu_smoke.json").read_text())["steps"]
    made = {name: sum("value" in check for check in step["checks"]) for name, step in steps.items()}
    own = EXAMPLES.parent / ".venv-megatron/bin/python"  # in which main runs that step
    if importlib.util.find_spec("megatron") is None and not own.exists():
        assert made.pop("megatron") == 0
    assert made.keys() | {"megatron"} == smoke.STEPS.keys() and all(made.values()), made


@pytest.fixture
def profiling(smoke):
    return importlib.import_module("smoke.profiling")


def test_network_counts_where_nothing_else_runs(profiling):
    # 0 to 10; the network 2 to 5, of which 2 to 3 is hidden, and 9 to 10, twice at once.
    spans = [
        ("gemm", 0.0, 3.0), ("nccl_all_gather", 2.0, 5.0), ("gemm", 5.0, 9.0), ("flash", 6.0, 8.0),
        ("nccl_reduce", 9.0, 10.0), ("nccl_all_gather", 9.5, 10.0),
    ]  # fmt: skip
    assert profiling.exposed(spans) == pytest.approx(3 / 10)
    assert profiling.exposed(span for span in spans if "nccl" not in span[0]) == 0
    assert profiling.exposed([]) == 0


def test_the_first_failure_ends_it_and_is_in_the_report(smoke, tmp_path):
    started = []

    def start_step(name, seconds):
        assert 0 < seconds <= 600
        started.append(name)
        code = int(name == "engines")
        found = {"checks": [{"check": "x", "value": 1.0}], "failure": "x is 1, and must be 2" if code else None}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
        return code

    report = smoke.run(True, tmp_path, start_step)
    assert started == ["kernels", "engines"] and not report["holds"]
    assert json.loads((tmp_path / "gpu_smoke.json").read_text())["steps"]["engines"]["failure"].startswith("x is 1")
    for name in smoke.STEPS:
        (tmp_path / f"{name}.json").write_text(json.dumps({"checks": [], "failure": None}))
    assert smoke.run(True, tmp_path, lambda name, seconds: 0)["holds"]


def test_what_else_is_in_the_folder_stays_and_no_earlier_verdict_does(smoke, tmp_path, monkeypatch):
    for name in ("gpu_smoke", "kernels", "mine"):
        (tmp_path / f"{name}.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["gpu_smoke.py", "--dry-run", "--out", str(tmp_path)])
    for name in ("VERL_PLATFORM", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # which main sets
    monkeypatch.setattr(smoke, "run", lambda *_: {"holds": False})
    assert smoke.main() == 1 and [path.name for path in tmp_path.iterdir()] == ["mine.json"]


@pytest.mark.parametrize("code", [0, 1, 124])
def test_a_step_that_ends_without_a_word_fails(smoke, tmp_path, code):
    report = smoke.run(False, tmp_path, lambda name, seconds: code)
    assert list(report["steps"]) == ["kernels"] and not report["holds"]
    assert report["steps"]["kernels"]["failure"] == f"it ended with {code}"


def test_checks_of_a_gpu_are_named_as_skipped_in_a_dry_run_alone(smoke, tmp_path):
    checks = smoke.Checks(True, tmp_path)
    checks.on_gpu("network", 0.9, most=0.03)
    assert checks.found == [{"check": "network", "skipped": "needs a GPU"}]
    with pytest.raises(AssertionError, match="network is 0.9, and must be -inf to 0.03"):
        smoke.Checks(False, tmp_path).on_gpu("network", 0.9, most=0.03)
    with pytest.raises(AssertionError):
        checks.that("not a number", float("nan"), most=1.0)


def test_without_megatron_its_step_is_named_as_skipped(smoke, tmp_path, monkeypatch):
    step = importlib.import_module("smoke.megatron")
    monkeypatch.setattr(step, "_is_installed", lambda name: False)
    assert smoke.run_step("megatron", True, tmp_path) == 0
    found = json.loads((tmp_path / "megatron.json").read_text())
    assert found["checks"] == [{"check": "Megatron", "skipped": "megatron-core is not installed"}]


@pytest.mark.parametrize("off", [{}, {"log_probs": 1e-5}, {"grad_norm": 2.1}, {"reuse": 0.0}])
def test_what_of_megatron_is_off_fails_its_step(smoke, tmp_path, monkeypatch, off):
    step = importlib.import_module("smoke.megatron")
    right = {"log_probs": 1e-7, "grad_norm": 2.0, "seconds": 1.0, "peak_mib": 1.0, "reuse": 0.5}
    monkeypatch.setattr(step, "_is_installed", lambda name: name == "megatron.core")
    monkeypatch.setattr(step, "save_model", lambda *args: "")
    monkeypatch.setattr(step, "on_ranks", lambda *args: {"stock": right, "packed": right, "phased": right | off})
    assert smoke.run_step("megatron", True, tmp_path) == bool(off)


@pytest.mark.parametrize("broken", [None, "out", "dk"])
def test_a_kernel_that_is_off_by_two_percent_fails(smoke, tmp_path, monkeypatch, broken):
    forward, backward = cpu.forward, cpu.backward
    if broken == "out":
        monkeypatch.setattr(cpu, "forward", lambda *args: (lambda out, lse: (out * 1.02, lse))(*forward(*args)))
    elif broken == "dk":
        monkeypatch.setattr(cpu, "backward", lambda *args: (lambda q, k, v: (q, k * 1.02, v))(*backward(*args)))
    assert smoke.run_step("kernels", True, tmp_path) == int(broken is not None)
    failure = json.loads((tmp_path / "kernels.json").read_text())["failure"]
    assert f"error of {broken}" in failure if broken else failure is None
