"""A critic on our engine: values, value_loss, gradients and weights are those of verl's FSDPEngineWithValueHead.

One and two gloo ranks, fp32, and bf16 by what stock itself misses. Does not exercise CUDA.
"""

import logging
from unittest import mock

import pytest
import torch
from engines import TOLERANCE, _batch, _compare, _engine, _half_errors, _loss, _measure, _relative, _responses
from pairs import every_value
from shared_models import SharedModels
from torch.distributed import get_rank

from verl_prefix.engine.row_outputs import RowOutputs
from verl_prefix.models.hookup import HookedModel
from verl_prefix.testing import write_tiny_model

PHASED = {"schedule": "phased", "wave_tokens": 40}
CASES = {
    "packed": {"schedule": "packed"},
    "phased": PHASED,
    "auto": {"min_speedup": 1e-6},
    "exchanged": {"schedule": "packed", "exchange": "auto"},
    "phased_exchanged": PHASED | {"exchange": "auto", "budget": 90},
    "turns": {"turns": "kept", "schedule": "packed"},  # responses are in later prompts
    "turns_phased_exchanged": {"turns": "odd", "schedule": "phased", "wave_tokens": 20, "exchange": "auto"},
    "turns_tool_tokens": {"turns": "kept", "schedule": "packed", "tool_tokens": True},
    "turns_in_mini_batches_of_prompts": {"turns": "odd", "schedule": "packed", "mini_batches": "prompts"},
    "trees_of_a_batch": {"turns": True, "schedule": "packed", "trees": "batch"},
    "tool_tokens": {"schedule": "packed", "tool_tokens": True},
    "padded": {"schedule": "packed", "padded": True},
    "static_batch_size": {"use_dynamic_bsz": False},
    "seq_mean": {"schedule": "packed", "loss_agg_mode": "seq-mean-token-mean"},
    "empty_responses": {"schedule": "packed", "empty": "ce"},
    "checkpointed": PHASED | {"gradient_checkpointing": True},
    "offloaded": {"schedule": "phased", "offload": True, "gradient_checkpointing": True},
    "no_sync": PHASED | {"use_no_sync": True},
    "ulysses": {"schedule": "packed", "ulysses": 2},
    "ulysses_phased": PHASED | {"ulysses": 2},
    "ulysses_turns": {"turns": "kept", "schedule": "packed", "ulysses": 2},
    **{family: {"schedule": "packed"} for family in ("qwen3_moe", "deepseek_v3", "gpt_oss")},
    "gpt_oss_phased": PHASED,
}  # hybrids: test_fuzz.py  # fmt: skip
QUICK = ("turns_phased_exchanged", "padded", "ulysses", "auto")
IN_MORE = every_value(CASES, QUICK)
FAMILIES = ("gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3")
MISSED = "prefix.verify, update 1: values differ from the stock path's"
SHARED = SharedModels(_engine)  # on ranks


def _family(case: str) -> str:
    return next((family for family in FAMILIES if case.startswith(family)), "qwen3")


def _both(models: dict, family: str, options: dict, **stocks: object) -> tuple[dict, dict]:
    """What verl's engine and ours measure of these options."""
    options = {"critic": True, "verify": "off"} | options
    options |= {"attn_implementation": "eager"} if family == "gpt_oss" else {}
    row = get_rank() // options.get("ulysses", 1)
    alone = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1} if family == "gpt_oss" else {}
    with mock.patch("engines._engine", SHARED):
        stock = _measure("fsdp2", models[family], row, options | {"ulysses": 1} | alone | stocks)
        return stock, _measure("prefix", models[family], row, options)


def _against_stock(models: dict, case: str) -> dict:
    found = _both(models, _family(case), CASES[case])
    for one in found:  # rows travel
        total = torch.tensor(one["loss"], dtype=torch.float64)
        torch.distributed.all_reduce(total)
        one["loss"] = total.item()
    return _compare(found[1], found[0])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {family: write_tiny_model(tmp_path_factory.mktemp(family), family=family) for family in FAMILIES}


