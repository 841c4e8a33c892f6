"""OOM, losses that are not finite and other errors inside a pass, in the real engine on 1 and 2 gloo ranks.

An OOM is a torch.OutOfMemoryError that a hook raises in a layer's forward or backward: no memory runs out here.
"""

import dataclasses
import functools
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from engines import TOLERANCE, _batch, _engine, _loss, _relative
from ranks import RankError
from verl.utils import tensordict_utils as tu
from whole_tensors import full

from verl_prefix.auto.cost import Memory, PassCost, peak_bytes
from verl_prefix.auto.cost_model import CostModel
from verl_prefix.auto.megatron import Division
from verl_prefix.auto.shape import ModelShape
from verl_prefix.backends import hugging_face
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.errors import add_note
from verl_prefix.core.groups import Group
from verl_prefix.core.pass_notes import NotesOfBackwards, PassNote
from verl_prefix.core.planning import make_plan
from verl_prefix.engine import headroom, outputs, planner
from verl_prefix.engine.backend import Ranks
from verl_prefix.engine.out_of_memory import Advice
from verl_prefix.engine.pass_results import PassResults
from verl_prefix.testing import write_tiny_model

PHASED = {"schedule": "phased", "wave_tokens": 40, "verify": "off"}
CHECKED = PHASED | {"verify": "first_step"}
KEPT = {"gradient_checkpointing": True}
PACKED = {"schedule": "packed", "wave_tokens": None}
# Options, call of layer 1 that fails (counted from 1: phase A is the first), whether in its backward; what is told.
OOMS = {
    "first wave": ({}, 2, False, ["in wave 1 of ", "rank 0: ", "actor.prefix.wave_tokens=", "largest wave: "]),
    "backward of a wave": ({}, 3, True, ["in wave 2 of ", "actor.prefix.wave_tokens="]),
    "one row": ({"wave_tokens": 1}, 2, False, ["in wave 1 of ", "the largest wave is one row already"]),
    "phase A": ({}, 1, False, ["in phase_a, rank 0: 6 groups of rows [0, 3, 8, 9], ", "actor.prefix.offload=True"]),
    "phase C": ({}, 1, True, ["in phase_c", "model.enable_gradient_checkpointing=True"]),
    "packed": (PACKED, 1, False, ["in packed, rank 0: ", "actor.prefix.schedule=phased"]),
    "self-check": (CHECKED, 5, False, ["in packed, rank 0: ", "actor.prefix.verify=off"]),
    "attention kept": (KEPT, 2, False, ["in wave 1 of ", "actor.prefix.keep_attention=off"]),
}


def _break(engine, call: int, in_backward: bool, error: type[Exception] = torch.OutOfMemoryError):
    """Makes the `call`-th forward of a layer's MLP, or the backward through it, run out of memory or fail otherwise."""
    calls = 0

    def fail(*_):
        raise error("injected: out of memory")

    def hook(module, args, output):
        nonlocal calls
        calls += 1
        if calls == call:
            if in_backward:
                output.register_hook(fail)
            else:
                fail()

    engine.module.model.layers[1].mlp.register_forward_hook(hook)


def _update(engine, rank: int, options: dict, change=lambda data: data) -> dict:
    data = change(_batch(rank, engine.model_config.hf_config.vocab_size, options))
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, _loss(options))
        grads = torch.cat([full(p.grad).flatten() for p in engine.module.parameters()])
        grad_norm = engine.optimizer_step()
    params = torch.cat([full(p).flatten() for p in engine.module.parameters()])
    metrics = {name: value for name, value in output["metrics"].items() if name.startswith("prefix/")}
    return {"grads": grads, "params": params, "metrics": metrics, "grad_norm": grad_norm}


def _error(path: str, options: dict, call: int, in_backward: bool) -> str:
    engine = _engine("prefix", path, PHASED | options)
    _break(engine, call, in_backward)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        _update(engine, 0, options)
    return "".join(traceback.format_exception(raised.value))


