"""Replay: the same optimizer steps through verl's stock engine and through ours, in one process per rank, in turn.

Three questions per step, each with its own pair of weights:
- same weights: both engines compute the step from stock's weights. What differs is what ours computes differently.
- own weights: every engine goes on from its own weights with its own optimizer. What differs is what a run would see.
- truth: the stock engine one precision above (float64 for fp32, fp32 for bf16) takes the first steps as well; an
  engine's distance from it is that engine's own error.

Every rank holds its shards; differences are sums over shards, reduced over ranks, so every rank knows every result.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

from verl_prefix.config import PrefixConfig, PrefixEngineConfig
from verl_prefix.engine.trace import StepRows, plain
from verl_prefix.tools.memory import RESET_PEAK, memory_mib, reset_peak_mib

STOCK, REPACKED, TRUTH = "stock", "stock_repacked", "truth"
# Not trust_remote_code: a trace is data, and must not bring code along.
MODEL_KEYS = (
    "use_remove_padding", "override_config", "enable_gradient_checkpointing", "enable_activation_offload",
    "lora_rank", "lora_alpha", "target_modules", "exclude_modules", "use_fused_kernels", "load_tokenizer",
)  # fmt: skip


def _fields(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """What of a manifest's section the config class takes; sections within it become their own config classes."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.init and field.name in values and field.name != "_target_":
            value, nested = values[field.name], field.default_factory
            if dataclasses.is_dataclass(nested) and value:
                value = nested(**_fields(nested, value))
            found[field.name] = value
    return found


def loss_function(manifest: dict[str, Any]) -> Callable:
    """verl's ppo_loss with the recorded options."""
    config = ActorConfig(**_fields(ActorConfig, manifest["loss"]) | {"strategy": "fsdp2"})
    return functools.partial(ppo_loss, config=config)


def precision(manifest: dict[str, Any]) -> str:
    """Name of the dtype that forward and backward run in: fp32, bf16 or fp16."""
    name = (manifest["engine"].get("mixed_precision") or {}).get("param_dtype", "bf16")
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names[PrecisionType.to_dtype(name)]


def synthetic_manifest(shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """What a trace would say of made-up rows, (P, S, G, ...): lr 1e-6, no KL, stock micro-batches of one row; fp32 and
    sdpa on a CPU, verl's defaults on a GPU."""
    cpu = not torch.cuda.is_available()
    dtype = "fp32" if cpu else "bf16"
    mixed = dict(param_dtype=dtype, reduce_dtype="fp32", buffer_dtype="fp32")
    loss = ActorConfig(strategy="fsdp2", rollout_n=shape[2], ppo_micro_batch_size_per_gpu=1)
    engine = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=not cpu, mixed_precision=mixed)
    return {
        "seed": 0,
        "model": {"enable_gradient_checkpointing": False}
        | ({"override_config": {"attn_implementation": "sdpa"}} if cpu else {}),
        "engine": plain(engine),
        "optimizer": plain(FSDPOptimizerConfig(lr=1e-6)),
        "loss": {k: v for k, v in plain(loss).items() if k not in ("engine", "model_config", "checkpoint", "optim")},
    }


def to_tensordict(rows: StepRows, order: list[int] | None = None, **flags: Any) -> TensorDict:
    """verl's mini-batch of these rows, in `order` if given, with `flags` over the recorded ones."""
    order = list(range(rows.num_rows)) if order is None else order
    fields: dict[str, Any] = {}
    for name, (values, lengths) in rows.jagged.items():
        pieces = values.split(lengths.tolist())
        fields[name] = torch.nested.as_nested_tensor([pieces[i] for i in order], layout=torch.jagged)
    fields |= {name: tensor[order] for name, tensor in rows.dense.items()}
    if rows.uids is not None:
        fields["uid"] = [rows.uids[i] for i in order]
    return tu.get_tensordict(fields, rows.flags | flags)


