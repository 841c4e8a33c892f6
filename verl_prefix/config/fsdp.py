"""Options of actor and ref on verl's FSDP2 engine: `model_engine=prefix`."""

from dataclasses import dataclass, field
from typing import ClassVar

from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

from verl_prefix.config.actor import PrefixActor, refuse_padding, role_of
from verl_prefix.config.model import refuse
from verl_prefix.config.options import PrefixConfig
from verl_prefix.versions import check_versions


@dataclass
class PrefixEngineConfig(FSDPEngineConfig):
    """verl's FSDP2 engine config plus `prefix` and, of the actor, `freeze_vision_tower`, which verl's own FSDP ignores,
    and `ppo_epochs`, which verl's worker keeps to itself. Its strategy is the registry's backend name, always "prefix".
    `backends.fsdp` registers that: our YAML names this class there, and code that builds one imports it from
    there.

    Raises:
        ValueError: an FSDP option that the shared-prefix path cannot honour.
        ImportError: this verl was never tested (see `versions`).
    """

    _mutable_fields = FSDPEngineConfig._mutable_fields | {"strategy", "prefix", "freeze_vision_tower", "ppo_epochs"}

    strategy: str = "prefix"
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    freeze_vision_tower: bool = False
    ppo_epochs: int = 1

    def __post_init__(self) -> None:
        check_versions()
        key = f"{role_of(self)}.fsdp_config"
        refuse(
            self.strategy not in ("prefix", "fsdp2"),
            f"{key}.strategy={self.strategy!r}: the prefix engine shards with FSDP2 only; set {key}.strategy=fsdp2, or "
            "remove it",
        )
        refuse_padding(key, self)
        refuse(
            self.get("qat") and self.qat.get("enable", False),
            f"{key}.qat.enable=True: nobody has tried quantization-aware training with a shared prefix; set "
            f"{key}.qat.enable=False, or model_engine=dp",
        )
        replay = (self.get("router_replay") or {}).get("mode", "disabled")
        refuse(
            replay != "disabled",
            f"{key}.router_replay.mode={replay}: verl's FSDP engine replays no routes; set {key}.router_replay."
            "mode=disabled, or model_engine=veomni or megatron",
        )
        # verl's own check knows only its own names (verl/workers/config/engine.py), and so does its engine's base class
        # (FSDPEngine._build_fsdp_module), which gets a copy that says fsdp2; the registry's backend name is prefix.
        self.strategy = "fsdp2"
        super().__post_init__()
        self.strategy = "prefix"


@dataclass
class PrefixActorConfig(PrefixActor, FSDPActorConfig):
    """verl's FSDP actor config plus `prefix`. The rollout's `enable_rollout_routing_replay` is here to be refused.

    Raises:
        ValueError: an actor option that would silently undo sharing.
    """

    section: ClassVar[str] = "fsdp_config"
    engine_name: ClassVar[str] = "prefix"

    strategy: str = "fsdp2"
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    fsdp_config: PrefixEngineConfig = field(default_factory=PrefixEngineConfig)
    enable_rollout_routing_replay: bool = False

    def __post_init__(self) -> None:
        key = role_of(self.fsdp_config)
        refuse(
            self.strategy != "fsdp2",
            f"{key}.strategy={self.strategy!r}: model_engine=prefix is verl's FSDP engine with FSDP2; set "
            f"{key}.strategy=fsdp2, or model_engine={'dp' if self.strategy == 'fsdp' else self.strategy} without it",
        )
        super().__post_init__()
