"""A training command as verl reads it: its composed config, what the driver would refuse, how long its prompts are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from verl.tools.tool_registry import load_all_tools
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer import build_multimodal_processor_inputs
from verl.workers.config import FSDPActorConfig

from verl_prefix.models import empty_model

MAX_PROMPTS = 2000  # of the train file, evenly spread; their lengths stand for all
MAX_CLIPS = 64  # the same where their images and videos must be decoded


class PlanError(ValueError):
    """The command cannot be planned; the message says what to change."""


def compose_config(config_name: str, overrides: list[str]) -> DictConfig:
    """What `python -m verl.trainer.main_ppo --config-name=... overrides...` composes, with the prefix engine."""
    kept = [word for word in overrides if not word.lstrip("+").startswith("model_engine=")]
    return _compose(config_name, [*kept, "model_engine=prefix"])


def _compose(config_name: str, overrides: list[str], **options: bool) -> DictConfig:
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose(config_name, overrides=overrides, **options)
    except HydraException as error:
        raise PlanError(f"the overrides do not compose: {error}") from error


def prefix_engine_sources() -> tuple[list[str], dict[str, str]]:
    """Entries of this package on Hydra's search path, and the class that model_engine=prefix gives actor and ref.

    Raises:
        PlanError: it does not compose.
    """
    config = _compose("ppo_trainer", ["model_engine=prefix"], return_hydra_config=True)
    sources = [source.path for source in config.hydra.runtime.config_sources if source.provider == "verl_prefix"]
    return sources, {role: config.actor_rollout_ref[role]._target_ for role in ("actor", "ref")}


@contextmanager
def _reading(key: str, path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PlanError(
            f"actor_rollout_ref.model.{key}={path} cannot be read here ({reason}); set it to the folder of a Hugging "
            "Face model, or to a hub name that this machine can load"
        ) from error


def read_tokenizer(config: DictConfig) -> Any:
    """The tokenizer of the command's model; PlanError where this machine has none."""
    model = config.actor_rollout_ref.model
    key = "tokenizer_path" if model.tokenizer_path else "path"
    with _reading(key, model[key]):
        return hf_tokenizer(model[key], trust_remote_code=model.trust_remote_code)


def read_model(config: DictConfig) -> Any:
    """The command's model without weights; PlanError where this machine has none."""
    model = config.actor_rollout_ref.model
    with _reading("path", model.path):
        return empty_model(model.path, model.trust_remote_code)


def micro_batches(config: DictConfig) -> dict[str, tuple[str, int | None, bool]]:
    """Of update, old and ref: the key that sizes their micro-batches, its value, and whether it counts tokens.

    As verl/workers/engine_workers.py reads them; with LoRA the actor computes ref (`ref_in_actor` of verl's trainer).
    """
    model = config.actor_rollout_ref.model
    lora = (model.get("lora") or {}).get("rank", 0) > 0 or model.get("lora_rank", 0) > 0
    ref = "rollout" if lora or model.get("lora_adapter_path") else "ref"
    found = {}
    for name, role, of_role in (("update", "actor", "ppo"), ("old", "rollout", "log_prob"), ("ref", ref, "log_prob")):
        section = config.actor_rollout_ref[role]
        dynamic = section.use_dynamic_bsz if role == "actor" else section.log_prob_use_dynamic_bsz
        key = f"{of_role}_{'max_token_len' if dynamic else 'micro_batch_size'}_per_gpu"
        found[name] = (f"actor_rollout_ref.{role}.{key}", section[key], dynamic)
    return found


def refusals(config: DictConfig, num_ranks: int) -> list[str]:
    """What the driver, in its own words, or a worker would refuse; empty if the run would start."""
    try:
        actor: FSDPActorConfig = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        actor.validate(num_ranks, config.data.train_batch_size, config.actor_rollout_ref.model)
    except InstantiationException as error:  # hydra's wrapper of what a config class raised
        return [str(error.__cause__ or error)]
    except (ValueError, AssertionError) as error:
        return [str(error)]
    update, old = actor.use_dynamic_bsz, config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz
    if update != old:
        return [
            f"actor_rollout_ref.rollout.log_prob_use_dynamic_bsz={old}, and actor_rollout_ref.actor.use_dynamic_bsz="
            f"{update}: verl's workers take no other than {update} for the first, or {old} for both"
        ]
    missing = {
        key: f"{key}=null leaves verl's workers without the size of a micro-batch; set a number of "
        + ("tokens" if counts_tokens else "rows")
        for name, (key, value, counts_tokens) in micro_batches(config).items()
        if value is None and (name != "ref" or need_reference_policy(config))
    }
    return list(missing.values())


