"""A config as verl's driver composes and checks it, and what its worker makes of it."""

from collections.abc import Callable
from typing import Any

import verl  # noqa: F401
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_prefix.config import engines

ROLES = "actor_rollout_ref"
ACTOR, REF, MODEL = f"{ROLES}.actor", f"{ROLES}.ref", f"{ROLES}.model"


def installed(version: str, part: str) -> Callable[[str], str | None]:
    """`installed_version`, which the driver asks first, where packages whose name has this part are there."""
    real = engines.installed_version
    return lambda name: version if part in name else real(name)


def composed(engine: str, model_path: str, *overrides: str) -> Any:
    rows = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.use_kl_loss=true", f"{ROLES}.rollout.n=4"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        options = [f"model_engine={engine}", f"{MODEL}.path={model_path}", *rows, *overrides]
        return compose("ppo_trainer", overrides=options)


def checked(engine: str, model_path: str, *overrides: str) -> Any:
    """The config, as verl's driver checks it."""
    config = composed(engine, model_path, *overrides)
    validate_config(config, use_reference_policy=True, use_critic=False)
    OmegaConf.resolve(config)
    return config


def built(config: Any) -> list[Any]:
    """What verl's worker makes of actor and ref."""
    OmegaConf.set_struct(config, False)
    ref = config.actor_rollout_ref.ref
    for key in [key for key in ref if key.startswith("log_prob_")]:
        ref.pop(key)  # as ActorRolloutRefWorker.init_model does
    ref.use_dynamic_bsz = True
    return [omega_conf_to_dataclass(role) for role in (config.actor_rollout_ref.actor, ref)]
