"""Models as VeOmni builds them, packed and phased, against VeOmni's own forward of every whole row, and that against
Hugging Face's with the same weights: float64 and 1e-9 on log-probs and every gradient.

Gated delta nets have stand-ins of flash-linear-attention's kernels, in torch. On two ranks the truth is Hugging Face's,
as VeOmni's own forward of a row by one rank does not exist there.
"""

import contextlib
import copy
import itertools
import re
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("veomni")

import broken_states  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from api_pixels import together  # noqa: E402
from families import build, compute_in_float64, float64_inside  # noqa: E402, F401
from runners import random_rollouts, run_shared, run_stock  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from veomni.distributed.parallel_state import get_parallel_state, init_parallel_state  # noqa: E402
from veomni.models.loader import MODELING_REGISTRY  # noqa: E402
from veomni_models import VeomniCase, VeomniTurns, float64_positions, liger_in_torch, veomni_model, whole_rows  # noqa: E402
from verl.workers.engine.veomni.utils import VL_TYPE2INDEX  # noqa: E402
from vision_cases import Case, paths  # noqa: E402, F401

from verl_prefix import response_log_probs  # noqa: E402
from verl_prefix.models import hookup  # noqa: E402
from verl_prefix.models.veomni import TEXT_TYPES, VISUAL_TOKENS, veomni_reasons  # noqa: E402
from verl_prefix.models.verls_vision import towers_of_tensors  # noqa: E402

TEXT = (
    "llama3", "qwen2-window-7", "qwen3", "qwen3-moe", "deepseek-v3", "gpt-oss-window-9", "seed-oss", "gemma3-window-9",
    "qwen3.5", "qwen3.5-moe",
)  # fmt: skip
# Prefixes of 22, 6 and 0 tokens.
SHAPE = [(23, [9, 17, 5]), (7, [13, 4]), (1, [6, 30])]
SCHEDULES = {
    "packed": dict(schedule="packed"),
    "phased": dict(schedule="phased", budget=60, wave_tokens=19),
}
FLA = dict.fromkeys(("causal_conv1d_implementation", "chunk_gated_delta_rule_implementation"), "fla")
Found = dict[str, torch.Tensor]


def measure(model, run) -> Found:
    """Log-probs, and the gradients of parameters that have one."""
    model.zero_grad()
    found = {"log_probs": torch.cat([x.detach() for x in run()])}
    return found | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(ours: Found, truth: Found) -> float:
    """The largest relative error. Of what only dummies reach the gradient is zero."""
    assert truth.keys() <= ours.keys() and not any(ours[name].any() for name in ours.keys() - truth.keys())
    return max(((ours[name] - x).norm() / x.norm().clamp(min=1e-9)).item() for name, x in truth.items())


def text_model(family: str, dtype: torch.dtype = torch.float64):
    """Hugging Face's, and VeOmni's with the same weights."""
    hugging_face = build(family, dtype)
    config = copy.deepcopy(hugging_face.config)
    config.architectures = [type(hugging_face).__name__]
    return hugging_face, veomni_model(config, hugging_face, hugging_face.config._attn_implementation)


@pytest.mark.parametrize("family", VISUAL_TOKENS)
def test_vision_models(family, paths, float64_inside):  # noqa: F811
    case, hugging_face = VeomniCase(paths[family]), Case(paths[family])
    for model in (case.model, hugging_face.model):
        float64_inside(model)
    truth = measure(case.model, case.truth)
    with float64_positions():
        assert worst(truth, measure(hugging_face.model, hugging_face.truth)) < 1e-9
    for options in SCHEDULES.values():
        assert worst(measure(case.model, lambda options=options: case.ours(**options)), truth) < 1e-9
    with towers_of_tensors(case.model):
        assert torch.equal(measure(case.model, case.truth)["log_probs"], truth["log_probs"]), "verl's path is VeOmni's"


