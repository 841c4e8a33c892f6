"""Router replay of `model_engine=prefix_veomni` against VeOmni's own, on the same rows with the same routes.

fp32, gloo, a tiny Qwen3-MoE. Does not exercise CUDA, NCCL, or VeOmni's fused kernels.
"""

import pytest
import torch
from engines import TOLERANCE, _batch, _compare, _loss, _measure, _relative, _responses
from torch.distributed import get_rank
from transformers import AutoConfig

pytest.importorskip("veomni")

from veomni_engines import veomni_engines  # noqa: E402

from verl_prefix.testing import write_tiny_model  # noqa: E402

PHASED = {"schedule": "phased", "wave_tokens": 20}
EP = {"expert_parallel_size": 2, "moe_implementation": "fused_triton"}
SP = {"ulysses_parallel_size": 2, "attn_implementation": "flash_attention_2"}
CASES = {
    "packed": {"schedule": "packed"},
    "phased_checkpointed": PHASED | {"gradient_checkpointing": True},
    "replicas_exchanged": {"schedule": "packed", "routes": "replicas", "exchange": "auto"},
    "turns": {"schedule": "packed", "turns": True, "routes": "agree"},
    "verified": {"schedule": "packed", "verify": "first_step"},
    "ep2_phased": PHASED | EP,
    "sp2_ep2": {"schedule": "packed"} | SP | EP,
    "stock": {"schedule": "stock"},
}  # fmt: skip
OURS = ("schedule", "wave_tokens", "exchange", "verify")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("replay"), family="qwen3_moe", num_experts=8, num_hidden_layers=3)


def _options(path: str, case: str, mode: str) -> tuple[dict, dict]:
    """Of ours and of VeOmni's engine."""
    config = AutoConfig.from_pretrained(path)
    options = {"verify": "off", "routes": "tails", "config": config, "replay": mode} | CASES[case]
    return options, {k: v for k, v in options.items() if k not in OURS}


def _errors(path: str, case: str) -> tuple[dict[str, float], dict]:
    options, of_stock = _options(path, case, "R3")
    rank = get_rank() // options.get("ulysses_parallel_size", 1)
    with veomni_engines():
        found = _compare(_measure("prefix_veomni", path, rank, options), _measure("veomni", path, rank, of_stock))
    return found["errors"], found["metrics"]


def _recorded(path: str, case: str) -> tuple[dict[str, float], int]:
    """R2: what recording log-probs and replaying updates are off, and how many routes of computed tokens differ."""
    import engines

    options, of_stock = _options(path, case, "R2")
    rank, found = get_rank() // options.get("ulysses_parallel_size", 1), []
    with veomni_engines():
        for backend, of in (("prefix_veomni", options), ("veomni", of_stock)):
            engine = engines._engine(backend, path, of)
            data = _batch(rank, options["config"].vocab_size, of)
            with engine.eval_mode(disable_auto_offload=True):
                inferred = engine.infer_batch(data.exclude("routed_experts"))["model_output"]
            data["routed_experts"] = inferred["routed_experts"]
            with engine.train_mode(disable_auto_offload=True):
                engine.optimizer_zero_grad()
                loss = sum(engine.forward_backward_batch(data.copy(), _loss(of))["loss"])
                norm = engine.optimizer_step()
            log_probs = torch.cat(_responses(inferred["log_probs"], data))
            left = {"log_probs": log_probs, "loss": torch.tensor(loss), "norm": torch.tensor(norm)}
            found.append((left, [row[:-1].sort(-1).values for row in inferred["routed_experts"].unbind()]))
    (ours, record), (stock, theirs) = found
    differ = sum(int((a != b).any()) for a, b in zip(record, theirs, strict=True))
    return {name: _relative(ours[name], x) for name, x in stock.items()}, differ


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.more if x in ("packed", "phased_checkpointed", "stock") else ()) for x in CASES],
)
def test_ours_replays_as_veomni_does(ranks, models, case):
    for errors, metrics in ranks(2, models)(_errors, case):
        assert max(errors.values()) <= TOLERANCE, errors
        assert case == "stock" or metrics["prefix/tokens_saved"][0] > 0


@pytest.mark.parametrize("case", ["packed", "phased_checkpointed", "sp2_ep2", "stock"])
def test_ours_records_as_veomni_does(ranks, models, case):
    for errors, differ in ranks(2, models)(_recorded, case):
        assert max(errors.values()) <= TOLERANCE and not differ, (errors, differ)
