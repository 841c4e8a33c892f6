"""An arm: one engine, verl's stock or ours, on its way through the replayed steps; and how far two arms are apart.

Every rank holds its shards; differences are sums over shards, reduced over ranks, so every rank knows every result.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.torch_functional import allgather_dict_into_dict
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

from verl_prefix.backends.fsdp import PrefixEngineConfig
from verl_prefix.backends.hugging_face import local_shard
from verl_prefix.backends.stock_replay import replaying
from verl_prefix.config.model import dense_attention, read_hf_config
from verl_prefix.config.options import PrefixConfig
from verl_prefix.engine.backend import Replay
from verl_prefix.models.recurrent import packing_leak
from verl_prefix.tools.ab.options import REPACKED, STOCK, TRUTH
from verl_prefix.tools.memory import RESET_PEAK, memory_mib, reset_peak_mib
from verl_prefix.trace import MANIFEST, StepRows

VERLS = (STOCK, REPACKED, TRUTH)  # arms that are verl's engine
# Not trust_remote_code: a trace is data, and must not bring code along. For the same reason paths are not here.
MODEL_KEYS = (
    "use_remove_padding", "override_config", "enable_gradient_checkpointing", "enable_activation_offload",
    "lora_rank", "lora_alpha", "target_modules", "target_parameters", "exclude_modules",
    "load_tokenizer",
)  # fmt: skip


def _fields(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a config class from a manifest's section; sections within it become their own config classes."""
    arguments = {}
    for field in dataclasses.fields(cls):
        if field.init and field.name in values and field.name != "_target_":
            value, nested = values[field.name], field.default_factory
            if dataclasses.is_dataclass(nested) and value:
                value = nested(**_fields(nested, value))
            arguments[field.name] = value
    return arguments


def loss_function(manifest: dict[str, Any]) -> Callable:
    """verl's ppo_loss with the recorded options."""
    config = ActorConfig(**_fields(ActorConfig, manifest["loss"]) | {"strategy": "fsdp2"})
    return functools.partial(ppo_loss, config=config)


def _configs(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], FSDPOptimizerConfig]:
    """Options of a manifest's model and engine, and its optimizer."""
    model = {key: manifest["model"][key] for key in MODEL_KEYS if key in manifest["model"]}
    # A trace has every row once, and one rank replays what sequence parallelism spread over several.
    engine = _fields(FSDPEngineConfig, manifest["engine"]) | {"strategy": "fsdp2", "ulysses_sequence_parallel_size": 1}
    if replays(manifest):  # what old log-probs recorded, too
        engine["router_replay"] = dataclasses.replace(engine["router_replay"], mode="R3")
    return model, engine, FSDPOptimizerConfig(**_fields(FSDPOptimizerConfig, manifest["optimizer"]))


def replays(manifest: dict[str, Any]) -> bool:
    """Whether the run replayed routes of experts."""
    return (manifest["engine"].get("router_replay") or {}).get("mode", "disabled") != "disabled"


def check_manifest(manifest: dict[str, Any]) -> None:
    """Raises ValueError where verl's config classes, of the version that is installed, refuse the options."""
    try:
        _, engine, _ = _configs(manifest)
        FSDPEngineConfig(**engine)
        loss_function(manifest)
        precision(manifest)
        torch.Generator().manual_seed(manifest["seed"])
    except (AssertionError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the verl that is installed refuses the options in {MANIFEST}: {error!r}; replay the trace with the verl "
            "that recorded it, or record it again"
        ) from error


def precision(manifest: dict[str, Any]) -> str:
    """Name of the dtype that forward and backward run in: fp32, bf16 or fp16."""
    name = (manifest["engine"].get("mixed_precision") or {}).get("param_dtype", "bf16")
    return PrecisionType.to_str(PrecisionType.to_dtype(name))


