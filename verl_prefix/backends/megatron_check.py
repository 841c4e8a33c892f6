"""The self-check on verl's Megatron engine: which gradients it compares, and how it leaves all state as it was.

Source: megatron-core 0.16.1, megatron/core/distributed/param_and_grad_buffer.py.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from tensordict import TensorDict

from verl_prefix.backends.verl_engines import VerlMegatronEngine
from verl_prefix.engine.backend import Ranks
from verl_prefix.engine.checks.gradients import Gradients
from verl_prefix.engine.checks.noise import disturbed_outputs
from verl_prefix.models.mcore import router_counts, unwrapped
from verl_prefix.models.replaced import replaced


def gradient_buffers(module: Any) -> list[torch.Tensor]:
    """Returns the flat tensors in which mcore's DistributedDataParallel keeps all gradients of this rank."""
    return [buffer.grad_data for buffer in (*module.buffers, *module.expert_parallel_buffers)]


class MegatronSelfCheck:
    """The self-check's methods of `engine.backend.Backend`, for verl's Megatron engine.

    Args:
        engine: verl's engine, which has built its model.
        ranks, trains: the backend's.
    """

    def __init__(self, engine: VerlMegatronEngine, ranks: Ranks, trains: bool) -> None:
        self._engine, self._ranks, self._trains = engine, ranks, trains
        (self._module,) = engine.module
        self._config = unwrapped(self._module).config
        self._layers = list(unwrapped(self._module).decoder.layers)

    def gradients(self) -> Gradients:
        (most,) = self._ranks.max_over_ranks([len(self._layers)])  # stages may have different numbers
        missing = [torch.nn.Module()] * (int(most) - len(self._layers))
        parts = {f"layer {i} of a stage": layer for i, layer in enumerate([*self._layers, *missing])}
        return Gradients(self._module, {}, parts, self._local_grad, self._clear)

    def rounding_noise(self, seed: int) -> AbstractContextManager[None]:
        attention = [layer.self_attention for layer in self._layers]
        return disturbed_outputs(attention, [], self._engine.param_dtype, seed)

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """As `Backend` says, and leaves routers as they were. Inside, the loss that balances experts is off, since it
        depends on how rows fall into passes. Routers' biases are fixed, which mcore would else move whenever it reduces
        gradients."""
        if not self._trains:
            yield
            return
        coefficient = self._config.moe_aux_loss_coeff
        no_balance = [0.0] * len(coefficient) if isinstance(coefficient, list) else 0.0
        count = functools.partial(_divisible_count, self._ranks.sequence_size)
        with (
            self._kept_aside(),
            replaced(self._config, "moe_router_bias_update_rate", 0.0),
            replaced(self._config, "moe_aux_loss_coeff", no_balance),
            replaced(self._engine, "_routed_num_tokens", count),
        ):
            yield

    @contextmanager
    def _kept_aside(self) -> Iterator[None]:
        """Context that begins without gradients. On leaving, gradients and routers' counts of tokens are as before."""
        counts = router_counts(self._module)
        # At the beginning of an update all are zero, and nothing is copied.
        kept = [(x, x.cpu()) for x in (*gradient_buffers(self._module), *counts) if x.any()]
        self._clear()
        try:
            yield
        finally:
            self._clear()
            for count in counts:
                count.zero_()
            for x, values in kept:
                x.copy_(values)

    def _clear(self) -> None:
        if self._trains:
            self._module.zero_grad_buffer()

    def _local_grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Returns the part of a gradient that is reduced on this rank.

        With the distributed optimizer each rank reduces one shard of a bucket, which holds the gradients of several
        parameters. Of a bucket of 100 elements on 4 ranks, rank 1 reduces [25, 50). A gradient at [40, 70) of the
        bucket has its first 10 elements there. Its other 20 elements are left out: on this rank they are sums over this
        rank's tokens alone.
        """
        grad: torch.Tensor | None = getattr(parameter, "main_grad", None)
        if grad is None:
            return torch.zeros_like(parameter)
        group = self._module.param_to_bucket_group[parameter]
        if not group.ddp_config.use_distributed_optimizer:
            return grad.detach()
        bucket = group.param_to_bucket[parameter].grad_data
        shard_size = len(bucket) // group.intra_distributed_optimizer_instance_size
        shard_begin = group.intra_distributed_optimizer_instance_rank * shard_size
        grad_begin = grad.storage_offset() - bucket.storage_offset()
        begin = shard_begin - grad_begin  # of the shard, in places of the gradient
        return grad.detach().flatten()[max(begin, 0) : max(begin + shard_size, 0)]


def _divisible_count(sequence_size: int, data: TensorDict) -> torch.Tensor:
    """Replaces `_routed_num_tokens` of verl's engine by a count that `sequence_size` divides.

    Under `calculate_per_token_loss` verl multiplies the loss by this count, and mcore divides gradients by the sum over
    ranks of count // sequence_size. With 7 tokens on 2 ranks the two differ: 7, and 3 + 3. The number of rows times
    `sequence_size` leaves no rest: with 3 rows both are 6.
    """
    return torch.tensor(len(data) * sequence_size, device=data["input_ids"].device)
