"""The config of a training command and its train files, read by Hydra and pyarrow alone.

What is wrong with them is said in a second or two; torch and verl take several to be imported.
"""

import contextlib
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import verl_prefix.search_path  # noqa: F401  on which model_engine=prefix is found
from verl_prefix.config.engines import ENGINES, MEGATRON, SWITCHES, copies_of, engine_named, engine_of, trains_adapters
from verl_prefix.files import parse_json
from verl_prefix.tools.plan.options import (
    CONFIG_NAME,
    CONFIG_PATH,
    Options,
    PlanError,
    Rollout,
    Unsupported,
    override_words,
    read_dumps,
    verls_folder,
)

LARGEST = 2**31 - 1  # which verl's tensors of token counts hold
SIMULATED = {  # by which weights, gradients and moments are on the device; the values that --simulate knows
    "fsdp_config.offload_policy": False,
    "veomni.enable_fsdp_offload": False,
    "optim.override_optimizer_config.optimizer_cpu_offload": False,
    "optim.use_precision_aware_optimizer": False,
    "megatron.override_ddp_config.grad_reduce_in_fp32": True,
}


def compose_config(config_name: str, words: list[str], config_path: str = CONFIG_PATH) -> DictConfig:
    """Composes the config of `python -m verl.trainer.main_ppo --config-name=... overrides...`, with our engine
    of verl's engine (`model_engine`).

    Args:
        words: of the command, whatever starts it, or of its overrides alone.
        config_path: folder of the config; a relative one starts at verl/trainer, as in Hydra.

    Raises:
        PlanError: a word is no override, or they do not compose; see also `model_engine`.
    """
    kept = [word for word in override_words(words) if not word.lstrip("+").startswith("model_engine=")]
    engine = engine_named(model_engine(config_name, words, config_path))
    config = _compose(config_name, [*kept, f"model_engine={engine.name}"], config_path)
    if (actor := config.actor_rollout_ref.actor).get("_target_") != engine.target:
        raise PlanError(
            f"actor_rollout_ref.actor is of {actor.get('_target_')}, and model_engine={engine.name} makes it one of "
            f"{engine.target}; remove the override that replaces it"
        )
    if OmegaConf.select(config, "trainer.device") == "npu":
        raise Unsupported("this trains on npu (trainer.device); prefixes can be shared on CUDA GPUs")
    for key in SWITCHES:
        if actor.prefix.get(key) is False:
            actor.prefix[key] = "off"
    return config


def model_engine(config_name: str, words: list[str], config_path: str = CONFIG_PATH) -> str:
    """The `model_engine` of a command: what its words say last, or its config; verl's name or ours.

    Raises:
        Unsupported: it is an engine of verl's on which no prefix is shared. PlanError: it is none.
    """
    pairs = [word.lstrip("+").partition("=") for word in override_words(words)]
    values = {key: value.strip("'\"") for key, _, value in pairs}
    asked = values.get("model_engine", "dp")
    if "model_engine" not in values and (config_name, config_path) != (CONFIG_NAME, CONFIG_PATH):
        hydra = _compose(config_name, [], config_path, return_hydra_config=True).hydra
        asked = hydra.runtime.choices.get("model_engine", asked)
    known, ours = (_trainer() / "config" / "engine").glob("*.yaml"), [x for e in ENGINES for x in (e.verls, e.name)]
    others = {path.stem for path in known} - {*ours, "fsdp"}
    shared = ", ".join(engine.verls for engine in ENGINES)
    sections = [key.removeprefix("actor_rollout_ref.actor.").partition(".")[0] for key in values]
    for name in (asked, values.get("actor_rollout_ref.actor.strategy"), *sections):
        if name in others:
            can = f"prefixes can be shared in trainings with model_engine={shared}"
            raise Unsupported(f"this trains with {name}; {can}")
    if asked not in ours:
        near = get_close_matches(asked, {*ours, *others}, n=1)
        told = f"the nearest is {near[0]}" if near else f"set one of {', '.join(engine.name for engine in ENGINES)}"
        raise PlanError(f"model_engine={asked} is no engine; {told}")
    return asked


def _trainer() -> Path:
    verl = verls_folder()
    if verl is None:
        raise ModuleNotFoundError(name="verl")
    return verl / "trainer"


