"""GRPO batches with images and video through PrefixFSDPEngine, against verl's stock fsdp2 engine on the same rows.

Tiny random Qwen2.5-VL, Qwen3-VL (deepstack), Qwen3.5 (recurrent), the last two also of experts, GLM-4.1V, GLM-4.5V and
GLM-4.6V; pixels and grids made by hand, positions by the model's own `get_rope_index`, in the form that verl's agent
loop gives them. 1 and 2 gloo ranks, fp32. Does not exercise a processor, a rollout or CUDA.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import engines
import pytest
import torch
from engines import TOLERANCE, _compare, _half_errors
from float64_torch import Float64Torch
from shared_models import OURS, SharedModels
from short_chunks import short_chunks
from torch.distributed import get_rank
from transformers import AutoConfig, AutoModelForImageTextToText
from verl.utils import tensordict_utils as tu
from vision_engines import BATCHES, _batch, _measure

from verl_prefix.backends.stock_path import why_wrong_when_sharded
from verl_prefix.models.vision import UNPATCHED
from verl_prefix.testing import write_tiny_model

DEAD = {"skip_zero_advantage": True, "entropy_coeff": 0.0}
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
    "turns": {"turns": True, "schedule": "packed"},
    "turns_phased": {"turns": True, "schedule": "phased", "wave_tokens": 20},
    "turns_scattered": {"turns": True, "scattered": True, "schedule": "phased", "exchange": "auto"},
    "text_rank": {"batch": "text_rank"},
    "text_rank_phased": {"batch": "text_rank", "schedule": "phased", "wave_tokens": 20},
    # verl#7475: text alone on every rank, in several passes between two synchronisations of gradients.
    "text_alone": {"batch": "text", "schedule": "phased", "wave_tokens": 8, "use_no_sync": True},
    "text_alone_sync_every_pass": {"batch": "text", "schedule": "phased", "wave_tokens": 8, "use_no_sync": False},
    # EasyR1#11012: seven rows on a rank, one on the other.
    "one_text_row": {"batch": "one_text_row", "schedule": "phased", "wave_tokens": 8},
    "one_text_row_travels": {"batch": "one_text_row", "exchange": "auto"},
    "dead": DEAD | {"schedule": "packed", "dead": 2},
    "dead_rank_phased": DEAD | {"schedule": "phased", "dead": ("video", "both", "other text", "one")},
}
# Whose options test_engine_equivalence.py has with text, or test_frozen.py of one process: left to test-more.
AS_WITH_TEXT = (
    "phased_row_by_row", "small_budget", "groups_cut", "offload", "lora_on_text", "padded", "turns",
    "text_alone_sync_every_pass", "turns_scattered", "tower_and_upper_layer", "gate_open", "text_rank", "tower_alone",
    "one_text_row", "scattered", "dead",
)  # fmt: skip
# On one rank in make test, on two in test-more, as is every family but one: nothing there differs between ranks.
ALONE = ("checkpointed", "frozen_tower", "turns_phased", "text_alone")
# What a model of experts or of recurrent layers adds. Other engine cases of it are in test_recurrent_engine.
FEW = (
    "packed", "phased", "phased_row_by_row", "checkpointed", "scattered", "text_rank", "turns", "turns_phased",
)  # fmt: skip
FAMILIES = {
    "qwen2_5_vl": tuple(CASES),
    "qwen3_vl": tuple(CASES),
    "qwen3_vl_moe": FEW,
    "qwen3_5": FEW,
    "qwen3_5_moe": FEW,
    "glm4v": tuple(CASES),
    "glm4v_moe": FEW,
    "glm46v": FEW,
}


# What follows runs on ranks, which are given the models' paths first; engines share what takes longest to build.
STOCK, SHARED = {}, SharedModels(engines._engine)


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    import verl  # noqa: F401  # first: it imports its plugin, ours
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

    with (
        short_chunks(),
        # HF's own recurrence is up to 1.5e-5 from float64 in fp32; here both engines compute it in float64.
        mock.patch.object(modeling_qwen3_5, "torch", Float64Torch()),
        mock.patch.object(modeling_qwen3_5_moe, "torch", Float64Torch()),
    ):
        yield


def _default(family: str) -> dict:
    """Stock's only path on a CPU is padding where, without it, verl's Qwen2.5-VL needs flash attention and Qwen3.5's
    state leaks into the next row."""
    return {"use_remove_padding": family.startswith("qwen3_vl")}


def _truth(path: str, options: dict) -> dict:
    options = {k: v for k, v in options.items() if k not in (*OURS, "budget")}  # one micro-batch
    if (key := repr((path, sorted(options.items())))) not in STOCK:
        STOCK[key] = _measure("fsdp2", path, get_rank(), options)
    return STOCK[key]


def _case(paths: dict, family: str, name: str) -> dict:
    options = _default(family) | CASES[name]
    # The self-check of every case of text is test_engine_equivalence's; here where ranks must agree.
    checked = name in ("packed", "phased", "scattered", "text_rank", "tower_and_upper_layer", "one_text_row")
    with _prepared(), mock.patch("engines._engine", SHARED):
        ours = _measure("prefix", paths[family], get_rank(), options if checked else {"verify": "off"} | options)
        found = _truth(paths[family], options)
    tower = {"ours": (ours["inferred"], ours["updated"]), "stock": (found["inferred"], found["updated"])}
    return _compare(ours, found) | {"tower": tower}


def _others_pixels(paths: dict, family: str) -> dict:
    """Rows with the same tokens share the first one's picture."""
    from verl_prefix.engine import rows as engine_rows

    options = _default(family)
    with _prepared():
        with mock.patch.object(engine_rows, "pixel_digests", lambda rows: [b""] * len(rows)):
            ours = _measure("prefix", paths[family], get_rank(), options | {"verify": "off"})
        return _compare(ours, _truth(paths[family], options))


