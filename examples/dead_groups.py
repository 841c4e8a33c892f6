"""What groups without advantage cost an update, and what is left of it with `prefix.skip_zero_advantage`.

The demo's questions and its tiny model: of ten prompts with eight responses each, four have equal rewards. Both updates
take turns on one rank of our engine. `make -C examples/results dead-groups` runs it.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"VERL_PLATFORM": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # before verl is imported

import demo
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import verl.workers.engine  # noqa: F401  it registers verl's engines
from transformers import AutoTokenizer
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

from verl_prefix.backends.fsdp import PrefixEngineConfig
from verl_prefix.config.options import PrefixConfig
from verl_prefix.files import write_whole
from verl_prefix.testing import write_tiny_model
from verl_prefix.tools.ab.arm import loss_function, to_tensordict
from verl_prefix.tools.ab.source import synthetic_manifest
from verl_prefix.tools.arguments import Parser, file_to_write
from verl_prefix.tools.report import provenance
from verl_prefix.trace import StepRows

PROMPTS, DEAD, ROLLOUTS, RESPONSE, ROUNDS = 10, 4, 8, 24, 9
SIZE = demo.Size(PROMPTS, ROLLOUTS, 5, 4096, RESPONSE, 1e-3, demo.LETTERS, 600, steps=1)
ARMS = {"before": False, "after": True}  # skip_zero_advantage


def rows_of(prompts: list[list[int]], vocabulary: int) -> StepRows:
    """A mini-batch of random responses, half to all of RESPONSE tokens long, and rewards, equal in the first DEAD
    groups; its advantages are GRPO's."""
    generator = torch.Generator().manual_seed(1)
    columns: dict[str, list[torch.Tensor]] = {}
    for number, tokens in enumerate(prompts):
        rewards = torch.rand(ROLLOUTS, generator=generator) * (number >= DEAD)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for advantage in advantages:
            length = int(torch.randint(RESPONSE // 2, RESPONSE + 1, (1,), generator=generator))
            response = torch.randint(3, vocabulary, (length,), generator=generator)
            whole, ones = torch.cat([torch.tensor(tokens), response]), torch.ones(length, dtype=torch.int64)
            row = {
                "prompts": torch.tensor(tokens), "responses": response, "input_ids": whole, "loss_mask": ones,
                "response_mask": ones, "position_ids": torch.arange(len(whole)),
                "advantages": advantage.expand(length), "old_log_probs": torch.full((length,), -7.0),
            }  # fmt: skip
            for name, x in row.items():
                columns.setdefault(name, []).append(x)
    jagged = {name: (torch.cat(some), torch.tensor([*map(len, some)])) for name, some in columns.items()}
    longest = int(jagged["input_ids"][1].max())
    flags = {
        "use_dynamic_bsz": True, "max_token_len_per_gpu": 2 * longest, "micro_batch_size_per_gpu": 1,
        "use_remove_padding": True, "temperature": 1.0, "calculate_entropy": False,
        "global_batch_size": PROMPTS * ROLLOUTS,
    }  # fmt: skip
    return StepRows(jagged, {}, [str(i // ROLLOUTS) for i in range(PROMPTS * ROLLOUTS)], flags)


def engine_of(model: str, skips: bool, manifest: dict[str, Any]) -> Any:
    """Ours, in phases whose waves have a group's responses."""
    prefix = PrefixConfig(
        schedule="phased", wave_tokens=ROLLOUTS * RESPONSE, verify="off", min_speedup=0, skip_zero_advantage=skips
    )
    torch.manual_seed(0)
    built = EngineRegistry.new(
        model_type="language_model", backend="prefix",
        model_config=HFModelConfig(path=model, **manifest["model"]),
        engine_config=PrefixEngineConfig(
            strategy="prefix", prefix=prefix, use_torch_compile=False,
            mixed_precision=dict(param_dtype="fp32", reduce_dtype="fp32", buffer_dtype="fp32"),
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-6), checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    built.initialize()
    return built


def measured(folder: Path) -> dict[str, Any]:
    """Of each arm: tokens that an update computes, its seconds, and its gradient's norm."""
    questions, data = demo.prepare(folder, None, SIZE)
    model = write_tiny_model(folder / "model", texts=questions.read_text().splitlines())
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [row["prompt"] for row in pq.read_table(data / "train.parquet").to_pylist()][:PROMPTS]
    prompts = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        for messages in asked
    ]
    rows, manifest = rows_of(prompts, len(tokenizer)), synthetic_manifest((1, 1, ROLLOUTS, PROMPTS))
    loss, engines = loss_function(manifest), {name: engine_of(model, skips, manifest) for name, skips in ARMS.items()}
    found: dict[str, Any] = {name: {"seconds": [], "cpu_seconds": []} for name in ARMS}
    for turn in range(ROUNDS + 1):  # the first one is warm-up
        for name, engine in engines.items():
            with engine.train_mode():
                engine.optimizer_zero_grad()
                start, of_cpu = time.perf_counter(), time.process_time()
                output = engine.forward_backward_batch(to_tensordict(rows, update_lr_scheduler=True), loss)
                seconds, of_cpu = time.perf_counter() - start, time.process_time() - of_cpu
                norm = engine.optimizer_step() if turn == 0 else 0.0
            if turn == 0:
                saved = output["metrics"]["prefix/tokens_saved"]
                logical = int(rows.jagged["input_ids"][1].sum()) - PROMPTS * ROLLOUTS
                found[name] |= {"tokens": logical - int(saved[0] if isinstance(saved, list) else saved), "norm": norm}
            else:
                found[name]["seconds"].append(seconds)
                found[name]["cpu_seconds"].append(of_cpu)
    medians = {kind: {name: statistics.median(arm[kind]) for name, arm in found.items()}
               for kind in ("seconds", "cpu_seconds")}  # fmt: skip
    return {
        "arms": found,
        "medians": medians,
        "token_ratio": found["before"]["tokens"] / found["after"]["tokens"],
        "speedup": {kind: of["before"] / of["after"] for kind, of in medians.items()},
        "gradients": abs(found["after"]["norm"] / found["before"]["norm"] - 1),
    }


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=file_to_write, help="the report")
    out = parser.parse_args().out
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
        report = provenance("dead_groups/1", "cpu") | {"prompts": PROMPTS, "dead": DEAD, "rollouts": ROLLOUTS}
        report |= measured(folder)
        dist.destroy_process_group()
    write_whole(out, json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
