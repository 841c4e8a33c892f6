"""`model_engine=prefix_megatron` against verl's own Megatron engine in the same layout, and against the same model
whole on one rank: a factor that is wrong in a layout would hide in both of its arms. test_megatron_stock.py compares
that one rank with verl's FSDP2 engine.

fp32, gloo, tiny models, two steps with Adam. `megatron_cpu` has what Megatron lacks here: CUDA and TransformerEngine.
"""

import contextlib
import dataclasses
import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import broken_states
import pytest
import torch
from engines import PAD, TOLERANCE, _half_errors
from safetensors.torch import load_file
from torch.distributed import get_world_size

pytest.importorskip("megatron.core")

from megatron_engines import MODELS, engine, errors_of, measure, together, write_megatron_model  # noqa: E402

from verl_prefix.core.plan import PackedPass  # noqa: E402
from verl_prefix.models import mcore  # noqa: E402
from verl_prefix.versions import package_versions  # noqa: E402

PACKED, PHASED = {"schedule": "packed"}, {"schedule": "phased", "wave_tokens": 20}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
UP_PROJECTIONS = SELECTIVE | {"recompute_modules": ["core_attn", "mla_up_proj", "layernorm"]}
OVERLAP = {"override_ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}}
SP = {"tp": 2, "sp": True}
PP = {"pipeline_model_parallel_size": 2}
EXCHANGE = {"exchange": "auto"}


def case(
    prefix: dict[str, Any], model: str = "qwen3", rows: dict[str, Any] | None = None,
    recompute: dict[str, Any] | None = None, **layout: Any,
) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """A model, fields of PrefixConfig, options of rows, and how verl's engine is built."""
    built = layout | ({"override_transformer_config": recompute} if recompute else {})
    return model, prefix, rows or {}, built


YARN = {"model": "deepseek_v3_yarn"}
SINKS = {"override_transformer_config": {"softmax_type": "off-by-one"}}
TOPK = {"distillation": {}, "budget": 2000}  # with one micro-batch: verl's loss raises where no token counts
TOPK_ONLY = TOPK | {"distillation": {"use_task_rewards": False}, "entropy_coeff": 0.0, "calculate_entropy": False}
SKIPS, DEAD = {"skip_zero_advantage": True}, {"dead": 2, "entropy_coeff": 0.0}
CASES = {
    1: {
        "packed": case(PACKED),
        "phased": case(PHASED),
        "waves_of_1": case(PHASED | {"wave_tokens": 1}),
        "offload": case(PHASED | {"offload": True}),
        "small_budget": case(PACKED, rows={"budget": 90}),
        "logits_in_chunks": case(PHASED | {"logits_chunk": 7}),
        "kl_temperature": case(PACKED, rows={"use_kl_loss": True, "temperature": 0.7}),
        "temperature_per_row": case(PHASED, rows={"temperature": "per_row", "calculate_sum_pi_squared": True}),
        "tool_tokens": case(PHASED, rows={"tool_tokens": True, "entropy_coeff": 0.0, "calculate_entropy": False}),
        "dead": case(SKIPS | PHASED, rows=DEAD),
        "distilled": case(PACKED | {"logits_chunk": 7}, rows=TOPK),
        "distilled_only": case(PHASED, rows=TOPK_ONLY | {"turns": "kept"}),
        "turns": case(PACKED, rows={"turns": True}),
        "turns_phased": case(PHASED, rows={"turns": True}),
        "odd_turns": case(PHASED, rows={"turns": "odd"}),
        "full_packed": case(PACKED, recompute=FULL),
        "full_phased": case(PHASED, recompute=FULL),
        "full_offload": case(PHASED | {"offload": True}, recompute=FULL),
        "full_turns": case(PHASED, rows={"turns": True}, recompute=FULL),
        "full_block": case(PHASED, recompute=BLOCK),
        "selective_packed": case(PACKED, recompute=SELECTIVE),
        "selective_phased": case(PHASED, recompute=SELECTIVE),
        "mla_selective": case(PHASED, **YARN, recompute=UP_PROJECTIONS),
        "mla_selective_offload": case(PHASED | {"offload": True}, **YARN, recompute=UP_PROJECTIONS),
        "mla_full": case(PHASED, **YARN, recompute=FULL),
        "mla_packed": case(PACKED, **YARN),
        "mla_turns": case(PHASED, **YARN, rows={"turns": True}),
        "sinks_of_zero": case(PHASED, model="qwen2", **SINKS),
        "experts_selective": case(PHASED, model="qwen3_moe", recompute=SELECTIVE | {"recompute_modules": ["moe"]}),
    }
    | {f"{name}_phased": case(PHASED, model=name) for name in MODELS if name != "qwen3"},
    2: {
        "dp2_packed": case(PACKED),
        "dp2_phased": case(PHASED),
        "dp2_exchange": case(EXCHANGE),
        "dp2_distilled_exchange": case(EXCHANGE, rows=TOPK_ONLY),
        "tp2_sp_distilled": case(PHASED, rows=TOPK, **SP),
        "tp2_distilled_only": case(PACKED, rows=TOPK_ONLY, tp=2, model="qwen3_tied"),
        "cp2_distilled": case(PACKED | {"logits_chunk": 7}, rows=TOPK, cp=2),
        "cp2_distilled_only": case(PHASED, rows=TOPK_ONLY, cp=2),
        "pp2_distilled_only": case(PHASED, rows=TOPK_ONLY, **PP),
        "pp2_estimated": case(PACKED, rows=TOPK | {"distillation": {"loss_mode": "k3"}}, **PP),
        "dp2_dead_rank": case(SKIPS | PACKED, rows=DEAD | {"dead": ("e", "f")}),
        "tp2_sp_dead": case(SKIPS | PHASED, model="qwen3_moe", rows=DEAD, **SP),
        "pp2_dead": case(SKIPS | PHASED, rows=DEAD, pipeline_model_parallel_size=2),
        "dp2_exchange_turns": case(EXCHANGE | PHASED, rows={"turns": True}),
        "dp2_rank_of_empty_responses": case(PHASED, rows={"empty": ("e", PAD, "f")}),
        "dp2_plain_optimizer": case(PHASED, distributed_optimizer=False),
        "dp2_overlap": case(PHASED, **OVERLAP),
        "tp2_packed": case(PACKED, tp=2),
        "tp2_phased": case(PHASED, tp=2),
        "tp2_sp_packed": case(PACKED, **SP),
        "tp2_sp_phased": case(PHASED, **SP),
        "tp2_sp_offload": case(PHASED | {"offload": True}, **SP),
        "tp2_sp_full": case(PHASED, recompute=FULL, **SP),
        "tp2_sp_selective": case(PHASED, recompute=SELECTIVE, **SP),
        "tp2_sp_turns": case(PHASED, rows={"turns": True}, **SP),
        "tp2_sp_chunks": case(PACKED | {"logits_chunk": 7}, **SP),
        "tp2_sp_tied": case(PHASED, model="qwen3_tied", **SP),
        "tp2_sp_moe": case(PHASED, model="qwen3_moe", **SP),
        "tp2_sp_etp1_ep2": case(PHASED, model="qwen3_moe", ep=2, etp=1, **SP),
        "tp2_sp_mla": case(PHASED, **YARN, **SP),
        "tp2_sp_mla_full": case(PACKED, **YARN, recompute=FULL, **SP),
        "ep2_packed": case(PACKED, model="qwen3_moe", ep=2),
        "ep2_phased": case(PHASED, model="qwen3_moe", ep=2),
        "ep2_exchange": case(EXCHANGE | PHASED, model="qwen3_moe", ep=2),
        "ep2_full": case(PHASED, model="qwen3_moe", ep=2, recompute=FULL),
        "ep2_turns": case(PHASED, model="qwen3_moe", ep=2, rows={"turns": True}),
        "ep2_rank_of_empty_responses": case(PHASED, model="qwen3_moe", ep=2, rows={"empty": ("e", PAD, "f")}),
        "ep2_overlap": case(PHASED, model="qwen3_moe", ep=2, **OVERLAP),
        "ep2_mla": case(PHASED, **YARN, ep=2),
        "pp2_packed": case(PACKED, **PP),
        "pp2_phased": case(PHASED, **PP),
        "pp2_waves_of_1_offload": case(PHASED | {"wave_tokens": 1, "offload": True}, **PP),
        "pp2_small_budget": case(PACKED, rows={"budget": 90}, **PP),
        "pp2_turns": case(PHASED, rows={"turns": True}, **PP),
        "pp2_tied": case(PHASED, model="qwen3_tied", **PP),
        "pp2_full": case(PHASED, recompute=FULL, **PP),
        "pp2_mla": case(PHASED, **YARN, **PP),
        "pp2_overlap": case(PHASED, **PP, **OVERLAP),
        "cp2_packed": case(PACKED, cp=2),
        "cp2_phased": case(PHASED, cp=2),
        "cp2_waves_of_1_offload": case(PHASED | {"wave_tokens": 1, "offload": True}, cp=2),
        "cp2_turns": case(PACKED, rows={"turns": True}, cp=2),
        "cp2_odd_turns": case(PHASED, rows={"turns": "odd"}, cp=2),
        "cp2_small_budget": case(PACKED | {"logits_chunk": 7}, rows={"budget": 90}, cp=2),
        "cp2_full": case(PHASED, recompute=FULL, cp=2),
        "cp2_selective": case(PHASED, recompute=SELECTIVE, cp=2),
        "cp2_tied": case(PHASED, model="qwen3_tied", cp=2),
        "cp2_window": case(PHASED, model="qwen2_window", cp=2),
        "cp2_sinks_of_zero": case(
            PHASED, model="qwen2", cp=2, override_transformer_config={"softmax_type": "off-by-one"}
        ),
        "cp2_moe": case(PHASED, model="qwen3_moe", cp=2),
        "cp2_moe_packed": case(PACKED, model="glm4_moe", cp=2),
        "cp2_mla_full": case(PACKED, **YARN, recompute=FULL, cp=2),
        "cp2_mla_selective": case(PHASED | {"offload": True}, **YARN, recompute=UP_PROJECTIONS, cp=2),
        "cp2_ep2": case(PHASED, model="qwen3_moe", ep=2, cp=2),
        "cp2_ep2_packed": case(PACKED, model="qwen3_moe", ep=2, cp=2),
        "cp2_ep2_mla": case(PHASED, **YARN, ep=2, cp=2),
        "cp2_plain_optimizer": case(PHASED, distributed_optimizer=False, cp=2),
        "cp2_overlap": case(PHASED, cp=2, **OVERLAP),
        # Of rows of odd lengths, which add up to even ones.
        "cp2_per_token": case(PHASED, cp=2, per_token=True, rows={"groups": [("a", 22, [9, 17, 5, 3], "")]}),
        "cp2_auto": case({"schedule": "auto"}, cp=2),
        "cp2_timed": case({"schedule": "auto", "min_speedup": 1.05}, cp=2),
        "ep2_auto": case({"schedule": "auto"}, model="qwen3_moe", ep=2),
        "pp2_auto": case({"schedule": "auto", "min_speedup": 1.0}, **PP),
        "pp2_rounds": case(PHASED | {"wave_tokens": 40}, rows={"budget": 60}, **PP),
    },
    4: {
        "dp2_tp2_sp": case(PHASED, **SP),
        "dp2_tp2_sp_exchange": case(EXCHANGE | PHASED, **SP),
        "tp2_sp_ep2": case(PHASED, model="qwen3_moe", ep=2, **SP),
        "tp2_sp_ep2_exchange": case(EXCHANGE, model="qwen3_moe", ep=2, **SP),
        "dp2_pp2_exchange": case(EXCHANGE | PHASED, **PP),
        "pp2_rank_of_empty_responses": case(PHASED, rows={"empty": ("e", PAD, "f")}, **PP),
        "tp2_sp_pp2": case(PHASED, **SP, **PP),
        "ep2_pp2": case(PHASED, model="qwen3_moe", ep=2, **PP),
        "ep2_pp2_rounds": case(PHASED | {"wave_tokens": 40}, rows={"budget": 60}, model="qwen3_moe", ep=2, **PP),
        "cp2_pp2": case(PHASED, cp=2, **PP),
        "cp2_pp2_packed": case(PACKED, model="qwen3_tied", cp=2, per_token=True, **PP),
        "cp2_tp2_sp": case(PHASED, cp=2, **SP),
        "cp2_tp2": case(PACKED, cp=2, tp=2),
        "cp2_tp2_sp_ep2_etp1": case(PHASED, model="qwen3_moe", ep=2, etp=1, cp=2, **SP),
        "cp2_dp2_exchange": case(EXCHANGE | PHASED, cp=2),
        "cp2_dp2_ep4_mla": case(EXCHANGE, **YARN, ep=4, cp=2),
        "cp4": case(PHASED, cp=4),
        "cp2_pp2_ep2_full": case(PHASED, model="qwen3_moe", ep=2, cp=2, recompute=FULL, **PP),
        "pp4": case(PHASED, model="qwen3_deep", pipeline_model_parallel_size=4),
        "tp2_sp_ep4_etp1_mla": case(PHASED, **YARN, ep=4, etp=1, recompute=FULL, **SP),
        "tp4_sp": case(PHASED, model="llama", tp=4, sp=True),
        "ep4": case(PHASED, model="qwen3_moe", ep=4),
        "tp4_sp_ep4_etp1": case(PHASED, model="qwen3_moe", tp=4, sp=True, ep=4, etp=1),
    },
}

# Left to make test-full: others have each of what these put together, in their layout or in another.
IN_PARTS = (
    (1, "turns_phased"), (1, "full_packed"), (1, "selective_packed"), (1, "mla_selective"), (1, "mla_full"),
    (1, "qwen3_deep_phased"), (2, "cp2_distilled"), (2, "tp2_distilled_only"), (2, "tp2_packed"), (2, "tp2_sp_offload"),
    (2, "tp2_sp_selective"), (2, "ep2_full"), (2, "ep2_turns"), (2, "ep2_overlap"), (2, "cp2_turns"), (2, "cp2_full"),
    (2, "cp2_selective"), (2, "cp2_tied"), (2, "cp2_moe"), (2, "cp2_ep2_packed"), (2, "cp2_per_token"), (2, "cp2_auto"),
    (4, "dp2_tp2_sp"), (4, "tp2_sp_ep2_exchange"), (4, "ep2_pp2_rounds"), (4, "cp2_tp2"),
    (1, "mla_turns"), (1, "llama_phased"), (1, "qwen2_phased"), (1, "experts_selective"), (1, "full_turns"),
    (1, "selective_phased"), (2, "tp2_phased"), (2, "tp2_sp_full"), (2, "tp2_sp_tied"), (2, "tp2_sp_chunks"),
    (2, "cp2_plain_optimizer"), (2, "cp2_overlap"), (2, "cp2_distilled_only"), (2, "cp2_mla_selective"),
    (2, "cp2_waves_of_1_offload"), (2, "cp2_small_budget"), (2, "cp2_window"), (2, "cp2_timed"), (2, "pp2_overlap"),
    (2, "pp2_small_budget"), (2, "pp2_mla"), (2, "pp2_auto"), (2, "ep2_mla"), (2, "ep2_auto"), (2, "dp2_exchange"),
    (2, "dp2_rank_of_empty_responses"), (2, "dp2_distilled_exchange"), (2, "tp2_sp_distilled"), (4, "cp2_pp2_packed"),
    (4, "dp2_pp2_exchange"), (4, "pp2_rank_of_empty_responses"),
)  # fmt: skip
# Of four ranks `make test-megatron` has these; the others are marked `more`.
ON_FOUR = ("dp2_tp2_sp_exchange", "tp2_sp_pp2", "cp2_pp2_ep2_full", "cp2_tp2_sp_ep2_etp1", "cp2_dp2_ep4_mla", "pp4")
# As in Table 3 of arXiv 2606.01143 up to TP 4, CP 2, EP 4 and PP 2: what four ranks have; and PP 4.
COMBINATIONS = {
    "TP 4": "tp4_sp", "CP 2": "cp2_phased", "EP 4": "ep4", "PP 2": "pp2_phased", "PP 4": "pp4",
    "TP 2, CP 2": "cp2_tp2_sp", "TP 2, EP 2": "tp2_sp_ep2", "TP 2, PP 2": "tp2_sp_pp2", "CP 2, EP 2": "cp2_ep2",
    "CP 2, PP 2": "cp2_pp2", "EP 2, PP 2": "ep2_pp2", "TP 4, EP 4": "tp4_sp_ep4_etp1",
    "TP 2, EP 4": "tp2_sp_ep4_etp1_mla", "CP 2, EP 4": "cp2_dp2_ep4_mla", "TP 2, CP 2, EP 2": "cp2_tp2_sp_ep2_etp1",
    "CP 2, EP 2, PP 2": "cp2_pp2_ep2_full",
}  # fmt: skip
# Of an update, over its size: fp32 rounds a step of 1e-5 of a weight of 0.1 by up to 4e-4 of that step.
OF_UPDATE = 1e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_megatron_model(folder / name, name) for name in MODELS}


