"""Rows of a call without verl: the caller's prompts and responses -> flat tokens and groups -> outputs in the caller's
form."""

import logging
import warnings
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from verl_prefix.api.checks import check_model, check_responses, prompts_of_rows, token_rows, warn_of_ranks
from verl_prefix.api.pixels import pixels_of_prompts, positions_of_row
from verl_prefix.core.forward import PassOutputs, TokenBatch
from verl_prefix.core.groups import Group, group_by_key
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import make_plan
from verl_prefix.core.trees import Hashes, cuts_at, group_trees, mix_rows
from verl_prefix.models import vision

logger = logging.getLogger(__name__)

# In the form of the responses: [rows, length] with zeros where the mask is 0, or one tensor [length] per row.
PerToken = torch.Tensor | list[torch.Tensor]


class Batch:
    """The rows of one call, checked; its arguments are those of `response_log_probs`.

    Attributes:
        responses: [length] int64 of each row. mask: [rows, length] of padded responses; None: they came as lists.
        tokens: all rows, one after the other. groups: of the rows.
        device: of the model. dtype: of log-probs: the model's, but at least fp32.
        temperature, return_entropy: of the call.
        num_behind: tokens that each response gets behind it, which lengthen its suffix; see `HiddenBatch`.
        reads_head: whether outputs are made of logits.
    """

    num_behind = 0
    reads_head = True

    def __init__(
        self, model, prompts, responses, prompt_mask, response_mask, groups, forks, pixels, temperature=1.0,
        return_entropy=False,
    ) -> None:  # fmt: skip
        check_model(model, self.reads_head)
        if torch.is_grad_enabled() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            warn_of_ranks()
        if not (isinstance(temperature, int | float) and temperature > 0):
            raise ValueError(f"temperature={temperature!r}: pass a number above 0 (1.0 leaves logits as they are)")
        prompts = token_rows("prompt", prompts, prompt_mask)
        self.responses = token_rows("response", responses, response_mask)
        of_row = prompts_of_rows(len(prompts), len(self.responses), groups)
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
        forks = self._ends(forks, keys, lens)
        cuts = [cuts_at(ends, n, shown) for ends, n, shown in zip(forks, prompt_lens, shown_lens, strict=True)]
        groups = group_trees(keys, offsets, prompt_lens, cuts)
        total = sum(group.num_logical_tokens for group in groups)
        computed = sum(group.num_physical_tokens for group in groups)
        logger.info("%d rows in %d trees: %d of %d tokens are computed", len(lens), len(groups), computed, total)
        return groups

    def _ends(self, forks: Sequence[Sequence[int]], keys: torch.Tensor, lens: Sequence[int]) -> Sequence[Sequence[int]]:
        """Where rows of `lens` tokens are cut: at `forks`, and at their own end as they are."""
        return forks

    def _positions(
        self, model: Any, prompts: Sequence[torch.Tensor], lens: Sequence[int], visual: Sequence[dict[str, Any]]
    ) -> list[torch.Tensor]:
        """Position ids of each row: [length], or [4, length] of a vision model.

        Args:
            lens: number of tokens behind each prompt.
        """
        if not vision.is_vision_config(model.config):
            return [torch.arange(len(prompt) + n) for prompt, n in zip(prompts, lens, strict=True)]
        check_responses(model.config, self.responses)
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
            torch.cat([none.expand(4, 0) if sees else none, *positions], -1).to(self.device),
            offsets,
            vision.PixelBatch(visual, flat, offsets, model.config) if sees else None,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are computed; each group's prefix counts once."""
        return sum(group.num_physical_tokens for group in self.groups if group.num_suffix_tokens)

    def plan(self, schedule: str, max_tokens: int | None, wave_tokens: int | None, offload: bool = False) -> Plan:
        """The plan by one schedule, see `planning.make_plan`. Without `max_tokens` all groups fit one pass."""
        # Of the budget a set of prefixes gets what a wave leaves, or half.
        budget = max_tokens or 2 * self.num_tokens + (wave_tokens or 0)
        return make_plan(self.groups, budget, schedule=schedule, wave_tokens=wave_tokens, offload=offload)

    def of_logits(self, index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[n, 1 or 2]: the log-prob of the token behind each of the batch's tokens `index` [n], and, if asked for, the
        entropy there; `logits` [n, vocabulary]."""
        labels = self.tokens.input_ids[index + 1].unsqueeze(-1)
        return LogProbs.apply(logits.to(self.dtype), labels, self.temperature, self.return_entropy)

    def by_row(self, done: PassOutputs) -> dict[int, torch.Tensor]:
        """Outputs [response_len, 1 or 2] of every row of a pass that has a response, by row."""
        return split_rows(done.outputs, row_lens(done.packed_row.groups))

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

    A suffix ends before the last token. So each response gets a token behind it, which is not computed.
    """

    num_behind = 1
    reads_head = False

    def _ends(self, forks: Sequence[Sequence[int]], keys: torch.Tensor, lens: Sequence[int]) -> Sequence[Sequence[int]]:
        """`forks` inside of rows, and a row's own end where another row goes on from there. Without that cut it would
        share none of its response, since the token behind it is not the other row's."""
        hashes = Hashes(keys, self.tokens.offsets)

        def places(rows: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
            """Each row's number of tokens up to an end, and their hash."""
            return [*zip(ends, hashes.of(rows, [end - 1 for end in ends]).tolist(), strict=True)]

        inner = [[end for end in ends if end < length] for ends, length in zip(forks, lens, strict=True)]
        rows = [row for row, ends in enumerate(inner) for _ in ends]
        goes_on = {*places(rows, [*chain.from_iterable(inner)])}
        own = places(range(len(lens)), lens)
        return [[*ends, place[0]] if place in goes_on else ends for ends, place in zip(inner, own, strict=True)]

    def of_logits(self, index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The hidden states, which `HiddenStateModel` has in place of logits."""
        return logits

    def in_form(self, states: dict[int, torch.Tensor]) -> PerToken:
        """Hidden states in the form of the responses, but one token longer: [rows, length + 1, hidden size], or per row
        [length + 1, hidden size]."""
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
    """Splits outputs [n, k] of rows that lie one after the other, by row.

    Args:
        lens: number of outputs of each row, in their order.
    """
    return dict(zip(lens, outputs.split(list(lens.values())), strict=True))


class LogProbs(torch.autograd.Function):
    """Logits [n, vocabulary] and labels [n, 1] -> [n, 1 or 2]: log-prob of each label, and entropy if asked for.

    A log-prob is the label's logit minus logsumexp, as in verl (verl/utils/torch_functional.py). Where tokens are
    nearly certain, log_softmax on a CPU is off by 20 to 40 times as much (vocabulary of 49k). The backward is written
    out: autograd's would hold one or two copies of the logits more.
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
