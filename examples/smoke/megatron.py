"""verl's Megatron engine and ours on gloo or NCCL ranks of tensor parallelism."""

import importlib
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from smoke.checks import Checks
from smoke.ranks import Sizes, Variant, free, on_ranks, save_model
from verl_prefix.tools.ab.arm import Arm, loss_function, relative_error, to_tensordict
from verl_prefix.tools.ab.options import TRUTH
from verl_prefix.tools.ab.verdict import FACTOR, RELATIVE
from verl_prefix.tools.memory import memory_mib, reset_peak_mib
from verl_prefix.trace import StepRows

HELPERS = Path(__file__).resolve().parents[2] / "tests" / "helpers"
PACKED, PHASED = {"schedule": "packed"}, {"schedule": "phased"}
# Where the local spec's norms differ in name from TE's, which are within the linear layers behind them.
NAMES_OF_TE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def megatron(checks: Checks) -> None:
    """Packed and phased, on TransformerEngine's layer spec and on megatron-core's local one, against an fp32 (in the
    dry run float64) truth of FSDP2 by the rule of `verl-prefix ab`; gradients by the engine's own check of a step."""
    if not _is_installed("megatron.core"):
        return checks.skip("Megatron", "megatron-core is not installed")
    model = save_model(checks, "qwen3-0.6b", 28)
    size = (24, 8, 3, 2) if checks.dry_run else (2401, 256, 8, 1)
    world = 1 if checks.dry_run else min(2, checks.worlds[-1])  # the tiny model's vocabulary does not divide
    found = on_ranks(_arms, world, checks.dry_run, model, size)
    stock = found.pop("stock")
    for name, arm in found.items():
        limit = max(RELATIVE if checks.dry_run else 0.0, FACTOR * stock["log_probs"])
        checks.that(f"Megatron, {name}: error of log-probs against the truth", arm["log_probs"], most=limit)
        norm = abs(arm["grad_norm"] - stock["grad_norm"]) / stock["grad_norm"]
        checks.that(f"Megatron, {name}: gradient norm off stock's", norm, most=RELATIVE if checks.dry_run else math.inf)
        checks.that(f"Megatron, {name}: prefixes shared", arm["reuse"], least=0.1)
        for figure in ("seconds", "peak_mib"):
            checks.that(f"Megatron, {name}: {figure} of an update, {stock[figure]:.4g} in stock", arm[figure], least=0)
    if not _is_installed("transformer_engine"):
        checks.skip("Megatron, TE's layer spec against the local one", "transformer_engine is not installed")
    return None


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _arms(rank: int, world: int, dry_run: bool, model: str, size: Sizes) -> dict[str, dict[str, float]]:
    """Figures by arm. All ranks have the same rows."""
    if dry_run:
        sys.path.append(str(HELPERS))
        importlib.import_module("megatron_cpu")
    source = Variant(model, size, 1, {})
    arm = Arm(TRUTH, source.manifest)
    rows = source.rows(0, 0, arm.engine.model_config.hf_config.vocab_size)
    truth = arm.responses(arm.infer(rows), rows)
    rows.jagged["old_log_probs"] = truth.float(), rows.jagged["responses"][1]
    del arm
    free()
    loss, found = loss_function(source.manifest), {}
    arms: dict[str, tuple[dict[str, Any] | None, bool]] = {
        "stock": (None, False), "packed": (PACKED, False), "phased": (PHASED, False),
    }  # fmt: skip
    if _is_installed("transformer_engine"):
        arms["packed, local spec"] = PACKED, True
    weights: dict[str, torch.Tensor] = {}
    for name, (prefix, local) in arms.items():
        with _local_spec(weights) if local else nullcontext():
            engine = _engine(model, world, dry_run, prefix, local)
        if not weights:
            parameters = engine.module[0].named_parameters()
            weights = {name.rpartition("module.")[2]: p.detach().cpu().clone() for name, p in parameters}
        found[name] = _figures(engine, rows, loss, truth)
        del engine
        free()
    return found


