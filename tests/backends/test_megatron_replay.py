"""Router replay of `model_engine=prefix_megatron` against verl's own Megatron engine, which replays by itself, in the
same layout: what rollouts recorded (R3), and what old log-probs record (R2). See test_megatron.py."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from engines import TOLERANCE, _loss, _responses
from ranks import RankError
from torch.distributed import get_world_size

pytest.importorskip("megatron.core")

from megatron_engines import (  # noqa: E402
    batch_of,
    engine,
    errors_of,
    gradients,
    of_last_stage,
    routes_of,
    together,
    weights,
    write_megatron_model,
)

PACKED, PHASED = {"schedule": "packed"}, {"schedule": "phased", "wave_tokens": 20}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
SP, PP, EXCHANGE = {"tp": 2, "sp": True}, {"pipeline_model_parallel_size": 2}, {"exchange": "auto"}
TURNS = {"turns": True}
# A prompt over the budget, beside another.
SMALL = {"budget": 60, "groups": [("a", 41, [12, 16, 13, 12, 16, 18], ""), ("b", 11, [7, 6], "")]}


def case(
    mode: str, prefix: dict[str, Any], model: str = "qwen3_moe", rows: dict[str, Any] | None = None,
    recompute: dict[str, Any] | None = None, **layout: Any,
) -> tuple[str, dict[str, Any], str, dict[str, Any], dict[str, Any]]:  # fmt: skip
    """verl's mode, fields of PrefixConfig, a model, options of rows, and how verl's engine is built."""
    return mode, prefix, model, rows or {}, layout | {"override_transformer_config": dict(recompute or {})}


# By number of ranks; those of `DEFAULT` run always.
CASES = {
    1: {
        "r3_packed": case("R3", PACKED),
        "r3_phased_recomputed": case("R3", PHASED, recompute=RECOMPUTED),
        "r2_phased_recomputed": case("R2", PHASED, recompute=RECOMPUTED),
        "r3_biased": case("R3", PACKED, "glm4_moe"),
        "r2_biased_phased": case("R2", PHASED, "glm4_moe"),
        "r3_turns": case("R3", PACKED, rows=TURNS),
        "r2_turns_phased": case("R2", PHASED, rows=TURNS),
        "r3_biased_turns": case("R3", PHASED, "glm4_moe", rows=TURNS | {"masked": "last"}),
        "r2_small_budget": case("R2", PACKED, rows=SMALL),
        "r3_selective": case("R3", PHASED, recompute=SELECTIVE),
        "r3_dead": case("R3", PACKED | {"skip_zero_advantage": True}, rows={"dead": 2, "entropy_coeff": 0.0}),
        "r3_balanced": case("R3", PACKED, rows={"budget": 4000}, recompute=BALANCED),
        "r2_mla": case("R2", PHASED, "deepseek_v3"),
        "r3_stock": case("R3", {"schedule": "stock"}),
        "r2_stock": case("R2", {"schedule": "stock"}, "glm4_moe"),
    },
    2: {
        "r3_tp2_sp": case("R3", PHASED, **SP),
        "r2_tp2_sp": case("R2", PACKED, **SP),
        "r2_tp2_sp_small_budget": case("R2", PHASED, rows=SMALL, **SP),
        "r3_tp2_sp_recomputed": case("R3", PHASED, recompute=RECOMPUTED, **SP),
        "r3_cp2": case("R3", PACKED, cp=2),
        "r2_cp2_phased": case("R2", PHASED, cp=2),
        "r2_cp2_small_budget": case("R2", PACKED, rows=SMALL, cp=2),
        "r3_cp2_turns": case("R3", PHASED, rows=TURNS, cp=2),
        "r3_ep2_exchange": case("R3", PHASED | EXCHANGE, ep=2),
        "r2_ep2_exchange": case("R2", PACKED | EXCHANGE, ep=2),
        "r3_ep2_exchange_turns": case("R3", PACKED | EXCHANGE, "glm4_moe", rows=TURNS, ep=2),
        "r2_dp2_exchange": case("R2", PHASED | EXCHANGE, "glm4_moe"),
        "r3_pp2": case("R3", PHASED, **PP),
        "r2_pp2": case("R2", PHASED, "glm4_moe", **PP),
        "r3_pp2_recomputed": case("R3", PACKED, "glm4_moe", recompute=RECOMPUTED, **PP),
        "r2_tp2_sp_ep2_mla": case("R2", PHASED, "deepseek_v3", ep=2, etp=1, recompute=RECOMPUTED, **SP),
        "r3_tp2_sp_stock": case("R3", {"schedule": "stock"}, **SP),
    },
    4: {
        "r2_tp2_sp_pp2": case("R2", PHASED, **SP, **PP),
        "r3_cp2_pp2": case("R3", PHASED, "glm4_moe", recompute=RECOMPUTED, cp=2, **PP),
        "r2_cp2_tp2_sp": case("R2", PHASED, rows=SMALL, cp=2, **SP),
        "r3_tp2_sp_ep4_exchange": case("R3", PHASED | EXCHANGE, ep=4, etp=1, **SP),
    },
}  # fmt: skip
DEFAULT = (
    "r3_phased_recomputed", "r2_biased_phased", "r3_biased_turns", "r2_tp2_sp", "r3_cp2", "r2_ep2_exchange", "r2_pp2",
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_megatron_model(folder / name, name) for name in ("qwen3_moe", "glm4_moe", "deepseek_v3")}


# What follows runs on ranks.
def _moved(engine: Any) -> None:
    """Weights of other routers, so that tokens would go to other experts."""
    with torch.no_grad():
        for name, weight in engine.module[0].named_parameters():
            if "router.weight" in name:
                weight.copy_(weight.flip(0))


@contextlib.contextmanager
def _counted(engine: Any) -> Iterator[list[torch.Tensor]]:
    """Collects the tokens by expert of all ranks [layers, experts] of which routers' biases are made, on one stage."""
    module, found = importlib.import_module("megatron.core.distributed.finalize_model_grads"), []
    update = module.get_updated_expert_bias

    def seen(tokens: torch.Tensor, *args: Any) -> torch.Tensor:
        if engine.engine_config.pipeline_model_parallel_size == 1:
            found.append(tokens.clone())
            torch.distributed.all_reduce(found[-1])
        return update(tokens, *args)

    with mock.patch.object(module, "get_updated_expert_bias", seen):
        yield found


