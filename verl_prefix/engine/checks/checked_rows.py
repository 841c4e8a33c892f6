"""Which rows the self-check compares: a few rows of one group of each rank."""

import logging
from collections.abc import Sequence

from verl_prefix.core.group_parts import pruned, units_of, with_rows
from verl_prefix.core.groups import Group
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.rows import BatchRows
from verl_prefix.models.vision import is_vision_config, num_tower_runs, shown_lens
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)

_ENOUGH_TOKENS = 32  # of responses
_MOST_UNITS = 8
_ROWS_PER_CHECKED_UNIT = 24  # in an update of so many rows three passes over one row are an eighth

Unit = tuple[int, int]  # the start and end of rows of a group that are never cut apart (`core.group_parts.units_of`)


def candidates(backend: Backend, rows: BatchRows, groups: Sequence[Group], budget: int) -> Sequence[Group]:
    """Returns the groups of this rank that can be checked. If any rank has none, it says so once and returns []. Every
    rank calls it. Three things limit the choice:

    - A group without response tokens is taken only if all are such.
    - Where verl's sequence parallelism is wrong, each rank computes whole rows, which have to fit its part of the
      budget.
    - Of a vision model every rank's rows have to run the tower equally often (`_with_equal_tower_runs`).

    Args:
        rows: the rows that this rank computes.
        groups: of these rows.
        budget: tokens of one pass, of all ranks that share it.
    """
    groups = [group for group in groups if group.num_suffix_tokens] or groups
    wanted = ["a prompt"]  # of every rank, in words
    if backend.stock_facts.wrong_when_sharded:
        most = budget // backend.ranks.sequence_size
        fits = [sum(pair) <= most for pair in zip(rows.prompt_lens, rows.response_lens, strict=True)]
        groups = _with_chosen(groups, fits)
        wanted.append(f"with rows of at most {most} tokens (a rank's budget)")
    choices = [groups]
    if is_vision_config(backend.config):
        choices = _with_equal_tower_runs(backend, rows, groups)
        wanted.append("without tokens of images or videos in responses")
        if len(choices) > 1:
            wanted.append("with the same number of kinds of pixels (images, videos) on every rank")
    lacking = backend.ranks.max_over_ranks([not choice for choice in choices])
    for choice, lacks in zip(choices, lacking, strict=True):
        if not lacks:
            return choice
    warn_once(
        logger,
        "prefix.verify waits for a batch in which every rank has %s; set "
        "actor_rollout_ref.actor.prefix.verify=off where none will come",
        ", ".join(wanted),
    )
    return []


def _with_equal_tower_runs(backend: Backend, rows: BatchRows, groups: Sequence[Group]) -> list[Sequence[Group]]:
    """Returns sets of groups to choose from, such that all stock passes of a set run a vision tower equally often. The
    tower runs once for images and once for videos, and holds collectives.

    Rows whose response has a visual token are in no set. A model may sample one, and the stock path would end, since
    there are no pixels for it.
    """
    lens_to_last_pixel = shown_lens(rows.data["input_ids"].unbind(), backend.config)
    shows_in_prompt = [end <= prompt_len for end, prompt_len in zip(lens_to_last_pixel, rows.prompt_lens, strict=True)]
    groups = _with_chosen(groups, shows_in_prompt)
    if backend.stock_facts.equal_tower_runs:
        return [groups]
    pixels = rows.pixels  # of a tree's rows they may differ
    runs_of_group = [{num_tower_runs(pixels[number]) for number in group.rows} for group in groups]
    return [[group for group, runs in zip(groups, runs_of_group, strict=True) if runs == {n}] for n in (1, 2)]


def _with_chosen(groups: Sequence[Group], chosen: Sequence[bool]) -> list[Group]:
    """Cuts each group to its units whose rows are all `chosen` (of each row of the batch), and drops groups that have
    none."""
    kept = []
    for group in groups:
        units = [range(*unit) for unit in units_of(group)]
        members = [i for unit in units if all(chosen[group.rows[j]] for j in unit) for i in unit]
        kept += [with_rows(group, members)] if members else []
    return kept


def cheapest(groups: Sequence[Group], num_rows: int) -> Group:
    """Cuts each group to a few rows, and picks the cheapest of them that shares a prefix and has enough response tokens
    to compare. If none has enough, it picks one that has most.

    Args:
        groups: as `candidates` returns them.
        num_rows: all that this rank computes.
    """
    with_few_rows = [_with_few_rows(group, num_rows) for group in groups]
    shared = [group for group in with_few_rows if group.is_shared] or with_few_rows
    return min(shared, key=lambda group: (-min(group.num_suffix_tokens, _ENOUGH_TOKENS), group.num_physical_tokens))


def _with_few_rows(group: Group, num_rows: int) -> Group:
    """Cuts a group to two units, or to three of a tree, whose passes then nest. If these have too few response tokens
    to compare, more units follow, as long as a check of so many rows is cheap beside an update of `num_rows`."""
    units = sorted(units_of(group), key=lambda unit: -_num_tokens(group, unit))
    num_units = 2
    if len(group.strands) > 1 and len(units) > 2:
        units = _in_order_of_interest(group, units)
        num_units = 3
    most_units = min(_MOST_UNITS, num_rows // _ROWS_PER_CHECKED_UNIT)
    while num_units < most_units and sum(_num_tokens(group, unit) for unit in units[:num_units]) < _ENOUGH_TOKENS:
        num_units += 1
    return pruned(with_rows(group, sorted(i for unit in units[:num_units] for i in range(*unit))))


def _in_order_of_interest(group: Group, units: Sequence[Unit]) -> list[Unit]:
    """Orders the units of a tree: the longest, the one that shares most with it, the one that shares least, all others.
    The first three then nest.

    Args:
        units: three or more, by their tokens.
    """
    longest, *others = units
    by_shared_tokens = sorted(others, key=lambda unit: _num_shared_tokens(group, longest, unit))
    most, least = by_shared_tokens[-1], by_shared_tokens[0]
    return [longest, most, least, *(unit for unit in others if unit not in (most, least))]


def _num_tokens(group: Group, unit: Unit) -> int:
    """Counts a unit's suffix tokens."""
    return sum(group.suffix_lens[slice(*unit)])


def _num_shared_tokens(group: Group, first: Unit, second: Unit) -> int:
    """Counts the strand tokens that the last rows of two units share."""
    first_ends, second_ends = (
        {strand: end for strand, _, end in group.strands_before(group.forks[unit[1] - 1])} for unit in (first, second)
    )
    return max((min(end, second_ends[i]) for i, end in first_ends.items() if i in second_ends), default=0)
