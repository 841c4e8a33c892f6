"""The engines of verl on which prefixes are shared: which keys of a config are whose, said once.

This module and `versions`, which it imports, need the standard library alone: `verl-prefix plan` reads a command before
verl is imported.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from verl_prefix.versions import TESTED_MEGATRON, TESTED_VEOMNI, installed_version, warn_of_untested


@dataclass(frozen=True)
class Engine:
    """An engine of verl, and what it is set by. A section is `actor_rollout_ref.actor` or `.ref`, DictConfig or
    dataclass.

    Attributes:
        name: ours, a value of `model_engine` and the engine's name in verl's registry. verls: verl's own value.
        strategy: verl's name of it in configs. title: in words.
        section: the key of its options within a section.
        target: our class of actor and ref.
        slices: the option that says how many ranks cut one packed row among themselves.
        heads: options whose product is the number of ranks that a layer's heads are dealt to.
        copies: options whose product is the number of ranks that have the same rows.
        attention: the option that is the attention of verl's own path; None: it is one of the model.
        package, tested: what is installed for it, and in which versions it was tested; None: nothing.
    """

    name: str
    verls: str
    strategy: str
    title: str
    section: str
    target: str
    slices: str
    heads: tuple[str, ...]
    copies: tuple[str, ...]
    attention: str | None = None
    package: str | None = None
    tested: tuple[str, ...] = ()

    def key(self, role: str, option: str) -> str:
        """The whole key of an option of "actor" or "ref"."""
        return f"actor_rollout_ref.{role}.{self.section}.{option}"

    def size(self, section: Any, option: str) -> int:
        """The number of ranks that an option sets. Of verl's FSDPActorConfig the role's own key counts, where it is
        over 1, and else that of its `fsdp_config`.

        Raises:
            ValueError: it is below 1.
        """
        own = int(section.get(option, 1)) if self.section == "fsdp_config" else 1
        size = own if own > 1 else int(section[self.section][option])
        if size < 1:
            raise ValueError(f"{self.section}.{option}={size}: set a number of 1 or more")
        return size

    @property
    def missing(self) -> str | None:
        """What to install where the engine's package is not there; None: it is."""
        if self.package is None or installed_version(self.package):
            return None
        return f"pip install {self.package}=={self.tested[-1]}"

    def warn_of_untested(self) -> None:
        """Warns once of a version of the package that was not tested."""
        if self.package is not None:
            warn_of_untested(self.package, self.tested)


SWITCHES = ("exchange", "trees", "keep_attention", "verify")  # keys of `prefix` whose off a YAML file reads as False

_ULYSSES = "ulysses_sequence_parallel_size"
FSDP2 = Engine(
    "prefix", "dp", "fsdp2", "FSDP2", "fsdp_config", "verl_prefix.config.fsdp.PrefixActorConfig",
    slices=_ULYSSES, heads=(_ULYSSES,), copies=(_ULYSSES,),
)  # fmt: skip
CRITIC = replace(FSDP2, section="fsdp", target="verl_prefix.config.fsdp.PrefixCriticConfig")  # of FSDP2
VEOMNI = Engine(
    "prefix_veomni", "veomni", "veomni", "VeOmni", "veomni", "verl_prefix.config.veomni.PrefixVeOmniActorConfig",
    slices="ulysses_parallel_size", heads=("ulysses_parallel_size",), copies=("ulysses_parallel_size",),
    attention="attn_implementation", package="veomni", tested=TESTED_VEOMNI,
)  # fmt: skip
# Ranks of the one have the same rows and cut none, those of the other cut them; a layer's heads are dealt to both.
_TENSOR, _CONTEXT = "tensor_model_parallel_size", "context_parallel_size"
MEGATRON = Engine(
    "prefix_megatron", "megatron", "megatron", "Megatron", "megatron",
    "verl_prefix.config.megatron.PrefixMegatronActorConfig",
    slices=_CONTEXT, heads=(_TENSOR, _CONTEXT), copies=(_TENSOR, "pipeline_model_parallel_size", _CONTEXT),
    attention="override_transformer_config.attention_backend", package="megatron-core", tested=TESTED_MEGATRON,
)  # fmt: skip
ENGINES = (FSDP2, VEOMNI, MEGATRON)


def engine_of(section: Any) -> Engine:
    """The engine that a section, or the manifest of one, has options of."""
    return next((engine for engine in ENGINES if section.get(engine.section) is not None), FSDP2)


def engine_named(name: str) -> Engine:
    """The engine of a value of `model_engine`, verl's name or ours, which is one of `ENGINES`."""
    return next(engine for engine in ENGINES if name in (engine.name, engine.verls))


def slices_of(role: str, section: Any) -> tuple[str, int]:
    """The key that says how many ranks cut one packed row among themselves, and its value."""
    engine = engine_of(section)
    return engine.key(role, engine.slices), engine.size(section, engine.slices)


def heads_of(section: Any) -> Iterator[tuple[str, int, int]]:
    """Yields the actor's keys that say to how many ranks a layer's heads are dealt: each, its value, and the number of
    ranks that those before it have dealt them to."""
    engine, before = engine_of(section), 1
    for option in engine.heads:
        size = engine.size(section, option)
        yield engine.key("actor", option), size, before
        before *= size


def copies_of(section: Any) -> int:
    """How many ranks have the same rows."""
    engine = engine_of(section)
    return math.prod(engine.size(section, option) for option in engine.copies)


def trains_adapters(model: Any) -> bool:
    """Whether the actor computes ref, without its adapters (`ref_in_actor` of verl's trainers). model:
    `actor_rollout_ref.model`."""
    rank = (model.get("lora") or {}).get("rank", 0) or model.get("lora_rank", 0)
    return rank > 0 or model.get("lora_adapter_path") is not None


def attention_of(section: Any, model_config: Any) -> tuple[str, str]:
    """The key of the attention of verl's own path, and its value.

    Args:
        section: `actor_rollout_ref.actor`. model_config: `actor_rollout_ref.model`, DictConfig or dataclass.
    """
    engine = engine_of(section)
    if engine.attention is not None:
        options = section[engine.section]
        for name in engine.attention.split("."):
            options = options.get(name, "auto")
        return engine.key("actor", engine.attention), options
    override = (model_config or {}).get("override_config") or {}
    key = "actor_rollout_ref.model.override_config.attn_implementation"
    return key, override.get("attn_implementation", "flash_attention_2")
