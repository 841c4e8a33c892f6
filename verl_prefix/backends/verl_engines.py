"""What backends call of verl's engines, beside `engine.backend.VerlEngine`. After an upgrade of verl look here first,
then at what backends override or replace:

    fsdp                                 `_build_module`, `_build_lora_module`, `load_checkpoint`
    veomni                               `_maybe_apply_async_activation_offload`, `initialize`
    stock_path, hugging_face             `use_ulysses_sp`
    stock_replay                         `prepare_model_inputs`, `prepare_model_outputs`
    megatron                             `preprocess_thd_engine` of verl's Megatron losses
    megatron_check                       `_routed_num_tokens`
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from verl_prefix.engine.backend import VerlEngine


class VerlHFEngine(VerlEngine, Protocol):
    """verl's FSDPEngine, or an engine of verl that derives from it."""

    ulysses_sequence_parallel_size: int
    ulysses_parallel_group: torch.distributed.ProcessGroup | None
    use_ulysses_sp: bool

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Callable[..., Any] | None
    ) -> Any: ...


class VerlFSDPEngine(VerlHFEngine, Protocol):
    """verl's FSDPEngine itself. Its `scaler` scales losses in fp16, and is None in other dtypes."""

    use_remove_padding: bool
    scaler: Any
    _autocast_dtype: torch.dtype

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[Any, Any]: ...

    def _gather_and_unpad_packed(self, x: torch.Tensor, pad_size: int) -> torch.Tensor: ...

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> AbstractContextManager[Any]: ...


class VerlMegatronEngine(VerlEngine, Protocol):
    """verl's MegatronEngineWithLMHead; its `module` is a list of one."""

    param_dtype: torch.dtype
    _distillation_use_topk_active: bool

    def get_context_parallel_group(self) -> torch.distributed.ProcessGroup: ...

    def _lm_head_logits_processor(self, *tensors: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]: ...

    def _routed_num_tokens(self, data: TensorDict) -> torch.Tensor: ...
