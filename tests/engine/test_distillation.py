"""verl's losses of distillation on shared prefixes: their updates are those of verl's stock fsdp2 engine. One and two
gloo ranks, fp32 and bf16; teachers' rows are random. Does not exercise CUDA."""

from itertools import chain

import pytest
import torch
from engines import PAD, TOLERANCE, _batch, _engine, _loss, _relative, _responses
from pairs import every_value
from shared_models import SharedModels
from teachers import ONLY, distillation_loss, tell_update
from torch.distributed import all_reduce, get_rank, get_world_size
from whole_tensors import whole

from verl_prefix.engine import fields, grouping, outputs
from verl_prefix.engine.dead_rows import find_dead
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.rows import BatchRows
from verl_prefix.testing import write_tiny_model

VOCAB = 200
DISTILLED = {"topk": {}, "topk_only": ONLY, "k3": {"loss_mode": "k3"}}
PHASED = {"schedule": "phased", "wave_tokens": 40}
ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# distillation: see `teachers`; other options: `engines`. Stock has all rows of a rank in one micro-batch.
CASES = {
    "packed": {"schedule": "packed"},
    "packed_only": {"schedule": "packed", "distillation": ONLY},
    "phased": PHASED,
    "phased_only": PHASED | {"distillation": ONLY},
    "auto_only": {"min_speedup": 1e-6, "distillation": ONLY},
    "passes": {"schedule": "packed", "budget": 90, "tool_tokens": True},
    "passes_only": {"schedule": "packed", "budget": 90, "tool_tokens": True, "distillation": ONLY},
    "phased_in_pieces_only": PHASED | {"budget": 100, "tool_tokens": True, "distillation": ONLY},
    "exchanged": {"schedule": "packed", "exchange": "auto"},
    "exchanged_only_phased": PHASED | {"exchange": "auto", "tool_tokens": True, "distillation": ONLY},
    "turns": {"turns": True, "schedule": "packed"},
    "turns_only": {"turns": True, "schedule": "packed", "distillation": ONLY},
    "turns_kept_phased_only": dict(turns="kept", schedule="phased", wave_tokens=20, distillation=ONLY),
    "turns_odd_exchanged_only": dict(turns="odd", schedule="packed", exchange="auto", distillation=ONLY),
    "turns_odd_exchanged_phased": dict(turns="odd", schedule="phased", wave_tokens=20, exchange="auto"),
    "logits_in_chunks": {"schedule": "packed", "logits_chunk": 7, "gradient_checkpointing": True},
    "logits_in_chunks_phased_only": PHASED | dict(logits_chunk=7, gradient_checkpointing=True, distillation=ONLY),
    "logits_in_chunks_by_verls_chunks": dict(
        schedule="packed", logits_chunk=7, distillation=ONLY | {"use_chunked_topk": True, "chunked_topk_chunk_size": 3}
    ),
    "offloaded_only": PHASED | {"offload": True, "gradient_checkpointing": True, "distillation": ONLY},
    "entropy_only": {"schedule": "packed", "calculate_entropy": True, "distillation": ONLY},
    "entropy_and_kl_loss": dict(schedule="packed", calculate_entropy=True, entropy_coeff=0.01, use_kl_loss=True),
    "temperature_per_row_only": {"schedule": "packed", "temperature": "per_row", "distillation": ONLY},
    "padded_only": {"schedule": "packed", "padded": True, "distillation": ONLY},
    "empty_responses_only": {"schedule": "packed", "empty": "ce", "distillation": ONLY},
    "seq_mean_only": {"schedule": "packed", "loss_agg_mode": "seq-mean-token-mean", "distillation": ONLY},
    "unclamped_only": {"schedule": "packed", "distillation": ONLY | {"log_prob_min_clamp": None}},
    "topk_as_reward": {"schedule": "packed", "tool_tokens": True, "distillation": {"use_policy_gradient": True}},
    "topk_as_reward_alone": PHASED | {"distillation": ONLY | {"use_policy_gradient": True}},
    "tied_only": {"family": "tied", "schedule": "phased", "wave_tokens": 40, "distillation": ONLY},
    "ulysses_only": {"ulysses": 2, "schedule": "packed", "distillation": ONLY},
    "ulysses_phased": PHASED | {"ulysses": 2, "logits_chunk": 7},
    "ulysses_turns_only": dict(ulysses=2, turns="kept", schedule="phased", wave_tokens=20, distillation=ONLY),
    **{
        f"{mode}{'_as_reward' * reward}": {
            "schedule": "packed" if reward else "phased", "exchange": "auto", "tool_tokens": True,
            "distillation": {"loss_mode": mode, "use_policy_gradient": reward},
        }
        for mode in ESTIMATORS for reward in (False, True) if reward or mode != "k1"
    },
    "k3_alone": {"schedule": "packed", "distillation": ONLY | {"loss_mode": "k3"}},
    "checked": {"schedule": "packed", "verify": "first_step"},
    "checked_only_phased_exchanged": PHASED | dict(verify="first_step", exchange="auto", distillation=ONLY),
    "checked_turns_only": dict(turns="kept", schedule="phased", wave_tokens=20, verify="first_step", distillation=ONLY),
    "checked_k3": {"schedule": "packed", "verify": "first_step", "distillation": {"loss_mode": "k3"}},
}  # fmt: skip
QUICK = (
    "packed", "passes_only", "phased_in_pieces_only", "turns_odd_exchanged_only",
    "logits_in_chunks_phased_only", "topk_as_reward", "k1_as_reward",
)  # fmt: skip
ALONE = ("packed_only", "entropy_only")  # on one rank in make test
IN_MORE = every_value(CASES, QUICK)
SHARED = SharedModels(_engine)  # on ranks