def _bf16(paths: dict, family: str) -> list[dict]:
    """Ratios far from where the loss clips, and every token to every expert: where rounding decides between two values
    that are no neighbours, that is an error of its own."""
    first = _default(family) | {"on_policy": True}
    half = first | {"param_dtype": "bf16", "schedule": "phased", "wave_tokens": 20}
    path = paths[f"{family}_all" if family.endswith("moe") else family]
    with _prepared():
        pair = [_measure(backend, path, get_rank(), half) for backend in ("prefix", "fsdp2")]
        return [_half_errors(found, _truth(path, first)) for found in pair]


def _sampled(paths: dict, uids: tuple[str, ...], schedule: str) -> dict:
    """Errors where responses of `uids` have an image's token, which no pixels stand behind. verl's own path ends there.
    So it has another token that the model cannot tell from that one, and whose rows of weights are compared with its.
    """
    path, twin = paths["twins"], 1
    token = AutoConfig.from_pretrained(path).image_token_id
    options = _default("qwen3_vl") | {"sampled_by": uids, "schedule": schedule}
    with _prepared():
        if torch.distributed.get_world_size() == 1:  # a rank that has no such row would wait
            with pytest.raises(ValueError, match="features and image tokens do not match"):
                _measure("fsdp2", path, get_rank(), options | {"sampled": token})
        ours = _measure("prefix", path, get_rank(), options | {"sampled": token})
        stock = _measure("fsdp2", path, get_rank(), options | {"sampled": twin})
    for name in ("lm_head.weight", "model.language_model.embed_tokens.weight"):
        for found in (stock["grads"][name], stock["params"][name]):
            found[[token, twin]] = found[[twin, token]]
    return _compare(ours, stock)


def _pictures_in_responses(paths: dict) -> str:
    """What log-probs say of rows that show twice as much as their prompts have tokens for, on rank 0."""
    options = _default("qwen3_vl") | {"schedule": "packed"}
    with _prepared():
        engine = engines._engine("prefix", paths["qwen3_vl"], options)
        data = _batch(get_rank(), engine.model_config.hf_config, paths["qwen3_vl"], options)
        for uid, row in zip(data["uid"], tu.get(data, "multi_modal_inputs"), strict=True):
            if uid == "image":
                row |= {name: torch.cat([row[name]] * 2) for name in ("pixel_values", "image_grid_thw")}
        with engine.eval_mode(disable_auto_offload=True), pytest.raises((ValueError, RuntimeError)) as error:
            engine.infer_batch(data)
    return str(error.value)


