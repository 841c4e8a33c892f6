"""Shared prefixes without verl: log-probs of responses for a hand-written or TRL-like loop over a Hugging Face model.

    response_log_probs   packed: every different prompt once and all responses in one graph, one call
    phased_update        phased: phase A on entering, waves of rows by iterating, phase C on leaving

Log-probs, entropies and gradients are those of the model's own forward on every whole row. Prompts and responses go in
as tokens; the split into prefix and suffix happens here, and rows are grouped by it. Sources: Prefix Grouper
(arXiv 2506.05433) for packed, schedule-level reuse for phased; see `schedule`.
"""

import functools
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from verl_prefix.core.groups import group_rows
from verl_prefix.core.schedule import PassOutputs, Schedule, TokenBatch
from verl_prefix.core.waves import Plan, make_plan
from verl_prefix.models import support, vision
from verl_prefix.models.hookup import HookedModel

# A padded [rows, length] tensor, which comes with a mask, or one sequence per row: a tensor [length] or a list of ints.
Tokens = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[int]]
# In the form of the responses: [rows, length] with zeros where the mask is 0, or one tensor [length] per row.
PerToken = torch.Tensor | list[torch.Tensor]


@dataclass(frozen=True)
class Wave:
    """Some rows of the batch. `rows` are their indices, in increasing order: `advantages[wave.rows]` are theirs.

    `log_probs` and `entropy` (None unless asked for) are as in `response_log_probs`, for these rows.
    """

    rows: list[int]
    log_probs: PerToken
    entropy: PerToken | None = None


def response_log_probs(
    model: torch.nn.Module,
    prompts: Tokens,
    responses: Tokens,
    *,
    prompt_mask: torch.Tensor | None = None,
    response_mask: torch.Tensor | None = None,
    groups: Sequence[int] | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    max_tokens: int | None = None,
    logits_chunk: int = 4096,
    attention: str = "auto",
) -> PerToken | tuple[PerToken, PerToken]:
    """Log-probs of response tokens, each different prompt computed once; call backward on what you make of them.

    Args:
        model: HF causal LM of a supported family (README, Limits), on one device. Not wrapped in DDP or FSDP.
        prompts: at least one token each; rows with the same tokens share. One per row, or one per group with `groups`.
        responses: one per row, may be empty. Padded as TRL's `prompt_ids`, `completion_ids`, or lists (see `Tokens`).
        prompt_mask, response_mask: [rows, length] for padded tensors, 1 on tokens and 0 on padding, left or right. What
            only the loss leaves out (tool output) is a token all the same.
        groups: row i has `prompts[groups[i]]`. Rows of different groups do not share, whatever their tokens.
        temperature: logits are divided by it, for log-probs and entropy.
        return_entropy: also return the entropy of each response token's distribution, with gradients.
        max_tokens: tokens computed in one pass, the prefix counted once; a single row may exceed it. Under
            `torch.no_grad` a larger group goes prefix first, then in waves. With gradients all passes are one graph,
            so that more tokens than this are refused.
        logits_chunk: response tokens whose logits exist at once.
        attention: kernel, see the key `attention` in config/actor/prefix_actor.yaml.

    Returns:
        log-probs in the form of the responses, fp32 (fp64 for a float64 model), on the model's device; with
        `return_entropy` a pair (log-probs, entropy). Without any response token there is no graph.

    Raises:
        TypeError: model, tokens or mask have the wrong type. ValueError: a value or a model that cannot be computed.
        The message says which, what was seen, and what to pass.

    Warns:
        UserWarning: no two rows share; with gradients on several ranks, once, that they are not averaged, and how to.
    """
    batch = _Batch(model, prompts, responses, prompt_mask, response_mask, groups, temperature, return_entropy)
    _check_sizes(max_tokens=max_tokens, logits_chunk=logits_chunk)
    if torch.is_grad_enabled():
        if support.checkpointing(model) is not None:
            raise ValueError(
                "gradient checkpointing runs layers again in backward, when response_log_probs is long over; use "
                "phased_update, or call model.gradient_checkpointing_disable()"
            )
        if max_tokens is not None and batch.num_tokens > max_tokens:
            raise ValueError(
                f"{batch.num_tokens} tokens are more than max_tokens={max_tokens}, and with gradients they are one "
                "graph; use phased_update, torch.no_grad(), fewer rows, or a larger max_tokens"
            )
    schedule = Schedule(HookedModel(model), batch.outputs, kernel=attention, logits_chunk=logits_chunk)
    found: dict[int, torch.Tensor] = {}
    with schedule.model.grouped_attention():
        for planned in batch.plan("auto", max_tokens, None).passes:
            with schedule.forwards(batch.tokens, planned) as forwards:
                for done in forwards:
                    found |= batch.by_row(done)
    log_probs, entropy = batch.shaped(list(range(len(batch.responses))), found)
    return log_probs if entropy is None else (log_probs, entropy)


