"""Deep trees under a budget that nests passes, through PrefixFSDPEngine and verl's stock fsdp2 engine: fp32, 1 to 4
ranks."""

from collections.abc import Callable

import pytest
from engines import TOLERANCE
from nesting import BROKEN
from random_batches import Again, Case, Session, errors_of, write_models

# Sessions of one prompt, and branches of these; two such trees, so that two ranks have one each, of unequal depths.
ROWS = (
    Session("a", 20, ((4, 5, 8), (4, 6, 8), (3, 5, 9), (2, 4, 5)), True), Again(1, 1), Again(2, 2), Again(3, 0),
    Session("b", 9, ((2, 5, 4), (4, 3, 6), (0, 5, 3)), False), Again(1, 1),
)  # fmt: skip
RANKS = [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.more)]
OPTIONS = {
    "plain": (("budget", 90),), "deep": (("budget", 110), ("schedule", "phased"), ("trees", "batch")),
    "offload": (("budget", 60), ("offload", True), ("gradient_checkpointing", True)),
    "checkpointed": (("budget", 90), ("gradient_checkpointing", True)),
    "ulysses": (("budget", 50), ("ulysses", 2)), "scattered": (("budget", 40), ("exchange", "auto")),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("nested"), ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl"))


def _broken(models: dict, case: Case, broken: Callable[[pytest.MonkeyPatch], None]) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        broken(patch)
        return errors_of(models, case)[0]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == "deep" else pytest.mark.more) for x in OPTIONS],
)
def test_nested_passes_equal_stock(ranks, models, name, num_ranks):
    if name == "ulysses" and num_ranks == 1:
        pytest.skip("of several ranks")
    case = Case(num_ranks, "qwen3", ROWS, 9, 0.0, 1, OPTIONS[name])
    found = ranks(num_ranks, models)(errors_of, case)
    assert {depth > 1 for *_, depth in found} == {True}
    assert all(max(errors.values()) <= TOLERANCE for errors, *_ in found), found


@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=pytest.mark.more) for x in ("qwen3_moe", "qwen3_vl", "qwen3_next")]
)
def test_nested_passes_of_other_families_equal_stock(ranks, models, family):
    case = Case(2, family, ROWS, 9, 0.0, 1, OPTIONS["plain"])
    found = ranks(2, models)(errors_of, case)
    assert {depth > 1 for *_, depth in found} == {True}
    assert all(max(errors.values()) <= TOLERANCE for errors, *_ in found), found


@pytest.mark.parametrize("broken", [BROKEN[0], *(pytest.param(x, marks=pytest.mark.more) for x in BROKEN[1:])])
def test_broken_nesting_is_seen(ranks, models, broken):
    case = Case(2, "qwen3", ROWS, 9, 0.0, 1, OPTIONS["deep"])
    found = ranks(2, models)(_broken, case, broken)
    assert max(max(errors.values()) for errors in found) > 100 * TOLERANCE
