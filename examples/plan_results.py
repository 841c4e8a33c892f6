"""What `verl-prefix plan` says of two jobs, for examples/results (`make -C examples/results plans plan-turns`).

    python examples/plan_results.py video FILE       of make demo-video STEPS=2 RANKS=2 SCHEDULE=phased PIXELS=50176
    python examples/plan_results.py turns FILE FILE  of an agent with a search tool, with `prefix.trees` uid and off

The agent: Qwen3-8B on MuSiQue, 32 prompts of 2,000 tokens, half of them a system prompt, 8 sessions each, on 8 H100s.
"""

import dataclasses
import random
import subprocess
import sys

import demo
import pyarrow
import pyarrow.parquet
from simulate_tables import config_of

from verl_prefix.testing import write_tiny_model, write_tiny_vlm


def plan(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "verl_prefix.cli", "plan", *words], check=True)


def video(out: str) -> None:
    output = demo.ROOT / "outputs/plan_video"
    size = dataclasses.replace(demo.SIZES["qwen3_vl"], prompts=4, steps=2, frame_pixels=50176)
    questions, data = demo.prepare(output, None, size)
    model = write_tiny_vlm(output / "qwen3_vl", family="qwen3_vl", texts=questions.read_text().splitlines())
    prefix = "actor_rollout_ref.actor.prefix"
    phased = [f"{prefix}.schedule=phased", f"{prefix}.wave_tokens={size.rollouts * size.response_tokens}"]
    plan("--out", out, *demo.overrides(model, data, "hf", 2, size), *demo.ARMS["prefix"], *phased)


def turns(uid: str, off: str) -> None:
    folder, draw = demo.ROOT / "outputs/plan_turns", random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_model(folder / "model")  # its tokenizer; every word below is one token
    (folder / "model/model.safetensors").unlink()
    config_of("qwen3-8b").save_pretrained(folder / "model")

    def thousand_words() -> str:
        return " ".join(draw.choices(("the", "river", "and"), k=1000))

    system = {"role": "system", "content": thousand_words()}
    rows = [[system, {"role": "user", "content": thousand_words()}] for _ in range(64)]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": rows}), folder / "train.parquet")
    role = "actor_rollout_ref"
    keys = [
        "algorithm.adv_estimator=grpo", f"data.train_files={folder}/train.parquet", "data.train_batch_size=32",
        "data.max_prompt_length=8192", "data.max_response_length=1024", f"{role}.model.path={folder}/model",
        f"{role}.rollout.n=8", f"{role}.actor.ppo_mini_batch_size=320", f"{role}.actor.use_dynamic_bsz=true",
        "trainer.n_gpus_per_node=8", "trainer.v1.trainer_mode=prefix_sync",
    ]  # fmt: skip
    sizes = "--turns 10 --thinking 300 --say 100 --tool 400".split()
    for trees, out in (("uid", uid), ("off", off)):
        plan("--simulate", "--gpu", "h100", *sizes, "--out", out, *keys, f"{role}.actor.prefix.trees={trees}")


{"video": video, "turns": turns}[sys.argv[1]](*sys.argv[2:])
