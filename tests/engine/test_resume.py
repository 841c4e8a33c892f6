"""Checkpoints are verl's own: the stock engine and ours go on from each other's, weights and AdamW state included.

Two gloo ranks. Whole jobs that are killed and resumed: `make -C examples/results chaos`.
"""

import os
from pathlib import Path

import pytest
import torch
from engines import TOLERANCE, _batch, _engine, _loss, _relative
from transformers import AutoModelForCausalLM
from whole_tensors import full

from verl_prefix.testing import write_tiny_model

pytestmark = pytest.mark.more
ENGINES = {"fsdp2": {}, "prefix": {"schedule": "phased", "wave_tokens": 40, "verify": "off"}}
SAVE = {"checkpoint": {"save_contents": ["model", "optimizer", "extra", "hf_model"]}}


def _update(engine, rank: int) -> None:
    with engine.train_mode(disable_auto_offload=True):
        engine.train_batch(_batch(rank, engine.model_config.hf_config.vocab_size, {}), _loss({}))
    engine.lr_scheduler_step()


def _state(engine) -> dict[str, torch.Tensor]:
    state = {f"weight {name}": full(p) for name, p in engine.module.named_parameters()}
    for i, moments in engine.optimizer.state_dict()["state"].items():
        state |= {f"{name} {i}": full(x) for name, x in moments.items()}
    return state


def _worker(rank: int, rendezvous: str, model: str, out: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", VERL_PLATFORM="cpu")
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    results = {}
    for saver, options in ENGINES.items():
        engine = _engine(saver, model, options | SAVE)
        _update(engine, rank)
        _update(engine, rank)
        results[saver, "saved"] = _state(engine)
        engine.save_checkpoint(f"{out}/{saver}/global_step_2/actor", global_step=2)
        _update(engine, rank)
        results[saver, "uninterrupted"] = _state(engine)
        for loader, loader_options in ENGINES.items():
            engine = _engine(loader, model, loader_options)
            engine.load_checkpoint(f"{out}/{saver}/global_step_2/actor")
            results[saver, loader, "loaded"] = _state(engine)
            _update(engine, rank)
            results[saver, loader, "next"] = _state(engine)
            results[saver, loader, "lr steps"] = engine.lr_scheduler.last_epoch
    torch.save(results, f"{out}/results.{rank}")


@pytest.fixture(scope="module")
def run(tmp_path_factory, spawn):
    tmp = tmp_path_factory.mktemp("resume")
    spawn(_worker, args=(str(tmp / "rendezvous"), write_tiny_model(tmp / "model"), str(tmp)), nprocs=2)
    return tmp, [torch.load(tmp / f"results.{rank}") for rank in range(2)]


@pytest.mark.parametrize("saver", ENGINES)
@pytest.mark.parametrize("loader", ENGINES)
def test_what_was_saved_is_loaded_bit_by_bit(run, saver, loader):
    for results in run[1]:
        saved, loaded = results[saver, "saved"], results[saver, loader, "loaded"]
        assert any(name.startswith("exp_avg_sq") for name in saved) and saved.keys() == loaded.keys()
        assert all(torch.equal(loaded[name], x) for name, x in saved.items())
        assert results[saver, loader, "lr steps"] == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_the_next_update_after_a_resume_is_the_uninterrupted_one(run, engine):
    for results in run[1]:
        assert all(
            torch.equal(results[engine, engine, "next"][name], x)
            for name, x in results[engine, "uninterrupted"].items()
        )


@pytest.mark.parametrize(("saver", "loader"), [("fsdp2", "prefix"), ("prefix", "fsdp2")])
def test_the_other_engine_goes_on_where_the_first_would_have_gone(run, saver, loader):
    def vector(state: dict, kind: str) -> torch.Tensor:
        return torch.cat([x.flatten() for name, x in state.items() if name.startswith(kind)])

    for results in run[1]:
        ours, stays = results[saver, loader, "next"], results[saver, "uninterrupted"]
        saved = results[saver, "saved"]
        assert not torch.equal(vector(stays, "weight"), vector(saved, "weight"))
        for kind in ("weight ", "exp_avg ", "exp_avg_sq "):
            assert _relative(vector(ours, kind), vector(stays, kind)) < TOLERANCE, kind


def test_a_checkpoint_of_ours_exports_to_hugging_face(run):
    """Written while training (save_contents=hf_model), and by verl's merger from the shards."""
    # Not above: a spawned rank imports this file before it has chosen its platform.
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    tmp, (results, _) = run
    actor = tmp / "prefix" / "global_step_2" / "actor"
    merged = tmp / "merged"
    FSDPModelMerger(
        ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir=str(actor),
            target_dir=str(merged),
            hf_model_config_path=str(actor / "huggingface"),
        )  # fmt: skip
    ).merge_and_save()
    for folder in (actor / "huggingface", merged):
        assert list(Path(folder).glob("*.safetensors")), folder
        weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for name, x in weights.items():
            # verl's merger writes bf16.
            tolerance = 0 if folder != merged else 2**-8
            saved = results["prefix", "saved"][f"weight {name}"]
            assert torch.allclose(x, saved, rtol=tolerance, atol=0), name
