"""Deep trees under a budget that nests passes, through PrefixFSDPEngine and verl's stock fsdp2 engine: fp32, 1 to 4
ranks."""

import pytest
from engines import TOLERANCE
from random_batches import Again, Case, Session, errors_of, write_models

from verl_prefix.core import attention
from verl_prefix.core.prefix_cache import PrefixCache
from verl_prefix.core.schedule import Schedule

# Sessions of one prompt, and branches of these; two such trees, so that two ranks have one each, of unequal depths.
ROWS = (
    Session("a", 20, ((4, 5, 8), (4, 6, 8), (3, 5, 9), (2, 4, 5)), True), Again(1, 1), Again(2, 2), Again(3, 0),
    Session("b", 9, ((2, 5, 4), (4, 3, 6), (0, 5, 3)), False), Again(1, 1),
)  # fmt: skip
RANKS = [1, 2, pytest.param(4, marks=pytest.mark.ci)]
OPTIONS = {
    "plain": (("budget", 90),), "deep": (("budget", 110), ("schedule", "phased"), ("trees", "batch")),
    "offload": (("budget", 60), ("offload", True), ("gradient_checkpointing", True)),
    "checkpointed": (("budget", 90), ("gradient_checkpointing", True)),
    "ulysses": (("budget", 50), ("ulysses", 2)), "scattered": (("budget", 90), ("exchange", "auto")),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("nested"), ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl"))


def _depth_and_errors(models: dict, case: Case, broken: str = "") -> tuple[int, dict[str, float]]:
    """How many passes are around another, itself included: 1 without nested ones."""
    depth = 0
    with pytest.MonkeyPatch.context() as patch:
        between = Schedule._between

        def counted(self, tokens, planned, done, last):
            nonlocal depth
            depth = max(depth, len(done.caches) + bool(planned.nested))
            return between(self, tokens, planned, done, last)

        patch.setattr(Schedule, "_between", counted)
        if broken:
            globals()[broken](patch)
        errors = errors_of(models, case)[0]
    return depth, errors


def outermost_dropped(patch):
    """What passes two levels deeper send back to a strand."""
    backward = attention.GroupedAttention.backward

    def dropped(ctx, dout):
        layout, kernel, params, caches, layer = ctx.args
        if len(caches) > 1:
            caches[0].add_grad = lambda *args: None
        found = backward(ctx, dout)
        if len(caches) > 1:
            del caches[0].add_grad
        return found

    patch.setattr(attention.GroupedAttention, "backward", staticmethod(dropped))


def siblings_counted_twice(patch):
    packed = Schedule._packed

    def twice(self, tokens, planned, around, last):
        yield from packed(self, tokens, planned, around, last)
        for cache in around.caches if around else ():
            for one in (x for total in cache._grad.values() for x in total):
                one.mul_(2)

    patch.setattr(Schedule, "_packed", twice)


def freed_early(patch):
    made, backward, opened = Schedule.prefix_cache, PrefixCache.backward, []

    def kept(self, device):
        opened.append(made(self, device))
        return opened[-1]

    def early(self, *args):
        for cache in opened[: opened.index(self)]:
            cache._grad.clear()
        opened.remove(self)
        backward(self, *args)

    patch.setattr(Schedule, "prefix_cache", kept)
    patch.setattr(PrefixCache, "backward", early)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", OPTIONS)
def test_nested_passes_equal_stock(ranks, models, name, num_ranks):
    if name == "ulysses" and num_ranks == 1:
        pytest.skip("of several ranks")
    case = Case(num_ranks, "qwen3", ROWS, 9, 0.0, 1, OPTIONS[name])
    found = ranks(num_ranks, models)(_depth_and_errors, case)
    assert max(depth for depth, _ in found) > 1
    assert all(max(errors.values()) <= TOLERANCE for _, errors in found), found


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_vl"])
def test_nested_passes_of_other_families_equal_stock(ranks, models, family):
    case = Case(2, family, ROWS, 9, 0.0, 1, OPTIONS["plain"])
    found = ranks(2, models)(_depth_and_errors, case)
    assert all(max(errors.values()) <= TOLERANCE for _, errors in found), found


@pytest.mark.parametrize("broken", ["outermost_dropped", "siblings_counted_twice", "freed_early"])
def test_broken_nesting_is_seen(ranks, models, broken):
    case = Case(2, "qwen3", ROWS, 9, 0.0, 1, OPTIONS["deep"])
    found = ranks(2, models)(_depth_and_errors, case, broken)
    assert max(max(errors.values()) for _, errors in found) > 100 * TOLERANCE
