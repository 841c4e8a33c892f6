"""Code that runs inside vLLM's worker process under `rollout.name=vllm` on CPU; imported there and nowhere else."""

from typing import Any

import torch
import vllm._custom_ops
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

# vLLM repacks linear weights for oneDNN and drops the parameters that a weight update writes to.
vllm._custom_ops._supports_onednn = False

_select_experts = CPUUnquantizedExperts._select_experts


def _select_and_report(experts: CPUUnquantizedExperts, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM's own, which tells nobody what it chose: vLLM records no routes of experts on CPU
    (`FusedMoEExpertsMonolithic.supports_routing_replay_capture`)."""
    weights, chosen = _select_experts(experts, *args)
    if experts.routing_replay_capture_fn is not None:
        experts.routing_replay_capture_fn(chosen)
    return weights, chosen


CPUUnquantizedExperts._select_experts = _select_and_report
CPUUnquantizedExperts.supports_routing_replay_capture = lambda experts: True


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension, without oneDNN: `rollout.engine_kwargs.vllm.worker_extension_cls`."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """As verl's own; then packs weights of experts for the CPU's kernel, which vLLM does once, when it starts."""
        super().update_weights_from_ipc(*args, **kwargs)
        for model in self._iter_all_models():
            for layer in model.modules():
                if isinstance(layer, RoutedExperts):
                    layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
