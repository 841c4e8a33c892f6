"""A training command as verl reads it: its model, what the driver would refuse, how long its prompts are."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from verl.tools.tool_registry import load_all_tools
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.utils import need_reference_policy
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.model import update_model_config
from verl.utils.tokenizer import build_multimodal_processor_inputs
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_prefix.auto.megatron import State
from verl_prefix.auto.shape import ModelShape, model_shape
from verl_prefix.backends.stock_path import why_wrong_when_sharded
from verl_prefix.config.driver import check_driver, has_critic, has_ref, is_v1
from verl_prefix.config.engines import CRITIC, FSDP2, MEGATRON, VEOMNI, attention_of, engine_of, slices_of
from verl_prefix.config.model import check_dealt, check_model_family, check_sequence_parallel, read_hf_config
from verl_prefix.models.recurrent import packing_leak
from verl_prefix.models.vision import is_vision_config, tower_of
from verl_prefix.tools.plan.compose import (
    Messages,
    micro_batches,
    prompts_of_step,
    unreadable_model,
)
from verl_prefix.tools.plan.options import PlanError
from verl_prefix.tools.simulate.command import dtypes

MAX_PROMPTS = 2000  # of the train file, evenly spread; their lengths stand for all
MAX_CLIPS = 64  # the same where their images and videos must be decoded


def _read(config: DictConfig, key: str, load: Callable[..., Any]) -> Any:
    """Loads the model's `key`, or its path where that is null; PlanError where `load` cannot."""
    model = config.actor_rollout_ref.model
    key = key if model.get(key) else "path"
    try:
        return load(model[key], trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise unreadable_model(key, model[key], reason) from error
    except StrictDataclassError as error:  # a value that it cannot have
        raise unreadable_model(key, model[key], " ".join(str(error).split())) from error


def read_tokenizer(config: DictConfig) -> Any:
    """The tokenizer of the command's model; PlanError where this machine has none."""
    return _read(config, "tokenizer_path", hf_tokenizer)


def read_model_config(config: DictConfig) -> PretrainedConfig:
    """The config of the command's model; PlanError where this machine has none."""
    hf_config = _read(config, "hf_config_path", AutoConfig.from_pretrained)
    override: Any = OmegaConf.to_container(config.actor_rollout_ref.model.get("override_config") or OmegaConf.create())
    update_model_config(hf_config, override.get("model_config", override))  # as HFModelConfig does
    return hf_config


class Model(NamedTuple):
    """The command's model, shapes without weights.

    Attributes:
        hf: Hugging Face's. shape: what it costs. state: see `state_of`; on Megatron's engine nothing counts, since
            every rank has another part (`simulate.command.state_of_megatron`).
        leak: what is wrong with verl's own path where it packs rows (`recurrent.packing_leak`), or None.
        spread: the same where ranks share a row (`stock_path.why_wrong_when_sharded`).
    """

    hf: Any
    shape: ModelShape
    state: State
    leak: str | None
    spread: str | None


def read_model(config: DictConfig, critic: bool = False) -> Model:
    """The command's model, on torch's meta device; PlanError where this machine has none. critic: it has values."""
    roles, hf_config = config.actor_rollout_ref, read_model_config(config)
    auto_class = AutoModelForImageTextToText if is_vision_config(hf_config) else AutoModelForCausalLM
    if critic:
        auto_class, hf_config.num_labels = AutoModelForTokenClassification, 1
    with torch.device("meta"):
        hf = _read(config, "path", lambda _, **options: auto_class.from_config(hf_config, **options))
    shape, leak, spread = model_shape(hf, dtypes(roles.actor)[1]), None, None
    if engine_of(roles.actor) is FSDP2:  # recurrent layers of others know where rows begin, and other ranks' tokens
        leak = packing_leak(hf) if roles.model.use_remove_padding else None
        spread = why_wrong_when_sharded(hf, attention_of(roles.actor, roles.model)[1])
    return Model(hf, shape, state_of(roles, hf), leak, spread)


def state_of(roles: DictConfig, model: PreTrainedModel) -> State:
    """Bytes of weights and, of what is trained, gradients and AdamW's two moments, as verl's engine holds them in an
    update, on all ranks: all in one dtype. Under FSDP2's CPU offload they wait in host memory: 0.

    Args:
        roles: `actor_rollout_ref`. model: its model, shapes alone.
    """
    actor = roles.actor
    engine = engine_of(actor)
    if engine is MEGATRON:
        return State(0, 0, 0)
    option = {FSDP2: "offload_policy", VEOMNI: "enable_fsdp_offload"}.get(engine)
    if option and actor[engine.section].get(option):
        return State(0, 0, 0)
    size = dtypes(actor)[0].itemsize
    weights = trained = sum(p.numel() for p in model.parameters())
    if rank := roles.model.get("lora_rank", 0):  # without it verl's engine trains the whole model, whatever else is set
        head = model.get_output_embeddings()
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        trained = sum(rank * (m.in_features + m.out_features) for m in linear)  # of all, whatever its target_modules
        weights += trained
    elif roles.actor.get("freeze_vision_tower") and is_vision_config(model.config):
        trained -= sum(p.numel() for p in tower_of(model).parameters())
    return State(size * weights, size * trained, 2 * size * trained)


def check_prefix(config: DictConfig) -> None:
    """Raises PlanError where `actor.prefix` has a value that it cannot have."""
    if reason := _refusal(omega_conf_to_dataclass, config.actor_rollout_ref.actor.prefix):
        raise PlanError(reason)


def _of_cpus(config: DictConfig) -> set[str]:
    """Rollouts of this package, which a job on GPUs does not have; `plan` itself runs under VERL_PLATFORM=cpu."""
    return set() if config.trainer.device == "cpu" else {"hf"}


def _unknown_names(config: DictConfig) -> Iterator[str]:
    """Names that verl looks up when the job runs, and does not have."""
    known = {
        "actor_rollout_ref.rollout.name": RolloutReplicaRegistry._registry.keys() - _of_cpus(config),
        "algorithm.adv_estimator": ADV_ESTIMATOR_REGISTRY,
        **({"trainer.v1.trainer_mode": TRAINER_REGISTRY} if is_v1(config) else {}),
    }
    if not config.actor_rollout_ref.model.get("external_lib"):  # which may register a loss, in workers alone
        known["actor_rollout_ref.actor.policy_loss.loss_mode"] = POLICY_LOSS_REGISTRY
    for key, names in known.items():
        if (value := OmegaConf.select(config, key)) is not None and value not in names:
            yield f"{key}={value}: verl knows {', '.join(sorted(names))}"


def _refusal(check: Callable[..., Any], *arguments: Any) -> str | None:
    """The complaint of a config class or check about values that it refuses, or None."""
    try:
        check(*arguments)
    except InstantiationException as error:  # hydra's wrapper of what a config class raised
        return str(error.__cause__ or error)
    except (ValueError, AssertionError) as error:
        return str(error)
    return None


def _check_critic(config: DictConfig, *sizes: int) -> None:
    """The driver's check of a critic of ours whose model this machine can see."""
    critic = config.critic
    if has_critic(config) and critic._target_ == CRITIC.target and read_hf_config(critic.model) is not None:
        omega_conf_to_dataclass(critic).validate(*sizes)


def refusals(config: DictConfig, num_ranks: int) -> list[str]:
    """Refusals of the driver, in its own words, and of a worker; empty if the run would start."""
    section, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    sizes = num_ranks, prompts_of_step(config)
    # The driver ends with the first; here all are named.
    reasons = [*_unknown_names(config), _refusal(check_driver, config, False)]
    reasons.append(_refusal(lambda: omega_conf_to_dataclass(section).validate(*sizes, model)))
    if section.prefix.schedule != "stock":
        reasons.append(_refusal(lambda: check_model_family(section, model, read_hf_config(model))))
        for role in ("actor", "ref") if has_ref(config) else ("actor",):
            key, size = slices_of(role, config.actor_rollout_ref[role])
            reasons.append(_refusal(check_sequence_parallel, key, size, num_ranks, model))
            if role == "ref" and size > 1:
                reasons.append(_refusal(check_dealt, key, size, read_model_config(config)))
    reasons.append(_refusal(_check_critic, config, *sizes))
    update, old = section.use_dynamic_bsz, config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz
    if update != old:
        reasons.append(
            f"actor_rollout_ref.rollout.log_prob_use_dynamic_bsz={old}, and actor_rollout_ref.actor.use_dynamic_bsz="
            f"{update}: verl's workers take no other than {update} for the first, or {old} for both"
        )
    reasons += [
        f"{key}=null leaves verl's workers without the size of a micro-batch; set a number of "
        + ("tokens" if counts_tokens else "rows")
        for name, (key, value, counts_tokens) in micro_batches(config).items()
        if value is None and (name != "ref" or need_reference_policy(config))
    ]
    return [reason for reason in dict.fromkeys(reasons) if reason]


def _tool_schemas(data: DictConfig) -> list[dict[str, Any]] | None:
    """The `tools` that verl's dataset shows every prompt's chat template (RLHFDataset.__init__), or None.

    Raises:
        PlanError: the tools cannot be loaded; verl's dataset would go on without them, and count too little.
    """
    paths = {key: data.get(key) for key in ("tool_config_path", "function_tool_path")}
    if not any(paths.values()):
        return None
    try:
        tools = load_all_tools(**paths)
    except Exception as error:  # they are the user's own code
        named = ", ".join(f"data.{key}={path}" for key, path in paths.items() if path)
        folder = Path(next(filter(None, paths.values()))).parent
        raise PlanError(
            f"{named}: these tools cannot be loaded here ({type(error).__name__}: {error}); plan with PYTHONPATH="
            f"{folder}, or where what they import is, or set the key to null to plan without their schemas"
        ) from error
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]


