"""Shared prefixes without verl: log-probs of responses for a hand-written or TRL-like loop over a Hugging Face model.

    response_log_probs      all responses in one call: one packed graph, or a backward that runs the waves
    response_hidden_states  the same for hidden states, which value and reward heads read
    phased_update           phased: phase A on entering, waves of rows by iterating, phase C on leaving

Log-probs, entropies and gradients are those of the model's own forward on every whole row. Prompts and responses go in
as tokens; rows are cut into prefix and suffix here, and grouped. Sources: Prefix Grouper (arXiv 2506.05433) for packed,
schedule-level reuse (arXiv 2606.01143) for phased; see `core.runner`.
"""

import functools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from verl_prefix.api.checks import Tokens, check_sizes, check_waves, token_rows
from verl_prefix.api.recompute import autocast_of, outputs_by_row, recomputed_by_row
from verl_prefix.api.rows import Batch, HiddenBatch, PerToken
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.forward import PackedForward, PassOutputs
from verl_prefix.core.plan import Plan
from verl_prefix.core.runner import PlanRunner
from verl_prefix.models import messages, support
from verl_prefix.models.hidden import HiddenStateModel
from verl_prefix.models.hookup import HookedModel

_CHECKPOINTED = (
    "gradient checkpointing runs layers again in backward, after response_log_probs has returned; pass "
    "schedule='phased', use phased_update, or call model.gradient_checkpointing_disable()"
)


@dataclass(frozen=True)
class Wave:
    """Some rows of the batch.

    Attributes:
        rows: their indices, in increasing order: `advantages[wave.rows]` are theirs.
        log_probs, entropy: of these rows, as `response_log_probs` returns them; no entropy unless asked for.
    """

    rows: list[int]
    log_probs: PerToken
    entropy: PerToken | None = None


def message_ends(tokenizer: Any, prompts: Tokens, prompt_mask: torch.Tensor | None = None) -> list[list[int]]:
    """`forks` of rows of turns: where the messages of each prompt end, as the tokenizer's chat template says.

    Args:
        tokenizer: a Hugging Face tokenizer. Others as in `response_log_probs`; one prompt per row.
    """
    return messages.message_ends(token_rows("prompt", prompts, prompt_mask), messages.end_tokens(tokenizer))


def response_log_probs(
    model: torch.nn.Module,
    prompts: Tokens,
    responses: Tokens,
    *,
    prompt_mask: torch.Tensor | None = None,
    response_mask: torch.Tensor | None = None,
    groups: Sequence[int] | None = None,
    forks: Sequence[Sequence[int]] | None = None,
    pixels: Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    schedule: str = "auto",
    max_tokens: int | None = None,
    wave_tokens: int | None = None,
    logits_chunk: int = 4096,
    attention: str = "auto",
) -> PerToken | tuple[PerToken, PerToken]:
    """Log-probs of response tokens, each different prompt computed once; call backward on what you make of them.

        log_probs = response_log_probs(model, prompts, responses, schedule="phased", max_tokens=16384)
        any_loss(log_probs, advantages).backward()    # phases A, B and C, in the memory of `phased_update`

    Args:
        model: HF causal LM of a supported family (config/README, Models), on one device. Not wrapped in DDP or FSDP.
        prompts: at least one token each; rows with the same tokens share. One per row, or one per group with `groups`.
        responses: one per row, may be empty. Padded as TRL's `prompt_ids`, `completion_ids`, or lists (see `Tokens`).
        prompt_mask, response_mask: [rows, length] for padded tensors, 1 on tokens and 0 on padding, left or right. A
            token that only the loss leaves out (tool output) has a 1, too.
        groups: row i has `prompts[groups[i]]`. Rows of different groups do not share, whatever their tokens.
        forks: per row, numbers of its tokens (prompt and response) after which other rows may continue differently:
            ends of messages (`message_ends`), or of turns where a search branches. Whatever rows have in common up to
            such a place is computed once, also responses. None: rows share whole prompts only.
        pixels: of a vision model, the processor's output for `prompts`, images and videos (GLM-4.1V takes none) in
            their order. Rows share where prompt and pixels are the same, and a group's pixels go through the vision
            tower once. On text alone a trained tower gets gradients of zero, and by HF's forward none.
        temperature: logits are divided by it, for log-probs and entropy.
        return_entropy: also return the entropy of each response token's distribution, with gradients.
        schedule: "packed": one graph for all rows. "phased": no graph; the backward computes the model once more, wave
            by wave, so that memory stays bounded for whatever loss. The model must not change in between. "auto":
            packed where that is possible, that is within `max_tokens` and without gradient checkpointing.
        max_tokens: tokens computed in one pass, the prefix counted once; a single row may exceed it. Packed, under
            `torch.no_grad`, a larger group runs its prefix first and then waves. Phased, as in `phased_update`.
        wave_tokens: of waves, as in `phased_update`.
        logits_chunk: response tokens whose logits exist at once.
        attention: kernel: "auto" (the fastest that runs), or "flash_attn", "aten" (torch's), both on CUDA, "cpu", or
            "reference" (dense and slow, anywhere).

    Returns:
        log-probs in the form of the responses, fp32 (fp64 for a float64 model), on the model's device; with
        `return_entropy` a pair (log-probs, entropy). Without any response token there is no graph.

    Raises:
        TypeError: model, tokens or mask have the wrong type. ValueError: a value or a model that cannot be computed.
        The message says which, what was seen, and what to pass. ImportError: a version of transformers that is not
        known. RuntimeError: in backward, phased, where the model computes something else than in the call: weights,
        adapters, train() or eval() changed.

    Warns:
        UserWarning: no two rows share; with gradients on several ranks, once, that they are not averaged, and how to.
    """
    batch = Batch(
        model, prompts, responses=responses, prompt_mask=prompt_mask, response_mask=response_mask, groups=groups,
        forks=forks, pixels=pixels, temperature=temperature, return_entropy=return_entropy,
    )  # fmt: skip
    check_sizes(max_tokens=max_tokens, wave_tokens=wave_tokens, logits_chunk=logits_chunk)
    by_row = _by_row(
        HookedModel(model), batch, schedule=schedule, max_tokens=max_tokens, wave_tokens=wave_tokens,
        logits_chunk=logits_chunk, attention=attention,
    )  # fmt: skip
    log_probs, entropy = batch.shaped(list(range(len(batch.responses))), by_row)
    return log_probs if entropy is None else (log_probs, entropy)


