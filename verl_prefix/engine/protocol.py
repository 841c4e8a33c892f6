"""What the helpers of this package ask of the engine, a `PrefixFSDPEngine`; what is verl's has verl's name."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from verl_prefix.auto.shape import ModelShape
from verl_prefix.config import PrefixConfig
from verl_prefix.core.attention import AttentionPass
from verl_prefix.core.groups import Group
from verl_prefix.core.schedule import Schedule
from verl_prefix.core.waves import Plan
from verl_prefix.engine.loss import LossFunction
from verl_prefix.engine.rows import Trees


class Engine(Protocol):
    """One rank's engine."""

    module: Any
    model_config: Any
    engine_config: Any
    optimizer_config: Any
    use_remove_padding: bool
    use_ulysses_sp: bool
    _autocast_dtype: torch.dtype
    prefix_config: PrefixConfig
    shape: ModelShape
    trees: Trees

    def get_data_parallel_group(self) -> Any: ...
    def get_data_parallel_rank(self) -> int: ...
    def get_data_parallel_size(self) -> int: ...
    def is_mp_src_rank_with_outputs(self) -> bool: ...
    def prepare_model_outputs(self, *args: Any) -> dict[str, torch.Tensor]: ...
    @property
    def whole_rows(self) -> str | None: ...
    def autocast(self) -> AbstractContextManager[Any]: ...
    def schedule(self, outputs: Any, step: Any, backward: Any) -> Schedule: ...

    # By all ranks together:
    def reduce_max(self, values: Sequence[float]) -> list[float]: ...
    def reduce_sum(self, values: Sequence[float]) -> list[float]: ...
    def stock_batch(self, data: TensorDict, loss_function: LossFunction, forward_only: bool) -> dict[str, Any]: ...
    def run_plan(
        self, data: TensorDict, groups: Sequence[Group], plan: Plan, loss_function: LossFunction,
        forward_only: bool, *, pass_type: Callable[..., AttentionPass],
    ) -> tuple[dict[str, Any], dict[str, float]]: ...  # fmt: skip
