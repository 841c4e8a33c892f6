"""Losses and outputs that are not finite: counted, and logged once per mini-batch; verl then skips the update, as it
does for the stock actor."""

import logging
from collections.abc import Mapping, Sequence

import torch

from verl_prefix.core.errors import listed

logger = logging.getLogger(__name__)


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether no tensor (float, of any shape) holds a NaN or an infinity: [] bool, which nobody has waited for."""
    return torch.stack([torch.isfinite(x).all() for x in tensors]).all()


def rows_not_finite(values: Sequence[torch.Tensor]) -> list[int]:
    """Indices of the rows (float tensors of any shape) that hold a NaN or an infinity."""
    return [i for i, row in enumerate(values) if not torch.isfinite(row).all()]


def log_not_finite(where: str, loss: float, bad: Mapping[str, Sequence[int]], names: Sequence[str]) -> None:
    """Logs one pass whose loss or outputs are not finite.

    Args:
        where: the pass, as `core.errors.current_pass` names it.
        bad: rows of the pass that are not finite, per tensor: log-probs and the like, and what the loss reads.
        names: what to call the rows of the pass.
    """
    told = [f"{name} of rows {listed([names[i] for i in rows])}" for name, rows in bad.items() if rows]
    logger.error(
        "not finite in %s: loss %s; %s. verl skips an update whose gradient norm is not finite; later passes of this "
        "mini-batch are counted in prefix/nonfinite_passes and not logged",
        where, loss, "; ".join(told) or "all that it was made of is finite",
    )  # fmt: skip
