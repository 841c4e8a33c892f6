"""PrefixFSDPEngine against verl's stock fsdp2 engine: same weights, same TensorDict, 1 and 2 gloo ranks, fp32.

Each case is a job on ranks that stay up. Does not exercise CUDA or NCCL.
"""

import functools
import inspect
import itertools
import os
import re
import sys
import warnings
from unittest import mock

import broken_states
import numpy as np
import pytest
import torch
from engines import (
    LOSS_MODES,
    PAD,
    TOLERANCE,
    _accumulated,
    _batch,
    _compare,
    _configs,
    _engine,
    _first_step_cost,
    _half_errors,
    _loss,
    _loss_config,
    _measure,
    _relative,
    _responses,
    as_batch,
    depends_on_rates,
)
from shared_models import OURS, SharedModels
from torch.distributed import get_rank
from transformers import AutoConfig
from whole_tensors import full, whole

from verl_prefix.backends.fsdp import FSDPBackend
from verl_prefix.core.forward import LOGITS_CHUNK
from verl_prefix.core.groups import Group
from verl_prefix.core.kernels import cpu
from verl_prefix.core.runner import PlanRunner
from verl_prefix.engine.checks.layer_probe import LayerProbe
from verl_prefix.engine.checks.noise import Figure
from verl_prefix.engine.rows import BatchRows
from verl_prefix.testing import write_tiny_model

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
# What differs from the default case: keys of `_batch`, `_engines` or `_loss`.
CASES = {
    "default": {},
    "packed": {"schedule": "packed"},
    "phased": {"schedule": "phased"},
    "phased_waves_of_one_row": {"schedule": "phased", "wave_tokens": 1},
    "phased_waves_over_the_budget": dict(
        schedule="phased", wave_tokens=10**6, use_dynamic_bsz=False, micro_batch_size_per_gpu=2
    ),
    "phased_waves_almost_the_budget": {"schedule": "phased", "wave_tokens": 99, "budget": 100},
    "phased_waves_of_some_rows": {"schedule": "phased", "wave_tokens": 40},
    "packed_small_budget_cuts_groups": {"schedule": "packed", "budget": 60},
    "auto_small_budget": {"budget": 90},
    "reference_attention": {"attention": "reference"},
    "static_batch_size": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
    "static_batch_size_of_one": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
    "padded_model_inputs": {"use_remove_padding": False},
    "no_entropy": {"calculate_entropy": False, "entropy_coeff": 0.0},
    "entropy_chunked_and_checkpointed": {"entropy_from_logits_with_chunking": True, "entropy_checkpointing": True},
    "kl_loss": {"use_kl_loss": True},
    "temperature": {"temperature": 0.7},
    "temperature_per_row": {"temperature": "per_row"},
    **{f"loss_{mode}": {"loss_agg_mode": mode} for mode in AGG_MODES[1:]},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "gradient_checkpointing_phased": {"gradient_checkpointing": True, "schedule": "phased", "wave_tokens": 40},
    "offload": {"schedule": "phased", "wave_tokens": 40, "offload": True},
    "offload_checkpointed": dict(schedule="phased", wave_tokens=40, offload=True, gradient_checkpointing=True),
    "logits_in_chunks": {"logits_chunk": 7},
    "logits_in_chunks_with_entropy_checkpointing": {"logits_chunk": 7, "entropy_checkpointing": True},
    "logits_in_chunks_phased_checkpointed": {"logits_chunk": 7, "schedule": "phased", "gradient_checkpointing": True},
    "logits_that_a_hook_changes": {"halved_logits": True, "logits_chunk": 7},
    "logits_that_a_hook_changes_phased": {"halved_logits": True, "schedule": "phased", "wave_tokens": 40},
    "sum_pi_squared": {"calculate_sum_pi_squared": True, "logits_chunk": 7},
    "sync_every_pass": {"use_no_sync": False, "budget": 90},
    "reshard_off": {"reshard_after_forward": False, "schedule": "phased", "wave_tokens": 40},
    "no_uid": {"uid": False},
    "hsdp": {"fsdp_size": 1, "schedule": "phased", "wave_tokens": 40},
    "offload_params_and_optimizer": {"param_offload": True, "schedule": "phased", "wave_tokens": 40},
    "lora": {"lora_targets": "all-linear"},
    "lora_phased": {"lora_targets": "all-linear", "schedule": "phased", "wave_tokens": 40},
    "lora_on_queries_alone": {"lora_targets": ["q_proj"], "schedule": "phased", "wave_tokens": 40},
    "lora_on_a_layer_phased": {"lora_targets": r".*layers\.1\..*_proj", "schedule": "phased", "wave_tokens": 40},
    "upper_layer_trained": {"trained": r"layers\.1|model\.norm", "schedule": "packed"},
    "upper_layer_trained_phased": {"trained": r"layers\.1|model\.norm", "schedule": "phased", "wave_tokens": 40},
    "lower_layer_trained_phased": {"trained": r"layers\.0", "schedule": "phased", "wave_tokens": 40},
    "all_but_embeddings_phased": {"trained": "^(?!.*embed_tokens)", "schedule": "phased", "wave_tokens": 40},
    "lm_head_trained_phased": {"trained": "lm_head", "schedule": "phased", "wave_tokens": 40},
    "llama": {"family": "llama"},
    "sliding_window": {"family": "window"},
    "sliding_window_phased": {"family": "window", "schedule": "phased", "wave_tokens": 40},
    "tied_phased": {"family": "tied", "schedule": "phased", "wave_tokens": 40},
    "tied_phased_sync_every_pass": dict(family="tied", schedule="phased", wave_tokens=40, use_no_sync=False),
    # Its config drops out; the overrides are those that the refusal names.
    "seed_oss": {"family": "seed_oss", "override_config": NO_DROPOUT},
    "seed_oss_phased": dict(family="seed_oss", override_config=NO_DROPOUT, schedule="phased", wave_tokens=40),
    **{
        f"{family}{name}": {"family": family} | options
        for family in ("phi3", "qwen2_moe", "glm4_moe")
        for name, options in {"": {}, "_phased": {"schedule": "phased", "wave_tokens": 40}}.items()
    },
    "latent_attention": {"family": "deepseek_v3"},
    "latent_attention_phased": dict(family="deepseek_v3", schedule="phased", wave_tokens=40, offload=True),
    "latent_attention_checkpointed": dict(family="deepseek_v3", gradient_checkpointing=True, logits_chunk=7),
    "tool_tokens": {"tool_tokens": True, "use_kl_loss": True},
    "tool_tokens_phased": {"tool_tokens": True, "schedule": "phased", "wave_tokens": 40, "logits_chunk": 7},
    "tool_tokens_padded": {"tool_tokens": True, "padded": True, "loss_agg_mode": "seq-mean-token-mean"},
    "empty_responses": {"empty": "ce"},
    "empty_responses_phased": {"empty": "ce", "schedule": "phased", "wave_tokens": 40},
    "rank_of_empty_responses": {"empty": ("e", PAD, "f")},
    "padded": {"padded": True, "use_kl_loss": True},
    "padded_phased": {"padded": True, "schedule": "phased", "wave_tokens": 40},
    "padded_static_batch_size": {"padded": True, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
    "padded_empty_responses": {"padded": True, "empty": "ce"},
    "turns": {"turns": True},
    "turns_odd": {"turns": "odd", "schedule": "phased", "wave_tokens": 20, "use_kl_loss": True},
    "turns_in_pieces": {"turns": True, "schedule": "packed", "budget": 130},
    "turns_phased": {"turns": True, "schedule": "phased", "wave_tokens": 20},
    "turns_phased_in_pieces_tool_tokens": dict(turns=True, schedule="phased", budget=130, tool_tokens=True),
    "turns_checkpointed_offloaded": dict(
        turns=True, schedule="phased", wave_tokens=20, offload=True, gradient_checkpointing=True, logits_chunk=7
    ),
    "turns_of_the_batch": {"turns": True, "trees": "batch"},
    "turns_whole_prompts_alone": {"turns": True, "trees": "off"},
    "turns_temperature_per_row": {"turns": True, "temperature": "per_row"},
    "turns_padded_static_batch_size": {"turns": True, "padded": True, "use_dynamic_bsz": False},
    "turns_hsdp_sync_every_pass": dict(turns=True, fsdp_size=1, use_no_sync=False, schedule="phased", wave_tokens=20),
    "turns_window": {"turns": True, "family": "window", "schedule": "phased", "wave_tokens": 20},
    "turns_tied": {"turns": "kept", "family": "tied", "schedule": "phased", "wave_tokens": 20},
    "turns_tied_sync_every_pass": dict(
        turns="kept", family="tied", schedule="phased", wave_tokens=20, use_no_sync=False
    ),
    "turns_upper_layer_trained": dict(
        turns="kept", trained=r"layers\.1|model\.norm", schedule="phased", wave_tokens=20
    ),
    "turns_lower_layer_trained": {"turns": "kept", "trained": r"layers\.0", "schedule": "phased", "wave_tokens": 20},
    "turns_lm_head_trained": {"turns": "kept", "trained": "lm_head", "schedule": "phased", "wave_tokens": 20},
    "turns_of_both_kinds_lm_head_trained": {"turns": True, "trained": "lm_head", "schedule": "phased"},
    "turns_lora_on_a_layer": dict(
        turns="kept", lora_targets=r".*layers\.1\..*_proj", schedule="phased", wave_tokens=20
    ),
    "turns_whose_answers_the_loss_masks": dict(turns="kept", masked="answers", schedule="phased", wave_tokens=20),
    "turns_whose_last_answer_the_loss_masks": dict(turns="kept", masked="last", schedule="phased", wave_tokens=20),
    "turns_lora": {"turns": True, "lora_targets": "all-linear", "schedule": "phased", "wave_tokens": 20},
    "schedule_stock": {"schedule": "stock"},
    "gate_open": {"min_speedup": 1e-6},
    "gate_open_hsdp_sync_every_pass": {"min_speedup": 1e-6, "fsdp_size": 1, "use_no_sync": False},
    "gate_shut": {"min_speedup": 1e6},
    "verify_off": {"verify": "off"},
    # Off in ours, against stock without them: with FSDP2 verl's fused forward meets a sharded lm_head.
    "fused_kernels": {"use_fused_kernels": True},
    "fused_kernels_gate_shut": {"use_fused_kernels": True, "min_speedup": 1e6},
    # Off in ours; on in stock where it is right.
    "activation_offload": {"activation_offload": True, "family": "deep"},
    "activation_offload_phased_checkpointed": dict(
        activation_offload=True,
        family="deep",
        gradient_checkpointing=True,
        schedule="phased",
        wave_tokens=40,
        offload=True,
    ),
    "activation_offload_gate_shut": dict(
        activation_offload=True, family="deep", gradient_checkpointing=True, min_speedup=1e6
    ),
}

# Cases whose self-check two ranks run: those where ranks differ or must agree. One rank runs every case's.
CHECKED = (
    "default", "phased", "rank_of_empty_responses", "hsdp", "lora_phased", "padded", "sliding_window",
    "offload_params_and_optimizer", "gate_open", "upper_layer_trained_phased", "reshard_off",
    "turns", "turns_phased",
)  # fmt: skip

# On one rank: what they change is the same on every rank. Others have two in make test.
ALONE = (
    "phased_waves_almost_the_budget", "auto_small_budget", "reference_attention",
    "padded_model_inputs", "no_entropy", "entropy_chunked_and_checkpointed", "temperature_per_row",
    "logits_in_chunks_with_entropy_checkpointing", "logits_that_a_hook_changes", "sum_pi_squared", "seed_oss_phased",
    "glm4_moe_phased", "latent_attention_phased", "tool_tokens_phased",
    "turns_checkpointed_offloaded", "turns_whose_answers_the_loss_masks", "fused_kernels",
    "activation_offload_gate_shut",
)  # fmt: skip

# Left to make test-full: each option of theirs is in a case of make test, alone or with others.
ALIKE = (
    "phased_waves_of_some_rows", "static_batch_size", "temperature", "loss_token-sum", "loss_seq-mean-token-sum",
    "loss_seq-mean-token-mean", "gradient_checkpointing_phased", "offload_checkpointed", "logits_in_chunks", "lora",
    "lora_on_queries_alone", "lora_on_a_layer_phased", "upper_layer_trained", "lower_layer_trained_phased", "llama",
    "sliding_window_phased", "tied_phased", "seed_oss", "latent_attention", "latent_attention_checkpointed",
    "empty_responses", "padded_phased", "padded_static_batch_size", "padded_empty_responses", "tool_tokens_padded",
    "turns_temperature_per_row", "turns_tied_sync_every_pass", "turns_lm_head_trained", "turns_lora",
    "activation_offload", "activation_offload_phased_checkpointed", "kl_loss", "gradient_checkpointing", "offload",
    "logits_in_chunks_phased_checkpointed", "logits_that_a_hook_changes_phased", "sync_every_pass",
    "gate_open_hsdp_sync_every_pass", "fused_kernels_gate_shut", "all_but_embeddings_phased", "phi3", "qwen2_moe",
    "glm4_moe", "glm4_moe_phased", "upper_layer_trained_phased", "hsdp", "turns_hsdp_sync_every_pass", "turns_tied",
    "turns_upper_layer_trained", "turns_window",
    "turns_padded_static_batch_size", "turns_phased_in_pieces_tool_tokens", "turns_lora_on_a_layer",
    "turns_of_both_kinds_lm_head_trained", "turns_whose_last_answer_the_loss_masks", "phased_waves_over_the_budget",
    "loss_seq-mean-token-sum-norm", "phi3_phased", "qwen2_moe_phased", "tool_tokens", "phased_waves_of_one_row",
    "tied_phased_sync_every_pass", "turns_in_pieces", "turns_lower_layer_trained", "turns_odd",
    "lm_head_trained_phased", "empty_responses_phased",
)  # fmt: skip

# On one rank in make test, on two in test-more: other cases have two ranks of which some parameters train, or are
# offloaded.
ONE = ("reshard_off", "offload_params_and_optimizer", "lora_phased", "sliding_window")

CORRECTION = dict(loss_type="reinforce", rollout_is="sequence", rollout_rs="token_k2", rollout_rs_threshold="0.05")
LOSSES = {mode: {"policy_loss": {"loss_mode": mode} | options} for mode, options in LOSS_MODES.items()} | {
    "bypass_mode reinforce": {"policy_loss": {"loss_mode": "bypass_mode", "rollout_correction": CORRECTION}},
    "bypass_mode normalised": {
        "policy_loss": {
            "loss_mode": "bypass_mode",
            "rollout_correction": CORRECTION | {"rollout_is_batch_normalize": True},
        }
    },
    "seq-mean-token-sum-norm of a pass": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": None},
}


def _actor_worker(backend: str, model_path: str, rank: int) -> dict:
    """What verl's tests/models/test_engine.py asks of an engine behind its worker: log-probs of rows that are padded on
    both sides; an update that loads and offloads by itself, and one whose caller does that."""
    import verl  # noqa: F401
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.padding import no_padding_2_padding

    torch.manual_seed(0)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    configs = _configs(backend, model_path, {"param_offload": True})
    engine_config = configs["engine_config"]
    engine_config.use_dynamic_bsz = True
    engine_config.max_token_len_per_gpu, engine_config.infer_max_token_len_per_gpu = 90, 180
    worker = TrainingWorker(TrainingWorkerConfig(model_type="language_model", **configs))
    worker.reset()
    data = _batch(rank, worker.model_config.hf_config.vocab_size, {"padded": True})
    for name in ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_remove_padding"):
        del data[name]  # the worker's own, then
    tu.assign_non_tensor(data, global_token_num=data["attention_mask"].sum(1).tolist(), compute_loss=False)
    output = worker.infer_batch(data.copy())
    result = {"log_probs": no_padding_2_padding(tu.get(output, "log_probs"), data), "data": data}
    worker.set_loss_fn(_loss({}))
    result["metrics"] = [tu.get(worker.train_batch(data.copy()), "metrics")]
    tu.assign_non_tensor(data, disable_auto_offload=True)
    worker.to("device")
    result["metrics"].append(tu.get(worker.train_batch(data.copy()), "metrics"))
    result["params"] = torch.cat([full(p).flatten() for p in worker.engine.module.parameters()])
    worker.to("cpu")
    return result


def _compare_workers(model_path: str, rank: int) -> dict[str, float]:
    """Relative errors of our worker: log-probs against HF's own model on the padded rows, the rest against stock's."""
    from transformers import AutoModelForCausalLM

    ours, stock = (_actor_worker(backend, model_path, rank) for backend in ("prefix", "fsdp2"))
    data, width = ours["data"], ours["data"]["responses"].shape[1]
    mask = data["attention_mask"]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = torch.cat([data["prompts"], data["responses"]], dim=1)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    by_hf = logits[:, -width - 1 : -1].log_softmax(-1).gather(-1, data["responses"].unsqueeze(-1)).squeeze(-1)
    errors = {"log_probs": _relative(ours["log_probs"], by_hf * mask[:, -width:])}
    for i, (found, wanted) in enumerate(zip(ours["metrics"], stock["metrics"], strict=True)):
        for name in ("loss", "grad_norm"):
            errors[f"{name} of update {i + 1}"] = abs(found[name] - wanted[name]) / abs(wanted[name])
        errors[f"metric names {i + 1}"] = float(bool(set(wanted) - set(found)))
        errors[f"nothing shared {i + 1}"] = float(torch.tensor(found["prefix/reuse_fraction"]).min() < 0.3)
    return errors | {"params": _relative(ours["params"], stock["params"])}


def _loss_errors(model_path: str, rank: int, loss: str) -> dict[str, float]:
    """Largest relative gradient error of a parameter, by schedule, against stock's micro-batches."""
    # Passes, in every schedule.
    several = {"budget": 130, "verify": "off", "padding_rows": False, "tool_tokens": True}
    arms = {"fsdp2": {}, "packed": {"schedule": "packed"}, "phased": {"schedule": "phased", "wave_tokens": 40}}
    grads = {}
    for name, options in arms.items():
        if name not in ENGINES:
            ENGINES[name] = _engine(name if name == "fsdp2" else "prefix", model_path, several | options)
        data = _batch(rank, ENGINES[name].model_config.hf_config.vocab_size, several)
        with ENGINES[name].train_mode(disable_auto_offload=True):
            ENGINES[name].optimizer_zero_grad()
            ENGINES[name].forward_backward_batch(data, _loss(LOSSES[loss]))
            grads[name] = whole({n: p.grad for n, p in ENGINES[name].module.named_parameters()})
    return {name: max(_relative(grads[name][n], x) for n, x in grads["fsdp2"].items()) for name in ("packed", "phased")}


def _masked_passes(model_path: str, rank: int, loss: str) -> dict[str, dict[str, float]]:
    """By schedule, errors of an update with passes of masked rows alone, which rewards filter out: gradients, and sums
    that are logged. On two ranks the exchange leaves one with such rows alone. Stock has all rows in one pass."""
    from types import SimpleNamespace

    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric
    from verl.utils.torch_functional import allgather_dict_into_dict
    from verl.workers.config import ActorConfig
    from verl.workers.config.distillation import DistillationLossConfig

    options = {"verify": "off", "calculate_entropy": False, "budget": 2000, "policy_loss": {"loss_mode": "bypass_mode"}}
    prompts = {uid: torch.arange(120) % 17 + n for n, uid in enumerate("am", start=3)}
    rows = [
        (uid, prompts[uid], torch.arange(30) + n, torch.full((30,), int(uid == "a"))) for n in range(4) for uid in "am"
    ]
    world = torch.distributed.get_world_size()
    rows = rows[rank * len(rows) // world : (rank + 1) * len(rows) // world]
    rows.append(("a", prompts["a"], torch.arange(0), torch.ones(0, dtype=torch.int64)))
    data = as_batch(rows, [0] * len(rows), options, torch.Generator().manual_seed(rank))
    tu.assign_non_tensor(data, return_model_output=True)  # also of the empty response
    function, summed = _loss(options), "actor/pg_loss"
    if loss == "distillation":
        offsets = data["input_ids"].offsets()
        data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(-6 - torch.rand(int(offsets[-1]), 1), offsets)
        config = SimpleNamespace(distillation_loss=DistillationLossConfig(loss_mode="k3", use_policy_gradient=False))
        function = functools.partial(
            distillation_ppo_loss, config=_loss_config(ActorConfig, options), distillation_config=config
        )
        summed = "distillation/loss"
    found = {}
    for name, changed in {"fsdp2": {}, "packed": {}, "phased": {"wave_tokens": 40}}.items():
        engine = _engine(
            name if name == "fsdp2" else "prefix",
            model_path,
            options | {"schedule": name, "exchange": "auto"} | changed,
        )
        with engine.train_mode(disable_auto_offload=True):
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data.copy(), function)
            grads = whole({n: p.grad for n, p in engine.module.named_parameters()})
        metrics = allgather_dict_into_dict(output["metrics"])
        found[name] = grads | {summed: torch.tensor(float(Metric.aggregate_dp(metrics[summed])))}
    stock = found.pop("fsdp2")
    return {name: {n: _relative(ours[n], x) for n, x in stock.items()} for name, ours in found.items()}


def _logits_of_an_update(model_path: str, rank: int, options: dict) -> list[int]:
    """Tokens of every call of lm_head. FSDP2, in verl's wrapping, has no reason to warn."""
    engine, found = _engine("prefix", model_path, options), []
    engine.module.lm_head.register_forward_pre_hook(lambda _, args: found.append(args[0].shape[:-1].numel()))
    data = _batch(rank, engine.model_config.hf_config.vocab_size, options)
    loss = _loss(options)
    if options.get("custom_loss"):
        loss = lambda **arguments: _loss(options)(**arguments)  # noqa: E731
    with engine.train_mode(disable_auto_offload=True), warnings.catch_warnings():
        warnings.filterwarnings("error", "FSDP2-wrapped module")
        engine.forward_backward_batch(data, loss)
    return found


def _idle_rows(model_path: str, rank: int) -> dict[str, tuple[float, float]]:
    """Metrics of an update, as verl's trainer has them of all ranks, of ours and of stock's engine; the last rank alone
    has a row with an empty response, and outputs are wanted."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric
    from verl.utils.torch_functional import allgather_dict_into_dict

    options, found = {"empty": (PAD,), "budget": 130, "verify": "off"}, []
    for backend in ("prefix", "fsdp2"):
        engine = _engine(backend, model_path, options)
        data = _batch(rank, engine.model_config.hf_config.vocab_size, options)
        tu.assign_non_tensor(data, return_model_output=True)
        with engine.train_mode(disable_auto_offload=True):
            output = engine.forward_backward_batch(data, _loss(options))
        assert (output["model_output"]["log_probs"].offsets() == data["input_ids"].offsets()).all()
        found.append(allgather_dict_into_dict(output["metrics"]))
    means = ("actor/pg_loss", "actor/entropy_loss")  # sums of what every row adds, whichever pass it is in
    return {name: tuple(float(Metric.aggregate_dp(one[name])) for one in found) for name in found[1] if name in means}


def _step_of_two_updates(model_path: str, rank: int) -> dict[str, float]:
    """Errors of a step's metrics, by verl's own worker and reduction, from what every rank has of every mini-batch."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    from verl_prefix.engine import shared_passes
    from verl_prefix.engine.metrics import metric_table
    from verl_prefix.engine.planner import StockPath

    torch.manual_seed(0)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    configs = _configs("prefix", model_path, {"verify": "off"})
    configs["engine_config"].use_dynamic_bsz = True
    worker = TrainingWorker(TrainingWorkerConfig(model_type="language_model", **configs))
    worker.reset()
    worker.set_loss_fn(_loss({}))
    # Both ranks have as many rows; in the order they come the first mini-batch shares less than the second.
    groups = [("a", 20 + 9 * rank, [5], ""), ("b", 50, [7] * (3 - rank), ""), ("c", 40 + rank, [9] * (4 + rank), "")]
    groups.append((PAD, 127, [1] * 2, "pad"))
    data = _batch(rank, worker.model_config.hf_config.vocab_size, {"groups": groups})
    order = sorted(range(len(data)), key=lambda i: data["uid"][i])
    data = tu.index_select_tensor_dict(data, order)
    for name in ("use_dynamic_bsz", "micro_batch_size_per_gpu"):
        del data[name]
    tu.assign_non_tensor(data, compute_loss=False)
    with mock.patch.object(worker.engine._planner, "only_stock_path", lambda batch, loss: StockPath("a test")):
        worker.infer_batch(data.copy())
    tu.assign_non_tensor(data, num_mini_batch=2, dataloader_kwargs={"shuffle": False})
    seen, plan_metrics = [], shared_passes.plan_metrics

    def spy(*args):
        seen.append(plan_metrics(*args))
        return seen[-1]

    with mock.patch.object(shared_passes, "plan_metrics", spy):
        output = tu.get(worker.train_mini_batch(data.copy()), "metrics")
    found = reduce_metrics({name: values for name, values in output.items() if "prefix" in name})
    assert len(seen) == 2
    ranks = worker.engine.backend.ranks
    own = {name: sum(one.get(name, 0.0) for one in seen) for name in sorted({name for one in seen for name in one})}
    wanted = {}
    for name, value in own.items():
        is_time = name.startswith("timing_s/")
        reduce = ranks.max_over_ranks if is_time else ranks.sum_over_ranks
        (wanted[name],) = reduce([value])
    rows = [*zip(data["uid"], map(len, data["prompts"].unbind()), map(len, data["responses"].unbind()), strict=True)]
    tokens = sum(n - 1 + m for uid, n, m in rows if uid != PAD)
    prefixes = {(uid, i < len(rows) // 2): n - 1 for i, (uid, n, _) in enumerate(rows) if uid != PAD}
    computed = sum(m for uid, _, m in rows if uid != PAD) + sum(prefixes.values())
    (wanted["prefix/tokens_saved"],) = ranks.sum_over_ranks([tokens - computed])
    tokens, wanted["prefix/log_prob_stock_rows"] = ranks.sum_over_ranks([tokens, sum(uid != PAD for uid, *_ in rows)])
    wanted["prefix/reuse_fraction"] = wanted["prefix/tokens_saved"] / tokens
    del wanted["prefix/offloaded_gib"], wanted[metric_table.GROUP_TOKENS]  # which is not reported
    wanted["prefix/tree_depth"] = wanted["prefix/pass_depth"] = 1.0
    assert wanted["prefix/groups"] > torch.distributed.get_world_size() and wanted["timing_s/prefix_packed"] > 0
    return {name: float(abs(found.get(name, torch.inf) - value) / max(value, 1e-9)) for name, value in wanted.items()}


def _split_of_equal_rows(models: dict, exchange: str, epochs: int) -> dict[tuple, tuple[float, int]]:
    """prefix/split_groups of a step by verl's own worker, and prompts whose rows lay in several of its mini-batches in
    an epoch: of two prompts per rank, one of them in all ranks, with rows that are equal to the last token. Where rows
    stay each rank counts its own, and the most is reported."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    world, own, found = torch.distributed.get_world_size(), "ab"[get_rank()], {}
    rows = [
        (uid, torch.full((30,), ord(uid)), torch.tensor([7, 7, 2]), torch.ones(3, dtype=torch.int64))
        for uid in [own, own, "s", "s"] * 2
    ]
    configs = _configs("prefix", models["qwen3"], {"verify": "off", "exchange": exchange, "epochs": epochs})
    configs["engine_config"].use_dynamic_bsz = True
    worker = TrainingWorker(TrainingWorkerConfig(model_type="language_model", **configs))
    worker.reset()
    worker.set_loss_fn(_loss({}))
    for shuffle, num in ((False, 1), (False, 2), (True, 4)):
        data = as_batch(rows, [0] * len(rows), {}, torch.Generator().manual_seed(0))
        tu.assign_non_tensor(data, num_mini_batch=num, epochs=epochs, dataloader_kwargs={"shuffle": shuffle})
        seen, train_batch = [], worker.train_batch

        def spy(data, seen=seen, train_batch=train_batch):
            seen.append(set(tu.get(data, "uid")))
            return train_batch(data)

        with mock.patch.object(worker, "train_batch", spy):
            output = tu.get(worker.train_mini_batch(data), "metrics")
        every = [None] * world
        torch.distributed.all_gather_object(every, seen)
        if exchange == "auto":
            every = [[set().union(*uids) for uids in zip(*every, strict=True)]]
        assert all(len(batches) == num * epochs for batches in every)
        wanted = [
            {
                uid
                for start in range(0, len(batches), num)
                for a, b in itertools.combinations(batches[start : start + num], 2)
                for uid in a & b
            }
            for batches in every
        ]
        counted = reduce_metrics({"split": output["prefix/split_groups"]})["split"]
        found[shuffle, num] = counted, max(map(len, wanted))
    return found


def _of_prompts(model_path: str, rank: int, options: dict) -> dict[str, float]:
    """Relative errors of the update of a padded mini-batch, from stock's of its rows alone. Ranks differ in padding;
    verl's number of rows, 20, is that of neither."""
    from verl.utils import tensordict_utils as tu

    options, found = {"turns": True, "verify": "off", "use_kl_loss": True, **options}, []
    for backend in ("prefix", "fsdp2"):
        engine = SHARED(backend, model_path, options | {"mini_batches": "prompts"})
        vocab_size = engine.model_config.hf_config.vocab_size
        data = _batch(rank, vocab_size, options)
        if backend == "prefix":
            (num_rows,) = engine.backend.ranks.sum_over_ranks([len(data)])
            groups = [(PAD, 127, [1] * (4 - 2 * rank), "pad")]
            padding = _batch(rank, vocab_size, {**options, "turns": False, "groups": groups})
            data = tu.concat_tensordict([data, padding])
        else:
            tu.assign_non_tensor(data, global_batch_size=int(num_rows))
        with engine.train_mode(disable_auto_offload=True):
            output = engine.train_batch(data, _loss(options))
            found.append(whole({n: p.grad for n, p in engine.module.named_parameters()}))
        found[-1] |= {"loss": torch.tensor(sum(output["loss"])), "norm": torch.tensor(output["metrics"]["grad_norm"])}
        found[-1]["params"] = torch.cat([full(p).flatten() for p in engine.module.parameters()])
    ours, stock = found
    return {name: _relative(ours[name], x) for name, x in stock.items()}


def _register_over_another_engine() -> None:
    """Ours as a mixin over an engine that is verl's FSDP engine but for how it builds its module, as veomni's is."""
    from torch.distributed.fsdp import fully_shard
    from verl.workers.engine import EngineRegistry

    from verl_prefix.backends.fsdp import PrefixFSDPEngine
    from verl_prefix.cpu.engine import CPUFSDPEngine

    class Another(CPUFSDPEngine):
        def _build_fsdp_module(self, module):
            self._autocast_dtype = torch.float32
            for layer in module.model.layers:
                fully_shard(layer)
            return fully_shard(module)

    class Both(PrefixFSDPEngine, Another):
        pass

    EngineRegistry.register(model_type="language_model", backend="prefix_over_another", device="cpu")(Both)


# What follows runs on ranks, which are given `models` first; engines share what takes longest to build.
STOCK, ENGINES, SHARED = {}, {}, SharedModels(_engine)


def _stock(path: str, options: dict) -> dict:
    """Of verl's engine, measured once. Its offload of activations pins no memory here, and is on under gradient
    checkpointing alone: without, what layers keep are views of one storage too, and all come back as the first of them
    (verl/utils/activation_offload.py, bulk_reload_group), so that gradients are wrong."""
    from verl.utils.activation_offload import SynchronizedGroupOffloadHandler

    dropped = (*OURS, "use_fused_kernels", *["activation_offload"] * (not options.get("gradient_checkpointing")))
    options = {k: v for k, v in options.items() if k not in dropped}
    if (key := repr((path, sorted(options.items())))) not in STOCK:
        with mock.patch.object(SynchronizedGroupOffloadHandler.offload, "__defaults__", (False,)):
            STOCK[key] = _measure("fsdp2", path, get_rank(), options)
    return STOCK[key]


def _case(models: dict, name: str) -> dict:
    options, check = CASES[name], name in CHECKED or torch.distributed.get_world_size() == 1
    path = models[options.get("family", "qwen3")]
    with mock.patch("engines._engine", SHARED):
        ours = options if check else {"verify": "off"} | options
        return _compare(_measure("prefix", path, get_rank(), ours), _stock(path, options))


def _over_another_engine(models: dict) -> dict:
    _register_over_another_engine()
    over = _measure("prefix_over_another", models["qwen3"], get_rank(), {"verify": "off"})
    return _compare(over, _stock(models["qwen3"], {}))


def _worker_behaves(models: dict) -> dict[str, float]:
    return _compare_workers(models["qwen3"], get_rank())


def _step_metrics(models: dict) -> dict[str, float]:
    return _step_of_two_updates(models["qwen3"], get_rank())


def _padded_prompts(models: dict, agg_mode: str, schedule: str) -> dict[str, float]:
    return _of_prompts(models["qwen3"], get_rank(), {"loss_agg_mode": agg_mode, "schedule": schedule})


def _metrics_of_prompts(models: dict, padding: int, budget: int, mode: str) -> dict[str, list[float]]:
    """What verl's loss says of a mini-batch of prompts and so many rows of padding: of each pass."""
    from verl.utils import tensordict_utils as tu

    policy_loss = {"loss_mode": mode} | ({"rollout_correction": CORRECTION} if mode == "bypass_mode" else {})
    options = {"mini_batches": "prompts", "verify": "off", "schedule": "packed", "policy_loss": policy_loss}
    groups = [("a", 40, [5, 6, 7], ""), ("b", 30, [4, 4], ""), (PAD, 127, [1] * 5, "pad")]
    engine = SHARED("prefix", models["qwen3"], options)
    more = {"groups": groups, "budget": budget}
    data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, options | more)
    rows = [i for i, uid in enumerate(data["uid"]) if uid != PAD] + [
        i for i, uid in enumerate(data["uid"]) if uid == PAD
    ]
    data = tu.index_select_tensor_dict(data, rows[: 5 + padding])
    with engine.train_mode(disable_auto_offload=True):
        metrics = engine.train_batch(data, _loss(options))["metrics"]
    return {name: [float(v) for v in getattr(x, "values", x if isinstance(x, list) else [x])]
            for name, x in metrics.items() if name.startswith(("rollout_corr/", "actor/", "grad_norm"))}  # fmt: skip


def _named(models: dict, uid: str) -> dict[str, float]:
    """Loss and prefix/* of a mini-batch of prompts, the first of which has this uid. Names sort as "a" does."""
    groups = [(uid, 40, [5, 6, 7], ""), ("qs", 30, [4, 4], ""), (PAD, 127, [1] * 3, "pad")]
    options = {"groups": groups, "mini_batches": "prompts", "verify": "off", "loss_agg_mode": "seq-mean-token-sum"}
    engine = SHARED("prefix", models["qwen3"], options)
    data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, options)
    with engine.train_mode(disable_auto_offload=True):
        output = engine.train_batch(data, _loss(options))
    counts = {name: x[0] for name, x in output["metrics"].items() if name.startswith("prefix/")}
    return {"loss": sum(output["loss"]), **{name: x for name, x in counts.items() if not name.endswith("gib")}}


def _told_of_trees(models: dict, kind: str, over: str = "uid") -> tuple[list[str], float]:
    """What two passes of log-probs and an update say, and the tokens that the update computes: of rows of turns, or of
    five prompts which begin with the same message, or not."""
    from verl_prefix.engine.metrics import sharing_advice

    groups = {"groups": [(uid, 60, [4, 6], kind) for uid in "abcde"]}
    options = {"turns": True} if kind == "turns" else groups | {"turns": False}
    options |= {"budget": 10**5, "verify": "off", "trees": over}
    rank, told = get_rank(), []
    engine = _engine("prefix", models["qwen3"], options)
    data = _batch(rank, engine.model_config.hf_config.vocab_size, options)
    data["multi_modal_inputs"] = np.array([{}] * len(data), dtype=object)  # as verl's v1 trainer has it of text
    with mock.patch.object(sharing_advice.logger, "warning", lambda text, *values: told.append(text % values)):
        with engine.eval_mode():
            for _ in range(2):
                engine.infer_batch(data.copy())
        with engine.train_mode():
            metrics = engine.train_batch(data.copy(), _loss(options))["metrics"]
    logical = float(data["input_ids"].offsets()[-1]) - len(data)
    return told, engine.backend.ranks.sum_over_ranks([logical])[0] - metrics["prefix/tokens_saved"][0]


def _idle(models: dict) -> dict[str, tuple[float, float]]:
    return _idle_rows(models["qwen3"], get_rank())


def _logits_of_many_rows(models: dict) -> list[int]:
    """Answers of three tokens: of 8 and of 5 rows, which one stock pass would not hold, nor one of ours; rank 1 has
    rows enough for more passes with noise."""
    rank = get_rank()
    groups = [("a", 300, [3] * (8 - 3 * rank), ""), ("b", 5, [1] * (184 + 3 * rank), "")]
    return _logits_of_an_update(models["qwen3"], rank, {"groups": groups, "budget": 310})


def _first_step(models: dict, measured: bool) -> float:
    rank = get_rank()
    groups = [(name, 100 + 10 * rank, [30, 28, 26, 24, 30, 28, 26, 24], "") for name in "abcdefgh"]
    options = depends_on_rates(rank) if measured else {"groups": groups, "budget": 300}
    return _first_step_cost(models["qwen3"], rank, options)


def _adds(models: dict) -> tuple[list[str], float]:
    return _accumulated(models["qwen3"], get_rank(), {"min_speedup": 1.05, "verify": "off"}, {})


def _tool_logits(models: dict, schedule: str, custom_loss: bool) -> list[int]:
    groups = [(name, 30, [9, 30, 1], kind) for name, kind in (("a", ""), ("b", "pad"))]
    options = {"groups": groups, "schedule": schedule, "verify": "off", "tool_tokens": True, "custom_loss": custom_loss}
    return _logits_of_an_update(models["qwen3"], get_rank(), options)


def _tool_tokens_one_token_off(models: dict) -> dict:
    options, at_suffixes = CASES["tool_tokens"], BatchRows.at_suffixes
    with mock.patch.object(BatchRows, "at_suffixes", lambda self, *args: at_suffixes(self, *args).roll(1)):
        off = _measure("prefix", models["qwen3"], get_rank(), options | {"verify": "off"})
    return _compare(off, _stock(models["qwen3"], options))


def _chunks(models: dict, given: int | None, temperature: float = 1.0) -> list[int]:
    """`PackedForward.logits_chunk` of log-probs and of an update. MOCK: flash-attn's cross entropy is installed."""
    options = {"logits_chunk": given, "verify": "off", "min_speedup": 0, "temperature": temperature}
    engine, found = _engine("prefix", models["qwen3"], options), []
    data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, options)
    run = PlanRunner.run
    spy = mock.patch.object(
        PlanRunner, "run", lambda self, *a: found.append(self.forward.logits_chunk) or run(self, *a)
    )
    with spy, mock.patch.object(FSDPBackend, "reads_logits_once", lambda self, flags: True):
        with engine.eval_mode(disable_auto_offload=True):
            engine.infer_batch(data.copy())
        with engine.train_mode(disable_auto_offload=True):
            engine.forward_backward_batch(data, _loss(options))
    return found