def build_engine(name: str, manifest: dict[str, Any]) -> Any:
    """verl's fsdp2 engine for stock, stock_repacked and truth, ours for a schedule's name; initialised weights.

    Raises:
        ValueError: the recorded options do not go with the shared-prefix path.
    """
    ours = name not in (STOCK, REPACKED, TRUTH)
    model = {key: manifest["model"][key] for key in MODEL_KEYS if key in manifest["model"]}
    engine = _fields(FSDPEngineConfig, manifest["engine"]) | {"strategy": "prefix" if ours else "fsdp2"}
    double = False
    if name == TRUTH:
        double = precision(manifest) == "fp32"
        engine["mixed_precision"] = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
        model["override_config"] = (model.get("override_config") or {}) | {"attn_implementation": "sdpa"}
    if ours:
        recorded = manifest["engine"].get("prefix") or {}
        kept = ("logits_chunk", "attention", *(() if name == "packed" else ("wave_tokens",)))
        # min_speedup 0: to compare stock with stock would hold, and say nothing.
        options = {key: recorded[key] for key in kept if key in recorded} | {"min_speedup": 0}
        # Off: this replay is the check, and a wrong engine is to be measured, not stopped.
        options |= {"schedule": name, "offload": bool(recorded.get("offload")) and name != "packed", "verify": "off"}
        engine_config = PrefixEngineConfig(**engine, prefix=PrefixConfig(**options))
    else:
        engine_config = FSDPEngineConfig(**engine)
    torch.manual_seed(manifest["seed"])  # LoRA matrices are drawn
    built = EngineRegistry.new(
        model_type="language_model",
        backend=engine_config.strategy,
        model_config=HFModelConfig(path=manifest["model"]["path"], **model),
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(**_fields(FSDPOptimizerConfig, manifest["optimizer"])),
        checkpoint_config=CheckpointConfig(),
    )
    with _float64() if double else nullcontext():
        built.initialize()
    if double:
        built._autocast_dtype = torch.float32  # verl's word for no autocast
    return built


def _float64() -> AbstractContextManager:
    """verl's dtype names stop at fp32; inside, all of them mean float64. HF's RMSNorm stays fp32 either way."""
    return mock.patch.object(PrecisionType, "to_dtype", staticmethod(lambda _: torch.float64))


@contextmanager
def _peak(added_gib: dict[str, float | None], key: str) -> Iterator[None]:
    """Peak GiB that a pass adds; None where it cannot be measured."""
    added_gib[key] = None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not RESET_PEAK.exists():
        yield
        return
    before = reset_peak_mib(device)
    yield
    added_gib[key] = (memory_mib(device)[1] - before) / 2**10


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _reduced(values: list[float], op: dist.ReduceOp = dist.ReduceOp.SUM) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op=op)  # a gloo group serves host tensors beside NCCL
    return total.tolist()


def _norms(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[float], list[float]]:
    """Per pair (found, reference) the norms of difference and of reference, over all ranks."""
    sums = [float((a.double() - b.double()).square().sum()) for a, b in pairs]
    sums += [float(b.double().square().sum()) for _, b in pairs]
    norms = [x**0.5 for x in _reduced(sums)]
    return norms[: len(pairs)], norms[len(pairs) :]


