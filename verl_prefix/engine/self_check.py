"""Self-check of a run: one group through the shared-prefix path and through the stock path, on the run's own weights.

All figures are in units of noise: how far ours is off, over how far rounding alone moves the result.

- log-probs, or a critic's values, which see everything (positions, layout, hook-up), against the stock path; the unit
  is how far the stock path moves when the outputs of attention and of recurrent mixers are rounded differently.
- every layer's attention output, of a few queries of each segment, against dense float64 attention on the same keys
  and values; the unit is what the rounding of probabilities and output to the model's dtype does, and of a log-sum-exp
  to fp32. In bf16 this sees errors of one percent in the kernel, which log-probs of a bf16 model hide.
- every recurrent layer's convolution and scan against the same kernel on whole rows from zero states; the unit is how
  far that kernel moves where the row is rounded differently and stands after some tokens that change nothing. Ours
  differs in the same way: its chunks begin anew after the prefix, and so sum in another order, in whatever precision
  the kernel has inside. Input rounding alone is too small a unit: in fp32 decays are differences of long sums.
- gradients of a weighted sum of log-probs, in which a response's i-th token counts 1 / i (`verify._falling_loss`),
  against the stock path's, in units of its noise, as for log-probs. What suffixes send back to their prefix shows
  nowhere else.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from verl_prefix.core.attention import AttentionPass
from verl_prefix.core.calls import AttentionParams
from verl_prefix.core.layout import Layout
from verl_prefix.core.runs import ranges

# A perturbed pass rounds differently once per layer; ours also at its matmuls, whose shapes differ from stock's.
MAX_LOG_PROBS = 3.0
# Two partial outputs and their sum are rounded where a single call rounds once: sqrt(3).
MAX_ATTENTION = 2.0
MAX_RECURRENCE = 3.0
# As for log-probs, and in backward again. Where rounding flips an expert of a token, noise alone gave up to 4.5 in 60
# runs.
MAX_GRADIENTS = 8.0
# Passes that are perturbed, too, before ours is wrong by log-probs or gradients. Where a token is about as near to two
# experts, only some passes take the other one: of 30 checks of a tiny MoE model in bf16, 2 had 8.2 and 10.1.
_MORE_PERTURBED = 8

_SHIFT = 29  # tokens: no kernel's chunk is a divisor or a multiple of it
_QUERIES = 16  # of each end of a segment
_SMALL = 2**20  # most elements of a parameter outside of mixers that is compared; norms and adapters have fewer


class Figure(NamedTuple):
    """How far ours is off, in units of rounding noise, and where it is off most: "" where nothing is."""

    ratio: float
    limit: float  # up to which ours is right
    where: str

    def __str__(self) -> str:
        return f"{self.where} by {self.ratio:.3g} times rounding noise (at most {self.limit:g})"


class Verdict(NamedTuple):
    """The figures of a check."""

    outputs: Figure  # log-probs, or values
    attention: Figure
    recurrence: Figure
    gradients: Figure

    @property
    def missed(self) -> bool:
        return not all(figure.ratio <= figure.limit for figure in self)  # a NaN misses

    def __str__(self) -> str:
        return ", ".join(str(figure) for figure in self if figure.where)


class LayerProbe:
    """Measures the layers of one group's packed passes.

    Attributes:
        worst_attention, worst_recurrence: the largest figure of each.
    """

    def __init__(self) -> None:
        self.worst_attention = Figure(0.0, MAX_ATTENTION, "")
        self.worst_recurrence = Figure(0.0, MAX_RECURRENCE, "")
        self._rounding = _Rounding()

    @torch.no_grad()
    def recurrence(
        self, key: Hashable, layout: Layout, inputs: Sequence[torch.Tensor],
        whole: Callable[[Sequence[torch.Tensor], int], torch.Tensor], out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Compares each segment's outputs with those of a row that begins with the prefix."""
        for behind, own in _segments(layout):
            row = [torch.cat([x[behind.to(x.device)], x[own]]) for x in inputs]
            truth = whole(row, 0)[len(behind) :]
            moved = whole([self._rounding.disturb(x) for x in row], _SHIFT)[len(behind) :]
            ratio = _ratio(_sum_of_squares(out[own] - truth), _sum_of_squares(moved - truth))
            self.worst_recurrence = max(self.worst_recurrence, Figure(ratio, MAX_RECURRENCE, f"{key} from whole rows"))

    @torch.no_grad()
    def attention(
        self, layer: int, layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        sinks: torch.Tensor | None, params: AttentionParams, out: torch.Tensor,
    ) -> None:  # fmt: skip
        error = noise = 0.0
        for behind, own in _segments(layout):
            tokens = torch.arange(own.start, own.stop, device=q.device)
            query = torch.cat([tokens[:_QUERIES], tokens[_QUERIES:][-_QUERIES:]])
            keys, values = (torch.cat([x[behind.to(x.device)], x[own]]) for x in (k, v))
            with torch.autocast(q.device.type, enabled=False):  # which would round the scores as well
                position = query - own.start + len(behind)
                truth, rounded = _dense(q[query], keys, values, sinks=sinks, params=params, position=position)
            error += (out[query] - truth).square().sum().item()
            noise += (rounded - truth).square().sum().item()
        where = f"attention of layer {layer} from dense float64"
        self.worst_attention = max(self.worst_attention, Figure(_ratio(error, noise), MAX_ATTENTION, where))


