"""`prefix.skip_zero_advantage`: rows whose advantages are all zero are in no pass of an update, which stays that of
verl's stock fsdp2 engine. One and two gloo ranks, fp32. Does not exercise CUDA."""

from unittest import mock

import numpy as np
import pytest
import torch
from engines import PAD, TOLERANCE, _batch, _engine, _loss, _relative
from pairs import every_value
from shared_models import SharedModels
from torch.distributed import all_reduce, get_rank
from whole_tensors import whole

from verl_prefix.config.actor import LOSSES_OF_ROWS, MULTIPLES_OF_ADVANTAGE
from verl_prefix.core.group_parts import leave_out
from verl_prefix.core.groups import Group
from verl_prefix.engine import dead_rows
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.together import RankError
from verl_prefix.testing import write_tiny_model

PHASED = {"schedule": "phased", "wave_tokens": 40}
EVERYONE = ("a", "b", "c", "d", "e", "f", PAD)
ULYSSES = {"ulysses": 2, "attn_implementation": "varlen_on_cpu"}
# dead: see `engines.without_advantage`.
CASES = {
    "packed": {"schedule": "packed", "dead": ("b", "e")},
    "phased": PHASED | {"dead": ("b", "e")},
    "auto": {"min_speedup": 1e-6, "dead": ("b", "e")},
    "rows_of_live_groups": {"schedule": "packed", "dead": 2},
    "rows_of_live_groups_phased": PHASED | {"dead": 2, "budget": 90},
    "a_rank_of_dead_rows": {"schedule": "packed", "dead": ("e", "f")},
    "a_rank_of_dead_rows_phased_masked": PHASED | {"dead": ("e", "f"), "tool_tokens": True},
    "all_dead": {"schedule": "packed", "dead": EVERYONE},
    "all_dead_phased_exchanged": PHASED | {"dead": EVERYONE, "exchange": "auto"},
    "exchanged": {"schedule": "packed", "dead": ("b", "e"), "exchange": "auto"},
    "exchanged_auto": {"dead": 2, "exchange": "auto", "min_speedup": 1e-6},
    "turns": {"turns": True, "schedule": "packed", "dead": ("a", "c")},
    "turns_rows": {"turns": True, "schedule": "packed", "dead": 2},
    "turns_rows_phased": {"turns": "odd", "schedule": "phased", "wave_tokens": 20, "dead": 2},
    "turns_exchanged": {"turns": "odd", "schedule": "packed", "dead": 3, "exchange": "auto"},
    "turns_all_dead_exchanged": {"turns": True, "schedule": "packed", "dead": 1, "exchange": "auto"},
    "padded": {"schedule": "packed", "padded": True, "dead": 2},
    "ulysses": ULYSSES | {"schedule": "packed", "dead": ("b", "e")},
    "ulysses_rows_phased": ULYSSES | PHASED | {"dead": 2},
    "ulysses_turns_all_dead": ULYSSES | {"turns": True, "schedule": "packed", "dead": 1},
    "static_batch_size": {"use_dynamic_bsz": False, "dead": 3},
    "empty_responses": {"schedule": "packed", "empty": "ce", "dead": ("b", "f")},
    "no_entropy": {"schedule": "packed", "calculate_entropy": False, "dead": ("e", "f")},
    "seq_mean": {"schedule": "packed", "loss_agg_mode": "seq-mean-token-mean", "dead": 2},
    **{
        f"loss_{mode}": {"schedule": "packed", "dead": ("b", "e", "f"), "policy_loss": {"loss_mode": mode}}
        for mode in MULTIPLES_OF_ADVANTAGE[1:]
    },
}  # fmt: skip
PACKED = {"schedule": "packed", "entropy_coeff": 0.0, "verify": "off", "skip_zero_advantage": True}
QUICK = ("all_dead_phased_exchanged", "turns_rows")
# Every loss is in test_engine_equivalence.py.
IN_MORE = every_value({name: CASES[name] for name in CASES if name[:5] != "loss_" or name == "loss_gspo"}, QUICK)
SHARED = SharedModels(_engine)  # on ranks