def _attention_that_verl_replaced(paths: dict, family: str, *changed: tuple) -> dict:
    options = _default(family)
    with _prepared():
        found = _truth(paths[family], options)
        options |= {"use_remove_padding": True, "verify": "off"} | dict(changed)
        return _compare(_measure("prefix", paths[family], get_rank(), options), found)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("vision")
    found = {family: write_tiny_model(tmp / family, family=family) for family in FAMILIES}
    for family in (family for family in FAMILIES if family.endswith("moe")):
        found[f"{family}_all"] = write_tiny_model(tmp / f"{family}_all", family=family, num_experts_per_tok=4)
    model = AutoModelForImageTextToText.from_pretrained(found["qwen3_vl"], dtype=torch.float32)
    for weight in (model.lm_head.weight, model.get_input_embeddings().weight):
        weight.data[1] = weight.data[model.config.image_token_id]
    model.save_pretrained(tmp / "twins")
    found["twins"] = str(tmp / "twins")
    return found


WORLDS = {1: "1rank", 2: "2ranks"}


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.full), 2], ids=["1rank", "2ranks"])
def results(request, paths, ranks):
    return ranks(request.param, paths)


def _cases(*names: str) -> pytest.MarkDecorator:
    """Of every family, all or these; make test has those of one family, and of the others what differs most: towers of
    GLM's and experts are in models/test_vision.py. test-more has every sixth case of the others on two ranks, which are
    not the next two families'."""
    quick = {(1, "qwen3_5", "phased")}
    quick |= {(1 if case in ALONE else 2, "qwen3_vl", case) for case in CASES if case not in AS_WITH_TEXT}

    def marks(one: tuple[int, str, str]) -> tuple | pytest.MarkDecorator:
        world, family, case = one
        number = [*FAMILIES].index(family) + [*FAMILIES[family]].index(case)
        return () if one in quick else pytest.mark.more if world == 2 and number % 6 == 1 else pytest.mark.full

    every = [(world, family, case) for world in WORLDS for family in FAMILIES for case in FAMILIES[family]]
    params = [
        pytest.param(*one, marks=marks(one), id="-".join([WORLDS[one[0]], *one[1:]]))
        for one in every if one[2] in (names or CASES)
    ]  # fmt: skip
    return pytest.mark.parametrize(("results", "family", "case"), params, indirect=["results"])


@_cases()
def test_engine_computes_what_the_stock_engine_computes(results, family, case):
    for rank, result in enumerate(results(_case, family, case)):
        worst = {name: error for name, error in result["errors"].items() if not error <= TOLERANCE}
        assert not worst, f"rank {rank}: relative errors over {TOLERANCE}: {worst}"


ONE_FAMILY = [x if x == "qwen3_vl" else pytest.param(x, marks=pytest.mark.more) for x in FAMILIES]


@pytest.mark.more  # as test_engine_equivalence.py's with text
@pytest.mark.parametrize("family", ONE_FAMILY)
def test_bf16_misses_fp32_by_no_more_than_stock_does(ranks, paths, family):
    ((ours, stock),) = ranks(1, paths)(_bf16, family)
    for name in ours:
        assert ours[name] <= 1.3 * stock[name], name


@pytest.mark.more
@pytest.mark.parametrize("schedule", [pytest.param("packed", marks=pytest.mark.full), "phased"])
def test_image_tokens_that_a_model_samples_are_text_and_are_left_out_of_the_self_check(results, schedule):
    """Of `image` and `text` two rows are such on rank 0, on rank 1 none."""
    for result in results(_sampled, ("image", "text"), schedule):
        assert max(result["errors"].values()) <= TOLERANCE, result["errors"]
        assert result["metrics"]["prefix/verify_log_probs"][0] < 3
    # Where no rank has another row, or one has not, the check waits.
    for result in results(_sampled, ("image", "text", "video", "both"), schedule):
        assert max(result["errors"].values()) <= TOLERANCE and "prefix/verify_log_probs" not in result["metrics"]


def test_pictures_in_responses_are_refused_by_uid_and_on_every_rank(ranks, paths):
    first, other = ranks(2, paths)(_pictures_in_responses)
    assert "(uid image): its prompt has 8 image tokens before the last one, and its pixel_values make 16" in first
    assert "set actor_rollout_ref.actor.prefix.schedule=stock" in first and "rank 0 failed while checking rows" in other


def _patches(rank: int, batch: str, repeated: bool) -> int:
    """Patches of a rank's rows, or of its groups; on rank 0 one row of `image` has another picture."""
    total = 0
    for parts, lens, uid in BATCHES[batch][rank]:
        of_prompt = sum(torch.Size(part).numel() for part in parts if isinstance(part, tuple))
        total += of_prompt * (len(lens) if repeated else 1 + (rank == 0 and uid == "image"))
    return total