class ProbedPass(AttentionPass):
    """A packed pass of one group whose layers a probe measures."""

    def __init__(self, *args: Any, probe: LayerProbe, **options: Any) -> None:
        super().__init__(*args, **options)
        self._probe = probe

    def on_attention(self, layer: int, *args: Any, **options: Any) -> None:
        self._probe.attention(layer, self.layout, *args, **options)

    def on_recurrence(self, key: Hashable, *args: Any) -> None:
        self._probe.recurrence(key, self.layout, *args)


def _sum_of_squares(x: torch.Tensor) -> float:
    return x.double().square().sum().item()


def _segments(layout: Layout) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yields, for each segment of a packed pass, the tokens that it continues, [n] int64, and its own tokens."""
    start = 0
    for segment in layout.segments:
        yield ranges(segment.path), slice(start, start + segment.length)
        start += segment.length


def _ratio(error: float, noise: float) -> float:
    """Ratio of two norms, given their squares. 0 / 0 is 0, as where responses are empty. A NaN gives infinity, which no
    later maximum hides."""
    ratio = (error / max(noise, 1e-300)) ** 0.5
    return math.inf if math.isnan(ratio) else ratio


def _dense(q, k, v, sinks, params: AttentionParams, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of queries at `position` among the keys, [n, H, D]: in float64, and with probabilities and
    output rounded to q's dtype. It converts one key head at a time, since keys may be many."""
    behind = position.unsqueeze(1) - torch.arange(k.shape[0], device=q.device)
    hidden = behind < 0 if params.window is None else (behind < 0) | (behind >= params.window)
    per_key_head = q.shape[1] // k.shape[1]
    truth, rounded = torch.empty_like(q, dtype=torch.float64), torch.empty_like(q)
    for key_head, out in itertools.product(range(k.shape[1]), (truth, rounded)):
        compute = torch.promote_types(out.dtype, torch.float32)
        keys, values = (x[:, key_head].to(compute) for x in (k, v))
        for head in range(key_head * per_key_head, (key_head + 1) * per_key_head):
            logits = q[:, head].to(compute) @ keys.T * params.scale
            if params.softcap is not None:
                logits = params.softcap * torch.tanh(logits / params.softcap)
            logits = logits.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                logits = torch.cat([logits, sinks[head].to(compute).expand(len(q), 1)], -1)
            # As kernels do: by a log-sum-exp of fp32 at most, whose rounding counts in fp32, the more the larger it is.
            probs = (logits - logits.logsumexp(-1, keepdim=True)).exp()[:, : k.shape[0]].to(out.dtype).to(compute)
            out[:, head] = (probs @ values).to(out.dtype)
    return truth, rounded


class _Rounding:
    """Tensors that are off by up to one rounding step, differently each time; the run's own random state stays."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def disturb(self, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        """x, rounded differently; eps: a rounding step, if not that of its dtype."""
        generator = self._generators.setdefault(x.device, torch.Generator(x.device).manual_seed(self._seed))
        step = torch.finfo(x.dtype).eps if eps is None else eps
        return (x * (1 + step * (2 * torch.rand(x.shape, device=x.device, generator=generator) - 1))).to(x.dtype)


@contextmanager
def rounding_noise(
    attention: Sequence[torch.nn.Module], recurrent: Sequence[torch.nn.Module], dtype: torch.dtype, seed: int
) -> Iterator[None]:
    """Context in which every output of these modules, attention and recurrent mixers, is off by up to one rounding step
    of `dtype`, differently each time, and so are its gradient and, in fp32, what mixers read."""
    eps, rounding = torch.finfo(dtype).eps, _Rounding(seed)

    def disturb_output(module: torch.nn.Module, args: tuple, output: Any) -> Any:
        out = rounding.disturb(output[0] if isinstance(output, tuple) else output, eps)
        if out.requires_grad:
            out.register_hook(lambda grad: rounding.disturb(grad, eps))
        return (out, *output[1:]) if isinstance(output, tuple) else out

    def disturb_input(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (rounding.disturb(args[0], eps), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": rounding.disturb(kwargs["hidden_states"], eps)}

    handles = [module.register_forward_hook(disturb_output) for module in [*attention, *recurrent]]
    # In fp32 a scan's own rounding (of decays, which are differences of sums) is larger than that of what it gives.
    if dtype == torch.float32:
        handles += [module.register_forward_pre_hook(disturb_input, with_kwargs=True) for module in recurrent]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Gradients:
    """Gradients of the checked rows, by parts of the model: this rank's shards of them.

    Args:
        model: all of this rank's part.
        whole: modules of it that are compared whole, by name.
        parts: others. Of each of them, and of all else, what is small is compared (norms, biases, adapters), or the
            smallest trained parameter where none is small.
        local: a parameter -> this rank's shard of its gradient.
        clear: forgets all gradients; None: by `model.zero_grad`.
    """

    def __init__(
        self, model: torch.nn.Module, whole: Mapping[str, torch.nn.Module], parts: Mapping[str, torch.nn.Module],
        local: Callable[[torch.nn.Parameter], torch.Tensor], clear: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._local, self._clear = local, clear or model.zero_grad
        self.parts: dict[str, list[torch.nn.Parameter]] = {}
        left = {p for p in model.parameters() if p.requires_grad}
        for name, module in {**whole, **parts, "all else": model}.items():
            trained = [p for p in module.parameters() if p in left]
            left.difference_update(trained)
            small = trained if name in whole else [p for p in trained if p.numel() <= _SMALL]
            self.parts[name] = small or sorted(trained, key=torch.numel)[:1]  # none where nothing is trained

    def keep(self) -> list[float]:
        """Takes the last pass's gradients as the truth, kept in host memory; returns their squared norms by part."""
        self._truth = [[self._local(p).to("cpu", copy=True) for p in part] for part in self.parts.values()]
        self._clear()
        return [sum(map(_sum_of_squares, part)) for part in self._truth]

    def distances(self) -> list[float]:
        """Returns squared distances of the last pass's gradients from the truth, by part."""
        pairs = (zip(part, truth, strict=True) for part, truth in zip(self.parts.values(), self._truth, strict=True))
        distances = [sum(_sum_of_squares(self._local(p).cpu() - x) for p, x in part) for part in pairs]
        self._clear()
        return distances


