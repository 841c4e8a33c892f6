"""What `actor_rollout_ref.model` says, and what of it cannot work with a shared prefix."""

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from verl_prefix.config.engines import VEOMNI, Engine, attention_of, heads_of
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


def refuse(wrong: object, message: str) -> None:
    """Raises ValueError with the message if `wrong` is true."""
    if wrong:
        raise ValueError(message)


def is_count(value: object) -> bool:
    """Whether a value is an int of 1 or more, and no bool."""
    return type(value) is int and value >= 1


def is_varlen(attn_implementation: str) -> bool:
    """True where verl's own path reads packed rows by their bounds, and attends to other ranks' tokens under sequence
    parallelism: flash attention, which alone verl gives an all-to-all (verl/models/transformers/monkey_patch.py)."""
    if attn_implementation in ("auto", "fused", "unfused", "local"):  # of megatron-core, which has its own bounds
        return True
    return "flash" in attn_implementation or "varlen" in attn_implementation  # of tests, on a CPU


def check_sequence_parallel(
    key: str, size: int, n_gpus: int, model_config: Any, model: str = "actor_rollout_ref.model"
) -> None:
    """Refuses a number of ranks that share a row, by the key that sets it, if it cannot work on these GPUs. model: the
    key of the model's section.

    Raises:
        ValueError: naming the key and what to set.
    """
    if size == 1:
        return
    refuse(n_gpus % size, f"{key}={size} does not divide {n_gpus} GPUs; set a divisor of them")
    pads = model_config and not model_config.get("use_remove_padding")
    refuse(pads, f"{key}={size} needs {model}.use_remove_padding=True; set it")


def check_dealt(key: str, size: int, hf_config: Any, before: int = 1) -> None:
    """Refuses a number of ranks over which the model's heads cannot be divided. In recurrent layers the same holds for
    groups and channels.

    Args:
        key: the key that sets the number.
        size: the number of ranks.
        before: among how many ranks heads are divided before: those of tensor parallelism.

    Raises:
        ValueError: naming the key, and the largest divisor of this size that works.
    """
    from verl_prefix.models.support import dealt

    multiples, shared = dealt(hf_config.get_text_config())

    def wrong(size: int) -> list[str]:
        told = [f"{n} {name} are not its multiple" for name, n in multiples.items() if n % size]
        neither = [f"{n} {name}" for name, n in shared.items() if n % size and size % n]
        return told + [f"{name} are neither its multiple nor its divisor" for name in neither]

    works = next(n for n in range(size, 0, -1) if size % n == 0 and not wrong(n * before))
    told = f"{key}={size}" + (f" times {before} ranks of tensor parallelism" if before > 1 else "")
    refuse(
        works < size,
        f"{told}: of this {hf_config.model_type} model {', '.join(wrong(size * before))}; set {works}",
    )


def refuse_absent_options(model_config: Any, on: Engine) -> None:
    """Refuses LoRA and offload of activations in `actor_rollout_ref.model` (DictConfig or HFModelConfig).

    verl's VeOmni engine builds no adapter, and would train the whole model (_build_model_optimizer in
    verl/workers/engine/veomni/transformer_impl.py). On Megatron prefixes are not shared under adapters. Neither of the
    two engines reads the key of the offload.

    Raises:
        ValueError: naming the keys.
    """
    why = "a prefix is not shared under adapters of Megatron"
    if on is VEOMNI:
        why = "verl's VeOmni engine builds no adapters"
    key, lora = "actor_rollout_ref.model", model_config.get("lora") or {}
    values = {"lora_rank": model_config.get("lora_rank", 0), "lora.rank": lora.get("rank", 0)}
    values["lora_adapter_path"] = model_config.get("lora_adapter_path")
    for name, value in values.items():
        refuse(value, f"{key}.{name}={value}: {why}; remove it, or set model_engine=prefix")
    refuse(
        model_config.get("enable_activation_offload"),
        f"{key}.enable_activation_offload=True moves nothing on {on.title}; remove it, and set "
        "actor_rollout_ref.actor.prefix.offload=True to move what prefixes keep",
    )


