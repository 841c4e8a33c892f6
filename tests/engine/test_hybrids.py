"""Hybrids (attention and recurrent layers) in what is not the pass itself: plan, refusals, doctor, and `auto` in a real
engine on one rank, which measures its rates."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import verl  # noqa: F401
from engines import _batch, _engine, _loss
from transformers import (
    BambaConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    OlmoHybridConfig,
    Qwen3NextConfig,
)
from transformers.utils import import_utils
from verl.utils import tensordict_utils as tu

from verl_prefix import cli
from verl_prefix.auto import calibration
from verl_prefix.auto.cost import Rates
from verl_prefix.config.model import check_dealt
from verl_prefix.testing import write_tiny_model
from verl_prefix.tools import doctor
from verl_prefix.tools.plan import command as plan
from verl_prefix.tools.plan.options import Options

ROLE = "actor_rollout_ref"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tiny models without their weights, and prompts of equal length."""
    path = tmp_path_factory.mktemp("hybrids")
    for family in ("qwen3", "qwen3_5_text", "lfm2"):
        write_tiny_model(path / family, family=family)
        (path / family / "model.safetensors").unlink()
    prompts = [[{"role": "user", "content": "the river " * 60}]] * 16
    pq.write_table(pa.table({"prompt": prompts}), path / "train.parquet")
    return path


def overrides(folder: Path, family: str, *more: str) -> list[str]:
    return [
        "algorithm.adv_estimator=grpo", f"data.train_files={folder / 'train.parquet'}", "data.train_batch_size=8",
        "data.max_prompt_length=3072", "data.max_response_length=32", f"{ROLE}.model.path={folder / family}",
        f"{ROLE}.rollout.n=4", f"{ROLE}.actor.ppo_mini_batch_size=4", f"{ROLE}.actor.use_dynamic_bsz=true",
        f"{ROLE}.actor.ppo_max_token_len_per_gpu=16384", "trainer.n_gpus_per_node=2",
        "trainer.v1.trainer_mode=prefix_sync", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_hybrid_has_a_plan(folder, family):
    """As many FLOPs for every token but attention's and lm_head's: about the gain of a model with attention alone."""
    found, attention = (
        plan.build(Options(overrides(folder, name), response_lengths="20")) for name in (family, "qwen3")
    )
    assert found["unsupported"] == []
    assert found["tokens"] == attention["tokens"] and found["packed_groups"] == 4 * 8
    assert found["speedup"]["update"] == pytest.approx(attention["speedup"]["update"], rel=0.1)
    assert found["speedup"]["update"] > 1.5


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (Qwen3NextConfig(), 8, None),
        (Qwen3NextConfig(), 64, "16 heads are not its multiple, 32 heads of linear attention are not .*; set 16"),
        (Qwen3NextConfig(linear_num_value_heads=6, linear_num_key_heads=2), 8, "6 heads of linear attention .*; set 2"),
        (
            OlmoHybridConfig(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=9),
            4,
            "18 channels of",
        ),
        (GraniteMoeHybridConfig(mamba_n_groups=2), 8, None),
        (GraniteMoeHybridConfig(mamba_n_groups=3), 4, "3 groups of Mamba are neither .*; set 1"),
        (BambaConfig(mamba_n_heads=4, mamba_d_head=2048), 8, "4 heads of Mamba are not its multiple; set 4"),
        (Lfm2Config(hidden_size=2060, num_attention_heads=4, num_key_value_heads=2), 8, "2060 channels .*; set 4"),
        (LlamaConfig(num_key_value_heads=2), 8, None),
        (LlamaConfig(hidden_size=60, num_attention_heads=6, num_key_value_heads=2), 4, "6 heads are .*; set 2"),
    ],
)
def test_a_size_that_does_not_divide_a_model_is_refused_by_key_with_one_that_does(config, size, message):
    for role in ("actor", "ref"):
        key = f"{ROLE}.{role}.fsdp_config.ulysses_sequence_parallel_size"
        if message is None:
            check_dealt(key, size, config)
            continue
        with pytest.raises(ValueError, match=f"^{key}={size}: of this {config.model_type} model .*{message}"):
            check_dealt(key, size, config)


