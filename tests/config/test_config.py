"""Options: what composes, what is refused, and that it is refused in the driver, where verl's main_ppo validates."""

import importlib
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import verl  # noqa: F401
from driver import built
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import ConfigCompositionException, InstantiationException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_prefix.backends.hugging_face import HFBackend
from verl_prefix.config.engines import slices_of
from verl_prefix.config.fsdp import PrefixActorConfig, PrefixEngineConfig
from verl_prefix.config.model import read_hf_config
from verl_prefix.config.options import PrefixConfig
from verl_prefix.engine.metrics.metric_table import METRICS, REUSE, reduction_of
from verl_prefix.models.support import check_supported
from verl_prefix.testing import write_tiny_model
from verl_prefix.versions import VERL_MAIN, installed_version

ACTOR = "actor_rollout_ref.actor"
REPLAY = f"{ACTOR}.fsdp_config.router_replay.mode"
SDPA = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"


def composed(*overrides: str, config_name: str = "ppo_trainer"):
    engine = [] if config_name == "prefix_grpo" else ["model_engine=prefix"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(config_name, overrides=[*engine, f"{ACTOR}.use_dynamic_bsz=true", *overrides])


def validate(model_path: str, *overrides: str) -> None:
    config = composed(f"actor_rollout_ref.model.path={model_path}", "actor_rollout_ref.rollout.n=4", *overrides)
    validate_config(config, use_reference_policy=True, use_critic=False)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("config_name", ["ppo_trainer", "prefix_grpo"])
def test_model_engine_swaps_actor_ref_and_critic_and_nothing_else(config_name):
    config = composed("actor_rollout_ref.rollout.n=4", f"{ACTOR}.prefix.schedule=packed", config_name=config_name)
    actor, ref = built(config)
    for role in (actor, ref):
        assert isinstance(role, PrefixActorConfig) and isinstance(role.engine, PrefixEngineConfig)
        assert role.engine.strategy == "prefix" and role.engine.prefix.schedule == "packed"
    assert ref.engine.forward_only
    assert config.critic._target_ == "verl_prefix.config.fsdp.PrefixCriticConfig"
    assert (config.trainer.v1.trainer_mode == "prefix_sync") == (config_name == "prefix_grpo")
    assert (config.algorithm.adv_estimator == "grpo") == (config_name == "prefix_grpo")


def _critic(model_path: str, *overrides: str):
    """The critic's config, as verl's driver checks it."""
    paths = [f"{role}.path={model_path}" for role in ("actor_rollout_ref.model", "critic.model")]
    config = composed("actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=gae", *paths, *overrides)
    validate_config(config, use_reference_policy=False, use_critic=True)
    return omega_conf_to_dataclass(config.critic)


def test_the_critic_has_the_actors_options_and_loads_the_engine_where_it_is_sent(model_path):
    of_actor = "skip_zero_advantage=true", "trace_dir=none", "trace_max_steps=3"
    critic = _critic(model_path, *(f"{ACTOR}.prefix.{option}" for option in ("schedule=packed", *of_actor)))
    assert critic.engine.strategy == "prefix" and critic.engine.prefix == PrefixConfig(schedule="packed")
    assert type(critic.engine).__module__ == "verl_prefix.backends.fsdp"
    assert _critic(model_path, "critic=dp_critic").engine.strategy == "fsdp"


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("critic.strategy=fsdp", "critic.strategy='fsdp'.*critic=dp_critic"),
        ("critic.shuffle=true", "critic.shuffle=True tears"),
        ("critic.fsdp.pad_to_length=true", "critic.fsdp.pad_to_length=True: .* set it to False: critic.fsdp.pad_to"),
        ("critic.loss_agg_mode=seq-mean-token-sum-norm", "critic.loss_scale_factor=null divides"),
        ("critic.fsdp.ulysses_sequence_parallel_size=8", "critic.fsdp.ulysses_sequence_parallel_size=8.*4 heads"),
        ("critic.fsdp.ulysses_sequence_parallel_size=3", "critic.fsdp.ulysses_sequence_parallel_size=3 does not"),
        ("+critic.model.override_config.attention_dropout=0.1", r"\+critic.model.override_config.attention_dr"),
    ],
)
def test_what_the_critic_cannot_is_refused_by_its_key(model_path, override, wanted):
    with pytest.raises((ValueError, InstantiationException)) as raised:
        _critic(model_path, override)
    assert re.search(wanted, str(raised.value.__cause__ or raised.value)), raised.value


@pytest.mark.parametrize(("family", "why"), [("lfm2", "token classification of it.*v_head"), ("qwen3_5", "its tower")])
def test_a_critic_that_would_get_trls_value_head_or_sees_images_is_refused(tmp_path, family, why):
    with pytest.raises(ValueError, match=f"critic.model.path=.*{why}.*; set critic=dp_critic"):
        _critic(write_tiny_model(tmp_path / family, family=family))


