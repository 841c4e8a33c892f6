"""Options of `model_engine=prefix_megatron`: what composes, and what is refused in the driver, by which key. Needs no
megatron-core, but where its fields are compared."""

import dataclasses
import functools

import driver
import pytest
from driver import ACTOR, MODEL, REF, ROLES
from hydra.errors import InstantiationException
from transformers import GPT2Config
from verl.workers.config import McoreActorConfig, McoreEngineConfig

from verl_prefix.config import engines
from verl_prefix.config import transformer_fields as fields
from verl_prefix.config.megatron import PrefixMegatronActorConfig, PrefixMegatronEngineConfig
from verl_prefix.config.transformer_fields import TOPOLOGY
from verl_prefix.testing import write_tiny_model

MEGATRON, REFS = f"{ACTOR}.megatron", f"{REF}.megatron"
TP, EP = f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.expert_model_parallel_size"
ETP, VANILLA = f"{MEGATRON}.expert_tensor_parallel_size", f"{MEGATRON}.vanilla_mbridge"
CP, REPLAY = f"{MEGATRON}.context_parallel_size=2", f"{MEGATRON}.router_replay.mode"
RECORDS = f"{ROLES}.rollout.enable_rollout_routing_replay=True"
OVERRIDE, DDP = f"++{MEGATRON}.override_transformer_config", f"++{MEGATRON}.override_ddp_config"
FULL = " ".join(f"{OVERRIDE}.recompute_{key}" for key in ("granularity=full", "method=uniform", "num_layers=1"))
checked = functools.partial(driver.checked, "prefix_megatron")
SKIP = f"{ACTOR}.prefix.skip_zero_advantage=True {ACTOR}.use_kl_loss=False"
BALANCED, PACKED = f"{OVERRIDE}.moe_router_load_balancing_type=aux_loss", f"{ACTOR}.prefix.schedule=packed"


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(engines, "installed_version", driver.installed("0.16.1", "megatron"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("tiny")
    families = ("qwen3", "qwen3_moe", "phi3", "deepseek_v3", "glm4_moe", "qwen3_5_text", "qwen3_vl")
    GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=64).save_pretrained(tmp / "gpt2")
    return {family: write_tiny_model(tmp / family, family=family) for family in families} | {"gpt2": str(tmp / "gpt2")}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", ""),
        ("qwen3", f"{TP}=4 {FULL}"),
        ("qwen3", f"{TP}=2 {MEGATRON}.sequence_parallel=False"),
        ("qwen3", f"{MEGATRON}.use_distributed_optimizer=False {MEGATRON}.dtype=float16 {MEGATRON}.seed=7"),
        ("qwen3", f"{DDP}.overlap_grad_reduce=True {DDP}.overlap_param_gather=True {DDP}.bucket_size=100000"),
        ("qwen3", f"{MEGATRON}.param_offload=True {MEGATRON}.optimizer_offload=True"),
        ("qwen3", f"{MEGATRON}.use_dist_checkpointing=True {MEGATRON}.dist_checkpointing_path=/somewhere"),
        ("qwen3", f"{OVERRIDE}.recompute_granularity=selective {OVERRIDE}.apply_rope_fusion=True"),
        ("qwen3", f"{OVERRIDE}.attention_dropout=0.0 {OVERRIDE}.mtp_num_layers=null {OVERRIDE}.cuda_graph_impl=none"),
        ("qwen3", f"{ACTOR}.optim.optimizer=sgd {ACTOR}.entropy_from_logits_with_chunking=True {VANILLA}=True"),
        ("qwen3", f"{MODEL}.use_remove_padding=False"),
        ("qwen3", f"{CP} {TP}=2 {OVERRIDE}.cp_comm_type=a2a"),
        ("qwen3_moe", f"{CP} {EP}=4 {VANILLA}=True {BALANCED} {PACKED}"),
        ("qwen3_moe", f"{EP}=4 {OVERRIDE}.moe_permute_fusion=True {OVERRIDE}.moe_token_dispatcher_type=flex"),
        ("qwen3_moe", f"{TP}=2 {EP}=2 {ETP}=1 {OVERRIDE}.moe_router_load_balancing_type=none"),
        ("qwen3_moe", f"{BALANCED} {OVERRIDE}.moe_aux_loss_coeff=0.001 {PACKED}"),
        ("qwen3_moe", f"++{MEGATRON}.override_mcore_model_config.moe_config.freeze_moe_router=True"),
        ("qwen3_moe", f"{REPLAY}=R3 {RECORDS}"),
        ("glm4_moe", f"{REPLAY}=R2"),
        ("glm4_moe", f"{VANILLA}=True {SKIP}"),
        ("glm4_moe", f"{OVERRIDE}.moe_router_enable_expert_bias=True {SKIP}"),
        ("deepseek_v3", f"{OVERRIDE}.moe_router_bias_update_rate=0 {SKIP}"),
        ("deepseek_v3", f"{TP}=2 {OVERRIDE}.apply_rope_fusion=False"),
        ("phi3", f"{ACTOR}.prefix.schedule=stock {OVERRIDE}.hidden_dropout=0.1 {OVERRIDE}.fp8=hybrid"),
    ],
)
def test_what_is_accepted_builds_both_engines_configs(paths, family, overrides):
    config = checked(paths[family], *overrides.split())
    actor, ref = driver.built(config)
    for role in (actor, ref):
        assert isinstance(role, PrefixMegatronActorConfig) and isinstance(role, McoreActorConfig)
        assert isinstance(role.engine, PrefixMegatronEngineConfig) and isinstance(role.engine, McoreEngineConfig)
        assert role.engine.strategy == "prefix_megatron" and role.engine.prefix == actor.prefix
        # verl branches on the role's: sizes of batches, environment of workers, losses of distillation, saved weights.
        assert role.strategy == "megatron"
    assert ref.engine.forward_only and not actor.engine.forward_only
    for key in TOPOLOGY:  # one process has one set of process groups
        assert ref.engine[key] == actor.engine[key], key
    assert config.critic._target_ == "verl.workers.config.McoreCriticConfig"


