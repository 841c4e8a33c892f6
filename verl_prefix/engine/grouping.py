"""Groups of rows: the rows of one prompt, or a tree where rows share more. The engine groups rows here alone."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from verl_prefix.core.groups import Group, group_by_key
from verl_prefix.core.runs import ranges
from verl_prefix.core.trees import cuts_at, group_trees, mix, mix_rows
from verl_prefix.engine.rows import BatchRows
from verl_prefix.models.messages import message_ends
from verl_prefix.models.vision import is_vision_config, shown_lens, tree_tokens

# Tokens of a block of a prefix cache: vLLM's is 16, and up to 256 by kernel and device; SGLang's pages have 1 to 64.
CACHE_BLOCKS = (16, 32, 64, 128, 256)


@dataclass
class TreeRule:
    """By what rule the rows of an engine's batches share more than whole prompts.

    Attributes:
        scope: `PrefixConfig.trees`: "off", or among which rows a tree is looked for, those of a "uid" or a "batch".
        ends: tokens that end a message (`messages.end_tokens`).
        config: the model's config, which names visual tokens.
        cuts_rows: whether rows are cut at the ends of messages. Under "batch" they always are. Under "uid" they are
            from the first batch on that has turns: log-probs and updates have different rows, and must be cut alike.
    """

    scope: str = "off"
    ends: frozenset[int] = frozenset()
    config: Any = None
    cuts_rows: bool = field(init=False)

    def __post_init__(self) -> None:
        self.cuts_rows = self.scope == "batch"

    def see(self, uids: Sequence[Hashable], keys: Sequence[Hashable]) -> None:
        """Sees a batch before its rows are grouped. Its rows are turns if a uid has several prompts.

        Args:
            uids: of each row.
            keys: of each row: equal where prompts are.
        """
        if self.scope == "uid" and len({*zip(uids, keys, strict=True)}) > len({*uids}):
            self.cuts_rows = True


def group_rows(rows: BatchRows, tree_rule: TreeRule) -> list[Group]:
    """Groups all rows that this rank computes: by their keys, or as trees. Trees are made if `tree_rule` cuts rows, and
    if rows say which experts their tokens go to: even the rows of one prompt may differ in the experts of its last
    tokens.

    Raises:
        ValueError: a row's prompt is empty, or not that of its group: the row did not arrive as it left.
    """
    groups = group_by_key(rows.keys, rows.prompt_lens, rows.response_lens)
    prompts = rows.prompts
    for group in groups:
        if not all(torch.equal(prompts[number], prompts[group.rows[0]]) for number in group.rows):
            raise ValueError(f"rows {[*group.rows]} arrived as one group, and their prompts differ")
    cuts = row_cuts(rows, tree_rule) if tree_rule.cuts_rows else [[n - 1] for n in rows.prompt_lens]
    if rows.expert_routes is not None:
        cuts = [_with_block_ends(cuts_of_row) for cuts_of_row in cuts]
    elif not tree_rule.cuts_rows:
        return groups
    return group_trees(_tree_tokens(rows, tree_rule, cuts), rows.offsets, rows.prompt_lens, cuts)


def row_cuts(rows: BatchRows, tree_rule: TreeRule) -> list[list[int]]:
    """Returns where each row is cut, by the ends of its messages: see `core.trees.cuts_at`."""
    prompts = rows.prompts
    ends, shown = message_ends(prompts, tree_rule.ends), shown_lens(prompts, tree_rule.config)
    return [cuts_at(*args) for args in zip(ends, rows.prompt_lens, shown, strict=True)]


def _tree_tokens(rows: BatchRows, tree_rule: TreeRule, cuts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns numbers that stand for tokens, [N] int64: rows share a token only if its number is equal. The token is
    mixed with

    - its position, its pixels and its row's temperature;
    - the uid if `tree_rule.scope` is uid, or the whole prompt if it is off;
    - the experts of the token before, up to a row's last cut. Core shares n tokens if n + 1 numbers are equal. Number i
      has the experts of token i - 1. So rows share tokens 0 and 1 if numbers 0, 1 and 2 are equal, and with them the
      experts of tokens 0 and 1;
    - in a response under top-k distillation, its row. Its outputs are made with the teacher's values for this row, so
      that another row with the same tokens in its prompt must not share them.
    """
    ids, positions = (rows.data[name].values().cpu() for name in ("input_ids", "position_ids"))
    if is_vision_config(tree_rule.config):
        tokens = tree_tokens(ids, positions, rows.offsets, rows.pixels, tree_rule.config)
    else:
        tokens = mix(ids) ^ positions
    temperature = torch.as_tensor(rows.data["temperature"], dtype=torch.float32).cpu().expand(len(rows)).contiguous()
    tokens = mix_rows(tokens, rows.offsets, temperature.view(torch.int32).tolist())
    if rows.expert_routes is not None:
        lens = [end - start for start, end in pairwise(rows.offsets)]
        experts = [
            _experts_before(routes, max(cuts_of_row, default=0) + 1)
            for routes, cuts_of_row in zip(rows.expert_routes.split(lens), cuts, strict=True)
        ]
        tokens = tokens ^ torch.cat(experts)
    if tree_rule.scope != "batch":
        names: Sequence[Hashable] = rows.uids if tree_rule.scope == "uid" else rows.keys
        index_of_name = {name: index for index, name in enumerate(dict.fromkeys(names))}
        tokens = mix_rows(tokens, rows.offsets, [index_of_name[name] for name in names])
    if rows.flag("distillation_use_topk"):
        spans = zip(rows.offsets[:-1], rows.prompt_lens, rows.response_lens, strict=True)
        responses = ranges([(start + prompt_len, length) for start, prompt_len, length in spans])
        tokens[responses] = mix_rows(tokens, rows.offsets, range(len(rows)))[responses]
    return tokens


def _experts_before(routes: torch.Tensor, end: int) -> torch.Tensor:
    """Returns, for each token of a row, a number that names the experts of the token before: [n] int64. It is 0 for the
    first token, and from token `end` on.

    Args:
        routes: the row's, [n, layers, k].
    """
    names = _hash_rows(routes[:end].flatten(1))[:-1]
    return torch.nn.functional.pad(names, (1, len(routes) - len(names) - 1))


def _with_block_ends(cuts: Sequence[int]) -> list[int]:
    """Returns the cuts, and before each of them the last end of a block of the rollout's prefix cache, for each usual
    size of a block.

    A row whose prompt the rollout found in its cache, block by block, has the experts that the cached tokens went to.
    The tokens after the last whole block it computed itself, and they may have gone to other experts. A size that is
    not the rollout's adds a cut for nothing. That costs nothing, since core joins strands without a fork between.
    """
    return sorted({*cuts, *(cut // size * size for cut in cuts for size in CACHE_BLOCKS)})


def _hash_rows(rows: torch.Tensor) -> torch.Tensor:
    """Hashes each row of an int16 matrix [n, m]: [n] int64."""
    wide = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4)).view(torch.int64)
    return mix(mix(wide ^ mix(torch.arange(wide.shape[1]))).sum(1))
