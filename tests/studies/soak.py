"""Thousands of updates on two gloo ranks with random ragged batches; nothing may grow after the warm-up.

Every update draws its own groups, sessions of turns, lengths and schedule's waves; passes nest. Watched, per rank:
resident memory, what of it is in use (the rest the C allocator keeps in pieces), tensors that Python still knows, open
file descriptors, threads; at the end: processes. Writes how fast each grew to a JSON file, and every sample to a
folder; the exit status is 1 if something grew. Needs glibc.
"""

import argparse
import ctypes
import functools
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.multiprocessing as mp
from torch.nested import as_nested_tensor

from verl_prefix.testing import write_tiny_model
from verl_prefix.tools.report import provenance

WARM_UP = 0.2  # share of the updates
MEMORY = ("rss_mib", "in_use_mib")
# Growth after the warm-up that counts as a leak: MiB of memory per 100 updates (a prefix graph of the largest batch is
# about 3 MiB), and nothing at all of what can be counted.
MAX_SLOPE = 2.0
END = 2  # of a message, as the tiny model's tokenizer has it


class _Mallinfo2(ctypes.Structure):
    """Of glibc's malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def random_batch(rng: np.random.Generator, vocab: int, budget: int):
    from verl.utils import tensordict_utils as tu

    def some(least: int, most: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(3, vocab, int(rng.integers(least, most))))

    rows, end = [], torch.tensor([END])
    for group in range(int(rng.integers(1, 5))):
        prompt, uid = some(1, 160), f"g{group}"
        if rng.random() < 0.4:  # a row per turn of sessions, which begin alike; their passes nest
            for _ in range(int(rng.integers(1, 4))):
                history = torch.cat([prompt, end])
                for _ in range(int(rng.integers(2, 6))):
                    said = some(1, 20)
                    rows.append((uid, history, torch.cat([some(1, 20), said, end])))
                    history = torch.cat([history, said, end, some(1, 30), end])
            continue
        for _ in range(int(rng.integers(1, 9))):
            rows.append((uid, prompt, some(1, 40)))
    rows = [rows[i] for i in rng.permutation(len(rows))]

    def nested(tensors):
        return as_nested_tensor(list(tensors), layout=torch.jagged)

    def noise(shift: float):
        return nested(torch.from_numpy(rng.normal(shift, 0.3, len(row[2]))).float() for row in rows)

    fields = {
        "prompts": nested(row[1] for row in rows),
        "responses": nested(row[2] for row in rows),
        "input_ids": nested(torch.cat(row[1:]) for row in rows),
        "position_ids": nested(torch.arange(len(row[1]) + len(row[2])) for row in rows),
        "loss_mask": nested(torch.ones_like(row[2]) for row in rows),
        "response_mask": nested(torch.ones_like(row[2]) for row in rows),
        "advantages": noise(0.0),
        "old_log_probs": noise(-6.0),
        "uid": [row[0] for row in rows],
    }
    flags = {
        "use_dynamic_bsz": True, "max_token_len_per_gpu": budget, "use_remove_padding": True, "temperature": 1.0,
        "calculate_entropy": True, "global_batch_size": 2 * len(rows),
    }  # fmt: skip
    return tu.get_tensordict(fields, flags)


def build_engine(model: str):
    import verl  # noqa: F401
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from verl_prefix.backends.fsdp import PrefixEngineConfig
    from verl_prefix.config.options import PrefixConfig

    engine = EngineRegistry.new(
        model_type="language_model",
        backend="prefix",
        model_config=HFModelConfig(
            path=model, use_remove_padding=True, override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=False,
        ),
        engine_config=PrefixEngineConfig(
            use_torch_compile=False, model_dtype="fp32", prefix=PrefixConfig(min_speedup=0.0, offload=False),
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-5, weight_decay=0.01, clip_grad=1.0),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    return engine


def worker(rank: int, rendezvous: str, model: str, updates: int, out: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", VERL_PLATFORM="cpu")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    engine = build_engine(model)
    config = ActorConfig(strategy="fsdp2", rollout_n=4, use_dynamic_bsz=True, entropy_coeff=0.01)
    loss = functools.partial(ppo_loss, config=config)
    rng, process = np.random.default_rng(rank), psutil.Process()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    samples, seen = [], {"packed_passes": 0.0, "waves": 0.0, "groups": 0.0, "pass_depth": 0.0}
    for update in range(updates):
        # Small budgets make waves, large ones packed passes; both ranks need the same.
        data = random_batch(rng, engine.model_config.hf_config.vocab_size, (120, 400, 4000)[update % 3])
        with engine.train_mode(disable_auto_offload=True):
            output = engine.train_batch(data, loss)
        assert np.isfinite(output["metrics"]["grad_norm"]), output["metrics"]
        for name in seen:
            seen[name] += output["metrics"].get(f"prefix/{name}", [0.0])[0]
        del output, data
        if rank == 0 and update % 50 == 49:
            print(f"{update + 1} of {updates} updates", flush=True)
        if update % 10 == 9:
            gc.collect()
            libc.malloc_trim(0)
            allocator = libc.mallinfo2()
            samples.append(
                {
                    "update": update + 1,
                    "rss_mib": round(process.memory_info().rss / 2**20, 1),
                    "in_use_mib": round((allocator.uordblks + allocator.hblkhd) / 2**20, 2),
                    "objects": len(gc.get_objects()),
                    "tensors": sum(isinstance(x, torch.Tensor) for x in gc.get_objects()),
                    "files": process.num_fds(),
                    "threads": process.num_threads(),
                    "children": len(process.children(recursive=True)),
                }
            )
    (out / f"rank{rank}.json").write_text(json.dumps({"samples": samples, "seen": seen}))
    torch.distributed.destroy_process_group()


def judge(samples: list[dict], updates: int) -> dict:
    """Slopes and growth after the warm-up."""
    after = [s for s in samples if s["update"] > WARM_UP * updates]
    at = np.array([s["update"] for s in after], dtype=float)
    slopes = {f"{name}_per_100_updates": 100 * np.polyfit(at, [s[name] for s in after], 1)[0] for name in MEMORY}
    half = len(after) // 2
    grew = {
        name: max(s[name] for s in after[half:]) - max(s[name] for s in after[:half])
        for name in ("objects", "tensors", "files", "threads", "children")
    }
    ok = all(slope <= MAX_SLOPE for slope in slopes.values()) and all(value <= 0 for value in grew.values())
    return {name: round(float(slope), 3) for name, slope in slopes.items()} | {"grew": grew, "ok": bool(ok)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--samples", type=Path, default="outputs/soak", help="folder: a JSON file per rank")
    args = parser.parse_args()

    before = {p.pid for p in psutil.Process().children(recursive=True)}
    start = time.time()
    args.samples.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        model = write_tiny_model(f"{tmp}/model")
        mp.spawn(worker, args=(f"{tmp}/rendezvous", model, args.updates, args.samples), nprocs=2)
    left = [
        p.name()
        for p in psutil.Process().children(recursive=True)
        if p.pid not in before and "resource_tracker" not in " ".join(p.cmdline())
    ]
    found = [json.loads((args.samples / f"rank{rank}.json").read_text()) for rank in range(2)]
    ranks = [{"seen": rank["seen"]} | judge(rank["samples"], args.updates) for rank in found]
    result = {
        **provenance("verl_prefix.soak/1"),
        "updates": args.updates,
        "seconds": round(time.time() - start),
        "ok": all(rank["ok"] for rank in ranks) and not left,
        "processes_left": left,
        "ranks": ranks,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for number, rank in enumerate(ranks):
        print(
            f"rank {number}: {rank['rss_mib_per_100_updates']} MiB per 100 updates, in use "
            f"{rank['in_use_mib_per_100_updates']}, grew {rank['grew']}, {rank['seen']}"
        )
    print("ok" if result["ok"] else "something grew", f"after {args.updates} updates; {args.out}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
