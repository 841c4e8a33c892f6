"""Trees of rows against HF's own forward of every whole row: log-probs and all gradients."""

import functools
import os
import types
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import transformers
from broken_states import ancestor_left_out, gradients_of_shared_outputs_dropped, last_token_left_out
from dialogues import ROWS, accidents, rollouts, thinking_kept, thinking_stripped, tree_search
from families import build, float64_inside  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from runners import run_shared, run_stock
from short_chunks import short_chunks
from tree_models import FAMILIES, TWINS, equal_hf, error, measure, small  # noqa: F401

from verl_prefix.core import call_builder
from verl_prefix.core import packed_row as packed_rows
from verl_prefix.core.attention import AttentionSite, GroupedAttention
from verl_prefix.core.calls import AttentionParams
from verl_prefix.core.group_parts import pruned, units_of, with_rows
from verl_prefix.core.groups import Fork, Group, Strand
from verl_prefix.core.planning import make_plan
from verl_prefix.core.trees import Hashes, cuts_at, group_trees, mix, mix_rows
from verl_prefix.models.experts import multiplicity

PIECES = dict(schedule="phased", budget=50, wave_tokens=12, nests=False)
RUNS = {
    "packed": dict(schedule="packed"),
    "packed in pieces": dict(schedule="packed", budget=60),
    "phased": dict(schedule="phased", wave_tokens=12),
    "phased in pieces": dict(schedule="phased", plan=functools.partial(make_plan, **PIECES)),
    "checkpointed": dict(schedule="phased", wave_tokens=12),
    "kept attention": dict(schedule="packed", keep_attention=True),
    "offloaded": dict(schedule="phased", wave_tokens=12, offload=True),
}
CHECKPOINTED = ("checkpointed", "kept attention")


@pytest.mark.parametrize(
    ("ends", "prompt_len", "cuts"),
    [
        pytest.param((), 30, [29], id="a prompt"),
        pytest.param((5, 9), 30, [4, 8, 29], id="messages, and a last one without an end"),
        pytest.param((5, 14), 30, [4, 13], id="a generation prompt of 16 tokens"),
        pytest.param((5, 13), 30, [4, 12, 29], id="no generation prompt is longer"),
        pytest.param((30, 40), 30, [29, 39], id="the end of the prompt, and of the response"),
    ],
)
def test_a_row_is_cut_a_token_before_its_messages_end(ends, prompt_len, cuts):
    assert cuts_at(ends, prompt_len) == cuts


def test_what_has_an_image_is_no_generation_prompt():
    assert cuts_at([5, 14], 30, shown=14) == [4, 13]
    assert cuts_at([5, 14], 30, shown=28) == [4, 13, 29]


def test_growing_prompts_are_one_strand():
    """Rows of prompts 10, 20 and 30 tokens long, each with a response of three of its own."""
    prompts = [10, 20, 30]
    rows = [torch.cat([torch.arange(n), 100 + 10 * i + torch.arange(3)]) for i, n in enumerate(prompts)]
    offsets = [0, *accumulate(map(len, rows))]
    cuts = [[n - 1 for n in prompts[: i + 1]] for i in range(3)]
    (group,) = group_trees(torch.cat(rows), offsets, prompts, cuts)
    assert [(strand.start, strand.end) for strand in group.strands] == [(0, 29)] and group.num_own_strand_tokens == 29
    assert [fork.start for fork in group.forks] == [9, 19, 29]


def groups_of(*rows: list[int], cuts: list[list[int]]) -> list[Group]:
    """Of rows with prompts of two tokens."""
    tokens = torch.tensor([token for row in rows for token in row])
    return group_trees(tokens, [0, *accumulate(map(len, rows))], [2] * len(rows), cuts)


def test_a_row_that_lies_in_strands_stands_before_the_row_that_begins_with_its_tokens():
    """So that a cut between rows leaves the two together; also before a row that goes on by one token."""
    (group,) = groups_of([1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 8, 8], [1, 2, 3, 4, 5], cuts=[[4], [4], []])
    assert (group.rows, group.suffix_lens, group.num_own_strand_tokens) == ((2, 0, 1), (0, 1, 2), 4)
    assert [*units_of(group)] == [(0, 2), (2, 3)]