def to_tensordict(rows: StepRows, order: list[int] | None = None, **flags: Any) -> TensorDict:
    """verl's mini-batch of these rows, in `order` if given, with `flags` over the recorded ones."""
    fields: dict[str, Any] = dict(rows.dense)
    for name, (values, lengths) in rows.jagged.items():
        fields[name] = torch.nested.as_nested_tensor(values.split(lengths.tolist()), layout=torch.jagged)
    if rows.uids is not None:
        fields["uid"] = rows.uids
    data = tu.get_tensordict(fields, rows.flags | flags)
    return data if order is None else tu.index_select_tensor_dict(data, order)


def build_engine(name: str, manifest: dict[str, Any]) -> Any:
    """verl's fsdp2 engine for stock, stock_repacked and truth, ours for a schedule's name; initialised weights.

    Raises:
        ValueError: the recorded options do not go with the shared-prefix path.
    """
    model, engine, optimizer = _configs(manifest)
    double = name == TRUTH and precision(manifest) == "fp32"
    if name == TRUTH:
        engine["mixed_precision"] = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
        dense = dense_attention(read_hf_config({"path": manifest["model"]["path"]}))
        model["override_config"] = (model.get("override_config") or {}) | {"attn_implementation": dense}
        model["enable_activation_offload"] = False  # verl's is right under gradient checkpointing alone
    if name in VERLS:
        engine_config = FSDPEngineConfig(**engine)
    else:
        recorded = manifest["engine"].get("prefix") or {}
        # Not skip_zero_advantage: log-probs of all rows are compared.
        kept = ["logits_chunk", "attention", "trees", "exchange", "keep_attention"]
        kept += [] if name == "packed" else ["wave_tokens"]
        # min_speedup 0: to compare stock with stock would hold, and say nothing.
        options = {key: recorded[key] for key in kept if key in recorded} | {"min_speedup": 0}
        # Off: this replay is the check, and a wrong engine is to be measured, not stopped.
        options |= {"schedule": name, "offload": bool(recorded.get("offload")) and name != "packed", "verify": "off"}
        engine_config = PrefixEngineConfig(**engine | {"strategy": "prefix"}, prefix=PrefixConfig(**options))
    torch.manual_seed(manifest["seed"])  # LoRA matrices are drawn
    built = EngineRegistry.new(
        model_type="language_model",
        backend=engine_config.strategy,
        model_config=HFModelConfig(path=manifest["model"]["path"], **model),
        engine_config=engine_config,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    # Every dtype name then means float64 to verl, whose names stop at fp32; HF's RMSNorm stays fp32 either way. Patched
    # while one engine is built: verl names the dtypes of weights, FSDP2's policy and buffers through this one function
    # (transformer_impl.py), and no config can ask for float64.
    to_float64 = mock.patch.object(PrecisionType, "to_dtype", staticmethod(lambda _: torch.float64))
    with to_float64 if double else nullcontext():
        built.initialize()
    if double:
        built._autocast_dtype = torch.float32  # verl's word for no autocast
        built.module.config._experts_implementation = "eager"  # grouped_mm has no float64
    return built


@contextmanager
def _measured(figures: dict[str, dict[str, float | None]], name: str) -> Iterator[None]:
    """Adds a pass's seconds (the slowest rank's) and GiB that it adds at its peak (the fullest rank's; None where it
    cannot be measured) to `figures`."""
    device, wait = ("cuda", torch.cuda.synchronize) if torch.cuda.is_available() else ("cpu", lambda: None)
    known = device == "cuda" or RESET_PEAK.exists()
    before = reset_peak_mib(device) if known else 0.0
    wait()
    dist.barrier()
    start = time.perf_counter()
    yield
    wait()
    seconds, added = time.perf_counter() - start, (memory_mib(device)[1] - before) / 2**10 if known else 0.0
    figures["seconds"][name], fullest = _reduced([seconds, added], dist.ReduceOp.MAX)
    figures["added_gib"][name] = fullest if known else None


def _reduced(values: list[float], op: Any = dist.ReduceOp.SUM) -> list[float]:
    """Reduces each value over ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op=op)  # a gloo group serves host tensors beside NCCL
    return total.tolist()


def _norms(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[float], list[float]]:
    """Per pair (value, reference) the norms of difference and of reference, over all ranks."""
    sums = [float((a.double() - b.double()).square().sum()) for a, b in pairs]
    sums += [float(b.double().square().sum()) for _, b in pairs]
    norms = [x**0.5 for x in _reduced(sums)]
    return norms[: len(pairs)], norms[len(pairs) :]


def relative_error(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """||value - reference|| / ||reference|| with all pairs as one vector; 0 where both are zero."""
    difference, reference = (sum(x * x for x in norms) ** 0.5 for norms in _norms(pairs))
    return difference / reference if reference else (float("inf") if difference else 0.0)


def errors_by_parameter(arm: "Arm", stock: "Arm") -> list[float]:
    """||arm's - stock's|| / ||stock's|| of every parameter's gradient.

    A parameter whose gradient is small beside the others' is as noisy as they are: its norm counts as theirs, in RMS.
    """
    differences, references = _norms(list(zip(arm.grads, stock.grads, strict=True)))
    floor = sum(x * x for x in references) ** 0.5 / len(references) ** 0.5
    return [d / max(r, floor, 1e-300) for d, r in zip(differences, references, strict=True)]


class Arm:
    """One engine on its way through the steps.

    Attributes of the last `passes`, this rank's: `grads` before clipping; `log_probs` of the update's pass and
    `infer_log_probs` of the one behind old and ref log-probs, of response tokens. `values`, over all ranks.
    """

    def __init__(self, name: str, manifest: dict[str, Any]) -> None:
        self.name = name
        self.engine = build_engine(name, manifest)
        self.loss = loss_function(manifest)
        packs = manifest["model"].get("use_remove_padding", True)
        self.leak = packing_leak(self.engine.module) if packs else None  # why no stock arm may pack rows
        self._row_by_row = manifest.get("stock_row_by_row", False) or self.leak is not None
        self._infer_flags = {
            flag: manifest["engine"][f"infer_{flag}"]
            for flag in ("max_token_len_per_gpu", "micro_batch_size_per_gpu")
            if manifest["engine"].get(f"infer_{flag}")
        }
        if replays(manifest) and name in VERLS:
            text = self.engine.module.config.get_text_config()
            self._routes = replaying(self.engine, Replay("R3", text.num_hidden_layers, text.num_experts_per_tok))
            self._routes.__enter__()  # for as long as the arm lives
        self.names = [name for name, p in self.engine.module.named_parameters() if p.requires_grad]

    def weights(self) -> list[torch.Tensor]:
        """This rank's shards of the trained parameters, not copied."""
        return [local_shard(p).detach() for p in self.engine.module.parameters() if p.requires_grad]

    @contextmanager
    def at(self, weights: list[torch.Tensor]) -> Iterator[None]:
        """Other weights for a while."""
        own = [w.clone() for w in self.weights()]
        for mine, other in zip(self.weights(), weights, strict=True):
            mine.copy_(other)
        try:
            yield
        finally:
            for mine, other in zip(self.weights(), own, strict=True):
                mine.copy_(other)

    def data(self, rows: StepRows, **flags: Any) -> TensorDict:
        """verl's mini-batch of the rows as this arm takes them. Every rank calls it."""
        # The engines are built without fused kernels, whatever the run had.
        flags = rows.flags | flags | {"use_fused_kernels": False}
        order = None
        if self.name == TRUTH or (self.name == STOCK and self._row_by_row):
            flags |= {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
        together = rows.jagged["input_ids"][1].split(flags.get("force_group_size", 1))
        longest = int(largest_of_ranks(max(int(lengths.sum()) for lengths in together)))
        if flags["use_dynamic_bsz"]:  # ranks that shared a row had their budgets together
            flags |= {"max_token_len_per_gpu": max(flags["max_token_len_per_gpu"], longest)}
        if self.name == REPACKED:  # a stock run too, for whoever wrote the config: only rounding can differ
            budget = flags["micro_batch_size_per_gpu"] * longest
            budget = flags["max_token_len_per_gpu"] if flags["use_dynamic_bsz"] else budget
            flags |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": 2 * budget}
            flags |= {"use_remove_padding": False} if self.leak else {}
            order = list(reversed(range(rows.num_rows)))
        return to_tensordict(rows, order, **flags)

    def infer(self, rows: StepRows) -> dict[str, torch.Tensor]:
        """The pass behind old and ref log-probs: verl's nested outputs per row."""
        with self.engine.eval_mode():
            output = self.engine.infer_batch(self.data(rows, **self._infer_flags))
        return output["model_output"]

    def passes(self, rows: StepRows, *, infer: bool = True, optimize: bool = True) -> dict[str, Any]:
        """The log-prob pass and the update's, each if asked for; the optimizer's step, or only what it would be given.

        Returns:
            seconds and added_gib of the passes; see `_measured`.
        """
        figures: dict[str, dict[str, float | None]] = {"seconds": {}, "added_gib": {}}
        if infer:
            with _measured(figures, "log_probs"):
                output = self.infer(rows)
            self.infer_log_probs = self.responses(output, rows)
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            flags = {"return_model_output": True, "update_lr_scheduler": True}  # metrics of each update by itself
            with _measured(figures, "update"):
                output = self.engine.forward_backward_batch(self.data(rows, **flags), self.loss)
            self.log_probs = self.responses(output["model_output"], rows)
            parameters = [p for p in self.engine.module.parameters() if p.requires_grad]
            self.grads = [
                torch.zeros_like(local_shard(p).detach()) if p.grad is None else local_shard(p.grad).detach().clone()
                for p in parameters
            ]
            self.values = {"loss": _reduced([sum(output["loss"])])[0] / dist.get_world_size()}
            self.values |= _gathered(output["metrics"])
            if optimize:
                with _measured(figures, "optimizer"):
                    self.values["grad_norm"] = self.engine.optimizer_step()
                    if rows.flags.get("update_lr_scheduler"):
                        self.engine.lr_scheduler_step()
        return figures

    def responses(self, output: dict[str, torch.Tensor], rows: StepRows) -> torch.Tensor:
        """The log-probs that verl reads of a full-length output, of rows in the recorded order."""
        by_row = output["log_probs"].unbind()
        if self.name == REPACKED:
            by_row = by_row[::-1]
        lengths = rows.jagged["responses"][1].tolist()
        return torch.cat([x[-n - 1 : -1].detach() for x, n in zip(by_row, lengths, strict=True)]).cpu()


def _gathered(metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics of all ranks as verl reduces them (TrainingWorker.train_mini_batch, then reduce_metrics)."""
    reduced = {}
    for name, values in sorted(allgather_dict_into_dict(metrics).items()):
        if isinstance(values[0], Metric):
            reduced[name] = float(Metric.aggregate_dp(values))
        else:
            flat = list(chain.from_iterable(x if isinstance(x, list) else [x] for x in values))
            reduced[name] = float(sum(flat) / len(flat))
    return reduced


def largest(differences: torch.Tensor) -> float:
    """The largest absolute value; 0 of none, infinite where one is not a number: a maximum over ranks would lose it."""
    infinity = float("inf")
    return float(differences.abs().nan_to_num(nan=infinity, posinf=infinity).max()) if differences.numel() else 0.0


def largest_of_ranks(value: float) -> float:
    """The maximum over ranks."""
    return _reduced([value], dist.ReduceOp.MAX)[0]


def parameter_distance(arm: Arm, stock: Arm) -> dict[str, float]:
    """max, mean and RMSE of the weights' absolute difference, as they are and after rounding both to bf16."""
    distance: dict[str, float] = {}
    for name, cast in (("fp32", torch.Tensor.double), ("bf16", lambda x: x.bfloat16().double())):
        top, sums = 0.0, [0.0] * 3
        for mine, theirs in zip(arm.weights(), stock.weights(), strict=True):
            difference = cast(mine) - cast(theirs)
            top = max(top, largest(difference))
            figures = difference.abs().sum(), difference.square().sum(), difference.numel()
            sums = [total + float(figure) for total, figure in zip(sums, figures, strict=True)]
        absolute, squares, count = _reduced(sums)
        distance |= {f"max_{name}": largest_of_ranks(top), f"mean_{name}": absolute / count}
        distance[f"rmse_{name}"] = (squares / count) ** 0.5
    return distance
