"""The loss of a mini-batch: verl's own, of which we know what it reads, or a user's."""

import functools
import logging
from collections.abc import Callable, Mapping, Set
from enum import Enum, auto
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


class Kind(Enum):
    """Whose loss it is. verl's own losses, as named here, sum over rows, and read only tokens whose response_mask is
    1."""

    NONE = auto()  # there is none: outputs alone are wanted
    POLICY = auto()  # verl's own of a policy: of `LOSSES_OF_ROWS`, with distillation or without
    VALUES = auto()  # verl's own of a critic
    OTHER = auto()  # a user's, or one of verl's that is no sum over rows


class LossFacts(NamedTuple):
    """What is known of a loss function.

    Attributes:
        kind: whose it is.
        reads: names of the batch's fields that it reads besides tokens; None: it may read all fields.
        needs_a_token: whether it raises where no token counts: where response_mask is 0 in all rows.
        takes_logits: whether verl also calls it with logits (as `processor`), as distillation_ppo_loss.
        by_user: whether it is a user's, or calls one that a user registered with verl.
    """

    kind: Kind
    reads: Set[str] | None
    needs_a_token: bool = False
    takes_logits: bool = False
    by_user: bool = False


def _facts_of(function: LossFunction | None, reads: Set[str] | None) -> LossFacts:
    """Classifies a loss. verl's losses of distillation are sums over tokens, and so over rows.

    Args:
        reads: what a function of kind OTHER reads.

    Source: verl/workers/utils/losses.py (ppo_loss), verl/trainer/ppo/core_algos.py (compute_policy_loss_<mode>),
    verl/trainer/distillation/losses.py (distillation_ppo_loss). These raise where no token counts:
    compute_distillation_loss_range there, compute_rollout_correction_and_rejection_mask in
    verl/trainer/ppo/rollout_corr_helper.py.
    """
    if function is None:
        return LossFacts(Kind.NONE, {"temperature"})
    distills = getattr(function, "func", None) is distillation_ppo_loss
    module = getattr(getattr(function, "func", function), "__module__", None) or ""
    other = LossFacts(Kind.OTHER, reads, distills, distills, by_user=not module.startswith("verl."))
    if not isinstance(function, functools.partial) or "config" not in function.keywords:
        return other
    if function.func is value_loss:  # of every token by itself, summed by agg_loss
        return LossFacts(Kind.VALUES, {"response_mask", "values", "returns"})
    if function.func not in (ppo_loss, distillation_ppo_loss):
        return other
    config = function.keywords["config"]
    mode: str = config.policy_loss.get("loss_mode", "vanilla")
    if not _has_verls(get_policy_loss_fn, mode):
        return other._replace(by_user=True)
    if mode not in LOSSES_OF_ROWS:
        return other
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
            return other._replace(by_user=True)
        read.add("teacher_logprobs")
    return LossFacts(Kind.POLICY, read, needs_a_token=distills or mode == "bypass_mode", takes_logits=distills)


def _has_verls(loss_of_mode: Callable[[str], Callable[..., Any]], mode: str) -> bool:
    """Whether verl's registry has its own loss under this name. A user may have registered another one."""
    return loss_of_mode(mode).__module__ == loss_of_mode.__module__


def is_call_with_logits(given: Mapping[str, Any]) -> bool:
    """Whether verl calls a loss of top-k distillation with logits, and not with outputs."""
    return given.get("model_output") is None or given.get("data") is None


def _no_token_counts(data: TensorDict) -> bool:
    return not data["response_mask"].any()


def _loss_or_zero(function: LossFunction, /, **given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Calls a loss as verl calls it. Where no token counts it returns a loss of 0 and `neutral` metrics.

    verl needs the same metrics of every micro-batch, and only the loss knows which these are. So the loss runs as if
    one token counted. Its names are taken and its values are not. Metrics that are floats are left out.
    """
    if is_call_with_logits(given):
        return function(**given)
    data, output = given["data"], given["model_output"]
    if not _no_token_counts(data):
        return function(**given)
    if not data["response_mask"].numel():  # all responses are empty, and no token can be marked: verl's loss raises
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
        reads: what a function of kind OTHER reads, as in `LossFacts`.

    Attributes:
        kind, takes_logits, needs_a_token: of `LossFacts`.
    """

    def __init__(self, function: LossFunction | None, reads: Set[str] | None = None) -> None:
        self.function = function
        facts = _facts_of(function, reads)
        self.kind, self.needs_a_token, self.takes_logits = facts.kind, facts.needs_a_token, facts.takes_logits
        self._reads, self._by_user = facts.reads, facts.by_user

    @property
    def is_verls(self) -> bool:
        """Whether it is one of verl's own that sum over rows."""
        return self.kind in (Kind.POLICY, Kind.VALUES)

    @property
    def is_known(self) -> bool:
        """Whether all that it reads is known. A loss of another kind may read what does not travel."""
        return self.kind is not Kind.OTHER

    def warn_of_limits(self) -> None:
        """Says once what a user's loss does not get, and must not do."""
        if self._by_user:
            warn_once(
                logger,
                "prefix: a loss that is not verl's own gets zeros in place of outputs of prompts, and must not run "
                "collectives, since ranks compute it for different numbers of passes",
            )

    def floats(self, data: TensorDict) -> dict[str, torch.Tensor]:
        """Values of `data` from which a NaN can get into the loss."""
        names = sorted(data.keys() if self._reads is None else self._reads & set(data.keys()))
        floats = {name: data[name] for name in names if isinstance(data[name], torch.Tensor)}
        return {name: x.values() if x.is_nested else x for name, x in floats.items() if x.is_floating_point()}

    def needs_masked_outputs(self, data: TensorDict) -> bool:
        """Whether the loss needs outputs of tokens whose response_mask is 0. verl's losses of policies do not, if the
        batch has response_mask and old_log_probs, and if all that the loss reads is finite. If something is not finite,
        masked tokens are computed as well: on the stock path a masked NaN spoils the update, and the shared path must
        not hide it. A critic's loss gets them, too, since its head is cheap."""
        if self.kind is not Kind.POLICY or not {"response_mask", "old_log_probs"} <= set(data.keys()):
            return True
        return not all(torch.isfinite(values).all() for values in self.floats(data).values())

    def for_stock(self) -> LossFunction | None:
        """Returns the function as the stock path calls it. verl's loss may raise where no token of a micro-batch
        counts, as in one of padding alone. The returned function gives 0 there, and `neutral` metrics."""
        if self.function is None or not self.needs_a_token:
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
        if self.needs_a_token and _no_token_counts(data):
            return PassLoss(0.0 * output.values().sum(), None)
        return PassLoss(*self.function(model_output=model_output, data=data, dp_group=process_group))