def _update(backend: str, path: str, options: dict) -> dict:
    """An optimizer step."""
    from verl.utils import tensordict_utils as tu

    options = dict(verify="off", budget=2000, calculate_entropy=False, entropy_coeff=0.0, distillation={}) | options
    is_stock, rank = backend == "fsdp2", options.get("rank", get_rank() // options.get("ulysses", 1))
    # Stock is right under Ulysses with flash attention alone. Its two ranks have the same rows instead.
    options |= {"budget": 10000, "ulysses": 1} if is_stock else {}
    engine, data = SHARED(backend, path, options), _batch(rank, VOCAB, options)
    if "exchange" in options:  # every group has rows on every rank
        of_all = tu.concat_tensordict([_batch(one, VOCAB, options) for one in range(get_world_size())])
        data = tu.index_select_tensor_dict(of_all, [*range(rank, len(of_all), get_world_size())])
    tell_update(data, options)
    tu.assign_non_tensor(data, return_model_output=options.get("return_model_output", False))
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, options.get("loss") or distillation_loss(options))
        grads = whole({n: p.grad for n, p in engine.module.named_parameters()})
        norm = engine.optimizer_step()
    loss = torch.tensor([sum(output["loss"])], dtype=torch.float64)
    all_reduce(loss)
    found = {name: torch.cat(_responses(x, data)) for name, x in output["model_output"].items()}
    return found | dict(
        loss=loss, grad_norm=torch.tensor([norm]), metrics=output["metrics"],
        params=torch.cat([p.flatten() for p in whole(dict(engine.module.named_parameters())).values()]),
        grads=torch.cat([g.flatten() for g in grads.values()]),
    )  # fmt: skip


def _logged(metrics: dict, names: list[str]) -> dict[str, float]:
    """As verl's worker and trainer have them of all ranks."""
    from verl.utils.metric import Metric, reduce_metrics
    from verl.utils.torch_functional import allgather_dict_into_dict

    gathered = allgather_dict_into_dict({n: metrics[n] for n in names if n in metrics})
    flat = {
        name: [Metric.aggregate_dp(x)] if isinstance(x[0], Metric) else [*chain.from_iterable(x)]
        for name, x in gathered.items()
    }
    return {name: float(x) for name, x in reduce_metrics(flat).items()}


def _of_passes(metrics: dict) -> list[str]:
    """Names of means over a pass, which follow how rows fall into passes, in stock as well."""
    from verl.utils.metric import AggregationType, Metric

    is_metric = {name: isinstance(x, Metric) for name, x in metrics.items()}
    return [n for n, x in metrics.items() if not is_metric[n] or x.aggregation == AggregationType.MEAN]


