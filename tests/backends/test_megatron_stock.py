"""verl's own Megatron engine on the stand-ins of `megatron_cpu`, against verl's FSDP2 engine on the same checkpoints
and rows, and sharded against whole: what other tests of Megatron compare with is right.

fp32, gloo, tiny models. Does not exercise CUDA, NCCL or TransformerEngine.
"""

from typing import Any

import pytest
from engines import TOLERANCE, _measure

pytest.importorskip("megatron.core")

from megatron_engines import MODELS, as_on_the_hub, engine, measure, write_megatron_model  # noqa: E402

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sp": True},
    "tp2_sp_recompute": {
        "tp": 2, "sp": True,
        "override_transformer_config": dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        ),
    },
    "ep2": {"ep": 2},
    "tp2_sp_ep2_etp1": {"tp": 2, "sp": True, "ep": 2, "etp": 1},
}  # fmt: skip
MOE = "qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3", "deepseek_v3_yarn"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_megatron_model(folder / name, name) for name in MODELS}


# What follows runs on ranks.
def _errors(ours: dict, truth: dict) -> dict[str, float]:
    """Largest differences over the largest value of each tensor."""
    assert set(ours["grads"]) == set(truth["grads"])
    pairs = {f"gradient of {name}": (ours["grads"][name], x) for name, x in truth["grads"].items()}
    pairs |= {name: (ours[name], truth[name]) for name in ("log_probs", "entropy")}
    errors = {name: ((a - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()}
    return errors | {name: abs(ours[name] - truth[name]) / abs(truth[name]) for name in ("loss", "grad_norm")}


def _stock(models: dict, name: str, rank: int, **layout: Any) -> dict:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    return measure(engine(MegatronEngineWithLMHead, models[name], model=name, **layout), rank, {})


def _against_fsdp2(models: dict, name: str) -> dict[str, float]:
    truth = _measure("fsdp2", models[name], 0, {})
    truth["grads"] = as_on_the_hub(models[name], truth["grads"])
    return _errors(_stock(models, name, 0), truth)


def _against_one_rank(models: dict, name: str, layout: str) -> dict[str, float]:
    """Errors of a layout against the same model, whole on every rank."""
    return _errors(_stock(models, name, 0, **LAYOUTS[layout]), _stock(models, name, 0))


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_is_fsdp2(models, ranks, name):
    (errors,) = ranks(1, models)(_against_fsdp2, name)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize(
    ("name", "layout"),
    # mcore refuses experts with TP without SP.
    [(name, layout) for name in MODELS for layout in LAYOUTS if ("ep2" not in layout, layout != "tp2")[name in MOE]],
)
def test_layouts_are_one_rank(models, ranks, name, layout):
    for errors in ranks(2, models)(_against_one_rank, name, layout):
        assert max(errors.values()) < TOLERANCE, errors
