"""Recording: the writer behind `actor_rollout_ref.actor.prefix.trace_dir`. The format is `trace`'s.

Every file is written beside its name and renamed; a step's JSON comes last. A disk that is full ends the recording, not
the run. Files hold users' prompts: only their owner may read them, or enter the folders that are made for them.
"""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save
from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from verl_prefix.config.options import PrefixConfig
from verl_prefix.files import write_whole
from verl_prefix.trace import (
    FIELDS,
    MANIFEST,
    OPTIONAL,
    PACKAGES,
    SCHEMA,
    TraceError,
    check_model_is_whole,
    model_fingerprint,
    plain,
    step_path,
)  # fmt: skip
from verl_prefix.versions import device_name, package_versions

logger = logging.getLogger(__name__)

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


class Rows(Protocol):
    """A mini-batch, as `engine.rows.BatchRows` reads it.

    Attributes:
        data: verl's batch.
        prompts, response_lens: each row's prompt, and the number of tokens of its response.
        pixels: what each row shows; None or empty for text.
    """

    data: TensorDict

    @property
    def prompts(self) -> list[torch.Tensor]: ...
    @property
    def response_lens(self) -> list[int]: ...
    @property
    def pixels(self) -> Sequence[Any]: ...


def _write_json(path: Path, body: dict[str, Any]) -> None:
    write_whole(path, json.dumps(body, indent=1), mode=PRIVATE_FILE)


class TraceWriter:
    """Records a rank's optimizer steps; every rank has one and calls `record` at every step.

    Args:
        folder: the trace's, as in `prefix.trace_dir`.
        rank, world_size: of the ranks that compute data in parallel.
        writes: False on all but one of the ranks that have the same rows.
        max_steps, max_gib: recording ends, on every rank at the same step, before either is exceeded; GiB of all ranks,
            of which each may write an equal share.
        describe: the manifest's part that the engine knows; called once, by rank 0.

    Attributes:
        step, num_bytes: steps that are recorded, and the bytes of this rank's tensors in them.
        ended: whether nothing more is recorded.
        resumed: whether the weights are a checkpoint's. Then nothing is recorded, since it could not be replayed from
            the initial weights. A trace that is there already belongs to the same run, and stays as it is.
    """

    def __init__(
        self, folder: str, rank: int, world_size: int, max_steps: int, max_gib: float,
        describe: Callable[[], dict[str, Any]], writes: bool = True,
    ) -> None:  # fmt: skip
        self.writes = writes
        self.folder, self.rank, self.world_size, self.describe = Path(folder), rank, world_size, describe
        self.max_steps, self.max_bytes = max_steps, max_gib * 2**30 / world_size
        self.step, self.num_bytes, self.ended, self.resumed = 0, 0, False, False

    def record(self, rows: Rows, loss: Callable, reduce_max: Callable[[Sequence[float]], list[float]]) -> None:
        """Writes this rank's rows of one optimizer step, before they are computed.

        Args:
            rows: verl's mini-batch; its tensors by the names in `FIELDS` and `OPTIONAL`, `uid` and scalars are kept.
            loss: verl's loss function, a partial of `ppo_loss` with its config.
            reduce_max: element-wise maximum over ranks.

        Raises:
            TraceError: at the first step, on every rank, where any has images, a vision-language model's positions or a
                loss other than `ppo_loss`, or where the folder holds another run's trace. Later such rows end the
                recording.
        """
        if self.ended:
            return
        if self.resumed:
            return self._end("the run goes on from a checkpoint, and a trace starts from the initial weights")
        leads = self.writes and self.rank == 0 and self.step == 0
        content = b""
        error: Exception | None = None
        try:
            loss_options = _describe_loss(loss)
            tensors, uids, flags = split_fields(rows)
            content = save(tensors)
            of_engine = self.describe() if leads else {}
        except TraceError as problem:
            error = problem
        except Exception as problem:  # of whatever type: other ranks wait for this one
            error = TraceError(
                f"actor_rollout_ref.actor.prefix.trace_dir cannot record these rows: {problem!r}; remove it"
            )
        is_full = self.step >= self.max_steps or self.num_bytes + len(content) > self.max_bytes
        exists = self.step == 0 and (self.folder / MANIFEST).exists()
        # All ranks act on what any of them has seen.
        refused, full, exists = map(bool, reduce_max([error is not None, is_full, exists]))
        if refused:
            error = error or TraceError("actor_rollout_ref.actor.prefix.trace_dir: another rank cannot record its rows")
            if self.step:  # a run that trains goes on
                return self._end(error)
            raise error
        if exists:
            raise TraceError(
                f"actor_rollout_ref.actor.prefix.trace_dir={self.folder} already holds a trace; name another folder or "
                "remove it"
            )
        if full:
            written, most = self.num_bytes / 2**30, self.max_bytes / 2**30
            gib = f"trace_max_gib={most * self.world_size:g}, of which this rank wrote {written:.2f} of its {most:.2f}"
            return self._end(f"trace_max_steps={self.max_steps} or {gib}")
        try:
            if self.writes:  # any rank may be the first
                self.folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            if leads:
                run = {"schema": SCHEMA, "world_size": self.world_size, "loss": loss_options}
                where = {"versions": package_versions(PACKAGES), "device": device_name(), "seed": torch.initial_seed()}
                _write_json(self.folder / MANIFEST, run | where | of_engine)
            if self.writes:
                self._write_step(content, uids, flags)
        except OSError as problem:
            error = problem
        if reduce_max([error is not None])[0]:
            return self._end(error or "another rank could not write its rows")
        self.step += 1
        self.num_bytes += len(content)

    def _end(self, reason: object) -> None:
        self.ended = True
        logger.warning("prefix: the trace in %s ends after %d steps: %s", self.folder, self.step, reason)

    def _write_step(self, content: bytes, uids: list[str] | None, flags: dict[str, Any]) -> None:
        path = step_path(self.folder, self.rank, self.step)
        path.parent.mkdir(PRIVATE_FOLDER, exist_ok=True)
        write_whole(path.with_suffix(".safetensors"), content, mode=PRIVATE_FILE)
        _write_json(path, {"uids": uids, "flags": flags})