def _errors(ours: dict, stock: dict, means: bool) -> dict[str, float]:
    """Relative errors of an update, and of metrics. means: those of `_of_passes` are compared, too."""
    names = sorted(set(stock["metrics"]) - set(() if means else _of_passes(stock["metrics"])))
    mine, logged = (_logged(one["metrics"], names) for one in (ours, stock))
    assert mine.keys() == logged.keys()
    found = {name: _relative(ours[name], stock[name]) for name in ("loss", "grad_norm", "grads", "params")}
    return found | {name: abs(mine[name] - x) / max(abs(x), 1e-2) for name, x in logged.items()}


def _against_stock(models: dict, case: str) -> tuple[dict[str, float], dict]:
    options = CASES[case]
    path = models[options.get("family", "qwen3")]
    ours, stock = (_update(backend, path, options) for backend in ("prefix", "fsdp2"))
    if "exchange" in options and get_world_size() > 1:
        assert ours["metrics"]["prefix/exchanged_rows"][0] > 0
    # With one pass of the rows that stock has.
    means = options.get("schedule") == "packed" and not {"budget", "exchange"} & {*options}
    return _errors(ours, stock, means), ours["metrics"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {
        family: write_tiny_model(tmp_path_factory.mktemp(family), **more)
        for family, more in (("qwen3", {}), ("tied", {"tie_word_embeddings": True}))
    }


def _world(world: int, case: str) -> object:
    quick = case in (ALONE if world == 1 else QUICK)
    in_more = world == 2 and case in IN_MORE
    return pytest.param(world, case, marks=() if quick else pytest.mark.more if in_more else pytest.mark.full)


@pytest.mark.parametrize(
    ("world", "case"),
    [_world(world, case) for world in (2, 1) for case in CASES if world == 2 or "ulysses" not in case],
)
def test_an_update_of_distillation_is_stocks(ranks, models, world, case):
    for errors, metrics in ranks(world, models)(_against_stock, case):
        assert max(errors.values()) <= TOLERANCE, errors
        # Rows of other temperatures share nothing where they are cut, as on the first rank.
        assert metrics["prefix/tokens_saved"][0] > 0 or (world == 1 and "temperature" in case)
        assert ("prefix/verify_log_probs" in metrics) == ("verify" in CASES[case])


def test_every_loss_of_distillation_that_verl_has_is_among_those_tested():
    from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY

    assert {"forward_kl_topk", *ESTIMATORS} == set(DISTILLATION_LOSS_REGISTRY)


def test_outputs_of_topk_are_those_that_verl_makes():
    offsets = torch.tensor([0, 2])
    teacher = {
        name: torch.nested.nested_tensor_from_jagged(x, offsets)
        for name, x in (("teacher_ids", torch.zeros(2, 1).long()), ("teacher_logprobs", -torch.ones(2, 1)))
    }
    made = distillation_loss({"distillation": {}})(data=teacher, student_logits=torch.randn(1, 2, 9))
    assert (*made,) == outputs.TOPK and (*teacher,) == fields.TEACHER


def _in_half_precision(models: dict, schedule: str, distillation: str) -> dict[str, dict[str, float]]:
    """What ours and stock miss in bf16, where fp32 stock is truth enough."""
    options = {"schedule": schedule, "distillation": DISTILLED[distillation], "turns": "kept"}
    options["return_model_output"] = True
    truth = _update("fsdp2", models["qwen3"], options)
    half = {name: _update(name, models["qwen3"], options | {"param_dtype": "bf16"}) for name in ("prefix", "fsdp2")}
    names = [name for name in truth if name in ("log_probs", "distillation_losses", "student_mass", "grads")]
    return {
        arm: {name: _relative(found[name].float(), truth[name].float()) for name in names}
        for arm, found in half.items()
    }


@pytest.mark.parametrize("distillation", [pytest.param("topk", marks=pytest.mark.more), "topk_only"])
@pytest.mark.parametrize("schedule", [pytest.param("packed", marks=pytest.mark.more), "phased"])
def test_bf16_misses_fp32_by_no_more_than_stock_does(ranks, models, schedule, distillation):
    for found in ranks(1, models)(_in_half_precision, schedule, distillation):
        assert {"distillation_losses", "grads"} <= found["fsdp2"].keys()
        for name, stock in found["fsdp2"].items():
            assert found["prefix"][name] <= 1.3 * stock, (name, found)


def _shifted(patch: pytest.MonkeyPatch) -> None:
    """Every token has the teacher's row of the token before it."""
    made = outputs.TokenOutputs.__init__

    def init(self, *args):
        made(self, *args)
        self._teacher = self._teacher._replace(rows={name: x.roll(1, 0) for name, x in self._teacher.rows.items()})

    patch.setattr(outputs.TokenOutputs, "__init__", init)


def _anothers(patch: pytest.MonkeyPatch) -> None:
    """Rows have each other's teachers."""
    made = outputs.TokenOutputs.__init__

    def init(self, *args):
        made(self, *args)
        self._teacher = self._teacher._replace(rows={name: x.flip(0) for name, x in self._teacher.rows.items()})

    patch.setattr(outputs.TokenOutputs, "__init__", init)


def _of_a_later_turn(patch: pytest.MonkeyPatch) -> None:
    """A response that a later prompt contains is computed there, with that row's teacher."""
    mixed = grouping.mix_rows
    patch.setattr(
        grouping,
        "mix_rows",
        lambda tokens, offsets, values: tokens if isinstance(values, range) else mixed(tokens, offsets, values),
    )


BROKEN = {"shifted": _shifted, "anothers": _anothers, "of_a_later_turn": _of_a_later_turn}


def _breaks(models: dict, kind: str, distillation: str) -> tuple[float, str]:
    """How far an update is off, and what the self-check says."""
    options = {"schedule": "packed", "turns": "kept", "distillation": DISTILLED[distillation]}
    stock, said = _update("fsdp2", models["qwen3"], options), ""
    with pytest.MonkeyPatch.context() as patch:
        BROKEN[kind](patch)
        error = _relative(_update("prefix", models["qwen3"], options)["grads"], stock["grads"])
        try:
            _update("prefix", models["qwen3"], options | {"verify": "first_step"})
        except RuntimeError as raised:
            said = str(raised)
    return error, said


@pytest.mark.parametrize("distillation", [pytest.param("topk", marks=pytest.mark.more), "topk_only"])
@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x == "of_a_later_turn" else pytest.mark.more) for x in BROKEN]
)
def test_a_wrong_row_of_the_teacher_is_far_off_and_the_self_check_sees_it(ranks, models, kind, distillation):
    for error, said in ranks(1, models)(_breaks, kind, distillation):
        assert error > 100 * TOLERANCE
        assert "The shared-prefix path is wrong for this model" in said