def test_an_update_has_all_logits_of_a_pass_at_once_where_there_is_room(one_rank):
    """Log-probs have no backward in which chunks would run again. verl divides a copy by a temperature."""
    assert one_rank(_chunks, None)[0] == [LOGITS_CHUNK, sys.maxsize]
    assert one_rank(_chunks, None, 0.7)[0] == [LOGITS_CHUNK, LOGITS_CHUNK]
    assert one_rank(_chunks, 7)[0] == [7, 7]


def _losses(models: dict, loss: str) -> dict[str, float]:
    return _loss_errors(models["qwen3"], get_rank(), loss)


def _masked(models: dict, loss: str) -> dict[str, dict[str, float]]:
    return _masked_passes(models["qwen3"], get_rank(), loss)


def _half(models: dict, dtype: str, schedule: str, turns: bool) -> dict[str, dict[str, float]]:
    """Where fp32 stock is truth enough: what does stock itself miss, and what do we?"""
    path, waves = models["qwen3"], {"wave_tokens": 40} if schedule == "phased" else {}
    rows = {"turns": "kept"} if turns else {}
    ours = _measure("prefix", path, get_rank(), {"param_dtype": dtype, "schedule": schedule} | waves | rows)
    stock = _stock(path, {"param_dtype": dtype} | rows)
    return {name: _half_errors(x, _stock(path, rows)) for name, x in (("ours", ours), ("stock", stock))}