def _compose(config_name: str, overrides: list[str], config_path: str = CONFIG_PATH, **options: bool) -> DictConfig:
    trainer = _trainer()
    folder = Path(os.path.realpath(trainer / config_path))
    if folder.is_relative_to(trainer.parent / "experimental"):  # which finds verl's other files in its clone alone
        overrides = [f"hydra.searchpath=[file://{trainer / 'config'}]", *overrides]
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return compose(config_name, overrides=overrides, **options)
    except HydraException as error:
        if unknown := re.match("Could not override '(.+)'", str(error)):
            engine = [word for word in overrides if word.startswith("model_engine=")]
            raise PlanError(_unknown(unknown[1], _compose(config_name, engine, config_path))) from error
        word = f"{error.override}: " if isinstance(error, OverrideParseException) else ""
        raise PlanError(f"the overrides do not compose: {word}{' '.join(str(error).split())}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{folder / config_name} is no YAML: {' '.join(str(error).split())}") from error


def _unknown(key: str, config: DictConfig) -> str:
    """What is said of a key that a config does not have: whose it is, or which is nearest."""
    other = next((engine for engine in ENGINES if f".{engine.section}." in key), None)
    if other and other is not engine_of(config.actor_rollout_ref.actor):
        return f"{key} is of verl's {other.title} engine; set model_engine={other.verls}"
    parent, _, leaf = key.rpartition(".")
    near = get_close_matches(leaf, (OmegaConf.select(config, parent) if parent else config) or (), n=1)
    if near == [leaf]:
        return f"{key} is in a section that another override removes or replaces (~, =null); remove one of them"
    return f"{key} is no key of this config" + "".join(
        f"; the nearest is {key.removesuffix(leaf)}{one}" for one in near
    )


def prefix_engine_sources(engine: str) -> tuple[list[str], dict[str, str]]:
    """Entries of this package on Hydra's search path, and the class that our `engine` gives actor and ref.

    Raises:
        PlanError: it does not compose.
    """
    config = _compose(CONFIG_NAME, [f"model_engine={engine}"], return_hydra_config=True)
    sources = [source.path for source in config.hydra.runtime.config_sources if source.provider == "verl_prefix"]
    return sources, {role: config.actor_rollout_ref[role]._target_ for role in ("actor", "ref")}


def micro_batches(config: DictConfig) -> dict[str, tuple[str, int | None, bool]]:
    """Sizes of the micro-batches of update, old and ref: the key, its value, and whether it counts tokens.

    As verl/workers/engine_workers.py reads them; with LoRA the actor computes ref (`ref_in_actor` of verl's trainer).
    """
    ref = "rollout" if trains_adapters(config.actor_rollout_ref.model) else "ref"
    sizes = {}
    for name, role, of_role in (("update", "actor", "ppo"), ("old", "rollout", "log_prob"), ("ref", ref, "log_prob")):
        section = config.actor_rollout_ref[role]
        dynamic = section.use_dynamic_bsz if role == "actor" else section.log_prob_use_dynamic_bsz
        key = f"{of_role}_{'max_token_len' if dynamic else 'micro_batch_size'}_per_gpu"
        sizes[name] = (f"actor_rollout_ref.{role}.{key}", section[key], dynamic)
    return sizes


def prompts_of_step(config: DictConfig) -> int:
    """Prompts that the trainer takes at once."""
    if "async_training" in config:  # fully_async_policy, which wants data.train_batch_size=0
        return config.async_training.require_batches * config.actor_rollout_ref.actor.ppo_mini_batch_size
    return config.data.train_batch_size


def check_sizes(config: DictConfig) -> None:
    """Raises PlanError where a size is no number of 1 or more."""
    role = "actor_rollout_ref"
    batch = "async_training.require_batches" if "async_training" in config else "data.train_batch_size"
    sizes = (batch, "data.max_prompt_length", "data.max_response_length", f"{role}.rollout.n",
             f"{role}.actor.ppo_mini_batch_size", "trainer.n_gpus_per_node", "trainer.nnodes")  # fmt: skip
    values = {key: OmegaConf.select(config, key) for key in sizes}
    values |= {key: value for key, value, _ in micro_batches(config).values() if value is not None}
    for key, value in values.items():
        if type(value) is not int or value < 1:
            raise PlanError(f"{key}={'null' if value is None else value}: set a number of 1 or more")
        if value > LARGEST:
            raise PlanError(f"{key}={value}: set a number of at most {LARGEST}")