# What follows runs on ranks.
TRUTHS: dict[str, dict] = {}


@contextlib.contextmanager
def _routed() -> Iterator[list[torch.Tensor]]:
    """Collects, at each step, tokens by expert [layers, experts], of which the routers' biases are made."""
    module, found = importlib.import_module("megatron.core.distributed.finalize_model_grads"), []
    update = module.get_updated_expert_bias

    def seen(tokens: torch.Tensor, *args: Any) -> torch.Tensor:
        found.append(tokens.clone())
        return update(tokens, *args)

    with mock.patch.object(module, "get_updated_expert_bias", seen):
        yield found


def _measure(built: Any, rows: dict[str, Any], ranks: tuple[int, ...] | None = None) -> dict[str, Any]:
    """`measure`, and what routers counted in its two steps."""
    with _routed() as routed:
        found = measure(built, rows, ranks)
    # Stages have different layers; mcore sums over ranks behind what is collected here.
    counts = routed[-2:] if built.engine_config.pipeline_model_parallel_size == 1 else []
    for count in counts:
        torch.distributed.all_reduce(count)
    return found | {"routed": counts}


def _stock(models: dict, name: str, rows: dict, layout: dict) -> dict:
    """What verl's own engine finds in this layout."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    if (key := repr((name, rows, layout))) not in TRUTHS:
        built = engine(MegatronEngineWithLMHead, models[name], model=name, **layout)
        TRUTHS[key] = together(built, _measure(built, rows))
    return TRUTHS[key]


def _whole(models: dict, name: str, rows: dict, layout: dict, num_ranks: int) -> dict:
    """What it finds of the rows of all data ranks, whole on every rank, and without recomputation."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    override = {k: v for k, v in layout.get("override_transformer_config", {}).items() if "recompute" not in k}
    if (key := repr((name, rows, override, num_ranks))) not in TRUTHS:
        built = engine(MegatronEngineWithLMHead, models[name], model=name, override_transformer_config=override)
        TRUTHS[key] = _measure(built, rows, tuple(range(num_ranks)))
    return TRUTHS[key]