def _searches(path: str) -> list[tuple[str, int]]:
    """After an OOM and after another error: what the update raises, and how often what is not finite is looked for.
    MOCK: the search, which fails."""
    found = []
    for error in (torch.OutOfMemoryError, RuntimeError):
        engine = _engine("prefix", path, PHASED)
        _break(engine, 3, True, error)
        error_of_search = ValueError("search")
        with mock.patch.object(PassResults, "report_not_finite", side_effect=error_of_search) as search:
            with pytest.raises(RuntimeError) as raised:
                _update(engine, 0, PHASED)
        assert raised.value.__context__ is None, "the search's own error is not shown as its cause"
        found.append((str(raised.value), search.call_count))
    return found


def _nan_advantages(data, masked: bool):
    place = int((data["response_mask"].values() == (0 if masked else 1)).nonzero()[3])
    data["advantages"].values()[place] = float("nan")
    return data


def _nan_rewards(data):
    """In a field that verl's trainers leave in the batch, and none of its losses reads."""
    data["rm_scores"] = data["advantages"] * float("nan")
    return data


def _nan_in_a_field_that_nobody_reads(path: str, options: dict) -> list:
    """Of the stock engine and ours with such a NaN, and of ours without: the update, and tokens through lm_head."""
    found = []
    for backend, change in (("fsdp2", _nan_rewards), ("prefix", _nan_rewards), ("prefix", lambda data: data)):
        engine, tokens = _engine(backend, path, options if backend == "prefix" else {}), []
        engine.module.lm_head.register_forward_pre_hook(
            lambda _, args, tokens=tokens: tokens.append(args[0].shape[:-1].numel())
        )
        found.append((_update(engine, 0, {"tool_tokens": True}, change), sum(tokens)))
    return found


def _nan_weights(path: str) -> None:
    engine = _engine("prefix", path, PHASED)
    with torch.no_grad():
        next(engine.module.parameters()).fill_(float("inf"))
    data = _batch(0, engine.model_config.hf_config.vocab_size, {})
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(data)


def _room(path: str) -> dict[bool, list[bool]]:
    """Whether stock's passes fit a GPU with room for their log-probs, and with less: of an engine for log-probs alone,
    and of the actor's. MOCK: the free memory of a GPU."""
    stock, found = [PassCost(1000, 1000, 0.0)], {}
    zeros = dict.fromkeys(("memory_reserved", "memory_allocated"), lambda: 0)
    for forward_only in (False, True):
        engine = _engine("prefix", path, {}, forward_only)
        shape = engine.backend.shape  # one layer at a time, and two gathered in bf16; or logits twice
        free = 1000 * max(shape.activations, 2 * shape.logits) + 4 * shape.layer_parameters
        with (
            mock.patch.object(headroom, "get_device_name", lambda: "cuda"),
            mock.patch.multiple(torch.cuda, get_device_name=lambda: "GPU", **zeros),
            mock.patch.object(torch.cuda, "mem_get_info", side_effect=[(free, 0), (free - 1, 0)]),
        ):
            device = headroom.Headroom(engine.backend, engine._planner._costs)
            found[forward_only] = [device.fits(stock) for _ in range(2)]
    return found


def _peaks(path: str) -> list[dict]:
    """MOCK: a GPU's memory statistics."""
    cuda = {"reset_peak_memory_stats": lambda _: None, "max_memory_allocated": lambda _: 2**30}
    with (
        mock.patch.object(headroom, "get_device_name", lambda: "cuda"),
        mock.patch.multiple(torch.cuda, **cuda),
    ):
        engine = _engine("prefix", path, PHASED)
        return [_update(engine, 0, PHASED) for _ in range(2)]


def _nan_in_masked_old_log_probs(data):
    place = int((data["response_mask"].values() == 0).nonzero()[3])
    data["old_log_probs"].values()[place] = float("nan")
    return data


def _loss_that_reads_no_old_log_probs(path: str) -> list[tuple[list[float], list[float] | None]]:
    """gpg, of the stock engine and ours, where an old log-prob that its loss masks is NaN."""
    options = {"policy_loss": {"loss_mode": "gpg"}, "loss_agg_mode": "seq-mean-token-sum", "tool_tokens": True}
    found = []
    for backend, more in (("fsdp2", {}), ("prefix", PHASED)):
        engine = _engine(backend, path, options | more)
        data = _nan_in_masked_old_log_probs(_batch(0, engine.model_config.hf_config.vocab_size, options))
        with engine.train_mode(disable_auto_offload=True):
            output = engine.forward_backward_batch(data, _loss(options))
        found.append((output["loss"], output["metrics"].get("prefix/nonfinite_passes")))
    return found


