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
    _save_with_fsdp1(model, f"{out}/fsdp1", engine)
    engine = _engine("prefix", model, {})
    with pytest.raises(ValueError) as error:
        engine.load_checkpoint(f"{out}/fsdp1")
    results["fsdp1"] = str(error.value)
    engine = _engine("prefix", model, {"checkpoint": {"load_contents": ["model", "extra"]}})
    before = _state(engine)
    engine.load_checkpoint(f"{out}/fsdp1")
    results["fsdp1 moved"] = max(float((x - before[name]).abs().max()) for name, x in _state(engine).items())
    torch.save(results, f"{out}/results.{rank}")


def _save_with_fsdp1(model: str, folder: str, engine) -> None:
    """A checkpoint of verl's manager after a step of FSDP1, which verl's engine has on GPUs alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import get_fsdp_wrap_policy

    whole = AutoModelForCausalLM.from_pretrained(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    wrapped = FullyShardedDataParallel(
        whole, auto_wrap_policy=get_fsdp_wrap_policy(whole), device_id=torch.device("cpu"), device_mesh=mesh
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    wrapped(input_ids=torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    processor = engine.model_config.get_processor()
    FSDPCheckpointManager(wrapped, optimizer, scheduler, processor, engine.checkpoint_config).save_checkpoint(folder)


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


def test_a_checkpoint_of_fsdp1_gives_its_weights_alone(run):
    for results in run[1]:
        assert "is of FSDP1" in results["fsdp1"] and "set actor_rollout_ref.actor.checkpoint." in results["fsdp1"]
        assert results["fsdp1 moved"] > 0.05


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
