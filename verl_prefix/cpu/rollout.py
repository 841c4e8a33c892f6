"""`rollout.name=hf` in verl's registries: replicas that are one Ray actor, and the actor's side of a weight update.

One server serves the whole job, because its replicas would only divide the same cores, and because a group that is
spread over replicas would pay its prefix once per replica.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import ray
import torch
import verl.workers.rollout.base as rollout_base
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry

from verl_prefix.cpu.server import HFServer


def actor_name() -> str:
    """The server's name: of this Ray job, since other jobs of the cluster may share its namespace."""
    return f"hf_rollout_server_{ray.get_runtime_context().get_job_id()}"


class HFReplica(RolloutReplica):
    """Every replica is a handle to the one server.

    ``servers`` stays empty: what verl does to all servers (sleep, wake up, drop caches, abort, profile) has no object
    here, because nothing shares an accelerator's memory with the actor.
    """

    async def launch_servers(self) -> None:
        """Start the server, or find it, and wait until its model is loaded.

        Raises:
            ValueError: the configuration asks for what this rollout does not do.
            ray.exceptions.RayActorError: the server cannot start; it carries the server's own traceback.
        """
        if self.rollout_mode is not RolloutMode.HYBRID or self.is_reward_model or self.is_teacher_model:
            raise ValueError(
                f"rollout.name=hf serves the policy of a hybrid trainer only, not rollout mode {self.rollout_mode}, a "
                "reward model or a teacher; use a trainer that shares its workers, such as trainer.v1.trainer_mode=sync"
            )
        if self.world_size != 1:
            raise ValueError(
                f"rollout.name=hf does not split the model, and tensor x data x pipeline parallel size is "
                f"{self.world_size}; set actor_rollout_ref.rollout.tensor_model_parallel_size=1"
            )
        if self.config.logprobs_mode != "processed_logprobs":
            raise ValueError(
                f"rollout.name=hf has no actor_rollout_ref.rollout.logprobs_mode={self.config.logprobs_mode!r}; "
                "set it to processed_logprobs"
            )
        if self.model_config.get("lora_rank", 0) > 0 and not self.model_config.get("lora", {}).get("merge", False):
            raise ValueError("rollout.name=hf loads whole weights; set actor_rollout_ref.model.lora.merge=True")
        actor = ray.remote(HFServer).options(
            name=actor_name(), get_if_exists=True, num_cpus=0, max_concurrency=self.max_concurrency
        )
        self._server_handle = actor.remote(self.config, self.model_config)
        # The load balancer keeps one entry per address; nothing listens there.
        self._server_address = actor_name()
        await self._server_handle.ping.remote()


class HFServerAdapter(BaseRollout):
    """The actor's side of a weight update."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: nothing was released."""

    async def release(self) -> None:
        """Do nothing: there is no accelerator memory to hand over."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Send full parameters from rank 0, in buckets of ``checkpoint_engine.update_weights_bucket_megabytes``.

        Every rank draws all weights, because each one is gathered by a collective.

        Raises:
            ValueError: ``wire_format`` is not ``named_tensors``.
        """
        if wire_format != "named_tensors":
            raise ValueError(
                f"rollout.name=hf takes full tensors, not wire_format={wire_format!r}; set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
            )
        dtype = PrecisionType.to_dtype(self.config.dtype)
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        server = ray.get_actor(actor_name()) if torch.distributed.get_rank() == 0 else None
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, weight in fused_experts(weights):
            if server is None:
                continue
            weight = weight.detach().to("cpu", dtype)
            if bucket and size + weight.nbytes > limit:
                await server.update_weights.remote(bucket, last=False, version=None)
                bucket, size = [], 0
            bucket.append((name, weight))
            size += weight.nbytes
        if server is not None:
            await server.update_weights.remote(bucket, last=True, version=global_steps)


_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(?:(gate|up)|down)_proj\.weight")


def fused_experts(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights under the names of transformers' modules, [experts, out, in] of a mixture: what verl took apart for vLLM
    (unfuse_moe_params in verl/workers/engine/fsdp/utils.py), expert by expert, gate before up."""

    def fused_name(item: tuple[str, torch.Tensor]) -> str:
        expert = _EXPERT.fullmatch(item[0])
        return f"{expert[1]}.{'gate_up_proj' if expert[2] else 'down_proj'}" if expert else item[0]

    for name, group in groupby(weights, fused_name):
        members = list(group)
        if members[0][0] == name:
            yield from members
            continue
        experts = torch.stack([weight for _, weight in members])
        yield name, experts.unflatten(0, (-1, 2)).flatten(1, 2) if name.endswith("gate_up_proj") else experts


RolloutReplicaRegistry.register("hf", lambda: HFReplica)
# verl 0.9.1 has a register() for replicas and only this dictionary for adapters.
rollout_base._ROLLOUT_REGISTRY["hf", "async"] = f"{__name__}.HFServerAdapter"