def _updates(backend: str, path: str, options: dict) -> dict:
    """What two steps of Adam leave, the first over two mini-batches, and how many tokens went through a layer."""
    options = {"entropy_coeff": 0.0, "verify": "off"} | options
    if "ulysses" in options:
        import varlen  # noqa: F401
    rank = get_rank() // options.get("ulysses", 1)
    if backend == "fsdp2":  # ranks have the same rows, of which FSDP takes the mean
        options = {name: x for name, x in options.items() if name != "ulysses"}
    engine, counts = SHARED(backend, path, options), []
    layer = engine.module.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda module, args: counts.append(args[0].shape[:-1].numel()))
    loss, norms, metrics = torch.zeros(1, dtype=torch.float64), [], []
    with engine.train_mode(disable_auto_offload=True):
        for mini_batches in (2, 1):
            engine.optimizer_zero_grad()
            for i in range(mini_batches):
                dead = options["dead"]
                data = _batch(rank, 200, options | {"dead": dead + i if isinstance(dead, int) and dead > 1 else dead})
                output = engine.forward_backward_batch(data, _loss(options))
                loss += sum(output["loss"])
                metrics.append(output["metrics"])
            norms.append(engine.optimizer_step())
        grads = whole({n: p.grad for n, p in engine.module.named_parameters()})
    hook.remove()
    all_reduce(loss)
    params = torch.cat([p.flatten() for p in whole(dict(engine.module.named_parameters())).values()])
    return dict(
        loss=loss, norms=torch.tensor(norms), params=params, grads=torch.cat([g.flatten() for g in grads.values()]),
        metrics=metrics, tokens=sum(counts),
    )  # fmt: skip


def _against_stock(models: dict, case: str) -> tuple[dict[str, float], dict]:
    """Relative errors of ours, and what it says of itself."""
    from verl.utils.metric import Metric
    from verl.utils.torch_functional import allgather_dict_into_dict

    options = CASES[case]
    stock, kept, ours = (
        _updates(backend, models["qwen3"], options | more)
        for backend, more in (("fsdp2", {}), ("prefix", {}), ("prefix", {"skip_zero_advantage": True}))
    )
    errors = {name: _relative(ours[name], stock[name]) for name in ("loss", "norms", "params", "grads")}
    for theirs, of_ours in zip(stock["metrics"], ours["metrics"], strict=True):
        assert set(theirs) <= set(of_ours)
        gathered = allgather_dict_into_dict({n: x for n, x in of_ours.items() if isinstance(x, Metric)})
        assert all(torch.isfinite(torch.tensor(float(Metric.aggregate_dp(x)))) for x in gathered.values())
        logged = allgather_dict_into_dict({"actor/pg_loss": theirs["actor/pg_loss"]})["actor/pg_loss"]
        mine, logged = (float(Metric.aggregate_dp(x)) for x in (gathered["actor/pg_loss"], logged))
        errors["pg_loss"] = max(errors.get("pg_loss", 0.0), abs(mine - logged) / max(abs(logged), 1e-30))
    assert all("prefix/zero_advantage_rows" not in one for one in kept["metrics"])
    rows = sum(one["prefix/zero_advantage_rows"][0] for one in ours["metrics"])
    in_passes = sum(one[f"prefix/{name}"][0] for one in ours["metrics"] for name in ("groups", "stock_rows"))
    return errors, {"rows": rows, "tokens": ours["tokens"], "kept": kept["tokens"], "in_passes": in_passes}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {"qwen3": write_tiny_model(tmp_path_factory.mktemp("zero"))}


def _world(world: int, case: str) -> object:
    marks = () if case in QUICK else pytest.mark.more if case in IN_MORE else pytest.mark.full
    marks = pytest.mark.full if world == 1 else marks
    return pytest.param(world, case, marks=marks, id=f"{world}-{case}")


WORLDS = [_world(world, case) for world in (2, 1) for case in CASES if world == 2 or "ulysses" not in CASES[case]]


@pytest.mark.parametrize(("world", "case"), WORLDS)
def test_an_update_without_rows_of_no_advantage_is_stocks(ranks, models, world, case):
    found = ranks(world, models)(_against_stock, case)
    for errors, _ in found:
        assert max(errors.values()) <= TOLERANCE, errors
    tokens, kept = (sum(told[name] for _, told in found) for name in ("tokens", "kept"))
    rows = {told["rows"] for _, told in found}
    if world == 2 or CASES[case]["dead"] != ("e", "f"):  # which are of the second rank
        assert tokens < kept and len(rows) == 1 and rows.pop() > 0
    assert all((told["in_passes"] == 0) == case.startswith("all_dead") for _, told in found)