@pytest.mark.parametrize("cut", [1, 2])
def test_rows_share_what_stands_before_the_first_and_the_last_cut_that_there_can_be(cut):
    """Rows of 4 tokens share no more than 2: nobody reads the last token, and the one before it gives its log-prob.
    They agree in one token more than they share."""
    rows = [[1, 2, 3, 4], [1, 2, 3, 5]] if cut == 2 else [[1, 2, 3, 4], [1, 2, 5, 6]]
    (group,) = groups_of(*rows, cuts=[[cut], [cut]])
    assert (group.num_own_strand_tokens, group.suffix_lens) == (cut, (3 - cut,) * 2)
    assert len(groups_of(*rows, cuts=[[0, 3], [0, 3]])) == 2, "outside of [1, 2]"


def _marks(family: str, rows: Callable) -> tuple | pytest.MarkDecorator:
    """make test has every kind of rows by one family, and by all but TWINS those that hold all that a tree can.
    test-more has searches and odd rows by a window with sinks and by both kinds of recurrent layers as well."""
    if family == "qwen3" or rows is thinking_kept:
        return pytest.mark.more if family in TWINS else ()
    in_more = family in ("gpt-oss-window-9", "qwen3.5", "granite4-h") and rows in (tree_search, accidents)
    return pytest.mark.more if in_more else pytest.mark.full


CASES = [pytest.param(family, rows, marks=_marks(family, rows)) for family in FAMILIES for rows in ROWS]


@pytest.fixture(scope="module")
def table():
    """Rows of the table of errors; written as Markdown to the file that VERL_PREFIX_TREES names."""
    found = []
    yield found
    if out := os.environ.get("VERL_PREFIX_TREES"):
        titles = "family", "rows", *RUNS
        cells = [[f"{x:.1g}" if isinstance(x, float) else x for x in row] for row in found]
        lines = [" | ".join(row) for row in (titles, ["---"] * len(titles), *cells)]
        Path(out).write_text(
            "# Trees: rows that share more or less than a prompt against HF's own forward of every whole row\n\n"
            "Written by `make -C examples/results trees` (tests/core/test_trees.py): the larger relative error, of\n"
            "log-probs and of the whole gradient, in float64; the tolerance is 1e-9.\n\n"
            f"CPU, torch {torch.__version__}, transformers {transformers.__version__}.\n\n"
            + "".join(f"| {line} |\n" for line in lines)
        )


@pytest.mark.parametrize(("family", "rows"), CASES)
def test_trees_equal_hf(family, rows, float64_inside, table):  # noqa: F811
    model = build(family, torch.float64)
    float64_inside(model)
    batch = rollouts(rows)
    errors = {}
    with short_chunks():
        truth = measure(model, lambda: run_stock(model, batch))
        for name, options in RUNS.items():
            if name in CHECKPOINTED:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            ours = measure(model, lambda options=options: run_shared(model, batch, **options))
            model.gradient_checkpointing_disable()
            errors[name] = error(ours, truth)
    table.append([family, rows.__name__.replace("_", " "), *errors.values()])
    assert max(errors.values()) < 1e-9, errors


def labels_of_the_strand_s_row(patch):
    """A row reads the outputs of strands as if it were the row that they were taken from, one token off."""
    made = packed_rows.index_outputs

    def off(*args, **named):
        reads = made(*args, **named)
        return reads and reads._replace(level_of=reads.level_of.roll(1), packed_tokens=reads.packed_tokens.roll(1))

    patch.setattr(packed_rows, "index_outputs", off)


@pytest.mark.parametrize(
    ("broken", "rows", "name"),
    [
        (ancestor_left_out, thinking_stripped, "packed"),
        (ancestor_left_out, tree_search, "phased"),
        (last_token_left_out, thinking_kept, "packed"),
        (gradients_of_shared_outputs_dropped, tree_search, "phased"),
        (gradients_of_shared_outputs_dropped, thinking_kept, "phased"),
        (labels_of_the_strand_s_row, thinking_kept, "packed"),
    ],
)
def test_broken_trees_are_far_off(monkeypatch, broken, rows, name):
    model, batch = build("qwen3", torch.float64), rollouts(rows)
    truth = measure(model, lambda: run_stock(model, batch))
    broken(monkeypatch)
    assert error(measure(model, lambda: run_shared(model, batch, **RUNS[name])), truth) > 100 * 5e-6