def _empty_in_bf16(models: dict) -> dict:
    options = {"param_dtype": "bf16", "empty": CASES["rank_of_empty_responses"]["empty"] + ("c",)}
    return _compare(_measure("prefix", models["qwen3"], get_rank(), options), _stock(models["qwen3"], options))


def _loses_a_gradient(models: dict, dtype: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        broken_states.gradients_of_one_layer_dropped(patch)
        with pytest.raises(RuntimeError, match="prefix.verify, update 1: .*gradients of .* stock path's by"):
            _measure("prefix", models["qwen3"], get_rank(), {"param_dtype": dtype, "schedule": "phased"})


def _breaks_trees(models: dict, broken: str, schedule: str) -> None:
    options = {"turns": "kept", "schedule": schedule}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match=MISSED):
        getattr(broken_states, broken)(patch)
        _measure("prefix", models["qwen3"], get_rank(), options)


def _wrong_on_the_last_rank(models: dict, dtype: str) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match=MISSED):
        _break_the_last_ranks_kernel(patch)
        _measure("prefix", models["qwen3"], get_rank(), {"param_dtype": dtype})


def _names_another_ranks_layer(models: dict) -> None:
    """Layer 1 is the worst by far on the last rank, which is alone to know it, and layer 0 on the others."""
    last = get_rank() == torch.distributed.get_world_size() - 1

    def attention(self, *_: object, **__: object) -> None:
        ratio, layer = (9.0, 1) if last else (4.0, 0)
        self.worst_attention = Figure(ratio, 2.0, f"attention of layer {layer} differs from dense float64")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="attention of layer 1 .*by 9 times"):
        patch.setattr(LayerProbe, "attention", attention)
        _measure("prefix", models["qwen3"], get_rank(), {})