def check_adapter(model_config: Any) -> None:
    """Checks the adapter of `actor_rollout_ref.model` where this machine can see it; the worker checks any."""
    path = model_config.get("lora_adapter_path")
    if path and (Path(path) / "adapter_config.json").is_file():
        from verl_prefix.models.support import check_adapters

        try:
            from peft import PeftConfig

            adapted: Any = SimpleNamespace(peft_config={path: PeftConfig.from_pretrained(path)})
        except ImportError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            key = f"actor_rollout_ref.model.lora_adapter_path={path}"
            raise ValueError(
                f"{key}: its adapter_config.json cannot be read: {type(error).__name__}: {error}"
            ) from error
        check_adapters(adapted)


def warn_of_replaced_options(model_config: Any, key: str = "actor_rollout_ref.model") -> None:
    """Warns of options of a model (DictConfig or HFModelConfig; `key`) that the shared-prefix path replaces."""
    if model_config.get("enable_activation_offload"):
        # It counts forwards of layers, which prefixes, waves and chunks of logits change.
        warn_once(
            logger,
            "%s.enable_activation_offload=True is off in the prefix engine: what layers keep for backward stays on the "
            "device, in batches that take verl's own path too. actor.prefix.offload=True moves what prefixes keep to "
            "the host, and actor.prefix.wave_tokens bounds the rest, in passes that are not packed",
            key,
        )
    if model_config.get("use_fused_kernels"):
        warn_once(
            logger,
            "%s.use_fused_kernels=True is off in the prefix engine, whose lm_head runs on responses alone, in chunks "
            "of tokens (actor.prefix.logits_chunk); batches that take verl's own path have all their logits",
            key,
        )


def read_hf_config(model_config: Any) -> Any:
    """The HF config of `actor_rollout_ref.model`; None where this machine cannot see it: it is on HDFS, or on a hub
    that only the workers reach."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from verl.utils.import_utils import import_external_libs
    from verl.utils.model import update_model_config

    libs: Any = model_config.get("external_lib")
    with contextlib.suppress(ImportError):  # one that only workers have
        import_external_libs(OmegaConf.to_container(libs) if OmegaConf.is_config(libs) else libs)
    try:
        hf_config = AutoConfig.from_pretrained(
            model_config.get("hf_config_path") or model_config["path"],
            trust_remote_code=bool(model_config.get("trust_remote_code")),
        )
    except OSError:
        return None
    except StrictDataclassError as error:
        raise ValueError(f"{model_config['path']}, config.json: {' '.join(str(error).split())}") from error
    override: Any = model_config.get("override_config") or {}
    override = OmegaConf.to_container(override, resolve=True) if OmegaConf.is_config(override) else override
    update_model_config(hf_config, override.get("model_config", override))  # as HFModelConfig does
    return hf_config


def dense_attention(hf_config: Any) -> str:
    """The `attn_implementation` that computes a model in any precision: sdpa, or eager where Hugging Face's class does
    not take sdpa, as with sinks, or where sdpa drops a cap on attention's logits."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from verl_prefix.models.vision import is_vision_config

    auto_class = AutoModelForImageTextToText if is_vision_config(hf_config) else AutoModelForCausalLM
    model_class = auto_class._model_mapping.get(type(hf_config), None)
    capped = getattr(hf_config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if getattr(model_class, "_supports_sdpa", True) and not capped else "eager"


def check_model_family(section: Any, model_config: Any, hf_config: Any) -> None:
    """Checks the model's HF config where this machine can see it; the worker checks again all but kernels.

    Args:
        section: `actor_rollout_ref.actor`, DictConfig or dataclass. model_config: `actor_rollout_ref.model`, likewise.
        hf_config: of `read_hf_config`.

    Raises:
        ValueError: the model has layers that the shared-prefix path or its kernel does not compute, heads that cannot
            be dealt to the ranks that share them, or no tower to freeze.
    """
    from verl_prefix.models.support import check_supported
    from verl_prefix.models.vision import is_vision_config

    if hf_config is None:
        return
    check_supported(hf_config)
    key, attention = attention_of(section, model_config)
    refuse(
        attention == "sdpa" and getattr(hf_config.get_text_config(), "attn_logit_softcapping", None),
        f"{key}=sdpa drops a {hf_config.model_type} model's attn_logit_softcapping on verl's own path, with which ours "
        "is compared; set eager, or on a GPU flash_attention_2",
    )
    for key, size, before in heads_of(section):
        check_dealt(key, size, hf_config, before)
    refuse(
        section.get("freeze_vision_tower") and not is_vision_config(hf_config),
        f"actor_rollout_ref.actor.freeze_vision_tower=True, and a {hf_config.model_type} model has no tower; remove it",
    )
