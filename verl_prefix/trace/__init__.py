"""A trace: the mini-batches of a real run, rank by rank, so that `verl-prefix ab` can train on them again.

    DIR/manifest.json                       what was trained, with which optimizer and loss; written at the first step
    DIR/rank_00000/step_00000.safetensors   one rank's rows of one optimizer step
    DIR/rank_00000/step_00000.json          its uids and flags; written last: it exists for whole steps only

Nothing is pickled. A run that was killed leaves the steps that all its ranks finished; those are what `Trace` reads.
`trace.writer` writes.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load

from verl_prefix.files import parse_json

SCHEMA = "verl_prefix.trace/1"
MANIFEST = "manifest.json"
SECTIONS = ("model", "engine", "optimizer", "loss")  # of the manifest
PACKAGES = ("verl-prefix", "verl", "torch", "transformers", "tensordict", "ray")
# Tensors that an update reads; the optional ones are recorded where a step has them.
FIELDS = (
    "prompts", "responses", "input_ids", "position_ids", "loss_mask", "response_mask", "old_log_probs", "advantages",
)  # fmt: skip
OPTIONAL = (
    "ref_log_prob", "rollout_is_weights", "rollout_log_probs", "temperature", "session_id", "routed_experts",
)  # fmt: skip


class TraceError(ValueError):
    """The trace cannot be read or written; the message names the file or option, and what is wrong with it."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context that reads `path`: whatever is wrong with it is one error, which names it. A `TraceError` within says
    itself what to do."""
    try:
        yield
    except TraceError:
        raise
    except (
        OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, SafetensorError
    ) as error:  # fmt: skip
        raise TraceError(f"{path} cannot be read: {type(error).__name__}: {error}; record the trace again") from error


def plain(config: Any) -> Any:
    """The part of a config dataclass that JSON can hold: fields of other types, such as tokenizers, are left out."""
    if isinstance(config, bool | int | float | str | None):
        return config
    if isinstance(config, list | tuple):
        return [plain(x) for x in config]
    if dataclasses.is_dataclass(config):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if not isinstance(config, dict):
        raise TypeError(type(config).__name__)
    held = {}
    for key, value in config.items():
        with contextlib.suppress(TypeError):
            held[str(key)] = plain(value)
    return held


def model_fingerprint(path: str | Path) -> str | None:
    """sha256 over a model's config.json and the name, size, first and last MiB of each of its weight files.

    Returns:
        None where `path` is neither a model's folder nor the hub name of one that is in the hub's cache.
    """
    folder, digest = Path(path), hashlib.sha256()
    if not (folder / "config.json").is_file():
        try:
            cached = try_to_load_from_cache(str(path), "config.json")
        except HFValidationError:  # not a hub name
            cached = None
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    digest.update((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            digest.update(weights.read(2**20))
            weights.seek(max(0, size - 2**20))
            digest.update(weights.read(2**20))
    return digest.hexdigest()


def check_model_is_whole(model: dict[str, Any]) -> None:
    """Checks that a manifest's model has no weights or config outside of its folder, since a replay reads that alone.

    The folder's fingerprint shows whether it is the same model. An adapter is refused, too: its config may name modules
    to import.

    Raises:
        TraceError: weights or a config are elsewhere.
    """
    for key in ("lora_adapter_path", "hf_config_path"):
        if model.get(key) not in (None, model["path"]):
            raise TraceError(
                f"a trace cannot hold actor_rollout_ref.model.{key}={model[key]}, since a replay reads model.path "
                f"alone; record a run without {key}, or leave out trace_dir and compare whole runs with `verl-prefix "
                "ab --runs STOCK OURS`"
            )


def step_path(folder: Path, rank: int, step: int) -> Path:
    """The JSON file of one rank's step in a trace's folder."""
    return folder / f"rank_{rank:05d}" / f"step_{step:05d}.json"


@dataclasses.dataclass(frozen=True)
class StepRows:
    """One rank's rows of one optimizer step.

    Attributes:
        jagged: fields as (values, lengths [rows]).
        dense: other tensors, [rows, ...].
        uids: of each row; None: the batch had none.
        flags: what the batch had once: numbers, texts and the like.
    """

    jagged: dict[str, tuple[torch.Tensor, torch.Tensor]]
    dense: dict[str, torch.Tensor]
    uids: list[str] | None
    flags: dict[str, Any]

    @property
    def num_rows(self) -> int:
        return len(self.jagged["input_ids"][1])


def join_rows(parts: list[StepRows]) -> StepRows:
    """Rows of several ranks as those of one; flags are the first one's, and so are the names of the fields."""
    first = parts[0]
    return StepRows(
        {
            name: (torch.cat([p.jagged[name][0] for p in parts]), torch.cat([p.jagged[name][1] for p in parts]))
            for name in first.jagged
        },
        {name: torch.cat([part.dense[name] for part in parts]) for name in first.dense},
        None if first.uids is None else [uid for part in parts for uid in part.uids or ()],
        first.flags,
    )  # fmt: skip