def _paths_of_batches(models: dict) -> list[tuple[bool, float]]:
    """Whether predicted_speedup is among the metrics, and stock_rows: of log-probs by `auto`, of rows that need stock's
    path, of an update whose self-check misses, and of one after that; each has a row of padding."""
    from verl.utils import tensordict_utils as tu

    from verl_prefix.engine.planner import StockPath

    groups, found = [("a", 60, [9, 9], ""), (PAD, 5, [2], "pad")], []
    engine = _engine("prefix", models["qwen3"], {"min_speedup": 1e-6, "verify_action": "fallback"})
    data = _batch(0, 64, {"groups": groups})
    with engine.eval_mode(disable_auto_offload=True):
        for size in (1, 3):
            tu.assign_non_tensor(data, force_group_size=size)
            found.append(engine.infer_batch(data.copy())["metrics"])
    tu.assign_non_tensor(data, force_group_size=1)
    missed = StockPath("the self-check missed")
    with engine.train_mode(disable_auto_offload=True):
        with mock.patch.object(engine._verification, "check", lambda *args: (missed, {"prefix/verify_log_probs": 9.0})):
            metrics = engine.forward_backward_batch(data.copy(), _loss({}))["metrics"]
        assert metrics["prefix/verify_log_probs"] == [9.0]
        found.append(metrics)
        engine._missed_check = missed
        found.append(engine.forward_backward_batch(data.copy(), _loss({}))["metrics"])
    return [("prefix/predicted_speedup" in metrics, metrics["prefix/stock_rows"][0]) for metrics in found]


