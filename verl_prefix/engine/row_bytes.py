"""Rows of a batch as bytes, and back: what `exchange` sends. Tensors go as they are, other values as JSON."""

import base64
import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData

from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


class _Field:
    """One tensor of a batch, row after row.

    Attributes:
        ragged: the dimension of a row whose length is its own; None where all rows have the same shape.
        rest: the row's other dimensions. unit: bytes of one step of `ragged`, or of a whole row.
        values: uint8, on the CPU. starts: first byte of each row, and the end.
    """

    def __init__(self, x: torch.Tensor) -> None:
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
        joined = torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets, device=self.device))
        joined._ragged_idx = self.ragged + 1  # as verl's nested_tensor_from_tensor_list
        return joined


class Row(NamedTuple):
    """A row: its index where it came from, the bytes of its tensors by name, and its other values as JSON."""

    origin: int
    tensors: dict[str, torch.Tensor]
    text: bytes = b""


class RowBytes:
    """The rows of a batch.

    Attributes:
        layout: what two ranks must have in common to read each other's rows.
        objects: values that are no tensors, one per row, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, list[Any]] | None = None) -> None:
        self._fields = {name: _Field(tensors[name]) for name in sorted(tensors)}
        self._ragged = [name for name, one in self._fields.items() if one.ragged is not None]
        self.objects = dict(objects or {})
        fields = [(name, str(one.dtype), one.ragged, one.rest) for name, one in self._fields.items()]
        self.layout = repr((fields, sorted(self.objects)))

    @classmethod
    def of_batch(cls, data: TensorDict) -> "RowBytes":
        """Of all that `data` has per row; what it has once stays out."""
        values = {name: data.get(name) for name in data.keys() if not isinstance(data.get(name), NonTensorData)}
        tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
        return cls(tensors, {name: x.tolist() for name, x in values.items() if name not in tensors})

    def row(self, i: int, origin: int, text: bytes = b"") -> Row:
        """Row i, to be known as `origin`."""
        return Row(origin, {name: one[i] for name, one in self._fields.items()}, text)

    def pack(self, rows: Sequence[Row]) -> torch.Tensor:
        """Rows as one uint8 tensor: a head of int64 (origin, lengths, length of the text), tensors, text."""
        pieces = []
        for row in rows:
            lens = [len(row.tensors[name]) for name in self._ragged]
            pieces.append(torch.tensor([row.origin, *lens, len(row.text)]).view(torch.uint8))
            pieces += row.tensors.values()
            if row.text:
                pieces.append(torch.frombuffer(bytearray(row.text), dtype=torch.uint8))
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)

    def unpack(self, packed: torch.Tensor) -> Iterator[Row]:
        """The rows that `pack` of a batch with the same layout packed."""
        at = 0

        def take(size: int) -> torch.Tensor:
            nonlocal at
            at += size
            return packed[at - size : at]

        while at < len(packed):
            origin, *lens, text = take(8 * (len(self._ragged) + 2)).clone().view(torch.int64).tolist()
            sizes = dict(zip(self._ragged, lens, strict=True))
            tensors = {name: take(sizes.get(name, one.unit)) for name, one in self._fields.items()}
            yield Row(origin, tensors, take(text).numpy().tobytes())

    def join(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """The tensors of a batch of these rows, by name."""
        return {name: one.join([row.tensors[name] for row in rows]) for name, one in self._fields.items()}


def encode(values: Mapping[str, Any], needed: Sequence[str]) -> bytes:
    """A row's values as JSON; those that JSON and arrays cannot hold, such as pictures, are left out and logged once.

    Raises:
        TypeError: one of those left out is `needed`.
    """
    plain = {}
    for name, value in values.items():
        try:
            plain[name] = _plain(value)
        except TypeError as error:
            if name in needed:
                raise TypeError(f"{name} cannot travel with its rows: {error}") from error
            text = "prefix.exchange: %s does not travel with its rows (%s); a loss cannot read it"
            warn_once(logger, text, name, str(error))
    return json.dumps(plain).encode() if values else b""


def decode(text: bytes) -> dict[str, Any]:
    """The values that `encode` was given."""
    return {name: _rich(value) for name, value in json.loads(text).items()} if text else {}


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(x) for x in value]
    if type(value) is tuple:
        return {"tuple": [_plain(x) for x in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(x)] for key, x in value.items()]}
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        kind, dtype, shape = "tensor", str(value.dtype).removeprefix("torch."), list(value.shape)
    elif isinstance(value, np.ndarray | np.generic) and not np.asarray(value).dtype.hasobject:
        array = np.ascontiguousarray(value)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        dtype, shape = array.dtype.str, list(np.shape(value))
    else:
        raise TypeError(f"it holds a {type(value).__name__}")
    return {kind: [dtype, shape, base64.b64encode(array.tobytes()).decode()]}


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(x) for x in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_rich(x) for x in content)
    if kind == "dict":
        return {_rich(key): _rich(x) for key, x in content}
    dtype, shape, text = content
    held = bytearray(base64.b64decode(text))
    if kind == "tensor":
        flat = torch.frombuffer(held, dtype=torch.uint8) if held else torch.empty(0, dtype=torch.uint8)
        return flat.view(getattr(torch, dtype)).view(shape)
    array = np.frombuffer(held, dtype=dtype).reshape(shape)
    return array if kind == "array" else array[()]
