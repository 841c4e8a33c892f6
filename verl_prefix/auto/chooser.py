"""schedule=auto: the cheapest path for a batch (stock, packed, phased or a mix), the same on every rank.

Sharing short prompts can cost more than it saves. What a path costs is predicted by `cost` with rates measured on this
model and device, once for forward alone and once with backward.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from verl_prefix.auto.cost import ModelShape, Profile, Rates, calibrate, calibration_rows, plan_passes, stock_passes
from verl_prefix.core.groups import Group
from verl_prefix.core.schedule import Schedule, TokenBatch
from verl_prefix.core.waves import Plan, Work, make_plan

logger = logging.getLogger(__name__)

# Tokens of a measured segment, and of a measured pass: enough to be past what a device needs to get going.
_UNIT = {"cpu": 64, "cuda": 512}
_PASS = {"cpu": 512, "cuda": 8192}


class Gate:
    """Chooses a batch's plan.

    Args:
        shape: of the model. dense_mask: see `cost.stock_passes`. logits_chunk: see `cost.plan_passes`.
        min_speedup: predicted stock seconds over ours below which a batch goes to the stock path; 0: it never does, and
            nothing is measured.
        profile_path: file of measured rates: read if it is there, else written by the rank with `writes_profile`.
        measured_on: model and device in words; a profile of others is refused.
        reduce_max: element-wise maximum over ranks.
        schedule: makes a `Schedule` of this run's kind from (outputs, step, backward or None).
        zero_grad: drops what measuring leaves in `.grad`.

    Raises:
        ValueError: the profile is damaged or of another model or device, or its folder does not exist.
    """

    def __init__(
        self,
        shape: ModelShape,
        dense_mask: bool,
        logits_chunk: int,
        min_speedup: float,
        profile_path: str | None,
        writes_profile: bool,
        measured_on: str,
        reduce_max: Callable[[list[int]], list[int]],
        schedule: Callable[..., Schedule],
        zero_grad: Callable[[], None],
    ) -> None:
        self.shape = shape
        self.dense_mask = dense_mask
        self.logits_chunk = logits_chunk
        self.min_speedup = min_speedup
        self.profile_path = profile_path
        self.writes_profile = writes_profile
        self.reduce_max = reduce_max
        self.schedule = schedule
        self.zero_grad = zero_grad
        self.profile = Profile(measured_on=measured_on)
        if profile_path:
            self.profile = self._read(Path(profile_path), measured_on)
        self.speedup: float | None = None  # predicted for the last batch
        self._stock_forward: bool | None = None

    def choose(
        self, groups: Sequence[Group], budget: int, wave_tokens: int | None, offload: bool, device: torch.device,
        forward_only: bool,
    ) -> Plan | None:  # fmt: skip
        """This rank's plan; None: the stock path.

        An update follows the last forward-only batch to stock or not: old log-probs and update must round alike.
        """
        mixed = make_plan(groups, budget, "auto", wave_tokens, offload)
        if not self.min_speedup:
            return mixed
        self._know(forward_only, budget, device)
        # One decision for log-probs and update, by the cost of both where both are known.
        rates = {None: self.profile.forward, self.logits_chunk: self.profile.update}
        plans = [mixed]
        if any(work.waves is not None for work in mixed.works):
            plans.append(make_plan(groups, budget, "packed", wave_tokens, offload))
        # Every rank compares the same candidates, whatever its own groups need.
        seconds = [0.0] * 3
        for chunk, known in rates.items():
            passes = [stock_passes(self.shape, groups, budget, self.dense_mask)]
            passes += [plan_passes(self.shape, plan, chunk) for plan in (plans * 2)[:2]]
            if known is not None:
                seconds = [x + known.seconds(self.shape, p) for x, p in zip(seconds, passes, strict=True)]
        stock, *ours = (x / 1e6 for x in self.reduce_max([round(x * 1e6) for x in seconds]))
        best = min(range(2), key=lambda i: ours[i])
        self.speedup = stock / max(ours[best], 1e-9)
        takes_stock = self.speedup < self.min_speedup
        if forward_only:
            self._stock_forward = takes_stock
        elif self._stock_forward is not None:
            takes_stock = self._stock_forward
        return None if takes_stock else (plans * 2)[:2][best]

    def _read(self, path: Path, measured_on: str) -> Profile:
        if not path.parent.is_dir():
            raise ValueError(f"prefix.cost_profile={path}: create the folder {path.parent} on every node")
        profile = Profile.read(path) if path.exists() else Profile(measured_on=measured_on)
        if profile.measured_on != measured_on:
            raise ValueError(
                f"prefix.cost_profile={path} was measured on {profile.measured_on!r}, and this is {measured_on!r}; "
                "delete the file or name another"
            )
        # All ranks measure what one of them lacks: measuring runs collectives.
        missing = self.reduce_max([profile.forward is None, profile.update is None])
        lacks = {name: None for name, is_missing in zip(("forward", "update"), missing, strict=True) if is_missing}
        return dataclasses.replace(profile, **lacks)

    def _know(self, forward_only: bool, budget: int, device: torch.device) -> None:
        """Measures the rates of this kind of batch if they are not known."""
        kind = "forward" if forward_only else "update"
        if getattr(self.profile, kind) is not None:
            return
        rates = self._measure(forward_only, budget, device)
        self.profile = dataclasses.replace(self.profile, **{kind: rates})
        if self.profile_path and self.writes_profile:
            try:
                self.profile.write(self.profile_path)
            except OSError as error:
                logger.warning("prefix.cost_profile is not written: %s", error)

    def _measure(self, forward_only: bool, budget: int, device: torch.device) -> Rates:
        """Packed passes over made-up rows, whose loss and gradients are zero."""
        max_tokens = min(budget, _PASS[device.type])
        unit = max(2, min(_UNIT[device.type], max_tokens // 8))
        num_tokens, offsets = calibration_rows(max_tokens, unit)
        place = torch.arange(num_tokens, device=device)
        tokens = TokenBatch(place % self.shape.vocab_size, place, offsets)
        schedule = self.schedule(
            lambda _, logits: torch.logsumexp(logits.float(), -1, keepdim=True),
            lambda groups, layout, outputs: outputs.sum() * 0.0,
            None if forward_only else torch.Tensor.backward,
        )

        def run(groups: Sequence[Group]) -> None:
            schedule.run(tokens, Plan((Work(tuple(groups)),)))
            if device.type == "cuda":
                torch.cuda.synchronize()

        with torch.no_grad() if forward_only else torch.enable_grad():
            rates = calibrate(self.shape, run, max_tokens, unit)
        if not forward_only:
            self.zero_grad()
        return rates
