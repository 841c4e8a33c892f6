"""A trace: the mini-batches of a real run, rank by rank, so that `verl-prefix ab` can train on them again.

    DIR/manifest.json                       what was trained, with which optimizer and loss; written at the first step
    DIR/rank_00000/step_00000.safetensors   one rank's rows of one optimizer step
    DIR/rank_00000/step_00000.json          its uids, flags and checksum; written last: it exists for whole steps only

Every file is written beside its name and renamed. JSON files carry the sha256 of their own content, and nothing is
pickled. A run that was killed leaves the steps that all its ranks finished; those are what `Trace` reads.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils as tu

SCHEMA = "verl_prefix.trace/1"
MANIFEST = "manifest.json"
PACKAGES = ("verl-prefix", "verl", "torch", "transformers", "tensordict", "ray")
# Tensors that an update reads, and whether they hold integers; the optional ones are recorded where a step has them.
FIELDS = {
    "prompts": True, "responses": True, "input_ids": True, "position_ids": True, "loss_mask": True,
    "response_mask": True, "old_log_probs": False, "advantages": False,
}  # fmt: skip
OPTIONAL = ("ref_log_prob", "rollout_is_weights", "rollout_log_probs", "temperature")
logger = logging.getLogger(__name__)


class TraceError(ValueError):
    """The trace cannot be read or written; the message names the file and what is wrong with it."""


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)


def _write_json(path: Path, body: dict[str, Any]) -> None:
    _replace(path, json.dumps(body | {"sha256": _digest(body)}, indent=1).encode())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
        found = body.pop("sha256")
    except FileNotFoundError:
        raise TraceError(f"{path} is missing") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise TraceError(f"{path} is damaged: it is not JSON with a sha256 ({type(error).__name__}: {error})") from None
    if found != _digest(body):
        raise TraceError(f"{path} is damaged: its content does not match its sha256")
    return body


def plain(config: Any) -> Any:
    """What of a config dataclass JSON can hold: fields of other types, such as tokenizers, are left out."""
    if config is None or isinstance(config, bool | int | float | str):
        return config
    if isinstance(config, list | tuple):
        return [plain(x) for x in config]
    if dataclasses.is_dataclass(config):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if not isinstance(config, dict):
        raise TypeError(type(config).__name__)
    found = {}
    for key, value in config.items():
        try:
            found[str(key)] = plain(value)
        except TypeError:
            continue
    return found


def model_fingerprint(path: str | Path) -> str | None:
    """sha256 over a local model's config.json and the name, size, first and last MiB of each of its safetensors files.

    Returns:
        None where `path` is not a local folder (a hub name).
    """
    folder, digest = Path(path), hashlib.sha256()
    if not (folder / "config.json").is_file():
        return None
    digest.update((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            digest.update(weights.read(2**20))
            weights.seek(max(0, size - 2**20))
            digest.update(weights.read(2**20))
    return digest.hexdigest()


class TraceWriter:
    """Records a rank's optimizer steps; every rank has one and calls `record` at every step.

    Args:
        max_steps, max_gib: recording ends, on every rank at the same step, before either is exceeded; GiB of all ranks.
        describe: the manifest's part that the engine knows; called once, by rank 0.

    Raises:
        TraceError: the folder already holds a trace.
    """

    def __init__(
        self, folder: str, rank: int, world_size: int, max_steps: int, max_gib: float,
        describe: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.folder, self.rank, self.world_size, self.describe = Path(folder), rank, world_size, describe
        self.max_steps, self.max_bytes = max_steps, max_gib * 2**30 / world_size
        self.step, self.num_bytes, self.full = 0, 0, False
        if (self.folder / MANIFEST).exists():
            raise TraceError(
                f"actor_rollout_ref.actor.prefix.trace_dir={folder} already holds a trace; name another folder or "
                "remove it"
            )

    def record(self, data: TensorDict, loss: Callable, reduce_max: Callable[[list[int]], list[int]]) -> None:
        """Writes this rank's rows of one optimizer step, before they are computed.

        Args:
            data: verl's mini-batch; its jagged or row-wise tensors, `uid` and scalars are kept.
            loss: verl's loss function, a partial of `ppo_loss` with its config.
            reduce_max: element-wise maximum over ranks of a list of ints.

        Raises:
            TraceError: the step has images, or a loss other than `ppo_loss`.
        """
        if self.full:
            return
        tensors, uids, flags = _take_apart(data)
        content = save(tensors)
        full = self.step >= self.max_steps or self.num_bytes + len(content) > self.max_bytes
        if reduce_max([int(full)])[0]:
            self.full = True
            logger.warning(
                "prefix: the trace in %s ends after %d steps (trace_max_steps=%d, %.2f of this rank's %.2f GiB)",
                self.folder, self.step, self.max_steps, self.num_bytes / 2**30, self.max_bytes / 2**30,
            )  # fmt: skip
            return
        if self.rank == 0 and self.step == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            manifest = {"schema": SCHEMA, "world_size": self.world_size, "loss": _describe_loss(loss)}
            _write_json(self.folder / MANIFEST, manifest | _environment() | self.describe())
        path = _step_path(self.folder, self.rank, self.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path.with_suffix(".safetensors"), content)
        _write_json(
            path,
            {
                "schema": SCHEMA,
                "rank": self.rank,
                "step": self.step,
                "sha256_tensors": hashlib.sha256(content).hexdigest(),
                "uids": uids,
                "flags": flags,
            },
        )
        self.step += 1
        self.num_bytes += len(content)


def open_trace(engine: Any) -> TraceWriter | None:
    """The writer that `prefix.trace_dir` asks for, for a `PrefixFSDPEngine` that trains; else None."""
    options = engine.prefix_config
    if not options.trace_dir or engine.engine_config.forward_only:
        return None

    def describe() -> dict[str, Any]:
        model = engine.model_config
        local_path = model.local_path or model.path
        return {
            "model": {name: value for name, value in plain(model).items() if name != "hf_config"}
            | {"revision": model.hf_config._commit_hash, "fingerprint": model_fingerprint(local_path)},
            "engine": plain(engine.engine_config),
            "optimizer": plain(engine.optimizer_config),
        }

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return TraceWriter(options.trace_dir, rank, world_size, options.trace_max_steps, options.trace_max_gib, describe)


def _step_path(folder: Path, rank: int, step: int) -> Path:
    return folder / f"rank_{rank:05d}" / f"step_{step:05d}.json"


def _environment() -> dict[str, Any]:
    found = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name in PACKAGES}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"versions": found, "device": device, "seed": torch.initial_seed()}


def _describe_loss(loss: Callable) -> dict[str, Any]:
    name = getattr(loss.func, "__name__", "") if isinstance(loss, functools.partial) else getattr(loss, "__name__", "")
    if name != "ppo_loss":
        raise TraceError(
            f"actor_rollout_ref.actor.prefix.trace_dir records runs with verl's ppo_loss, and this one trains with "
            f"{name or loss!r}; remove trace_dir"
        )
    config = loss.keywords["config"]
    owners = ("model_config", "engine", "optim", "checkpoint", "profiler", "fsdp_config", "prefix", "global_batch_info")
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in owners}
    return plain(fields)


def _take_apart(data: TensorDict) -> tuple[dict[str, torch.Tensor], list[str] | None, dict[str, Any]]:
    """Jagged fields as flat values and `NAME/lengths` [rows] int64, row-wise tensors as they are; uids; scalars."""
    if "multi_modal_inputs" in data.keys() and any(tu.get(data, "multi_modal_inputs")):
        raise TraceError("actor_rollout_ref.actor.prefix.trace_dir does not record images; remove it")
    tensors, flags = {}, {}
    for name in data.keys():
        value = data.get(name)
        if isinstance(value, NonTensorData) and (
            value.data is None or isinstance(value.data, bool | int | float | str)
        ):
            flags[name] = value.data
        elif name in (*FIELDS, *OPTIONAL) and value.is_nested:
            tensors[name] = value.values().detach().cpu().contiguous()
            tensors[f"{name}/lengths"] = value.offsets().diff().cpu()
        elif name in OPTIONAL:
            tensors[name] = value.detach().cpu().contiguous()
    flags.pop("uid", None)
    uids = [str(uid) for uid in tu.get(data, "uid")] if "uid" in data.keys() else None
    return tensors, uids, flags


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

    def tensordict(self, order: list[int] | None = None, **flags: Any) -> TensorDict:
        """verl's mini-batch of these rows, in `order` if given, with `flags` over the recorded ones."""
        order = list(range(self.num_rows)) if order is None else order
        fields: dict[str, Any] = {}
        for name, (values, lengths) in self.jagged.items():
            rows = values.split(lengths.tolist())
            fields[name] = torch.nested.as_nested_tensor([rows[i] for i in order], layout=torch.jagged)
        fields |= {name: tensor[order] for name, tensor in self.dense.items()}
        if self.uids is not None:
            fields["uid"] = [self.uids[i] for i in order]
        return tu.get_tensordict(fields, self.flags | flags)


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
        if not self.folder.is_dir():
            raise TraceError(f"{folder} is not a folder; record a trace with actor_rollout_ref.actor.prefix.trace_dir")
        self.manifest = _read_json(self.folder / MANIFEST)
        if self.manifest.get("schema") != SCHEMA:
            raise TraceError(
                f"{self.folder / MANIFEST} has schema {self.manifest.get('schema')!r}, and this version reads "
                f"{SCHEMA!r}; record the trace again"
            )
        self.world_size: int = self.manifest["world_size"]
        folders = [_step_path(self.folder, rank, 0).parent for rank in range(self.world_size)]
        finished = [{int(path.stem.removeprefix("step_")) for path in f.glob("step_*.json")} for f in folders]
        self.num_steps = max(set.intersection(*finished), default=-1) + 1
        for rank, steps in enumerate(finished):
            if gaps := sorted(set(range(self.num_steps)) - steps):
                raise TraceError(
                    f"{_step_path(self.folder, rank, gaps[0])} is missing, and later steps are there: the trace "
                    "lost files"
                )
        if not self.num_steps:
            raise TraceError(f"{folder} has no step that all {self.world_size} ranks finished")

    def check_model(self, path: str | Path) -> None:
        """Raises TraceError where `path` is not the model that was recorded."""
        recorded, found = self.manifest["model"]["fingerprint"], model_fingerprint(path)
        if found is None:
            raise TraceError(f"{path} has no config.json; name the recorded model's folder with --model")
        if recorded is not None and found != recorded:
            raise TraceError(
                f"{path} is another model than the trace was recorded with ({self.manifest['model']['path']}): its "
                "config.json or weights differ; name the right one with --model"
            )

    def read(self, step: int, rank: int) -> StepRows:
        """One rank's rows of one step, checked."""
        path = _step_path(self.folder, rank, step)
        body, data_path = _read_json(path), path.with_suffix(".safetensors")
        if (body.get("schema"), body.get("rank"), body.get("step")) != (SCHEMA, rank, step):
            raise TraceError(f"{path} says it is step {body.get('step')} of rank {body.get('rank')}: files were moved")
        try:
            content = data_path.read_bytes()
        except FileNotFoundError:
            raise TraceError(f"{data_path} is missing") from None
        if hashlib.sha256(content).hexdigest() != body["sha256_tensors"]:
            raise TraceError(f"{data_path} is damaged: its {len(content)} bytes do not match the sha256 in {path.name}")
        try:
            tensors = load(content)
        except SafetensorError as error:
            raise TraceError(f"{data_path} is damaged: {error}") from None
        _check_fields(tensors, body["uids"], data_path)
        jagged = {n: (t, tensors[f"{n}/lengths"]) for n, t in tensors.items() if f"{n}/lengths" in tensors}
        dense = {n: t for n, t in tensors.items() if n not in jagged and not n.endswith("/lengths")}
        return StepRows(jagged, dense, body["uids"], body["flags"])

    def check(self) -> Iterator[tuple[int, int]]:
        """Reads everything, one (step, rank) after the other."""
        for step in range(self.num_steps):
            for rank in range(self.world_size):
                self.read(step, rank)
                yield step, rank


def _check_fields(tensors: dict[str, torch.Tensor], uids: list[str] | None, path: Path) -> None:
    for name, integers in FIELDS.items():
        for key in (name, f"{name}/lengths"):
            if key not in tensors:
                raise TraceError(f"{path} has no tensor {key}")
        values, lengths = tensors[name], tensors[f"{name}/lengths"]
        if integers == values.dtype.is_floating_point or lengths.dtype != torch.int64:
            wanted = "integers" if integers else "floating point"
            raise TraceError(f"{path}: {name} is {values.dtype} with {lengths.dtype} lengths, not {wanted} with int64")
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
