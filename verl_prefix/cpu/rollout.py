"""`rollout.name=hf` in verl's registries: replicas that are one Ray actor, and the sending side of a weight update.

One server serves the whole job: several would divide the same cores, and a group that is spread over them would pay its
prefix once in each. Weights come from the actor or, where the rollout has resources of its own, from the worker of
verl's that got them from the actor by a checkpoint engine.
"""

import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

import ray
import torch
import verl.workers.rollout.base as rollout_base
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from verl_prefix.cpu.server import HFServer


def actor_name() -> str:
    """The server's name: of this Ray job, since other jobs of the cluster may share its namespace."""
    return f"hf_rollout_server_{ray.get_runtime_context().get_job_id()}"


class HFReplica(RolloutReplica):
    """Every replica is a handle to the one server.

    ``servers`` stays empty: most of what verl does to all servers (sleep, wake up, drop caches, profile) has no object
    here, because nothing shares an accelerator's memory with the actor.
    """

    async def abort_all_requests(self, **_: bool) -> None:
        """End what is being generated with what it has; nothing starts before `resume_generation`."""
        await self._server_handle.pause.remote()

    async def resume_generation(self) -> None:
        """Go on."""
        await self._server_handle.resume.remote()

    async def launch_servers(self) -> None:
        """Start the server, or find it, and wait until its model is loaded.

        Raises:
            ValueError: the configuration asks for what this rollout does not do.
            ray.exceptions.RayActorError: the server cannot start; it carries the server's own traceback.
        """
        if self.rollout_mode is RolloutMode.COLOCATED or self.is_reward_model or self.is_teacher_model:
            raise ValueError(
                f"rollout.name=hf serves the policy only, not rollout mode {self.rollout_mode}, a reward model or a "
                "teacher; use a reward function"
            )
        if self.rollout_mode is RolloutMode.STANDALONE and self.config.nnodes * self.config.n_gpus_per_node != 1:
            raise ValueError(
                f"rollout.name=hf is one server, and rollout.nnodes={self.config.nnodes} with rollout.n_gpus_per_node="
                f"{self.config.n_gpus_per_node} asks for more; set both to 1"
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
    """The sending side of a weight update."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: nothing was released."""

    async def release(self) -> None:
        """Do nothing: there is no accelerator memory to hand over."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
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
                "actor_rollout_ref.rollout.checkpoint_engine.backend to another than delta_sharded"
            )
        dtype = PrecisionType.to_dtype(self.config.dtype)
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        server = ray.get_actor(actor_name()) if torch.distributed.get_rank() == 0 else None
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        async for name, weight in fused_experts(weights):
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


_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


async def fused_experts(
    weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Weights under the names of transformers' modules, [experts, out, in] of a mixture: what verl took apart for vLLM
    (unfuse_moe_params in verl/workers/engine/fsdp/utils.py, expert by expert; default_moe_param_handler in
    verl/workers/engine/veomni/utils.py, all gates of a rank's experts before their ups)."""
    of, members = "", dict[tuple[int, str], torch.Tensor]()  # a mixture's weight, and its parts until the next name

    def fused() -> tuple[str, torch.Tensor]:
        experts = torch.stack([members[part] for part in sorted(members)])  # gate before up
        return of, experts.unflatten(0, (-1, 2)).flatten(1, 2) if of.endswith("gate_up_proj") else experts

    async for name, weight in ensure_async_iterator(weights):
        expert = _EXPERT.fullmatch(name)
        now = f"{expert[1]}.{'down_proj' if expert[3] == 'down' else 'gate_up_proj'}" if expert else ""
        if members and now != of:
            yield fused()
            members.clear()
        of = now
        if expert:
            members[int(expert[2]), expert[3]] = weight
        else:
            yield name, weight
    if members:
        yield fused()


RolloutReplicaRegistry.register("hf", lambda: HFReplica)
# verl 0.9.1 has a register() for replicas and only this dictionary for adapters.
rollout_base._ROLLOUT_REGISTRY["hf", "async"] = f"{__name__}.HFServerAdapter"
