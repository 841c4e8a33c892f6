"""What fails inside a pass of PrefixMegatronEngine ends with its cause and leaves nothing behind, on any stage of a
pipeline, too; ranks of tensor and expert parallelism make their collectives in one order.

gloo ranks, fp32, with the stand-ins of `megatron_cpu`. tests/engine/test_faults.py has what our engine says of a
failure, whatever the engine. A failure is an error that a hook raises.
"""

import contextlib
import functools
import itertools
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from engines import TOLERANCE, _loss
from pairs import in_pairs
from ranks import RankError
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("megatron.core")

from megatron_engines import EVEN, batch_of, write_megatron_model  # noqa: E402

SP = {"tp": 2, "sp": True}
EP, CP = {"ep": 2}, {"cp": 2}
PHASED = {"schedule": "phased", "wave_tokens": 40, "verify": "off"}
PACKED = {"schedule": "packed", "verify": "off"}
ROW_BY_ROW = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
FULL = {"recompute": "uniform"}
# Options, the call of the last layer's experts that fails, counted from 1, or a function that does; whether in the
# backward of that call; where the error says that it was. Phase A is the first call.
FAULTS: dict[str, tuple[dict[str, Any], int | str, bool, str]] = {
    "phase A": (PHASED, 1, False, "verl_prefix was in phase_a, "),
    "wave": (PHASED, 3, False, "verl_prefix was in wave 2 of "),
    "backward of a wave": (PHASED, 3, True, "verl_prefix was in wave 2 of "),
    "phase C": (PHASED, 1, True, "verl_prefix was in phase_c, "),
    "packed": (PACKED, 1, False, "verl_prefix was in packed, "),
    "backward of packed": (PACKED, 1, True, "verl_prefix was in packed, "),
    "recomputation of packed": (PACKED | FULL, 2, False, "verl_prefix was in packed, "),
    "recomputation of a wave": (PHASED | FULL, 3, False, "verl_prefix was in wave 1 of "),
    "recomputation of phase C": (PHASED | FULL, "phase C", False, "verl_prefix was in phase_c, "),
    "self-check": (PHASED | {"verify": "first_step"}, 5, False, "verl_prefix was in packed, "),
    "finalizing": (PHASED, "finalizing", False, "finalize"),
}


