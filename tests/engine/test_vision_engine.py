"""GRPO batches with images and video through PrefixFSDPEngine, against verl's stock fsdp2 engine on the same rows.

Tiny random Qwen2.5-VL, Qwen3-VL (deepstack) and Qwen3.5 (recurrent), pixels and grids made by hand, positions by the
model's own
`get_rope_index`, in the form that verl's agent loop gives them. 1 and 2 gloo ranks, fp32. Does not exercise a
processor, a rollout or CUDA.
"""

import os
from unittest import mock

import pytest
import torch
from engines import TOLERANCE, _compare, _engine, _half_errors
from float64_torch import Float64Torch
from shared_models import OURS, SharedModels
from short_chunks import short_chunks
from vision_engines import BATCHES, _measure

from verl_prefix.testing import write_tiny_model

CASES = {
    "gate_open": {"min_speedup": 1e-6},
    "packed": {"schedule": "packed"},
    "phased": {"schedule": "phased"},
    "phased_row_by_row": {"schedule": "phased", "wave_tokens": 1, "budget": 60},
    "small_budget": {"budget": 70},
    "groups_cut": {"schedule": "packed", "budget": 40},
    "offload": {"schedule": "phased", "wave_tokens": 20, "offload": True},
    "checkpointed": {"schedule": "phased", "wave_tokens": 20, "gradient_checkpointing": True},
    "frozen_tower": {"frozen_tower": True, "schedule": "phased", "wave_tokens": 20},
    # Rank 1 has text alone, whose waves must still run the backward that those of rank 0 run.
    "tower_alone": {"trained": "visual", "batch": "text_rank", "schedule": "phased", "wave_tokens": 20},
    "tower_and_upper_layer": {"trained": r"visual|layers\.1\.", "schedule": "phased", "wave_tokens": 20},
    "lora_on_text": {"lora_targets": r".*language_model.*\.(q|k|v|o)_proj", "schedule": "phased"},
    "padded": {"padded": True},
    "scattered": {"batch": "scattered", "schedule": "packed", "exchange": "auto"},
    "text_rank": {"batch": "text_rank"},
    "text_rank_phased": {"batch": "text_rank", "schedule": "phased", "wave_tokens": 20},
}
# What a recurrent model adds: states beside pixels. Other engine cases of it are in test_recurrent_engine.
FAMILIES = {
    "qwen2_5_vl": tuple(CASES),
    "qwen3_vl": tuple(CASES),
    "qwen3_5": ("packed", "phased", "phased_row_by_row", "checkpointed", "scattered", "text_rank"),
}


@short_chunks()
def _worker(rank: int, world: int, rendezvous: str, paths: dict, out: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), VERL_PLATFORM="cpu")
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    import verl  # noqa: F401  # first: it imports its plugin, ours
    from transformers.modeling_outputs import BaseModelOutputWithPooling
    from transformers.models.qwen3_5 import modeling_qwen3_5

    from verl_prefix.engine import rows as engine_rows

    # verl 0.9.1's Qwen2.5-VL takes the tower's output for a tensor where a micro-batch has no pixels.
    BaseModelOutputWithPooling.mean = lambda output: output.pooler_output.mean()
    results, make = {}, SharedModels(_engine)
    # HF's own recurrence is up to 1.5e-5 from float64 in fp32; here both engines compute it in float64.
    modeling_qwen3_5.torch = Float64Torch()
    for family, path in paths.items():
        # Under remove-padding verl's Qwen2.5-VL needs flash attention, and Qwen3.5's state leaks into the next row:
        # padding is the only stock path on a CPU.
        default = {"use_remove_padding": family == "qwen3_vl"}
        stock = {}

        def truth(options, stock=stock, path=path):
            options = {k: v for k, v in options.items() if k not in (*OURS, "budget")}  # one micro-batch
            key = repr(sorted(options.items()))
            if key not in stock:
                stock[key] = _measure("fsdp2", path, rank, options)
            return stock[key]

        with mock.patch(f"{__name__}._engine", make):
            for name in FAMILIES[family]:
                options = CASES[name]
                # The self-check of every case of text is engines's; here where ranks must agree.
                if name not in ("packed", "phased", "scattered", "text_rank", "tower_and_upper_layer"):
                    options = {"verify": "off"} | options
                ours = _measure("prefix", path, rank, default | options)
                found = truth(default | options)
                results[family, name] = _compare(ours, found)
                results[family, name]["tower"] = {
                    "ours": (ours["inferred"], ours["updated"]), "stock": (found["inferred"], found["updated"])
                }  # fmt: skip
        # Rows with the same tokens share the first one's picture.
        with mock.patch.object(engine_rows, "share_pixels", lambda rows: [b""] * len(rows)):
            results[family, "others' pixels"] = _compare(
                _measure("prefix", path, rank, default | {"verify": "off"}), truth(default)
            )
        if world == 1:
            # Ratios far from where the loss clips: a token that rounding sends over that edge is an error of its own.
            first = default | {"on_policy": True}
            half = first | {"param_dtype": "bf16", "schedule": "phased", "wave_tokens": 20}
            pair = [_measure(backend, path, rank, half) for backend in ("prefix", "fsdp2")]
            results[family, "bf16"] = [_half_errors(found, truth(first)) for found in pair]
        # Last, because verl changes classes for good: ours undoes that where it needs to.
        patched = _measure("prefix", path, rank, default | {"use_remove_padding": True, "verify": "off"})
        results[family, "attention that verl replaced"] = _compare(patched, truth(default))
    torch.save(results, f"{out}.{rank}")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def results(request, tmp_path_factory, spawn):
    tmp, world = tmp_path_factory.mktemp("vision"), request.param
    paths = {family: write_tiny_model(tmp / family, family=family) for family in FAMILIES}
    spawn(_worker, args=(world, str(tmp / "rendezvous"), paths, str(tmp / "out")), nprocs=world)
    return [torch.load(f"{tmp / 'out'}.{rank}") for rank in range(world)]