def test_verl_scripts_that_say_fsdp2_still_get_the_prefix_engine():
    actor = omega_conf_to_dataclass(composed(f"{ACTOR}.strategy=fsdp2").actor_rollout_ref.actor)
    assert actor.engine.strategy == "prefix"


def test_good_config_passes_the_driver_checks(model_path):
    validate(model_path)
    ulysses = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"
    validate(model_path, ulysses)
    validate(model_path, ulysses, SDPA)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ACTOR}.shuffle=True", r"shuffle=False"),
        (f"{ACTOR}.strategy=fsdp", r"strategy=fsdp2, or model_engine=dp\W*full_key"),
        (f"{ACTOR}.strategy=fsdp_turbo", r"strategy=fsdp2, or model_engine=dp\W*full_key"),
        (f"{ACTOR}.strategy=veomni", r"strategy='veomni'.*strategy=fsdp2, or model_engine=veomni without it"),
        (f"{ACTOR}.ulysses_sequence_parallel_size=3", r"ulysses_sequence_parallel_size=3 does not divide 8 GPUs"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=8", r"size=8: of this qwen3 model 4 heads .*; set 4$"),
        (
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2 actor_rollout_ref.model.use_remove_padding=False",
            r"size=2 needs actor_rollout_ref.model.use_remove_padding=True",
        ),
        (f"{ACTOR}.pad_to_length=True", r"pad_to_length=False"),
        (f"{ACTOR}.fsdp_config.qat.enable=True", r"fsdp_config.qat.enable=False, or model_engine=dp"),
        (f"{ACTOR}.prefix.mini_batches=turns", r"prefix.mini_batches='turns': set one of rows, prompts"),
        (f"{ACTOR}.prefix.loss_weights=turns", r"prefix.loss_weights='turns': set one of rows, sessions"),
        (
            f"{ACTOR}.prefix.loss_weights=sessions {ACTOR}.policy_loss.loss_mode=dro",
            r"loss_mode=dro is not; set it to one of vanilla.*, or .*loss_weights=rows",
        ),
        (
            f"{ACTOR}.prefix.loss_weights=sessions {ACTOR}.policy_loss.loss_mode=kl_cov {ACTOR}.prefix.schedule=stock",
            r"loss_mode=kl_cov is not; set it to one of vanilla",
        ),
        (f"{ACTOR}.prefix.exchange=on", r"prefix.exchange='on': set one of auto, off"),
        (f"{ACTOR}.prefix.schedule=tree", r"prefix.schedule='tree': set one of auto, packed, phased, stock"),
        (f"{ACTOR}.prefix.attention=magi", r"prefix.attention='magi': set one of"),
        (f"{ACTOR}.prefix.wave_tokens=0", r"prefix.wave_tokens=0: set a number of tokens >= 1"),
        (f"{ACTOR}.prefix.logits_chunk=0", r"prefix.logits_chunk=0: set a number of tokens >= 1"),
        (f"{ACTOR}.prefix.offload=maybe", r"prefix.offload='maybe': set true or false"),
        (f"{ACTOR}.prefix.offload=True {ACTOR}.prefix.schedule=packed", r"moves nothing with prefix.schedule='packed'"),
        (f"{ACTOR}.prefix.wave_tokens=8 {ACTOR}.prefix.schedule=packed", r"wave_tokens=8 sets nothing"),
        (f"{ACTOR}.prefix.verify=sometimes", r"prefix.verify='sometimes': set first_step, off"),
        (f"{ACTOR}.prefix.verify=off {ACTOR}.prefix.verify_action=fallback", r"needs prefix.verify, which is off"),
        (f"{ACTOR}.prefix.min_speedup=-1", r"prefix.min_speedup=-1: set a number >= 0"),
        *(
            (f"{ACTOR}.prefix.min_speedup=2 {ACTOR}.prefix.schedule={one}", r"=2 decides nothing .*set .*schedule=auto")
            for one in ("packed", "phased")
        ),
        (f"{ACTOR}.prefix.trace_dir=", r"prefix.trace_dir='': name a folder, or set null"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", r"set actor_rollout_ref.actor.loss_scale_factor"),
        (f"{ACTOR}.policy_loss.loss_mode=geo_mean", r"loss_mode=geo_mean averages .*set .*loss_mode to one of vanilla"),
        (f"{ACTOR}.policy_loss.loss_mode=clip_cov", r"loss_mode=clip_cov drops .*prefix.schedule=stock"),
        (f"{ACTOR}.policy_loss.loss_mode=kl_cov", r"loss_mode=kl_cov penalises .*prefix.schedule=stock"),
        (
            f"{ACTOR}.policy_loss.loss_mode=bypass_mode +{ACTOR}.policy_loss.rollout_correction.rollout_is=token "
            f"+{ACTOR}.policy_loss.rollout_correction.rollout_is_batch_normalize=True",
            r"rollout_is_batch_normalize=True divides .*set it to False",
        ),
        (f"{ACTOR}.prefix.skip_zero_advantage=maybe", r"skip_zero_advantage='maybe': set true or false"),
        (
            f"{ACTOR}.prefix.skip_zero_advantage=True {ACTOR}.prefix.schedule=stock",
            r"skip_zero_advantage=True with prefix.schedule='stock': remove it, or set prefix.schedule",
        ),
        *(
            (
                f"{ACTOR}.prefix.skip_zero_advantage=True {ACTOR}.{key}={value}",
                rf"under {ACTOR}.{key}={value}; set it to ",
            )
            for key, value in (
                ("entropy_coeff", "0.01"),
                ("use_kl_loss", "True"),
                ("policy_loss.loss_mode", "dro"),
                ("policy_loss.loss_mode", "my_own"),
            )
        ),
        (f"{ACTOR}.freeze_vision_tower=True", r"a qwen3 model has no tower; remove it"),
        (
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            r"routed_experts, which nobody replays: set it to False, or router_replay.mode=R3",
        ),
        (f"{REPLAY}=R2", rf"{REPLAY}=R2: qwen3 has other routers than qwen3_moe, .*; set {REPLAY}=disabled"),
        (f"{REPLAY}=R3", rf"{REPLAY}=R3 and .*routing_replay=False: .*set .*routing_replay=True"),
        (
            f"{REPLAY}=R2 actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            rf"{REPLAY}=R2 and .*routing_replay=True: .*or False and R2",
        ),
        (f"{REPLAY}=R4", r"Invalid router_replay mode: R4"),
        (f"++{ACTOR}.fsdp_config.prefix.schedule=phased", r"actor.fsdp_config.prefix is filled .*set its keys there"),
    ],
)
def test_bad_option_is_refused_in_the_driver_with_what_to_type(model_path, override, message):
    with pytest.raises((ValueError, InstantiationException), match=message):
        validate(model_path, *override.split())