@pytest.mark.more
def test_sequence_parallelism_of_a_hybrid_has_a_plan(folder):
    write_tiny_model(folder / "odd", family="qwen3_5_text", linear_num_key_heads=1, linear_num_value_heads=3)
    loss = f"{ROLE}.actor.use_kl_loss=True"  # nobody builds a ref without it
    both = f"{ROLE}.actor.ulysses_sequence_parallel_size=2"  # ref's key follows it
    ref = f"{ROLE}.ref.fsdp_config.ulysses_sequence_parallel_size=2"
    for keys, roles in (((loss, both), ("actor", "ref")), ((loss, ref), ("ref",)), ((both,), ("actor",)), ((ref,), ())):
        found = plan.build(Options(overrides(folder, "odd", *keys), response_lengths="20"))["unsupported"]
        assert len(found) == len(roles)
        for reason, role in zip(found, roles, strict=True):
            assert reason.startswith(f"{ROLE}.{role}.fsdp_config.ulysses_sequence_parallel_size=2: of this")
            assert reason.endswith("3 heads of linear attention are not its multiple; set 1")
        for family in ("lfm2", "qwen3_5_text", "qwen3"):
            assert plan.build(Options(overrides(folder, family, *keys), response_lengths="20"))["unsupported"] == []


def test_a_simulation_of_recurrent_layers_without_stand_ins_is_refused_by_name(folder, capsys):
    assert cli.main(["plan", "--simulate", *overrides(folder, "lfm2")]) == 2
    assert "--simulate: a lfm2 model's recurrent layers run kernels that no stand-in" in capsys.readouterr().err


def test_doctor_says_what_recurrent_layers_run(monkeypatch):
    def lines(version, available):
        monkeypatch.setattr(doctor, "installed_version", lambda name: version)
        for _, _, name in doctor.RECURRENT:
            monkeypatch.setattr(import_utils, f"is_{name}_available", lambda: available)
        states, found, _ = zip(*doctor._check_recurrent(), strict=True)
        assert set(states) == {"ok" if available else "info"}
        return [line.rpartition(": ")[2] if version else line for line in found]

    packages = [package for _, package, _ in doctor.RECURRENT]
    assert lines("9.9", True) == [f"{package} 9.9" for package in packages]
    assert all(
        f"torch; {package} 9.9 is for" in line for line, package in zip(lines("9.9", False), packages, strict=True)
    )
    missing = lines(None, False)
    assert all(f"pip install {package}" in line for line, package in zip(missing, packages, strict=True))
    assert missing[0].startswith("recurrent layers, gated delta rule (Qwen3.5, Qwen3-Next, OLMo-Hybrid): torch, slow")


def _auto(rank: int, folder: str) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", VERL_PLATFORM="cpu")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/join", rank=0, world_size=1)
    groups = [("a", 200, [20] * 6, ""), ("b", 150, [30] * 4, ""), ("c", 30, [20] * 2, "")]
    calibrate, rates = calibration.calibrate, []

    def measured(*args, **options) -> Rates:
        rates.append(list(vars(calibrate(*args, **options)).values()))
        return Rates()  # a clock decides nothing here

    calibration.calibrate = measured
    options = dict(schedule="auto", min_speedup=1.05, verify="off", budget=300, groups=groups)
    engine = _engine("prefix", f"{folder}/model", options)
    data, metrics = _batch(0, engine.model_config.hf_config.vocab_size, options), []
    tu.assign_non_tensor(data, disable_auto_offload=True)
    with engine.eval_mode(disable_auto_offload=True):
        metrics.append(engine.infer_batch(data.copy())["metrics"])
    with engine.train_mode(disable_auto_offload=True):
        metrics.append(engine.train_batch(data.copy(), _loss(options))["metrics"])
    names = ("prefix/groups", "prefix/reuse_fraction", "prefix/predicted_speedup", "prefix/stock_rows")
    Path(folder, "found.json").write_text(
        json.dumps({"rates": rates, "metrics": [{name: one[name][0] for name in names} for one in metrics]})
    )
    torch.distributed.destroy_process_group()


def test_auto_measures_and_shares(tmp_path, spawn):
    write_tiny_model(tmp_path / "model", family="qwen3_5_text")
    spawn(_auto, args=(str(tmp_path),), nprocs=1)
    saved = json.loads((tmp_path / "found.json").read_text())
    assert len(saved["rates"]) == 2  # of log-probs and updates
    for rates in saved["rates"]:  # on a busy machine noise takes any of them to zero
        assert min(rates) >= 0 and max(rates) > 0
    for found in saved["metrics"]:
        assert found["prefix/groups"] == 3 and found["prefix/stock_rows"] == 0
        assert found["prefix/reuse_fraction"] > 0.5 and found["prefix/predicted_speedup"] >= 1.05