def _kept_outputs(path: str) -> list[dict | None]:
    """The outputs of each pass of an update that are kept until the update is over."""
    finish, kept = PassResults.finish, list[dict | None]()

    def seen(self, plan):
        kept.extend(result.outputs for result in self._results)
        return finish(self, plan)

    with mock.patch.object(PassResults, "finish", seen):
        _update(_engine("prefix", path, PHASED), 0, PHASED)
    return kept


def _measurements(path: str, options: dict, other: float = 0.0) -> int:
    """How often log-probs and an update, whose path depends on rates, measure them. MOCK: another rank's word where
    this one need not be deterministic."""
    said = lambda self, values: [other] if values == [False] else [*values]  # noqa: E731
    with mock.patch.object(Ranks, "max_over_ranks", said):
        engine = _engine("prefix", path, {"min_speedup": 1.05, "verify": "off"} | options)
    data = _batch(0, engine.model_config.hf_config.vocab_size, {})
    with mock.patch.object(planner, "measure", mock.Mock(wraps=planner.measure)) as measure:
        with engine.eval_mode(disable_auto_offload=True):
            engine.infer_batch(data.copy())
        with engine.train_mode(disable_auto_offload=True):
            engine.forward_backward_batch(data, _loss({}))
    return measure.call_count


def _start(rank: int, world: int, rendezvous: str) -> list[str]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), VERL_PLATFORM="cpu")
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("verl_prefix.engine").addHandler(handler)
    return logged


def _alone(rank: int, rendezvous: str, path: str, out: str) -> None:
    logged = _start(rank, 1, rendezvous)
    results = {name: _error(path, *case) for name, (*case, _) in OOMS.items()}
    results["searches"] = _searches(path)
    _nan_weights(path)
    results["weights"] = list(logged)
    logged.clear()
    results["unread NaN"] = _nan_in_a_field_that_nobody_reads(path, CHECKED), list(logged)
    results["peaks"] = _peaks(path)
    results["kept"] = _kept_outputs(path)
    results["gpg"] = _loss_that_reads_no_old_log_probs(path)
    results["room"] = _room(path)
    results["measurements"] = [_measurements(path, {})]
    with mock.patch.dict(os.environ, {"FLASH_ATTENTION_DETERMINISTIC": "1"}):
        results["measurements"].append(_measurements(path, {}))
    results["measurements"].append(_measurements(path, {}, other=1.0))
    results["measurements"].append(_measurements(path, {"full_determinism": True}))  # last: it changes torch's mode
    torch.save(results, out)


def _pair(rank: int, rendezvous: str, path: str, out: str) -> None:
    logged = _start(rank, 2, rendezvous)
    results = {}
    for masked in (False, True):
        for backend in ("fsdp2", "prefix"):
            engine = _engine(backend, path, PHASED if backend == "prefix" else {})
            before = torch.cat([full(p).flatten() for p in engine.module.parameters()])
            change = functools.partial(_nan_advantages, masked=masked) if rank == 1 else lambda data: data
            results[backend, masked] = {"before": before, **_update(engine, rank, {}, change)}
        results["logged", masked], logged[:] = list(logged), []
    torch.save(results, f"{out}.{rank}")


def _oom_on_the_second(path: str) -> None:
    engine, rank = _engine("prefix", path, PHASED), torch.distributed.get_rank()
    if rank == 1:
        _break(engine, 3, False)
    _update(engine, rank, PHASED)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory, spawn):
    tmp = tmp_path_factory.mktemp("alone")
    spawn(_alone, args=(str(tmp / "rendezvous"), model, str(tmp / "out")), nprocs=1)
    return torch.load(tmp / "out")


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory, spawn):
    tmp = tmp_path_factory.mktemp("pair")
    spawn(_pair, args=(str(tmp / "rendezvous"), model, str(tmp / "out")), nprocs=2)
    return [torch.load(f"{tmp / 'out'}.{rank}") for rank in range(2)]


@pytest.mark.parametrize("case", OOMS)
def test_an_oom_says_where_and_what_to_set(alone, case):
    assert "OutOfMemoryError: injected" in alone[case]
    assert all(text in alone[case] for text in OOMS[case][-1]), alone[case]


