"""A training command as verl reads it: its composed config, what the driver would refuse, how long its prompts are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer import build_multimodal_processor_inputs
from verl.workers.config import FSDPActorConfig

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


def read_tokenizer(config: DictConfig) -> Any:
    """The tokenizer of the command's model."""
    model = config.actor_rollout_ref.model
    return hf_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)


def refusals(config: DictConfig, num_ranks: int) -> list[str]:
    """What the driver would refuse, in its own words; empty if the run would start."""
    try:
        actor: FSDPActorConfig = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        actor.validate(num_ranks, config.data.train_batch_size, config.actor_rollout_ref.model)
    except InstantiationException as error:  # hydra's wrapper of what a config class raised
        return [str(error.__cause__ or error)]
    except (ValueError, AssertionError) as error:
        return [str(error)]
    return []


def prompt_lengths(config: DictConfig, tokenizer: Any) -> tuple[list[int], int]:
    """Tokens per training prompt after the chat template, and how many prompts are longer than the limit.

    Raises:
        PlanError: the train file is missing or has no prompt column, or its prompts hold images or videos that cannot
            be read.
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