def data_ranks(config: DictConfig) -> int:
    """Ranks that compute data in parallel: groups of GPUs, where some have the same rows."""
    gpus: int = config.trainer.n_gpus_per_node * config.trainer.nnodes
    shared = copies_of(config.actor_rollout_ref.actor)
    return gpus if gpus % shared else gpus // shared  # the driver refuses others


def check_batch(config: DictConfig, several_turns: bool) -> None:
    """Raises PlanError where the batch sizes do not divide. verl's v1 trainers fill up whole mini-batches with padding,
    but for separate_async; rows of several turns are padded, whatever they are. Without dynamic batch sizes verl's
    `validate_config` still wants rows for every GPU, or on Megatron's engine micro-batches for every rank."""
    roles, prompts, ranks = config.actor_rollout_ref, prompts_of_step(config), data_ranks(config)
    actor, n = roles.actor, roles.rollout.n
    mini, trainer, wrong = actor.ppo_mini_batch_size, config.trainer, list[str]()
    is_v1 = bool(trainer.get("use_v1")) and "rollout" not in config
    if prompts % mini and not several_turns and not (is_v1 and "separate_" not in trainer.v1.trainer_mode):
        wrong.append("the batch a multiple of the mini-batch")
    if mini * n % ranks:
        wrong.append("mini-batch times n a multiple of the ranks")
    if is_v1 and not actor.use_dynamic_bsz:
        gpus, rows = trainer.n_gpus_per_node * trainer.nnodes, actor.ppo_micro_batch_size_per_gpu or 1
        if prompts * n % (unit := ranks * rows if engine_of(actor) is MEGATRON else gpus):
            wrong.append(f"the batch times n a multiple of {unit}, or set actor_rollout_ref.actor.use_dynamic_bsz=True")
    if wrong:
        raise PlanError(
            f"{prompts} prompts a step (data.train_batch_size, or async_training.require_batches mini-batches), actor."
            f"ppo_mini_batch_size={mini}, rollout.n={n}, {ranks} ranks: make {', and '.join(wrong)}"
        )


def check_simulated(config: DictConfig) -> None:
    """Raises PlanError where less of the weights, gradients and moments is on the device than --simulate has there."""
    for key, simulated in SIMULATED.items():
        if (value := OmegaConf.select(config.actor_rollout_ref.actor, key)) not in (None, simulated):
            raise PlanError(
                f"--simulate knows no actor_rollout_ref.actor.{key}={value}, with which less of the weights, gradients "
                "or moments is on the device; leave --simulate out: the plan itself counts by this key"
            )


def check_model_paths(config: DictConfig, needs_tokenizer: bool) -> None:
    """Raises PlanError where the model's path is absolute, and nothing is there, or a folder has no tokenizer that is
    needed; a relative path may be a hub's name. Where the hub cannot be reached only what is cached is looked for: a
    retry after another of each file would take minutes."""
    model = config.actor_rollout_ref.model
    paths = {key: model.get(key) for key in ("path", "tokenizer_path", "hf_config_path") if model.get(key)}
    for key, path in paths.items():
        if Path(path).is_absolute() and not Path(path).exists():
            raise unreadable_model(key, path, "nothing is there")
    key = "tokenizer_path" if "tokenizer_path" in paths else "path"
    files = [file.name for file in Path(paths.get(key, "")).glob("*") if "path" in paths]
    if needs_tokenizer and files and not re.search(r"token|tekken|vocab|spiece|\.model\b", " ".join(files)):
        raise unreadable_model(key, paths[key], "it has no tokenizer")
    if not all(Path(path).exists() for path in paths.values()) and not os.environ.get("HF_HUB_OFFLINE"):
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        try:
            urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=10).close()
        except OSError as error:
            if not isinstance(error, urllib.error.HTTPError):  # of a hub that answers
                os.environ["HF_HUB_OFFLINE"] = "1"


