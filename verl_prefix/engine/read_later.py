"""Numbers that the host reads from the device, once per mini-batch: in a pass each would wait for its forward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from verl.utils.metric import Metric

_READS = {torch.Tensor.unbind: 1, torch.Tensor.item: 0, torch.Tensor.__bool__: 0}  # of tensors with so many dimensions


class HostInts(TorchFunctionMode):
    """While open, integers [] or [n] that the host holds are read, and iterated, as Python's: where verl walks over
    lengths or row numbers (`index_select_tensor_dict`, `no_padding_2_padding`), each would take an operation or two."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _READS and args[0].dim() == _READS[func] and args[0].is_cpu and not args[0].is_floating_point():
            numbers = args[0].tolist()
            return bool(numbers) if func is torch.Tensor.__bool__ else numbers
        return func(*args, **(kwargs or {}))


class ItemsLater(HostInts):
    """And `.item()` of a floating-point tensor returns a copy of it, [], for `read_metrics`. For losses that read
    numbers for their metrics alone, as verl's do (`"actor/ppo_kl": ppo_kl.detach().item()`)."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.item and args[0].is_floating_point():
            return args[0].detach().clone().reshape(())  # verl's ppo_loss adds to pg_loss in place
        return super().__torch_function__(func, types, args, kwargs)


def read_metrics(passes: Sequence[dict[str, Any]], more: Sequence[torch.Tensor]) -> list[float]:
    """Puts numbers where metrics hold tensors, in place, and returns `more` as numbers; the host waits once.

    Args:
        passes: per pass its metrics: numbers, tensors [], or verl's `Metric`. more: tensors [].
    """
    tensors, targets = list(more), []
    for metrics in passes:
        for name, value in metrics.items():
            held, keys = (value.values, range(len(value.values))) if isinstance(value, Metric) else (metrics, [name])
            for key in keys:
                if isinstance(held[key], torch.Tensor):
                    targets.append((held, key))
                    tensors.append(held[key])
    numbers = torch.stack([x.detach().double() for x in tensors]).tolist() if tensors else []
    for (held, key), number in zip(targets, numbers[len(more) :], strict=True):
        held[key] = number
    return numbers[: len(more)]