def _world(world: int, case: str) -> object:
    in_more = world == 2 and (case in IN_MORE or case in FAMILIES)
    marks = () if world == 2 and case in QUICK else pytest.mark.more if in_more else pytest.mark.full
    return pytest.param(world, case, marks=marks, id=f"{world}-{case}")


@pytest.mark.parametrize(
    ("world", "case"), [_world(n, case) for n in (2, 1) for case in CASES if n == 2 or "ulysses" not in case]
)
def test_a_critic_computes_what_verls_does(ranks, models, world, case):
    found = ranks(world, models)(_against_stock, case)
    for one in found:
        assert max(one["errors"].values()) <= TOLERANCE, one["errors"]
        assert one["metrics"]["prefix/tokens_saved"][0] > 0


def _half(models: dict, schedule: str, turns: bool) -> list[dict[str, float]]:
    """What ours and stock miss in bf16."""
    rows = {"turns": "kept"} if turns else {}
    stock, ours = _both(models, "qwen3", {"param_dtype": "bf16", "schedule": schedule, "wave_tokens": None} | rows)
    truth, _ = _both(models, "qwen3", rows)
    return [_half_errors(x, truth) for x in (ours, stock)]


@pytest.mark.parametrize("turns", [pytest.param(False, marks=pytest.mark.more), True], ids=["one_prompt", "turns"])
@pytest.mark.more
@pytest.mark.parametrize("schedule", ["packed", "phased"])
def test_bf16_misses_fp32_by_no_more_than_verls_critic_does(ranks, models, schedule, turns):
    for ours, stock in ranks(2, models)(_half, schedule, turns):
        for name, error in ours.items():
            assert error <= 1.3 * stock[name], f"{name}: {error:.2e} against stock's {stock[name]:.2e}"


def _one_token_off(patch: pytest.MonkeyPatch) -> None:
    logits = HookedModel.logits
    patch.setattr(HookedModel, "logits", lambda self, inputs, keep, seen: logits(self, inputs, (keep - 1).abs(), seen))


def _of_another_row(patch: pytest.MonkeyPatch) -> None:
    of_pass = RowOutputs.of_pass

    def turned(self: RowOutputs, *args: object) -> dict[str, torch.Tensor]:
        rows = of_pass(self, *args)["values"].unbind()
        moved = [torch.cat([rows[i - 1], row.detach()])[: len(row)] for i, row in enumerate(rows)]
        return {"values": torch.nested.nested_tensor_from_jagged(torch.cat(moved), args[2])}

    patch.setattr(RowOutputs, "of_pass", turned)


