"""The loss of a mini-batch: verl's own, of which we know what it reads, or a user's."""

import functools
import logging
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.trainer.distillation.losses import distillation_ppo_loss, get_distillation_loss_fn
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss, value_loss

from verl_prefix.config.actor import LOSSES_OF_ROWS
from verl_prefix.engine.metrics.even_metrics import neutral
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)

LossFunction = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


class LossKind(NamedTuple):
    """What is known of a loss function.

    Attributes:
        reads: names of the batch's fields that the loss reads besides tokens; None: it may read all fields.
        is_verls: whether it is one of verl's own: of `LOSSES_OF_ROWS`, or a critic's. They sum over rows, and read only
            tokens whose response_mask is 1.
        of_values: whether it is a critic's.
        distills: whether it is distillation_ppo_loss, which verl also calls with logits (as `processor`).
        needs_a_token: whether it raises where no token counts: where response_mask is 0 in all rows.
    """

    reads: Set[str] | None
    is_verls: bool = False
    of_values: bool = False
    distills: bool = False
    needs_a_token: bool = False


def _kind_of(function: LossFunction | None, reads: Set[str] | None) -> LossKind:
    """Finds what is known of a loss: little, unless it is verl's own and a sum over rows. verl's losses of distillation
    are sums over tokens, and so over rows.

    Args:
        reads: `LossKind.reads` of a loss that is not verl's own.

    Source: verl/workers/utils/losses.py (ppo_loss), verl/trainer/ppo/core_algos.py (compute_policy_loss_<mode>),
    verl/trainer/distillation/losses.py (distillation_ppo_loss). These raise where no token counts:
    compute_distillation_loss_range there, compute_rollout_correction_and_rejection_mask in
    verl/trainer/ppo/rollout_corr_helper.py.
    """
    if function is None:
        return LossKind({"temperature"})
    distills = getattr(function, "func", None) is distillation_ppo_loss
    unknown = LossKind(reads, distills=distills, needs_a_token=distills)  # of a function that is not verl's own
    if not isinstance(function, functools.partial) or "config" not in function.keywords:
        return unknown
    if function.func is value_loss:  # of every token by itself, summed by agg_loss
        return LossKind({"response_mask", "values", "returns"}, is_verls=True, of_values=True)
    if function.func not in (ppo_loss, distillation_ppo_loss):
        return unknown
    config = function.keywords["config"]
    mode: str = config.policy_loss.get("loss_mode", "vanilla")
    if mode not in LOSSES_OF_ROWS or not _has_verls(get_policy_loss_fn, mode):
        return unknown
    read = {"temperature", "response_mask", "advantages"}
    if mode != "gpg":
        read.add("old_log_probs")
    if mode != "bypass_mode":
        read.add("rollout_is_weights")
    if config.use_kl_loss:
        read.add("ref_log_prob")
    if distills:
        token_losses = function.keywords["distillation_config"].distillation_loss
        if not _has_verls(get_distillation_loss_fn, token_losses.loss_mode):
            return unknown
        read.add("teacher_logprobs")
    return LossKind(read, is_verls=True, distills=distills, needs_a_token=distills or mode == "bypass_mode")


def _has_verls(loss_of_mode: Callable[[str], Callable[..., Any]], mode: str) -> bool:
    """Whether verl's registry has its own loss under this name. A user may have registered another one."""
    return loss_of_mode(mode).__module__ == loss_of_mode.__module__


