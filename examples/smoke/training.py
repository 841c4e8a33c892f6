"""GRPO through verl, with rollout."""

import importlib.util
import json
import sys
from dataclasses import replace

import demo
from training_process import environment, process_group

from smoke.checks import Checks
from verl_prefix.testing import write_tiny_model, write_tiny_vlm


def grpo(checks: Checks) -> None:
    """Two GRPO steps through verl with vLLM, which sleeps and wakes (the dry run: with the demo's rollout)."""
    _train(checks, "tiny", 2)


def video(checks: Checks) -> None:
    """One GRPO step of a Qwen2.5-VL on generated clips."""
    _train(checks, "qwen2_5_vl", 1)


def _train(checks: Checks, name: str, num_steps: int) -> None:
    if not checks.dry_run and importlib.util.find_spec("vllm") is None:
        checks.found.append({"check": "GRPO steps", "skipped": "vllm is not installed"})
        return
    output = checks.out / name
    size = replace(demo.SIZES[name], steps=num_steps)
    questions, data = demo.prepare(output, None, size)
    texts = questions.read_text().splitlines()
    # vLLM's kernels on a GPU want heads of 64 at least.
    wide = {} if checks.dry_run else {"head_dim": 64}
    model = (
        write_tiny_model(output / "model", texts=texts, **wide) if name == "tiny"
        else write_tiny_vlm(output / "model", family=name, texts=texts)
    )  # fmt: skip
    rollout = "hf" if checks.dry_run else "vllm"
    arguments = [*demo.overrides(model, data, rollout, 1, size), *demo.ARMS["prefix"]]
    if not checks.dry_run:
        arguments.remove("+platform=cpu")
        arguments += ["actor_rollout_ref.rollout.gpu_memory_utilization=0.3"]
        arguments += ["actor_rollout_ref.rollout.tensor_model_parallel_size=1"]
        arguments += ["actor_rollout_ref.rollout.enforce_eager=true"]
        if importlib.util.find_spec("flash_attn") is None:
            arguments += ["+actor_rollout_ref.model.override_config.attn_implementation=sdpa"]
    metrics, log = output / "metrics.jsonl", output / "verl.log"
    metrics.unlink(missing_ok=True)
    env = environment(metrics)
    # The platform is the machine's own. Ray counts a CPU platform's ranks as GPUs, and would miss them there.
    env.pop("CUDA_VISIBLE_DEVICES" if checks.dry_run else "VERL_PLATFORM", None)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments, f"hydra.run.dir={output / 'hydra'}"]
    with process_group(command, env, log) as process:
        code = process.wait()
    assert code == 0, f"verl ended with {code}; the end of {log}:\n" + log.read_text(errors="replace")[-3000:]
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    checks.that("training steps", len(steps), num_steps, num_steps)
    for number, step in enumerate(steps, start=1):
        checks.that(f"step {number}: prefix/reuse_fraction", step["prefix/reuse_fraction"], least=0.3)
        checks.that(f"step {number}: gradient norm", step["actor/grad_norm"], 1e-12, 1e6)
        # What vLLM sampled with are the actor's weights, those after an update too.
        gap = step["training/rollout_probs_diff_mean"]
        checks.that(f"step {number}: rollout's probabilities beside the actor's", gap, most=0.02)
    checks.that("self-check of step 1", steps[0]["prefix/verify_log_probs"], most=3.0)
