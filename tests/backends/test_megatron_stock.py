"""verl's own Megatron engine on the stand-ins of `megatron_cpu`, against verl's FSDP2 engine on the same checkpoints
and rows, and sharded against whole: what other tests of Megatron compare with is right.

gloo, tiny models. Does not exercise CUDA, NCCL or TransformerEngine.
"""

from typing import Any

import pytest
import torch
from engines import TOLERANCE, _measure
from torch.distributed import get_world_size

pytest.importorskip("megatron.core")

from megatron_engines import (  # noqa: E402
    MODELS,
    as_on_the_hub,
    engine,
    errors_of,
    measure,
    together,
    write_megatron_model,
)

RECOMPUTE = {
    "override_transformer_config": dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
}
SELECTIVE = {"override_transformer_config": {"recompute_granularity": "selective"}}
OVERLAP = {"override_ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}}
SP = {"tp": 2, "sp": True}
PLAIN = {"distributed_optimizer": False}
# By number of ranks.
DENSE: dict[int, dict[str, dict[str, Any]]] = {
    1: {"recompute": RECOMPUTE, "selective": SELECTIVE, "plain_optimizer": PLAIN},
    2: {
        "tp2": {"tp": 2},
        "tp2_sp": SP,
        "tp2_sp_recompute": SP | RECOMPUTE,
        "tp2_sp_selective": SP | SELECTIVE,
        "dp2": {},
        "dp2_plain_optimizer": PLAIN,
        "dp2_overlap": OVERLAP,
    },
    4: {"dp2_tp2_sp": SP, "dp2_tp2_sp_overlap": SP | OVERLAP},
}
MOE: dict[int, dict[str, dict[str, Any]]] = {
    1: {},
    2: {
        "tp2_sp": SP,
        "tp2_sp_recompute": SP | RECOMPUTE,
        "ep2": {"ep": 2},
        "ep2_overlap": {"ep": 2} | OVERLAP,
        "ep2_plain_optimizer": {"ep": 2} | PLAIN,
        "tp2_sp_ep2_etp1": SP | {"ep": 2, "etp": 1},
    },
    4: {"tp2_sp_ep2": SP | {"ep": 2}, "tp2_sp_ep4_etp1": SP | {"ep": 4, "etp": 1}},
}
OF_ALL = "qwen3", "qwen3_moe", "deepseek_v3_yarn"
# The others are left to make test-full: test_megatron.py compares ours both with their layout and with one rank.
HERE = {
    ("qwen3", "plain_optimizer"), ("qwen3", "tp2_sp"), ("qwen3", "dp2_tp2_sp_overlap"), ("qwen3_moe", "ep2"),
    ("qwen3_moe", "ep2_plain_optimizer"), ("qwen3_moe", "tp2_sp_ep2"), ("deepseek_v3_yarn", "tp2_sp"),
}  # fmt: skip
CASES = [
    pytest.param(world, name, layout, marks=() if (name, layout) in HERE else pytest.mark.full)
    for name in MODELS
    for world, layouts in (
        MOE if MODELS[name][0] in ("qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3") else DENSE
    ).items()
    for layout in layouts
    if name in OF_ALL or layout in ("tp2_sp", "ep2")
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_megatron_model(folder / name, name) for name in MODELS}


# What follows runs on ranks.
TRUTHS: dict[str, dict] = {}


def _layout(name: str) -> dict[str, Any]:
    return (DENSE[get_world_size()] | MOE[get_world_size()])[name]


def _stock(models: dict, name: str, **layout: Any) -> Any:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    return engine(MegatronEngineWithLMHead, models[name], model=name, **layout)


def _against_fsdp2(models: dict, name: str) -> dict[str, float]:
    truth = _measure("fsdp2", models[name], 0, {})
    truth["grads"] = as_on_the_hub(models[name], truth["grads"])
    del truth["params"]  # of one step
    return errors_of(measure(_stock(models, name), {}), truth)


def _whole(models: dict, name: str, ranks: tuple[int, ...]) -> dict:
    """What the model finds of the rows of these data ranks where it lies whole on every rank."""
    if (name, ranks) not in TRUTHS:
        TRUTHS[name, ranks] = measure(_stock(models, name), {}, ranks)
    return TRUTHS[name, ranks]


def _against_whole(models: dict, name: str, layout: str) -> dict[str, float]:
    sharded = _stock(models, name, **_layout(layout))
    found = together(sharded, measure(sharded, {}))
    return errors_of(found, _whole(models, name, tuple(range(sharded.get_data_parallel_size()))))


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_is_fsdp2(models, ranks, name):
    (errors,) = ranks(1, models)(_against_fsdp2, name)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize(("world", "name", "layout"), CASES)
def test_layouts_are_one_rank(models, ranks, world, name, layout):
    for errors in ranks(world, models)(_against_whole, name, layout):
        assert max(errors.values()) < TOLERANCE, errors


def _sinks(models: dict) -> float:
    """Largest error of rows with sinks and a window against scores whose softmax has one more term."""
    from megatron_cpu import _attend_rows

    q, k, v = torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 6)
    sinks, found, start = torch.randn(4), [], 0
    for end in (5, 12):
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end].repeat_interleave(2, 1)) * 0.3
        behind = torch.arange(end - start).unsqueeze(1) - torch.arange(end - start)
        scores = scores.masked_fill((behind < 0) | (behind > 3), -1e9).exp()
        weights = scores / (scores.sum(-1, keepdim=True) + sinks.exp().view(-1, 1, 1))
        found.append(torch.einsum("hqk,khd->qhd", weights, v[start:end].repeat_interleave(2, 1)))
        start = end
    return (_attend_rows(q, k, v, [5, 12], 0.3, (3, 0), sinks) - torch.cat(found)).abs().max().item()


def test_rows_have_sinks(models, ranks):
    assert ranks(1, models)(_sinks)[0] < TOLERANCE


DOUBLE = {"dtype": "float64", "override_ddp_config": {"grad_reduce_in_fp32": False}}


def _in_float64(models: dict, name: str, layout: str) -> dict[str, dict[str, float]]:
    """Errors of a layout in float64 against the whole model in it, and of that in fp32."""
    import megatron_cpu

    whole = _whole(models, name, (0,))
    options = {"override_transformer_config": {"moe_router_dtype": "fp64"}} | DOUBLE
    with megatron_cpu.in_float64():
        truth = measure(_stock(models, name, **options), {}, (0,))
        sharded = measure(_stock(models, name, **_layout(layout), **options), {}, (0,))
    assert truth["log_probs"].dtype == torch.float64
    return {"sharded": errors_of(sharded, truth), "fp32": errors_of(whole, truth)}


@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3", "tp2_sp"), ("qwen3_moe", "tp2_sp_ep2_etp1"), ("deepseek_v3_yarn", "tp2_sp")]
)
def test_float64_is_in_float64(models, ranks, name, layout):
    for errors in ranks(2, models)(_in_float64, name, layout):
        assert max(errors["sharded"].values()) < 1e-9, errors["sharded"]
        assert 1e-9 < max(errors["fp32"].values()) < TOLERANCE, errors["fp32"]
