"""The one edge of verl's asynchronous trainers that this machine lacks: the broadcast of weights by NCCL, from the
actor's ranks to the rollout's worker. Here they travel through Ray's object store, in verl's own `CheckpointEngine`.

    actor_rollout_ref.rollout.checkpoint_engine.backend=object_store
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=object_store_checkpoint
"""

from collections.abc import AsyncIterator, Iterable

import ray
import torch
from ray.util.queue import Queue
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("object_store")
class ObjectStoreCheckpointEngine(CheckpointEngine):
    """Rank 0 of the actor puts one weight after another, and the one worker of the rollout takes them."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master

    def prepare(self) -> Queue | None:
        self.queue = Queue(maxsize=8, actor_options={"num_cpus": 0}) if self.is_master else None
        return self.queue

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[Queue | None]) -> tuple[dict, dict]:
        assert rollouts == 1
        return {"queue": metadata[:1] * actors}, {"queue": metadata[:1]}

    def init_process_group(self, queue: Queue) -> None:
        self.queue = queue

    def finalize(self) -> None:
        if self.is_master:
            self.queue.shutdown()

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        for name, weight in weights:  # every rank gathers each
            if self.is_master:
                await self.queue.put_async((name, ray.put(weight.detach().cpu())))
        if self.is_master:
            await self.queue.put_async(None)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while (item := await self.queue.get_async()) is not None:
            name, weight = item
            yield name, torch.as_tensor(await weight).clone()