def test_nothing_is_looked_for_after_an_oom_and_a_search_that_fails_hides_no_error(alone):
    assert alone["searches"] == [("injected: out of memory", 0), ("injected: out of memory", 1)]


def test_weights_that_are_not_finite_are_named_by_what_came_out(alone):
    (line,) = alone["weights"]
    assert "not finite in wave 1 of " in line and "log_probs of rows " in line and "(uid " in line


def test_a_run_that_is_deterministic_on_any_rank_measures_nothing(alone):
    assert alone["measurements"] == [2, 0, 0, 0]


def test_the_peak_of_the_waves_stands_in_the_step_that_had_it(alone):
    first, second = (update["metrics"] for update in alone["peaks"])
    assert first["prefix/phase_b_peak_gib"] == [1.0] and "prefix/phase_b_peak_gib" not in second


def test_an_old_log_prob_that_the_loss_does_not_read_may_be_nan(alone):
    """It stands in for a masked token's log-prob, which lm_head skips."""
    (stock, _), (ours, not_finite) = alone["gpg"]
    assert sum(ours) == pytest.approx(sum(stock), rel=1e-5) and not_finite == [0.0]


def test_an_update_keeps_no_outputs_of_rows(alone):
    """Which would add up over the mini-batch, as verl says of its own (forward_step)."""
    assert len(alone["kept"]) > 2 and all(outputs is None for outputs in alone["kept"])


def test_an_engine_for_log_probs_alone_has_no_update_to_fit(alone):
    assert alone["room"] == {False: [False, False], True: [True, False]}


def test_a_nan_in_a_field_that_nobody_reads_changes_nothing(alone):
    ((stock, _), (ours, tokens), (without, fewest)), logged = alone["unread NaN"]
    assert ours["metrics"]["prefix/nonfinite_passes"] == [0.0] and not logged
    assert _relative(ours["grads"], stock["grads"]) < TOLERANCE and torch.equal(ours["grads"], without["grads"])
    assert tokens == fewest, "lm_head runs where the loss reads alone"


@pytest.mark.parametrize("masked", [False, True], ids=["in the loss", "masked"])
def test_an_update_that_is_not_finite_is_skipped_as_by_stock_and_named(pair, masked):
    results = pair
    for result in results:
        for backend in ("fsdp2", "prefix"):
            update = result[backend, masked]
            assert update["grad_norm"] != update["grad_norm"]
            assert torch.equal(update["before"], update["params"])
    counts = [result["prefix", masked]["metrics"]["prefix/nonfinite_passes"] for result in results]
    assert counts == [[1.0], [1.0]] and not results[0]["logged", masked]
    (line,) = results[1]["logged", masked]
    assert "not finite in wave " in line and ", rank 1: " in line
    assert "advantages of rows " in line and "(uid " in line and ("loss nan" in line) != masked


def test_an_oom_on_one_of_two_ranks_fails_with_the_key_to_set(ranks, model):
    with pytest.raises(RankError) as raised:
        ranks(2, model)(_oom_on_the_second, later=1)  # rank 0 waits for rank 1
    error = str(raised.value).partition("rank 1 of 2 raised")[2].partition("rank 0 of 2")[0]
    assert "OutOfMemoryError: injected" in error
    assert "verl_prefix was in wave 2 of " in error
    assert "set actor_rollout_ref.actor.prefix.wave_tokens=" in error


def test_an_error_among_backwards_names_the_pass_whose_backward_runs():
    def backward(number: int, fails: bool) -> None:
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        if fails:
            y.register_hook(lambda _: 1 / 0)
        output = y + 1
        backwards.follow(output, PassNote("wave", [], f"wave {number} of 2"))
        output.backward()

    def run(fails: bool) -> str:
        backward(1, False)
        backward(2, fails)
        return str(1 / 0)  # between backwards

    for fails in (True, False):
        with pytest.raises(ZeroDivisionError) as raised, NotesOfBackwards() as backwards:
            run(fails)
        told = "".join(traceback.format_exception(raised.value))
        assert ("verl_prefix was in wave 2 of 2, " in told) == fails and "wave 1" not in told


