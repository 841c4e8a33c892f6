"""Options of actor, ref and critic on verl's FSDP2 engine: `model_engine=prefix`."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, FSDPEngineConfig

from verl_prefix.config.actor import (
    PrefixActor,
    PrefixEngineOptions,
    check_replayed,
    refuse_norm_by_pass,
    refuse_shuffle,
)
from verl_prefix.config.engines import FSDP2
from verl_prefix.config.model import (
    check_adapter,
    check_dealt,
    check_sequence_parallel,
    refuse,
    warn_of_replaced_options,
)
from verl_prefix.config.options import PrefixConfig

VERLS_CRITIC = "critic=dp_critic (verl's own critic; with critic.strategy=fsdp2 on FSDP2)"


@dataclass
class PrefixEngineConfig(PrefixEngineOptions, FSDPEngineConfig):
    """verl's FSDP2 engine config, with the options of `PrefixEngineOptions`.

    `backends.fsdp` registers the engine. So our YAML names this class in that module, and other code imports it from
    there. verl's engine compares `strategy` with its own names (FSDPEngine._build_fsdp_module): it gets a copy that
    says fsdp2.

    Attributes:
        strategy: our engine's name in verl's registry.

    Raises:
        ValueError: an FSDP option that the shared-prefix path cannot honour.
        ImportError: this verl or transformers was never tested (see `versions`).
    """

    on = FSDP2

    strategy: str = "prefix"


@dataclass
class PrefixActorConfig(PrefixActor, FSDPActorConfig):
    """verl's FSDP actor config plus those of `PrefixActor`.

    Attributes:
        fsdp_config: verl's section of engine options, with ours.

    Raises:
        ValueError: an actor option that would silently undo sharing.
    """

    on = FSDP2

    strategy: str = "fsdp2"
    fsdp_config: PrefixEngineConfig = field(default_factory=PrefixEngineConfig)

    def check_spread(self, n_gpus: int, hf_config: Any) -> None:
        check_replayed(self.fsdp_config, FSDP2, hf_config)

    def check_model(self, model_config: Any, hf_config: Any) -> None:
        warn_of_replaced_options(model_config)
        check_adapter(model_config)


@dataclass
class PrefixCriticConfig(FSDPCriticConfig):
    """verl's FSDP critic config with the options of `actor_rollout_ref.actor.prefix`, but those that are the actor's
    alone: what it leaves out, and its trace.

    Attributes:
        strategy: what shards the parameters beneath our engine; only fsdp2 is supported.
        prefix: the actor's. The engine gets a copy without the options that are the actor's alone.

    Raises:
        ValueError: an option that would silently undo sharing.
    """

    strategy: str = "fsdp2"
    prefix: PrefixConfig = field(default_factory=PrefixConfig)

    def __post_init__(self) -> None:
        refuse(
            self.strategy != "fsdp2",
            f"critic.strategy={self.strategy!r}: the critic of model_engine=prefix is verl's with FSDP2; set "
            f"critic.strategy=fsdp2, or {VERLS_CRITIC}",
        )
        refuse_shuffle("critic", self)
        if self.prefix.schedule != "stock":
            refuse_norm_by_pass("critic", self)
        super().__post_init__()
        default = PrefixConfig()
        of_actor = ("skip_zero_advantage", "trace_dir", "trace_max_steps", "trace_max_gib")
        self.engine.strategy = FSDP2.name
        self.engine.prefix = replace(self.prefix, **{name: getattr(default, name) for name in of_actor})
        self.engine.ppo_epochs = self.ppo_epochs

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """The checks that need the model's config; verl calls this in the driver.

        Raises:
            ValueError: a model that the shared-prefix path does not support, or with trl's value head.
        """
        super().validate(n_gpus, train_batch_size)
        self.check(n_gpus)

    def check(self, n_gpus: int) -> None:
        """Ours of `validate`."""
        if self.prefix.schedule == "stock":
            return
        from transformers import AutoModelForTokenClassification

        from verl_prefix.models.support import check_supported

        hf_config = self.model.hf_config
        check_supported(hf_config, "critic.model")
        key, size = "critic.fsdp.ulysses_sequence_parallel_size", self.engine.ulysses_sequence_parallel_size
        check_sequence_parallel(key, size, n_gpus, self.model, "critic.model")
        check_dealt(key, size, hf_config)
        auto = AutoModelForTokenClassification
        is_remote = self.model.trust_remote_code and auto.__name__ in (getattr(hf_config, "auto_map", None) or {})
        refuse_value_head(not (type(hf_config) in auto._model_mapping or is_remote), self.model)


def refuse_optimizer_of_fsdp1(checkpoint: str | None, role: str) -> None:
    """Refuses to load the optimizer state of FSDP1, verl's default, which has one entry for each flat parameter. verl
    writes in a checkpoint's folder which FSDP it is of (FSDPCheckpointManager.save_checkpoint).

    Args:
        role: as of `role_of`.
    """
    told = Path(checkpoint or "", "fsdp_config.json")
    key = f"{role}.checkpoint.load_contents"
    refuse(
        told.is_file() and re.search(r'"FSDP_version": 1\b', told.read_text()),
        f"{checkpoint} is of FSDP1, verl's default, and FSDP2 cannot read its optimizer state; set {key}=[model,extra] "
        f"to go on from its weights and learning rate with new moments, and remove {key} once the run has saved",
    )


def refuse_value_head(has_v_head: bool, model_config: Any) -> None:
    """Refuses a model with a vision tower, and one with trl's value head. verl puts that head on a model for which
    transformers has no class for token classification."""
    from verl_prefix.models.vision import is_vision_config

    hf_config, why = model_config.hf_config, "its tower is shared under lm_head alone"
    if has_v_head:
        why = "transformers has no token classification of it, so that verl takes trl's value head (v_head)"
    refuse(
        has_v_head or is_vision_config(hf_config),
        f"critic.model.path={model_config.path}: a critic of this {hf_config.model_type} model shares no prefixes: "
        f"{why}; set {VERLS_CRITIC}",
    )