def sized(name: str, size: object) -> str:
    return f"{MEGATRON}.{name}={size}"


REFUSED = [
    (f"{OVERRIDE}.{name}={value}", rf"override_transformer_config.{name}={value} .*; set {instead}")
    for name, value, instead in (
        ("fp8", "hybrid", "null"), ("fp4", "e2m1", "null"), ("fp8_param", True, False),
        ("moe_expert_capacity_factor", 1.0, "null"), ("moe_pad_expert_input_to_capacity", True, False),
        ("moe_token_dropping", True, False), ("enable_cuda_graph", True, False), ("external_cuda_graph", True, False),
        ("cuda_graph_impl", "local", "none"), ("hidden_dropout", 0.1, "0.0"), ("attention_dropout", 0.1, "0.0"),
        ("calculate_per_token_loss", True, False), ("cpu_offloading", True, False),
        ("fine_grained_activation_offloading", True, False), ("experimental_attention_variant", "dsa", "null"),
        ("heterogeneous_block_specs", True, False), ("tp_comm_overlap", True, False), ("mtp_num_layers", 1, "null"),
        ("moe_router_force_load_balancing", True, False),
        ("overlap_moe_expert_parallel_comm", True, False), ("params_dtype", "bf16", "actor.megatron.dtype"),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        *(("qwen3", overrides, message) for overrides, message in REFUSED),
        ("qwen3", f"{OVERRIDE}.use_flash_attn=True", r"use_flash_attn=True is no field of megatron-core .*remove it"),
        ("qwen3", f"{OVERRIDE}.context_parallel_size=2", r"size=2, and .*context_parallel_size is 1: .*; remove"),
        (
            "qwen3", sized("pipeline_model_parallel_size", 3),
            r"pipeline_model_parallel_size=3 does not divide \d+ GPUs; set 1",
        ),
        *(
            ("qwen3", sized("virtual_pipeline_model_parallel_size", n), rf"virtual_pipeline_\w+={n}: .*_size=null")
            for n in (1, 2)
        ),
        (
            "qwen3", f"{sized('context_parallel_size', 4)} {TP}=2",
            r"context_parallel_size=4 times 2 ranks of tensor parallelism: .* 4 heads are not its multiple; set 2",
        ),
        ("qwen3", sized("context_parallel_size", 3), r"context_parallel_size=3 does not divide 8 GPUs; set a divisor"),
        (
            "qwen3", f"{CP} {TP}=2 trainer.n_gpus_per_node=2",
            r"tensor_model_parallel_size=2: 4 GPUs have the same rows, .* 2 GPUs; set 1",
        ),
        (
            "qwen3", f"{sized('context_parallel_size', 4)} {sized('pipeline_model_parallel_size', 4)} {PACKED}",
            r"context_parallel_size=4 does not divide the 2 GPUs of a stage; set 2",
        ),
        ("qwen3", f"{REFS}.context_parallel_size=2", r"ref.megatron.context_parallel_size=2, and the actor's is 1"),
        (
            "qwen3", f"{CP} {OVERRIDE}.cp_comm_type=p2p", r"cp_comm_type=p2p: ranks of a shared .*; set a2a, or remove",
        ),
        (
            "qwen3_moe", f"{CP} {PACKED} {OVERRIDE}.moe_router_load_balancing_type=aux_loss",
            r"=aux_loss with .*context_parallel_size=2: Megatron-Bridge .*; set .*vanilla_mbridge=True, or .*=none",
        ),
        ("qwen3", f"{CP} {MODEL}.use_remove_padding=False", r"context_parallel_size=2 needs .*padding=True; set it"),
        (
            "qwen3", f"{MEGATRON}.dynamic_context_parallel=True {MEGATRON}.max_seqlen_per_dp_cp_rank=64",
            r"dynamic_context_parallel=True has other ranks .*=False, or model_engine=megatron",
        ),
        ("qwen3", sized("use_megatron_fsdp", True), r"use_megatron_fsdp=True .*=False, or model_engine=megatron"),
        ("qwen3", f"{DDP}.use_megatron_fsdp=True", r"override_ddp_config.use_megatron_fsdp=True .*; set False"),
        ("qwen3", sized("use_mbridge", False), r"use_mbridge=False: .*set .*use_mbridge=True"),
        ("qwen3", sized("qat.enable", True), r"megatron.qat.enable=True: .*; set .*=False, or model_engine=meg"),
        ("qwen3", f"{REPLAY}=R2", r"router_replay.mode=R2: this qwen3 model has no experts; set .*mode=disabled"),
        ("qwen3_moe", f"{REFS}.router_replay.mode=R3", r"ref.megatron.router_replay.mode=R3: ref replays .*=disabled"),
        ("qwen3_moe", f"{REPLAY}=R3", r"mode=R3 and .*routing_replay=False: .*; set .*routing_replay=True and"),
        ("qwen3_moe", f"{REPLAY}=R2 {RECORDS}", r"mode=R2 and .*routing_replay=True: .*, or False and R2"),
        ("qwen3_moe", f"{REPLAY}=R2 {MODEL}.use_remove_padding=False", r"mode=R2: .*; set .*use_remove_padding=True"),
        ("qwen3_moe", f"{REPLAY}=R2 {OVERRIDE}.moe_router_fusion=True", r"_fusion=True with .*mode=R2: .*; set .*=Fal"),
        ("qwen3_moe", f"{REPLAY}=R2 {ACTOR}.prefix.trace_dir=/tmp", r"trace_dir=/tmp and .*mode=R2: .*; remove it, or"),
        ("qwen3", sized("pad_to_length", True), r"without padding; set it to False: \S+megatron.pad_to_\w+=F"),
        ("qwen3", RECORDS, r"routed_experts.*set it to False"),
        ("qwen3", f"{MODEL}.mtp.enable=True", r"model.mtp.enable=True trains .*; set .*=False"),
        ("qwen3", f"{MODEL}.lora.rank=8", r"model.lora.rank=8: .*adapters of Megatron; remove it, or .*engine=prefix"),
        ("qwen3", f"{MODEL}.lora_rank=8", r"model.lora_rank=8: .*adapters of Megatron"),
        ("qwen3", f"{MODEL}.enable_activation_offload=True", r"activation_offload=True moves nothing on Megatron"),
        ("qwen3", f"{REFS}.tensor_model_parallel_size=2", r"ref.megatron.tensor_\w+=2, and the actor's is 1: .*size=1"),
        ("qwen3_moe", f"{REFS}.expert_tensor_parallel_size=1", r"megatron.expert_tensor_\w+=1, .*None: .*size=null"),
        ("qwen3", f"{TP}=4 trainer.n_gpus_per_node=6", r"size=4: 4 GPUs have the same rows, .* 6 GPUs; set 2"),
        ("qwen3", f"{TP}=8", r"tensor_model_parallel_size=8: of this qwen3 model 4 heads are not its multiple; set 4"),
        ("qwen3", f"{EP}=2", r"expert_model_parallel_size=2: a layer's 0 experts cannot .*; set 1"),
        ("qwen3_moe", f"{EP}=8", r"expert_model_parallel_size=8: a layer's 4 experts cannot .*; set 4"),
        ("qwen3_moe", f"{EP}=4 {ETP}=4", r"size=4 times .*_tensor_\w+=4 does not divide the 8 GPUs .*set 4 and 2"),
        (
            "qwen3_moe", f"{TP}=2 {MEGATRON}.sequence_parallel=False",
            r"sequence_parallel=False: megatron-core trains experts .* it alone; set True",
        ),
        ("qwen3_moe", BALANCED, r"load_balancing_type=aux_loss is a loss of each pass.*; set .*prefix.schedule=packed"),
        (
            "qwen3_moe", f"{BALANCED} {PACKED} {SKIP}",
            r"that routers learn from under .*=aux_loss; set .*skip_zero_advantage=False, or .*=none",
        ),
        (
            "qwen3_moe", f"{OVERRIDE}.moe_router_enable_expert_bias=True {SKIP}",
            r"learn from under .*update_rate=0.001; set .*skip_zero_advantage=False, or .*update_rate=0$",
        ),
        ("deepseek_v3", SKIP, r"learn from under .*update_rate=0.001; set .*skip_zero_advantage=False, or .*rate=0$"),
        ("qwen3", f"{SKIP} {ACTOR}.policy_loss.loss_mode=dro", r"a gradient under .*loss_mode=dro; set it to one "),
        ("qwen3_moe", f"{OVERRIDE}.moe_z_loss_coeff=0.001", r"moe_z_loss_coeff=0.001 counts a .*set null"),
        ("qwen3", f"{OVERRIDE}.overlap_p2p_comm=True", r"overlap_p2p_comm=True belongs to .*set False"),
        ("qwen3", f"{OVERRIDE}.variable_seq_lengths=False", r"variable_seq_lengths=False gives passes .*set True"),
        (
            "qwen3_moe", f"actor_rollout_ref.actor.prefix.schedule=packed {OVERRIDE}.moe_router_fusion=True "
            f"{OVERRIDE}.moe_router_load_balancing_type=aux_loss", r"fusion=True with .*=aux_loss: .*fusion=False, or",
        ),
        (
            "qwen3_moe", f"{OVERRIDE}.moe_router_load_balancing_type=sinkhorn {PACKED}",
            r"=sinkhorn balances .*; set .*=none",
        ),
        (
            "glm4_moe", f"{VANILLA}=True {OVERRIDE}.moe_aux_loss_coeff=0.001",
            r"moe_router_load_balancing_type=seq_aux_loss is a loss .*schedule=packed",
        ),
        ("deepseek_v3", f"{OVERRIDE}.apply_rope_fusion=True", r"apply_rope_fusion=True, whose kernel for latent"),
        ("qwen3", f"{ACTOR}.optim.optimizer=muon", r"optimizer=muon: verl builds adam and sgd alone .*; set one"),
        ("qwen3", f"{MEGATRON}.strategy=veomni", r"megatron.strategy='veomni': .*Megatron only; set .*=megatron, or"),
        ("qwen3", f"{ACTOR}.strategy=fsdp2", r"actor.strategy='fsdp2': .*model_engine=prefix for FSDP2"),
        ("qwen3", f"{ACTOR}.shuffle=True", r"shuffle=False"),
        ("qwen3", f"{ACTOR}.freeze_vision_tower=True", r"a qwen3 model has no tower; remove it"),
        ("qwen3", f"++{MEGATRON}.prefix.schedule=phased", r"actor.megatron.prefix is filled .*set its keys there"),
        ("phi3", "", r"actor.megatron: .*phi3 model on Megatron: model_type=phi3; of megatron-core's .*schedule=stock"),
        ("qwen3_5_text", "", r"model_type=qwen3_5_text; of megatron-core's models those of llama"),
        ("qwen3_vl", "", r"model_type=qwen3_vl; of megatron-core's models those of llama"),
        ("gpt2", f"{TP}=2", r"model_type=gpt2"),  # which has no intermediate_size
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_the_driver_by_its_key(paths, family, overrides, message):
    with pytest.raises((ValueError, InstantiationException), match=message):
        checked(paths[family], *overrides.split())


def test_fused_kernels_are_off_with_a_warning(paths, caplog):
    checked(paths["qwen3"], f"{MODEL}.use_fused_kernels=True")
    assert "model.use_fused_kernels=True is off in the prefix engine" in caplog.text


def test_without_megatron_core_the_driver_says_what_to_install(paths, monkeypatch):
    monkeypatch.setattr(engines, "installed_version", lambda name: None)
    message = r"prefix_megatron, and megatron-core is not installed: pip install megatron-core==0\.16\.1"
    with pytest.raises(ValueError, match=message):
        checked(paths["qwen3"])


def test_ranks_of_tensor_parallelism_have_the_same_rows_and_cut_none(paths):
    actor = driver.composed("prefix_megatron", paths["qwen3"], f"{TP}=4").actor_rollout_ref.actor
    assert engines.slices_of("actor", actor) == (f"{MEGATRON}.context_parallel_size", 1)
    assert next(engines.heads_of(actor)) == (TP, 4, 1) and engines.copies_of(actor) == 4


def test_every_field_of_megatron_cores_configs_is_decided_once():
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    tables = [fields.ACTS, fields.INERT, fields.SIZES, fields.ONLY, fields.NEVER, fields.ELSEWHERE]
    decided = functools.reduce(lambda one, other: [*one, *other], tables)
    real = {field.name for field in dataclasses.fields(MLATransformerConfig) if not field.name.startswith("_")}
    assert sorted(decided) == sorted(set(decided)) and set(decided) == real
    # What a bridge that sets nothing leaves is accepted, but dropout and passes of one length: both bridges set these.
    config = MLATransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    left = {name for name in fields.ONLY if fields.refusal(name, getattr(config, name)) is not None}
    assert left == {"hidden_dropout", "attention_dropout", "variable_seq_lengths"}