def _tool_schemas(data: DictConfig) -> list[dict[str, Any]] | None:
    """What verl's dataset shows every prompt's chat template as `tools` (RLHFDataset.__init__), or None.

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
        raise PlanError(
            f"{named}: these tools cannot be loaded here ({type(error).__name__}: {error}); make them importable, or "
            "set the key to null to plan without their schemas"
        ) from error
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]


def prompt_lengths(config: DictConfig, tokenizer: Any) -> tuple[list[int], int]:
    """Tokens per training prompt after the chat template, and how many prompts are longer than the limit.

    Raises:
        PlanError: the train file is missing or has no prompt column, its prompts hold images or videos that cannot be
            read, or the tools that they come with cannot be loaded.
    """
    import pyarrow.parquet as pq

    data = config.data
    files = data.train_files if not isinstance(data.train_files, str) else [data.train_files]
    messages: list[Any] = []
    visual = False
    for file in files:
        path = Path(str(file)).expanduser()
        if not path.is_file():
            raise PlanError(f"data.train_files: {file} is not a file here; copy the parquet to this machine")
        table = pq.read_table(path)
        if data.prompt_key not in table.column_names:
            raise PlanError(f"{file} has columns {table.column_names}; set data.prompt_key to one of them")
        kinds = [key for key in (data.image_key, data.video_key) if key in table.column_names]
        visual = visual or any(any(table[key].to_pylist()) for key in kinds)
        messages += table[data.prompt_key].to_pylist()
    options = dict(data.get("apply_chat_template_kwargs") or {}) | {"add_generation_prompt": True, "tokenize": False}
    schemas = _tool_schemas(data)
    if schemas is not None:
        options["tools"] = schemas
    if visual:
        lengths = list(_visual_lengths(config, tokenizer, options))
    else:
        chosen = messages[:: max(1, -(-len(messages) // MAX_PROMPTS))]
        texts = [tokenizer.apply_chat_template(x, **options) for x in chosen]
        lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids]
    fitting = [n for n in lengths if n <= data.max_prompt_length]
    if not fitting:
        raise PlanError(f"every prompt is longer than data.max_prompt_length={data.max_prompt_length}: raise it")
    return fitting, len(lengths) - len(fitting)


def _visual_lengths(config: DictConfig, tokenizer: Any, options: dict[str, Any]) -> Iterator[int]:
    """Tokens of evenly spread prompts with what they show, as verl counts them (RLHFDataset.doc2len)."""
    from verl.utils.dataset.rl_dataset import get_dataset_class

    model, data = config.actor_rollout_ref.model, OmegaConf.merge(config.data, {"filter_overlong_prompts": False})
    processor = hf_processor(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    if processor is None:
        raise PlanError(f"the train file has images or videos, and {model.path} has no processor that reads them")
    dataset = get_dataset_class(data)(data.train_files, tokenizer, data, processor)
    for i in range(0, len(dataset), max(1, -(-len(dataset) // MAX_CLIPS))):
        messages = dataset._build_messages(dict(dataset.dataframe[i]), key=data.prompt_key)
        text = processor.apply_chat_template(messages, **options)
        try:
            images, videos, audio = dataset._process_multi_modal_info(messages, dataset.image_patch_size, data)
        except (OSError, ValueError, RuntimeError, AttributeError) as error:  # its fallback's torchvision has no reader
            raise PlanError(f"data.train_files, row {i}: its images or videos cannot be read: {error}") from error
        inputs = build_multimodal_processor_inputs(
            processor, text=[text], images=images, videos=videos, audio=audio,
            mm_processor_kwargs=dataset.mm_processor_kwargs,
        )  # fmt: skip
        yield len(inputs["input_ids"][0])