def _reasons_for_stock(models: dict) -> list[str]:
    data, engine = _batch(0, 512, {}), _engine("prefix", models["qwen3"], {"min_speedup": 1e6})
    groups = [Group.of_prompt((row,), 10, (5,)) for row in range(len(data))]
    plan = functools.partial(engine._planner.plan, BatchRows(data), BatchRows(data), groups)
    plans = [plan(forward_only) for forward_only in (False, True, False)]
    return [why.reason for why in plans]


def _told_of_waves(models: dict, options: tuple) -> tuple[list[str], float]:
    """What two updates say, and passes A of the second."""
    from verl_prefix import versions
    from verl_prefix.engine import plan_advice

    versions.WARNED.clear()
    groups = {"groups": [(uid, 20, [6, 7], "") for uid in "abcde"]}
    options = {"schedule": "phased", "verify": "off"} | dict(options)
    engine, said = _engine("prefix", models["qwen3"], options), []
    data, plans = _batch(0, engine.model_config.hf_config.vocab_size, options | groups), []
    run = engine._passes.run

    def seen(rows, groups, plan, *args, **more):
        plans.append(plan)
        return run(rows, groups, plan, *args, **more)

    with (
        mock.patch.object(plan_advice.logger, "warning", lambda text, *values: said.append(text % values)),
        mock.patch.object(engine._passes, "run", seen),
        engine.train_mode(disable_auto_offload=True),
    ):
        for _ in range(2):
            metrics = engine.train_batch(data.copy(), _loss(options))["metrics"]
    assert plans[-1].waves and metrics["timing_s/prefix_phase_b"][0] > 0
    return said, len(plans[-1].phased)


