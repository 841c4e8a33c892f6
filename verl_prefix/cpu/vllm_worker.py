"""Code that runs inside vLLM's worker process under `rollout.name=vllm` on CPU; imported there and nowhere else."""

import vllm._custom_ops
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

# vLLM repacks linear weights for oneDNN and drops the parameters that a weight update writes to.
vllm._custom_ops._supports_onednn = False


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension, without oneDNN: `rollout.engine_kwargs.vllm.worker_extension_cls`."""