@pytest.mark.parametrize("draws", [15, pytest.param(40, marks=pytest.mark.more)])
def test_any_rows_in_any_plan_equal_hf(small, draws):  # noqa: F811
    @settings(max_examples=draws)
    @given(
        rows=st.sampled_from(ROWS), seed=st.integers(0, 2**20), budget=st.integers(20, 400),
        wave_tokens=st.none() | st.integers(1, 60), schedule=st.sampled_from(["packed", "phased", "auto"]),
        share_read=st.floats(0, 1),
    )  # fmt: skip
    def run(**drawn) -> None:
        equal_hf(small, **drawn)

    run()


@settings(max_examples=200)
@given(rows=st.sampled_from(ROWS), seed=st.integers(0, 2**20), budget=st.integers(1, 300))
def test_every_row_is_whole_and_cut_at_its_own_places_alone(rows, seed, budget):
    batch = rollouts(rows, seed)
    whole = [torch.cat(pair) for pair in zip(batch.prompts, batch.responses, strict=True)]
    offsets = [0, *accumulate(map(len, whole))]
    groups = group_trees(torch.cat(whole), offsets, [*map(len, batch.prompts)], batch.cuts)
    assert sorted(row for group in groups for row in group.rows) == [*range(len(whole))]
    plan = make_plan(groups, budget, "packed")
    for one in plan.passes:
        counted = multiplicity(packed_rows.pack_groups(one.groups, offsets)).sum()
        assert counted == sum(group.num_logical_tokens for group in one.groups)
    for group in [*groups, *(group for one in plan.passes for group in one.groups)]:
        assert group.num_own_strand_tokens == sum(strand.end - strand.start for strand in group.strands)
        for row, fork, n, first in zip(group.rows, group.forks, group.suffix_lens, group.first_outputs, strict=True):
            assert first == len(batch.prompts[row]) - 1
            if not len(batch.responses[row]):
                assert group == Group.of_prompt((row,), first, (0,))
                continue
            assert fork.start + n == len(whole[row]) - 1
            path = [(group.strands[i].row, start, end) for i, start, end in group.strands_before(fork)][::-1]
            tokens = torch.cat([whole[other][start:end] for other, start, end in path] or [whole[row][:0]])
            assert torch.equal(tokens, whole[row][: fork.start])
            cuts = {0, *batch.cuts[row], len(whole[row]) - 1}
            assert {fork.start, *(start for _, start, _ in path)} <= cuts
            # A token that is read is followed by the same token in the row that computes it.
            for other, start, end in path:
                if end > first:
                    assert torch.equal(whole[other][start + 1 : end + 1], whole[row][start + 1 : end + 1])
        assert group.num_suffix_tokens or not any(group.output_lens), "outputs, and no suffix for a wave"


@settings(max_examples=200)
@given(rows=st.sampled_from(ROWS), seed=st.integers(0, 2**20), budget=st.integers(1, 300))
def test_a_tree_is_cut_where_the_fewest_tokens_are_computed(rows, seed, budget):
    batch = rollouts(rows, seed)
    whole = [torch.cat(pair) for pair in zip(batch.prompts, batch.responses, strict=True)]
    groups = group_trees(torch.cat(whole), [0, *accumulate(map(len, whole))], [*map(len, batch.prompts)], batch.cuts)
    for group in (group for group in groups if group.num_suffix_tokens):
        units = [*units_of(group)]

        @functools.cache
        def least(first, group=group, units=units):
            """Of all ways to cut the units from `first` on into ranges that fit: tokens and number of pieces."""
            found = [(0, 0)] if first == len(units) else []
            for after in range(first + 1, len(units) + 1):
                piece = pruned(with_rows(group, range(units[first][0], units[after - 1][1])))
                if after == first + 1 or piece.num_physical_tokens <= budget:
                    tokens, pieces = least(after)
                    found.append((piece.num_physical_tokens + tokens, pieces + 1))
            return min(found)

        cut = [piece for one in make_plan([group], budget, "packed").passes for piece in one.groups]
        alone = [piece for piece in cut if piece.num_physical_tokens > budget]
        assert all(len([*units_of(piece)]) == 1 for piece in alone)
        if group.num_physical_tokens > budget:
            assert (sum(piece.num_physical_tokens for piece in cut), len(cut)) == least(0)