def test_a_note_without_add_note():
    """Python 3.10."""

    class Old(Exception):
        def __getattribute__(self, name):
            if name == "add_note":
                raise AttributeError(name)
            return super().__getattribute__(name)

    error = Old("broken", 3)
    add_note(error, "here")
    assert error.args == ("broken\nhere", 3)


# What a rank lacks room for, of `headroom._KEPT`.
NOTHING, LOGITS, ALL = [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]
ATTENTION = [1.0, 1.0, 0.0, 0.0]


def _two_ranks(others: list[float]) -> SimpleNamespace:
    """MOCK: a backend of one of two ranks, of which the other says `others`."""
    ranks = SimpleNamespace(
        max_over_ranks=lambda values: [max(pair) for pair in zip(values, others, strict=True)], pipeline_size=1
    )
    return SimpleNamespace(ranks=ranks, gradient_bytes=lambda: 4.0)


@pytest.mark.parametrize(("factor", "checkpointed", "tower", "option", "keeps"), [
    (1.6, True, 0.0, "auto", True), (1.4, True, 0.0, "auto", False), (1.6, False, 0.0, "auto", False),
    (1.6, True, 1.0, "auto", False), (1.6, True, 0.0, "off", False),
])  # fmt: skip
def test_attention_is_kept_where_updates_without_left_room_to_spare(
    monkeypatch, factor, checkpointed, tower, option, keeps
):
    """MOCK: the free memory of a GPU, and the word of another rank."""
    monkeypatch.setattr(headroom, "get_device_name", lambda: "cuda")
    others = [*NOTHING]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**60)
    shape = ModelShape(2e6, 1e6, 500.0, (None, 8), 100.0, 10.0, 5.0, 50, attention=12.0, tower=tower)
    memory = Memory(ranks=2, checkpointed=checkpointed, no_sync=False, logits_chunk=4096, offload=False)
    costs = CostModel(shape, dense_mask=False, wave_tokens=None, min_speedup=1.05, memory=memory)
    updates = headroom.Headroom(_two_ranks(others), costs)

    def kept(plan, free=None) -> bool:
        """In an update behind which that much is free."""
        with updates.measured_update():
            found = updates.choose_memory(plan, option, logits_once=False).attention_kept
            if free is not None:
                monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 0))
        return found

    plan = make_plan([Group.of_prompt((0, 1), 300, (20, 30))], 400, "phased")
    own, unkept = (peak_bytes(shape, plan, (), dataclasses.replace(memory, attention_kept=x)) for x in (True, False))
    left, small = factor * own - unkept, make_plan([Group.of_prompt((0, 1), 30, (2, 3))], 400, "phased")
    after_kept = factor * own - own if keeps else left
    for made, free, expected in (
        (plan, left, False), (plan, after_kept, keeps), (small, after_kept, keeps), (plan, after_kept, keeps)
    ):  # fmt: skip
        assert kept(made, free) == expected
    # The allocator holds what the largest update took: a small one without attention tells no less room.
    others[:] = ALL
    assert not kept(small), "another rank lacks room"
    others[:] = NOTHING
    assert kept(plan) == keeps
    others[:] = ALL
    assert not kept(plan, 0.0), "another rank lacks room"
    others[:] = NOTHING
    assert not kept(plan), "and an update without left nothing"


def test_what_another_engine_takes_between_updates_is_no_room(monkeypatch):
    """Moments of the actor, which come after the critic's first update. MOCK: the memory of a GPU."""
    held = [104]  # gradients among them
    monkeypatch.setattr(headroom, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held[0])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**60)
    shape = ModelShape(2e6, 0.0, 500.0, (None, 8), 100.0, 10.0, 5.0, 50, attention=12.0)
    memory = Memory(ranks=2, checkpointed=True, no_sync=False, logits_chunk=4096, offload=False)
    costs = CostModel(shape, dense_mask=False, wave_tokens=None, min_speedup=1.05, memory=memory)
    updates = headroom.Headroom(_two_ranks(NOTHING), costs)
    plan = make_plan([Group.of_prompt((0, 1), 300, (20, 30))], 400, "phased")
    needs = peak_bytes(shape, plan, (), dataclasses.replace(memory, attention_kept=True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * needs, 0))
    kept = []
    for now in (100, 100, 100 + int(2 * needs), 100):
        held[0] = now
        with updates.measured_update():
            kept.append(updates.choose_memory(plan, "auto", logits_once=False).attention_kept)
            held[0] = 104
    assert kept == [False, True, False, True]


