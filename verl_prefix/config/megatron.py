"""Options of actor and ref on verl's Megatron engine: `model_engine=prefix_megatron`."""

from dataclasses import dataclass, field

from verl.workers.config import McoreEngineConfig

from verl_prefix.config.options import PrefixConfig


@dataclass
class PrefixMegatronEngineConfig(McoreEngineConfig):
    """verl's Megatron engine config plus `prefix` and `ppo_epochs`. Its strategy is the registry's backend name."""

    _mutable_fields = McoreEngineConfig._mutable_fields | {"strategy", "prefix", "ppo_epochs"}
    strategy: str = "prefix_megatron"
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    ppo_epochs: int = 1

    def __post_init__(self) -> None:
        self.strategy = "megatron"
        super().__post_init__()
        self.strategy = "prefix_megatron"