def _data_ranks(world: int, which: str) -> int:
    layout = CASES[world][which][-1]
    return world // math.prod(layout.get(name, 1) for name in ("tp", "cp", "pipeline_model_parallel_size"))


def _written(models: dict, world: int, which: str) -> str:
    """On one rank, `_whole` for a case of `world` ranks: the file that has it."""
    name, _, rows, layout = CASES[world][which]
    found = _whole(models, name, rows, layout, _data_ranks(world, which))
    path = Path(models[name]).parent / f"{world}-{which}.pt"
    torch.save({key: x for key, x in found.items() if key != "metrics"}, path)
    return str(path)


def _ours(models: dict, name: str, prefix: dict, rows: dict, layout: dict) -> dict:
    from verl_prefix.backends.megatron import PrefixMegatronEngine

    options = {"verify": "off"} | prefix
    built = engine(PrefixMegatronEngine, models[name], model=name, prefix=options, **layout)
    found = _measure(built, rows)
    is_topk = "distillation" in rows and "loss_mode" not in rows["distillation"]
    assert built._distillation_use_topk_active == is_topk, "verl's optimizer_step reads it behind an update"
    return together(built, found)


def _update_error(path: str, found: dict, truth: dict) -> float:
    """How far two steps' update is off, over the size of it; all weights as one vector."""
    first = load_file(Path(path, "model.safetensors"))
    off, moved = [], []
    for name, x in truth["params"].items():
        off.append((found["params"][name] - x).flatten())
        moved.append((x - first[name]).flatten())
    return (torch.cat(off).norm() / torch.cat(moved).norm()).item()


