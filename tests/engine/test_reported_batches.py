"""Batches that users of verl and of other trainers reported, through PrefixFSDPEngine and verl's stock fsdp2 engine.

Tiny Qwen3, 1 and 2 gloo ranks, fp32. Those with pixels are in test_vision_engine.
"""

import itertools
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from engines import LOSS_MODES, TOLERANCE, _batch, _compare, _configs, _engine, _loss, _measure, _relative, _responses
from shared_models import SharedModels
from torch.distributed import get_rank
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import rearrange_micro_batches
from whole_tensors import full

from verl_prefix.auto.shape import ModelShape
from verl_prefix.config.actor import LOSSES_OF_ROWS
from verl_prefix.core.groups import Group
from verl_prefix.core.meter import Meter
from verl_prefix.core.plan import PackedPass, PhasedPass, Plan, Wave
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.metrics.pass_metrics import plan_metrics
from verl_prefix.engine.rows import BatchRows
from verl_prefix.testing import write_tiny_model

# What follows runs on ranks, which are given the model's path first.
SHARED = SharedModels(_engine)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("reported") / "qwen3")


def _some(cases: dict, *quick: str) -> list:
    """Of which make test has these."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.more) for case in cases]


NUMBERED = {
    "as verl does": lambda prompt, n: torch.arange(n),
    "from 0 three times": lambda prompt, n: (torch.arange(n) - 2).clamp(min=0),
    "with a jump behind the prompt": lambda prompt, n: torch.arange(n) + 5 * (torch.arange(n) >= prompt),
    "with a jump in the prompt": lambda prompt, n: torch.arange(n) + 5 * (torch.arange(n) >= prompt // 2),
    "with a step back behind the prompt": lambda prompt, n: torch.arange(n) - 4 * (torch.arange(n) >= prompt),
    "from 3": lambda prompt, n: torch.arange(n) + 3,
    "on from the row before": lambda prompt, n, row_before=(-1,): torch.arange(n) + int(row_before[-1]) + 1,
}


def _number(data, how: str, uid: str) -> None:
    """Numbers the rows of a prompt otherwise."""
    rows = list(data["position_ids"].unbind())
    for i, prompt in enumerate(data["prompts"].unbind()):
        if data["uid"][i] == uid:
            more = {"row_before": rows[i - 1]} if how == "on from the row before" else {}
            rows[i] = NUMBERED[how](len(prompt), len(rows[i]), **more)
    data["position_ids"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _numbered(path: str, how: str, attention: str, packs: bool) -> tuple[str, float]:
    """What the engine says of such rows, and how far its log-probs are from stock's if it says nothing of any."""
    import varlen  # noqa: F401

    from verl_prefix.engine import prefix_engine

    options = {"schedule": "packed", "attn_implementation": attention, "use_remove_padding": packs}
    found, message = {}, ""
    for backend in ("fsdp2", "prefix"):
        engine = SHARED(backend, path, options)
        data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, options)
        _number(data, how, "b")
        with (
            engine.eval_mode(disable_auto_offload=True),
            mock.patch.object(prefix_engine, "check_positions", lambda *args: None),
        ):
            output = engine.infer_batch(data.copy())["model_output"]
            found[backend] = torch.cat(_responses(output["log_probs"], data))
    try:
        prefix_engine.check_positions(BatchRows(data), engine.backend.stock_facts.row_begins)
    except ValueError as error:
        message = str(error)
    return message, _relative(found["prefix"], found["fsdp2"])