def _falls_back(models: dict) -> dict:
    static = CASES["static_batch_size_of_one"]
    with pytest.MonkeyPatch.context() as patch:
        _break_the_last_ranks_kernel(patch)
        ours = _measure("prefix", models["qwen3"], get_rank(), static | {"verify_action": "fallback"})
    return _compare(ours, _stock(models["qwen3"], static))


def _ref_checks_itself(models: dict) -> list[dict]:
    """Metrics of two batches of an engine for log-probs alone, which equal stock's; then with a wrong kernel."""
    stock, ours, wrong = (_engine(backend, models["qwen3"], {}, True) for backend in ("fsdp2", "prefix", "prefix"))
    data, found = _batch(get_rank(), stock.model_config.hf_config.vocab_size, {}), []

    def infer(engine) -> tuple[torch.Tensor, dict]:
        with engine.eval_mode(disable_auto_offload=True):
            output = engine.infer_batch(data.copy())
        return torch.cat(_responses(output["model_output"]["log_probs"], data)), output["metrics"]

    truth, _ = infer(stock)
    for _ in range(2):
        log_probs, metrics = infer(ours)
        assert _relative(log_probs, truth) < TOLERANCE
        found.append(metrics)
    with pytest.MonkeyPatch.context() as patch:
        _break_the_last_ranks_kernel(patch)
        with pytest.raises(RuntimeError, match="prefix.verify, batch of ref 1: .*verify_action=fallback"):
            infer(wrong)
    return found


MISSED = "prefix.verify, update 1: .*verify_action=fallback"


def _break_the_last_ranks_kernel(patch: pytest.MonkeyPatch) -> None:
    forward = cpu.forward
    if get_rank() == torch.distributed.get_world_size() - 1:
        patch.setattr(cpu, "forward", lambda *args, **kw: (lambda out, lse: (out * 1.01, lse))(*forward(*args, **kw)))


def _refuses_routing_replay(models: dict) -> None:
    routed = _batch(get_rank(), 512, {})
    routed["routed_experts"] = routed["input_ids"].clone()
    engine = _engine("prefix", models["qwen3"], {})
    with (
        engine.eval_mode(disable_auto_offload=True),
        pytest.raises(ValueError, match="routing_replay=True gives .* set it"),
    ):
        engine.infer_batch(routed)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("engine")
    families = ("qwen3", "llama", "seed_oss", "deepseek_v3", "phi3", "qwen2_moe", "glm4_moe")
    models = {family: write_tiny_model(tmp / family, family=family) for family in families}
    # Shorter than some prefixes, and ending inside the suffixes of others.
    window = dict(use_sliding_window=True, sliding_window=25, max_window_layers=1)
    models["window"] = write_tiny_model(tmp / "window", **window)
    models["tied"] = write_tiny_model(tmp / "tied", tie_word_embeddings=True)
    models["deep"] = write_tiny_model(tmp / "deep", num_hidden_layers=4)  # verl offloads from three layers on
    return models


@pytest.fixture(scope="module")
def one_rank(models, ranks):
    return ranks(1, models)


WORLDS = {1: "1rank", 2: "2ranks"}


def quick(world: int, other: pytest.MarkDecorator = pytest.mark.more) -> list:
    """Values of `results`: so many ranks in make test, the others in test-more, or where `other` says."""
    return [pytest.param(n, marks=() if n == world else other, id=name) for n, name in WORLDS.items()]


# Where ranks have nothing to agree on.
on_one = pytest.mark.parametrize("results", quick(1, pytest.mark.full), indirect=True)


@pytest.fixture(scope="module", params=quick(2))
def results(request, models, ranks):
    return ranks(request.param, models)


def test_the_self_check_names_the_layer_of_the_rank_that_is_off_most(results):
    results(_names_another_ranks_layer)


def test_an_engine_for_log_probs_alone_checks_its_first_batch(results):
    for first, second in results(_ref_checks_itself):
        assert 0 < first["prefix/verify_log_probs"][0] < 3 and 0 < first["prefix/verify_attention"][0] < 2
        assert "prefix/verify_gradients" not in first, "ref has none"
        assert not any("verify" in name for name in second)


def test_an_update_takes_stocks_path_as_its_log_probs_did_and_the_log_says_so(one_rank):
    ((alone, log_probs, update),) = one_rank(_reasons_for_stock)
    assert alone == log_probs and "prefix.min_speedup=1000000.0" in alone and "follows its log-probs" in update


def test_what_a_batch_reports_of_its_path_is_its_own_and_leaves_padding_out(one_rank):
    assert one_rank(_paths_of_batches) == [[(True, 0.0), (False, 2.0), (False, 2.0), (False, 2.0)]]


@pytest.mark.more
def test_the_self_check_stays_within_the_budget_with_as_many_passes_on_every_rank(results):
    for found in results(_logits_of_many_rows):
        assert max(found) == 300 + 3, "whole rows run in stock's passes, one in each"
        assert found.count(300 + 3) == (1 + 1) * 8


