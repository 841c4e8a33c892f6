"""The loss of a pass: verl's own, of which we know what it reads, or a user's; and its metrics, which ranks average."""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.trainer.distillation.losses import distillation_ppo_loss, get_distillation_loss_fn
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss, value_loss

from verl_prefix.config.actor import LOSSES_OF_ROWS, SKIP_ZERO_ADVANTAGE, gradient_without_advantage
from verl_prefix.engine.rows import BatchRows, select_rows
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)

LossFunction = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


class LossKind(NamedTuple):
    """What is known of a loss function.

    Attributes:
        fields: names of a batch's fields, besides tokens, through which a NaN can reach the loss; None: all.
        sums_rows: whether it is one of `LOSSES_OF_ROWS`, or a critic's. They sum over rows, and read only tokens whose
            response_mask is 1.
        of_values: whether it is a critic's.
        distills: whether it is distillation_ppo_loss, which verl also calls with logits (as `processor`).
        needs_a_token: whether it raises where no token counts.
    """

    fields: Set[str] | None
    sums_rows: bool = False
    of_values: bool = False
    distills: bool = False
    needs_a_token: bool = False


def _kind_of(function: LossFunction | None, fields: Set[str] | None) -> LossKind:
    """Finds what is known of a loss; little, unless it is verl's own and a sum over rows. verl's losses of distillation
    are sums over tokens, and so over rows. `fields`: what a loss reads that is not verl's.

    Source: verl/workers/utils/losses.py (ppo_loss), verl/trainer/ppo/core_algos.py (compute_policy_loss_<mode>),
    verl/trainer/distillation/losses.py (distillation_ppo_loss). These raise where no token counts:
    compute_distillation_loss_range there, compute_rollout_correction_and_rejection_mask in
    verl/trainer/ppo/rollout_corr_helper.py.
    """
    if function is None:
        return LossKind({"temperature"})
    distills = getattr(function, "func", None) is distillation_ppo_loss
    unknown = LossKind(fields, distills=distills, needs_a_token=distills)
    if not isinstance(function, functools.partial) or "config" not in function.keywords:
        return unknown
    if function.func is value_loss:  # of every token by itself, summed by agg_loss
        return LossKind({"response_mask", "values", "returns"}, sums_rows=True, of_values=True)
    if function.func not in (ppo_loss, distillation_ppo_loss):
        return unknown
    config = function.keywords["config"]
    mode: str = config.policy_loss.get("loss_mode", "vanilla")
    parts = [(get_policy_loss_fn(mode), get_policy_loss_fn)]
    if distills:
        of_tokens = function.keywords["distillation_config"].distillation_loss.loss_mode
        parts.append((get_distillation_loss_fn(of_tokens), get_distillation_loss_fn))
    is_verls = all(part.__module__ == verls.__module__ for part, verls in parts)  # a user's may have verl's name
    if mode not in LOSSES_OF_ROWS or not is_verls:
        return unknown
    read = {"temperature", "response_mask", "old_log_probs", "advantages", "rollout_is_weights"}
    read -= {"gpg": {"old_log_probs"}, "bypass_mode": {"rollout_is_weights"}}.get(mode, set())
    read |= {"ref_log_prob"} if config.use_kl_loss else set()
    read |= {"teacher_logprobs"} if distills else set()
    return LossKind(read, sums_rows=True, distills=distills, needs_a_token=distills or mode == "bypass_mode")