@contextmanager
def phased_update(
    model: torch.nn.Module,
    prompts: Tokens,
    responses: Tokens,
    *,
    prompt_mask: torch.Tensor | None = None,
    response_mask: torch.Tensor | None = None,
    groups: Sequence[int] | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    max_tokens: int | None = None,
    wave_tokens: int | None = None,
    logits_chunk: int = 4096,
    offload: bool = False,
    attention: str = "auto",
) -> Iterator[Iterator[Wave]]:
    """`response_log_probs` in bounded memory: one wave's graph at a time beside the prefixes'. Fills `.grad`.

        with phased_update(model, prompts, responses, max_tokens=16384) as waves:   # phase A
            for wave in waves:
                my_loss(wave.log_probs, advantages[wave.rows]).backward()
        optimizer.step()                                                            # after phase C

    Each wave's loss is its share of the batch's loss: divide by the batch's tokens, not by the wave's. Call backward
    on it before the next wave; a wave may be left without one. Rows with an empty response are in no wave. After an
    exception everything is freed, phase C does not run, and `.grad` holds a part: zero it. Inside the block the model
    is for the waves alone. Works under `torch.no_grad` too, and with (not reentrant) gradient checkpointing.

    Args:
        max_tokens: tokens alive at once, the prefixes and one wave; a single row may exceed it. Groups whose prefixes
            do not fit together come one set after the other, each with its own phases A and C. None: no bound.
        wave_tokens: response tokens of one wave. None: what the prefixes leave of `max_tokens`.
        offload: between phases A and C what the prefix backward needs waits in pinned host memory, and does not count.
        Others as in `response_log_probs`.

    Raises:
        TypeError, ValueError: as `response_log_probs`, on entering.
        RuntimeError: on leaving, where not every wave was iterated; in backward, where it comes after phase C.
    """
    batch = _Batch(model, prompts, responses, prompt_mask, response_mask, groups, temperature, return_entropy)
    _check_sizes(max_tokens=max_tokens, wave_tokens=wave_tokens, logits_chunk=logits_chunk)
    if max_tokens is not None and wave_tokens is not None and wave_tokens >= max_tokens:
        raise ValueError(
            f"wave_tokens={wave_tokens} leaves nothing of max_tokens={max_tokens} for prefixes; pass a smaller "
            "wave_tokens, or None"
        )
    if torch.is_grad_enabled() and support.checkpointing(model):
        raise ValueError(
            "reentrant gradient checkpointing would lose the prefix's gradients; call "
            "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
        )
    schedule = Schedule(HookedModel(model), batch.outputs, kernel=attention, logits_chunk=logits_chunk, offload=offload)
    planned = batch.plan("phased", max_tokens, wave_tokens, offload).phased
    num_waves = sum(len(one.waves) for one in planned)
    missing = num_waves

    def iterate(phases: ExitStack, forwards: Iterator[PassOutputs]) -> Generator[Wave, None, None]:
        nonlocal missing
        for i, one in enumerate(planned):
            if i:
                phases.close()  # phase C of the set before
                forwards = phases.enter_context(schedule.forwards(batch.tokens, one))
            for done in forwards:
                missing -= 1
                found = batch.by_row(done)
                rows = sorted(found)
                yield Wave(rows, *batch.shaped(rows, found))

    with schedule.model.grouped_attention(), ExitStack() as phases:
        first = phases.enter_context(schedule.forwards(batch.tokens, planned[0])) if planned else iter(())
        with closing(iterate(phases, first)) as waves:
            yield waves
        if missing:
            raise RuntimeError(
                f"{missing} of {num_waves} waves were not iterated, and .grad lacks their rows; go through all waves "
                "and zero .grad before the next update"
            )