def test_router_replay_of_a_mixture_is_accepted(tmp_path):
    path = write_tiny_model(tmp_path / "experts", family="qwen3_moe")
    validate(path, f"{REPLAY}=R2")
    validate(path, f"{REPLAY}=R3", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True")
    with pytest.raises(ValueError, match="router_replay.mode='R2' requires .*bypass_mode=False"):  # verl's own check
        validate(path, f"{REPLAY}=R2", "algorithm.rollout_correction.bypass_mode=True")
    for family, wrong in (("mixtral", "mixtral has other routers"), ("glm4_moe", "num_experts_per_tok=1, where")):
        more = {"num_experts_per_tok": 1} if family == "glm4_moe" else {}
        path = write_tiny_model(tmp_path / family, family=family, **more)
        with pytest.raises(ValueError, match=rf"{REPLAY}=R2: {wrong}"):
            validate(path, f"{REPLAY}=R2")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("strategy=fsdp", r"ref.strategy='fsdp': .*ref.strategy=fsdp2"),
        ("fsdp_config.strategy=fsdp", r"ref.fsdp_config.strategy='fsdp': .*ref.fsdp_config.strategy=fsdp2"),
        ("fsdp_config.pad_to_length=True", r"ref.fsdp_config.pad_to_length=True, .*ref.pad_to_length=False"),
        ("fsdp_config.qat.enable=True", r"ref.fsdp_config.qat.enable=True: .*ref.fsdp_config.qat.enable=False"),
        ("fsdp_config.router_replay.mode=R2", r"ref.fsdp_config.router_replay.mode=R2"),
        ("fsdp_config.prefix.schedule=stock", r"ref.fsdp_config.prefix is filled in from .*actor.prefix"),
        ("prefix.schedule=stock", r"ref.prefix=.*set them in actor_rollout_ref.actor.prefix"),
    ],
)
def test_what_ref_cannot_have_is_refused_in_the_driver_by_its_own_key(model_path, option, message):
    overrides = f"actor_rollout_ref.model.path={model_path}", f"++actor_rollout_ref.ref.{option}"
    OmegaConf.resolve(composed(*overrides))  # nobody asks for a reference policy
    OmegaConf.resolve(composed(f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.model.lora_rank=8", *overrides))
    with pytest.raises((ValueError, InstantiationException), match=message):
        OmegaConf.resolve(composed(f"{ACTOR}.use_kl_loss=True", *overrides))


REF = "actor_rollout_ref.ref"
WAVES = f"{ACTOR}.prefix.wave_tokens"
GAE, INFER = "algorithm.adv_estimator=gae", "+critic.ppo_infer_max_token_len_per_gpu"
ROWS = (
    f"{ACTOR}.use_dynamic_bsz=False actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False "
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3 "
    "data.max_prompt_length=500 data.max_response_length=300"
)


@pytest.mark.parametrize(
    ("overrides", "most", "told"),
    [
        ("", 16383, rf"of the 16384 .*\({ACTOR}.ppo_max_token_len_per_gpu=16384\); set .*\(4096, say\), or null"),
        (f"{ACTOR}.prefix.offload=True", 16384, "over the 16384 tokens of a pass"),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", 32767, "ppo_max_token_len_per_gpu=16384 on 2 GPUs"),
        ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=9000", 8999, "rollout.log_prob_max_.*=9000"),
        (f"{REF}.log_prob_max_token_len_per_gpu=100", 16383, "ppo_max_token_len"),  # nobody asks for one
        (f"{ACTOR}.use_kl_loss=True {REF}.log_prob_max_token_len_per_gpu=100", 99, "ref.log_prob_max_token_len_.*=100"),
        (
            f"{ACTOR}.use_kl_loss=True {REF}.log_prob_max_token_len_per_gpu=100 {REF}.ulysses_sequence_parallel_size=2",
            199, "=100 on 2 GPUs",
        ),
        (ROWS, 1599, r"ppo_micro_batch_size_per_gpu=2 rows of data.max_prompt_length=500 \+ max_response_length=300"),
        (f"{ROWS} {ACTOR}.ulysses_sequence_parallel_size=2", 1599, "the 1600 tokens of a pass"),
        (f"{GAE} {INFER}=100", 99, r"critic.ppo_infer_max_token_len_per_gpu=100\)"),
        (f"{GAE} {INFER}=100 critic.fsdp.ulysses_sequence_parallel_size=2", 199, "=100 on 2 GPUs"),
        (f"{GAE} critic.ppo_max_token_len_per_gpu=100 trainer.use_v1=false", 99, r"critic.ppo_max_.*_gpu=100\)"),
        (f"{GAE} critic.ppo_max_token_len_per_gpu=100", 16383, "actor.ppo_max_token_len"),  # v1 does not read it
        (f"{GAE} {INFER}=100 critic=dp_critic", 16383, "actor.ppo_max_token_len"),
        (f"algorithm.adv_estimator=grpo {INFER}=100", 16383, "actor.ppo_max_token_len"),
    ],
)  # fmt: skip
def test_waves_that_leave_nothing_of_a_pass_to_prefixes_are_refused_in_the_driver(model_path, overrides, most, told):
    model = f"actor_rollout_ref.model.path={model_path}"
    OmegaConf.resolve(composed(model, *overrides.split(), f"{WAVES}={most}"))
    for waves in (most + 1, 10 * most):
        with pytest.raises(InterpolationResolutionError, match=rf"prefix.wave_tokens={waves} .*{told}"):
            OmegaConf.resolve(composed(model, *overrides.split(), f"{WAVES}={waves}"))


def test_waves_may_be_longer_than_passes_of_old_log_probs_that_bypass_mode_leaves_out(model_path):
    small = f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=64 {WAVES}=100"
    model, bypass = f"actor_rollout_ref.model.path={model_path}", "algorithm.rollout_correction.bypass_mode=True"
    with pytest.raises(InterpolationResolutionError, match="the 64 tokens of a pass"):
        OmegaConf.resolve(composed(model, *small.split()))
    OmegaConf.resolve(composed(model, *small.split(), bypass))


def test_a_model_type_of_external_lib_is_known_in_the_driver(tmp_path, model_path, monkeypatch):
    (tmp_path / "a_users_models.py").write_text(
        "from transformers import AutoConfig, Qwen3Config\n"
        "AutoConfig.register('a_users_model', type('AUsersConfig', (Qwen3Config,), {'model_type': 'a_users_model'}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = json.loads((Path(model_path) / "config.json").read_text()) | {"model_type": "a_users_model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    libs = OmegaConf.create({"path": str(tmp_path), "external_lib": ["a_users_models"]})
    assert read_hf_config(libs).model_type == "a_users_model"
    elsewhere = {"path": model_path, "external_lib": "what_only_workers_have"}
    assert read_hf_config(elsewhere).model_type == "qwen3"


def test_sequence_parallelism_of_ref_alone_is_checked_where_the_config_is_resolved(model_path):
    def resolve(*overrides: str) -> None:
        OmegaConf.resolve(composed(f"actor_rollout_ref.model.path={model_path}", *overrides))

    ref = "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size"
    has_ref = f"{ACTOR}.use_kl_loss=True"
    resolve(has_ref, f"{ref}=4")
    resolve(f"{ref}=8")
    resolve(has_ref, f"{ref}=8", f"{ACTOR}.prefix.schedule=stock")
    for size, message in ((8, "of this qwen3 model 4 heads .*; set 4$"), (3, "does not divide 8 GPUs")):
        with pytest.raises(ValueError, match=rf"{ref}={size}:? {message}"):
            resolve(has_ref, f"{ref}={size}")


def test_the_size_of_sequence_parallelism_is_that_of_verls_own_class(model_path):
    """A role's own key over `fsdp_config`'s, where it is over 1; in the driver's checks and in the plan, too."""
    key = "ulysses_sequence_parallel_size"
    for own, of_engine, found in ((1, 1, 1), (1, 4, 4), (2, 1, 2), (2, 4, 2), (4, 2, 4), (2, 8, 2)):
        sizes = [f"actor_rollout_ref.ref.{key}={own}", f"actor_rollout_ref.ref.fsdp_config.{key}={of_engine}"]
        config = composed(f"actor_rollout_ref.model.path={model_path}", f"{ACTOR}.use_kl_loss=True", *sizes)
        OmegaConf.resolve(config)  # (2, 8): 8 does not go with this model's 4 heads, and verl takes 2
        ref = config.actor_rollout_ref.ref
        assert slices_of("ref", ref) == (f"actor_rollout_ref.ref.fsdp_config.{key}", found)
        OmegaConf.set_struct(ref, False)
        for name in [name for name in ref if name.startswith("log_prob_")]:
            ref.pop(name)  # as ActorRolloutRefWorker.init_model does
        ref.use_dynamic_bsz = True
        assert omega_conf_to_dataclass(ref).engine.ulysses_sequence_parallel_size == found


@pytest.mark.parametrize("loss_mode", ["geo_mean", "clip_cov", "mine"])
def test_a_loss_of_a_pass_runs_on_the_stock_path_without_a_word(model_path, caplog, loss_mode):
    validate(model_path, f"{ACTOR}.policy_loss.loss_mode={loss_mode}", f"{ACTOR}.prefix.schedule=stock")
    assert not [record for record in caplog.records if "loss_mode" in record.message]


def test_a_loss_that_is_not_verls_own_is_warned_of_once(model_path, caplog):
    for mode in ("vanilla", "gspo", "mine", "mine"):
        validate(model_path, f"{ACTOR}.policy_loss.loss_mode={mode}")
    (said,) = [record.message for record in caplog.records if "loss_mode" in record.message]
    assert "loss_mode=mine is not of verl 0.9.1" in said


@pytest.mark.parametrize(
    ("option", "ours"), [("use_fused_kernels", "logits_chunk"), ("enable_activation_offload", "offload=True")]
)
def test_options_that_ours_replaces_are_warned_of_once(model_path, caplog, option, ours):
    for _ in range(2):
        validate(model_path, f"actor_rollout_ref.model.{option}=True")
    (said,) = [record.message for record in caplog.records if option in record.message]
    assert f"actor.prefix.{ours}" in said


def async_config(name: str, model_path: str, *overrides: str):
    """Of `verl.experimental.<name>_policy`, 8 GPUs for each of trainer and rollout."""
    package = importlib.import_module(f"verl.experimental.{name}_policy")
    with initialize_config_dir(f"{package.__path__[0]}/config", version_base=None):
        return compose(
            f"{name}_ppo_trainer",
            overrides=[
                "model_engine=prefix", "hydra.searchpath=[pkg://verl.trainer.config]", f"{ACTOR}.use_dynamic_bsz=true",
                "algorithm.adv_estimator=grpo", "actor_rollout_ref.hybrid_engine=False",
                f"{ACTOR}.ppo_mini_batch_size=64", f"actor_rollout_ref.model.path={model_path}", *overrides,
            ],
        )  # fmt: skip


SEVERAL = {"one_step_off": "data.train_batch_size=256", "fully_async": "async_training.require_batches=4"}


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ACTOR}.shuffle=True", "shuffle=False"),
        (f"{ACTOR}.policy_loss.loss_mode=geo_mean", "loss_mode=geo_mean averages .*set "),
        (f"{ACTOR}.prefix.verify=sometimes", "prefix.verify='sometimes': set first_step, off"),
        (f"{ACTOR}.fsdp_config.strategy=fsdp", "fsdp_config.strategy='fsdp': .* FSDP2 only; set .*strategy=fsdp2"),
        (f"{ACTOR}.prefix.mini_batches=prompts", "mini_batches=prompts .*prefix_sync .*mini_batches=rows"),
        (f"{ACTOR}.prefix.loss_weights=sessions", "loss_weights=sessions .*prefix_sync .*loss_weights=rows"),
        ("algorithm.adv_estimator=gae", "a critic .*adv_estimator=grpo .*trainer_mode=separate_async"),
        ("critic.enable=true critic=dp_critic", "a critic .*set .*critic.enable=null, or"),
        ("trainer.v1.trainer_mode=prefix_sync", "trainer_mode=prefix_sync is for verl.trainer.main_ppo .*; remove it"),
        (f"{ACTOR}.freeze_vision_tower=True", "a qwen3 model has no tower"),
        (
            f"SEVERAL {ACTOR}.ppo_mini_batch_size=60",
            "4 mini-batches .*every prompt is torn.*set trainer.balance_batch=F",
        ),
        (
            f"{ACTOR}.prefix.skip_zero_advantage=True distillation.enabled=True",
            "under distillation.enabled=True; set .*skip_zero_advantage=False, or distillation.enabled=False",
        ),
        (
            f"{ACTOR}.prefix.trace_dir=traces distillation.enabled=True",
            "trace_dir=traces records no loss under distillation.enabled=True; set .*trace_dir=null",
        ),
        (f"SEVERAL {ACTOR}.use_prefix_grouper=False", "use_prefix_grouper=False .*set trainer.balance_batch=False"),
    ],
)
def test_what_cannot_work_is_refused_in_the_driver_of_async_trainers(model_path, name, override, message):
    """By verl's own code, called as in the Ray actor that starts workers; fully_async_policy calls no validation."""
    config = async_config(name, model_path, *override.replace("SEVERAL", SEVERAL[name]).split())
    if name == "one_step_off":
        from verl.experimental.one_step_off_policy.main_ppo import OneStepTaskRunner as Runner

        start = Runner.__ray_metadata__.modified_class().run
    else:
        from verl.experimental.fully_async_policy.fully_async_main import FullyAsyncTaskRunner as Runner

        start = Runner.__ray_metadata__.modified_class()._initialize_components
    with pytest.raises(InterpolationResolutionError, match=message) as refused:
        start(config)
    assert "full_key: model_engine" in str(refused.value)