def _broken(models: dict, broken: str, schedule: str) -> tuple[dict[str, float], list[str]]:
    """How far values read from a wrong place are off, and how the self-check ends, raising or not."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        globals()[broken](patch)
        stock, ours = _both(models, "qwen3", {"schedule": schedule})
        for action in ("raise", "fallback"):
            try:
                fallen = _both(models, "qwen3", {"schedule": schedule, "verify": "first_step", "verify_action": action})
                said.append(str(_relative(fallen[1]["grads"]["score.weight"], stock["grads"]["score.weight"])))
            except RuntimeError as error:
                said.append(str(error))
    return _compare(ours, stock)["errors"], said


@pytest.mark.parametrize("schedule", ["packed", pytest.param("phased", marks=pytest.mark.more)])
@pytest.mark.parametrize("broken", ["_one_token_off", pytest.param("_of_another_row", marks=pytest.mark.more)])
def test_values_of_a_wrong_place_are_far_off_and_the_self_check_sees_it(ranks, models, broken, schedule):
    for errors, (raised, after) in ranks(2, models)(_broken, broken, schedule):
        assert min(errors["values"], errors["loss"], errors["grads"]) > 100 * TOLERANCE, errors
        assert MISSED in raised and float(after) == 0  # verl's own path


def _not_finite(models: dict) -> list[str]:
    """What the log says of an update whose new values are not finite, and whose old ones are."""
    from verl_prefix.engine import pass_results

    engine, said = _engine("prefix", models["qwen3"], {"critic": True, "verify": "off", "schedule": "packed"}), []
    data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, {"critic": True})
    with torch.no_grad():
        engine.module.score.weight.fill_(torch.nan)
    with (
        engine.train_mode(disable_auto_offload=True),
        mock.patch.object(pass_results.logger, "error", lambda text, *values: said.append(text % values)),
    ):
        engine.forward_backward_batch(data, _loss({"critic": True}))
        engine.forward_backward_batch(data, None, forward_only=True)
    return said


def test_values_that_are_not_finite_are_told_from_old_values_that_are(ranks, models):
    for update, inference in ranks(1, models)(_not_finite):
        assert "; values of rows 0 (uid " in update and "the batch's values" not in update
        assert "verl skips an update" in update and "verl takes such outputs as they are" in inference


def _without_sharing(models: dict) -> tuple[dict, list[str]]:
    """An update of rows that share nothing, what it says, and no clock is asked."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("verl_prefix").addHandler(handler)
    options = {"groups": [(uid, 30 + i, [9 + i], "") for i, uid in enumerate("abcd")], "min_speedup": 1.05}
    with mock.patch("verl_prefix.engine.planner.measure", side_effect=AssertionError):
        stock, ours = _both(models, "qwen3", options | {"verify": "first_step", "exchange": "auto"})
    logging.getLogger("verl_prefix").removeHandler(handler)
    return _compare(ours, stock), [text for text in said if "stock path" in text]


def test_without_sharing_it_is_verls_own_path_which_is_said_once(ranks, models):
    for rank, (found, said) in enumerate(ranks(2, models)(_without_sharing)):
        assert max(found["errors"].values()) == 0 and "prefix/verify_values" not in found["metrics"]
        assert found["metrics"]["prefix/stock_rows"] == [8.0] == found["metrics"]["prefix/log_prob_stock_rows"]
        assert (
            len(said) == 2 and "no rows of this batch share a prompt" in said[0] and "follows its log-probs" in said[1]
        ), (rank, said)


def _resumed(models: dict, folder: str) -> float:
    """How far verl's critic that loads ours after a step is from it."""
    from verl.utils import tensordict_utils as tu

    options, values = {"critic": True, "verify": "off", "schedule": "packed"}, []
    for backend in ("prefix", "fsdp2"):
        engine = _engine(backend, models["qwen3"], options)
        data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, options)
        tu.assign_non_tensor(data, compute_loss=False)
        if backend == "prefix":
            with engine.train_mode(disable_auto_offload=True):
                engine.train_batch(data.copy(), _loss(options))
            engine.save_checkpoint(folder, global_step=1)
        else:
            engine.load_checkpoint(folder)
        with engine.eval_mode(disable_auto_offload=True):
            output = engine.infer_batch(data.copy())["model_output"]["values"]
        values.append(torch.cat(_responses(output, data)))
    return _relative(*values)


@pytest.mark.more
def test_verls_critic_goes_on_from_a_checkpoint_of_ours(ranks, models, tmp_path):
    assert max(ranks(2, models)(_resumed, str(tmp_path))) <= TOLERANCE


def _with_a_value_head(models: dict) -> str:
    from verl_prefix.cpu import engine

    load = engine._load_value_model

    def trls(*args: object, **options: object) -> torch.nn.Module:
        model = load(*args, **options)
        model.v_head = torch.nn.Linear(1, 1)
        return model

    with mock.patch.object(engine, "_load_value_model", trls), pytest.raises(ValueError) as raised:
        _engine("prefix", models["qwen3"], {"critic": True})
    return str(raised.value)


def test_trls_value_head_is_refused(ranks, models):
    (said,) = ranks(1, models)(_with_a_value_head)
    assert said.startswith("critic.model.path=") and "v_head" in said and "set critic=dp_critic" in said
