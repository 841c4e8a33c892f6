"""A trace: the mini-batches of a real run, rank by rank, so that `verl-prefix ab` can train on them again.

    DIR/manifest.json                       what was trained, with which optimizer and loss; written at the first step
    DIR/rank_00000/step_00000.safetensors   one rank's rows of one optimizer step
    DIR/rank_00000/step_00000.json          its uids, flags and checksum; written last: it exists for whole steps only

JSON files carry the sha256 of their own content, and nothing is pickled. A run that was killed leaves the steps that
all its ranks finished; those are what `Trace` reads. `engine.trace_writer` writes.
"""

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load

SCHEMA = "verl_prefix.trace/1"
MANIFEST = "manifest.json"
PACKAGES = ("verl-prefix", "verl", "torch", "transformers", "tensordict", "ray")
# Tensors that an update reads, and whether they hold integers; the optional ones are recorded where a step has them.
FIELDS = {
    "prompts": True, "responses": True, "input_ids": True, "position_ids": True, "loss_mask": True,
    "response_mask": True, "old_log_probs": False, "advantages": False,
}  # fmt: skip
OPTIONAL = ("ref_log_prob", "rollout_is_weights", "rollout_log_probs", "temperature")


class TraceError(ValueError):
    """The trace cannot be read or written; the message names the file and what is wrong with it."""


def digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
        recorded = body.pop("sha256")
    except FileNotFoundError:
        raise TraceError(f"{path} is missing") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise TraceError(f"{path} is damaged: it is not JSON with a sha256 ({type(error).__name__}: {error})") from None
    if recorded != digest(body):
        raise TraceError(f"{path} is damaged: its content does not match its sha256")
    return body


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


def step_path(folder: Path, rank: int, step: int) -> Path:
    return folder / f"rank_{rank:05d}" / f"step_{step:05d}.json"


@dataclasses.dataclass(frozen=True)
class StepRows:
    """One rank's rows of one optimizer step: jagged fields as (values, lengths [rows]), other tensors [rows, ...]."""

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
            name: tuple(torch.cat([part.jagged[name][i] for part in parts]) for i in range(2))
            for name in first.jagged
        },
        {name: torch.cat([part.dense[name] for part in parts]) for name in first.dense},
        None if first.uids is None else [uid for part in parts for uid in part.uids],
        first.flags,
    )  # fmt: skip


class Trace:
    """A recorded run.

    Attributes:
        manifest: what `TraceWriter` wrote. num_steps: steps that every rank finished.

    Raises:
        TraceError: at construction and at `read`, naming the file and what is wrong with it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = _read_json(self.folder / MANIFEST)
        if self.manifest.get("schema") != SCHEMA:
            raise TraceError(
                f"{self.folder / MANIFEST} has schema {self.manifest.get('schema')!r}, and this version reads "
                f"{SCHEMA!r}; record the trace again"
            )
        self.world_size: int = self.manifest.get("world_size")
        sections = ("model", "engine", "optimizer", "loss")
        missing = [name for name in sections if not isinstance(self.manifest.get(name), dict)]
        if type(self.world_size) is not int or self.world_size < 1 or missing:
            raise TraceError(
                f"{self.folder / MANIFEST} has world_size {self.world_size!r} and lacks {missing}: trace_dir writes a "
                "count of ranks and all sections"
            )
        folders = [step_path(self.folder, rank, 0).parent for rank in range(self.world_size)]
        names = [[path.stem.removeprefix("step_") for path in folder.glob("step_*.json")] for folder in folders]
        finished = [{int(name) for name in own if name.isdecimal()} for own in names]
        self.num_steps = max(set.intersection(*finished), default=-1) + 1
        for rank, steps in enumerate(finished):
            if gaps := sorted(set(range(self.num_steps)) - steps):
                raise TraceError(
                    f"{step_path(self.folder, rank, gaps[0])} is missing, and later steps are there: the trace "
                    "lost files"
                )
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
        body, data_path = _read_json(path), path.with_suffix(".safetensors")
        head = tuple(body.get(name) for name in ("schema", "run", "rank", "step"))
        if head != (SCHEMA, self.manifest.get("run"), rank, step):
            raise TraceError(
                f"{path} says it is step {head[3]} of rank {head[2]} of run {head[1]}, and the manifest is of run "
                f"{self.manifest.get('run')}: files were moved"
            )
        uids, flags = body.get("uids"), body.get("flags")
        if not isinstance(flags, dict) or not isinstance(uids, list | None):
            raise TraceError(f"{path} has flags {type(flags).__name__} and uids {type(uids).__name__}")
        try:
            content = data_path.read_bytes()
        except FileNotFoundError:
            raise TraceError(f"{data_path} is missing") from None
        if hashlib.sha256(content).hexdigest() != body.get("sha256_tensors"):
            raise TraceError(f"{data_path} is damaged: its {len(content)} bytes do not match the sha256 in {path.name}")
        try:
            tensors = load(content)
        except SafetensorError as error:
            raise TraceError(f"{data_path} is damaged: {error}") from None
        _check_fields(tensors, uids, data_path)
        jagged = {n: (t, tensors[f"{n}/lengths"]) for n, t in tensors.items() if f"{n}/lengths" in tensors}
        dense = {n: t for n, t in tensors.items() if n not in jagged and not n.endswith("/lengths")}
        return StepRows(jagged, dense, uids, flags)

    def check(self) -> None:
        """Reads every step of every rank: what is damaged raises now."""
        for step in range(self.num_steps):
            for rank in range(self.world_size):
                self.read(step, rank)


def _check_fields(tensors: dict[str, torch.Tensor], uids: list[str] | None, path: Path) -> None:
    for name, integers in FIELDS.items():
        for key in (name, f"{name}/lengths"):
            if key not in tensors:
                raise TraceError(f"{path} has no tensor {key}")
        values, lengths = tensors[name], tensors[f"{name}/lengths"]
        if integers == values.dtype.is_floating_point or lengths.dtype != torch.int64:
            wanted = "integers" if integers else "floating point"
            raise TraceError(f"{path}: {name} is {values.dtype} with {lengths.dtype} lengths, not {wanted} with int64")
    for name, tensor in tensors.items():
        whole = name.removesuffix("/lengths")
        if not tensor.ndim or whole not in tensors or (whole != name and (tensor.ndim > 1 or (tensor < 0).any())):
            raise TraceError(f"{path}: {name} has shape {list(tensor.shape)} and goes with no rows")
    rows = len(tensors["input_ids/lengths"])
    prompts, responses = (tensors[f"{name}/lengths"] for name in ("prompts", "responses"))
    if len(prompts) != rows or len(responses) != rows or (uids is not None and len(uids) != rows):
        raise TraceError(f"{path}: prompts, responses and uids do not have the {rows} rows of input_ids")
    # What verl hands over either spans a row, or its response, or is the prompt.
    whole = prompts + responses
    expected = {"prompts": prompts, "input_ids": whole, "position_ids": whole}
    for name, tensor in tensors.items():
        if name.endswith("/lengths"):
            values, wanted = tensors[name.removesuffix("/lengths")], expected.get(name.removesuffix("/lengths"))
            allowed = (responses, whole) if wanted is None else (wanted,)
            if not any(torch.equal(tensor, lengths) for lengths in allowed) or int(tensor.sum()) != len(values):
                raise TraceError(f"{path}: {name} does not fit the rows' prompts and responses")
        elif f"{name}/lengths" not in tensors and len(tensor) != rows:
            raise TraceError(f"{path}: {name} has {len(tensor)} rows, input_ids has {rows}")