def _named(data, uids: tuple[str, ...]) -> frozenset[int]:
    from verl.utils import tensordict_utils as tu

    return frozenset(row for row, uid in enumerate(tu.get(data, "uid")) if uid in uids)


def _wrong(models: dict, kind: str) -> tuple[float, list[str]]:
    """How far an update is off that leaves out rows with a gradient, and how its self-check ends, raising or not."""
    options = {"schedule": "packed", "dead": ("b", "e"), "skip_zero_advantage": True}
    if kind == "dro":
        options["policy_loss"] = {"loss_mode": "dro", "dro_beta": 0.5}
        wrong = mock.patch.object(dead_rows, "gradient_without_advantage", lambda config: "")
    elif kind == "a live group":
        real = dead_rows.find_dead
        wrong = mock.patch.object(
            dead_rows, "find_dead", lambda loss, rows: real(loss, rows) | _named(rows.data, ("a", "f"))
        )
    else:  # one row of the last rank
        real = dead_rows.find_dead
        wrong = mock.patch.object(
            dead_rows, "find_dead", lambda loss, rows: real(loss, rows) | _named(rows.data, ("f",))
        )
    stock, said = _updates("fsdp2", models["qwen3"], options), []
    with wrong:
        ours = _updates("prefix", models["qwen3"], options)
        for action in ("raise", "fallback"):
            try:
                checked = options | {"verify": "first_step", "verify_action": action}
                said.append(_relative(_updates("prefix", models["qwen3"], checked)["grads"], stock["grads"]))
            except RuntimeError as error:
                said.append(str(error))
    return _relative(ours["grads"], stock["grads"]), said


@pytest.mark.parametrize(
    "kind", [*(pytest.param(x, marks=pytest.mark.more) for x in ("dro", "a live group")), "a row of the last rank"]
)
def test_rows_with_a_gradient_that_are_left_out_are_far_off_and_every_rank_sees_it(ranks, models, kind):
    for error, (raised, after) in ranks(2, models)(_wrong, kind):
        assert error > 100 * TOLERANCE
        assert "left out have a gradient; set actor_rollout_ref.actor.prefix.skip_zero_advantage=False" in raised
        assert after <= TOLERANCE  # verl's own path


def _gradients(models: dict) -> dict[str, list[bool]]:
    """By loss, whether verl's has a gradient of rows without advantage, of others, and of all."""
    from verl.utils import tensordict_utils as tu

    found = {}
    for mode in LOSSES_OF_ROWS:
        for more in ({}, {"entropy_coeff": 0.01}, {"use_kl_loss": True}):
            options = {"entropy_coeff": 0.0, "policy_loss": {"loss_mode": mode, "dro_beta": 0.5}} | more
            data = _batch(get_rank(), 200, options | {"dead": ("a", "b")})
            tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=100)
            loss, dead = Loss(_loss(options)), sorted(_named(data, ("a", "b")))
            live = [row for row in range(len(data)) if row not in dead]
            several = (dead, live, [*dead, *live], live[:1])
            found[mode + "".join(more)] = [
                dead_rows.has_gradient(loss, BatchRows(data), rows, None) for rows in several
            ]
    return found


def test_losses_that_let_rows_be_left_out_have_no_gradient_of_them(ranks, models):
    for loss, found in ranks(1, models)(_gradients)[0].items():
        assert found == [loss not in MULTIPLES_OF_ADVANTAGE, True, True, True], loss


def _refuses(models: dict) -> list[str]:
    """What an update says whose loss is not verl's own, or has a gradient of all rows; and whether outputs that are
    wanted back, and a batch with a NaN, have all rows computed."""
    from verl.utils import tensordict_utils as tu

    options = {"schedule": "packed", "verify": "off", "skip_zero_advantage": True, "dead": ("b",), "entropy_coeff": 0.0}
    engine, said = SHARED("prefix", models["qwen3"], options), []
    nan = _batch(get_rank(), 200, options)
    nan["old_log_probs"].values()[0] = torch.nan
    wanted = _batch(get_rank(), 200, options)
    tu.assign_non_tensor(wanted, return_model_output=True)
    with engine.train_mode(disable_auto_offload=True):
        for loss in (lambda **named: _loss(options)(**named), _loss(options | {"entropy_coeff": 0.1})):
            try:
                engine.forward_backward_batch(_batch(get_rank(), 200, options), loss)
            except ValueError as error:
                said.append(str(error))
        for data in (wanted, nan):
            engine.optimizer_zero_grad()
            metrics = engine.forward_backward_batch(data, _loss(options))["metrics"]
            said.append(metrics["prefix/zero_advantage_rows"][0])
    return said