def _case(models: dict, which: str, written: str) -> dict[str, dict[str, float]]:
    name, prefix, rows, layout = CASES[get_world_size()][which]
    ours = _ours(models, name, prefix, rows, layout)
    stock = _stock(models, name, rows, layout)
    assert set(stock["metrics"]) <= set(ours["metrics"]) and ours["log_probs"].dtype == stock["log_probs"].dtype
    assert "distillation" not in rows or ours["metrics"]["prefix/tokens_saved"][0] > 0
    assert "dead" not in rows or ours["metrics"]["prefix/zero_advantage_rows"][0] > 0
    whole = torch.load(written)
    if layout.get("tp", 1) == 1 and not rows.get("empty"):
        padded = layout.get("cp", 1) > 1  # stock counts padding of rows to ranks of TP and CP, too
        counts = whole["routed"] if padded else stock["routed"]
        assert len(ours["routed"]) == len(stock["routed"])
        for a, b in zip(ours["routed"], counts[: len(ours["routed"])], strict=True):
            assert torch.equal(a, b) and b.sum() > 0
    return {
        arm: errors_of(ours, truth) | {"update": _update_error(models[name], ours, truth)}
        for arm, truth in (("megatron", stock), ("one rank", whole))
    }


@pytest.fixture(scope="module")
def table():
    """Rows of the table of errors; written as Markdown to the file that VERL_PREFIX_MEGATRON names."""
    found = []
    yield found
    if out := os.environ.get("VERL_PREFIX_MEGATRON"):
        titles = "ranks", "case", "log-probs, same layout", "gradients", "log-probs, one rank", "gradients"
        of_case = {which: updates for _, which, *_, updates in found}
        updates = [(name, f"`{which}`", *of_case[which]) for name, which in COMBINATIONS.items() if which in of_case]
        versions = package_versions(("verl", "megatron-core", "mbridge", "torch", "transformers"))
        Path(out).write_text(
            "# `model_engine=prefix_megatron` against verl's own Megatron engine, in its layout and on one rank\n\n"
            "Written by `make -C examples/results megatron` (tests/backends/test_megatron.py), in fp32 on gloo ranks\n"
            "of a CPU, with tiny models, the local layer spec and stand-ins of CUDA and TransformerEngine:\n"
            "the largest error of any rank over the largest value, of log-probs and of the gradient of any parameter.\n"
            "The tolerance is 5e-6, of weights after two steps with Adam, too. tpN, epN, etpN, cpN, dpN: ranks of\n"
            "tensor, expert, expert tensor, context and data parallelism, ppN: N stages; sp: ranks of tp share tokens\n"
            "of a row.\n\n"
            f"{', '.join(f'{name} {version}' for name, version in versions.items())}.\n\n"
            + _markdown(titles, [row[:-1] for row in found])
            + "\n## Updates by combination\n\n"
            "Table 3 of schedule-level reuse (arXiv 2606.01143) compares optimizer updates of Llama3-8B and of a\n"
            "Qwen3 mixture in combinations of up to TP 4, CP 2, EP 4 and PP 2 with a dense baseline. We have none of\n"
            "its figures. Ours say how far the update of two steps is off, over its own size, of tiny models; the\n"
            "tolerance is 1e-3. fp32 rounds a step of 1e-5 of a weight of 0.1 by up to 4e-4 of that step.\n\n"
            + _markdown(("combination", "case", "update, same layout", "update, one rank"), updates)
            + "\nNot run, since they want eight ranks or more: TP 4 with CP 2 or PP 2; EP 4 with PP 2; TP 2, CP 2 and\n"
            "PP 2 together; whatever has one of these in it.\n"
        )


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [[f"{x:.1e}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, ["---"] * len(titles), *cells))


def _mark(world: int, which: str) -> tuple | pytest.MarkDecorator:
    if (world, which) in IN_PARTS:
        return pytest.mark.full
    return pytest.mark.more if world == 4 and which not in ON_FOUR else ()


@pytest.mark.parametrize(
    ("world", "which"),
    [pytest.param(world, which, marks=_mark(world, which)) for world, cases in CASES.items() for which in cases],
)
def test_ours_is_megatrons_and_one_ranks(models, ranks, world, which, table):
    (written,) = ranks(1, models)(_written, world, which)
    of_ranks = ranks(world, models)(_case, which, written)

    def worst(arm: str, kind: str) -> float:
        return max(error for found in of_ranks for name, error in found[arm].items() if name.startswith(kind))

    arms = ("megatron", "one rank")
    shown = (worst(arm, kind) for arm in arms for kind in ("log_probs", "gradient"))
    table.append((world, which, *shown, [worst(arm, "update") for arm in arms]))
    for found in of_ranks:
        for arm, errors in found.items():
            assert errors["update"] < OF_UPDATE, (arm, errors["update"])
            rest = {name: error for name, error in errors.items() if name != "update"}
            assert max(rest.values()) < TOLERANCE, (arm, max(rest, key=rest.__getitem__), max(rest.values()))


def _rounds(models: dict, which: str) -> float:
    """How often a step's stages drain and fill."""
    from verl_prefix.backends.pipeline import PipelineRunner

    run, count = PipelineRunner._run_1f1b, []
    with pytest.MonkeyPatch.context() as patch:
        counted = lambda self, *args: (count.append(self.backward), run(self, *args))  # noqa: E731
        patch.setattr(PipelineRunner, "_run_1f1b", counted)
        name, prefix, rows, layout = CASES[get_world_size()][which]
        _ours(models, name, prefix, rows, layout)
    return sum(backward is not None for backward in count) / 2


@pytest.mark.parametrize(("world", "which", "wanted"), [(2, "pp2_phased", 1), (2, "pp2_rounds", 2)])
def test_prefixes_that_do_not_live_at_once_follow_each_other(models, ranks, world, which, wanted):
    assert ranks(world, models)(_rounds, which) == [wanted] * world


@pytest.mark.parametrize(
    ("learns", "fields"),
    [
        (False, {}),
        (False, {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0}),  # mbridge's GLM-4.5
        (True, {"moe_router_enable_expert_bias": True}),
        (True, {"moe_aux_loss_coeff": 0.1}),
        (False, {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"}),
        (False, {"moe_aux_loss_coeff": [0.0], "moe_router_load_balancing_type": ["aux_loss"]}),
        (True, {"moe_aux_loss_coeff": [0.0, 0.1], "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"]}),
    ],
)
def test_last_tokens_are_counted_where_routers_learn_from_them(learns, fields):
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "moe_router_score_function": "sigmoid"}
    for num_experts in (None, 4):
        config = TransformerConfig(**sizes, num_moe_experts=num_experts, **fields)
        assert mcore.counts_tokens(mock.Mock(spec=["config"], config=config)) is (learns and num_experts is not None)


def _counted_in_bf16(models: dict) -> list[torch.Tensor]:
    rows = {"groups": [("a", 301, [8] * 16, "whole"), ("b", 250, [8] * 16, "whole")], "budget": 4000}
    waves = PHASED | {"wave_tokens": 8}
    return _ours(models, "deepseek_v3", waves, rows, {"dtype": "bfloat16"})["routed"]


def test_small_waves_are_counted_where_routers_count_in_bf16(models, ranks):
    """mcore's Float16Module makes the routers' buffer bf16, in which 2 tokens more of 1,000 are none."""
    for counts in ranks(1, models)(_counted_in_bf16)[0]:
        assert counts.dtype == torch.bfloat16
        sums = counts.double().sum(1)
        wanted = sums.new_tensor(32 * 8 + 16 * (301 + 250)) * 2  # experts of a token
        assert ((sums - wanted).abs() <= wanted * 2**-9).all(), sums  # each expert's count is rounded once


# Losses for balance, over tokens, and over rows, of which a packed row is one in stock, too.
BALANCED = {
    name: {"moe_router_load_balancing_type": name, "moe_aux_loss_coeff": 0.1} for name in ("aux_loss", "seq_aux_loss")
}


def _balanced(models: dict, name: str, layout: str, once: bool, verify: str = "off", dummies: int = 0) -> float:
    """Error of gradients with a loss for balance, of all rows in one pass; once: a prefix counts once in it. dummies:
    of passes that other ranks would have."""
    from verl_prefix.engine import shared_passes

    sizes = {"ep": 2, "cp": 2} if layout == "cp2_ep2" else {"ep": get_world_size()}
    sizes = {"pipeline_model_parallel_size": 2} if layout == "pp2" else sizes
    pad = shared_passes.pad_to_same_passes

    def padded(*args):
        plan = pad(*args)
        return dataclasses.replace(plan, passes=(*plan.passes, *[PackedPass()] * dummies))

    args = "qwen3_moe", {"budget": 4000}, sizes | {"override_transformer_config": BALANCED[name]}
    # Of stock, too, under context parallelism, the loss counts padding of rows.
    stock = _whole(models, *args, num_ranks=1) if "cp" in sizes else _stock(models, *args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_passes, "pad_to_same_passes", padded)
        if once:
            prefix_counted_once(patch)
        ours = _ours(models, args[0], PACKED | {"verify": verify}, *args[1:])
    return max(error for name, error in errors_of(ours, stock).items() if name.startswith("gradient"))


@pytest.mark.parametrize("name", BALANCED)
@pytest.mark.parametrize("layout", ["ep1", "ep2", "cp2_ep2"])
def test_a_loss_for_balance_counts_a_prefix_as_often_as_stock_does(models, ranks, layout, name):
    world = int(layout[-1])
    assert max(ranks(world, models)(_balanced, name, layout, False)) < TOLERANCE
    assert min(ranks(world, models)(_balanced, name, layout, True)) > 100 * TOLERANCE


@pytest.mark.parametrize("layout", ["ep1", "pp2"])
def test_a_loss_for_balance_is_the_mean_over_the_passes_that_this_rank_has(models, ranks, layout):
    assert max(ranks(int(layout[-1]), models)(_balanced, "aux_loss", layout, False, "off", 3)) < TOLERANCE


def test_the_self_check_is_of_no_loss_for_balance(models, ranks):
    """Its passes hold other rows than stock's, and the loss follows them."""
    assert max(ranks(2, models)(_balanced, "aux_loss", "ep2", False, "first_step")) < TOLERANCE


def _half(models: dict, which: str) -> dict[str, dict[str, float]]:
    """What verl's own bf16 misses of float64, and what ours does."""
    import megatron_cpu
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    name, prefix, rows, layout = CASES[get_world_size()][which]
    double = {"dtype": "float64", "override_ddp_config": {"grad_reduce_in_fp32": False}}
    with megatron_cpu.in_float64():
        routers = {"override_transformer_config": {"moe_router_dtype": "fp64"}}
        whole = engine(MegatronEngineWithLMHead, models[name], model=name, **routers, **double)
        truth = measure(whole, rows, (0,))  # of one data rank
    half = layout | {"dtype": "bfloat16"}
    found = {"ours": _ours(models, name, prefix, rows, half), "stock": _stock(models, name, rows, half)}
    return {arm: _half_errors(one, truth) for arm, one in found.items()}


@pytest.mark.parametrize(
    ("world", "which"),
    [
        (1, "packed"),
        (1, "phased"),
        (1, "mla_full"),
        (2, "tp2_sp_full"),
        (2, "tp2_sp_mla"),
        (2, "cp2_full"),
        (2, "cp2_mla_full"),
    ],
)
def test_bf16_misses_float64_by_no_more_than_megatrons_does(models, ranks, world, which):
    for found in ranks(world, models)(_half, which):
        for key, error in found["ours"].items():
            assert error <= 1.3 * found["stock"][key], (key, error, found["stock"][key])


def _checked(models: dict, which: str, dtype: str) -> dict[str, float]:
    name, prefix, rows, layout = CASES[get_world_size()][which]
    found = _ours(models, name, prefix | {"verify": "first_step"}, rows, layout | {"dtype": dtype})
    if dtype == "float32":  # what the check runs is not of the step
        assert max(errors_of(found, _stock(models, name, rows, layout)).values()) < TOLERANCE
    return {key: value[0] for key, value in found["metrics"].items() if "verify" in key}


CHECKED = ["dp2_phased", "tp2_sp_full", "ep2_phased", "ep2_mla", "tp2_sp_mla", "pp2_mla"]
CHECKED += ["cp2_full", "cp2_ep2_mla", "cp2_overlap", "cp2_plain_optimizer", "cp2_per_token"]


@pytest.mark.parametrize(
    ("which", "dtype"),
    [
        *(pytest.param(which, "float32", marks=pytest.mark.full if i % 2 else ()) for i, which in enumerate(CHECKED)),
        *(pytest.param(which, "bfloat16", marks=() if i % 2 else pytest.mark.full) for i, which in enumerate(CHECKED)),
    ],
)
def test_the_self_check_compares_with_megatrons_path(models, ranks, which, dtype):
    for found in ranks(2, models)(_checked, which, dtype):
        log_probs, attention = found["prefix/verify_log_probs"], found["prefix/verify_attention"]
        # Of so few tokens in bf16 outputs can be equal to the bit; gradients of weights are not.
        assert log_probs <= 3 and attention <= 2 and (dtype == "bfloat16" or min(log_probs, attention) > 0)
        assert 0 < found["prefix/verify_gradients"] <= 8


def gradients_of_waves_lost(patch):
    broken_states.gradients_of_keys_dropped_in_phased(patch)


def positions_restarted(patch):
    """Suffixes begin at 0 again."""
    from verl_prefix.models.mcore import MegatronModel

    begin = MegatronModel._begin

    def restarted(self, forward_context, position_ids):
        strands = forward_context.packed_row.num_strand_tokens
        lens = [
            segment.length for segment in forward_context.packed_row.segments[forward_context.packed_row.num_strands :]
        ]
        own = torch.cat([torch.arange(n) for n in lens] or [torch.arange(0)])
        return begin(self, forward_context, torch.cat([position_ids[:strands], own]))

    patch.setattr(MegatronModel, "_begin", restarted)


def heads_of_another_rank(patch):
    from megatron.core import parallel_state

    from verl_prefix.models.mcore import MegatronModel

    attend = MegatronModel._attend

    def others(self, *args, **kwargs):
        found, group = attend(self, *args, **kwargs), parallel_state.get_tensor_model_parallel_group()
        every = [torch.empty_like(found) for _ in range(group.size())]
        torch.distributed.all_gather(every, found.detach().contiguous(), group=group)
        return found + (every[1 - group.rank()] - found).detach()

    patch.setattr(MegatronModel, "_attend", others)


def heads_of_another_context_rank(patch):
    from verl_prefix.core.sequence_parallel import Shards

    to_tokens = Shards.to_tokens

    def others(self, out):
        every = [torch.empty_like(out) for _ in range(self.size)]
        torch.distributed.all_gather(every, out.detach().contiguous(), group=self.group)
        return to_tokens(self, out + (every[1 - self.rank] - out).detach())

    patch.setattr(Shards, "to_tokens", others)


def gathered_gradients_multiplied_twice(patch):
    from verl_prefix.core import sequence_parallel

    backward = sequence_parallel._Gather.backward

    def twice(ctx, grad):
        own, none = backward(ctx, grad)
        return own * torch.distributed.get_world_size(ctx.group), none

    patch.setattr(sequence_parallel._Gather, "backward", staticmethod(twice))


def gradients_finalized_twice(patch):
    from verl_prefix.backends.megatron import MegatronRunner

    run = MegatronRunner.run

    def twice(self, *args):
        run(self, *args)
        if self.backward is not None:
            from verl_prefix.models.mcore import unwrapped

            unwrapped(self.module).config.finalize_model_grads_func([self.module], None)

    patch.setattr(MegatronRunner, "run", twice)


def prefix_counted_once(patch):
    def once(layout, shards):
        counts = torch.ones(layout.num_tokens, dtype=torch.int64)
        return counts if shards is None else shards.local(counts)

    patch.setattr(mcore, "multiplicity", once)


def _broken(models: dict, which: str, sabotage: Callable) -> float:
    name, prefix, rows, layout = CASES[get_world_size()][which]
    stock = _stock(models, name, rows, layout)
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch)
        with pytest.raises(RuntimeError, match="prefix.verify, update 1: "):
            _ours(models, name, prefix | {"verify": "first_step"}, rows, layout)
        ours = _ours(models, name, prefix, rows, layout)
    return max(errors_of(ours, stock).values())


@pytest.mark.parametrize(
    ("which", "sabotage"),
    [
        ("tp2_sp_phased", gradients_of_waves_lost), ("tp2_sp_full", gradients_of_waves_lost),
        ("tp2_sp_phased", positions_restarted), ("tp2_sp_mla", positions_restarted),
        ("ep2_packed", positions_restarted), ("tp2_sp_phased", heads_of_another_rank),
        ("tp2_sp_packed", gradients_finalized_twice),
        ("cp2_packed", heads_of_another_context_rank), ("cp2_phased", gathered_gradients_multiplied_twice),
        ("cp2_ep2", gradients_of_waves_lost),
        ("dp2_phased", gradients_finalized_twice), ("pp2_phased", gradients_of_waves_lost),
    ],
)  # fmt: skip
def test_what_is_broken_on_purpose_is_far_off_and_stops_step_1(models, ranks, which, sabotage):
    assert all(error > 100 * TOLERANCE for error in ranks(2, models)(_broken, which, sabotage))


def _update_without_waves(models: dict, which: str) -> float:
    name, prefix, rows, layout = CASES[get_world_size()][which]
    with pytest.MonkeyPatch.context() as patch:
        gradients_of_waves_lost(patch)
        ours = _ours(models, name, prefix, rows, layout)
    return _update_error(models[name], ours, _stock(models, name, rows, layout))


def test_an_update_without_gradients_of_waves_is_far_off(models, ranks):
    assert min(ranks(2, models)(_update_without_waves, "pp2_phased")) > 100 * OF_UPDATE


def _counted_once(models: dict) -> float:
    name, prefix, rows, layout = CASES[1]["mla_packed"]
    stock = _stock(models, name, rows, layout)
    with pytest.MonkeyPatch.context() as patch:
        prefix_counted_once(patch)
        ours = _ours(models, name, prefix, rows, layout)
    a, b = ours["routed"][0], stock["routed"][0]
    return ((a - b).abs().max() / b.max()).item()


def test_a_prefix_that_routers_count_once_is_far_off(models, ranks):
    """The self-check does not see it: it compares gradients, and the routers' biases move behind them."""
    assert ranks(1, models)(_counted_once)[0] > 100 * TOLERANCE
