"""Arms of `verl-prefix bench`: one update, or log-prob pass, of the same rows by stock, by peers and by us.

    stock            whole rows in one packed row, verl's default: the best attention there is (see `stock_attention`)
    stock_lean       the same with lm_head on response tokens alone: a stronger baseline than verl has
    prefix_grouper   the package of that name (0.0.1.post1), as published: lm_head on every token of its packed row
    one_level        packed, of rows of several turns: whole prompts alone are shared, no trees
    packed, phased   `runner.PlanRunner`; phased with waves of at most an eighth of the budget
    auto             the plan that `auto.chooser` makes, in waves that fill the budget (the plugin's defaults)
    +checkpoint      gradient checkpointing of decoder layers
    +offload         phased: prefixes wait in host memory (on a CPU only its cost shows)

All arms run in micro-batches of at most `budget` tokens (verl's ppo_max_token_len_per_gpu, physical tokens; one row at
least). All but stock and prefix_grouper bound logits at `logits_chunk` tokens, checkpointed beyond that.
"""

import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from verl_prefix.core.bins import first_fit
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.forward import PackedForward, TokenBatch
from verl_prefix.core.groups import Group
from verl_prefix.core.kernels import aten
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import make_plan
from verl_prefix.core.runner import PlanRunner
from verl_prefix.core.runs import Segment
from verl_prefix.models.hookup import ATTENTION_NAME, HookedModel
from verl_prefix.models.recurrent import is_recurrent
from verl_prefix.testing.rollouts import flatten, turn_rollouts
from verl_prefix.tools.bench.options import STOCK, Size

WAVES_PER_BUDGET = 8