def _loss_or_zero(function: LossFunction, /, **given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Calls a loss as verl calls it. Where no token counts it returns a loss of 0 and `neutral` metrics.

    verl needs the same metrics of every micro-batch, and only the loss knows which these are. So the loss runs as if
    one token counted. Its names are taken and its values are not. Metrics that are floats are left out.
    """
    data, output = given.get("data"), given.get("model_output")
    if output is None or data is None:  # verl also calls the loss of top-k distillation with logits
        return function(**given)
    if data["response_mask"].any() or not data["response_mask"].numel():  # for empty responses alone verl's raises
        return function(**given)
    mask = data["response_mask"].clone()
    (mask.values() if mask.is_nested else mask.view(-1))[0] = 1
    data = data.copy()
    data["response_mask"] = mask
    with torch.no_grad():
        _, metrics = function(**given | {"data": data})
    neutral_metrics = {name: neutral(metric) for name, metric in metrics.items() if isinstance(metric, Metric)}
    return 0.0 * next(iter(output.values())).values().sum(), neutral_metrics


class PassLoss(NamedTuple):
    """What a loss function says of one pass.

    Attributes:
        loss: a scalar.
        metrics: by name; None: the loss was not asked, and has none.
    """

    loss: torch.Tensor
    metrics: dict[str, Any] | None


class Loss:
    """The loss of a mini-batch's passes.

    Args:
        function: as verl's engines get it; None: outputs alone are wanted, and the loss is 1.
        reads: `LossKind.reads` of a function that is not verl's own.

    Attributes:
        kind: what is known of the function.
        is_known: whether the function is one of verl's own, or None. Any other may read what does not travel.
    """

    def __init__(self, function: LossFunction | None, reads: Set[str] | None = None) -> None:
        self.function = function
        self.kind = _kind_of(function, reads)
        self.is_known = function is None or self.kind.is_verls

    def warn_of_limits(self) -> None:
        """Says once what a user's loss does not get, and must not do."""
        module = getattr(getattr(self.function, "func", self.function), "__module__", None) or ""
        if not self.is_known and not module.startswith("verl."):
            warn_once(
                logger,
                "prefix: a loss that is not verl's own gets zeros in place of outputs of prompts, and must not run "
                "collectives, since ranks compute it for different numbers of passes",
            )

    def floats(self, data: TensorDict) -> dict[str, torch.Tensor]:
        """Values of `data` from which a NaN can get into the loss."""
        read = self.kind.reads
        names = sorted(data.keys() if read is None else read & set(data.keys()))
        floats = {name: data[name] for name in names if isinstance(data[name], torch.Tensor)}
        return {name: x.values() if x.is_nested else x for name, x in floats.items() if x.is_floating_point()}

    def needs_masked_outputs(self, data: TensorDict) -> bool:
        """Whether the loss needs outputs of tokens whose response_mask is 0. verl's losses of policies do not, if the
        batch has response_mask and old_log_probs, and if all that the loss reads is finite. If something is not finite,
        masked tokens are computed as well: on the stock path a masked NaN spoils the update, and ours must not hide
        it. A critic's loss gets them, too, since its head is cheap."""
        if not self.kind.is_verls or self.kind.of_values or not {"response_mask", "old_log_probs"} <= set(data.keys()):
            return True
        return not all(torch.isfinite(values).all() for values in self.floats(data).values())

    def for_stock(self) -> LossFunction | None:
        """Returns the function as the stock path calls it. verl's loss may raise where no token of a micro-batch
        counts, as in one of padding alone. The returned function gives 0 there, and `neutral` metrics."""
        if self.function is None or not self.kind.needs_a_token:
            return self.function
        return functools.partial(_loss_or_zero, self.function)

    def __call__(self, model_output: Mapping[str, torch.Tensor], data: TensorDict, process_group: Any) -> PassLoss:
        """Computes the loss of a pass. Where no token counts and verl's loss would raise, it is 0, without metrics.

        Args:
            model_output: outputs of the pass's rows, jagged [rows, tokens] by name.
            data: the pass's rows, on the device (`pass_results.micro_batch_of`).
            process_group: the ranks that compute data in parallel.
        """
        output = next(iter(model_output.values()))
        if self.function is None:
            return PassLoss(torch.ones((), device=output.device), {})
        if not self.kind.needs_a_token or data["response_mask"].any():
            return PassLoss(*self.function(model_output=model_output, data=data, dp_group=process_group))
        return PassLoss(0.0 * output.values().sum(), None)
