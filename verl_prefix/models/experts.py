"""Loads of a mixture's experts: how many tokens of the logical batch each one gets, though a prefix runs once."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from verl_prefix.core.context import ForwardContext
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.runs import on_device
from verl_prefix.core.sequence_parallel import Shards


def multiplicity(packed_row: PackedRow, shards: Shards | None = None) -> torch.Tensor:
    """[T] int64: how many rows with outputs contain each token of a packed row, or of this rank's `shards` of it; 0 in
    a dummy."""
    counts = []
    for group in packed_row.groups:
        steps = [torch.zeros(strand.end - strand.start + 1, dtype=torch.int64) for strand in group.strands]
        for fork, num_outputs in zip(group.forks, group.output_lens, strict=True):
            for strand, start, end in group.strands_before(fork) if num_outputs else ():
                steps[strand][0] += 1
                steps[strand][end - start] -= 1
        counts += [step.cumsum(0)[:-1] for step in steps[group.num_outer :]]
    of_suffixes = torch.full((packed_row.num_tokens - packed_row.num_strand_tokens,), int(bool(packed_row.groups)))
    found = torch.cat([*counts, of_suffixes])
    return found if shards is None else shards.local(found)


class ExpertLoads:
    """Tokens that each expert of each layer got, in an update. A model without experts has no loads."""

    def __init__(self) -> None:
        self._loads: dict[int, torch.Tensor] = {}

    def add(self, layer: int, counts: torch.Tensor) -> None:
        """Adds a forward's tokens by expert, [experts]."""
        self._loads[layer] = self._loads[layer] + counts if layer in self._loads else counts

    def of(self, layer: int) -> torch.Tensor | float:
        """A layer's tokens by expert, [experts]; 0 before any forward."""
        return self._loads.get(layer, 0.0)

    def metrics(
        self, reduce_sum: Callable[[Sequence[float]], Sequence[float]], layers: int = 0, experts: int = 0
    ) -> dict[str, float]:
        """How far a layer's loads are from an even load, relative to it: by how much its fullest expert exceeds it
        (max_vio), and how far its experts are off on average (avg_vio). Both as the largest and the mean over layers,
        as verl's rollout/moe/* (verl/trainer/ppo/metric_utils.py). Empty without routers.

        Args:
            reduce_sum: element-wise sum over ranks.
            layers, experts: of the whole model, where ranks have different layers; 0: all have the same.
        """
        if not self._loads and not layers:
            return {}
        numbers = range(layers) if layers else sorted(self._loads)
        found = next(iter(self._loads.values()), torch.zeros(experts))
        own = torch.stack([self._loads.get(layer, torch.zeros_like(found)) for layer in numbers])
        loads = torch.tensor(reduce_sum(own.flatten().tolist()), dtype=torch.float64).view_as(own)
        loads = loads[loads.sum(1) > 0]
        if not len(loads):
            return {}
        deviation = loads * loads.shape[1] / loads.sum(1, keepdim=True) - 1
        by_layer = {"max_vio": deviation.amax(1), "avg_vio": deviation.abs().mean(1)}
        return {
            f"prefix/moe/{name}/{over}": value
            for name, by in by_layer.items()
            for over, value in (("max", by.max().item()), ("avg", by.mean().item()))
        }


def router_kinds(model: torch.nn.Module) -> tuple[type, ...]:
    """Classes of the modules that transformers records as `router_logits`."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    recorders: list[Any] = [(part._can_record_outputs or {}).get("router_logits") for part in parts]
    return tuple({recorder.target_class for recorder in recorders if hasattr(recorder, "target_class")})


class CountedRouters(ExpertLoads):
    """Counts what routers of transformers choose in forwards of an update, and not again where gradient checkpointing
    repeats them. A `layer` here is the number of a router: dense layers do not count.

    Routers are modules that transformers records as `router_logits`, and that return their choice, [T, chosen] int64,
    beside the logits.

    Args:
        model: Hugging Face's, or FSDP2's root of it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        kinds = router_kinds(model)
        self._routers = [module for module in model.modules() if isinstance(module, kinds)]

    @contextmanager
    def counting(self, forward_context: ForwardContext, device: torch.device) -> Iterator[None]:
        """Context of a forward on `device`, whose tokens count as often as the logical batch has them."""
        with ExitStack() as hooks:
            if self._routers and torch.is_grad_enabled():
                weights = on_device(multiplicity(forward_context.packed_row, forward_context.shards), device)
                for layer, router in enumerate(self._routers):
                    hook = functools.partial(self._count, layer, weights)
                    hooks.callback(router.register_forward_hook(hook).remove)
            yield

    def _count(self, layer: int, weights: torch.Tensor, router: torch.nn.Module, args: object, output: object) -> None:
        found = output if isinstance(output, tuple) else ()
        tensors = [x for x in found if isinstance(x, torch.Tensor) and x.dim() > 1]  # JetMoe's has flat ones, sorted
        chosen = next((x for x in tensors if not x.is_floating_point()), None)
        if chosen is None:
            return
        num_experts = next(x.shape[-1] for x in tensors if x.is_floating_point())
        counts = weights.new_zeros(num_experts)
        self.add(layer, counts.index_add_(0, chosen.flatten(), weights.repeat_interleave(chosen.shape[-1])))