@pytest.mark.parametrize("name", SEVERAL)
def test_async_trainers_deal_prompts_where_a_step_has_several_mini_batches(model_path, name):
    for overrides in ([], [SEVERAL[name]]):
        config = async_config(name, model_path, "data.train_batch_size=64", *overrides)
        OmegaConf.resolve(config)
        assert config.actor_rollout_ref.actor.use_prefix_grouper is bool(overrides)
    uneven = [SEVERAL[name], f"{ACTOR}.ppo_mini_batch_size=60"]  # for 8 ranks, not for 4 of 2 GPUs
    for overrides in (["trainer.balance_batch=false"], [f"{ACTOR}.ulysses_sequence_parallel_size=2"]):
        config = async_config(name, model_path, *uneven, *overrides)
        OmegaConf.resolve(config)
        assert config.actor_rollout_ref.actor.use_prefix_grouper is ("ulysses" in overrides[0])
    for use_v1 in (True, False):
        config = composed(f"trainer.use_v1={use_v1}")  # 1024 prompts, mini-batches of 256
        OmegaConf.resolve(config)
        assert config.actor_rollout_ref.actor.use_prefix_grouper is not use_v1
    uneven = composed("trainer.use_v1=false", "data.train_batch_size=240", f"{ACTOR}.ppo_mini_batch_size=60")
    OmegaConf.resolve(uneven)  # not refused: the engine's log and `plan` say what keeps prompts whole
    assert not uneven.actor_rollout_ref.actor.use_prefix_grouper


