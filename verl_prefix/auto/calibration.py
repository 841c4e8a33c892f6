"""Rates of a model on a device: measured in a few small passes, kept in a profile."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from verl_prefix.auto.cost import Rates, group_pass
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.gradients import gradients_aside
from verl_prefix.core.groups import Group
from verl_prefix.core.schedule import Schedule, TokenBatch
from verl_prefix.core.waves import PackedPass, Plan
from verl_prefix.files import write_whole

# Tokens of a measured segment, and of a measured pass: enough to be past what a device needs to get going.
_UNIT = {"cpu": 64, "cuda": 512}
_PASS = {"cpu": 512, "cuda": 8192}
# Measuring computes at most one in so many of a batch's tokens, unless that is not enough for passes of one segment.
_SHARE = 20
_ROUNDS = 3
_ROUND = 2.5  # passes' tokens of a round


@dataclass(frozen=True)
class Profile:
    """Measured rates of a model and what they depend on (`measured_on`, in words); None: not measured yet."""

    forward: Rates | None = None
    update: Rates | None = None
    measured_on: str = ""

    @classmethod
    def read(cls, path: str | Path) -> "Profile":
        """Raises ValueError where the file is not one that `write` wrote."""
        try:
            fields = json.loads(Path(path).read_text())
            rates = {name: fields[name] and Rates(**fields[name]) for name in ("forward", "update")}
            for value in (x for one in rates.values() if one for x in dataclasses.astuple(one)):
                if not (isinstance(value, float) and 0 <= value < float("inf")):
                    raise ValueError(f"a rate is {value!r}")
            return cls(**rates, measured_on=fields["measured_on"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not a cost profile ({error}); delete it, and it is measured anew") from error

    def write(self, path: str | Path) -> None:
        """Writes the file that `read` reads."""
        write_whole(Path(path), json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def path_of_ref(path: Path) -> Path:
    """Where an engine of the ref policy alone has its rates: FSDP2 fetches its parameters from the host."""
    return path.with_name(f"{path.stem}.ref{path.suffix}")


def read_profile(
    path: Path | None, measured_on: str, reduce_max: Callable[[Sequence[float]], Sequence[float]]
) -> Profile:
    """The rates in a file, those alone that every rank has; none where there is no file.

    Args:
        measured_on: what rates depend on, in words.
        reduce_max: element-wise maximum over ranks.

    Raises:
        ValueError: on every rank, where one's profile is damaged or measured on something else, or has no folder.
    """
    profile, failure = Profile(), None
    try:
        profile = _read_profile(path, measured_on)
    except ValueError as error:
        failure = error
    # All ranks measure what one of them lacks: measuring runs collectives.
    no_forward, no_update, failed = reduce_max([profile.forward is None, profile.update is None, failure is not None])
    if failed:
        raise failure or ValueError(f"prefix.cost_profile={path}: another rank cannot use its file; its log says why")
    return dataclasses.replace(
        profile, forward=None if no_forward else profile.forward, update=None if no_update else profile.update
    )


def _read_profile(path: Path | None, measured_on: str) -> Profile:
    if path and not path.parent.is_dir():
        raise ValueError(f"prefix.cost_profile={path}: create the folder {path.parent} on every node")
    profile = Profile.read(path) if path and path.exists() else Profile(measured_on=measured_on)
    if profile.measured_on != measured_on:
        raise ValueError(
            f"prefix.cost_profile={path} was measured on {profile.measured_on!r}, and this is {measured_on!r}; "
            "delete the file or name another"
        )
    return profile


def measure(
    shape: ModelShape,
    budget: int,
    batch_tokens: int,
    device: torch.device,
    schedule: Callable[..., Schedule],
    model: torch.nn.Module,
    forward_only: bool,
) -> Rates:
    """Rates of packed passes over made-up rows; gradients stay as they are.

    Args:
        budget: most tokens of a pass. batch_tokens: see `effort`.
        schedule: makes a `Schedule` of the run's kind from (outputs, step, backward or None).
        model: whose passes these are.
    """
    max_tokens, rounds = effort(min(budget, _PASS[device.type]), _UNIT[device.type], batch_tokens)
    unit = max(2, min(_UNIT[device.type], max_tokens // 8))
    offsets = [i * unit for i in range(_num_segments(max_tokens, unit) + 1)]
    index = torch.arange(offsets[-1] + 1, device=device)
    tokens = TokenBatch(index % shape.vocab_size, index, offsets)
    runner = schedule(
        lambda _, logits: torch.logsumexp(logits.float(), -1, keepdim=True),
        lambda groups, layout, outputs: outputs.sum() * 0.0,
        None if forward_only else torch.Tensor.backward,
    )

    def run(groups: Sequence[Group]) -> None:
        runner.run(tokens, Plan((PackedPass(tuple(groups)),)))
        if device.type == "cuda":
            torch.cuda.synchronize()

    with torch.no_grad() if forward_only else torch.enable_grad(), gradients_aside(model):
        return calibrate(shape, run, max_tokens=max_tokens, unit=unit, rounds=rounds)


def effort(most: int, least: int, batch_tokens: int) -> tuple[int, int]:
    """(tokens of a pass, rounds) of a measurement that a batch pays for.

    Args:
        most, least: tokens of a pass; `most` where they disagree.
        batch_tokens: what the stock path computes of the batch, the same on every rank.
    """
    allowed = batch_tokens / _SHARE
    max_tokens = min(most, max(least, int(allowed / (1 + _ROUND))))
    return max_tokens, min(_ROUNDS, max(1, int((allowed - max_tokens) / (_ROUND * max_tokens))))


def calibrate(
    shape: ModelShape, run: Callable[[Sequence[Group]], None], max_tokens: int, unit: int, rounds: int = _ROUNDS
) -> Rates:
    """Measures the rates in small packed passes; the fastest of `rounds` counts.

    Args:
        run: computes these groups in one packed pass and waits for the device. Row i starts at the batch's token
            `i * unit`.
        max_tokens: of one pass. unit: tokens of a segment, at least 2.
    """
    many = _num_segments(max_tokens, unit)
    few = max(1, many // 4)
    # Prefix segments with a suffix of one token: next to no lm_head.
    short = [Group((i,), unit - 1, (1,)) for i in range(many)]
    long = [Group((0,), many * unit - 1, (1,))]
    suffixes = [Group((i,), 0, (unit,)) for i in range(few)]
    probes = {"few": short[:few], "many": short, "long": long, "head": suffixes}
    run(short)  # warm-up
    seconds = dict.fromkeys(probes, float("inf"))
    for _ in range(rounds):
        for name, groups in probes.items():
            start = time.perf_counter()
            run(groups)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    passes = [group_pass(shape, groups) for groups in probes.values()]
    amounts = [(1.0, p.tokens * shape.linear, p.pairs * shape.pair, p.head_tokens * shape.head) for p in passes]
    return Rates(*_nonnegative_solution(torch.tensor(amounts).double(), torch.tensor(list(seconds.values())).double()))


def _nonnegative_solution(amounts: torch.Tensor, seconds: torch.Tensor) -> list[float]:
    """Rates of the columns; one that noise makes negative is 0, and the others explain the seconds without it."""
    scale = amounts.amax(0)
    kept = [column for column in range(amounts.shape[1]) if scale[column] > 0]  # a model may have no attention
    while kept:
        rates = torch.linalg.lstsq((amounts / scale)[:, kept], seconds.unsqueeze(1)).solution[:, 0] / scale[kept]
        if (rates >= 0).all():
            break
        kept.remove(kept[int(torch.argmin(rates * scale[kept]))])
    by_column = dict(zip(kept, rates.tolist(), strict=True))
    return [by_column.get(column, 0.0) for column in range(amounts.shape[1])]


def _num_segments(max_tokens: int, unit: int) -> int:
    return max(2, min(16, max_tokens // unit))