@pytest.mark.parametrize("family", TEXT)
def test_text_models(family, float64_inside, monkeypatch):  # noqa: F811
    liger_in_torch(monkeypatch)
    hugging_face, model = text_model(family)
    for one in (hugging_face, model):
        float64_inside(one)
    rollouts = random_rollouts(SHAPE, model.config.vocab_size)
    truth = measure(model, lambda: run_stock(whole_rows(model), rollouts))
    assert worst(truth, measure(hugging_face, lambda: run_stock(hugging_face, rollouts))) < 1e-9
    for options in SCHEDULES.values():
        assert worst(measure(model, lambda options=options: run_shared(model, rollouts, **options)), truth) < 1e-9


TRAINED = {
    "all": lambda name: True,
    "all but the tower": lambda name: "visual" not in name,
    "the tower": lambda name: "visual" in name,
}


@pytest.mark.parametrize(
    ("family", "trained"),
    [*((family, "all") for family in VISUAL_TOKENS), *itertools.product(["qwen3_vl_moe", "qwen3_5"], [*TRAINED][1:])],
)
def test_checkpointed_and_partly_frozen(family, trained, paths, float64_inside):  # noqa: F811
    case = VeomniCase(paths[family])
    float64_inside(case.model)
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_(TRAINED[trained](name))
    case.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    truth = measure(case.model, case.truth)
    assert len(truth) > 10
    assert worst(measure(case.model, lambda: case.ours(**SCHEDULES["phased"], offload=True)), truth) < 1e-9


@pytest.mark.parametrize("family", VISUAL_TOKENS)
def test_trees(family, paths, float64_inside):  # noqa: F811
    """Rows of turns, each with an image more, which is seen once."""
    case = VeomniTurns(paths[family])
    float64_inside(case.model)
    rows, forks = case.rollouts, [[cut + 1 for cut in cuts] for cuts in case.cuts]

    def ours(**options):
        found = response_log_probs(
            case.model, rows.prompts, rows.responses, pixels=together(case.pixels), forks=forks, **options
        )
        sum((a * w).sum() for a, w in zip(found, rows.weights, strict=True)).backward()
        return found

    truth = measure(case.model, case.truth)
    for options in (dict(schedule="packed"), dict(schedule="phased", wave_tokens=12)):
        assert worst(measure(case.model, lambda options=options: ours(**options)), truth) < 1e-9