@pytest.mark.parametrize(("use_v1", "mode"), [(True, "sync"), (True, "separate_async"), (False, "prefix_sync")])
def test_mini_batches_of_prompts_are_refused_where_verls_trainer_makes_them(use_v1, mode):
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.main_ppo_v0 import TaskRunner

    options = f"{ACTOR}.prefix.mini_batches=prompts", f"trainer.use_v1={use_v1}", f"trainer.v1.trainer_mode={mode}"
    start = (TaskRunnerV1 if use_v1 else TaskRunner).__ray_metadata__.modified_class().run
    wanted = rf"mini_batches=prompts with trainer.use_v1={use_v1} and .*={mode}: .*=prefix_sync .*mini_batches=rows"
    with pytest.raises(InterpolationResolutionError, match=wanted):
        start(composed(*options))
    with pytest.raises(InterpolationResolutionError, match="loss_weights=sessions with .*loss_weights=rows"):
        start(composed(f"{ACTOR}.prefix.loss_weights=sessions", *options[1:]))
    weighed = f"{ACTOR}.prefix.loss_weights=sessions", "trainer.v1.trainer_mode=prefix_sync"
    OmegaConf.resolve(composed(*weighed))
    with pytest.raises(InterpolationResolutionError, match="teacher's losses under .*; set .*loss_weights=rows"):
        OmegaConf.resolve(composed(*weighed, "distillation.enabled=True"))
    replayed = f"{ACTOR}.fsdp_config.router_replay.mode=R2", "algorithm.rollout_correction.bypass_mode=True"
    with pytest.raises(InterpolationResolutionError, match="mode=R2, .*no routed_experts, .*bypass_mode=False"):
        OmegaConf.resolve(composed(*replayed))
    accepted = options[0], "trainer.v1.trainer_mode=prefix_separate_async", "algorithm.adv_estimator=grpo"
    OmegaConf.resolve(composed(*accepted))
    with_critic = *accepted[:2], "algorithm.adv_estimator=gae"
    OmegaConf.resolve(composed(*with_critic))
    for override, wanted in (
        ("critic=dp_critic", "its own critic's mini-batches by rows.*; set algorithm.*critic.enable=null, or"),
        ("critic.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2 is not the actor's 256; set 256, algorithm"),
        (
            "critic.fsdp.ulysses_sequence_parallel_size=2",
            "ulysses_sequence_parallel_size=2 is not the actor's 1; set 1",
        ),
    ):
        with pytest.raises(InterpolationResolutionError, match=f"mini_batches=prompts, and .*{wanted}"):
            OmegaConf.resolve(composed(*with_critic, override))


