"""One mini-batch on its way through the schedule, in verl's terms: rows in, per-token outputs, loss and metrics out.

All of it is verl's own: `prepare_model_outputs` of the engine and the loss function, on suffix tokens instead of rows.
Source: verl/workers/engine/fsdp/transformer_impl.py, FSDPEngineWithLMHead.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from types import SimpleNamespace
from typing import NamedTuple

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from verl_prefix.config import LOSSES_OF_ROWS
from verl_prefix.core.errors import current_pass, listed
from verl_prefix.core.groups import Group
from verl_prefix.core.layout import Layout, on_device
from verl_prefix.core.schedule import Schedule, TokenBatch
from verl_prefix.core.waves import Plan
from verl_prefix.engine.read_later import HostInts, ItemsLater, read_metrics
from verl_prefix.engine.rows import row_lens
from verl_prefix.models.vision import PixelBatch, is_vision_config

logger = logging.getLogger(__name__)


class MiniBatch:
    """One mini-batch on its way through the schedule: logits -> verl's per-token outputs -> loss, rows and outputs."""

    def __init__(
        self, engine: FSDPEngineWithLMHead, data: TensorDict, loss_function: Callable | None, forward_only: bool
    ):
        self.engine = engine
        self.data = data
        self.loss_function = loss_function
        self.forward_only = forward_only
        device = get_device_id()
        input_ids, position_ids = data["input_ids"], data["position_ids"]
        offsets = input_ids.offsets().tolist()
        config = engine.module.config
        pixels = tu.get(data, "multi_modal_inputs") if is_vision_config(config) else None
        if pixels is not None:
            pixels = PixelBatch(pixels, input_ids.values().cpu(), offsets, config)
        flags = ("calculate_entropy", "calculate_sum_pi_squared")
        self._keeps_model_output = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        self._flags = {flag: tu.get_non_tensor_data(data, flag, False) for flag in flags}
        self._loss_mode = mode_of_verls_loss(loss_function)
        self._fields = self._fields_of_the_loss()
        is_read = self._is_read(offsets) if self._skips_lm_head() else None
        self.tokens = TokenBatch(
            input_ids.values().to(device), position_ids.values().to(device), offsets=offsets, pixels=pixels,
            is_read=is_read,
        )  # fmt: skip
        temperature = torch.as_tensor(data["temperature"], dtype=torch.float32, device=device).expand(len(data))
        self._token_temperature = temperature.repeat_interleave(input_ids.offsets().diff().to(device))
        self._offsets: dict[int, torch.Tensor] = {}
        self.names: list[str] = []
        self.dtype = torch.float32
        self._passes: list[_Pass] = []
        self.num_not_finite = 0

    def _fields_of_the_loss(self) -> set[str] | None:
        """What loss and outputs are made of beside tokens, and a NaN gets in from; None: any field, of a loss that is
        not verl's own. Source: ppo_loss (verl/workers/utils/losses.py) and compute_policy_loss_<mode>."""
        if self.loss_function is None:
            return {"temperature"}
        if self._loss_mode is None:
            return None
        fields = {"temperature", "response_mask", "old_log_probs", "advantages", "rollout_is_weights"}
        if self.loss_function.keywords["config"].use_kl_loss:
            fields.add("ref_log_prob")
        return fields - {"gpg": {"old_log_probs"}, "bypass_mode": {"rollout_is_weights"}}.get(self._loss_mode, set())

    def _floats(self, data: TensorDict) -> dict[str, torch.Tensor]:
        """Values of `data` that a NaN gets into the loss from."""
        names = data.keys() if self._fields is None else self._fields & set(data.keys())
        floats = {name: data[name] for name in names if isinstance(data[name], torch.Tensor)}
        return {name: x.values() if x.is_nested else x for name, x in floats.items() if x.is_floating_point()}

    def _skips_lm_head(self) -> bool:
        """Whether nobody reads outputs where response_mask is 0: in an update by verl's own losses."""
        if self._keeps_model_output or self._flags["calculate_sum_pi_squared"] or self._loss_mode is None:
            return False
        return all(name in self.data.keys() for name in ("response_mask", "old_log_probs"))

    def _is_read(self, offsets: Sequence[int]) -> torch.Tensor | None:
        """[N] bool: suffix tokens with a response_mask. None where that are all, or where what the loss reads is not
        finite: by stock's rule a masked NaN spoils the update, too."""
        mask = self._at_suffixes("response_mask", offsets).bool()
        if int(mask.sum()) == sum(row_lens(self.data)[1]):
            return None
        return mask if all(torch.isfinite(values).all() for values in self._floats(self.data).values()) else None

    def _at_suffixes(self, name: str, offsets: Sequence[int]) -> torch.Tensor:
        """A field of the responses (jagged, or padded right) as [N]: at the token before each of a response's."""
        prompt_lens, response_lens = row_lens(self.data)
        values = [row[:n].cpu() for row, n in zip(self.data[name].unbind(), response_lens, strict=True)]
        flat = torch.zeros(offsets[-1], dtype=values[0].dtype)
        for start, prompt_len, row in zip(offsets, prompt_lens, values, strict=False):
            flat[start + prompt_len - 1 :][: len(row)] = row
        return flat

    def token_outputs(self, index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """verl's prepare_model_outputs on suffix tokens: [n, k] of `self.dtype`, one column per name in `self.names`.

        Args:
            index: [n] of the tokens in the batch's flat values. logits: [n, vocabulary].
        """
        temperature = self.data["temperature"]
        output_args = {
            "temperature_is_one": not isinstance(temperature, torch.Tensor) and float(temperature) == 1.0,
            "temperature_rmpad": self._token_temperature[index],
            # A suffix token's label is the next token of its own row, which a roll of the packed row would not give.
            "input_ids_rmpad_rolled": self.tokens.input_ids[index + 1],
            "pad_size": 0,
        }
        # One offsets tensor per length: a recomputed jagged tensor is the same size only if its offsets are the same.
        if len(index) not in self._offsets:
            self._offsets[len(index)] = on_device(torch.tensor([0, len(index)]), index.device)
        offsets = self._offsets[len(index)]
        one_row = torch.nested.nested_tensor_from_jagged(self.tokens.input_ids[index], offsets)
        tokens = tu.get_tensordict({"input_ids": one_row}, self._flags)
        # Outputs stay on the rank of their token: under sequence parallelism the schedule gathers a pass's, once.
        is_parallel, self.engine.use_ulysses_sp = self.engine.use_ulysses_sp, False
        try:
            model_output = SimpleNamespace(logits=logits.unsqueeze(0))
            outputs = self.engine.prepare_model_outputs(model_output, output_args, tokens, None)
        finally:
            self.engine.use_ulysses_sp = is_parallel
        self.names = list(outputs)
        self.dtype = functools.reduce(torch.promote_types, (x.dtype for x in outputs.values()))
        return torch.stack([x.values().to(self.dtype) for x in outputs.values()], dim=-1)

    def step(self, groups: Sequence[Group], layout: Layout, outputs: torch.Tensor) -> torch.Tensor:
        """Stands for FSDPEngineWithLMHead.forward_step behind the model; outputs [suffix tokens, k]."""
        rows = [row for group in groups for row in group.rows]
        micro_batch = self._micro_batch(rows)
        model_output = self._model_output(groups, layout, outputs, micro_batch["input_ids"].offsets())
        if self.loss_function is None:
            loss, metrics = torch.ones((), device=outputs.device), {}
        else:
            with ItemsLater() if self._reads_later else nullcontext():
                loss, metrics = self.loss_function(
                    model_output=model_output, data=micro_batch, dp_group=self.engine.get_data_parallel_group()
                )
        output = {"loss": loss.detach(), "metrics": metrics}
        model_output = {name: values.detach() for name, values in model_output.items()}
        if self._keeps_model_output:
            output["model_output"] = model_output
        # A NaN that the loss masks counts too: its gradient is NaN times zero.
        values = [loss.detach(), outputs, *self._floats(micro_batch).values()]
        finite = torch.stack([torch.isfinite(x).all() for x in values]).all()
        self._passes.append(_Pass(rows, output, model_output, finite, where=current_pass()))
        return loss

    @property
    def _reads_later(self) -> bool:
        """Whether the loss reads numbers for its metrics alone; those of bypass_mode are computed with."""
        return self._loss_mode not in (None, "bypass_mode")

    def _micro_batch(self, rows: list[int]) -> TensorDict:
        """The rows on the device; what verl's own loss reads lengths of stays with the host, who reads them."""
        with HostInts():
            on_host = tu.index_select_tensor_dict(self.data, rows)
        micro_batch = on_host.to(get_device_id())
        if self._reads_later:
            micro_batch.clear_device_()
            for name in ("prompts", "responses", "attention_mask"):
                if name in micro_batch.keys():
                    micro_batch[name] = on_host[name]
        return micro_batch

    def _read(self) -> None:
        """Losses and metrics of all passes as numbers. Counts passes whose loss or outputs are not finite, and names
        the first one's rows; verl then skips the update, as it does for the stock actor."""
        losses = [one.output["loss"] for one in self._passes]
        metrics = [one.output["metrics"] for one in self._passes] if self._reads_later else []
        numbers = read_metrics(metrics, [*losses, *(one.finite for one in self._passes)])
        finite = numbers[len(losses) :]
        for one, number in zip(self._passes, numbers, strict=False):
            one.output["loss"] = number
        self.num_not_finite = finite.count(0.0)
        if self.num_not_finite:
            one = self._passes[finite.index(0.0)]
            uids = tu.get(self.data, "uid", [None] * len(self.data))
            read = tu.index_select_tensor_dict(self.data, one.rows)
            problems = []
            for name, values in (one.model_output | {name: read[name] for name in self._floats(read)}).items():
                pairs = zip(one.rows, values.unbind(), strict=True)
                if bad := [f"{row} (uid {uids[row]})" for row, x in pairs if not torch.isfinite(x).all()]:
                    problems.append(f"{name} of rows {listed(bad)}")
            logger.error(
                "not finite in %s: loss %s; %s. verl skips an update whose gradient norm is not finite; later passes "
                "of this mini-batch are counted in prefix/nonfinite_passes and not logged",
                one.where,
                one.output["loss"],
                "; ".join(problems) or "all that it was made of is finite",
            )

    def _model_output(
        self, groups: Sequence[Group], layout: Layout, outputs: torch.Tensor, offsets: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Every suffix token's outputs at its position in its row, zeros in the prompt: verl's nested full-length form.
        A token that lm_head skips has no entropy, and its old log-prob."""
        starts = [self.tokens.offsets[row] for group in groups for row in group.rows]
        ends = [self.tokens.offsets[row + 1] for group in groups for row in group.rows]
        *row_starts, num_tokens = accumulate((end - start for start, end in zip(starts, ends, strict=True)), initial=0)
        suffix_lens = torch.tensor([n for group in groups for n in group.suffix_lens], dtype=torch.int64)
        moves = torch.tensor([to - start for to, start in zip(row_starts, starts, strict=True)], dtype=torch.int64)
        moves = moves.repeat_interleave(suffix_lens)
        if layout.read is not None:
            moves = moves[layout.read - layout.num_prefix]
        full = outputs.new_zeros(num_tokens, outputs.shape[-1])
        if layout.read is not None:  # where nobody reads: no entropy, and the log-probs that the update starts from
            old = torch.cat([self._old_log_probs[start:end] for start, end in zip(starts, ends, strict=True)])
            full[:, self.names.index("log_probs")] = on_device(old, outputs.device).to(full.dtype)
        full = full.index_copy(0, on_device(layout.suffix_index + moves, outputs.device), outputs)
        return {
            name: torch.nested.nested_tensor_from_jagged(column, offsets)
            for name, column in zip(self.names, full.unbind(-1), strict=True)
        }

    @functools.cached_property
    def _old_log_probs(self) -> torch.Tensor:
        return self._at_suffixes("old_log_probs", self.tokens.offsets)

    def outputs(self, plan: Plan) -> tuple[list[dict], list[list[int]]]:
        """The passes' outputs and their rows. Rows with an empty response, which no pass had, follow where their
        outputs are wanted, or where a rank has no other row: the metrics of all ranks need the same keys, and as many
        values of each (`even_out`)."""
        if plan.idle_rows and (self._keeps_model_output or not self._passes):
            device = self.tokens.input_ids.device
            if not self._passes:  # names and dtype are those that any one token gets
                vocab_size = self.engine.module.config.get_text_config().vocab_size
                logits = torch.zeros((1, vocab_size), dtype=self.engine._autocast_dtype, device=device)
                self.token_outputs(torch.tensor([-1], device=device), logits)
            with torch.no_grad():
                nothing = torch.zeros((0, len(self.names)), dtype=self.dtype, device=device)
                no_tokens = torch.zeros(0, dtype=torch.int64)
                self.step(plan.idle_rows, Layout(no_tokens, 0, ()), nothing)
            if len(self._passes) > 1:
                self._passes[-1].output["metrics"] = {}
        self._read()
        return [one.output for one in self._passes], [one.rows for one in self._passes]


class _Pass(NamedTuple):
    """A pass that is done: its output as verl wants it, and what says, behind the last one, which was not finite, and
    in which rows; `finite` is [] bool."""

    rows: list[int]
    output: dict[str, object]
    model_output: dict[str, torch.Tensor]
    finite: torch.Tensor
    where: str


def mode_of_verls_loss(loss: Callable | None) -> str | None:
    """`loss_mode` where the loss is verl's own, of rows; None for any other."""
    if not isinstance(loss, functools.partial) or loss.func is not ppo_loss or "config" not in loss.keywords:
        return None
    mode: str = loss.keywords["config"].policy_loss.get("loss_mode", "vanilla")
    is_verls = get_policy_loss_fn(mode).__module__ == get_policy_loss_fn.__module__
    return mode if mode in LOSSES_OF_ROWS and is_verls else None


def even_out(metrics: dict[str, object], num_passes: int) -> None:
    """Gives every `Metric` one value per pass: verl averages them over ranks by position (Metric.aggregate_dp), and a
    rank's dummy passes have none. A dummy adds 0 to a sum and the rank's own mean to anything else."""
    for metric in metrics.values():
        if isinstance(metric, Metric) and metric.values:
            filler = 0.0 if metric.aggregation == AggregationType.SUM else sum(metric.values) / len(metric.values)
            metric.extend([filler] * (num_passes - len(metric.values)))


def plan_metrics(groups: Sequence[Group], plan: Plan, schedule: Schedule) -> dict[str, float]:
    """This rank's prefix/* metrics of one mini-batch."""
    num_logical = sum(group.num_logical_tokens for group in groups)
    shared = [group for group in groups if group.is_shared]
    return {
        "prefix/groups": len(shared),
        "prefix/stock_rows": sum(len(group.rows) for group in groups if not group.is_shared),
        "prefix/tokens_saved": num_logical - plan.num_physical_tokens,
        "prefix/recomputed_groups": plan.split_groups,
        "prefix/packed_passes": len(plan.packed),
        "prefix/waves": len(plan.waves),
        "prefix/offloaded_gib": schedule.meter.transfers["host_bytes"] / 2**30,
        **{f"timing_s/prefix_{phase}": seconds for phase, seconds in schedule.meter.seconds.items()},
    }