class _Batch:
    """Checked rows of one call on their way in (flat tokens, groups) and out (per-token outputs in their form)."""

    def __init__(
        self, model, prompts, responses, prompt_mask, response_mask, groups, temperature, return_entropy
    ) -> None:
        _check_model(model)
        if torch.is_grad_enabled() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            _warn_of_ranks()
        if not (isinstance(temperature, int | float) and temperature > 0):
            raise ValueError(f"temperature={temperature!r}: pass a number above 0 (1.0 leaves logits as they are)")
        prompts = _rows("prompt", prompts, prompt_mask)
        self.responses = _rows("response", responses, response_mask)
        if groups is None and len(prompts) != len(self.responses):
            raise ValueError(
                f"{len(prompts)} prompts and {len(self.responses)} responses: pass one prompt per response, or groups, "
                "where row i has prompts[groups[i]]"
            )
        if groups is not None:
            groups = [int(group) for group in groups]
            if len(groups) != len(self.responses) or not set(groups) <= set(range(len(prompts))):
                raise ValueError(
                    f"groups={groups} for {len(prompts)} prompts and {len(self.responses)} responses: pass one index "
                    "into prompts per response"
                )
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompts[{i}] is empty, and nothing predicts its response; begin it with a BOS token")
        prompts = prompts if groups is None else [prompts[group] for group in groups]
        rows = [torch.cat(pair) for pair in zip(prompts, self.responses, strict=True)]
        flat = torch.cat([torch.zeros(0, dtype=torch.int64), *rows])
        vocab_size = model.get_input_embeddings().weight.shape[0]
        if len(flat) and not 0 <= (worst := int(flat.min() if flat.min() < 0 else flat.max())) < vocab_size:
            raise ValueError(
                f"token {worst} is not in the model's vocabulary of {vocab_size}; padding and ignored labels such as "
                "-100 belong outside of the mask, or out of the list"
            )
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.temperature = temperature
        self.return_entropy = return_entropy
        self.mask = None if response_mask is None else response_mask.bool().to(self.device)
        positions = [torch.arange(len(row)) for row in rows]
        self.tokens = TokenBatch(
            flat.to(self.device),
            torch.cat([torch.zeros(0, dtype=torch.int64), *positions]).to(self.device),
            [0, *torch.tensor([len(row) for row in rows], dtype=torch.int64).cumsum(0).tolist()],
        )
        self.groups, _ = group_rows(prompts, [len(row) for row in self.responses], groups)
        if len(rows) > 1 and all(len(group.rows) == 1 for group in self.groups):
            warnings.warn(f"no two of {len(rows)} rows have the same prompt: nothing is shared", stacklevel=3)

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed: each group's prefix once."""
        return sum(group.num_physical_tokens for group in self.groups if group.num_suffix_tokens)

    def plan(self, schedule: str, max_tokens: int | None, wave_tokens: int | None, offload: bool = False) -> Plan:
        # make_plan gives a set of prefixes what a wave leaves of the budget, or half of it.
        budget = max_tokens or 2 * self.num_tokens + (wave_tokens or 0)
        return make_plan(self.groups, budget, schedule, wave_tokens, offload)

    def outputs(self, place: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Log-prob of the token after each place, and entropy if asked for: [n, 1 or 2]."""
        labels = self.tokens.input_ids[place + 1].unsqueeze(-1)
        return _LogProbs.apply(logits.to(self.dtype), labels, self.temperature, self.return_entropy)

    def by_row(self, done: PassOutputs) -> dict[int, torch.Tensor]:
        """[response_len, 1 or 2] of every row of a pass that has a response."""
        groups, _, outputs = done
        lens = {row: n for group in groups for row, n in zip(group.rows, group.suffix_lens, strict=True) if n}
        return dict(zip(lens, outputs.split(list(lens.values())), strict=True))

    def shaped(self, rows: Sequence[int], found: dict[int, torch.Tensor]) -> tuple[PerToken, PerToken | None]:
        """(log-probs, entropy or None) of `rows` in the form of the responses."""
        num_columns = 1 + self.return_entropy
        empty = torch.zeros((0, num_columns), dtype=self.dtype, device=self.device)
        parts = [found.get(row, empty) for row in rows]
        columns: Sequence[PerToken]
        if self.mask is None:
            columns = [[part[:, i] for part in parts] for i in range(num_columns)]
        else:
            mask, values = self.mask[rows], torch.cat([empty, *parts])
            zeros = values.new_zeros(mask.shape)
            columns = [zeros.masked_scatter(mask, values[:, i]) for i in range(num_columns)]
        return columns[0], columns[1] if self.return_entropy else None


class _LogProbs(torch.autograd.Function):
    """Logits [n, vocabulary] and labels [n, 1] -> [n, 1 or 2]: log-prob of each label, and entropy if asked for.

    A log-prob is the label's logit minus logsumexp, as in verl (verl/utils/torch_functional.py): where tokens are
    nearly certain, log_softmax on a CPU is off by 20 to 40 times as much at a vocabulary of 49k. Written out, since
    autograd's backward of that difference holds one or two copies of the logits more than that of log_softmax.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperature: float, return_entropy: bool
    ) -> torch.Tensor:
        scaled = logits if temperature == 1 else logits / temperature
        total = scaled.logsumexp(-1, keepdim=True)
        columns = [scaled.gather(-1, labels) - total]
        if return_entropy:
            every = scaled - total
            columns.append(-every.exp().mul_(every).sum(-1, keepdim=True))
        ctx.save_for_backward(scaled, labels, total, *columns[1:])
        ctx.temperature = temperature
        return torch.cat(columns, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        scaled, labels, total, *entropy = ctx.saved_tensors
        every = scaled - total
        if entropy:  # d entropy / d logit = -p (log p + entropy)
            found = every.exp()
            found *= every.add_(entropy[0]).mul_(grad[:, 1:]).add_(grad[:, :1]).neg_()
        else:
            found = every.exp_().mul_(-grad[:, :1])
        found.scatter_add_(-1, labels, grad[:, :1])
        if ctx.temperature != 1:
            found /= ctx.temperature
        return found, None, None, None


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if isinstance(model, FSDPModule | FullyShardedDataParallel):
        raise TypeError(
            f"{name} is sharded by FSDP, whose ranks must run the same passes; use verl_prefix.core.schedule.Schedule "
            "with verl_prefix.core.waves.pad_to_same_passes, or the verl plugin"
        )
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            f"model is a {name}, not a Hugging Face causal LM; pass the model itself, such as accelerator.unwrap_model("
            "model) or ddp.module (and average .grad over ranks before optimizer.step)"
        )
    reasons = support.unsupported_reasons(model.config)
    if vision.is_vision_config(model.config):
        reasons.append("a vision tower, whose pixels only the verl plugin takes")
    if reasons:
        raise ValueError(
            f"shared prefixes are not supported for this {model.config.model_type} model: {'; '.join(reasons)}. Call "
            "the model on whole rows instead"
        )
    if model.training:
        support.check_dropout(model)