def unreadable_model(key: str, path: object, reason: str) -> PlanError:
    """The error of a model that this machine cannot load."""
    return PlanError(
        f"actor_rollout_ref.model.{key}={path} cannot be read here ({reason}); set it to the folder of a Hugging Face "
        "model, or to a hub name that this machine can load"
    )


def _read_table(path: Path) -> pyarrow.Table:
    """The rows of a train file of verl's: parquet, or JSON as lines or as a list."""
    try:
        if path.suffix not in (".json", ".jsonl"):
            return pyarrow.parquet.read_table(path)
        text = path.read_text()
        if text.lstrip().startswith("["):
            return pyarrow.Table.from_pylist(parse_json(text))
        return pyarrow.Table.from_pylist([parse_json(line) for line in text.splitlines() if line.strip()])
    except (ValueError, AttributeError, TypeError, OverflowError, pyarrow.ArrowException) as error:
        # A row that is no object has no `items`; a column of several types has none.
        kind = path.suffix[1:] if path.suffix in (".json", ".jsonl") else "parquet"
        raise PlanError(f"data.train_files: {path} cannot be read as {kind}: {error}") from error


class Messages(NamedTuple):
    """Of the train files: where each prompt stands, and its messages; `visual`: images or videos belong to some."""

    prompts: list[tuple[str, Any]]
    visual: bool


def read_messages(config: DictConfig) -> Messages:
    """The train files of a command, which need no model to be read.

    Raises:
        PlanError: one is missing, broken or empty, or has no prompt column or a prompt that is none.
    """
    data = config.data
    files = data.train_files or OmegaConf.create([])
    files = files if OmegaConf.is_config(files) else [files]
    prompts: list[tuple[str, Any]] = []
    visual = False
    for file in files:
        path = Path(str(file)).expanduser()
        if not path.is_file():
            raise PlanError(f"data.train_files: {file} is not a file here; copy it, or add --prompt-lengths 2400")
        table = _read_table(path)
        if table.column_names and data.prompt_key not in table.column_names:
            raise PlanError(f"{file} has columns {table.column_names}; set data.prompt_key to one of them")
        kinds = [key for key in (data.image_key, data.video_key) if key in table.column_names]
        visual = visual or any(any(table[key].to_pylist()) for key in kinds)
        column = table[data.prompt_key].to_pylist() if table.column_names else []  # an empty file of JSON has none
        prompts += [(f"{file}, row {i}", messages) for i, messages in enumerate(column)]
    if not prompts:
        raise PlanError(f"data.train_files={data.train_files} has no rows; name a file of training prompts")
    for where, messages in prompts:
        if not isinstance(messages, list) or not messages or not all(isinstance(x, dict) for x in messages):
            shown = repr(messages)[:60]
            raise PlanError(f"{where}: {data.prompt_key} is {shown}; write a list of messages with role and content")
    return Messages(prompts, visual)


class Asked(NamedTuple):
    """A training command: its config, the `engine` that it names (`model_engine`), `messages` of its train files (None:
    the rollouts may have all that is needed), and `rollouts` of the folder that --response-lengths names."""

    options: Options
    config: DictConfig
    engine: str
    messages: Messages | None
    rollouts: list[Rollout]


@contextlib.contextmanager
def _sections() -> Iterator[None]:
    """Context that reads a config: a section that an override removes, or makes a number, is one error in words."""
    try:
        yield
    except (AttributeError, TypeError, KeyError, OmegaConfBaseException) as error:
        raise PlanError(f"the overrides leave no config of verl's: {type(error).__name__}: {error}") from error


@_sections()
def read_command(options: Options) -> Asked:
    """What can be read and checked of a command without its model.

    Raises:
        PlanError: something is missing, or does not fit.
    """
    folder, name = options.config
    config = compose_config(name, options.overrides, folder)
    check_sizes(config)
    options.check_lengths(config.data.max_prompt_length, config.data.max_response_length)
    rollouts = read_dumps(options.response_lengths) if options.response_lengths and options.has_dump else []
    check_batch(config, several_turns=bool(options.session or rollouts))
    if options.simulate:
        check_simulated(config)
    messages = None if rollouts or options.prompt_lengths else read_messages(config)
    check_model_paths(config, needs_tokenizer=bool(messages or rollouts))
    return Asked(options, config, model_engine(name, options.overrides, folder), messages, rollouts)
