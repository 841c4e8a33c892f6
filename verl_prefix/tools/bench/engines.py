"""Arms of `verl-prefix bench` that run whole engines, on one rank: verl's own, and ours.

What the arms without verl leave out is here: FSDP2, verl's micro-batches, tensor dicts and per-token outputs.
"""

import atexit
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from verl_prefix.engine.trace import StepRows
from verl_prefix.tools.ab.replay import STOCK, build_engine, synthetic_manifest, to_tensordict
from verl_prefix.tools.bench.arms import WAVES_PER_BUDGET, Batch, Done, Job, stock_attention

WEIGHTS = "bench_weights"  # of every token's log-prob, in the rows that an engine gets

_engines: WeakKeyDictionary[torch.nn.Module, dict[str, Any]] = WeakKeyDictionary()


def run(job: Job, name: str, train: bool) -> Done:
    """One update, or log-prob pass, as `arms.run_arm`; gradients end up in `job.model`.

    Args:
        name: "stock" for verl's fsdp2 engine, else the schedule of ours.
    """
    engine, cuda = _engine(job, name), job.model.device.type == "cuda"
    rows, wait = to_tensordict(_rows(job, name)), torch.cuda.synchronize if cuda else lambda: None
    losses = []

    def timed(work: Callable[[], Any]) -> tuple[Any, float]:
        wait()
        start = time.perf_counter()
        found = work()
        wait()
        return found, time.perf_counter() - start

    def loss(model_output: dict[str, torch.Tensor], data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict]:
        found = (model_output["log_probs"].values() * data[WEIGHTS].values()).sum()
        losses.append(found.detach())
        return found, {}

    if not train:
        with engine.eval_mode():
            output, seconds = timed(lambda: engine.infer_batch(rows)["model_output"]["log_probs"])
        return Done(seconds, seconds, float((output.values() * rows[WEIGHTS].values().to(output.device)).sum()))
    engine.optimizer_zero_grad()
    with engine.train_mode():  # which forgets gradients at its end
        _, seconds = timed(lambda: engine.forward_backward_batch(rows, loss))
        own = dict(engine.module.named_parameters())
        for key, parameter in job.model.named_parameters():
            parameter.grad.copy_(own[key].grad.full_tensor())
    return Done(seconds, None, float(sum(losses)))


def _rows(job: Job, name: str) -> StepRows:
    batch, row = job.batch, job.batch.size.row
    prompt = batch.size.prefix + 1
    ids, positions = (x.cpu().view(-1, row) for x in (batch.tokens.input_ids, batch.tokens.position_ids))
    ones = torch.ones_like(ids[:, prompt:])
    fields = {
        "prompts": ids[:, :prompt], "responses": ids[:, prompt:], "input_ids": ids, "position_ids": positions,
        "loss_mask": ones, "response_mask": ones, WEIGHTS: _next_weights(batch),
    }  # fmt: skip
    jagged = {key: (x.flatten().contiguous(), torch.full((len(x),), x.shape[1])) for key, x in fields.items()}
    # sdpa gets one row at a time, where packed rows would become a dense mask (see `arms.stock_attention`).
    one_by_one = name == STOCK and not _has_flash(job.model)
    flags = {
        "use_dynamic_bsz": not one_by_one, "micro_batch_size_per_gpu": 1, "max_token_len_per_gpu": max(job.budget, row),
        "use_remove_padding": True, "temperature": 1.0, "calculate_entropy": False,
        "global_batch_size": len(ids),
    }  # fmt: skip
    return StepRows(jagged, {}, ["0"] * len(ids), flags)


def _next_weights(batch: Batch) -> torch.Tensor:
    """[G, row]: an output's log-prob is that of the next token of its row."""
    weights = batch.weights.cpu().view(-1, batch.size.row)
    return torch.nn.functional.pad(weights[:, 1:], (0, 1))


def _has_flash(model: torch.nn.Module) -> bool:
    return stock_attention(model.device.type, model.dtype) == "flash_attention_2"


def _engine(job: Job, name: str) -> Any:
    engines = _engines.setdefault(job.model, {})
    if name not in engines:
        _one_rank(job.model.device.type)
        size, dtype = job.batch.size, {torch.float32: "fp32", torch.bfloat16: "bf16"}[job.model.dtype]
        manifest = synthetic_manifest((size.row, size.suffix, size.group, 1))
        manifest["engine"] |= {
            "mixed_precision": dict(param_dtype=dtype, reduce_dtype="fp32", buffer_dtype="fp32"),
            "prefix": {"logits_chunk": job.logits_chunk},
        }
        manifest["model"] |= {
            "use_remove_padding": True,
            "override_config": {"attn_implementation": "flash_attention_2" if _has_flash(job.model) else "sdpa"},
            "load_tokenizer": False,
        }
        with tempfile.TemporaryDirectory() as folder:
            job.model.save_pretrained(folder)
            manifest["model"]["path"] = folder
            engines[name] = build_engine(name, manifest)
    if name == "phased":
        wave_tokens = max(1, job.budget // WAVES_PER_BUDGET)
        object.__setattr__(engines[name].prefix_config, "wave_tokens", wave_tokens)
    return engines[name]


def forget(model: torch.nn.Module) -> None:
    """Frees the engines that `run` keeps for this model."""
    _engines.pop(model, None)


def _one_rank(device: str) -> None:
    if dist.is_initialized():
        return
    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", f"file://{rendezvous}", rank=0, world_size=1
    )
    atexit.register(dist.destroy_process_group)