@pytest.mark.parametrize(
    ("schedule", "custom_loss", "calls"),
    [
        # Responses of 9, 30 and 1 tokens, of which a third were sampled; a group of padding rows.
        ("packed", False, [3 + 10 + 1]),
        ("phased", False, [1, 3 + 10 + 1]),  # phase A calls it without computing a logit
        ("phased", True, [1, 2 * (9 + 30 + 1)]),  # a custom loss may read all
    ],
)
@on_one
def test_lm_head_runs_where_the_loss_reads_alone(results, schedule, custom_loss, calls):
    assert all(found == calls for found in results(_tool_logits, schedule, custom_loss))


@on_one
def test_tool_tokens_one_token_off_are_far_off(results):
    for result in results(_tool_tokens_one_token_off):
        assert result["errors"]["grads"] > 100 * TOLERANCE


@pytest.mark.more
@pytest.mark.parametrize("results", quick(2, pytest.mark.full), indirect=True)  # one: test_recurrent_engine.py
def test_measuring_and_self_check_compute_at_most_a_fifth_of_a_stock_update(results):
    for any_rates, measured in zip(results(_first_step, False), results(_first_step, True), strict=True):
        assert 0 < any_rates < 0.14 < measured <= 0.2


@pytest.mark.parametrize("padded", [False, True])
def test_lengths_that_verls_loss_reads_stay_with_the_host(monkeypatch, padded):
    """MOCK: the meta device stands for a GPU. Reading a value of it raises."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    from verl_prefix.engine import pass_results
    from verl_prefix.engine.loss import Loss

    data = _batch(0, 97, {"padded": padded})
    tu.assign_non_tensor(data, sp_size=1)
    monkeypatch.setattr(pass_results, "get_device_id", lambda: "meta")
    monkeypatch.setattr("tensordict.base._get_available_device_type", lambda: None)  # none is waited for
    outputs = torch.empty(sum(data["input_ids"].offsets().diff()[:3].tolist()), device="meta")
    assert no_padding_2_padding(outputs, pass_results.micro_batch_of(Loss(_loss({})), data, [0, 1, 2])).is_meta
    with pytest.raises(RuntimeError, match="meta"):
        no_padding_2_padding(outputs, pass_results.micro_batch_of(Loss(lambda **_: None), data, [0, 1, 2]))


def test_counts_and_seconds_are_those_of_a_step(results):
    for errors in results(_step_metrics):
        assert max(errors.values()) < 1e-9, errors


@pytest.mark.parametrize(
    ("agg_mode", "schedule"),
    [
        ("seq-mean-token-mean", "phased"), ("seq-mean-token-sum", "stock"),
        pytest.param("token-mean", "packed", marks=pytest.mark.more),
        pytest.param("seq-mean-token-sum-norm", "packed", marks=pytest.mark.more),
    ],
)  # fmt: skip
def test_a_padded_mini_batch_of_prompts_updates_as_stock_does_with_its_rows_alone(results, agg_mode, schedule):
    for errors in results(_padded_prompts, agg_mode, schedule):
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("uid", ["padme-1", "pad", "pad0", f"pad{7:031x}", f"pad{7:033x}", "pad-" + "0" * 32])
def test_a_prompt_whose_uid_begins_with_pad_is_a_prompt_and_verls_padding_is_none(one_rank, uid):
    (found,), (wanted,) = one_rank(_named, uid), one_rank(_named, "a")
    assert found == wanted and found["prefix/groups"] == 2 and found["prefix/stock_rows"] == 0
    (padding,) = one_rank(_named, PAD)
    assert padding["prefix/groups"] == 1, "verl's own is"


@pytest.mark.parametrize(
    ("budget", "mode", "telling"),
    [(400, "bypass_mode", "rollout_corr/training_ppl"), (100, "vanilla", "actor/ppo_kl")],
    ids=["one pass", "passes of a prompt or of padding"],
)
def test_padding_of_a_mini_batch_of_prompts_changes_no_metric_of_the_loss(one_rank, budget, mode, telling):
    """verl#7771: perplexities, say, which are means over the rows that the loss is given; others over passes."""
    (wanted,) = one_rank(_metrics_of_prompts, 0, budget, mode)
    assert all(wanted[telling]) and wanted["grad_norm"]
    for padding in (1, 5):
        (found,) = one_rank(_metrics_of_prompts, padding, budget, mode)
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            mean, of_rows = (sum(each) / len(each) for each in (found[name], values))
            counted = name in ("actor/pg_loss", "actor/entropy_loss")  # sums over passes
            mean, of_rows = (sum(found[name]), sum(values)) if counted else (mean, of_rows)
            assert mean == pytest.approx(of_rows, rel=1e-5, abs=1e-7), name


# One epoch of rows that stay; the others in test-more.
@pytest.mark.parametrize(
    ("exchange", "epochs"),
    [("off", 1), *(pytest.param(*one, marks=pytest.mark.more) for one in (("auto", 1), ("auto", 3), ("off", 3)))],
)
def test_torn_prompts_of_a_collapsed_policy_are_counted_in_every_epoch(results, exchange, epochs):
    for one in results(_split_of_equal_rows, exchange, epochs):
        assert {case: counted for case, (counted, _) in one.items()} == {case: n for case, (_, n) in one.items()}
        assert one[False, 1] == (0, 0), "a mini-batch alone tears nothing"
        if exchange == "auto":
            assert one[False, 2][1] == 1 + results.world


@pytest.mark.parametrize("waves", [200, 10**6])
@pytest.mark.parametrize(
    "rows", [{"budget": 100}, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4}], ids=["tokens", "rows"]
)
def test_waves_that_leave_prefixes_nothing_of_a_pass_are_said_once_and_not_heeded(one_rank, rows, waves):
    """Of five groups; nobody but the driver refuses them."""
    rows = tuple(rows.items())
    ((said, phases),) = one_rank(_told_of_waves, (*rows, ("wave_tokens", waves)))
    ((nothing, wanted),) = one_rank(_told_of_waves, rows)
    assert phases == wanted < 5 and not nothing
    assert [re.sub("[0-9]+", "N", line).split(",")[0] for line in said] == [
        "prefix: prefix.wave_tokens=N leaves nothing for prefixes of the N tokens of a pass"
    ]


def test_the_first_batch_says_what_each_value_of_trees_computes(results):
    """Once, on rank 0; what such a run then computes."""
    found = {over: results(_told_of_trees, "turns", over) for over in ("off", "uid", "batch")}
    computed = {over: ranks[0][1] for over, ranks in found.items()}
    for over, ((told, _), *others) in found.items():
        (line,) = told
        stock, *tokens = map(int, re.findall(r"\d+", line))
        assert tokens == [computed["off"], computed["uid"], computed["batch"]] and line.endswith(f"; {over} is on")
        assert stock > computed["off"] > 1.5 * computed["uid"] >= computed["batch"]
        assert all(rank == ([], computed[over]) for rank in others)


def test_prompts_that_begin_alike_are_told_of(results):
    ((line,), computed), *others = results(_told_of_trees, "alike")
    of_batch = results(_told_of_trees, "alike", "batch")
    stock, *tokens = map(int, re.findall(r"\d+", line))
    assert line.startswith("prefix: prompts begin alike: of ") and tokens == [computed, of_batch[0][1]]
    assert all(told == [] for told, _ in (*others, *of_batch, *results(_told_of_trees, "others")))


def test_rows_without_a_response_give_every_rank_as_many_metrics(results):
    for found in results(_idle):
        assert found
        for name, (ours, stock) in found.items():
            assert abs(ours - stock) <= TOLERANCE * abs(stock), name


@pytest.mark.parametrize("of_a_pass", [1, 2])
@pytest.mark.parametrize(("aggregation", "expected"), [("sum", 6.5), ("mean", 3.5), ("min", 1.0), ("max", 6.0)])
def test_a_rank_of_fewer_passes_counts_in_verls_metrics_as_one_of_more(aggregation, expected, of_a_pass):
    from verl.utils.metric import Metric

    from verl_prefix.engine.metrics.even_metrics import even_out

    ranks = [Metric(aggregation), Metric(aggregation)]
    for metric, values in zip(ranks, ([1.0, 2.0, 6.0], [4.0]), strict=True):
        metric.extend([value for value in values for _ in range(of_a_pass)])
        outputs = [{"metrics": {"metric": metric}} for _ in values] + [{"metrics": {}}]
        even_out({"metric": metric, "no Metric": 1.0}, outputs, num_passes=3)
    assert Metric.aggregate_dp(ranks) == expected * (of_a_pass if aggregation == "sum" else 1)


def test_a_batch_that_measures_adds_its_gradients_to_those_before(results):
    for seen, error in results(_adds):
        assert seen == ["measure"] and error <= TOLERANCE