@dataclass(frozen=True)
class Batch:
    """Rows of one prompt, N tokens in all.

    Attributes:
        tokens: one row behind the other. weights: [N], of the log-prob of each response token; 0 elsewhere.
        groups: what packed and phased share. one_level: the same rows, of which whole prompts alone are shared.
    """

    size: Size
    tokens: TokenBatch
    weights: torch.Tensor
    groups: list[Group]
    one_level: list[Group]

    def log_probs(self, index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Log-probs [n, 1] of the successors of tokens `index` [n], in fp32 at least."""
        labels = self.tokens.input_ids[(index + 1) % len(self.weights)]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return -torch.nn.functional.cross_entropy(wide, labels, reduction="none").unsqueeze(-1)

    def loss(self, index: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """The weighted sum of log-probs: any policy gradient at fixed weights."""
        return (log_probs[:, 0] * self.weights[(index + 1) % len(self.weights)]).sum()


def build_batch(size: Size, vocab: int, device: str) -> Batch:
    """Random rows of this size."""
    said = size.suffix - size.thinking
    rollouts = turn_rollouts(size.prefix + 1, size.group, size.turns, size.thinking, said, size.tool, vocab)
    tokens, weights, groups = flatten(rollouts, device)
    one_level = flatten(replace(rollouts, cuts=None), device)[2]
    return Batch(size, tokens, weights.float(), groups, one_level)


@dataclass(frozen=True)
class Case:
    """Model and rows of an arm. auto: the chooser's plan, for the arm of that name."""

    model: PreTrainedModel
    batch: Batch
    budget: int
    logits_chunk: int = 4096
    auto: Plan | None = None


class Forward(NamedTuple):
    """One micro-batch of an arm that is not ours.

    `input_ids`, `position_ids` [B, L]; `token_index` [n]: the batch's tokens whose log-probs are wanted; `kept` [n]:
    which of the B * L outputs these are, lm_head runs on them alone; None: lm_head runs on all, and `select` finds
    the n logits.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    token_index: torch.Tensor
    kept: torch.Tensor | None
    extra: dict[str, Any]
    select: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits.flatten(0, -2)


class Done(NamedTuple):
    """Seconds of all, and of forwards with their losses; the batch's loss."""

    seconds: float
    forward: float
    loss: float


def stock_attention(device: str, dtype: torch.dtype) -> str:
    """Stock's attention: flash-attn; without it torch's own varlen kernel, through our hook with nothing shared.

    On a CPU and in fp32 sdpa row by row, since packed rows become a dense T x T mask there (4 layers, hidden 256,
    8 rows of 640 tokens on one core: 2.6 s row by row, 9.0 s packed).
    """
    if device == "cuda" and dtype in (torch.float16, torch.bfloat16):
        if importlib.util.find_spec("flash_attn"):
            return "flash_attention_2"
        if aten.unavailable() is None:
            return ATTENTION_NAME
    return "sdpa"


def run_arm(case: Case, arm: str, train: bool = True, attention: str | None = None) -> Done:
    """One update on zeroed gradients, or one log-prob pass.

    Args:
        attention: another one for stock than `stock_attention`.
    """
    model, batch = case.model, case.batch
    path, _, added = arm.partition("+")
    plan = arm_plan(batch, path, case.budget, case.auto) if path != "prefix_grouper" else None
    model.gradient_checkpointing_disable()
    if added == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad(set_to_none=False)
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    losses: list[torch.Tensor] = []
    backward_s = 0.0

    def backward(loss: torch.Tensor) -> None:
        nonlocal backward_s
        losses.append(loss.detach())
        if train:
            wait()
            start = time.perf_counter()
            loss.backward()
            wait()
            backward_s += time.perf_counter() - start

    wait()
    start = time.perf_counter()
    with torch.set_grad_enabled(train):
        if plan is not None:
            model.set_attn_implementation(ATTENTION_NAME)

            def step(packed_row: PackedRow, log_probs: torch.Tensor) -> torch.Tensor:
                return batch.loss(packed_row.output_places.to(log_probs.device), log_probs)

            ours = PackedForward(
                HookedModel(model), batch.log_probs, logits_chunk=case.logits_chunk,
                keep_attention=added == "checkpoint",
            )  # fmt: skip
            runner = PlanRunner(ours, step, backward, offload=added == "offload")
            runner.run(batch.tokens, plan)
            backward_s += runner.meter.seconds.get("phase_c", 0.0)
        else:
            name, forwards = _forwards(case, path, attention)
            model.set_attn_implementation(name)
            for forward in forwards:
                _run(case, forward, backward)
    wait()
    seconds = time.perf_counter() - start
    return Done(seconds, seconds - backward_s, float(sum(losses)))


def arm_plan(batch: Batch, path: str, budget: int, auto: Plan | None = None) -> Plan | None:
    """The plan of an arm, or of an ideal of `measure.update_flops`; None: nothing is shared.

    Args:
        path: the arm's name, up to its "+". auto: see `Case`.
    """
    if path in STOCK or path == "auto":
        return auto if path == "auto" else None
    groups = batch.one_level if path.endswith("one_level") else batch.groups
    if path == "phased":
        return make_plan(groups, budget, path, wave_tokens=max(1, budget // WAVES_PER_BUDGET))
    if path.startswith("ideal"):
        budget = sum(group.num_physical_tokens for group in groups)
    return make_plan(groups, budget, "packed")


def _forwards(case: Case, path: str, attention: str | None) -> tuple[str, list[Forward]]:
    """An arm's attention implementation and its micro-batches."""
    model, batch = case.model, case.batch
    device = model.device.type
    if path != "prefix_grouper":
        name = attention or stock_attention(device, model.dtype)
        alone = name == "sdpa" or is_recurrent(model.config.model_type)  # a state would leak into the next packed row
        responses = {row: n for group in batch.groups for row, n in zip(group.rows, group.output_lens, strict=True)}
        rows = [(*ends, responses[row]) for row, ends in enumerate(pairwise(batch.tokens.offsets))]
        passes = first_fit(rows, lambda row: row[1] - row[0], 0 if alone else case.budget)
        return name, [_whole_rows(batch, path == "stock_lean", name, some) for some in passes]
    packed = make_plan(batch.groups, case.budget, "packed").packed
    return _prefix_grouper_attention(model), [_prefix_grouper_forward(batch, *one.groups) for one in packed]


def _run(case: Case, forward: Forward, backward: Callable[[torch.Tensor], None]) -> None:
    model, batch = case.model, case.batch

    def loss(index: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return batch.loss(index, batch.log_probs(index, forward.select(model.lm_head(hidden))))

    hidden = model.base_model(
        input_ids=forward.input_ids, position_ids=forward.position_ids, use_cache=False, **forward.extra
    ).last_hidden_state
    pieces = [(forward.token_index, hidden)]
    if forward.kept is not None:
        chunks = (x.split(case.logits_chunk) for x in (forward.token_index, hidden.flatten(0, 1)[forward.kept]))
        pieces = list(zip(*chunks, strict=True))
    if len(pieces) == 1:
        backward(loss(*pieces[0]))
    else:
        backward(torch.stack([checkpoint(loss, *piece, use_reentrant=False) for piece in pieces]).sum())


def _whole_rows(batch: Batch, lean: bool, attention: str, rows: Sequence[tuple[int, int, int]]) -> Forward:
    """A micro-batch of rows: (first token, end, response tokens)."""
    device = batch.weights.device
    index = torch.cat([torch.arange(start, end, device=device) for start, end, _ in rows])
    ids, positions = (x[index].unsqueeze(0) for x in (batch.tokens.input_ids, batch.tokens.position_ids))
    extra: dict[str, Any] = {}
    if attention == ATTENTION_NAME:
        segments = tuple(Segment(end - start) for start, end, _ in rows)
        extra["prefix_context"] = ForwardContext(PackedRow(index, segments), "auto")
    if not lean:
        return Forward(ids, positions, token_index=index, kept=None, extra=extra)
    # The last prompt token up to the last response token but one: their outputs are the responses' log-probs.
    ends = accumulate(end - start for start, end, _ in rows)
    kept = [torch.arange(end - n - 1, end - 1, device=device) for end, (_, _, n) in zip(ends, rows, strict=True)]
    return Forward(ids, positions, token_index=index[torch.cat(kept)], kept=torch.cat(kept), extra=extra)


_lower_right = functools.cache(causal_lower_right)


def _prefix_grouper_attention(model: PreTrainedModel) -> str:
    """The package's own attention, on flash-attn; without flash-attn torch's own lower-right causal attention."""
    from prefix_grouper.utils.register_transformers import register_attention

    if stock_attention(model.device.type, model.dtype) == "flash_attention_2":
        register_attention()
        return "prefix_grouper_attention"

    def sdpa(q, k, v, mask, *, scaling, **_):
        # `mask` hides padding, and no row is padded here.
        causal = _lower_right(q.shape[2], k.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, causal, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)

    def attention(module, query, key, value, attention_mask, prefix_grouper, scaling, **_):
        return prefix_grouper.forward(sdpa, query, key, value, scaling=scaling), None

    AttentionInterface.register("bench_prefix_grouper", attention)
    return "bench_prefix_grouper"


def _prefix_grouper_forward(batch: Batch, group: Group) -> Forward:
    """As the package's README does it: its prefix is the whole prompt, where each row's first log-prob comes from."""
    from prefix_grouper import PrefixGrouper

    prompt, device = batch.size.prefix + 1, batch.weights.device
    rows = torch.arange(len(batch.weights), device=device).view(-1, batch.size.row)[list(group.rows)]
    prompts, responses = rows[:1, :prompt], rows[:, prompt:]
    masks = torch.ones_like(prompts), torch.ones_like(responses)
    grouper = PrefixGrouper.from_ungrouped_masks(*masks, [len(rows)], device=device, padding_mode="right")
    packed = grouper.concat_input(prompts, masks[0], responses, masks[1])
    ids, positions = batch.tokens.input_ids[packed], batch.tokens.position_ids[packed]
    # A row's last output would predict what comes after it.
    index = rows[:, prompt - 1 : -1].flatten()

    def select(logits: torch.Tensor) -> torch.Tensor:
        return grouper.split_output(logits, include_prefix_last=1)[2][:, : batch.size.suffix].flatten(0, 1)

    return Forward(ids, positions, token_index=index, kept=None, extra={"prefix_grouper": grouper}, select=select)