@pytest.mark.parametrize(
    "how", _some(NUMBERED, "from 0 three times", "with a jump behind the prompt", "on from the row before")
)
@pytest.mark.parametrize(
    ("attention", "packs"), [("varlen_on_cpu", True), ("sdpa", True), ("sdpa", False)], ids=["flash", "sdpa", "padded"]
)
def test_rows_are_refused_where_verls_own_path_takes_their_positions_for_bounds(ranks, path, attention, packs, how):
    """Both kernels are those of a CPU: flash attention is a stand-in that reads bounds as transformers does."""
    ((message, error),) = ranks(1, path)(_numbered, how, attention, packs)
    assert bool(message) == (error > TOLERANCE), f"{message!r}, and log-probs differ by {error}"
    assert not message or (error > 100 * TOLERANCE and "(uid b): position_ids are " in message)


def _saved(path: str) -> list[float]:
    """Tokens that an update saves. MOCK: FSDP2's routers count the last token of each row, as Megatron's."""
    saved = []
    for counts in (False, True):
        engine = SHARED("prefix", path, {"schedule": "packed"})
        data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, {})
        with (
            mock.patch.object(type(engine.backend), "counts_last_tokens", counts),
            engine.train_mode(disable_auto_offload=True),
        ):
            saved += engine.forward_backward_batch(data, _loss({}))["metrics"]["prefix/tokens_saved"]
    return saved


def test_last_tokens_that_routers_alone_count_are_no_tokens_saved_or_lost(ranks, path):
    ((without, with_last),) = ranks(1, path)(_saved)
    assert 0 < without == with_last


def _later(path: str, backend: str) -> str:
    """What an update says whose rows are such on the last rank, after one whose rows were not."""
    engine, last = SHARED(backend, path, {}), torch.distributed.get_world_size() - 1
    data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, {})
    with engine.train_mode(disable_auto_offload=True):
        engine.forward_backward_batch(data.copy(), _loss({}))
        if get_rank() == last:
            _number(data, "from 0 three times", "f")
        with pytest.raises((ValueError, RuntimeError)) as error:
            engine.forward_backward_batch(data.copy(), _loss({}))
    return str(error.value)


def test_positions_that_restart_after_step_1_are_named_by_their_rank_and_end_the_others(ranks, path):
    first, last = ranks(2, path)(_later, "prefix")
    assert "rank 1 failed while checking rows" in first
    assert "(uid f): position_ids are 0, 0, 0, 1" in last and "0, 1, 2, ..." in last and "verify" not in last


def _compared(path: str, options: dict, change=lambda data: data) -> dict:
    """Log-probs and an update of such rows, against stock's."""

    def batch(*args):
        return change(_batch(*args))

    with mock.patch("engines._batch", batch), mock.patch("engines._engine", SHARED):
        return _compare(*(_measure(backend, path, get_rank(), options) for backend in ("prefix", "fsdp2")))


def _no_advantage(data):
    data["advantages"] = data["advantages"] * 0.0
    return data


IDLE = {
    "vanilla": {"entropy_coeff": 0.0},
    "bypass_mode": {"entropy_coeff": 0.0, "policy_loss": {"loss_mode": "bypass_mode"}},
    "kl": {"entropy_coeff": 0.0, "use_kl_loss": True},
    "entropy": {},
}


def _idle(path: str, loss: str) -> dict:
    return _compared(path, IDLE[loss], _no_advantage)


@pytest.mark.parametrize("loss", [pytest.param(x, marks=pytest.mark.more if x == "kl" else ()) for x in IDLE])
def test_a_batch_without_advantages_is_checked_and_moves_what_stock_moves(ranks, path, loss):
    (result,) = ranks(1, path)(_idle, loss)
    assert max(result["errors"].values()) <= TOLERANCE, result["errors"]
    assert 0 < result["metrics"]["prefix/verify_gradients"][0] < 8