def relative_error(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """||found - reference|| / ||reference|| with all pairs as one vector; 0 where both are zero."""
    difference, reference = (sum(x * x for x in norms) ** 0.5 for norms in _norms(pairs))
    return difference / reference if reference else (float("inf") if difference else 0.0)


def errors_by_parameter(arm: "Arm", stock: "Arm") -> list[float]:
    """||found - stock's|| / ||stock's|| of every parameter's gradient.

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
        self._infer_flags = {
            flag: manifest["engine"][f"infer_{flag}"]
            for flag in ("max_token_len_per_gpu", "micro_batch_size_per_gpu")
            if manifest["engine"].get(f"infer_{flag}")
        }
        self.names = [name for name, p in self.engine.module.named_parameters() if p.requires_grad]
        self.grads: list[torch.Tensor] = []
        self.log_probs = self.infer_log_probs = torch.empty(0)

    def weights(self) -> list[torch.Tensor]:
        """This rank's shards of the trained parameters, not copied."""
        return [_local(p) for p in self.engine.module.parameters() if p.requires_grad]

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
        """verl's mini-batch of the rows as this arm takes them."""
        flags = rows.flags | flags
        order = None
        if self.name == TRUTH:
            flags |= {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
        if self.name == REPACKED:  # a stock run too, for whoever wrote the config: only rounding can differ
            longest = int(rows.jagged["input_ids"][1].max())
            budget = flags["max_token_len_per_gpu"] if flags["use_dynamic_bsz"] else 0
            budget = budget or flags["micro_batch_size_per_gpu"] * longest
            flags |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": 2 * budget}
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
            seconds (the slowest rank's) and added GiB (the fullest rank's) of the passes.
        """
        seconds, memory = {}, {}
        if infer:
            with _peak(memory, "log_probs"), self._timed(seconds, "log_probs"):
                output = self.infer(rows)
            self.infer_log_probs = self._responses(output, rows)
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            with _peak(memory, "update"), self._timed(seconds, "update"):
                output = self.engine.forward_backward_batch(self.data(rows, return_model_output=True), self.loss)
            self.log_probs = self._responses(output["model_output"], rows)
            parameters = [p for p in self.engine.module.parameters() if p.requires_grad]
            self.grads = [torch.zeros_like(_local(p)) if p.grad is None else _local(p.grad).clone() for p in parameters]
            self.values = {"loss": _reduced([sum(output["loss"])])[0] / dist.get_world_size()}
            self.values |= _gathered(output["metrics"])
            if optimize:
                with self._timed(seconds, "optimizer"):
                    self.values["grad_norm"] = self.engine.optimizer_step()
                    if rows.flags.get("update_lr_scheduler"):
                        self.engine.lr_scheduler_step()
        top = _reduced([*seconds.values(), *(x or 0.0 for x in memory.values())], dist.ReduceOp.MAX)
        known = dict(zip((*seconds, *(f"{k} GiB" for k in memory)), top, strict=True))
        return {
            "seconds": {name: known[name] for name in seconds},
            "added_gib": {name: None if x is None else known[f"{name} GiB"] for name, x in memory.items()},
        }

    def _responses(self, output: dict[str, torch.Tensor], rows: StepRows) -> torch.Tensor:
        return torch.cat(response_part(output["log_probs"], rows, self.name == REPACKED)).cpu()

    @contextmanager
    def _timed(self, seconds: dict[str, float], key: str) -> Iterator[None]:
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        synchronize()
        dist.barrier()
        start = time.perf_counter()
        yield
        synchronize()
        seconds[key] = time.perf_counter() - start


def response_part(nested: torch.Tensor, rows: StepRows, reverse: bool = False) -> list[torch.Tensor]:
    """A full-length output's values that verl reads, per row in the recorded order."""
    outputs = list(nested.unbind())
    if reverse:
        outputs.reverse()
    lengths = rows.jagged["responses"][1].tolist()
    return [x[len(x) - n - 1 : len(x) - 1].detach() for x, n in zip(outputs, lengths, strict=True)]


def _gathered(metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics of all ranks as verl reduces them (TrainingWorker.train_mini_batch, then reduce_metrics)."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, metrics)
    found = {}
    for name in sorted(set.intersection(*(set(rank) for rank in ranks))):
        values = [rank[name] for rank in ranks]
        if isinstance(values[0], Metric):
            found[name] = float(Metric.aggregate_dp(values))
        else:
            flat = list(chain.from_iterable(x if isinstance(x, list) else [x] for x in values))
            found[name] = float(sum(flat) / len(flat))
    return found


def largest(differences: torch.Tensor) -> float:
    """The largest absolute value; 0 of none, infinite where one is not a number: a maximum over ranks would lose it."""
    infinity = float("inf")
    return float(differences.abs().nan_to_num(nan=infinity, posinf=infinity).max()) if differences.numel() else 0.0


def parameter_distance(arm: Arm, stock: Arm) -> dict[str, float]:
    """max, mean and RMSE of the weights' absolute difference, as they are and after rounding both to bf16."""
    sums, tops = [0.0] * 4, [0.0] * 2
    count = 0
    for mine, theirs in zip(arm.weights(), stock.weights(), strict=True):
        for i, cast in enumerate((torch.Tensor.double, lambda x: x.bfloat16().double())):
            difference = cast(mine) - cast(theirs)
            sums[2 * i] += float(difference.abs().sum())
            sums[2 * i + 1] += float(difference.square().sum())
            tops[i] = max(tops[i], largest(difference))
        count += mine.numel()
    *sums, count = _reduced([*sums, count])
    tops = _reduced(tops, dist.ReduceOp.MAX)
    found = {}
    for i, name in enumerate(("fp32", "bf16")):
        found |= {f"max_{name}": tops[i], f"mean_{name}": sums[2 * i] / count}
        found[f"rmse_{name}"] = (sums[2 * i + 1] / count) ** 0.5
    return found
