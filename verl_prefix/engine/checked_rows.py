"""Which rows the self-check compares: a few rows of one group of each rank."""

import logging
from collections.abc import Sequence

from verl_prefix.core.groups import Group
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.rows import BatchRows
from verl_prefix.models.vision import is_vision_config, num_tower_runs, shown_lens
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)

_ENOUGH_TOKENS, _MOST_ROWS = 32, 8  # of a group that is checked


def candidates(backend: Backend, rows: BatchRows, groups: Sequence[Group], budget: int) -> Sequence[Group]:
    """Returns groups to choose from, if every rank has one. If a rank has none, it says so once and returns []. Every
    rank calls it.

    Args:
        rows: the rows that this rank computes.
        groups: of these rows.
        budget: tokens of one pass, of all ranks that share it.
    """
    groups, limits = [group for group in groups if group.num_suffix_tokens] or groups, ""
    if backend.stock_facts.wrong_when_sharded:
        most = budget // backend.ranks.slices
        fits = [sum(pair) <= most for pair in zip(rows.prompt_lens, rows.response_lens, strict=True)]
        groups, limits = _with_chosen(groups, fits), f", with rows of at most {most} tokens (a rank's budget)"
    choices = [groups]
    if is_vision_config(backend.config):
        choices = _with_equal_tower_runs(backend, rows, groups)
        limits += ", without tokens of images or videos in responses"
        if len(choices) > 1:
            limits += " and with the same number of kinds of pixels (images, videos) on every rank"
    lacking = backend.ranks.max_over_ranks([not choice for choice in choices])
    for choice, lacks in zip(choices, lacking, strict=True):
        if not lacks:
            return choice
    warn_once(
        logger,
        "prefix.verify waits for a batch in which every rank has a prompt%s; set "
        "actor_rollout_ref.actor.prefix.verify=off where none will come",
        limits,
    )
    return []


def _with_equal_tower_runs(backend: Backend, rows: BatchRows, groups: Sequence[Group]) -> list[Sequence[Group]]:
    """Returns sets of groups. In each set all stock passes run a vision tower equally often, as ranks have to: it runs
    once for images and once for videos. Rows whose response has a visual token are in no set: a model may sample one,
    and the stock path would end, since there are no pixels for it."""
    shown = zip(shown_lens(rows.data["input_ids"].unbind(), backend.config), rows.prompt_lens, strict=True)
    groups, pixels = _with_chosen(groups, [last <= prompt_len for last, prompt_len in shown]), rows.pixels
    if backend.stock_facts.equal_tower_runs:
        return [groups]
    # Rows of a tree may show other pixels each.
    runs = [{num_tower_runs(pixels[row]) for row in group.rows} for group in groups]
    return [[group for group, counts in zip(groups, runs, strict=True) if counts == {n}] for n in (1, 2)]


def _with_chosen(groups: Sequence[Group], chosen: Sequence[bool]) -> list[Group]:
    """Cuts each group to those of its units all of whose rows are `chosen`, and drops groups that have none. chosen: of
    each row."""
    found = []
    for group in groups:
        units = [range(*unit) for unit in group.units()]
        members = [i for unit in units if all(chosen[group.rows[j]] for j in unit) for i in unit]
        found += [group.with_rows(members)] if members else []
    return found


def _num_shared_tokens(group: Group, first: tuple[int, int], second: tuple[int, int]) -> int:
    """Counts the strand tokens that the last rows of two units share."""
    forks = (group.forks[unit[1] - 1] for unit in (first, second))
    one, another = ({strand: end for strand, _, end in group.strands_before(fork)} for fork in forks)
    return max((min(end, another[strand]) for strand, end in one.items() if strand in another), default=0)


def cheapest(groups: Sequence[Group], num_rows: int) -> Group:
    """Picks the cheapest group whose longest rows have enough response tokens to compare, and cuts it to those rows.
    They are two, or more where a rank has so many rows that three passes over them are an eighth of its update. Of a
    tree it keeps at least three, so that passes nest: the longest row, and those that share the most and the least with
    it.

    Args:
        groups: as `candidates` returns them.
        num_rows: all that this rank computes.
    """

    def longest(group: Group) -> Group:
        units = sorted(group.units(), key=lambda unit: -sum(group.suffix_lens[slice(*unit)]))
        least_rows = 3 if len(group.strands) > 1 and len(units) > 2 else 2
        if least_rows == 3:
            by_shared = sorted(units[1:], key=lambda unit: _num_shared_tokens(group, units[0], unit))
            farthest, *between, nearest = by_shared
            units = [units[0], nearest, farthest, *(unit for unit in units if unit in between)]
        most_rows = max(least_rows, min(_MOST_ROWS, num_rows // 24))
        tokens = [sum(sum(group.suffix_lens[slice(*unit)]) for unit in units[:n]) for n in range(least_rows, most_rows)]
        count = next((n for n, sum_ in enumerate(tokens, start=least_rows) if sum_ >= _ENOUGH_TOKENS), most_rows)
        return group.with_rows(sorted(i for unit in units[:count] for i in range(*unit))).pruned()

    sampled = [longest(group) for group in groups]
    shared = [group for group in sampled if group.is_shared] or sampled
    return min(shared, key=lambda group: (-min(group.num_suffix_tokens, _ENOUGH_TOKENS), group.num_physical_tokens))
