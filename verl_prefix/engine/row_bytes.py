"""Rows of a batch as bytes, and back: what `exchange` sends."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData

from verl_prefix.engine.rows import PIXELS

# Of what is no tensor. The rest (raw_prompt, extra_fields) stays behind: neither outputs nor verl's own losses read it.
TRAVELLING = ("uid", "session_id", PIXELS)


class _Field:
    """One tensor of a batch, row after row.

    Attributes:
        ragged: the dimension of a row whose length is its own; None where all rows have the same shape.
        rest: the row's other dimensions. unit: bytes of one step of `ragged`, or of a whole row.
        values: uint8, on the CPU. starts: first byte of each row, and the end.
    """

    def __init__(self, x: Any) -> None:
        self.dtype, self.device, self.ragged = x.dtype, x.device, None
        self.rest, lens, flat = list(x.shape[1:]), [1] * len(x), x
        if x.is_nested:
            self.ragged = getattr(x, "_ragged_idx", x.dim() - 1) - 1
            flat = x.values().movedim(self.ragged, 0)
            self.rest, lens = list(flat.shape[1:]), x.offsets().diff().tolist()
        self.unit = x.dtype.itemsize * math.prod(self.rest)
        self.starts = list(itertools.accumulate((n * self.unit for n in lens), initial=0))
        self.values = flat.detach().cpu().reshape(-1).view(torch.uint8)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.values[self.starts[row] : self.starts[row + 1]]

    def join(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that has these rows."""
        values = torch.cat([self.values[:0], *rows]).view(self.dtype).to(self.device)
        if self.ragged is None:
            return values.view(len(rows), *self.rest)
        offsets = list(itertools.accumulate((len(row) // self.unit for row in rows), initial=0))
        values = values.view(offsets[-1], *self.rest).movedim(0, self.ragged).contiguous()
        joined: Any = torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets, device=self.device))
        joined._ragged_idx = self.ragged + 1  # as verl's nested_tensor_from_tensor_list
        return joined


class Row(NamedTuple):
    """A row: its index where it came from, the bytes of its tensors by name, and its other values by `encode`."""

    origin: int
    tensors: dict[str, torch.Tensor]
    others: bytes = b""


class RowBytes:
    """The rows of a batch.

    Attributes:
        layout: what two ranks must have in common to read each other's rows.
        objects: values of `TRAVELLING`, one per row, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, list[Any]] | None = None) -> None:
        self._fields = {name: _Field(tensors[name]) for name in sorted(tensors)}
        self._ragged = [name for name, one in self._fields.items() if one.ragged is not None]
        self.objects = dict(objects or {})
        fields = [(name, str(one.dtype), one.ragged, one.rest) for name, one in self._fields.items()]
        self.layout = repr((fields, sorted(self.objects)))

    @classmethod
    def of_batch(cls, data: TensorDict) -> "RowBytes":
        """Of what travels of all that `data` has per row."""
        values = {name: data.get(name) for name in data.keys() if not isinstance(data.get(name), NonTensorData)}
        tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
        return cls(
            tensors, {name: values[name].tolist() for name in TRAVELLING if name in values and name not in tensors}
        )

    def row(self, i: int, origin: int, others: bytes = b"") -> Row:
        """Row i, to be known as `origin`."""
        return Row(origin, {name: one[i] for name, one in self._fields.items()}, others)

    def pack(self, rows: Sequence[Row]) -> torch.Tensor:
        """Rows as one uint8 tensor: a head of int64 (origin, lengths, length of the others), tensors, others."""
        pieces = []
        for row in rows:
            lens = [len(row.tensors[name]) for name in self._ragged]
            pieces.append(torch.tensor([row.origin, *lens, len(row.others)]).view(torch.uint8))
            pieces += row.tensors.values()
            if row.others:
                pieces.append(torch.frombuffer(bytearray(row.others), dtype=torch.uint8))
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)

    def unpack(self, packed: torch.Tensor) -> Iterator[Row]:
        """The rows that `pack` of a batch with the same layout packed."""
        at = 0

        def take(size: int) -> torch.Tensor:
            nonlocal at
            at += size
            return packed[at - size : at]

        while at < len(packed):
            origin, *lens, others = take(8 * (len(self._ragged) + 2)).clone().view(torch.int64).tolist()
            sizes = dict(zip(self._ragged, lens, strict=True))
            tensors = {name: take(sizes.get(name, one.unit)) for name, one in self._fields.items()}
            yield Row(origin, tensors, take(others).numpy().tobytes())

    def join(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """The tensors of a batch of these rows, by name."""
        return {name: one.join([row.tensors[name] for row in rows]) for name, one in self._fields.items()}


def encode(values: dict[str, Any]) -> bytes:
    """A row's values of `TRAVELLING`: the tensors among pixels by safetensors, behind all else as JSON.

    Raises:
        TypeError: a value is neither.
    """
    if not values:
        return b""
    pixels = values.get(PIXELS) or {}
    tensors = {name: x.detach().cpu().clone() for name, x in pixels.items() if isinstance(x, torch.Tensor)}
    others = {name: x for name, x in pixels.items() if name not in tensors}
    try:
        text = json.dumps(values | {PIXELS: others} if pixels else values).encode()
    except TypeError as error:
        stay = "set actor_rollout_ref.actor.prefix.exchange=off, and rows stay"
        raise TypeError(f"{', '.join(values)} cannot travel with its row: {error}; {stay}") from error
    return len(text).to_bytes(8, "little") + text + (save(tensors) if tensors else b"")


def decode(held: bytes) -> dict[str, Any]:
    """The values that `encode` was given; tuples are lists."""
    end = 8 + int.from_bytes(held[:8], "little")
    values: dict[str, Any] = json.loads(held[8:end]) if held else {}
    if len(held) > end:
        values[PIXELS] |= load(held[end:])
    return values