def test_separate_async_without_servers_on_the_trainers_gpus_is_refused_where_verl_fails_at_it(monkeypatch):
    """verl 0.9.1 itself, by its source; its main branch has none."""
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync

    monkeypatch.delenv("VERL_LOGGING_LEVEL", raising=False)  # which a command of ours may have set here
    is_main = installed_version("verl") == VERL_MAIN
    assert ("flush=True" in inspect.getsource(PPOTrainerSeparateAsync._setup)) is not is_main
    start = TaskRunnerV1.__ray_metadata__.modified_class().run
    for mode in ("separate_async", "prefix_separate_async"):
        options = [f"trainer.v1.trainer_mode={mode}"]
        OmegaConf.resolve(composed(*options))
        with pytest.raises(InterpolationResolutionError, match="rollout.name=hf is one server.* set .*_engine=False"):
            start(composed(*options, "actor_rollout_ref.rollout.name=hf"))
        options += ["actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.hybrid_engine=False"]
        if not is_main:
            with pytest.raises(InterpolationResolutionError, match="logs at INFO .*set .*_LOGGING_LEVEL=WARN .*, or"):
                start(composed(*options))
        with monkeypatch.context() as patch:
            patch.setenv("VERL_LOGGING_LEVEL", "WARN")
            OmegaConf.resolve(composed(*options))