def _measure(engine: Any, mode: str, rows: dict[str, Any], spoilt: Callable[[Any], torch.Tensor] | None) -> dict:
    """What a log-prob pass and an update of other routers find. spoilt: makes the batch's routes others."""
    from verl.utils import tensordict_utils as tu

    data = batch_of(engine, (engine.get_data_parallel_rank(),), rows)
    tu.assign_non_tensor(data, enable_routing_replay=True, return_model_output=True)
    if mode == "R3":
        numbers = [1000 * engine.get_data_parallel_rank() + row for row in range(len(data))]
        data["routed_experts"] = routes_of(data, engine.model_config.hf_config, numbers)
    with engine.eval_mode(disable_auto_offload=True):
        inferred = of_last_stage(engine.infer_batch(data.copy()).get("model_output") or {})
    found: dict[str, Any] = {"old log-probs": torch.cat(_responses(inferred["log_probs"], data))}
    if mode == "R2":
        data["routed_experts"] = inferred["routed_experts"]
        recorded = inferred["routed_experts"].unbind()
        counts = hasattr(engine.model_config.hf_config, "n_routed_experts")  # biases follow last tokens, too
        found["routes"] = torch.cat([row[: len(row) - (not counts)] for row in recorded])
        assert inferred["routed_experts"].offsets().tolist() == data["input_ids"].offsets().tolist()
    if spoilt is not None:
        data["routed_experts"] = spoilt(data["routed_experts"])
    _moved(engine)
    with engine.train_mode(disable_auto_offload=True), _counted(engine) as counted:
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data.copy(), _loss(rows))
        found["grads"] = gradients(engine)
        found["grad_norm"] = float(engine.optimizer_step())
    if output.get("model_output"):
        found |= {name: torch.cat(_responses(x, data)) for name, x in output["model_output"].items()}
        found["loss"], found["metrics"] = sum(output["loss"]), output["metrics"]
    return of_last_stage(found) | {"params": weights(engine), "counted": counted}


TRUTHS: dict[str, dict] = {}


def _stock(models: dict, mode: str, name: str, rows: dict, layout: dict) -> dict:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    if (key := repr((mode, name, rows, layout))) not in TRUTHS:
        built = engine(MegatronEngineWithLMHead, models[name], model=name, replay=mode, **layout)
        TRUTHS[key] = together(built, _measure(built, mode, rows, None))
    return TRUTHS[key]