def _as_text(template: Any, where: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """The prompt as the chat template of a tokenizer or processor writes it."""
    try:
        return template.apply_chat_template(messages, **options)
    except Exception as error:  # the template is the model's own code
        raise PlanError(f"{where}: the model's chat template fails: {type(error).__name__}: {error}") from error


class Prompt(NamedTuple):
    """A training prompt after the chat template.

    Attributes:
        tokens: their number; ids: which they are, of a prompt without images and videos.
        grids: [frames, rows, columns] of patches of each image or video.
    """

    tokens: int
    grids: tuple[tuple[int, int, int], ...] = ()
    ids: Sequence[int] = ()


def read_prompts(config: DictConfig, messages: Messages, tokenizer: Any) -> tuple[list[Prompt], int]:
    """Training prompts within the limit, and how many are longer.

    Raises:
        PlanError: they hold images or videos that cannot be read, or come with tools that cannot be loaded.
    """
    data, prompts = config.data, messages.prompts
    options = dict(data.get("apply_chat_template_kwargs") or {}) | {"add_generation_prompt": True, "tokenize": False}
    if (schemas := _tool_schemas(data)) is not None:
        options["tools"] = schemas
    if messages.visual:
        sample = list(_visual_prompts(config, tokenizer, options))
    else:
        chosen = prompts[:: max(1, -(-len(prompts) // MAX_PROMPTS))]
        texts = [_as_text(tokenizer, *prompt, options) for prompt in chosen]
        sample = [Prompt(len(ids), ids=ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids]
    fitting = [prompt for prompt in sample if prompt.tokens <= data.max_prompt_length]
    if not fitting:
        raise PlanError(f"every prompt is longer than data.max_prompt_length={data.max_prompt_length}: raise it")
    return fitting, len(sample) - len(fitting)


def _visual_prompts(config: DictConfig, tokenizer: Any, options: dict[str, Any]) -> Iterator[Prompt]:
    """Evenly spread prompts with what they show, as verl counts their tokens (RLHFDataset.doc2len)."""
    from verl.utils.dataset.rl_dataset import get_dataset_class

    model, data = config.actor_rollout_ref.model, OmegaConf.merge(config.data, {"filter_overlong_prompts": False})
    processor = hf_processor(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    if processor is None:
        raise PlanError(f"the train file has images or videos, and {model.path} has no processor that reads them")
    dataset = get_dataset_class(data)(data.train_files, tokenizer, data, processor)
    for i in range(0, len(dataset), max(1, -(-len(dataset) // MAX_CLIPS))):
        messages = dataset._build_messages(dict(dataset.dataframe[i]), key=data.prompt_key)
        text = _as_text(processor, f"data.train_files, row {i}", messages, options)
        try:
            images, videos, audio = dataset._process_multi_modal_info(messages, dataset.image_patch_size, data)
        except (OSError, ValueError, RuntimeError, AttributeError) as error:  # its fallback's torchvision has no reader
            raise PlanError(f"data.train_files, row {i}: its images or videos cannot be read: {error}") from error
        inputs = build_multimodal_processor_inputs(
            processor, text=[text], images=images, videos=videos, audio=audio,
            mm_processor_kwargs=dataset.mm_processor_kwargs,
        )  # fmt: skip
        grids = [inputs[name].tolist() for name in ("image_grid_thw", "video_grid_thw") if name in inputs]
        yield Prompt(len(inputs["input_ids"][0]), tuple((t, h, w) for kind in grids for t, h, w in kind))