def open_trace(
    options: PrefixConfig, rank: int, world_size: int, writes: bool, engine: Any, model_config: Any
) -> TraceWriter:
    """The writer that `prefix.trace_dir` asks for.

    Args:
        rank, world_size, writes: of `TraceWriter`. engine: verl's, which knows the other configs.
        model_config: the user's. The engine may have another one.
    """
    assert options.trace_dir is not None

    def describe() -> dict[str, Any]:
        model = {name: value for name, value in plain(model_config).items() if name != "hf_config"}
        check_model_is_whole(model)
        fingerprint = model_fingerprint(model_config.local_path or model_config.path)
        return {
            "model": model | {"revision": model_config.hf_config._commit_hash, "fingerprint": fingerprint},
            "engine": plain(engine.engine_config),
            "optimizer": plain(engine.optimizer_config),
        }

    return TraceWriter(
        options.trace_dir, rank, world_size, max_steps=options.trace_max_steps, max_gib=options.trace_max_gib,
        describe=describe, writes=writes,
    )  # fmt: skip


def _describe_loss(loss: Any) -> dict[str, Any]:
    if getattr(loss, "func", None) is not ppo_loss or "config" not in loss.keywords:
        raise TraceError(
            f"actor_rollout_ref.actor.prefix.trace_dir records runs with a partial of verl's ppo_loss with its config, "
            f"and this one trains with {loss!r}; remove trace_dir"
        )
    config = loss.keywords["config"]
    owners = {"model_config", "engine", "optim", "checkpoint", "profiler", "fsdp_config", "veomni", "prefix"}
    return {name: value for name, value in plain(config).items() if name not in owners | {"global_batch_info"}}


def _without_padding(rows: Rows) -> TensorDict:
    """The batch with every recorded field jagged, where the legacy trainer pads."""
    data = rows.data
    if "prompts" not in data.keys() or data["prompts"].is_nested:
        return data
    jagged = data.exclude("max_seq_len", "max_response_len")  # to which verl would pad log-probs again
    for name in (*FIELDS, *OPTIONAL):
        value = data.get(name, None)
        if isinstance(value, torch.Tensor) and not value.is_nested and value.dim() == 2:
            pieces = [row[:n] for row, n in zip(value, rows.response_lens, strict=True)]
            pieces = rows.prompts if name == "prompts" else pieces
            jagged[name] = torch.nested.as_nested_tensor(pieces, layout=torch.jagged)
    return jagged


def split_fields(rows: Rows) -> tuple[dict[str, torch.Tensor], list[str] | None, dict[str, Any]]:
    """Jagged fields as flat values and `NAME/lengths` [rows] int64, row-wise tensors as they are; uids; scalars."""
    if any(rows.pixels):
        raise TraceError("actor_rollout_ref.actor.prefix.trace_dir does not record images; remove it")
    tensors, flags = {}, {}
    data = _without_padding(rows)
    for name in data.keys():
        value = data.get(name)
        if name == "session_id":  # of TransferQueue or not: a tensor, or a number per row
            tensors[name] = torch.tensor([int(session) for session in tu.get(data, name)])
        elif isinstance(value, NonTensorData) and isinstance(value.data, bool | int | float | str | None):
            flags[name] = value.data
        elif name in (*FIELDS, *OPTIONAL) and value.is_nested:
            tensors[name] = value.values().detach().cpu().clone()  # safetensors refuses aliases
            if tensors[name].ndim > (3 if name == "routed_experts" else 1):
                raise TraceError(
                    f"actor_rollout_ref.actor.prefix.trace_dir does not record {name} of shape {list(value.shape)}, as "
                    "a vision-language model's processor gives them; remove it"
                )
            tensors[f"{name}/lengths"] = value.offsets().diff().long().cpu()
        elif name in OPTIONAL:
            tensors[name] = value.detach().cpu().clone()
    flags.pop("uid", None)
    uids = tu.get(data, "uid")
    return tensors, None if uids is None else [str(uid) for uid in uids], flags