def test_a_prompt_is_cut_behind_as_many_rows_as_fit():
    cut = [one.groups[0].rows for one in make_plan([Group.of_prompt((*range(7),), 10, (4,) * 7)], 23, "packed").passes]
    assert cut == [(0, 1, 2), (3, 4, 5), (6,)]


def test_what_is_shared():
    def computed(*rows):
        prompts, responses, cuts = zip(*rows, strict=True)
        whole = [torch.tensor([*p, *r]) for p, r in zip(prompts, responses, strict=True)]
        offsets = [0, *accumulate(map(len, whole))]
        groups = group_trees(torch.cat(whole), offsets, [*map(len, prompts)], cuts)
        return sum(group.num_physical_tokens for group in groups)

    a, b = ([1, 2, 3, 4], [5, 6, 7], [3]), ([1, 2, 3, 4], [8, 9], [3])
    assert computed(a, b) == 3 + 3 + 2
    assert computed(a, ([1, 2, 3, 9], [8, 9], [2, 3])) == 6 + 3, "what begins like another's piece"
    assert computed(([1, 2, 3, 4], [5], [2, 3]), ([1, 2, 3, 9], [8], [2, 3])) == 2 + 2 + 2
    assert computed(([1, 2, 3, 4], [5], [3]), ([1, 2, 3, 9], [8], [3])) == 4 + 4, "a cut belongs to the token behind it"
    turn = ([1, 2, 3, 4, 5, 6, 7], [8, 9], [3, 6])
    assert computed(a, turn) == 6 + 2, "a response that the next prompt goes on behind is part of its strand"
    assert computed(a, a, turn) == 6 + 2
    assert computed(a, a) == 3 + 3 + 3, "equal responses alone are not"


VOCABULARY = 1 << 18


def test_different_values_have_different_hashes():
    """As by splitmix64, whose first number is public. torch's shift repeats the sign: so x and ~x would have one."""
    values = torch.tensor([0, 2 * 0x61C8864680B583EB - 1 - 2**64])
    hashes = [value % 2**64 for value in mix(values).tolist()]
    assert hashes[0] == 0xE220A8397B1DCDAF != hashes[1]


def test_mixed_tokens_are_equal_only_where_tokens_and_values_of_their_rows_are():
    """Nothing compares tokens again as they were before."""
    mixed = mix_rows(torch.arange(VOCABULARY).repeat(2), [0, VOCABULARY, 2 * VOCABULARY], [0, 1])
    assert len(mixed.unique()) == 2 * VOCABULARY


def test_hashes_of_as_many_prefixes_as_there_are_tokens_differ():
    hashes = Hashes(torch.arange(VOCABULARY), range(VOCABULARY + 1))
    assert len(hashes.of(range(VOCABULARY), 0).unique()) == VOCABULARY


def test_hashes_that_collide_are_noticed(monkeypatch):
    monkeypatch.setattr("verl_prefix.core.trees.mix", torch.zeros_like)
    with pytest.raises(RuntimeError, match="same 64-bit hash"):
        group_trees(torch.tensor([1, 2, 3, 4, 5, 6]), [0, 3, 6], [2, 2], [[1], [1]])


def test_gradients_of_a_strand_that_many_calls_read_add_up_in_fp32(monkeypatch):
    """Each of 300 calls sends 1 to the first token. In bf16 there is no 257."""
    monkeypatch.setattr(call_builder, "_MAX_JOINED", 0)
    number = 151
    strands = tuple(Strand(0, i, i + 1, i - 1) for i in range(number))
    forks = tuple(Fork(i, i + 1) for i in range(number))
    group = Group((*range(number),), (*range(2, number + 2),), strands, forks, (*range(1, number + 1),))
    packed_row = packed_rows.pack_groups([group], [*range(0, number * number, number)])
    ones = types.SimpleNamespace(
        forward=lambda q, k, v, call: (torch.zeros_like(q), torch.zeros(q.shape[1], len(q))),
        backward=lambda dout, saved, call: [torch.ones_like(x) for x in saved[:3]],
    )
    q, k, v = (torch.zeros(packed_row.num_tokens, 1, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    site = AttentionSite(packed_row, ones, AttentionParams(1.0), (), 0)
    GroupedAttention.apply(q, k, v, None, None, site, None).sum().backward()
    read = 1 + sum(len(segment.path) > 0 for segment in packed_row.segments)
    assert read == 2 * number and (k.grad[0] == read).all() and (v.grad[0] == read).all()