def _errors(
    models: dict, which: str, spoilt: Callable[[Any], torch.Tensor] | None = None, verify: str = "off"
) -> tuple[dict[str, float], dict[str, Any]]:
    from verl_prefix.backends.megatron import PrefixMegatronEngine

    mode, prefix, name, rows, layout = CASES[get_world_size()][which]
    stock = _stock(models, mode, name, rows, layout)
    options = {"verify": verify} | prefix
    built = engine(PrefixMegatronEngine, models[name], model=name, prefix=options, replay=mode, **layout)
    ours = together(built, _measure(built, mode, rows, spoilt))
    errors = errors_of(ours, stock)
    a, b = ours["old log-probs"], stock["old log-probs"]
    errors["old log-probs"] = ((a - b).abs().max() / b.abs().max()).item()
    padded = layout.get("tp", 1) * layout.get("cp", 1) > 1  # verl's own routers count what rows are padded by
    for a, b in zip(ours["counted"][-1:], stock["counted"], strict=True):  # a self-check reduces gradients before
        assert padded or (torch.equal(a, b) and b.sum() > 0)
    if mode == "R2":
        assert torch.equal(ours["routes"], stock["routes"]) and stock["routes"].dtype == ours["routes"].dtype
    return errors, ours["metrics"]


ALL = [(world, which) for world, cases in CASES.items() for which in cases]


@pytest.mark.parametrize(
    ("world", "which"),
    [pytest.param(*one, marks=() if one[1] in DEFAULT else pytest.mark.full) for one in ALL],
)
def test_ours_replays_as_megatrons_does(models, ranks, world, which):
    for errors, metrics in ranks(world, models)(_errors, which):
        assert max(errors.values()) < TOLERANCE, (max(errors, key=errors.__getitem__), max(errors.values()))
        assert "stock" in which or metrics["prefix/tokens_saved"][0] > 0


def of_another_row(routes: torch.Tensor) -> torch.Tensor:
    """As far as it goes, again and again."""
    rows = routes.unbind()
    found = [rows[i - 1][torch.arange(len(row)) % (len(rows[i - 1]) - 1)] for i, row in enumerate(rows)]
    return torch.nested.as_nested_tensor(found, layout=torch.jagged)


def of_the_token_before(routes: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([row.roll(1, 0) for row in routes.unbind()], layout=torch.jagged)


def _spoilt(models: dict, which: str, spoilt: Callable[[Any], torch.Tensor]) -> dict[str, float]:
    return _errors(models, which, spoilt)[0]


@pytest.mark.parametrize("spoilt", [of_another_row, of_the_token_before])
@pytest.mark.parametrize(("world", "which"), [(1, "r3_phased_recomputed"), (2, "r2_pp2")])
def test_other_routes_are_far_off(models, ranks, world, which, spoilt):
    for errors in ranks(world, models)(_spoilt, which, spoilt):
        assert max(errors.values()) > 100 * TOLERANCE


def _verified(models: dict, which: str, moves: bool) -> Any:
    """Errors and metrics of an engine that checks itself; moves: the routes of its passes by a token."""
    from verl_prefix.models.mcore import MegatronModel

    begin = MegatronModel._begin

    def moved(self: Any, forward_context: Any, position_ids: torch.Tensor) -> Any:
        forward_context.routes = forward_context.routes.roll(1, 0)
        return begin(self, forward_context, position_ids)

    with mock.patch.object(MegatronModel, "_begin", moved) if moves else contextlib.nullcontext():
        return _errors(models, which, verify="first_step")


CHECKED = [(1, "r3_biased_turns"), (2, "r2_tp2_sp"), (2, "r3_cp2"), (2, "r3_pp2"), (2, "r2_dp2_exchange")]


@pytest.mark.parametrize(
    ("world", "which"), [pytest.param(*one, marks=pytest.mark.full if i else ()) for i, one in enumerate(CHECKED)]
)
def test_the_self_check_compares_with_what_megatrons_path_replays(models, ranks, world, which):
    for errors, metrics in ranks(world, models)(_verified, which, False):
        assert max(errors.values()) < TOLERANCE and 0 < metrics["prefix/verify_log_probs"][0] <= 3
    with pytest.raises(RankError, match="prefix.verify, update 1: "):
        ranks(world, models)(_verified, which, True)
