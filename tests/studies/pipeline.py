"""Does a pipeline of real processes take as long as `auto.pipeline` says? verl's Megatron engine and ours train the
same rows on 2 and 4 gloo ranks, a stage each.

What is not real: a stage's layers also sleep, for so many milliseconds per token that the tiny model's own work and two
cores do not count. So this measures order and waiting, over the real schedules and messages, and nothing else. All
arms take turns in one process.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "helpers")]

# Seconds that the layers of all stages take for a token's forward; backward takes twice as long.
TOKEN = 4e-3
# Prompt, response, rows of a group, groups, tokens of a pass.
BATCHES = {"several passes": (48, 12, 4, 8, 200), "few passes": (96, 12, 4, 3, 250)}
ARMS = {"packed": {}, "phased": {"wave_tokens": 48}}


class Sleep(torch.autograd.Function):
    """Hidden states as they are, later."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


def slowed(engine: Any, stages: int) -> Any:
    from verl_prefix.models.mcore import unwrapped

    decoder = unwrapped(engine.module[0]).decoder
    run = decoder.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = run(*args, **kwargs)
        return Sleep.apply(hidden, TOKEN / stages * len(hidden))

    decoder.forward = forward
    return engine


def job(path: str, stages: int, which: str, repeats: int) -> dict[str, Any]:
    """On a rank: seconds of each arm's update, and when this stage was done."""
    import torch.distributed as dist
    from engines import _loss
    from megatron_engines import batch_of, engine
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from verl_prefix.backends.megatron import PrefixMegatronEngine

    prompt, response, size, groups, budget = BATCHES[which]
    options = {"groups": [(str(i), prompt, [response] * size, "") for i in range(groups)], "budget": budget}
    layout = {"model": "qwen3_deep", "pipeline_model_parallel_size": stages}
    built = {"stock": engine(MegatronEngineWithLMHead, path, **layout)} | {
        arm: engine(PrefixMegatronEngine, path, prefix={"schedule": arm, "verify": "off", **more}, **layout)
        for arm, more in ARMS.items()
    }
    found: dict[str, Any] = {arm: [] for arm in built}
    for one in built.values():
        slowed(one, stages)
    data = batch_of(built["stock"], (0,), options)
    for turn in range(repeats + 1):
        for arm, one in built.items():
            with one.train_mode(disable_auto_offload=True):
                one.optimizer_zero_grad()
                dist.barrier()
                start = time.perf_counter()
                one.forward_backward_batch(data.copy(), _loss(options))
                if turn:  # the first one builds what lasts
                    found[arm].append(time.perf_counter() - start)
    return found


def predicted(stages: int, which: str) -> dict[str, list[float]]:
    """By the event simulation of the same plans, seconds until each stage is done: of tokens alone, as they sleep."""
    from verl_prefix.auto.cost import Memory, Rates
    from verl_prefix.auto.cost_model import CostModel
    from verl_prefix.auto.megatron import Division
    from verl_prefix.auto.shape import ModelShape
    from verl_prefix.core.groups import Group

    prompt, response, size, groups, budget = BATCHES[which]
    shape = ModelShape(1.0, 0.0, 0.0, (None,) * 4, 1.0, 1.0, 1.0, 1)
    # The engine's groups: a prefix without its last token, whose outputs suffixes begin with.
    rows = [
        Group.of_prompt(tuple(range(i * size, (i + 1) * size)), prompt - 1, (response,) * size) for i in range(groups)
    ]
    found = {}
    for arm in ("stock", *ARMS):
        memory = Memory(1, False, False, None, False, division=Division(stages, stages=stages))
        costs = CostModel(shape, False, ARMS.get(arm, {}).get("wave_tokens"), 0, memory)
        path = costs.stock_passes(rows, budget) if arm == "stock" else costs.plan(rows, budget, arm)
        found[arm] = [*costs.timeline(path, "update", {"update": Rates(0.0, 3 * TOKEN, 0.0, 0.0)}).ends]
    return found


def rank_of(rank: int, folder: str, stages: int, which: str, repeats: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(stages), VERL_PLATFORM="cpu")
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/{stages}.{which}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=stages)
    found = job(f"{folder}/model", stages, which, repeats)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def main() -> None:
    from megatron_engines import write_megatron_model

    from verl_prefix.versions import device_name, git_state, package_versions

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    batches = []
    with tempfile.TemporaryDirectory() as folder:
        write_megatron_model(Path(folder, "model"), "qwen3_deep")
        for stages in (2, 4):
            for which, (prompt, response, size, groups, budget) in BATCHES.items():
                torch.multiprocessing.spawn(rank_of, (folder, stages, which, options.repeats), nprocs=stages)
                ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(stages)]
                of_stages = {arm: [statistics.median(rank[arm]) for rank in ranks] for arm in ranks[0]}
                batch = {"prompt": prompt, "response": response, "rows": size, "groups": groups, "budget": budget}
                found: dict[str, Any] = {"stages": stages, **batch}
                for name, ends in (("measured", of_stages), ("predicted", predicted(stages, which))):
                    seconds = {arm: max(stage) for arm, stage in ends.items()}
                    speedup = {arm: seconds["stock"] / seconds[arm] for arm in ARMS}
                    # Ours sums metrics over all ranks before it is done: its stages end together.
                    found[name] = {"seconds": seconds, "seconds_of_stocks_stages": ends["stock"], "speedup": speedup}
                batches.append(found)
                print(json.dumps(batches[-1]))
    versions = package_versions(("verl", "megatron-core", "torch"))
    report = {
        "versions": versions,
        "device": device_name("cpu"),
        "git": git_state(),
        "token_seconds": TOKEN,
        "batches": batches,
    }
    Path(options.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