# As FAULTS, on one stage of a pipeline; what the error says, of rank {0}. A step is no pass.
WAVE_2 = [
    "verl_prefix was in wave 2 of 3, rank {0}: 2 groups of rows [9], [2, 3], 28 suffix tokens after 62 prefix "
    "tokens of phases A",
    "verl_prefix: set actor_rollout_ref.actor.prefix.wave_tokens=20 (largest wave: 40 tokens)",
]
ON_A_STAGE: dict[str, tuple[dict[str, Any], int | str, bool, list[str]]] = {
    "phase A": (PHASED, 1, False, ["verl_prefix was in phase_a, rank {0}: ", "actor.prefix.offload=True"]),
    "wave": (PHASED, 3, False, WAVE_2),
    "backward of a wave": (PHASED, 3, True, WAVE_2),
    "phase C": (PHASED, 1, True, ["verl_prefix was in phase_c, rank {0}: ", "recompute_granularity=full"]),
    "step": (PHASED, "step", False, ["in optimizer_step"]),
    "packed": (PACKED, 1, False, ["verl_prefix was in packed, rank {0}: ", "actor.prefix.schedule=phased"]),
    "backward of packed": (PACKED, 1, True, ["verl_prefix was in packed, rank {0}: ", "actor.prefix.schedule=phased"]),
}
# Stages, the one that fails, and where.
QUICK = {
    (2, 0, "phase A"), (2, 1, "wave"), (2, 0, "backward of a wave"), (2, 1, "phase C"), (2, 0, "step"),
    (4, 1, "backward of a wave"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A mixture whose routers count tokens, for biases that follow."""
    return write_megatron_model(tmp_path_factory.mktemp("model") / "deepseek_v3", "deepseek_v3")


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of four layers, for as many stages."""
    return write_megatron_model(tmp_path_factory.mktemp("model") / "qwen3_deep", "qwen3_deep")


# What follows runs on ranks.
@functools.cache
def _shared() -> Any:
    from megatron_shared import SharedEngines

    return SharedEngines()


def _layers(engine: Any) -> Any:
    from verl_prefix.models.mcore import unwrapped

    return unwrapped(engine.module[0]).decoder.layers


def _fail(*_: Any) -> None:
    raise torch.OutOfMemoryError("injected: out of memory")


@contextlib.contextmanager
def _broken(engine: Any, at: int | str, in_backward: bool) -> Iterator[None]:
    """Context in which the last layer's MLP fails in its call `at`, or in the backward of it; or what `at` names."""
    from megatron.core.utils import get_model_config

    from verl_prefix.core.prefix_cache import PrefixCache

    calls, at_work = 0, []

    def hook(module: Any, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at or (at == "phase C" and at_work):
            if in_backward:
                output[0].register_hook(_fail)
            else:
                _fail()

    end_waves = PrefixCache._end_waves
    finalize = _fail if at == "finalizing" else get_model_config(engine.module[0]).finalize_model_grads_func
    step = _fail if at == "step" else engine.optimizer.step
    handle = _layers(engine)[-1].mlp.register_forward_hook(hook)
    with (
        mock.patch.object(engine.optimizer, "step", step),
        mock.patch.object(PrefixCache, "_end_waves", lambda cache: end_waves(cache) or at_work.append(cache)),
        mock.patch.object(get_model_config(engine.module[0]), "finalize_model_grads_func", finalize),
    ):
        yield
    handle.remove()


def _update(engine: Any, **options: Any) -> dict[str, torch.Tensor]:
    from megatron_shared import left_by_update

    data = batch_of(engine, (engine.get_data_parallel_rank(),), EVEN | options)
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, _loss({}))
        return left_by_update(engine) | {"loss": torch.tensor(sum(output["loss"]))}


def _errors(ours: dict, stock: dict) -> dict[str, float]:
    assert ours.keys() == stock.keys()
    return {name: ((ours[name] - x).abs().max() / x.abs().max()).item() for name, x in stock.items()}


def _after(path: str, name: str, layout: tuple) -> tuple[str, dict[str, float]]:
    """What an update ends with that fails on every rank, and how far the next one's results are from stock's."""
    options, at, in_backward, _ = FAULTS[name]
    fields = dict(layout) | options
    engine = _shared()("prefix_megatron", path, fields)
    with _broken(engine, at, in_backward), pytest.raises(torch.OutOfMemoryError) as raised:
        _update(engine)
    stock = _shared()("megatron", path, {k: v for k, v in fields.items() if k not in PHASED})
    told = "".join(traceback.format_exception(raised.value))
    return told, _errors(_update(engine), _update(stock, **ROW_BY_ROW))


LAYOUTS = {"tp2_sp": SP, "ep2": EP, "cp2": CP}


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(layout, name, marks=pytest.mark.full if (i + j) % 3 else ())  # a fault in one layout
        for i, name in enumerate(FAULTS)
        for j, layout in enumerate(LAYOUTS)
    ],
)
def test_the_update_after_one_that_failed_is_right(model, ranks, name, layout):
    for told, errors in ranks(2, model)(_after, name, tuple(LAYOUTS[layout].items())):
        assert "OutOfMemoryError: injected" in told and FAULTS[name][-1] in told
        assert max(errors.values()) < TOLERANCE, errors


def _fails_on_the_second(path: str, backend: str, layout: tuple, at: int, in_backward: bool) -> None:
    engine = _shared()(backend, path, dict(layout) | PHASED)
    with contextlib.ExitStack() as stack:
        if torch.distributed.get_rank() == 1:
            stack.enter_context(_broken(engine, at, in_backward))
        _update(engine, **(ROW_BY_ROW if backend == "megatron" else {}))


@pytest.mark.parametrize("backend", ["megatron", "prefix_megatron"])
@pytest.mark.parametrize(
    ("layout", "at", "in_backward"), [(SP, 3, False), (EP, 3, True), ({}, 1, True)], ids=["tp2_sp", "ep2", "dp2"]
)
def test_a_failure_on_one_of_two_ranks_is_told_while_the_other_waits(model, ranks, backend, layout, at, in_backward):
    """In verl's own passes, too: there rank 0 waits in a collective until its process ends."""
    with pytest.raises(RankError) as raised:
        ranks(2, model)(_fails_on_the_second, backend, tuple(layout.items()), at, in_backward, later=1)
    told = str(raised.value)
    assert told.startswith("rank 1 of 2 raised") and "rank 0 of 2" not in told
    assert "OutOfMemoryError: injected" in told
    assert ("verl_prefix was in " in told) == (backend == "prefix_megatron")


def _fails_on_a_stage(other: str, path: str, backend: str, stage: int, name: str) -> None:
    options, at, in_backward, _ = ON_A_STAGE[name]
    stages = {"pipeline_model_parallel_size": torch.distributed.get_world_size()}
    engine = _shared()(backend, path, stages | options)
    with contextlib.ExitStack() as stack:
        if torch.distributed.get_rank() == stage:
            stack.enter_context(_broken(engine, at, in_backward))
        _update(engine, **(ROW_BY_ROW if backend == "megatron" else {}))