def _figures(engine: Any, rows: StepRows, loss: Any, truth: torch.Tensor) -> dict[str, float]:
    """Of one pass of log-probs and of the second of two updates: the first warms up."""
    device, lengths = "cuda" if torch.cuda.is_available() else "cpu", rows.jagged["responses"][1].tolist()
    with engine.eval_mode():
        by_row = engine.infer_batch(to_tensordict(rows))["model_output"]["log_probs"].unbind()
    log_probs = torch.cat([x[-n - 1 : -1].detach() for x, n in zip(by_row, lengths, strict=True)]).cpu()
    with engine.train_mode():
        for _ in range(2):
            engine.optimizer_zero_grad()
            before, start = reset_peak_mib(device), time.perf_counter()
            output = engine.forward_backward_batch(to_tensordict(rows), loss)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds, peak = time.perf_counter() - start, memory_mib(device)[1] - before
        norm = float(engine.optimizer_step())
    reuse = output["metrics"].get("prefix/reuse_fraction", 0.0)
    return {
        "log_probs": relative_error([(log_probs, truth)]), "grad_norm": norm, "seconds": seconds, "peak_mib": peak,
        "reuse": float(reuse[0] if isinstance(reuse, list) else reuse),
    }  # fmt: skip


def _engine(model: str, world: int, dry_run: bool, prefix: dict[str, Any] | None, local: bool) -> Any:
    """verl's engine, or ours with these fields of PrefixConfig, by Megatron-Bridge where there is one, else mbridge."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from verl_prefix.backends.megatron import PrefixMegatronEngine
    from verl_prefix.config.megatron import PrefixMegatronEngineConfig
    from verl_prefix.config.options import PrefixConfig

    model_config = HFModelConfig(path=model, use_remove_padding=True, load_tokenizer=False)
    object.__setattr__(model_config, "tokenizer", SimpleNamespace(pad_token_id=0))  # all that verl's engine asks of it
    # mbridge shares tokens wherever there is TP, and the local spec's norms cannot.
    override: dict[str, Any] = {"sequence_parallel": False} | ({"persist_layer_norm": False} if local else {})
    is_bridged = _is_installed("megatron.bridge") and not dry_run
    if not is_bridged:  # mbridge reads them where transformers 4 had them
        model_config.hf_config.rope_theta = model_config.hf_config.rope_parameters["rope_theta"]
    fields: dict[str, Any] = dict(
        tensor_model_parallel_size=world, sequence_parallel=False, use_distributed_optimizer=True,
        vanilla_mbridge=not is_bridged, override_transformer_config=override,
    )  # fmt: skip
    cls: Any = MegatronEngineWithLMHead
    if prefix is None:
        config = McoreEngineConfig(**fields)
    else:
        # verl's own path does not run on the local spec, which refuses packed rows.
        check = {"verify": "off"} if local else {}
        cls, options = PrefixMegatronEngine, PrefixConfig(min_speedup=0, **prefix, **check)
        config = PrefixMegatronEngineConfig(**fields, prefix=options)
    if dry_run:
        object.__setattr__(config, "dtype", "float32")  # verl's config knows half precisions alone
    optimizer = McoreOptimizerConfig(lr=1e-6, lr_warmup_steps=0, total_training_steps=10)
    engine = cls(model_config, config, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


@contextmanager
def _local_spec(weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """Context in which a GPTModel is built of the local layer spec, with weights of one of TransformerEngine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    build = GPTModel.__init__

    def built(self: Any, config: Any, transformer_layer_spec: Any, *args: Any, **kwargs: Any) -> None:
        build(self, config, get_gpt_decoder_block_spec(config, False, normalization="RMSNorm"), *args, **kwargs)

    def load(bridge: Any, models: Any, *args: Any, **kwargs: Any) -> None:
        (model,) = models
        for name, parameter in model.named_parameters():
            name = name.rpartition("module.")[2]
            for of_local, of_te in NAMES_OF_TE.items():
                name = name.replace(of_local, of_te)
            parameter.data.copy_(weights[name])

    module, name = ("megatron.bridge", "load_hf_weights"), "AutoBridge"
    if not _is_installed(module[0]):
        module, name = ("mbridge.core.bridge", "load_weights"), "Bridge"
    owner = getattr(importlib.import_module(module[0]), name)
    with mock.patch.object(GPTModel, "__init__", built), mock.patch.object(owner, module[1], load):
        yield
