"""The gradients that the self-check compares, by parts of a model."""

from collections.abc import Callable, Mapping

import torch

from verl_prefix.engine.checks.noise import sum_of_squares

_SMALL = 2**20  # most elements of a parameter outside of mixers that is compared; norms and adapters have fewer


class Gradients:
    """This rank's shards of the gradients that a pass has left, by parts of the model.

    Args:
        model: all of this rank's part.
        whole: modules of `model` that are compared whole, by name.
        parts: modules of which small parameters are compared (norms, biases, adapters), or the smallest trained one
            where none is small. Parameters in no module of `whole` or `parts` are the part "all else", compared
            likewise.
        local: takes a parameter, and returns this rank's shard of its gradient.
        clear: forgets all gradients; None: by `model.zero_grad`.

    Attributes:
        parts: the parameters that are compared, by the names of modules, and "all else".
    """

    def __init__(
        self,
        model: torch.nn.Module,
        whole: Mapping[str, torch.nn.Module],
        parts: Mapping[str, torch.nn.Module],
        local: Callable[[torch.nn.Parameter], torch.Tensor],
        clear: Callable[[], None] | None = None,
    ) -> None:
        self._local = local
        self._truth: list[list[torch.Tensor]] = []  # by part, in host memory
        self.clear = clear or model.zero_grad
        self.parts: dict[str, list[torch.nn.Parameter]] = {}
        taken: set[torch.nn.Parameter] = set()  # by the parts before
        for name, module in {**whole, **parts, "all else": model}.items():
            trained = [p for p in module.parameters() if p.requires_grad and p not in taken]
            taken.update(trained)
            compared = trained if name in whole else [p for p in trained if p.numel() <= _SMALL]
            self.parts[name] = compared or sorted(trained, key=torch.numel)[:1]  # none where nothing is trained

    def keep(self) -> list[float]:
        """Keeps the last pass's gradients as the truth; returns their squared norms by part."""
        self._truth = [[self._local(p).to("cpu", copy=True) for p in part] for part in self.parts.values()]
        return [sum(map(sum_of_squares, part)) for part in self._truth]

    def distances(self) -> list[float]:
        """Returns squared distances of the last pass's gradients from the truth, by part."""
        return [
            sum(sum_of_squares(self._local(p).cpu() - truth) for p, truth in zip(part, truths, strict=True))
            for part, truths in zip(self.parts.values(), self._truth, strict=True)
        ]