def test_an_update_beside_another_engine_has_the_room_that_the_first_one_left(monkeypatch):
    """Updates without that engine's weights leave more, and tell nothing of those beside it. MOCK: a GPU's memory."""
    total, held = [0], [0]
    monkeypatch.setattr(headroom, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held[0])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: held[0])
    shape = ModelShape(2e6, 0.0, 500.0, (None, 8), 100.0, 10.0, 5.0, 50, attention=12.0)
    memory = Memory(ranks=2, checkpointed=True, no_sync=False, logits_chunk=4096, offload=False)
    costs = CostModel(shape, dense_mask=False, wave_tokens=None, min_speedup=1.05, memory=memory)
    updates = headroom.Headroom(_two_ranks(NOTHING), costs)
    plan = make_plan([Group.of_prompt((0, 1), 300, (20, 30))], 400, "phased")
    needs = int(peak_bytes(shape, plan, (), dataclasses.replace(memory, attention_kept=True)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total[0] - held[0], 0))
    total[0], kept = 12 * needs, []
    for now in (10 * needs, needs, needs, 10 * needs):
        held[0] = now
        with updates.measured_update():
            kept.append(updates.choose_memory(plan, "auto", logits_once=False).attention_kept)
    assert kept == [False, True, True, True]


@pytest.mark.parametrize("checkpointed", [True, False])
def test_all_logits_of_a_pass_exist_where_updates_left_room_for_them_too(monkeypatch, checkpointed):
    """MOCK: the free memory of a GPU, and the word of another rank."""
    monkeypatch.setattr(headroom, "get_device_name", lambda: "cuda")
    shape = ModelShape(2e6, 1e6, 5.0, (None, None), 100.0, 10.0, 5.0, 50, attention=12.0, logits=1000.0)
    memory = Memory(ranks=2, checkpointed=checkpointed, no_sync=False, logits_chunk=None, offload=False)
    plan = make_plan([Group.of_prompt((0, 1), 300, (3000, 3000))], 10**5, "packed")
    others, cached = [*NOTHING], [2**60]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: cached[0])

    def left(factor: float, logits_once: bool = True, **changed) -> tuple[bool, bool]:
        """Whether attention and all logits are kept, behind an update that left so many times what both need."""
        costs = CostModel(shape, dense_mask=False, wave_tokens=None, min_speedup=1.05, memory=memory)
        costs = dataclasses.replace(costs, **changed)
        updates = headroom.Headroom(_two_ranks(others), costs)
        most = dataclasses.replace(memory, attention_kept=checkpointed, all_logits=True)
        free = factor * peak_bytes(shape, plan, (), most) - peak_bytes(shape, plan, (), memory)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 0))
        for _ in range(2):
            with updates.measured_update():
                kept = updates.choose_memory(plan, "auto", logits_once)
        assert kept.chunk == (sys.maxsize if kept.all_logits else costs.memory.logits_chunk or 4096)
        return kept.attention_kept, kept.all_logits

    assert left(1.6) == (checkpointed, True)
    assert left(1.4) == (checkpointed, False), "attention alone needs less"
    assert left(0.5) == (False, False)
    assert left(1.6, logits_once=False) == (checkpointed, False), "entropy needs copies that no estimate counts"
    assert left(1.6, memory=dataclasses.replace(memory, logits_chunk=4096)) == (checkpointed, False), "as the user says"
    assert left(1.6, shape=dataclasses.replace(shape, tower=1.0)) == (False, False)
    others[:] = LOGITS
    assert left(1.6) == (checkpointed, False), "another rank lacks room"
    others[:] = ALL
    assert left(1.6) == (False, False)
    others[:] = ATTENTION
    assert left(1.6) == (False, True), "there is room for logits, though not for attention"
    others[:] = NOTHING
    cached[0] = 0  # as behind verl's empty_cache: what the update took is free on the device, and counts once
    assert left(1.6) != (checkpointed, True) and left(2.6) == (checkpointed, True)