def _without_a_token(models: dict, distillation: str, kind: str) -> list[dict[str, float]]:
    """Metrics of an update in which the second rank has no token that counts, and by verl's engine, which would raise,
    of one in which it has the first rank's rows, too: sums are means over the tokens of all ranks."""
    rows = [("a", 23, [9, 17, 5], ""), ("b", 41, [3, 11], "")]
    empty = [("c", 9, [0, 0], ""), ("d", 12, [0], "")] if kind == "empty" else [(PAD, 15, [1], "pad")] * 3
    options = {"schedule": "packed", "distillation": DISTILLED[distillation]}
    options["groups"] = empty if get_rank() else rows
    ours = _update("prefix", models["qwen3"], options | {"budget": 90})
    stock = _update("fsdp2", models["qwen3"], options | {"groups": rows, "rank": 0})
    sums = [name for name in stock["metrics"] if name not in _of_passes(stock["metrics"])]
    return [_logged(one["metrics"], sums) for one in (ours, stock)]


@pytest.mark.parametrize("kind", ["empty", "masked"])
@pytest.mark.parametrize("distillation", [pytest.param("topk", marks=pytest.mark.more), "topk_only", "k3"])
def test_a_rank_without_a_token_that_counts_adds_nothing_to_a_sum(ranks, models, distillation, kind):
    for ours, stock in ranks(2, models)(_without_a_token, distillation, kind):
        assert "distillation/loss" in stock and "distillation/loss_min" in stock
        for name, x in stock.items():
            assert abs(ours[name] - x) <= TOLERANCE * max(abs(x), 1e-2), (name, ours, stock)


