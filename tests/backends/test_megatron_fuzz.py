"""Random batches through PrefixMegatronEngine and, row by row, through verl's own Megatron engine in the same layout:
gloo ranks, fp32, with the stand-ins of `megatron_cpu`. That verl's own is right there, test_megatron_stock.py shows.

A third of FUZZ_BATCHES in the environment is how many, at least 3; see tests/engine/test_fuzz.py.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import random_batches
from hypothesis import strategies as st
from random_batches import Case, cases_on, errors_of, measured, rows_of, run_batches

pytest.importorskip("megatron.core")

from megatron_engines import MODELS, routes_of, write_megatron_model  # noqa: E402

# The window of Qwen2 is refused: its bridge takes it from override_transformer_config alone.
TYPES = [name for name in MODELS if name != "qwen2_window"]
WITH_EXPERTS = ("qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3")
SP, CP = {"tp": 2, "sp": True}, {"cp": 2}
# By number of ranks. mcore trains experts under tensor parallelism with sequence parallelism alone.
DENSE: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, {"tp": 2}, SP, CP],
    4: [{"tp": 2}, SP, {"tp": 4, "sp": True}, CP, SP | CP],
}
EXPERTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, SP, {"ep": 2}, SP | {"ep": 2, "etp": 1}, CP | {"ep": 2}],
    4: [
        SP,
        {"ep": 2},
        {"ep": 4},
        SP | {"ep": 2},
        SP | {"ep": 2, "etp": 1},
        SP | {"ep": 4, "etp": 1},
        CP | {"ep": 4},
        CP | SP,
    ],
}
# Keys of other engines.
NOT_THERE = ("use_no_sync", "fsdp_size", "gradient_checkpointing", "lora_targets", "trained", "ulysses", "routes")
BUILT = st.fixed_dictionaries({}, optional={
    "recompute": st.sampled_from(["selective", "uniform", "uniform of all", "block"]),
    "overlap": st.sampled_from(["gradients", "both"]),
    "distributed_optimizer": st.just(False),
    "keep_attention": st.just("off"),
})  # fmt: skip


def on_megatron(case: Case, layout: int, built: dict[str, Any], replay: str | None) -> Case:
    """The case on an engine of Megatron's."""
    layouts = (EXPERTS if MODELS[case.family][0] in WITH_EXPERTS else DENSE)[case.ranks]
    options = {name: value for name, value in case.options if name not in NOT_THERE}
    if MODELS[case.family][0] in ("glm4_moe", "deepseek_v3"):  # whose routers learn from every token
        options.pop("dead", None)
    options |= layouts[layout % len(layouts)] | built
    if MODELS[case.family][0] in WITH_EXPERTS and replay:
        options["replay"] = replay
    if "distillation" in options:
        options["strategy"] = "megatron"  # of which verl's loss reads a part of the logits
    if built.get("overlap") == "both" and "distributed_optimizer" in built:
        options["overlap"] = "gradients"  # weights that nobody shards are not gathered
    return case._replace(options=tuple(sorted(options.items())))


CASES = st.builds(
    on_megatron, cases_on([1, 2, 2, 4], TYPES), st.integers(0, 239), BUILT, st.sampled_from([None, "R2", "R3"])
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    return {name: write_megatron_model(folder / name, name) for name in TYPES}


@functools.cache
def _shared() -> Any:
    from megatron_shared import SharedEngines

    return SharedEngines()


def _with_routes(
    case: Case, path: str, config: Any, options: dict, chosen: slice, batch: Callable[..., Any] = random_batches._batch
) -> tuple[list[int], Any]:
    """A batch of `random_batches` with routes to replay, if the case is one of router replay."""
    from verl.utils import tensordict_utils as tu

    numbers, data = batch(case, path, config, options, chosen)
    if options.get("replay") == "R3":
        data["routed_experts"] = routes_of(data, config, numbers)
    if "replay" in options:
        tu.assign_non_tensor(data, enable_routing_replay=True)
    return numbers, data


def _errors(models: dict, case: Case) -> tuple[dict[str, float], float]:
    from megatron_shared import left_by_update

    ours, stock = (
        functools.partial(measured, backend, shared=_shared(), left=left_by_update)
        for backend in ("prefix_megatron", "megatron")
    )
    with mock.patch.object(random_batches, "_batch", _with_routes):
        errors, *counts = errors_of(models, case, ours, stock)
    if not _counts_alike(case):
        errors = {name: error for name, error in errors.items() if "experts" not in name}
    return errors, *counts


def _counts_alike(case: Case) -> bool:
    """False where verl's routers count what ours leave out: under sequence and context parallelism the tokens that pad
    each row, and rows without response tokens."""
    rows = rows_of(case, SimpleNamespace(vocab_size=420))
    return not {"sp", "cp"} & dict(case.options).keys() and all(len(row.response) for row in rows)


def test_random_batches_are_computed_as_by_verls_own(ranks, models):
    run_batches(CASES, lambda case: ranks(case.ranks, models)(_errors, case))
