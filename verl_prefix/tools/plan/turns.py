"""Training steps whose rows have tokens, so that the engine's own functions find what they share.

They are rows of turns, made up or as a run dumped them, and rows of one turn, whose prompts may begin alike.
"""

import math
import operator
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from random import Random
from typing import Any, NamedTuple

import torch
from verl.utils import tensordict_utils as tu

from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.group_parts import renumbered
from verl_prefix.core.groups import Group
from verl_prefix.engine.grouping import TreeRule, group_rows
from verl_prefix.engine.rows import BatchRows, is_padding, select_rows
from verl_prefix.engine.travel.row_table import RowTable, describe
from verl_prefix.engine.travel.session_pieces import describe_pieces
from verl_prefix.testing.rollouts import turn_rollouts
from verl_prefix.tools.plan.options import Rollout, Turns
from verl_prefix.tools.plan.predict import NUM_ROWS, PADDING_TOKENS, SEED, Sizes, Step
from verl_prefix.tools.plan.training_command import Prompt
from verl_prefix.trainer.mini_batches import padded, whole_prompts

LEVELS = ("off", "uid", "batch")  # of prefix.trees, by what they share
VOCAB = 1 << 30  # tokens that do not agree by chance
END = -1  # of a message, whatever the tokenizer ends it with


class Row(NamedTuple):
    """Tokens of a prompt and its response; uid None: padding."""

    uid: int | None
    session: int
    prompt: torch.Tensor
    response: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TokenStep(Step):
    """A step whose rows have tokens.

    Attributes:
        rows: the rows. batch: the same, as the engine gets them. table: what `row_table.describe` makes of them.
        over: value of prefix.trees, which says what the rows share.
        known: groups that were asked for before, by `over` and rows.
    """

    rows: Sequence[Row]
    batch: BatchRows
    table: torch.Tensor
    over: str = "uid"
    known: dict[tuple[str, tuple[int, ...]], list[Group]] = field(default_factory=dict)

    def filled(self) -> list[list[int]]:
        """As in `Step`; with `prefix.mini_batches=prompts` each is padded, as `trainer.prefix_sync` does."""
        if not self.size.by_prompts:
            return super().filled()
        real = sum(uid is not None for uid in self.keys)
        return padded(_whole_prompts(self.rows[:real], self.size.mini_batches), len(self.keys))

    def computed(
        self, ranks: list[list[int]], exchange: bool, dead: Set[int | None] = frozenset()
    ) -> list[list[Group]]:
        """As the engine's exchange and `grouping.group_rows` make them; nothing is `dead`."""
        step, every = RowTable([self.table]), RowTable([self.table[rank] for rank in ranks])
        tree_rule, homes = TreeRule(self.over, frozenset({END})), every.sources
        tree_rule.see(step.uids, step.keys)
        if exchange and len(ranks) > 1 and tree_rule.cuts_rows:
            pieces = [describe_pieces(self.batch.select(rank), self.shape, tree_rule) for rank in ranks]
            homes = every.by_session(len(ranks), pieces).ranks
        elif exchange and len(ranks) > 1:
            homes = every.by_group(len(ranks)).ranks
        members: list[list[int]] = [[] for _ in ranks]
        for row, home in zip((row for rank in ranks for row in rank), homes, strict=True):
            members[home].append(row)
        return [self._groups(rows, step.keys, tree_rule) for rows in members]

    def _groups(self, rows: Sequence[int], keys: Sequence[bytes], tree_rule: TreeRule) -> list[Group]:
        asked = self.over, tuple(rows)
        if asked not in self.known and rows:
            some = BatchRows(select_rows(self.batch.data, rows), [keys[row] for row in rows])
            groups = group_rows(some, tree_rule)
            self.known[asked] = [renumbered(group, dict(enumerate(rows))) for group in groups]
        return self.known.get(asked, [])