@pytest.mark.parametrize(
    ("stages", "stage", "name"),
    [
        pytest.param(stages, stage, name, marks=[] if (stages, stage, name) in QUICK else pytest.mark.full)
        for stages in (2, 4)
        for stage in range(stages)
        for name in ON_A_STAGE
    ],
)
def test_a_stage_that_fails_is_told_while_the_others_wait(model, deep, ranks, stages, stage, name):
    """Its error alone: the others wait for its messages until their processes end."""
    with pytest.raises(RankError) as raised:
        ranks(stages, model)(_fails_on_a_stage, deep, "prefix_megatron", stage, name, later=1)
    told = str(raised.value)
    assert told.startswith(f"rank {stage} of {stages} raised") and told.count(f" of {stages} raised") == 1
    assert "OutOfMemoryError: injected" in told
    assert all(words.format(stage) in told for words in ON_A_STAGE[name][-1]), told


@pytest.mark.full
@pytest.mark.parametrize("name", ["wave", "backward of a wave", "step"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_of_verls_own_that_fails_is_told_while_the_other_waits(model, deep, ranks, stage, name):
    with pytest.raises(RankError) as raised:
        ranks(2, model)(_fails_on_a_stage, deep, "megatron", stage, name, later=1)
    told = str(raised.value)
    assert told.startswith(f"rank {stage} of 2 raised") and f"rank {1 - stage} of 2" not in told
    assert "OutOfMemoryError: injected" in told and "verl_prefix was in" not in told


def _rows_that_one_cannot_read(path: str) -> str:
    """MOCK: one of two ranks that have the same rows finds positions in them that are wrong."""
    from verl_prefix.engine import prefix_engine

    engine = _shared()("prefix_megatron", path, SP | PHASED)
    broken = _fail if torch.distributed.get_rank() == 1 else prefix_engine.check_positions
    with mock.patch.object(prefix_engine, "check_positions", broken), pytest.raises(Exception) as raised:
        _update(engine)
    return repr(raised.value)


def test_rows_that_one_rank_of_tensor_parallelism_cannot_read_end_all(model, ranks):
    first, second = ranks(2, model)(_rows_that_one_cannot_read)
    assert "rank 1 failed while checking rows" in first and "injected" in second


class Collectives(TorchDispatchMode):
    """Notes collectives in their order, whoever makes them: names, and the ranks of their groups."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            groups = [x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
            group = torch.distributed.ProcessGroup.unbox(groups[0])
            self.made.append((func.name(), tuple(torch.distributed.get_process_group_ranks(group))))
        return func(*args, **(kwargs or {}))


# By data rank: rows of two prompts that are spread over ranks; of one prompt, so that one of two ranks has none after
# the exchange; or on the second nothing but empty responses.
ROWS = {
    "rows": [[("a", 30, [9, 7], ""), ("b", 50, [5], "")], [("a", 30, [6], ""), ("b", 50, [4, 8], "")]],
    "none": [[("a", 30, [9, 7, 4], "")], [("a", 30, [6, 5, 3], "")]],
    "idle": [[("a", 30, [9, 7], ""), ("b", 50, [5], "")], [("c", 20, [0, 0, 0], "")]],
}
ON_FOUR = {
    "tp2_dp2": SP,
    "tp2_ep2": SP | {"ep": 2},
    "tp2_ep4_etp1": SP | {"ep": 4, "etp": 1},
    "cp2_dp2": CP,
    "cp2_ep4": CP | {"ep": 4},
}
SCHEDULES = {"packed": PACKED, "phased": PHASED, "recomputed": PHASED | FULL}


def _walk(path: str, rows: str, layout: str, schedule: str) -> tuple[list, bool]:
    engine = _shared()("prefix_megatron", path, ON_FOUR[layout] | SCHEDULES[schedule] | {"exchange": "auto"})
    rank = engine.get_data_parallel_rank()
    data = batch_of(engine, (rank,), {"groups": ROWS[rows][rank]})
    with Collectives() as seen:
        with engine.eval_mode(disable_auto_offload=True):
            engine.infer_batch(data.copy())
        with engine.train_mode(disable_auto_offload=True):
            output = engine.train_batch(data.copy(), _loss({}))
    return seen.made, output["metrics"]["prefix/tokens_saved"] != 0


@pytest.mark.parametrize(("rows", "layout", "schedule"), in_pairs(ROWS, ON_FOUR, SCHEDULES))
def test_ranks_of_one_layout_make_their_collectives_in_one_order(model, ranks, rows, layout, schedule):
    found = ranks(4, model)(_walk, rows, layout, schedule)
    for one, other in itertools.combinations(range(4), 2):
        mine, theirs = ([call for call in found[rank][0] if {one, other} <= {*call[1]}] for rank in (one, other))
        assert mine == theirs and len(mine) > 20, f"ranks {one} and {other} differ in their collectives"
    assert {len(group) for _, group in found[0][0]} >= {2, 4}
    assert any(shared for _, shared in found)