def test_ranks_of_nodes_that_differ_reach_the_same_collective_and_keep_the_same():
    """One has flash-attn's cross entropy, the other has not; MOCK: their ranks."""
    shape = ModelShape(2e6, 1e6, 5.0, (None, None), 100.0, 10.0, 5.0, 50, attention=12.0, logits=1000.0)
    memory = Memory(ranks=2, checkpointed=False, no_sync=False, logits_chunk=None, offload=False)
    costs = CostModel(shape, dense_mask=False, wave_tokens=None, min_speedup=1.05, memory=memory)
    plan = make_plan([Group.of_prompt((0, 1), 300, (30, 30))], 10**5, "packed")

    def choose(logits_once: bool, others: Sequence[float] | None = None) -> tuple[list[float], Memory]:
        """What a rank says to the others, and what it then keeps."""
        said: list[float] = []

        def max_over_ranks(values: Sequence[float]) -> list[float]:
            said.extend(map(float, values))
            return [max(pair) for pair in zip(said, others or said, strict=True)]

        backend = SimpleNamespace(ranks=SimpleNamespace(max_over_ranks=max_over_ranks, pipeline_size=1))
        return said, headroom.Headroom(backend, costs).choose_memory(plan, "auto", logits_once)

    (with_it, kept), (without, _) = choose(True), choose(False)
    assert kept.all_logits and len(with_it) == len(without) > 0
    assert choose(True, without)[1] == choose(False, with_it)[1] == memory


def test_a_rank_whose_wave_is_a_dummy_is_not_told_to_shorten_waves():
    """Another rank's waves make it run one of its own, without rows."""
    plan = make_plan([Group.of_prompt((0, 1), 30, (20, 30))], 100, "packed")
    with (
        pytest.raises(torch.OutOfMemoryError) as raised,
        Advice(plan, Memory(checkpointed=False), "actor_rollout_ref.actor", PrefixConfig(), False, True).on_errors(),
    ):
        with PassNote("wave", [], "wave 1 of 1"):
            raise torch.OutOfMemoryError("injected")
    told = "".join(traceback.format_exception(raised.value))
    assert "this rank ran a wave without rows, beside waves of other ranks; set " in told and "one row" not in told