def _whole_prompts(rows: Sequence[Row], num_mini_batches: int) -> list[list[int]]:
    sessions = [(row.uid, row.session) for row in rows]
    return whole_prompts([row.uid for row in rows], sessions, num_mini_batches)


def token_step(size: Sizes, shape: ModelShape, rows: Sequence[Row], mini_batch_rows: int) -> TokenStep:
    """A step of these rows with padding, as verl's v1 trainer makes it: in mini-batches of `mini_batch_rows`, or with
    prefix.mini_batches=prompts in as many as these rows' prompts would fill with one turn each."""
    num_rows = len(rows) - len(rows) % -math.lcm(size.ranks, mini_batch_rows)
    num_mini_batches = num_rows // mini_batch_rows
    if size.by_prompts:
        updates = -(-len({row.uid for row in rows}) * size.rollouts // mini_batch_rows)
        mini_batches = _whole_prompts(rows, updates)
        num_mini_batches, most = len(mini_batches), max(map(len, mini_batches))
        num_rows = num_mini_batches * (most + -most % size.ranks)
    pad = torch.full((PADDING_TOKENS,), END)
    rows = [*rows, *(Row(None, session, pad[:-1], pad[-1:]) for session in range(num_rows - len(rows)))]
    size = replace(size, mini_batches=num_mini_batches)

    def jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    whole = [torch.cat([row.prompt, row.response]) for row in rows]
    fields = {
        "prompts": jagged([row.prompt for row in rows]), "responses": jagged([row.response for row in rows]),
        "input_ids": jagged(whole), "position_ids": jagged([torch.arange(len(row)) for row in whole]),
        "uid": [f"pad{0:032x}" if row.uid is None else str(row.uid) for row in rows],
        "session_id": [row.session for row in rows],
    }  # fmt: skip
    batch = BatchRows(tu.get_tensordict(fields, {"temperature": 1.0}))
    return TokenStep(
        size, shape, [row.uid for row in rows], [len(row.prompt) - 1 for row in rows],
        [len(row.response) for row in rows], rows=rows, batch=batch, table=describe(batch, shape),
    )  # fmt: skip


def made_up(
    size: Sizes, shape: ModelShape, prompts: Sequence[Prompt], ends: Collection[int], turns: Turns,
    responses: Iterator[int], mini_batch_rows: int,
) -> TokenStep:  # fmt: skip
    """A step of sessions on prompts drawn from the training data. Where that is over `NUM_ROWS` rows it has fewer
    prompts: as many as fill whole mini-batches, or one mini-batch.

    Args:
        ends: tokens that end a message, see `messages.end_tokens`.
        turns: of every session. responses: lengths of responses, where sessions have one turn.
    """
    rows: list[Row] = []
    of_prompt = size.rollouts * turns.turns
    most = max(1, NUM_ROWS // mini_batch_rows) * mini_batch_rows  # the trainer would fill up another with padding
    priced = min(size.prompts, most // of_prompt or 1)
    for uid, prompt in enumerate(Random(SEED).choices(prompts, k=priced)):
        ids = torch.tensor(prompt.ids)
        ids[torch.isin(ids, torch.tensor(sorted(ends), dtype=torch.int64))] = END
        for session in range(size.rollouts):
            say = turns.say if turns.turns > 1 else next(responses)
            seed = len(rows)
            made = turn_rollouts(ids, 1, turns.turns, turns.thinking, say, turns.tool, VOCAB, seed)
            for row, response, cuts in zip(made.prompts, made.responses, made.cuts or (), strict=True):
                if len(cuts) > 1:
                    row[cuts[1:]] = END
                rows.append(Row(uid, session, row, response))
    return token_step(size, shape, rows, mini_batch_rows)


class Dump(NamedTuple):
    """Rows of turns of verl's rollout dumps.

    Attributes:
        uids: of each uid the rows of all its sessions. shared: the number of tokens that all rows begin with.
    """

    uids: list[list[Row]]
    shared: int


def read_dump(rollouts: Sequence[Rollout], tokenizer: Any) -> Dump | None:
    """Rows of turns, of what verl's v1 trainer dumped; None where no session has several rows.

    verl's dumps have texts without special tokens. They are tokenized again, and lack a few tokens per message, among
    them those that end it. A message is taken to end where rows part, which it does there or a few tokens before.
    """
    of_uids: dict[tuple[str, str], list[tuple[int, str, str]]] = {}  # of each uid (session, prompt, response)
    for rollout in rollouts:
        uid, *numbers = rollout.uid.rsplit("_", 2)  # {uid}_{session}_{turn}
        if len(numbers) == 2 and numbers[0].isdecimal() and not is_padding(uid):
            of_uids.setdefault((rollout.file, uid), []).append((int(numbers[0]), rollout.prompt, rollout.response))
    if all(len({session for session, *_ in rows}) == len(rows) for rows in of_uids.values()):
        return None
    ends = accumulate(map(len, of_uids.values()))
    some = [rows for rows, end in zip(of_uids.values(), ends, strict=True) if end <= max(NUM_ROWS, len(rows))]
    _, prompts, responses = zip(*(row for rows in some for row in rows), strict=True)
    texts = list(map(operator.add, prompts, responses)), list(prompts)
    whole, of_prompts = (tokenizer(part, add_special_tokens=False).input_ids for part in texts)
    tokens = [torch.tensor(ids or [0], dtype=torch.int64) for ids in whole]
    partings = where_rows_part(tokens)
    for ids, lengths in zip(tokens, partings, strict=True):
        ids[[n - 1 for n in lengths if n]] = END
    cut = (ids.tensor_split([max(1, min(len(p), len(ids)))]) for p, ids in zip(of_prompts, tokens, strict=True))
    uids = [[Row(0, session, *next(cut)) for session, *_ in rows] for rows in some]
    return Dump(uids, shared=min((lengths[0] for lengths in partings if lengths), default=0))


def where_rows_part(rows: Sequence[torch.Tensor]) -> list[list[int]]:
    """Of each row the lengths, in ascending order, of the beginnings that it has in common with other rows."""
    # Big-endian, so that bytes are in the order of tokens.
    keys = [row.numpy().astype(">u4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=lambda row: keys[row])
    common = [_length_in_common(rows[a], rows[b]) for a, b in pairwise(order)]
    lengths: list[set[int]] = [set() for _ in rows]
    # What a sorted row has in common with one further off is the least on the way.
    for walk, gaps in ((order, common), (order[::-1], common[::-1])):
        least: set[int] = set()
        for row, gap in zip(walk[1:], gaps, strict=True):
            least = {gap, *(n for n in least if n < gap)}
            lengths[row] |= least
    return [sorted(one) for one in lengths]


def _length_in_common(a: torch.Tensor, b: torch.Tensor) -> int:
    n = min(len(a), len(b))
    differ = (a[:n] != b[:n]).nonzero()
    return int(differ[0]) if len(differ) else n


def of_dump(size: Sizes, shape: ModelShape, dump: Dump, mini_batch_rows: int) -> TokenStep:
    """A step of dumped prompts, each with `rollout.n` of its sessions. Where a step has more prompts than were dumped,
    some come again with other tokens, but for those that all rows begin with."""
    draw, rows = Random(SEED), list[Row]()
    order = draw.sample(range(len(dump.uids)), len(dump.uids))
    for uid in range(size.prompts):
        again, at = divmod(uid, len(order))
        of_uid = dump.uids[order[at]]
        kept = sorted({row.session for row in of_uid})[: size.rollouts]
        for row in of_uid:
            if row.session in kept:
                prompt, response = (torch.where(x == END, x, x + again * VOCAB) for x in (row.prompt, row.response))
                prompt[: dump.shared] = row.prompt[: dump.shared]
                rows.append(row._replace(uid=uid, prompt=prompt, response=response))
    return token_step(size, shape, rows, mini_batch_rows)