def test_sdpa_which_drops_the_softcap_of_gemma_2_is_refused(tmp_path):
    transformers.Gemma2Config().save_pretrained(tmp_path)
    validate(str(tmp_path))
    validate(str(tmp_path), SDPA.replace("sdpa", "eager"))
    with pytest.raises(ValueError, match="=sdpa drops a gemma2 model's .*; set eager, or"):
        validate(str(tmp_path), SDPA)


@pytest.mark.parametrize("key", ["exchange", "trees", "keep_attention", "verify"])
def test_off_in_a_yaml_file_which_is_false_there_is_off(key):
    config = OmegaConf.merge(composed(), OmegaConf.create(f"actor_rollout_ref: {{actor: {{prefix: {{{key}: off}}}}}}"))
    assert config.actor_rollout_ref.actor.prefix[key] is False
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.engine.prefix == PrefixConfig(**{key: "off"})
    with pytest.raises(ValueError, match=f"prefix.{key}=True"):
        PrefixConfig(**{key: True})


def test_the_page_has_every_key_with_its_default():
    folder = Path(__file__).parents[2] / "verl_prefix/config"
    table = (folder / "README.md").read_text().split("\n## Keys\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\S+)` \| \S", table, flags=re.M)
    options = OmegaConf.load(folder / "prefix/options.yaml")
    said = [(key, OmegaConf.create(f"{key}: {default}")[key]) for key, default in rows]
    assert [("_target_", options._target_), *said] == list(options.items())


def test_the_page_has_every_metric():
    page = (Path(__file__).parents[2] / "verl_prefix/config/README.md").read_text()
    page = page.split("\n## Metrics\n")[1].split("\nWhat changes in verl's own metrics:")[0]
    rows = re.findall(r"^\| ([^|]*`\S+`[^|]*) \| \w", page, flags=re.M)
    (phases,) = re.findall(r"`timing_s/prefix_{(\S+)}`", page)
    said = [f"prefix/{name}" for names in rows for name in re.findall(r"`(\S+?)`", names)]
    said += [f"timing_s/prefix_{phase}" for phase in phases.split(",")]
    reported = list(METRICS)
    assert sorted(said) == sorted([*reported, REUSE])
    with pytest.raises(ValueError, match="prefix/wavse is no metric"):
        reduction_of("prefix/wavse")