def _of_no_token(path: str) -> tuple[int, bool]:
    """Calls of a user's loss that raises where it gets no response token, and whether outputs of all rows came."""
    options = {"empty": ("e",), "verify": "off", "schedule": "packed"}
    engine, num_calls = SHARED("prefix", path, options), 0
    data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, options)
    tu.assign_non_tensor(data, return_model_output=True)

    def loss(model_output, data, dp_group=None):
        nonlocal num_calls
        num_calls += 1
        data["response_mask"].values().max()  # raises of nothing
        return model_output["log_probs"].values().sum(), {}

    with engine.train_mode(disable_auto_offload=True):
        output = engine.forward_backward_batch(data, loss)
    return num_calls, bool((output["model_output"]["log_probs"].offsets() == data["input_ids"].offsets()).all())


def test_a_users_loss_is_not_asked_of_empty_responses_alone(ranks, path):
    for num_calls, are_there in ranks(2, path)(_of_no_token):
        assert num_calls > 0 and are_there


def _after_ref(path: str) -> list:
    """What an update follows: after ref by the actor without its adapters, and after its own log-probs."""
    options = {"schedule": "auto", "min_speedup": 1.05, "lora_targets": ["q_proj"], "verify": "off"}
    engine = SHARED("prefix", path, options)
    data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, options)
    followed = []
    with engine.eval_mode(disable_auto_offload=True):
        with engine.disable_adapter():
            engine.infer_batch(data.copy())
        followed.append(engine._planner._chooser.log_probs)
        engine.infer_batch(data.copy())
        followed.append(engine._planner._chooser.log_probs)
    return followed


def test_an_update_follows_its_log_probs_and_not_refs(ranks, path):
    ((after_ref, after_own),) = ranks(1, path)(_after_ref)
    assert after_ref is None and after_own is not None


REINFORCE = dict(loss_type="reinforce", rollout_is="sequence", rollout_rs="token_k2", rollout_rs_threshold="0.05")
LOSSES = {mode: {"loss_mode": mode} | LOSS_MODES[mode] for mode in LOSSES_OF_ROWS}
LOSSES["bypass_mode reinforce"] = {"loss_mode": "bypass_mode", "rollout_correction": REINFORCE}


def _with_nan(path: str, loss: str, name: str, masked: bool) -> tuple[list[bool], list[float], float]:
    """Of stock's and ours: whether the update moved the model; passes of ours that were not finite; how far gradients
    are from stock's, where both are finite."""
    options = {"policy_loss": LOSSES[loss], "tool_tokens": True, "schedule": "phased", "verify": "off"}
    found, moved = [], []
    for backend in ("fsdp2", "prefix"):
        engine = SHARED(backend, path, options)
        data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, options)
        values = data.setdefault(name, data["old_log_probs"].clone()).values()
        values[int((data["response_mask"].values() == (not masked)).nonzero()[3])] = float("nan")
        before = torch.cat([full(p).flatten() for p in engine.module.parameters()])
        with engine.train_mode(disable_auto_offload=True):
            engine.optimizer_zero_grad()
            metrics = engine.forward_backward_batch(data, _loss(options))["metrics"]
            found.append(torch.cat([full(p.grad).flatten() for p in engine.module.parameters()]))
            engine.optimizer_step()
        moved.append(not torch.equal(before, torch.cat([full(p).flatten() for p in engine.module.parameters()])))
    return moved, metrics["prefix/nonfinite_passes"], _relative(found[1], found[0]) if moved[0] else 0.0


@pytest.mark.parametrize("masked", [False, True], ids=["in the loss", "masked"])
@pytest.mark.parametrize("loss", _some(LOSSES, "vanilla", "dro", "bypass_mode"))
def test_a_nan_in_rollout_log_probs_spoils_the_updates_that_it_spoils_in_stock(ranks, path, loss, masked):
    """verl's bypass mode hands them over as old log-probs; otherwise no loss reads them. Where a loss clamps the ratio,
    the loss is not finite, and gradients are."""
    ((moved, not_finite, error),) = ranks(1, path)(_with_nan, loss, "rollout_log_probs", masked)
    assert moved == [True, True] and not_finite == [0.0] and error <= TOLERANCE
    ((moved, not_finite, error),) = ranks(1, path)(_with_nan, loss, "old_log_probs", masked)
    assert moved[0] == moved[1]
    assert moved[0] == (loss == "vanilla") or loss not in ("vanilla", "dro"), "the first clamps, the other does not"
    assert (not_finite != [0.0]) == (loss != "gpg") and error <= TOLERANCE


