"""Rows of a batch as bytes, and back: what `exchange` sends."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import save
from safetensors.torch import load
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from verl.utils import tensordict_utils as tu

from verl_prefix.engine.fields import PIXEL_INPUTS

# Fields that travel and are no tensors. All others (raw_prompt, extra_fields) stay behind: neither outputs nor verl's
# own losses read them.
TRAVELLING = ("uid", "session_id", PIXEL_INPUTS)


class TravellingRow(NamedTuple):
    """A row that travels, or its outputs on their way back.

    Attributes:
        number: the row's number in the batch that verl handed over.
        tensors: its tensors, by name.
        others: its values of `TRAVELLING`, by name.
    """

    number: int
    tensors: dict[str, torch.Tensor]
    others: dict[str, Any]


class RowCodec:
    """Takes the rows of a batch out of it, packs them as bytes, and joins such rows to a batch.

    Args:
        tensors: fields of the batch that are tensors, or outputs of its rows, by name.
        others: values of `TRAVELLING`, one per row, by name.

    Attributes:
        format: what two ranks must have in common to read each other's rows.
    """

    def __init__(self, tensors: Mapping[str, Any], others: Mapping[str, list[Any]] | None = None) -> None:
        self._tensors = {name: tensors[name] for name in sorted(tensors)}
        self.others = dict(others or {})
        fields = [(name, str(x.dtype), *_shape(x)) for name, x in self._tensors.items()]
        self.format = repr((fields, sorted(self.others)))

    @classmethod
    def of_batch(cls, data: TensorDict) -> "RowCodec":
        """Takes from `data` what travels with its rows."""
        values = {name: data.get(name) for name in data.keys() if not isinstance(data.get(name), NonTensorData)}
        tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
        others = {name: values[name].tolist() for name in TRAVELLING if name in values and name not in tensors}
        return cls(tensors, others)

    @functools.cached_property
    def _rows(self) -> dict[str, Sequence[torch.Tensor]]:
        return {name: x.detach().cpu().unbind() for name, x in self._tensors.items()}

    def row(self, index: int, *, number: int) -> TravellingRow:
        """Takes out the row that is `index`-th here; `number` is that of the `TravellingRow`."""
        tensors = {name: rows[index] for name, rows in self._rows.items()}
        return TravellingRow(number, tensors, {name: values[index] for name, values in self.others.items()})

    def pack(self, rows: Sequence[TravellingRow]) -> torch.Tensor:
        """Packs rows as one uint8 tensor in the format of safetensors. It has the tensors of the rows and those of
        their pixels, named "{index}/{row or multi_modal_inputs}/{dtype}/{field}", and "heads": JSON of all else.

        Raises:
            TypeError: a value is neither a tensor nor JSON.
        """
        if not rows:
            return torch.empty(0, dtype=torch.uint8)
        arrays: dict[str, np.ndarray] = {}
        heads = []
        for index, row in enumerate(rows):
            visual = row.others.get(PIXEL_INPUTS) or {}
            pixels = {name: x for name, x in visual.items() if isinstance(x, torch.Tensor)}
            for kind, tensors in (("row", row.tensors), (PIXEL_INPUTS, pixels)):
                for name, x in tensors.items():
                    dtype = str(x.dtype).removeprefix("torch.")
                    arrays[f"{index}/{kind}/{dtype}/{name}"] = _array(x)
            no_tensors = {name: x for name, x in visual.items() if name not in pixels}
            heads.append([row.number, row.others | {PIXEL_INPUTS: no_tensors} if visual else row.others])
        try:
            heads_json = json.dumps(heads, default=_plain_number)
            arrays["heads"] = np.frombuffer(heads_json.encode(), dtype=np.uint8)
        except TypeError as error:
            stay = "set actor_rollout_ref.actor.prefix.exchange=off, and rows stay"
            raise TypeError(f"{', '.join(self.others)} cannot travel with their rows: {error}; {stay}") from error
        return torch.frombuffer(bytearray(save(arrays)), dtype=torch.uint8)

    def unpack(self, packed: torch.Tensor) -> list[TravellingRow]:
        """Returns the rows that a codec of the same format packed; tuples come back as lists."""
        if not len(packed):
            return []
        tensors = load(packed.numpy().tobytes())
        heads = json.loads(tensors.pop("heads").numpy().tobytes())
        rows = [TravellingRow(number, {}, others) for number, others in heads]
        for stored_as, x in tensors.items():
            index, kind, dtype, name = stored_as.split("/", 3)
            row = rows[int(index)]
            (row.tensors if kind == "row" else row.others[PIXEL_INPUTS])[name] = x.view(getattr(torch, dtype))
        return rows

    def join(self, rows: Sequence[TravellingRow]) -> dict[str, torch.Tensor]:
        """Returns the tensors of a batch of these rows, by name."""
        return {name: _join([row.tensors[name] for row in rows], x) for name, x in self._tensors.items()}


def _plain_number(x: object) -> object:
    """Turns a number of numpy, by which trainers may number sessions, into Python's."""
    if isinstance(x, np.generic):
        return x.item()
    raise TypeError(f"a {type(x).__name__} is neither a tensor nor JSON")


def _array(x: torch.Tensor) -> np.ndarray:
    """Returns the tensor for safetensors.numpy: safetensors.torch would make a ctypes type for each number of bytes,
    and Python keeps those for ever. numpy has no bfloat16, whose bits then stand in int16."""
    x = x.detach().cpu().contiguous()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def _shape(x: Any) -> tuple[int, list[int]]:
    """Returns the dimension in which rows differ (0: none), and the sizes of all others but that of rows."""
    if not x.is_nested:
        return 0, list(x.shape[1:])
    return x._ragged_idx, [n for i, n in enumerate(x.values().shape, start=1) if i != x._ragged_idx]


def _join(rows: list[torch.Tensor], like: Any) -> torch.Tensor:
    """Returns the tensor that has these rows: nested or not, and on the device, as `like` is."""
    if not like.is_nested:
        return torch.stack(rows).to(like.device) if rows else like[:0]
    if not rows:
        values = like.values().narrow(like._ragged_idx - 1, 0, 0)
        return torch.nested.nested_tensor_from_jagged(values, like.offsets()[:1])
    return tu.nested_tensor_from_tensor_list(rows, like._ragged_idx).to(like.device)
