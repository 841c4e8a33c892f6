"""Random batches through PrefixVeOmniEngine and, row by row, through verl's stock fsdp2 engine: gloo ranks, fp32.

A third of FUZZ_BATCHES in the environment is how many, at least 3; see tests/engine/test_fuzz.py. `veomni_cpu` has
what VeOmni lacks here.
"""

import functools

import pytest
from hypothesis import strategies as st
from random_batches import Case, cases_on, errors_of, measured, of_update, run_batches, write_models

pytest.importorskip("veomni")

TYPES = ("qwen3", "llama", "qwen3 tied", "qwen3 window", "qwen3_moe", "deepseek_v3")
# VeOmni has no keys for these; test_veomni.py has sizes of FSDP2's shards.
NOT_THERE = ("use_no_sync", "lora_targets", "trained", "fsdp_size")


def with_experts_on_ranks(case: Case, ranks: int) -> Case:
    """Of a mixture of experts those of a layer lie on `ranks`, if there are as many."""
    options = {name: value for name, value in case.options if name not in NOT_THERE}
    if case.family != "qwen3_moe":  # VeOmni has wired no other router
        options.pop("routes", None)
    if case.family in ("qwen3_moe", "deepseek_v3") and case.ranks % ranks == 0 and ranks > 1:
        options |= {"expert_parallel_size": ranks, "moe_implementation": "fused_triton"}
    return case._replace(options=tuple(sorted(options.items())))


RANKS = [1, 2, 2, 4]
CASES = st.builds(with_experts_on_ranks, cases_on(RANKS, TYPES), st.sampled_from(RANKS))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("fuzz"), TYPES)


def _errors(models: dict, case: Case) -> tuple[dict[str, float], float]:
    from veomni_engines import SHARED, whole_of_veomni

    left = functools.partial(of_update, whole=whole_of_veomni)
    return errors_of(models, case, functools.partial(measured, "prefix_veomni", shared=SHARED, left=left))


def test_random_batches_are_computed_as_by_fsdp2(ranks, models):
    run_batches(CASES, lambda case: ranks(case.ranks, models)(_errors, case))
