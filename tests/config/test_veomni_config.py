"""Options of `model_engine=prefix_veomni`: what composes, and what is refused in the driver, by which key. Needs no
VeOmni."""

import functools

import driver
import pytest
from driver import ACTOR, MODEL, REF, ROLES
from hydra.errors import InstantiationException
from transformers import AutoConfig, AutoModelForImageTextToText
from verl.workers.config import VeOmniActorConfig, VeOmniEngineConfig

from verl_prefix.config import engines
from verl_prefix.config.veomni import VEOMNI_TOPOLOGY, PrefixVeOmniActorConfig, PrefixVeOmniEngineConfig
from verl_prefix.models.veomni import unread_weight
from verl_prefix.testing import write_tiny_model

VEOMNI = f"{ACTOR}.veomni"
KERNELS = [f"{VEOMNI}.{name}_implementation=fla" for name in ("causal_conv1d", "chunk_gated_delta_rule")]
ULYSSES = f"{VEOMNI}.ulysses_parallel_size=2"
checked = functools.partial(driver.checked, "prefix_veomni")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(engines, "installed_version", driver.installed("0.1.12", "veomni"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("tiny")
    families = ("qwen3", "qwen3_moe", "phi3", "qwen3_5_text", "qwen3_vl", "qwen2_5_vl")
    dense = write_tiny_model(tmp / "qwen3_moe_dense", family="qwen3_moe", mlp_only_layers=[0])
    return {family: write_tiny_model(tmp / family, family=family) for family in families} | {"qwen3_moe_dense": dense}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", []),
        ("qwen3", [ULYSSES, f"{VEOMNI}.fsdp_size=2"]),
        ("qwen3", [f"{VEOMNI}.attn_implementation=sdpa", f"{MODEL}.enable_gradient_checkpointing=True"]),
        ("qwen3", [f"{VEOMNI}.cross_entropy_loss_implementation=chunk_loss", f"{MODEL}.use_fused_kernels=True"]),
        ("qwen3", [f"{VEOMNI}.param_offload=True", f"{VEOMNI}.optimizer_offload=True"]),
        ("qwen3", [f"{VEOMNI}.basic_modules=[Qwen3MLP]", f"{VEOMNI}.mixed_precision=False"]),
        ("qwen3_moe", [f"{VEOMNI}.expert_parallel_size=4", f"{VEOMNI}.moe_implementation=fused_triton"]),
        ("qwen3_5_text", KERNELS),
        ("qwen3", ["trainer.n_gpus_per_node=1", f"{VEOMNI}.init_device=cuda"]),
        ("phi3", [f"{ACTOR}.prefix.schedule=stock"]),
    ],
)
def test_what_is_accepted_builds_both_engines_configs(paths, family, overrides):
    config = checked(paths[family], *overrides)
    actor, ref = driver.built(config)
    for role in (actor, ref):
        assert isinstance(role, PrefixVeOmniActorConfig) and isinstance(role, VeOmniActorConfig)
        assert isinstance(role.engine, PrefixVeOmniEngineConfig) and isinstance(role.engine, VeOmniEngineConfig)
        assert role.engine.strategy == "prefix_veomni" and role.engine.prefix == actor.prefix
    assert ref.engine.forward_only and not actor.engine.forward_only
    # One process has one topology, and modules of VeOmni one choice of kernels.
    same = [name for name in VeOmniEngineConfig.__dataclass_fields__ if name.endswith("_implementation")]
    for key in (*VEOMNI_TOPOLOGY, *same, "init_device"):
        assert ref.engine[key] == actor.engine[key], key
    assert config.critic._target_ == "verl.workers.config.VeOmniCriticConfig"


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("qwen3", f"{ACTOR}.pad_to_length=True", r"actor.veomni.pad_to_length=True, or .*pad_to_length=False"),
        ("qwen3", f"{VEOMNI}.pad_to_length=True", r"actor.veomni.pad_to_length=True, or .*pad_to_length=False"),
        ("qwen3", f"{REF}.veomni.pad_to_length=True", r"ref.veomni.pad_to_length=True, or .*ref.pad_to_length=False"),
        (
            "qwen3", f"{VEOMNI}.enable_async_activation_offload=True",
            r"actor.veomni.enable_async_activation_offload=True counts .*; set .*=False, and actor.prefix.offload=True",
        ),
        ("qwen3", f"{VEOMNI}.enable_reentrant=True", r"enable_reentrant=True: .*; set .*enable_reentrant=False"),
        ("qwen3", f"{VEOMNI}.init_device=cpu", r"init_device=cpu: on 8 GPUs VeOmni .* from meta alone; set that"),
        ("qwen3", f"{VEOMNI}.init_device=cuda", r"veomni.init_device=cuda: on 8 GPUs VeOmni .* from meta alone"),
        ("qwen3", "trainer.n_gpus_per_node=1", r"init_device=meta: on 1 GPU VeOmni .* from cuda alone; set that"),
        ("qwen3", f"{VEOMNI}.router_replay.mode=R2", r"=R2: qwen3 has other routers than qwen3_moe; set .*=disabled"),
        ("qwen3_moe_dense", f"{VEOMNI}.router_replay.mode=R2", r"=R2: its layers without experts .*; set .*=disabled"),
        ("qwen3_moe", f"{VEOMNI}.router_replay.mode=R3", r"mode=R3 and .*routing_replay=False: .* set .*=True and"),
        ("qwen3", f"{REF}.veomni.router_replay.mode=R3", r"ref.veomni.router_replay.mode=R3"),
        ("qwen3", f"{ROLES}.rollout.enable_rollout_routing_replay=True", r"routed_experts, which nobody replays"),
        (
            "qwen3", f"{ULYSSES} {VEOMNI}.attn_implementation=sdpa",
            r"attn_implementation=sdpa attends within .*size=2; set .*=flash_attention_2",
        ),
        ("qwen3", f"{VEOMNI}.ulysses_parallel_size=3", r"veomni.ulysses_parallel_size=3 does not divide 8 GPUs"),
        ("qwen3", f"{VEOMNI}.ulysses_parallel_size=8", r"parallel_size=8: of this qwen3 model 4 heads .*; set 4"),
        ("qwen3", f"{ULYSSES} {MODEL}.use_remove_padding=False", r"size=2 needs .*model.use_remove_padding=True"),
        ("qwen3", f"{MODEL}.lora_rank=8", r"model.lora_rank=8: .*builds no adapters; remove it, or .*engine=prefix"),
        ("qwen3", f"{MODEL}.lora.rank=8", r"model.lora.rank=8: .*builds no adapters"),
        ("qwen3", f"{MODEL}.lora_adapter_path=adapters", r"model.lora_adapter_path=adapters: .*builds no adapters"),
        ("qwen3", f"{REF}.veomni.expert_parallel_size=2", r"ref.veomni.expert_parallel_size=2, and the actor's is 1"),
        ("qwen3", f"{REF}.veomni.ulysses_parallel_size=2", r"ref.veomni.ulysses_parallel_size=2, and the actor's is"),
        ("qwen3", f"{REF}.veomni.fsdp_size=4", r"ref.veomni.fsdp_size=4, and the actor's is -1: .*fsdp_size=-1"),
        (
            "qwen3_moe", f"{REF}.veomni.moe_implementation=eager",
            r"ref.veomni.moe_implementation=eager, and the actor's is fused.*: .*one of them in a process; set",
        ),
        ("qwen3", f"{VEOMNI}.fsdp_size=3", r"actor.veomni.fsdp_size=3 does not divide the 8 sets of GPUs .*; set -1"),
        ("qwen3", f"{VEOMNI}.expert_parallel_size=2", r"expert_parallel_size=2: a layer's 0 experts .*; set 1"),
        (
            "qwen3_moe", f"{VEOMNI}.expert_parallel_size=8",
            r"expert_parallel_size=8: a layer's 4 experts .* 8 GPUs.*; set 4",
        ),
        (
            "qwen3_moe", f"{VEOMNI}.expert_parallel_size=4 {VEOMNI}.fsdp_size=2",
            r"expert_parallel_size=4: a layer's 4 experts .* 2 GPUs that share the parameters; set 2",
        ),
        (
            "qwen3_moe", f"{VEOMNI}.expert_parallel_size=2 {VEOMNI}.moe_implementation=eager",
            r"moe_implementation=eager has all experts on each GPU, .*; set .*moe_implementation=fused",
        ),
        ("qwen3", f"{MODEL}.enable_activation_offload=True", r"enable_activation_offload=True moves nothing on VeOmni"),
        ("qwen3", f"{ACTOR}.strategy=fsdp2", r"actor.strategy='fsdp2': .*model_engine=prefix for FSDP2"),
        ("qwen3", f"{ACTOR}.shuffle=True", r"shuffle=False"),
        ("qwen3", f"{ACTOR}.freeze_vision_tower=True", r"a qwen3 model has no tower; remove it"),
        ("qwen3", f"++{VEOMNI}.prefix.schedule=phased", r"actor.veomni.prefix is filled .*set its keys there"),
        ("phi3", "", r"actor.veomni: .*phi3 model on VeOmni: model_type=phi3; of VeOmni's models .*schedule=stock"),
        ("qwen3_5_text", "", r"causal_conv1d_implementation=eager; set fla; chunk_gated_.*=eager; set fla"),
        (
            "qwen3_5_text", f"{' '.join(KERNELS)} {VEOMNI}.ulysses_parallel_size=4",
            r"linear_num_key_heads=2, which ulysses_parallel_size=4 does not divide",
        ),
        (
            "qwen3_5_text", f"{' '.join(KERNELS)} {REF}.veomni.causal_conv1d_implementation=eager",
            r"ref.veomni.causal_conv1d_implementation=eager, and the actor's is fla: .*; set .*=fla",
        ),
        ("qwen2_5_vl", "", r"no parameter of the name visual\..*random weights.*save_original_format=False"),
        ("qwen3_vl", "", r"image_token_id=\d+, where verl's engine puts features in place of token 151655"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_the_driver_by_its_key(paths, family, overrides, message):
    with pytest.raises((ValueError, InstantiationException), match=message):
        checked(paths[family], *overrides.split())


def test_weights_are_read_by_name_in_one_file_or_several(paths, tmp_path):
    """As Qwen2.5-VL's are on the hub, and as transformers 5 has them."""
    hf_config = AutoConfig.from_pretrained(paths["qwen2_5_vl"])
    model = AutoModelForImageTextToText.from_pretrained(paths["qwen2_5_vl"])
    for original in (True, False):
        for size in ("1GB", "100KB"):
            folder = tmp_path / f"{original}{size}"
            model.save_pretrained(folder, save_original_format=original, max_shard_size=size)
            assert (unread_weight(hf_config, str(folder)) is not None) is original
    assert unread_weight(hf_config, "hub/name") is None
    assert unread_weight(AutoConfig.from_pretrained(paths["qwen3_vl"]), paths["qwen2_5_vl"]) is None


def test_without_veomni_the_driver_says_what_to_install(paths, monkeypatch):
    monkeypatch.setattr(engines, "installed_version", lambda name: None)
    with pytest.raises(ValueError, match=r"prefix_veomni, and veomni is not installed: pip install veomni==0\.1\.12"):
        checked(paths["qwen3"])