def test_misspelt_prefix_key_is_named():
    with pytest.raises(ConfigCompositionException, match="shedule"):
        composed(f"{ACTOR}.prefix.shedule=packed")
    with pytest.raises(TypeError, match="shedule"):
        PrefixConfig(shedule="packed")


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type=dynamic"),
    ],
)
def test_unsupported_model_is_refused_in_the_driver(tmp_path, fields, found):
    path = write_tiny_model(tmp_path, **fields)
    with pytest.raises(ValueError, match=f"{found}.*schedule=stock"):
        validate(path)
    validate(path, f"{ACTOR}.prefix.schedule=stock")


def test_verls_own_path_asks_nothing_of_a_model_that_the_workers_alone_know(tmp_path):
    path = write_tiny_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "of_external_lib"}')
    with pytest.raises(ValueError, match="of_external_lib"):
        validate(path)
    validate(path, f"{ACTOR}.prefix.schedule=stock")


@pytest.mark.parametrize("text", ['{"peft_type": "LORA", "r": 8,', '{"peft_type": "NOPE"}'])
def test_an_adapter_that_cannot_be_read_is_refused_by_its_key(model_path, tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"lora_adapter_path={tmp_path}: its adapter_config.json cannot be read: "):
        validate(model_path, f"actor_rollout_ref.model.lora_adapter_path={tmp_path}")


def test_dropout_is_refused_with_the_overrides_that_turn_it_off(tmp_path):
    """Seed-OSS, which stock trains with."""
    path = write_tiny_model(tmp_path)  # for its tokenizer
    sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, architectures=["SeedOssForCausalLM"])
    transformers.SeedOssConfig(**sizes, **heads).save_pretrained(path)
    with pytest.raises(ValueError, match="seed_oss model: attention_dropout=0.1; residual_dropout=0.1") as refused:
        validate(path)
    off = re.findall(r"\+actor_rollout_ref\S+=0.0", str(refused.value))
    validate(path, *off)

    model = omega_conf_to_dataclass(
        composed(f"actor_rollout_ref.model.path={path}", SDPA, *off).actor_rollout_ref.model
    )
    check_supported(model.hf_config)
    (layer,) = transformers.AutoModelForCausalLM.from_config(model.hf_config).train().model.layers
    assert not layer.self_attn.attention_dropout and not layer.self_attn.residual_dropout
    states = torch.ones(1, 3, 64)
    assert torch.equal(layer.mlp(states), layer.mlp(states)) and not layer.mlp.residual_dropout


def test_adapters_that_need_whole_rows_are_refused_in_the_driver_that_sees_them_and_in_the_worker(tmp_path):
    peft = pytest.importorskip("peft")
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj"], alora_invocation_tokens=[5, 6])
    engine = SimpleNamespace(module=peft.get_peft_model(model, config))
    told = r"aLoRA of PEFT is not supported .*=\[5, 6\].*or set .*schedule=stock"
    with pytest.raises(ValueError, match=told):
        HFBackend.check_model(SimpleNamespace(_engine=engine))
    path, folders = write_tiny_model(tmp_path / "model"), {name: tmp_path / name for name in ("alora", "lora")}
    config.save_pretrained(folders["alora"])
    peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj"]).save_pretrained(folders["lora"])
    validate(path, f"actor_rollout_ref.model.lora_adapter_path={folders['lora']}")
    with pytest.raises(ValueError, match=told):
        validate(path, f"actor_rollout_ref.model.lora_adapter_path={folders['alora']}")


def test_a_sliding_window_is_accepted(tmp_path):
    validate(write_tiny_model(tmp_path, sliding_window=16, use_sliding_window=True, max_window_layers=1))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_vision_tower_is_accepted_and_frozen_on_demand(tmp_path, family):
    validate(write_tiny_model(tmp_path, family=family), f"{ACTOR}.freeze_vision_tower=True")
    for frozen in (False, True):
        actor = omega_conf_to_dataclass(composed(f"{ACTOR}.freeze_vision_tower={frozen}").actor_rollout_ref.actor)
        assert actor.engine.freeze_vision_tower is frozen


def test_the_engine_is_told_how_many_epochs_a_step_has():
    for epochs in (1, 3):
        actor = omega_conf_to_dataclass(composed(f"{ACTOR}.ppo_epochs={epochs}").actor_rollout_ref.actor)
        assert actor.engine.ppo_epochs == actor.ppo_epochs == epochs


def test_engine_config_in_code():
    config = PrefixEngineConfig(prefix=PrefixConfig(schedule="phased", wave_tokens=64))
    assert (config.strategy, config.prefix.wave_tokens) == ("prefix", 64)
    with pytest.raises(ValueError, match="fsdp_config.strategy='fsdp': .*strategy=fsdp2"):
        PrefixEngineConfig(strategy="fsdp")