def test_a_loss_that_cannot_is_refused_and_what_needs_every_row_gets_it(ranks, models):
    ((unknown, entropy, *rows),) = ranks(1, models)(_refuses)
    assert (
        "this is another loss" in unknown and "under actor_rollout_ref.actor.entropy_coeff=0.1; set it to 0" in entropy
    )
    assert rows == [0, 0]


def _one_rank_fails(models: dict) -> str:
    engine = SHARED("prefix", models["qwen3"], PACKED)

    def fails(loss: Loss, rows: BatchRows) -> frozenset[int]:
        raise ValueError("injected")

    with pytest.MonkeyPatch.context() as patch, engine.train_mode(disable_auto_offload=True):
        if get_rank() == 0:
            patch.setattr(dead_rows, "find_dead", fails)
        with pytest.raises((ValueError, RankError)) as raised:
            engine.forward_backward_batch(_batch(get_rank(), 200, PACKED), _loss(PACKED))
    return str(raised.value)


def test_where_one_rank_cannot_say_which_rows_are_dead_the_others_do_not_wait(ranks, models):
    failed, other = ranks(2, models)(_one_rank_fails)
    assert failed == "injected" and "rank 0" in other


def _nothing_to_compute(models: dict, empty: str) -> tuple[list[float], list[float]]:
    """Losses, and passes that were not finite, under a mean over the tokens of rows of which these have none, or over
    none where no row has any."""
    from verl.utils import tensordict_utils as tu

    options = {"schedule": "packed", "verify": "off", "empty": empty}
    engine = SHARED("prefix", models["qwen3"], options)

    def mean(model_output: dict, data: object, dp_group: object) -> tuple[torch.Tensor, dict]:
        mask = data["response_mask"]
        rows = zip(model_output["log_probs"].unbind(), mask.unbind() if mask.is_nested else mask, strict=True)
        return torch.cat([row[:1] for row, of_row in rows if of_row.any()] or [torch.zeros(0)]).mean(), {}

    data = _batch(0, 200, options)
    tu.assign_non_tensor(data, return_model_output=True)
    with engine.train_mode(disable_auto_offload=True):
        output = engine.forward_backward_batch(data, lambda **named: mean(**named))
    return output["loss"], output["metrics"]["prefix/nonfinite_passes"]


@pytest.mark.more
def test_a_mean_of_no_token_is_no_pass_that_is_not_finite(ranks, models):
    (((loss,), not_finite),) = ranks(1, models)(_nothing_to_compute, EVERYONE)
    assert loss != loss and not_finite == [0.0], "as stock's"
    ((of_passes, not_finite),) = ranks(1, models)(_nothing_to_compute, "ce")
    assert of_passes[-1] == 0 and all(loss == loss for loss in of_passes) and not_finite == [0.0]


def test_whole_units_are_left_out():
    group = Group.of_prompt((3, 4, 5), 10, (2, 0, 4))
    computed, idle = leave_out([group, Group.of_prompt((0, 1), 3, (1, 1))], {0, 1, 4, 5})
    assert [one.rows for one in computed] == [(3,)] and [one.rows for one in idle] == [(4, 5), (0, 1)]
    assert leave_out([group], set()) == ([group], [])


def test_equal_rewards_may_have_an_advantage_by_rounding():
    """What the page on options says of verl's GRPO."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    def most(reward: float, n: int) -> float:
        rewards = torch.tensor([0.0, reward]).expand(n, 2)
        return compute_grpo_outcome_advantage(rewards, torch.ones(n, 2), np.array(["a"] * n))[0].abs().max().item()

    assert all(most(reward, 7) > 1e-3 for reward in (0.1, 0.3, 0.7))
    assert 0.1 < max(most(reward, n) for reward in (0.1, 0.3, 0.7) for n in range(2, 33)) < 0.11
    assert not any(most(reward, n) for reward in (0.0, 1.0) for n in range(2, 33))