def response_hidden_states(
    model: torch.nn.Module,
    prompts: Tokens,
    responses: Tokens,
    *,
    prompt_mask: torch.Tensor | None = None,
    response_mask: torch.Tensor | None = None,
    groups: Sequence[int] | None = None,
    forks: Sequence[Sequence[int]] | None = None,
    pixels: Mapping[str, Any] | None = None,
    schedule: str = "auto",
    max_tokens: int | None = None,
    wave_tokens: int | None = None,
    attention: str = "auto",
) -> PerToken:
    """Last hidden states of the last prompt token and of every response token, for value and reward heads.

        states = response_hidden_states(model, prompts, responses)              # lists: [length + 1, hidden size]
        values = [value_head(row[:-1])[:, 0] for row in states]                 # before each response token
        rewards = torch.stack([reward_head(row[-1])[0] for row in states])      # after the last one

    Args:
        model: as in `response_log_probs`; its head, if it has one (`AutoModel`, `AutoModelForTokenClassification`),
            does not run.
        Others as in `response_log_probs`.

    Returns:
        per row, in the model's dtype, [length + 1, hidden size]: state t comes after t response tokens. Padded
        responses [rows, length] give [rows, length + 1, hidden size], zero elsewhere: a row's first state stands where
        its first token does, and the others follow. An empty response has one state, which stands first.

    Raises, Warns: as `response_log_probs`.
    """
    batch = HiddenBatch(
        model, prompts, responses=responses, prompt_mask=prompt_mask, response_mask=response_mask, groups=groups,
        forks=forks, pixels=pixels,
    )  # fmt: skip
    check_sizes(max_tokens=max_tokens, wave_tokens=wave_tokens)
    by_row = _by_row(
        HiddenStateModel(model), batch, schedule=schedule, max_tokens=max_tokens, wave_tokens=wave_tokens,
        logits_chunk=1, attention=attention,
    )  # fmt: skip
    return batch.in_form(by_row)


def phased_update(
    model: torch.nn.Module,
    prompts: Tokens,
    responses: Tokens,
    *,
    prompt_mask: torch.Tensor | None = None,
    response_mask: torch.Tensor | None = None,
    groups: Sequence[int] | None = None,
    forks: Sequence[Sequence[int]] | None = None,
    pixels: Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    max_tokens: int | None = None,
    wave_tokens: int | None = None,
    logits_chunk: int = 4096,
    offload: bool = False,
    attention: str = "auto",
) -> AbstractContextManager[Iterator[Wave]]:
    """`response_log_probs` in bounded memory: one wave's graph at a time beside the prefixes'. Fills `.grad`.

        with phased_update(model, prompts, responses, max_tokens=16384) as waves:   # phase A
            for wave in waves:
                my_loss(wave.log_probs, advantages[wave.rows]).backward()
        optimizer.step()                                                            # after phase C

    Each wave's loss is its share of the batch's loss: divide by the batch's tokens, not by the wave's. Call backward
    on it before the next wave; a wave may be left without one. Rows with an empty response are in no wave. After an
    exception everything is freed, phase C does not run, and `.grad` holds a part: zero it. Inside the block use the
    model for the waves only. It works under `torch.no_grad` too, and with gradient checkpointing.

    Args:
        max_tokens: tokens alive at once, the prefixes and one wave; a single row may exceed it. Groups whose prefixes
            do not fit together come one set after the other, each with its own phases A and C. Of a tree whose strands
            do not fit together a set lies between phases A and C of another. None: no bound.
        wave_tokens: response tokens of one wave. None: what the prefixes leave of `max_tokens`.
        offload: with gradients, between phases A and C prefixes wait in pinned host memory, and do not count.
        Others as in `response_log_probs`.

    Raises:
        TypeError, ValueError: as `response_log_probs`.
        RuntimeError: on leaving, where not every wave was iterated; in backward, where it comes after phase C.
    """
    batch = Batch(
        model, prompts, responses=responses, prompt_mask=prompt_mask, response_mask=response_mask, groups=groups,
        forks=forks, pixels=pixels, temperature=temperature, return_entropy=return_entropy,
    )  # fmt: skip
    check_sizes(max_tokens=max_tokens, wave_tokens=wave_tokens, logits_chunk=logits_chunk)
    check_waves(max_tokens, wave_tokens, offload)
    forward = PackedForward(HookedModel(model), batch.of_logits, kernel=attention, logits_chunk=logits_chunk)
    return _waves(PlanRunner(forward, offload=offload), batch, batch.plan("phased", max_tokens, wave_tokens, offload))