def _assert_equal(results: list[dict]) -> None:
    for rank, result in enumerate(results):
        worst = {name: error for name, error in result["errors"].items() if not error <= TOLERANCE}
        assert not worst, f"rank {rank}: relative errors over {TOLERANCE}: {worst}"


def _marks(world: int, case: str) -> tuple | pytest.MarkDecorator:
    """make test has every case but ALIKE on one number of ranks; ALIKE, and the other, are left to make test-full."""
    return () if case not in ALIKE and world == (1 if case in (*ALONE, *ONE) else 2) else pytest.mark.full


@pytest.mark.parametrize(
    ("results", "case"),
    [
        pytest.param(world, case, marks=_marks(world, case), id=f"{WORLDS[world]}-{case}")
        for world in WORLDS for case in CASES
    ],
    indirect=["results"],
)  # fmt: skip
def test_engine_computes_what_the_stock_engine_computes(results, case):
    _assert_equal(results(_case, case))


def test_our_engine_goes_over_another_than_verls_own(one_rank):
    for result in one_rank(_over_another_engine):
        assert max(result["errors"].values()) <= TOLERANCE
        assert result["metrics"]["prefix/reuse_fraction"][0] > 0.3


def test_verls_worker_infers_and_updates_as_hf_and_the_stock_engine_do(results):
    for errors in results(_worker_behaves):
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("loss", LOSSES)
@on_one
def test_a_loss_that_is_let_through_has_the_gradients_of_stock_and_one_that_is_refused_has_not(results, loss):
    from verl_prefix.config.fsdp import PrefixActorConfig

    try:
        _loss_config(PrefixActorConfig, LOSSES[loss])
        refused = False
    except ValueError as error:
        assert "actor_rollout_ref.actor." in str(error) and "set " in str(error)
        refused = True
    if loss == "bypass_mode normalised" and results.world > 1:  # whose loss waits for the other ranks' passes
        assert refused
        return
    for errors in results(_losses, loss):
        found = errors.values()
        assert min(found) > 1e-3 if refused else max(found) <= TOLERANCE, f"refused: {refused}, {errors}"


@pytest.mark.parametrize("loss", [pytest.param("bypass_mode", marks=pytest.mark.more), "distillation"])
def test_rows_that_are_masked_may_have_passes_of_their_own(results, loss):
    """verl's loss would raise, and the other ranks wait."""
    for errors in results(_masked, loss):
        for schedule, of_each in errors.items():
            assert max(of_each.values()) <= TOLERANCE, (schedule, of_each)


def test_users_are_told_what_their_loss_does_not_get_also_if_verl_calls_it(monkeypatch):
    from types import SimpleNamespace

    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.workers.utils.losses import ppo_loss, sft_loss

    from verl_prefix import versions
    from verl_prefix.engine import loss

    said = []
    monkeypatch.setattr(loss.logger, "warning", lambda text, *values: said.append(text))

    def is_told(function) -> bool:
        versions.WARNED.clear()
        said.clear()
        loss.Loss(function).warn_of_limits()
        return len(said) == 1

    def of_mode(mode: str):
        config = SimpleNamespace(policy_loss={"loss_mode": mode}, use_kl_loss=False)
        return functools.partial(ppo_loss, config=config)

    def mine(**given):
        raise AssertionError

    assert not any(map(is_told, [None, of_mode("vanilla"), of_mode("geo_mean"), functools.partial(sft_loss, config=0)]))
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "mine", mine)
    assert is_told(mine) and is_told(of_mode("mine"))
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "vanilla", mine)
    assert is_told(of_mode("vanilla"))


def test_every_loss_that_verl_has_is_among_those_tested():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss

    assert set(LOSS_MODES) == set(POLICY_LOSS_REGISTRY)
    assert set(AGG_MODES) == set(re.findall(r'"((?:token|seq)-[a-z-]+)"', inspect.getsource(agg_loss)))


@pytest.mark.parametrize("turns", [pytest.param(False, marks=pytest.mark.more), True], ids=["one_prompt", "turns"])
@pytest.mark.parametrize("schedule", [pytest.param("packed", marks=pytest.mark.more), "phased"])
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.more)])
@on_one
def test_half_precision_misses_fp32_by_no_more_than_stock_does(results, dtype, schedule, turns):
    for result in results(_half, dtype, schedule, turns):
        for name, error in result["ours"].items():
            stock = result["stock"][name]
            assert error <= 1.3 * stock, f"{name}: {error:.2e} against stock's {stock:.2e}"


@pytest.mark.more
def test_outputs_of_empty_responses_have_the_form_of_the_others_in_bf16(results):
    for result in results(_empty_in_bf16):
        errors = result["errors"]
        assert not any(errors[name] for name in ("outputs", "metric names", "dtypes", "lens"))


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.more), "bf16"])
def test_a_gradient_that_waves_lose_which_no_log_prob_shows_stops_step_1(results, dtype):
    results(_loses_a_gradient, dtype)


# test_verify.py has both without an engine.
@pytest.mark.more
@pytest.mark.parametrize(
    ("broken", "schedule"),
    [("ancestor_left_out", "packed"), ("gradients_of_shared_outputs_dropped", "phased")],
)
def test_broken_trees_stop_step_1(results, broken, schedule):
    results(_breaks_trees, broken, schedule)


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.more), "bf16"])
def test_every_rank_sees_that_the_self_check_misses_on_the_last_one(results, dtype):
    results(_wrong_on_the_last_rank, dtype)


def test_a_missed_self_check_falls_back_to_the_stock_path(results):
    for result in results(_falls_back):
        errors = result["errors"]
        assert max(errors[name] for name in ("loss", "grad_norm", "grads", "params")) == 0
        assert result["metrics"]["prefix/reuse_fraction"] == [0.0]


def test_routing_replay_is_refused(results):
    results(_refuses_routing_replay)


def test_sharing_happens_where_it_should(results, models):
    def metrics(case: str) -> list[dict]:
        return [result["metrics"] for result in results(_case, case)]

    for case in ("default", "packed", "phased", "no_uid", "padded"):
        assert all(found["prefix/reuse_fraction"][0] > 0.3 for found in metrics(case)), case
    for found in metrics("schedule_stock"):
        assert found["prefix/reuse_fraction"] == [0.0]
    vocab_size = AutoConfig.from_pretrained(models["qwen3"]).vocab_size
    cases = "turns", "turns_phased", "turns_of_the_batch", "turns_whole_prompts_alone"
    reused = {case: [found["prefix/reuse_fraction"][0] for found in metrics(case)] for case in cases}
    rows = []
    for rank in range(len(reused["turns"])):
        data = _batch(rank, vocab_size, {"turns": True})
        rows += [(uid, row.tolist()[:-1]) for uid, row in zip(data["uid"], data["input_ids"].unbind(), strict=True)]
    beginnings = {(uid, *row[: i + 1]) for uid, row in rows for i in range(len(row))}
    most = 1 - len(beginnings) / sum(len(row) for _, row in rows)  # of any sharing inside a uid
    assert all(0.9 * most < found <= most for found in reused["turns"])
    assert all(0 < found < 0.4 * most for found in reused["turns_whole_prompts_alone"])
    assert reused["turns_phased"] == reused["turns_of_the_batch"] == reused["turns"]
    assert {found["prefix/tree_depth"][0] for found in metrics("turns")} == {2.0}
    assert {found["prefix/tree_depth"][0] for found in metrics("no_uid")} == {1.0}
    for found in metrics("phased"):
        assert found["prefix/waves"][0] >= 1
        assert found["prefix/offloaded_gib"] == [0.0]
    for found in metrics("packed"):
        assert found["prefix/waves"] == [0.0]
    for found in metrics("offload"):
        assert found["prefix/offloaded_gib"][0] > 0
    for found in metrics("gate_open"):
        assert found["prefix/predicted_speedup"][0] > 0
    for found in metrics("gate_shut"):
        assert found["prefix/stock_rows"][0] > 5
    for found in metrics("default"):
        assert "prefix/predicted_speedup" not in found
        assert 0 < found["prefix/verify_attention"][0] <= 2
        assert 0 < found["prefix/verify_log_probs"][0] <= 3
    for found in metrics("verify_off"):
        assert "prefix/verify_attention" not in found
    # Without dynamic batch size, micro-batches of one row leave room for one longest row's tokens, not for a group.
    assert metrics("static_batch_size_of_one")[0]["prefix/waves"][0] >= 1
    assert metrics("default")[0]["prefix/split_uids"] == [1.0]
    assert metrics("packed_small_budget_cuts_groups")[0]["prefix/recomputed_tokens"][0] >= 1