@functools.cache
def _warn_of_ranks() -> None:
    """Once per process: nothing here talks to other ranks."""
    warnings.warn(
        f"torch.distributed has {torch.distributed.get_world_size()} ranks, and gradients are of this rank's rows "
        "alone; where the loss is a mean over them, average before optimizer.step():\n\n"
        "    for parameter in model.parameters():\n"
        "        if parameter.grad is not None:\n"
        "            torch.distributed.all_reduce(parameter.grad.div_(torch.distributed.get_world_size()))\n",
        stacklevel=4,
    )


def _check_sizes(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: pass a number of tokens >= 1")


def _rows(name: str, tokens: Tokens, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """int64 tokens of every row on the CPU, without padding."""
    if isinstance(tokens, torch.Tensor):
        if mask is None:
            raise ValueError(
                f"{name}s is a tensor {list(tokens.shape)} without {name}_mask; pass the mask "
                f"(torch.ones_like({name}s) if nothing is padded), or a list with one sequence per row"
            )
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"{name}_mask is a {type(mask).__name__}; pass a tensor {list(tokens.shape)}")
        if tokens.ndim != 2 or mask.shape != tokens.shape:
            raise ValueError(
                f"{name}s {list(tokens.shape)} and {name}_mask {list(mask.shape)}: pass two tensors [rows, length]"
            )
        mask, tokens = mask.bool().cpu(), tokens.cpu()
        starts = torch.nn.functional.pad(mask.int(), (1, 0)).diff(dim=-1) == 1
        if (holes := starts.sum(-1) > 1).any():
            raise ValueError(
                f"{name}_mask has a hole in row {int(holes.int().argmax())}: it says where tokens are; what only the "
                "loss leaves out, leave out of your loss"
            )
        tokens = [row[keep] for row, keep in zip(tokens, mask, strict=True)]
    elif mask is not None:
        raise TypeError(f"{name}_mask is for a padded tensor, and {name}s is a {type(tokens).__name__}; leave it out")
    rows = [torch.as_tensor(row, device="cpu") for row in tokens]
    for i, row in enumerate(rows):
        if row.ndim != 1 or (len(row) and (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool)):
            raise TypeError(f"{name}s[{i}] is {row.dtype} of shape {list(row.shape)}; pass token ids, 1-d and integer")
    return [row.long() for row in rows]