def _two_ranks(family: str, path: str, schedule: str, checkpointed: bool) -> float:
    """The error of what two ranks compute together, where VeOmni's state says that rows are cut over them."""
    init_parallel_state(ulysses_size=2, device_type="cpu")
    assert get_parallel_state().ulysses_enabled
    options = SCHEDULES[schedule] | dict(sequence_group=dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        if path:
            true, case = Case(path), VeomniCase(path)
            models, run, stock = (true.model, case.model), lambda: case.ours(**options), true.truth
        else:
            models = text_model(family)
            rollouts = random_rollouts(SHAPE, models[0].config.vocab_size)
            run, stock = lambda: run_shared(models[1], rollouts, **options), lambda: run_stock(models[0], rollouts)
        for model in models:
            compute_in_float64(model, patch)
        with float64_positions():
            truth = measure(models[0], stock)
        if checkpointed:
            models[1].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ours = measure(models[1], run)
    assert get_parallel_state().ulysses_enabled
    for name, x in ours.items():
        if name != "log_probs":  # as FSDP: the mean over ranks, which all have the whole loss
            dist.all_reduce(x)
            x /= 2
    return worst(ours, truth)


@pytest.mark.parametrize(("schedule", "checkpointed"), [("packed", False), ("phased", True)])
@pytest.mark.parametrize("family", [*VISUAL_TOKENS, "qwen3-moe", "qwen3.5"])
def test_two_ranks_compute_together_what_one_computes(family, schedule, checkpointed, paths, ranks):  # noqa: F811
    assert max(ranks(2)(_two_ranks, family, paths.get(family, ""), schedule, checkpointed)) < 1e-9


def _cut_twice(family: str, path: str) -> str:
    with mock.patch.object(hookup, "unsliced", contextlib.nullcontext), pytest.raises(RuntimeError) as raised:
        _two_ranks(family, path, "packed", False)
    return str(raised.value)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3.5"])
def test_what_veomni_cuts_again_fits_nowhere(family, paths, ranks):  # noqa: F811
    """A tower's positions of patches, and the tokens of a delta net."""
    for told in ranks(2)(_cut_twice, family, paths.get(family, "")):
        assert "must match" in told


def deepstack_dropped(visual, patch):
    def change(module, args, output):
        output.deepstack_features = [x * 0.0 for x in output.deepstack_features]

    visual.register_forward_hook(change)


def tower_gradient_lost(visual, patch):
    def change(module, args, output):
        output.pooler_output = output.pooler_output.detach() + output.pooler_output * 0.0

    visual.register_forward_hook(change)


def states_of_zero(visual, patch):
    broken_states.states_of_zero(patch)


def conv_tail_one_token_off(visual, patch):
    broken_states.conv_tail_one_token_off(patch)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("family", "sabotage"),
    [
        ("qwen2_5_vl", tower_gradient_lost), ("qwen3_vl_moe", deepstack_dropped), ("qwen3_5", states_of_zero),
        ("qwen3_5_moe", conv_tail_one_token_off),
    ],
)  # fmt: skip
def test_broken_on_purpose_is_far_off(family, sabotage, schedule, paths, monkeypatch):  # noqa: F811
    case = VeomniCase(paths[family], torch.float32)
    truth = measure(case.model, case.truth)
    sabotage(case.model.model.visual, monkeypatch)
    assert worst(measure(case.model, lambda: case.ours(**SCHEDULES[schedule])), truth) > 100 * 5e-6


def test_types_and_tokens_are_veomnis_and_verls():
    known = {*TEXT_TYPES, *VISUAL_TOKENS}
    assert known <= {*MODELING_REGISTRY.valid_keys()}
    assert VISUAL_TOKENS == {kind: tuple(tokens.values()) for kind, tokens in VL_TYPE2INDEX.items()}
    for kind in {*MODELING_REGISTRY.valid_keys()} - known:
        assert veomni_reasons(SimpleNamespace(model_type=kind), {}), kind


@pytest.mark.parametrize(
    ("kind", "fields", "engine_config", "found"),
    [
        ("phi3", {}, {}, ["model_type=phi3; of VeOmni's models those of llama, "]),
        ("deepseek_v4", {}, {}, ["model_type=deepseek_v4; "]),
        ("glm_moe_dsa", {}, {}, ["model_type=glm_moe_dsa; "]),
        ("qwen3_vl", dict(image_token_id=151655, video_token_id=151656), {}, []),
        ("qwen3_vl", dict(image_token_id=5, video_token_id=151656), {}, ["image_token_id=5, where verl's .* 151655"]),
        (
            "qwen3_5_text", {}, dict(chunk_gated_delta_rule_implementation="flash_qla"),
            ["causal_conv1d_implementation=eager; set fla", "chunk_gated_delta_rule_implementation=flash_qla; set fla"],
        ),
        ("qwen3_5_moe", dict(image_token_id=248056, video_token_id=248057), FLA, []),
    ],
)  # fmt: skip
def test_what_is_refused(kind, fields, engine_config, found):
    reasons = veomni_reasons(CONFIG_MAPPING[kind](**fields), engine_config)
    assert len(reasons) == len(found) and all(map(re.match, found, reasons)), reasons


def test_classes_of_others_are_refused(monkeypatch):
    monkeypatch.setenv("MODELING_BACKEND", "hf")
    assert veomni_reasons(CONFIG_MAPPING["llama"](), {}) == [
        "MODELING_BACKEND=hf, with which VeOmni builds classes of others; unset it"
    ]