def _by_number(path: str) -> dict[str, float]:
    """Errors of a step whose trainer says `num_mini_batch` and not `mini_batch_size` (agentcore-rl-toolkit#131)."""
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    found = []
    for backend in ("prefix", "fsdp2"):
        torch.manual_seed(0)
        configs = _configs(backend, path, {})
        configs["engine_config"].use_dynamic_bsz = True
        worker = TrainingWorker(TrainingWorkerConfig(model_type="language_model", **configs))
        worker.reset()
        worker.set_loss_fn(_loss({}))
        groups = [("a", 20, [5, 9], ""), ("b", 50, [7] * 3, ""), ("c", 40, [9, 8, 3], "")]
        data = _batch(get_rank(), worker.model_config.hf_config.vocab_size, {"groups": groups})
        tu.assign_non_tensor(data, num_mini_batch=2, epochs=2, dataloader_kwargs={"shuffle": False})
        metrics = tu.get(worker.train_mini_batch(data), "metrics")
        params = torch.cat([full(p).flatten() for p in worker.engine.module.parameters()])
        found.append({"params": params} | {name: torch.tensor(metrics[name]) for name in ("loss", "grad_norm")})
    assert len(found[0]["loss"]) == 4
    return {name: _relative(ours, found[1][name]) for name, ours in found[0].items()}


def test_a_step_may_be_cut_by_the_number_of_its_mini_batches(ranks, path):
    (errors,) = ranks(1, path)(_by_number)
    assert max(errors.values()) <= TOLERANCE, errors


def test_passes_without_groups_of_this_rank_are_not_counted():
    """Dummies run where other ranks have more passes; metrics are sums over ranks."""
    ids = torch.nested.as_nested_tensor([torch.arange(7)] * 2, layout=torch.jagged)
    rows, group = BatchRows(tu.get_tensordict({"input_ids": ids})), Group.of_prompt((0, 1), 4, (2, 2))
    runner = SimpleNamespace(meter=Meter(), forward=SimpleNamespace(keep_attention=False))
    phased = PhasedPass((group,), waves=(Wave((group,)), Wave(), Wave()))
    for passes, counts in (((phased, PhasedPass()), (0, 1)), ((PackedPass((group,)), PackedPass()), (1, 0))):
        metrics = plan_metrics(rows, [group], Plan(passes), runner, Loss(None))
        assert (metrics["prefix/packed_passes"], metrics["prefix/waves"]) == counts


@pytest.mark.parametrize(
    ("lens", "budget"), [([7] * 8, 8), ([5, 5, 5, 5, 5], 14), ([9, 8, 2, 2, 2, 1], 12), ([30] * 6 + [3] * 6, 64)]
)
def test_stocks_passes_are_as_many_as_verls_hard_limit_makes(lens, budget):
    """verl#7553: since rows are whole, more than their tokens over the limit, rounded up."""
    offsets = torch.tensor([0, *itertools.accumulate(lens)])
    rows = torch.nested.nested_tensor_from_jagged(torch.zeros(sum(lens), dtype=torch.int64), offsets)
    micro_batches, _ = rearrange_micro_batches(tu.get_tensordict({"input_ids": rows}), max_token_len=budget)
    shape = ModelShape(
        linear=1.0, head=1.0, pair=1.0, windows=(None,), activations=1.0, boundary=1.0, kv=1.0, vocab_size=1
    )
    groups = [Group.of_prompt((i,), 0, (n - 1,)) for i, n in enumerate(lens)]
    assert len(shape.stock_passes(groups, budget, dense_mask=False)) == len(micro_batches)