class Loss:
    """The loss of a mini-batch's passes.

    Args:
        function: as verl's engines get it; None: outputs alone are wanted, and the loss is 1.
        fields: floats that a loss which is not verl's reads besides outputs; None: all of the batch.

    Attributes:
        kind: what is known of the function.
        is_unknown: whether there is a function of which little is known. It may read what does not travel.
    """

    def __init__(self, function: LossFunction | None, fields: Set[str] | None = None) -> None:
        self.function, self.kind = function, _kind_of(function, fields)
        self.is_unknown = function is not None and not self.kind.sums_rows

    def warn_of_limits(self) -> None:
        """Says once what a user's loss does not get, and must not do."""
        module = getattr(getattr(self.function, "func", self.function), "__module__", None) or ""
        if self.is_unknown and not module.startswith("verl."):
            warn_once(
                logger,
                "prefix: a loss that is not verl's own gets zeros in place of outputs of prompts, and must not run "
                "collectives, since ranks compute it for different numbers of passes",
            )

    def floats(self, data: TensorDict) -> dict[str, torch.Tensor]:
        """Values of `data` from which a NaN can get into the loss."""
        read = self.kind.fields
        names = sorted(data.keys() if read is None else read & set(data.keys()))
        floats = {name: data[name] for name in names if isinstance(data[name], torch.Tensor)}
        return {name: x.values() if x.is_nested else x for name, x in floats.items() if x.is_floating_point()}

    def needs_masked_outputs(self, data: TensorDict) -> bool:
        """Whether somebody reads outputs of tokens whose response_mask is 0. Nobody does if the loss is verl's own of
        policies, the batch has response_mask and old_log_probs, and all that the loss reads is finite. Where something
        is not finite, masked tokens count: on the stock path a masked NaN spoils the update, and ours must not hide it.
        A critic's head is cheap, and computes all tokens."""
        if not self.kind.sums_rows or self.kind.of_values or not {"response_mask", "old_log_probs"} <= set(data.keys()):
            return True
        return not all(torch.isfinite(values).all() for values in self.floats(data).values())

    def find_dead(self, rows: BatchRows) -> frozenset[int]:
        """Returns the numbers of dead rows: where response_mask is 1 their advantages are 0, so that they have no loss
        and no gradient. No row is dead where anything is not finite, or where outputs are wanted back.

        Raises:
            ValueError: rows without advantage have a gradient in this loss.
        """
        why = "a loss that is not verl's own of policies; use verl's"
        if isinstance(self.function, functools.partial) and self.kind.sums_rows and not self.kind.distills:
            why = gradient_without_advantage(self.function.keywords["config"])
        if why:
            raise ValueError(
                f"{SKIP_ZERO_ADVANTAGE}=True leaves out rows that have a gradient under {why}, or set "
                f"{SKIP_ZERO_ADVANTAGE}=False"
            )
        data = rows.data
        if rows.flag("return_model_output") or self.needs_masked_outputs(data):
            return frozenset()
        pairs = zip(data["advantages"].unbind(), data["response_mask"].unbind(), strict=True)
        lives = [(advantages * mask).any() for advantages, mask in pairs]
        return frozenset(row for row, live in enumerate(map(bool, lives)) if not live)

    def has_gradient(self, rows: BatchRows, numbers: list[int], process_group: Any) -> bool:
        """Whether verl's loss of the rows with these `numbers` has a gradient in any of their outputs. No model runs.
        The loss is computed of eight rows at a time, twice: with log-probs equal to the old ones, where nothing is
        clipped, and 0.1 above these. Each rank stops at its first rows with a gradient: these losses have no
        collectives."""
        for start in range(0, len(numbers), 8):
            batch = rows.select(numbers[start : start + 8])
            micro_batch = self.micro_batch(batch.data, [*range(len(batch))])
            old = batch.at_suffixes("old_log_probs").to(get_device_id())
            for shift in (0.0, 0.1):
                values = {"log_probs": (old + shift).requires_grad_(), "entropy": (0 * old).requires_grad_()}
                offsets = micro_batch["input_ids"].offsets()
                outputs = {n: torch.nested.nested_tensor_from_jagged(x, offsets) for n, x in values.items()}
                loss, *_ = self(outputs, micro_batch, process_group)
                gradients = torch.autograd.grad(loss, [*values.values()], allow_unused=True)
                if any(gradient is not None and gradient.any() for gradient in gradients):
                    return True
        return False

    def micro_batch(self, data: TensorDict, numbers: list[int]) -> TensorDict:
        """Takes the rows of one pass to the device. verl's own loss reads some tensors row by row, for their lengths
        alone (no_padding_2_padding). These stay on the host, or the device would be idle for some 0.1 ms a row."""
        on_host = select_rows(data, numbers)
        micro_batch = on_host.to(get_device_id())
        if self.kind.sums_rows:
            micro_batch.clear_device_()
            for name in {"prompts", "responses", "attention_mask"} & set(micro_batch.keys()):
                micro_batch[name] = on_host[name]
        return micro_batch

    def for_stock(self) -> LossFunction | None:
        """Returns the function as the stock path calls it. verl's would raise where no token of a micro-batch counts,
        as in one of padding alone. Then the loss is 0, and its metrics are `neutral`, since every micro-batch must have
        the same ones. For a micro-batch of empty responses alone it raises, as in verl's engine."""
        function = self.function
        if function is None or not self.kind.needs_a_token:
            return function

        def or_zero(**given: Any) -> Any:
            data, output = given.get("data"), given.get("model_output")
            if output is None or data is None or data["response_mask"].any() or not data["response_mask"].numel():
                return function(**given)  # of top-k distillation also what is made of logits
            mask = data["response_mask"].clone()
            (mask.values() if mask.is_nested else mask.view(-1))[0] = 1
            data = data.copy()
            data["response_mask"] = mask
            with torch.no_grad():
                _, metrics = function(**given | {"data": data})
            nothing = {name: neutral(x) if isinstance(x, Metric) else 0.0 for name, x in metrics.items()}
            return 0.0 * next(iter(output.values())).values().sum(), nothing

        return or_zero

    def __call__(
        self, model_output: Mapping[str, torch.Tensor], data: TensorDict, process_group: Any
    ) -> tuple[torch.Tensor, dict[str, Any], bool]:
        """Computes the loss and the metrics of a pass, and says whether there are metrics. Where verl's loss would
        raise, since no token counts, there are none, and the loss is 0 (`pass_results`).

        Args:
            model_output: of its rows, jagged [rows, tokens] by name.
            data: its rows, as `micro_batch` takes them.
            process_group: the ranks that compute data in parallel.
        """
        output = next(iter(model_output.values()))
        if self.function is None:
            return torch.ones((), device=output.device), {}, True
        if not self.kind.needs_a_token or data["response_mask"].any():
            return *self.function(model_output=model_output, data=data, dp_group=process_group), True
        return 0.0 * output.values().sum(), {}, False


def neutral(metric: Metric) -> Metric:
    """Returns a metric that is aggregated like this one, has as many values, and changes no extreme: infinite where the
    minimum or maximum counts, and 0 in sums and means."""
    value = {AggregationType.MIN: math.inf, AggregationType.MAX: -math.inf}.get(metric.aggregation, 0.0)
    found = metric.init_list()
    found.extend([value] * len(metric.values))
    return found