class Trace:
    """A recorded run.

    Args:
        folder: `prefix.trace_dir` of the run.

    Attributes:
        folder: the same, as a path.
        manifest: what `TraceWriter` wrote. num_steps: steps that every rank finished.
        world_size: ranks that computed data in parallel.

    Raises:
        TraceError: at construction and at `read`, naming the file and what is wrong with it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).exists():
            raise TraceError(
                f"{folder} is no trace, which has a {MANIFEST}; record one with "
                "actor_rollout_ref.actor.prefix.trace_dir=FOLDER"
            )
        with reading(self.folder / MANIFEST):
            self.manifest = parse_json((self.folder / MANIFEST).read_bytes())
            if self.manifest["schema"] != SCHEMA:
                raise ValueError(f"its schema is {self.manifest['schema']!r}, and this version reads {SCHEMA!r}")
            if missing := [name for name in SECTIONS if not isinstance(self.manifest[name], dict)]:
                raise ValueError(f"it lacks {missing}")
            self.world_size: int = self.manifest["world_size"]
            folders = sorted(path for path in self.folder.glob("rank_*") if path.is_dir())
            if type(self.world_size) is not int or self.world_size != len(folders):
                raise ValueError(f"its world_size is {self.world_size!r}, and {len(folders)} ranks have a folder")
            names = [[path.stem.removeprefix("step_") for path in folder.glob("step_*.json")] for folder in folders]
            finished = [{int(name) for name in own if name.isdecimal()} for own in names]
            self.num_steps = max(set.intersection(*finished), default=-1) + 1
        if not self.num_steps:
            raise TraceError(f"{folder} has no step that all {self.world_size} ranks finished")

    def check_model(self, path: str | Path) -> None:
        """Raises TraceError where `path` is not the model that was recorded."""
        recorded, ours = self.manifest["model"].get("fingerprint"), model_fingerprint(path)
        if ours is None:
            raise TraceError(
                f"{path} has no config.json, and the hub's cache no model of that name; name the recorded model's "
                "folder with --model"
            )
        if recorded is not None and ours != recorded:
            raise TraceError(
                f"{path} is another model than the trace was recorded with ({self.manifest['model'].get('path')}): its "
                "config.json or weights differ; name the right one with --model"
            )

    def read(self, step: int, rank: int) -> StepRows:
        """One rank's rows of one step, checked."""
        path = step_path(self.folder, rank, step)
        with reading(path):
            body = parse_json(path.read_bytes())
            flags, uids = dict(body["flags"]), body["uids"] and list(body["uids"])
        path = path.with_suffix(".safetensors")
        with reading(path):
            tensors = load(path.read_bytes())
            jagged = {n: (t, tensors[f"{n}/lengths"]) for n, t in tensors.items() if f"{n}/lengths" in tensors}
            dense = {n: t for n, t in tensors.items() if n not in jagged and not n.endswith("/lengths")}
            rows = StepRows(jagged, dense, uids, flags)
            _check_rows(rows)
        return rows

    def check(self) -> None:
        """Reads every step of every rank: what is damaged raises now."""
        for step in range(self.num_steps):
            for rank in range(self.world_size):
                self.read(step, rank)


def _check_rows(rows: StepRows) -> None:
    """Raises ValueError or KeyError where rows lack a field, or fields do not have the same rows."""
    prompts, responses = (rows.jagged[name][1] for name in ("prompts", "responses"))
    whole = prompts + responses
    # What verl hands over either spans a row, or its response, or is the prompt.
    spans = {"prompts": [prompts]} | dict.fromkeys(("input_ids", "position_ids", "routed_experts"), [whole])
    for name in {*FIELDS, *rows.jagged}:
        values, lengths = rows.jagged[name]
        fits = any(torch.equal(lengths, span) for span in spans.get(name, [responses, whole]))
        if not fits or int(lengths.sum()) != len(values):
            raise ValueError(f"{name} does not fit the rows' prompts and responses")
    others = list(rows.dense.values()) + ([] if rows.uids is None else [rows.uids])
    if any(len(each) != rows.num_rows for each in others):
        raise ValueError(f"{[*rows.dense, 'uids']} do not have the {rows.num_rows} rows of input_ids")