def compare(
    stock: Callable[[], torch.Tensor],
    ours: Callable[[str, Callable[..., AttentionPass]], torch.Tensor],
    rounding_noise: Callable[[int], AbstractContextManager],
    gradients: Gradients,
    reduce_sum: Callable[[list[float]], list[float]] = lambda values: values,
    num_perturbed: int = 3,
    outputs: str = "log-probs",
) -> Verdict:
    """Compares one group's response log-probs and gradients on both paths. Figures are of all ranks together, since few
    tokens say little.

    Args:
        stock: [n] log-probs by the stock path, with gradients of a loss of them, which `ours` has as well.
        ours: the same by schedule "packed" or "phased", with passes of a type (`PackedForward.pass_type`).
        rounding_noise: of a seed; while open, layers' outputs are rounded differently each time.
        gradients: of the model that both run on.
        reduce_sum: element-wise sum over ranks.
        num_perturbed: how many stock passes run with noise; more where ours is off by more than these allow.
        outputs: what is compared, in words.
    """
    probe = LayerProbe()
    truth, norms = stock(), gradients.keep()

    def distances(log_probs: torch.Tensor) -> list[float]:
        """Of log-probs, then of the gradients of each part."""
        return [_sum_of_squares(log_probs.double() - truth), *gradients.distances()]

    perturbed: list[list[float]] = []

    def perturb(number: int) -> None:
        with rounding_noise(len(perturbed)):
            perturbed.extend(distances(stock()) for _ in range(number))

    perturb(num_perturbed)
    packed = distances(ours("packed", functools.partial(ProbedPass, probe=probe)))
    phased = distances(ours("phased", AttentionPass))

    def figures() -> tuple[Figure, Figure]:
        """Of outputs and gradients, the same on all ranks."""
        noises = [sum(column) / len(perturbed) for column in zip(*perturbed, strict=True)]
        # Log-probs of low precision have a grid, on which small noise may change nothing.
        noises[0] += torch.finfo(truth.dtype).eps ** 2 * _sum_of_squares(truth)
        size = len(noises)
        reduced = reduce_sum([*packed, *phased, *noises, *norms])
        of_packed, of_phased, of_noise, of_truth = (reduced[i : i + size] for i in range(0, 4 * size, size))
        # A NaN must not get lost in max().
        errors = [math.nan if math.isnan(a + b) else max(a, b) for a, b in zip(of_packed, of_phased, strict=True)]
        ratios = [_ratio(*pair) for pair in zip(errors, of_noise, strict=True)]
        worst = Figure(0.0, MAX_GRADIENTS, "")
        for name, ratio, norm in zip(gradients.parts, ratios[1:], of_truth, strict=True):
            # Nothing compares with a gradient that is not finite on the stock path either, as under a loss scale of
            # fp16, which falls after such a step.
            if math.isfinite(norm) and ratio > worst.ratio:
                worst = Figure(ratio, MAX_GRADIENTS, f"gradients of {name} from the stock path's")
        return Figure(ratios[0], MAX_LOG_PROBS, f"{outputs} differ from the stock path's"), worst

    found = figures()
    if any(figure.limit < figure.ratio < math.inf for figure in found):
        perturb(_MORE_PERTURBED)
        found = figures()
    first, worst = found
    return Verdict(first, probe.worst_attention, probe.worst_recurrence, worst)