@contextmanager
def _waves(runner: PlanRunner, batch: Batch, plan: Plan) -> Iterator[Iterator[Wave]]:
    """The context of `phased_update`."""
    planned, num_waves = plan.phased, plan.num_losses
    missing = num_waves

    def iterate(phases: ExitStack, forwards: Iterator[PassOutputs]) -> Generator[Wave, None, None]:
        nonlocal missing
        for i, one in enumerate(planned):
            if i:
                phases.close()  # phase C of the set before
                forwards = phases.enter_context(runner.forwards(batch.tokens, one))
            for done in forwards:
                missing -= 1
                by_row = batch.by_row(done)
                rows = sorted(by_row)
                yield Wave(rows, *batch.shaped(rows, by_row))

    with runner.forward.model.grouped_attention(), ExitStack() as phases:
        first = phases.enter_context(runner.forwards(batch.tokens, planned[0])) if planned else iter(())
        with closing(iterate(phases, first)) as waves:
            yield waves
            if not missing:
                next(waves, None)  # none is left, but phases C of nested passes follow the last one
        if missing:
            raise RuntimeError(
                f"{missing} of {num_waves} waves were not iterated, and .grad lacks their rows; go through all waves "
                "and zero .grad before the next update"
            )


def _by_row(
    model: HookedModel, batch: Batch, schedule: str, max_tokens: int | None, wave_tokens: int | None,
    logits_chunk: int, attention: str,
) -> dict[int, torch.Tensor]:  # fmt: skip
    """`Batch.by_row` of all rows, packed or phased."""
    check_waves(max_tokens, wave_tokens)
    if schedule == "auto":
        schedule = "phased" if _no_graph(model.model, batch, max_tokens) else "packed"
    hidden: set[int] = set()
    forward = PackedForward(
        model, batch.of_logits, kernel=attention, logits_chunk=logits_chunk,
        context=autocast_of(batch.device) if schedule == "phased" else nullcontext,
        context_type=functools.partial(_GraphContext, hidden) if torch.is_grad_enabled() else ForwardContext,
    )  # fmt: skip
    runner = PlanRunner(forward)
    if schedule == "phased":
        return recomputed_by_row(model.model, runner, batch, batch.plan("phased", max_tokens, wave_tokens))
    if schedule != "packed":
        raise ValueError(f"schedule={schedule!r}: pass 'auto', 'packed' (one graph) or 'phased' (waves)")
    if reason := _no_graph(model.model, batch, max_tokens):
        raise ValueError(reason)
    passes = outputs_by_row(runner, batch, batch.plan("auto", max_tokens, wave_tokens))
    by_row = {row: outputs for rows in passes for row, outputs in rows.items()}
    if any(outputs.requires_grad for outputs in by_row.values()) and _trains(model.model, hidden):
        raise ValueError(_CHECKPOINTED)
    return by_row


class _GraphContext(ForwardContext):
    """A pass whose graph outlives the call.

    Args:
        hidden: collects layers that ran without gradients, as under reentrant checkpointing, which no module may show.
            If such a layer is trained, backward would run it again, and then with another attention.
    """

    def __init__(self, hidden: set[int], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hidden = hidden

    def on_attention(self, layer: int, *args: Any, **options: Any) -> None:
        if not torch.is_grad_enabled():
            self.hidden.add(layer)


def _trains(model: Any, layers: set[int]) -> bool:
    """Whether one of these layers, or what lies before it, is trained."""
    if not layers:
        return False
    decoder, number = model.get_decoder(), model.config.get_text_config().num_hidden_layers
    lists = (m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == number)
    modules = [model.get_input_embeddings(), *next(lists, [decoder])[: max(layers) + 1]]
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())


def _no_graph(model: torch.nn.Module, batch: Batch, max_tokens: int | None) -> str | None:
    """Why not all rows can be one graph; None: they can."""
    if not torch.is_grad_enabled():
        return None
    if support.checkpointing(model):
        return _CHECKPOINTED
    if max_tokens is not None and batch.num_tokens > max_tokens:
        return (
            f"{batch.num_tokens} tokens are more than max_tokens={max_tokens}, and with gradients they are one "
            "graph; pass schedule='phased', use phased_update, torch.no_grad(), fewer rows, or a larger max_tokens"
        )
    return None
