"""Self-check of a run: a group of each rank on the shared-prefix path and the stock path, with the run's own weights.

All figures are in units of noise: how far the shared path is off, divided by how far rounding alone moves the result.

- log-probs, or a critic's values, which see everything (positions, layout, hook-up), against the stock path; the unit
  is how far the stock path moves when the outputs of attention and of recurrent mixers are rounded differently.
- every layer's attention output, of a few queries of each segment, against dense float64 attention on the same keys
  and values; the unit is what the rounding of probabilities and output to the model's dtype does, and of a log-sum-exp
  to fp32. In bf16 this sees errors of one percent in the kernel, which log-probs of a bf16 model hide.
- every recurrent layer's convolution and scan against the same kernel on whole rows from zero states; the unit is how
  far that kernel moves if its input is rounded otherwise and the row stands some tokens later. The chunks of shared
  passes, too, begin elsewhere, and so sum in another order. Input rounding alone is too small: in fp32 decays are
  differences of long sums.
- gradients of a weighted sum of log-probs, in which a response's i-th token counts 1 / i (`both_paths._weighted_loss`),
  against the stock path's, in units of its noise, as for log-probs. What suffixes send back to their prefix shows
  nowhere else.

Nothing can be compared with a result that is not finite on the stock path itself. The verdict names such results. Where
these are gradients alone, as may be in fp16, the next check has a smaller loss.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from verl_prefix.core.context import ForwardContext
from verl_prefix.engine.checks.gradients import Gradients
from verl_prefix.engine.checks.layer_probe import LayerProbe, ProbedContext
from verl_prefix.engine.checks.noise import Figure, ratio_of, sum_of_squares

# A perturbed pass rounds differently once per layer. Shared passes also do in matmuls, since their shapes differ.
MAX_OUTPUTS = 3.0
# As for log-probs, and in backward again. Where rounding flips an expert of a token, noise alone gave up to 4.5 in 60
# runs.
MAX_GRADIENTS = 8.0
# Passes that are perturbed, too, before the shared path is wrong by log-probs or gradients. Where a token is about as
# near to two experts, only some passes take the other one. Of 30 checks of a tiny MoE in bf16, 2 had 8.2 and 10.1.
_MORE_PERTURBED = 8

# Squared distances of a pass from the first pass of the stock path: of its outputs, then of its gradients, by parts.
Distances = list[float]


class Verdict(NamedTuple):
    """What a check found. A figure is None where the stock path has nothing finite to compare with.

    Attributes:
        outputs: of log-probs, or values.
        attention: the largest of any attention layer; None where `outputs` is.
        recurrence: the largest of any recurrent layer; None where `outputs` is.
        gradients: the largest of any part of the model with finite gradients on the stock path.
        not_finite: what is not finite on the stock path, in words; the same on all ranks.
    """

    outputs: Figure | None
    attention: Figure | None
    recurrence: Figure | None
    gradients: Figure | None
    not_finite: Sequence[str] = ()

    @property
    def figures(self) -> list[Figure]:
        """Figures of what was compared."""
        return [figure for figure in self if isinstance(figure, Figure)]

    @property
    def missed(self) -> bool:
        return any(figure.missed for figure in self.figures)

    def __str__(self) -> str:
        missed = ", ".join(str(figure) for figure in self.figures if figure.missed)
        within = ", ".join(str(figure) for figure in self.figures if figure.ratio and not figure.missed)
        return "; within limits: ".join(filter(None, (missed, within)))


class _Truth(NamedTuple):
    """What the first pass of the stock path gave.

    Attributes:
        outputs: [n], of this rank.
        norms: squared norms of the outputs, then of this rank's gradients by parts of the model.
    """

    outputs: torch.Tensor
    norms: list[float]


class Comparison:
    """Compares one group's outputs (log-probs of responses, or values) and gradients on both paths. Figures of outputs
    and gradients are of all ranks together, since few tokens say little.

    Args:
        stock: runs the stock path; returns its outputs, [n]. It leaves gradients of a loss of these, as `shared` does.
        shared: runs shared passes by a schedule, "packed" or "phased", with contexts of a type
            (`PackedForward.context_type`); returns outputs likewise.
        rounding_noise: makes a context by a seed, in which layers' outputs are rounded differently each time.
        gradients: of the model that both run on.
        reduce_sum: element-wise sum over ranks.
        outputs_name: what is compared, in words.
    """

    def __init__(
        self,
        stock: Callable[[], torch.Tensor],
        shared: Callable[[str, Callable[..., ForwardContext]], torch.Tensor],
        rounding_noise: Callable[[int], AbstractContextManager],
        gradients: Gradients,
        reduce_sum: Callable[[list[float]], list[float]],
        outputs_name: str,
    ) -> None:
        self._stock, self._shared, self._rounding_noise = stock, shared, rounding_noise
        self._gradients, self._reduce_sum, self._outputs_name = gradients, reduce_sum, outputs_name

    def verdict(self, num_perturbed: int) -> Verdict:
        """Runs both paths. Every rank calls it.

        Args:
            num_perturbed: how many stock passes run with noise; more run where the shared path is off by more than
                these allow.
        """
        probe = LayerProbe()
        outputs = self._stock()
        truth = _Truth(outputs, [sum_of_squares(outputs), *self._gradients.keep()])
        self._gradients.clear()
        perturbed = self._perturb(num_perturbed, truth, seed=0)
        packed = self._distances(self._shared("packed", functools.partial(ProbedContext, probe=probe)), truth)
        phased = self._distances(self._shared("phased", ForwardContext), truth)
        found = self._compared(truth, perturbed, packed, phased)
        if any(figure.limit < figure.ratio < math.inf for figure in found.figures):
            perturbed += self._perturb(_MORE_PERTURBED, truth, seed=num_perturbed)
            found = self._compared(truth, perturbed, packed, phased)
        if found.outputs is None:  # layers have inputs that are not finite
            return found
        return found._replace(attention=probe.worst_attention, recurrence=probe.worst_recurrence)

    def _perturb(self, num_passes: int, truth: _Truth, seed: int) -> list[Distances]:
        """Runs the stock path with rounding noise, several times."""
        with self._rounding_noise(seed):
            return [self._distances(self._stock(), truth) for _ in range(num_passes)]

    def _distances(self, outputs: torch.Tensor, truth: _Truth) -> Distances:
        """Measures the pass that has just run, and clears its gradients."""
        distances = [sum_of_squares(outputs.double() - truth.outputs), *self._gradients.distances()]
        self._gradients.clear()
        return distances

    def _compared(self, truth: _Truth, perturbed: Sequence[Distances], packed: Distances, phased: Distances) -> Verdict:
        """Returns the verdict on outputs and gradients, without layers. It is the same on all ranks."""
        noise = [sum(column) / len(perturbed) for column in zip(*perturbed, strict=True)]
        # Log-probs of low precision have a grid, on which small noise may change nothing.
        noise[0] += torch.finfo(truth.outputs.dtype).eps ** 2 * truth.norms[0]
        names = [self._outputs_name, *(f"gradients of {part}" for part in self._gradients.parts)]
        sums = iter(self._reduce_sum([*packed, *phased, *noise, *truth.norms]))
        packed, phased, noise, norms = ([next(sums) for _ in names] for _ in range(4))
        limits = [MAX_OUTPUTS, *[MAX_GRADIENTS] * len(self._gradients.parts)]
        outputs, *gradients = figures = [*map(_figure, names, limits, packed, phased, noise, norms)]
        finite_gradients = [figure for figure in gradients if figure is not None]
        worst = max(finite_gradients, key=lambda figure: figure.ratio, default=None)
        not_finite = [name for name, figure in zip(names, figures, strict=True) if figure is None]
        return Verdict(outputs, None, None, worst, not_finite)


def _figure(name: str, limit: float, packed: float, phased: float, noise: float, norm: float) -> Figure | None:
    """Returns the larger figure of our two passes; None: the stock path has nothing finite to compare with.

    Args:
        packed, phased, noise: squared distances from the stock path.
        norm: the squared norm of what the stock path gave.
    """
    if not math.isfinite(norm + noise):
        return None
    return Figure(max(ratio_of(packed, noise), ratio_of(phased, noise)), limit, f"{name} differ from the stock path's")