@pytest.mark.parametrize(("family", "case"), [(family, case) for family in FAMILIES for case in FAMILIES[family]])
def test_engine_computes_what_the_stock_engine_computes(results, family, case):
    for rank, result in enumerate(results):
        worst = {name: error for name, error in result[family, case]["errors"].items() if not error <= TOLERANCE}
        assert not worst, f"rank {rank}: relative errors over {TOLERANCE}: {worst}"


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_misses_fp32_by_no_more_than_stock_does(results, family):
    if len(results) == 2:
        pytest.skip("once")
    ours, stock = results[0][family, "bf16"]
    for name in ours:
        assert ours[name] <= 1.3 * stock[name], name


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_go_through_our_attention_where_verl_replaced_theirs(results, family):
    # A layer that bypasses ours would end the pass (`HookedModel.token_outputs` counts them).
    for result in results:
        assert max(result[family, "attention that verl replaced"]["errors"].values()) <= TOLERANCE


def _patches(rank: int, batch: str, repeated: bool) -> int:
    """Patches of a rank's rows, or of its groups; on rank 0 one row of `image` has another picture."""
    total = 0
    for parts, lens, uid in BATCHES[batch][rank]:
        of_prompt = sum(torch.Size(part).numel() for part in parts if isinstance(part, tuple))
        total += of_prompt * (len(lens) if repeated else 1 + (rank == 0 and uid == "image"))
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_sees_a_groups_pixels_once(results, family):
    for rank, result in enumerate(results):
        for case in ("packed", "phased", "checkpointed", "frozen_tower", "text_rank", "text_rank_phased"):
            if case not in FAMILIES[family]:
                continue
            batch = CASES[case].get("batch", "mixed")
            distinct, of_rows = (_patches(rank, batch, repeated) or 16 for repeated in (False, True))  # 16: a dummy
            counts = result[family, case]["tower"]
            for pass_, stock in zip(counts["ours"], counts["stock"], strict=True):
                assert (pass_["calls"], pass_["patches"]) == (1, distinct)
                assert stock["patches"] == of_rows
            assert counts["ours"][1]["backwards"] == (0 if case == "frozen_tower" else 1)
        # Several phases A, one forward and backward of the tower in each, the same on every rank.
        counts = result[family, "phased_row_by_row"]["tower"]["ours"][1]
        assert (
            counts["calls"]
            == counts["backwards"]
            == results[0][family, "phased_row_by_row"]["tower"]["ours"][1]["calls"]
            > 1
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_scattered_rows_meet_where_their_pixels_are(results, family):
    """Of a picture or clip that both ranks have, one tower computes it."""
    if len(results) == 1:
        return
    seen = [result[family, "scattered"]["tower"] for result in results]
    for ours in zip(*(one["ours"] for one in seen), strict=True):
        assert sum(one["patches"] for one in ours) == _patches(0, "scattered", repeated=False)
    assert results[0][family, "scattered"]["metrics"]["prefix/exchanged_rows"][0] >= 4


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_other_pixels_do_not_share(results, family):
    metrics = results[0][family, "packed"]["metrics"]
    # Of all ranks: the second has three groups and a row by itself.
    counts = [metrics[f"prefix/{name}"] for name in ("groups", "stock_rows")]
    assert counts == ([[4.0], [1.0]] if len(results) == 1 else [[7.0], [2.0]])
    assert metrics["prefix/split_uids"] == [1.0]
    assert metrics["prefix/verify_log_probs"][0] < 3 and 0 < metrics["prefix/verify_attention"][0] < 2
    # No rank may be alone in verl's forward, which the self-check compares with; of text alone it runs the tower once.
    if len(results) == 2:
        checked = ["prefix/verify_log_probs" in r[family, "text_rank"]["metrics"] for r in results]
        assert checked == [family != "qwen2_5_vl"] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_another_rows_pixels_are_far_off(results, family):
    assert max(results[0][family, "others' pixels"]["errors"].values()) > 100 * TOLERANCE