@pytest.mark.parametrize(("flags", "installed", "disabled", "once"), [
    ({}, True, "0", True), ({}, False, "0", False), ({}, True, "1", False),
    ({"calculate_entropy": True}, True, "0", False), ({"calculate_sum_pi_squared": True}, True, "0", False),
])  # fmt: skip
def test_logits_are_read_once_by_flash_attns_cross_entropy_alone(monkeypatch, flags, installed, disabled, once):
    """MOCK: whether flash-attn is installed."""
    monkeypatch.setattr(hugging_face.torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", installed)
    monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", disabled)
    flags = outputs.flags_of(tu.get_tensordict({"input_ids": torch.zeros(1, 1)}, flags))
    assert hugging_face.HFBackend.reads_logits_once(None, flags) == once


@pytest.mark.parametrize(("suffix", "attention", "advice"), [
    (3000, True, "{}.logits_chunk=4096 and {}.keep_attention=off"), (3000, False, "{}.logits_chunk=4096"),
    (2000, True, "{}.keep_attention=off"), (2000, False, "{}.schedule=phased"),
])  # fmt: skip
def test_out_of_memory_names_what_was_kept(suffix, attention, advice):
    """Chunks of 4096 logits are less than all only of longer passes."""
    kept = Memory(2, True, False, None, False, attention_kept=attention, all_logits=True)
    plan = make_plan([Group.of_prompt((0, 1), 30, (suffix, suffix))], 10**5, "packed")
    args = plan, kept, "", PrefixConfig(), False, True
    with pytest.raises(torch.OutOfMemoryError) as error, Advice(*args).on_errors():
        failed = torch.OutOfMemoryError("injected")
        failed.prefix_phase = "packed"
        raise failed
    (note,) = error.value.__notes__
    assert note.endswith(f"set {advice.replace('{}', 'actor_rollout_ref.actor.prefix')}")


@pytest.mark.parametrize(
    ("phase", "advised"),
    [
        ("packed", "schedule=phased"), ("phase_a", "offload=True"), ("phase_a", "enable_gradient_checkpointing=True"),
        ("phase_c", "enable_gradient_checkpointing=True"), ("wave", "offload=True"),
        ("wave", "enable_gradient_checkpointing=True"),
    ],
)  # fmt: skip
def test_out_of_memory_advises_nothing_that_is_set_already(phase, advised):
    plan = make_plan([Group.of_prompt((0,), 30, (20,))], 10**5, "packed" if phase == "packed" else "phased")
    for options, is_advised in ((PrefixConfig(), True), (PrefixConfig(schedule="phased", offload=True), False)):
        with (
            pytest.raises(torch.OutOfMemoryError) as error,
            Advice(
                plan, Memory(checkpointed=not is_advised), "actor_rollout_ref.actor", options, False, True
            ).on_errors(),
        ):
            failed = torch.OutOfMemoryError("injected")
            failed.prefix_phase = phase
            raise failed
        (note,) = error.value.__notes__
        helps = {"wave": "shard the model over more GPUs"}.get(
            phase, "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
        )
        assert (advised in note) == is_advised and helps in note


@pytest.mark.parametrize(
    ("schedule", "phase", "counts_tokens", "note"),
    [
        ("packed", None, False, "verl_prefix: lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        (
            "phased", "nested", True, "verl_prefix: set actor_rollout_ref.actor.prefix.offload=True, or set "
            "actor_rollout_ref.model.enable_gradient_checkpointing=True, or lower "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        ),
    ],
    ids=["outside of passes, as where gradients are reduced", "nested, so that the group is phased already"],
)  # fmt: skip
def test_out_of_memory_advises_what_helps_there(schedule, phase, counts_tokens, note):
    plan = make_plan([Group.of_prompt((0,), 30, (20,))], 10**5, schedule)
    args = plan, Memory(checkpointed=False), "actor_rollout_ref.actor", PrefixConfig(), False, counts_tokens
    advice = Advice(*args).on_errors()
    with pytest.raises(torch.OutOfMemoryError) as error, advice:
        failed = torch.OutOfMemoryError("injected")
        if phase is not None:
            failed.prefix_phase = phase
        raise failed
    assert error.value.__notes__ == [note]


RECOMPUTE = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute"


@pytest.mark.parametrize(("role", "phase", "division", "forward_only", "note"), [
    ("ref", "phase_a", False, True, "verl_prefix: lower actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"),
    ("actor", "phase_a", False, True, "verl_prefix: lower actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"),
    (
        "actor", "phase_c", True, False,
        f"verl_prefix: set {RECOMPUTE}_granularity=full, {RECOMPUTE}_method=uniform and {RECOMPUTE}_num_layers=1, or "
        "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    ),
])  # fmt: skip
def test_out_of_memory_names_keys_that_act_on_the_engine_and_in_the_pass(role, phase, division, forward_only, note):
    plan = make_plan([Group.of_prompt((0,), 30, (20,))], 10**5, "phased")
    kept = Memory(2, False, False, None, False, division=Division(2) if division else None)
    args = plan, kept, f"actor_rollout_ref.{role}", PrefixConfig(), forward_only, True
    with pytest.raises(torch.OutOfMemoryError) as error, Advice(*args).on_errors():
        failed = torch.OutOfMemoryError("injected")
        failed.prefix_phase = phase
        raise failed
    assert error.value.__notes__ == [note]


@pytest.mark.parametrize(("phase", "key"), [
    (
        "packed",
        "+critic.ppo_infer_max_token_len_per_gpu (critic.ppo_max_token_len_per_gpu with trainer.use_v1=false)",
    ),
    ("phase_c", "critic.model.enable_gradient_checkpointing"),
    ("wave", "critic.model.enable_gradient_checkpointing"),
])  # fmt: skip
def test_out_of_memory_in_a_critic_names_its_keys(phase, key):
    plan = make_plan([Group.of_prompt((0,), 30, (20,))], 10**5, "phased")
    with (
        pytest.raises(torch.OutOfMemoryError) as error,
        Advice(plan, Memory(checkpointed=False), "critic", PrefixConfig(), False, True).on_errors(),
    ):
        failed = torch.OutOfMemoryError("injected")
        failed.prefix_phase = phase
        raise failed
    (note,) = error.value.__notes__
    assert key in note and "log_prob" not in note and "actor_rollout_ref.model" not in note
