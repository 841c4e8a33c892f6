"""Options of actor and ref on verl's FSDP2 engine: `model_engine=prefix`."""

from dataclasses import dataclass, field

from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

from verl_prefix.config.actor import PrefixActor, PrefixEngineOptions, refuse_padding, role_of
from verl_prefix.config.engines import FSDP2
from verl_prefix.config.model import refuse
from verl_prefix.config.options import PrefixConfig


@dataclass
class PrefixEngineConfig(PrefixEngineOptions, FSDPEngineConfig):
    """verl's FSDP2 engine config plus those of `PrefixEngineOptions`. `backends.fsdp` registers the engine: our YAML
    names this class there, and code that builds one imports it from there. verl's engine branches on its own names as
    well (FSDPEngine._build_fsdp_module), and gets a copy that says fsdp2.

    Raises:
        ValueError: an FSDP option that the shared-prefix path cannot honour.
        ImportError: this verl was never tested (see `versions`).
    """

    on, strategy_of_verl = FSDP2, "fsdp2"

    strategy: str = "prefix"

    def check(self, key: str) -> None:
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


@dataclass
class PrefixActorConfig(PrefixActor, FSDPActorConfig):
    """verl's FSDP actor config plus `prefix`. The rollout's `enable_rollout_routing_replay` is here to be refused.

    Raises:
        ValueError: an actor option that would silently undo sharing.
    """

    on = FSDP2

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