@_cases("packed", "phased", "checkpointed", "frozen_tower", "text_rank", "text_rank_phased")
def test_tower_sees_a_groups_pixels_once(results, family, case):
    batch = CASES[case].get("batch", "mixed")
    for rank, result in enumerate(results(_case, family, case)):
        distinct, of_rows = (_patches(rank, batch, repeated) or 16 for repeated in (False, True))  # 16: a dummy
        counts = result["tower"]
        for pass_, stock in zip(counts["ours"], counts["stock"], strict=True):
            assert (pass_["calls"], pass_["patches"]) == (1, distinct)
            assert stock["patches"] == of_rows
        assert counts["ours"][1]["backwards"] == (0 if case == "frozen_tower" else 1)


@pytest.mark.parametrize("results", [1, pytest.param(2, marks=pytest.mark.more)], ids=WORLDS.values(), indirect=True)
@pytest.mark.parametrize("family", ONE_FAMILY)
def test_tower_sees_an_image_of_several_turns_once(results, family):
    """Of each uid its question's 32 patches, and in two sessions those of two more turns, 16 and 32."""
    for result in results(_case, family, "turns_phased"):
        for ours, stock in zip(result["tower"]["ours"], result["tower"]["stock"], strict=True):
            assert ours["patches"] == 2 * (32 + 2 * (16 + 32))
            assert stock["patches"] == 2 * 2 * (32 + (32 + 16) + (32 + 16 + 32))
        assert result["metrics"]["prefix/tree_depth"][0] == 2


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_tower_runs_once_in_each_phase_a_the_same_on_every_rank(results, family):
    counts = [result["tower"]["ours"][1] for result in results(_case, family, "phased_row_by_row")]
    assert all(found["calls"] == found["backwards"] == counts[0]["calls"] > 1 for found in counts)


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_scattered_rows_meet_where_their_pixels_are(ranks, paths, family):
    """Of a picture or clip that both ranks have, one tower computes it."""
    found = ranks(2, paths)(_case, family, "scattered")
    for ours in zip(*(result["tower"]["ours"] for result in found), strict=True):
        assert sum(one["patches"] for one in ours) == _patches(0, "scattered", repeated=False)
    assert found[0]["metrics"]["prefix/exchanged_rows"][0] >= 4


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_rows_with_other_pixels_do_not_share(results, family):
    metrics = results(_case, family, "packed")[0]["metrics"]
    # Of all ranks: the second has three groups and a row by itself.
    counts = [metrics[f"prefix/{name}"] for name in ("groups", "stock_rows")]
    assert counts == ([[4.0], [1.0]] if results.world == 1 else [[7.0], [2.0]])
    assert metrics["prefix/split_uids"] == [1.0]
    assert metrics["prefix/verify_log_probs"][0] < 3 and 0 < metrics["prefix/verify_attention"][0] < 2
    # No rank may be alone in verl's forward, which the self-check compares with; of text alone it runs the tower once.
    if results.world == 2:
        checked = ["prefix/verify_log_probs" in r["metrics"] for r in results(_case, family, "text_rank")]
        assert checked == [True, True]


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_another_rows_pixels_are_far_off(results, family):
    assert max(results(_others_pixels, family)[0]["errors"].values()) > 100 * TOLERANCE


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_layers_go_through_our_attention_where_verl_replaced_theirs(results, family):
    # A layer that bypasses ours would end the pass (`HookedModel.token_outputs` counts them).
    for result in results(_attention_that_verl_replaced, family):
        assert max(result["errors"].values()) <= TOLERANCE
    results.close()  # verl changes classes for good: ours undoes that where it needs to


@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=pytest.mark.full if i else pytest.mark.more) for i, x in enumerate(UNPATCHED)]
)
def test_verls_own_path_pads_rows_where_it_leaves_the_model_to_transformers(ranks, paths, family):
    for result in ranks(2, paths)(_attention_that_verl_replaced, family, ("schedule", "stock")):
        assert max(result["errors"].values()) <= TOLERANCE and result["metrics"]["prefix/stock_rows"] > [0]
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(paths[family]))
    assert "all tokens of a row" in why_wrong_when_sharded(model, "flash_attention_2")