def _padding_alone(models: dict, loss: str) -> dict[str, float]:
    """Errors of an update on verl's own path, in which one of this rank's micro-batches is padding alone, against
    verl's engine with all rows in one micro-batch. Under mini_batches=prompts padding falls as it comes."""
    rows = [("a", 23, [9, 17], ""), ("b", 41, [11, 5], ""), (PAD, 60, [1], "pad")]
    given = {"groups": rows, "distillation": DISTILLED.get(loss, DISTILLED["k3"])}
    if loss == "bypass_mode":
        given["loss"] = _loss({"policy_loss": {"loss_mode": loss}, "use_kl_loss": True})
    ours = _update("prefix", models["qwen3"], given | {"schedule": "stock", "mini_batches": "prompts", "budget": 61})
    stock = _update("fsdp2", models["qwen3"], given)
    # Metrics that are floats have no sum or mean of tokens: those of padding would be averaged in.
    floats = {name: x[0] for name, x in stock["metrics"].items() if name.startswith(("kl_coef", "actor/kl_coef"))}
    assert bool(floats) == (loss == "bypass_mode"), stock["metrics"]
    errors = {name: max(abs(x - value) for x in ours["metrics"][name]) for name, value in floats.items()}
    return _errors(ours, stock, means=False) | errors


@pytest.mark.parametrize("loss", ["topk", "topk_only", pytest.param("k3", marks=pytest.mark.more), "bypass_mode"])
def test_a_micro_batch_of_padding_alone_adds_nothing_on_verls_own_path(ranks, models, loss):
    for errors in ranks(1, models)(_padding_alone, loss):
        assert max(errors.values()) <= TOLERANCE, errors


def _masked_nan(models: dict) -> list[float]:
    """Gradient norms of stock and ours, whose teacher has a NaN where response_mask is 0."""
    tell = tell_update

    def poisoned(data: object, options: dict) -> None:
        tell(data, options)
        row = next(row for row, mask in enumerate(data["response_mask"].unbind()) if not mask.all())
        masked = int((data["response_mask"].unbind()[row] == 0).nonzero()[0])
        prompt_len = data["input_ids"].unbind()[row].shape[0] - data["response_mask"].unbind()[row].shape[0]
        data["teacher_logprobs"].unbind()[row][prompt_len + masked - 1] = float("nan")

    given = {"schedule": "packed", "tool_tokens": True, "distillation": ONLY | {"log_prob_min_clamp": None}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "tell_update", poisoned)
        return [float(_update(backend, models["qwen3"], given)["grad_norm"]) for backend in ("fsdp2", "prefix")]


def test_a_nan_of_the_teacher_spoils_an_update_where_its_token_is_masked_as_by_stock(ranks, models):
    for norms in ranks(1, models)(_masked_nan):
        assert all(norm != norm for norm in norms), norms


def _own_losses(models: dict) -> dict[str, dict]:
    """What is said of updates by losses that are not verl's own."""
    from verl.trainer.distillation import losses

    options, found = {"schedule": "packed", "exchange": "auto"}, {}
    wrapped = distillation_loss({"entropy_coeff": 0.0, "distillation": {}})
    own = {"loss": lambda **named: wrapped(**named)}
    found["of logits"] = _update("prefix", models["qwen3"], options | own)["metrics"]
    theirs = losses.DISTILLATION_LOSS_REGISTRY["forward_kl_topk"]
    with pytest.MonkeyPatch.context() as patch:
        own = lambda **named: theirs(**named)  # noqa: E731
        patch.setitem(losses.DISTILLATION_LOSS_REGISTRY, "forward_kl_topk", own)
        found["registered"] = _update("prefix", models["qwen3"], options)["metrics"]
    found["verls"] = _update("prefix", models["qwen3"], options)["metrics"]
    return found


def test_a_loss_that_is_not_verls_own_is_shared_where_its_logits_are(ranks, models):
    for found in ranks(2, models)(_own_losses):
        assert found["of logits"]["prefix/stock_rows"][0] > 0 and "prefix/tokens_saved" not in found["of logits"]
        # A loss under verl's name may read what does not travel.
        assert "prefix/exchanged_rows" not in found["registered"] and found["registered"]["prefix/tokens_saved"][0] > 0
        assert found["verls"]["prefix/exchanged_rows"][0] > 0


def _refuses(models: dict) -> str:
    options = {"entropy_coeff": 0.0, "distillation": ONLY}
    with pytest.raises(ValueError, match="this is another loss") as error:
        find_dead(Loss(distillation_loss(options)), BatchRows(_batch(0, VOCAB, options)))
    return str(error.value)


def test_rows_without_advantage_are_not_left_out(ranks, models):
    assert all("skip_zero_advantage=False" in said for said in ranks(1, models)(_refuses))
