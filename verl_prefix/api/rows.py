"""Rows of a call without verl: checked on their way in (flat tokens, groups), in their caller's form on the way out."""

import functools
import logging
import warnings
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from verl_prefix.api.pixels import pixels_of_prompts, positions_of_row
from verl_prefix.core.groups import Group, group_by_key
from verl_prefix.core.schedule import PassOutputs, TokenBatch
from verl_prefix.core.trees import cuts_at, group_trees, mix_rows
from verl_prefix.core.waves import Plan, make_plan
from verl_prefix.models import support, vision
from verl_prefix.versions import check_transformers_version

logger = logging.getLogger(__name__)

# A padded [rows, length] tensor, which comes with a mask, or one sequence per row: a tensor [length] or a list of ints.
Tokens = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[int]]
# In the form of the responses: [rows, length] with zeros where the mask is 0, or one tensor [length] per row.
PerToken = torch.Tensor | list[torch.Tensor]


class Batch:
    """Checked rows of one call on their way in (flat tokens, groups) and out (per-token outputs in their form)."""

    num_behind = 0  # tokens appended to each response, which lengthen its suffix; see `HiddenBatch`
    reads_head = True

    def __init__(
        self, model, prompts, responses, prompt_mask, response_mask, groups, forks, pixels, temperature=1.0,
        return_entropy=False,
    ) -> None:  # fmt: skip
        _check_model(model, self.reads_head)
        if torch.is_grad_enabled() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            _warn_of_ranks()
        if not (isinstance(temperature, int | float) and temperature > 0):
            raise ValueError(f"temperature={temperature!r}: pass a number above 0 (1.0 leaves logits as they are)")
        prompts = token_rows("prompt", prompts, prompt_mask)
        self.responses = token_rows("response", responses, response_mask)
        of_row = _prompts_of_rows(len(prompts), len(self.responses), groups)
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompts[{i}] is empty, and nothing predicts its response; begin it with a BOS token")
        visual = pixels_of_prompts(model.config, prompts, pixels)
        prompts, visual = [prompts[i] for i in of_row], [visual[i] for i in of_row]
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.temperature = temperature
        self.return_entropy = return_entropy
        self.mask = None if response_mask is None else response_mask.bool().to(self.device)
        lens = [len(row) + self.num_behind for row in self.responses]
        positions = self._positions(model, prompts, lens=lens, visual=visual)
        self.tokens = self._flat(model, prompts, positions=positions, visual=visual)
        uids = None if groups is None else of_row
        if forks is None:
            # Positions count too: those of a clip depend on its seconds per grid, which are not among its pixels.
            read = [x[..., : len(prompt)].cpu() for x, prompt in zip(positions, prompts, strict=True)]
            parts = [[x.numpy().tobytes() for x in each] for each in (prompts, read)]
            keys = zip(*parts, vision.share_pixels(visual), uids or [0] * len(lens), strict=True)
            self.groups = group_by_key(keys, [*map(len, prompts)], lens)
        else:
            vision.share_pixels(visual)
            self.groups = self._trees(model, prompts, uids=uids, forks=forks, visual=visual)
        if len(prompts) > 1 and all(len(group.rows) == 1 for group in self.groups):
            warnings.warn(f"no two of {len(prompts)} rows have the same prompt: nothing is shared", stacklevel=3)

    def _trees(
        self, model: Any, prompts: Sequence[torch.Tensor], uids: Sequence[int] | None, forks: Sequence[Sequence[int]],
        visual: Sequence[dict[str, Any]],
    ) -> list[Group]:  # fmt: skip
        """Groups of rows that are cut at `forks`.

        Raises:
            ValueError: `forks` do not fit the rows.
        """
        offsets, keys = self.tokens.offsets, self.tokens.input_ids.cpu()
        lens = [end - start - self.num_behind for start, end in pairwise(offsets)]
        if len(forks) != len(lens):
            raise ValueError(
                f"forks of {len(forks)} rows, and there are {len(lens)} responses: pass a list per response"
            )
        for row, (ends, length) in enumerate(zip(forks, lens, strict=True)):
            if bad := [end for end in ends if not 1 <= end <= length]:
                raise ValueError(
                    f"forks[{row}] has {bad[0]}, and the row has {length} tokens of prompt and response: pass numbers "
                    "of tokens after which rows may part, from 1 on"
                )
        if vision.is_vision_config(model.config):
            keys = vision.tree_tokens(keys, self.tokens.position_ids.cpu(), offsets, visual, model.config)
        if uids is not None:
            keys = mix_rows(keys, offsets, uids)
        prompt_lens, shown_lens = [*map(len, prompts)], vision.shown_lens(prompts, model.config)
        cuts = [cuts_at(ends, n, shown) for ends, n, shown in zip(forks, prompt_lens, shown_lens, strict=True)]
        groups = group_trees(keys, offsets, prompt_lens, cuts)
        total = sum(group.num_logical_tokens for group in groups)
        computed = sum(group.num_physical_tokens for group in groups)
        logger.info("%d rows in %d trees: %d of %d tokens are computed", len(lens), len(groups), computed, total)
        return groups

    def _positions(
        self, model: Any, prompts: Sequence[torch.Tensor], lens: Sequence[int], visual: Sequence[dict[str, Any]]
    ) -> list[torch.Tensor]:
        """Position ids of each row, [length], or [4, length] of a vision model. `lens`: number of tokens after each
        prompt."""
        if not vision.is_vision_config(model.config):
            return [torch.arange(len(prompt) + n) for prompt, n in zip(prompts, lens, strict=True)]
        _check_responses(model.config, self.responses)
        return [positions_of_row(model, *row) for row in zip(prompts, visual, lens, strict=True)]

    def _flat(
        self, model: Any, prompts: Sequence[torch.Tensor], positions: Sequence[torch.Tensor],
        visual: Sequence[dict[str, Any]],
    ) -> TokenBatch:  # fmt: skip
        """All rows, one after the other.

        Raises:
            ValueError: a token is not in the model's vocabulary.
        """
        none, behind = torch.zeros(0, dtype=torch.int64), torch.zeros(self.num_behind, dtype=torch.int64)
        rows = [torch.cat([*pair, behind]) for pair in zip(prompts, self.responses, strict=True)]
        flat = torch.cat([none, *rows])
        vocab_size = model.get_input_embeddings().weight.shape[0]
        if len(flat) and not 0 <= (worst := int(flat.min() if flat.min() < 0 else flat.max())) < vocab_size:
            raise ValueError(
                f"token {worst} is not in the model's vocabulary of {vocab_size}; padding and ignored labels such as "
                "-100 belong outside of the mask, or out of the list"
            )
        offsets = [0, *accumulate(map(len, rows))]
        sees = vision.is_vision_config(model.config)
        return TokenBatch(
            flat.to(self.device),
            torch.cat([*positions] if sees else [none, *positions], -1).to(self.device),
            offsets,
            vision.PixelBatch(visual, flat, offsets, model.config) if sees else None,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed: each group's prefix once."""
        return sum(group.num_physical_tokens for group in self.groups if group.num_suffix_tokens)

    def plan(self, schedule: str, max_tokens: int | None, wave_tokens: int | None, offload: bool = False) -> Plan:
        # make_plan gives a set of prefixes what a wave leaves of the budget, or half of it.
        budget = max_tokens or 2 * self.num_tokens + (wave_tokens or 0)
        return make_plan(self.groups, budget, schedule=schedule, wave_tokens=wave_tokens, offload=offload)

    def outputs(self, index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Log-prob of the token after each of the batch's tokens `index` [n], and entropy if asked for: [n, 1 or 2]."""
        labels = self.tokens.input_ids[index + 1].unsqueeze(-1)
        return LogProbs.apply(logits.to(self.dtype), labels, self.temperature, self.return_entropy)

    def by_row(self, done: PassOutputs) -> dict[int, torch.Tensor]:
        """[response_len, 1 or 2] of every row of a pass that has a response."""
        return split_rows(done.outputs, row_lens(done.groups))

    def shaped(self, rows: Sequence[int], outputs: dict[int, torch.Tensor]) -> tuple[PerToken, PerToken | None]:
        """(log-probs, entropy or None) of `rows` in the form of the responses."""
        num_columns = 1 + self.return_entropy
        empty = torch.zeros((0, num_columns), dtype=self.dtype, device=self.device)
        parts = [outputs.get(row, empty) for row in rows]
        columns: Sequence[PerToken]
        if self.mask is None:
            columns = [[part[:, i] for part in parts] for i in range(num_columns)]
        else:
            mask, values = self.mask[rows], torch.cat([empty, *parts])
            zeros = values.new_zeros(mask.shape)
            columns = [zeros.masked_scatter(mask, values[:, i]) for i in range(num_columns)]
        return columns[0], columns[1] if self.return_entropy else None


class HiddenBatch(Batch):
    """Rows whose outputs are hidden states: those of the last prompt token and of every response token.

    A token that is never computed follows each response, so that the response's last token is part of the suffix.
    """

    num_behind = 1
    reads_head = False

    def outputs(self, index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def in_form(self, states: dict[int, torch.Tensor]) -> PerToken:
        """As the responses, one token longer: [rows, length + 1, hidden size], or [length + 1, hidden size] per row."""
        parts = [states[row] for row in range(len(self.responses))]
        if self.mask is None or not parts:
            return parts
        before, behind = (torch.nn.functional.pad(self.mask, sides) for sides in ((0, 1), (1, 0)))
        mask = before | behind
        mask[:, 0] |= ~mask.any(-1)  # an empty response: the last prompt token alone
        return parts[0].new_zeros(*mask.shape, parts[0].shape[-1]).index_put((mask,), torch.cat(parts))


def row_lens(groups: Sequence[Group]) -> dict[int, int]:
    """Number of outputs of each row that has any."""
    return {row: n for group in groups for row, n in zip(group.rows, group.output_lens, strict=True) if n}


def split_rows(outputs: torch.Tensor, lens: dict[int, int]) -> dict[int, torch.Tensor]:
    """Outputs [n, k] of rows of these lengths, one after the other, by row."""
    return dict(zip(lens, outputs.split(list(lens.values())), strict=True))


class LogProbs(torch.autograd.Function):
    """Logits [n, vocabulary] and labels [n, 1] -> [n, 1 or 2]: log-prob of each label, and entropy if asked for.

    A log-prob is the label's logit minus logsumexp, as in verl (verl/utils/torch_functional.py): where tokens are
    nearly certain, log_softmax on a CPU is off by 20 to 40 times as much at a vocabulary of 49k. The backward is
    written out, since autograd's would hold one or two more copies of the logits than that of log_softmax does.
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
            dlogits = every.exp()
            dlogits *= every.add_(entropy[0]).mul_(grad[:, 1:]).add_(grad[:, :1]).neg_()
        else:
            dlogits = every.exp_().mul_(-grad[:, :1])
        dlogits.scatter_add_(-1, labels, grad[:, :1])
        if ctx.temperature != 1:
            dlogits /= ctx.temperature
        return dlogits, None, None, None


def _prompts_of_rows(num_prompts: int, num_rows: int, groups: Any) -> list[int]:
    """The index of each row's prompt, by `groups`, or one prompt per row.

    Raises:
        ValueError: they do not fit together.
    """
    if groups is None:
        if num_prompts != num_rows:
            raise ValueError(
                f"{num_prompts} prompts and {num_rows} responses: pass one prompt per response, or groups, "
                "where row i has prompts[groups[i]]"
            )
        return list(range(num_rows))
    groups = [int(group) for group in groups]
    if len(groups) != num_rows or not set(groups) <= set(range(num_prompts)):
        raise ValueError(
            f"groups={groups} for {num_prompts} prompts and {num_rows} responses: pass one index "
            "into prompts per response"
        )
    return groups


def _check_responses(config: Any, responses: Sequence[torch.Tensor]) -> None:
    for i, response in enumerate(responses):
        for kind in ("image", "video"):
            if (response == getattr(config, f"{kind}_token_id")).any():
                raise ValueError(
                    f"responses[{i}] has {kind} tokens, and pixels belong to prompts; where tools answer with "
                    "pictures, call the model on whole rows"
                )


def _check_model(model: Any, reads_head: bool) -> None:
    check_transformers_version()
    name = type(model).__name__
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            f"model is a {name}, not a Hugging Face causal LM; pass the model itself, such as accelerator.unwrap_model("
            "model) or ddp.module (and average .grad over ranks before optimizer.step)"
        )
    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        raise TypeError(
            f"{name} is sharded by FSDP, whose ranks must run the same passes; use verl_prefix.core.schedule.Schedule "
            "with verl_prefix.core.waves.pad_to_same_passes, or the verl plugin"
        )
    if reads_head and model.get_output_embeddings() is None:
        raise TypeError(
            f"model is a {name}, which has no lm_head to make log-probs; pass the causal LM, or call "
            "response_hidden_states and apply your own head to its result"
        )
    if reasons := support.unsupported_reasons(model.config, model.training):
        raise ValueError(
            f"shared prefixes are not supported for this {model.config.model_type} model: {'; '.join(reasons)}. Call "
            "the model on whole rows instead"
        )
    if learned := support.prompt_learning(model):
        raise ValueError(
            f"PEFT prompt learning is not supported ({', '.join(learned)}): its learned prompt is none of the tokens "
            "here, and would be left out; train LoRA, or call the model on whole rows"
        )
    if model.training:
        runs: Any = model
        if not reads_head:
            runs = seeing.model if (seeing := vision.vision_model(model)) else model.get_decoder()
        support.check_dropout(runs, "call model.eval(), or call the model on whole rows")


@functools.cache
def _warn_of_ranks() -> None:
    """Warns, once per process, that nothing here averages gradients over ranks."""
    warnings.warn(
        f"torch.distributed has {torch.distributed.get_world_size()} ranks, and gradients come from this rank's "
        "rows alone; where the loss is a mean over all rows, average them before optimizer.step():\n\n"
        "    for parameter in model.parameters():\n"
        "        if parameter.grad is not None:\n"
        "            torch.distributed.all_reduce(parameter.grad.div_(torch.distributed.get_world_size()))\n",
        stacklevel=4,
    )


def check_sizes(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: pass a number of tokens >= 1")


def token_rows(name: str, tokens: Tokens, mask: torch.Tensor | None) -> list[torch.Tensor]:
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
                f"{name}_mask has a hole in row {int(holes.int().argmax())}: it says where tokens are; what only "
                "the loss skips, leave out of your loss"
            )
        tokens = [row[keep] for row, keep in zip(tokens, mask, strict=True)]
    elif mask is not None:
        raise TypeError(f"{name}_mask is for a padded tensor, and {name}s is a {type(tokens).__name__}; leave it out")
    rows = [torch.as_tensor(row, device="cpu") for row in tokens]
    for i, row in enumerate(rows):
        if row.ndim != 1 or (len(row) and (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool)):
            raise TypeError(f"{name}s[{i}] is {row.dtype} of shape {list(row.shape)}; pass token ids, 1-d and integer")
    return [row.long() for row in rows]
