"""A teacher's server on a CPU, for `VERL_USE_EXTERNAL_MODULES`: it stands for sglang's, of which verl's teacher loop
wants the log-probs of a prompt. All else of distillation is verl's own: pool, manager, agent loop, batch, loss."""

from typing import Any

import verl_prefix.cpu.platform  # noqa: F401  before any module of verl asks for the platform

import ray  # isort: skip
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput


class TeacherServer:
    """Answers as verl's servers do (extract_prompt_logprobs in verl/workers/rollout/vllm_rollout/utils.py)."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    @torch.no_grad()
    def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: object) -> TokenOutput:
        """What the teacher says after each token: its k likeliest ones, or what it gives the next one."""
        log_probs = self.model(torch.tensor([prompt_ids])).logits[0].log_softmax(-1)
        if k := sampling_params["prompt_logprobs"]:
            values, ids = log_probs.topk(k)
        else:
            ids = torch.tensor([*prompt_ids[1:], 0]).unsqueeze(1)
            values = log_probs.gather(-1, ids)
        said = {"prompt_ids": ids.tolist(), "prompt_logprobs": values.tolist()}
        return TokenOutput(token_ids=[0], extra_fields=said)


class TeacherReplica(RolloutReplica):
    """One actor, whatever the pool."""

    async def init_colocated(self, resource_pool: object) -> None:
        await self.launch_servers()

    async def launch_servers(self) -> None:
        self._server_handle = ray.remote(TeacherServer).options(num_cpus=0).remote(self.model_config.path)
        self._server_address = f"teacher_{self.replica_rank}"


RolloutReplicaRegistry.register("sglang", lambda: TeacherReplica)
