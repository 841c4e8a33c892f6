"""Every supported model family against HF's own forward of every whole row: log-probs and all gradients.

Tiny random models of the real classes, packed and phased. Truth is HF in float64: 1e-9 in float64, 5e-6 in fp32, and in
bf16 1.3 times HF's own error over the batches of four seeds with experts (where rounding flips one, errors are few and
large) and of two without. The gated delta rule rounds more: what misses 5e-6 in fp32 is held to 1.3 times HF's own
error in fp32 as well.
"""

import copy
import functools
import itertools
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import broken_states
import pytest
import torch
import transformers
from families import (
    FAMILIES,
    build,
    float64_inside,  # noqa: F401
)
from runners import random_rollouts, run_shared, run_stock
from short_chunks import short_chunks
from torch.utils.checkpoint import checkpoint

from verl_prefix.core import packed_row
from verl_prefix.core.attention import GroupedAttention
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.kernels import cpu, reference
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.models import recurrent
from verl_prefix.models.advice import WHOLE_ROWS, WITHOUT_SHARING
from verl_prefix.models.hookup import grouped_attention_forward
from verl_prefix.models.support import check_dropout, check_supported

# Prefixes of 22, 40, 6 and 0 tokens: windows below are shorter than all of a prefix, longer, or end inside a suffix.
SHAPE = [(23, [9, 17, 5]), (41, [3, 1, 11]), (7, [13, 4]), (1, [6, 30])]
RECURRENT = [name for name, (*_, core) in FAMILIES.items() if "states" in core]
# Left to test-more: what these have, others have here by themselves: sizes of heads, windows, experts, Mamba-2, biases,
# norms, the delta rule; or test_kernels.py (scaled scores, one key head) and the engine's cases (tied embeddings,
# latent attention).
TWINS = (
    "smollm2", "qwen2.5", "mistral-window-8", "mistral-window-300", "mistral-mqa", "deepseek-v3-yarn", "head-dim-96",
    "qwen3-next", "olmo-hybrid", "qwen2-window-7", "phi3-window-9", "mixtral", "glm4-moe-lite", "head-dim-64",
    "head-dim-128", "head-dim-256", "bamba", "llama3", "gemma3-window-9", "seed-oss", "olmo2", "lfm2", "granite4-h",
    "deepseek-v3", "glm4", "phi3", "mistral-window-26", "qwen3-moe",
)  # fmt: skip
# Left to make test-full: experts, as qwen3-moe's and mixtral's, behind layers that are here without them, or that
# test_engine_equivalence.py and test_vision_engine.py (Qwen3.5's) have with them.
WITH_EXPERTS = ("qwen2-moe", "glm4-moe", "qwen3.5-moe", "lfm2-moe", "granite4-h-moe")
# Prefixes of several chunks of any scan (`short_chunks`), and shorter than its convolution; a group of one; a suffix so
# long among short ones that it is scanned by itself.
LONG_SHAPE = [*SHAPE, (53, [3, 70, 11]), (3, [5, 4]), (19, [6])]
SCHEDULES = {
    "packed": dict(schedule="packed"),
    "phased": dict(schedule="phased", wave_tokens=19),
}


@pytest.fixture(autouse=True)
def cheap():
    """Without oneDNN, which compiles a bf16 matmul for every new shape: a fifth of the time."""
    with short_chunks(), torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture(scope="module")
def table():
    """Rows of the coverage table; written as Markdown to the file that VERL_PREFIX_COVERAGE names."""
    rows = []
    yield rows
    if out := os.environ.get("VERL_PREFIX_COVERAGE"):
        titles = (
            "family", "config", "feature", "core", "schedule", "float64 error", "fp32 error", "HF's fp32 error",
            "bf16 error / HF's",
        )  # fmt: skip
        cells = [[f"{x:.2g}" if isinstance(x, float) else x for x in row] for row in rows]
        lines = [" | ".join(row) for row in (titles, ["---"] * len(titles), *cells)]
        Path(out).write_text(
            "# Model families: shared prefix against HF's own forward of every whole row\n\n"
            "Written by `make -C examples/results coverage` (tests/models/test_families.py): largest relative error\n"
            "of log-probs and of the gradient of each kind of parameter; truth is HF in float64. Tolerances: 1e-9 in\n"
            "float64, 5e-6 in fp32 (gated delta rule: or 1.3 times HF's own error), in bf16 1.3 times HF's own error.\n"
            "merged: two flash calls joined by log-sum-exp. reference: dense. states: suffixes go on from the\n"
            "prefix's.\n\n"
            f"CPU, torch {torch.__version__}, transformers {transformers.__version__}.\n\n"
            + "".join(f"| {line} |\n" for line in lines)
        )


def marked(names: Iterable[str]) -> list:
    marks = dict.fromkeys(TWINS, pytest.mark.more) | dict.fromkeys(WITH_EXPERTS, pytest.mark.full)
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


def measure(model, run) -> dict[str, torch.Tensor]:
    """Log-probs, and the gradients of each kind of parameter (the same in every layer) as one vector."""
    model.zero_grad()
    found = {"log_probs": [torch.cat(run()).double()]}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found.setdefault(re.sub(r"\d+", "N", name), []).append(parameter.grad.double().flatten())
    return {name: torch.cat(parts) for name, parts in found.items()}


def errors(ours: dict, truth: dict) -> dict[str, float]:
    assert ours.keys() == truth.keys()
    return {name: ((ours[name] - x).norm() / x.norm()).item() for name, x in truth.items()}


def both(found: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the whole gradient as one vector."""
    return found["log_probs"], torch.cat([x for name, x in found.items() if name != "log_probs"])


# What HF computes of a family's first batch in float64, for a test that asks again.
EXACT: dict[str, dict[str, torch.Tensor]] = {}


@pytest.mark.parametrize("family", marked(FAMILIES))
def test_family_equals_hf(family, float64_inside, table):  # noqa: F811
    model = build(family)
    double, half = copy.deepcopy(model).double(), copy.deepcopy(model).bfloat16()
    half_truth = copy.deepcopy(half).double()
    shape = LONG_SHAPE if family in RECURRENT else SHAPE
    delta_rule = "delta rule" in FAMILIES[family][2]
    batches = [random_rollouts(shape, 128, seed=seed) for seed in range(4 if "MoE" in FAMILIES[family][2] else 2)]
    runs = {"stock": run_stock} | {
        name: functools.partial(run_shared, **options) for name, options in SCHEDULES.items()
    }
    single = {name: measure(model, lambda run=run: run(model, batches[0])) for name, run in runs.items()}

    def over_batches(model, batches, names=runs, first: dict | None = None) -> dict[str, list[tuple]]:
        """first: of the first batch what `measure` found before."""
        found = {name: [both(first[name])] if first else [] for name in names}
        for name, batch in itertools.product(names, batches[1:] if first else batches):
            found[name].append(both(measure(model, lambda name=name, batch=batch: runs[name](model, batch))))
        return found

    halves = over_batches(half, batches)
    singles = over_batches(model, batches, first=single) if delta_rule else {}
    float64_inside(model)
    exact = {name: measure(double, lambda run=run: run(double, batches[0])) for name, run in runs.items()}
    EXACT[family] = exact["stock"]
    half_truth = over_batches(half_truth, batches, ["stock"])["stock"]
    truth = over_batches(double, batches, ["stock"], first=exact)["stock"] if delta_rule else []

    def over_hfs(found: dict[str, list[tuple]], truth: list[tuple], name: str) -> float:
        """The larger error, of log-probs and of the gradient, in units of HF's own."""
        squares = {
            run: [sum((x[i] - true[i]).norm() ** 2 for x, true in zip(found[run], truth, strict=True)) for i in (0, 1)]
            for run in (name, "stock")
        }
        return max((ours / hf).sqrt().item() for ours, hf in zip(squares[name], squares["stock"], strict=True))

    config_class, _, feature, core = FAMILIES[family]
    for name in SCHEDULES:
        in_float64 = max(errors(exact[name], exact["stock"]).values())
        in_fp32, hf_in_fp32 = (max(errors(single[x], exact["stock"]).values()) for x in (name, "stock"))
        in_bf16 = over_hfs(halves, half_truth, name)
        table.append([family, config_class, feature, core, name, in_float64, in_fp32, hf_in_fp32, in_bf16])
        assert in_float64 < 1e-9
        assert in_fp32 < 5e-6 or (delta_rule and over_hfs(singles, truth, name) < 1.3)
        assert in_bf16 < 1.3


def window_one_longer(monkeypatch):
    calls = PackedRow.calls

    def longer(self, params, device):
        return calls(self, params._replace(window=params.window and params.window + 1), device)

    monkeypatch.setattr(PackedRow, "calls", longer)


def window_ignored(monkeypatch):
    calls = PackedRow.calls
    monkeypatch.setattr(
        PackedRow, "calls", lambda self, params, device: calls(self, params._replace(window=None), device)
    )


def tails_shifted(monkeypatch):
    made = packed_row.calls_of

    def shifted(*args):
        for call in made(*args):
            if call.causal:
                shifted = [one._replace(strand_tokens=(one.strand_tokens - 1).clamp(0)) for one in call.prefixes]
                call = call._replace(prefixes=tuple(shifted))
            yield call

    monkeypatch.setattr(packed_row, "calls_of", shifted)


def sinks_ignored(monkeypatch):
    apply = GroupedAttention.apply
    monkeypatch.setattr(GroupedAttention, "apply", lambda q, k, v, sinks, *args: apply(q, k, v, sinks * 0 - 1e4, *args))


def sinks_detached(monkeypatch):
    apply = GroupedAttention.apply
    monkeypatch.setattr(GroupedAttention, "apply", lambda q, k, v, sinks, *args: apply(q, k, v, sinks.detach(), *args))


def softcap_ignored(monkeypatch):
    scores = reference._scores
    monkeypatch.setattr(reference, "_scores", lambda q, k, hidden, scale, softcap: scores(q, k, hidden, scale, None))


def softcap_without_its_slope(monkeypatch):
    scores = reference._scores
    monkeypatch.setattr(reference, "_scores", lambda *args, **options: (scores(*args, **options)[0], 1.0))


def kv_heads_in_wrong_order(monkeypatch):
    forward = cpu.forward
    monkeypatch.setattr(
        cpu, "forward", lambda q, k, v, *args, **options: forward(q, k.flip(1), v.flip(1), *args, **options)
    )


@functools.cache
def stock_of(family: str) -> dict[str, torch.Tensor]:
    """What every sabotage of a family is far off from; asked for before anything is broken."""
    model = build(family)
    return measure(model, lambda: run_stock(model, random_rollouts(SHAPE, 128)))


@pytest.mark.parametrize(
    ("family", "sabotage"),
    [
        ("mistral-window-8", window_one_longer), ("mistral-window-26", window_one_longer),
        ("mistral-window-26", window_ignored), ("gemma2-window-9", window_ignored), ("gemma3-window-9", tails_shifted),
        ("gpt-oss-window-9", sinks_ignored), ("gpt-oss-window-9", sinks_detached),
        ("gemma2-window-9", softcap_ignored), ("gemma2-window-9", softcap_without_its_slope),
        ("llama3", kv_heads_in_wrong_order),
    ],
)  # fmt: skip
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_broken_maths_is_far_off(family, sabotage, schedule, monkeypatch):
    model, batch, truth = build(family), random_rollouts(SHAPE, 128), stock_of(family)
    sabotage(monkeypatch)
    model.zero_grad()
    ours = measure(model, lambda: run_shared(model, batch, **SCHEDULES[schedule]))
    assert truth.keys() - ours.keys() or max(errors(ours, truth).values()) > 100 * 5e-6


@pytest.mark.parametrize(
    ("broken", "schedule"),
    [
        *(("states_of_zero", schedule) for schedule in SCHEDULES),
        *(("conv_tail_one_token_off", schedule) for schedule in SCHEDULES),
        ("gradients_dropped_in_packed", "packed"), ("gradients_dropped_in_phased", "phased"),
        ("fork_writes_into_the_state", "phased"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["qwen3.5", "granite4-h", "lfm2"])
def test_broken_states_are_far_off(family, broken, schedule, monkeypatch):
    model, batch, truth = build(family), random_rollouts(SHAPE, 128), stock_of(family)
    getattr(broken_states, broken)(monkeypatch)
    ours = measure(model, lambda: run_shared(model, batch, **SCHEDULES[schedule]))
    assert max(errors(ours, truth).values()) > 100 * 5e-6


# Of each scan one way in make test; test-more has these.
OTHER_WAYS = ("lfm2", False), ("granite4-h", True), ("qwen3.5", True)


@pytest.mark.parametrize(
    ("family", "reentrant"),
    [
        pytest.param(
            *one.values, reentrant, id=f"{one.values[0]}-{'reentrant' * reentrant}",
            marks=pytest.mark.more if (*one.values, reentrant) in OTHER_WAYS else one.marks,
        )
        for one in marked(RECURRENT) for reentrant in (False, True)
    ],
)  # fmt: skip
def test_states_are_found_again_by_checkpointing_and_offload(family, reentrant, float64_inside):  # noqa: F811
    model, batch = build(family).double(), random_rollouts(LONG_SHAPE, 128)
    float64_inside(model)
    truth = EXACT.get(family) or measure(model, lambda: run_stock(model, batch))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for options in (dict(schedule="packed"), dict(SCHEDULES["phased"]), dict(SCHEDULES["phased"], offload=True)):
        ours = measure(model, lambda options=options: run_shared(model, batch, **options))
        assert max(errors(ours, truth).values()) < 1e-9


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_state_whose_decay_alone_is_trained_has_its_gradient(schedule, float64_inside):  # noqa: F811
    """What the scan gets of a token has none then, in a wave; the state that it starts from has."""
    model, batch = build("granite4-h").double(), random_rollouts(SHAPE, 128)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("A_log"))
    float64_inside(model)
    truth = measure(model, lambda: run_stock(model, batch))
    assert max(errors(measure(model, lambda: run_shared(model, batch, **SCHEDULES[schedule])), truth).values()) < 1e-9


def test_a_scan_in_torch_is_as_exact_under_autocast():
    generator = torch.Generator().manual_seed(0)
    x, B, C, dt = (torch.randn(2, 40, *shape, generator=generator) for shape in ((4, 8), (2, 6), (2, 6), (4,)))
    A, D, dt_bias = -torch.rand(4, generator=generator), torch.ones(4), torch.zeros(4)
    truth = recurrent.chunk_scan(x, dt, A, B, C, 16, D, dt_bias, None)
    with torch.autocast("cpu", torch.bfloat16):
        found = recurrent.chunk_scan(x, dt, A, B, C, 16, D, dt_bias, None)
    assert all(torch.equal(*pair) for pair in zip(found, truth, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ["llama3", "lfm2", "qwen3.5", "granite4-h"])
def test_a_forward_that_others_checkpoint_runs_again_in_its_own_pass(family, schedule, float64_inside):  # noqa: F811
    """The layer's hooks do not run again, as where transformers checkpoints it since 5.23. LFM2's layers hand nothing
    on to convolutions before that: these say so, and do not run in another pass."""
    model, batch = build(family, torch.float64), random_rollouts(SHAPE, 128)
    float64_inside(model)
    truth = measure(model, lambda: run_stock(model, batch))
    told = []
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        if family == "lfm2" and hasattr(layer, "conv"):
            hook = lambda module, args, kwargs: told.append("prefix_context" in kwargs)  # noqa: E731
            layer.conv.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        ours = measure(model, lambda: run_shared(model, batch, **SCHEDULES[schedule]))
    except RuntimeError as error:
        assert "Lfm2ShortConv layer 2 ran without a prefix_context" in str(error)
        assert told and not any(told)
        return
    assert max(errors(ours, truth).values()) < 1e-9


def test_one_long_response_pads_no_short_one(monkeypatch):
    """Kernels that take rows compute at most two tokens of a row for one of it, beyond a chunk."""
    model, tokens, scan = build("granite4-h"), [], recurrent.chunk_scan
    monkeypatch.setattr(
        recurrent, "chunk_scan", lambda x, *args, **more: tokens.append(x[..., 0, 0].numel()) or scan(x, *args, **more)
    )
    batch = random_rollouts([(70, [600] + [100] * 4 + [9] * 5)], 128)
    run_shared(model, batch, "packed", train=False)
    scans = len(recurrent.mixers(model))
    assert sum(tokens) <= scans * (69 + 2 * (600 + 4 * 100) + 5 * 64)
    truth = torch.cat(run_stock(model, batch, train=False))
    assert ((torch.cat(run_shared(model, batch, "packed", train=False)) - truth).norm() / truth.norm()).item() < 5e-6


@pytest.mark.parametrize("family", ["llama3", "lfm2", "qwen3.5", "granite4-h"])
@pytest.mark.parametrize(
    "shapes",
    [[(1, 0, -math.inf)], [(0, 1, -math.inf), (1, 0, 0, 0)], [(0, 1, -math.inf), (1, 0, 1, 1), (0, 0, 1, 0)]],
    ids=["packed", "phased", "nested"],
)
def test_dummies_of_a_rank_without_rows_give_every_parameter_a_gradient_of_zero(family, shapes):
    """shapes: what other ranks run, as `planning.pad_to_same_passes` asks for it."""
    model, answers = build(family), iter(shapes)
    assert run_shared(model, random_rollouts([], 128), "auto", reduce_max=lambda counts: next(answers)) == []
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("family", ["llama3", "qwen3-next", "granite4-h"])
def test_a_run_leaves_modules_and_hooks_as_they_were(family):
    model, batch = build(family), random_rollouts(SHAPE, 128)

    def state() -> list:
        hooks = "_forward_pre_hooks", "_forward_hooks", "_backward_hooks"
        return [
            (name, sorted(vars(module)), *(list(getattr(module, kind).values()) for kind in hooks))
            for name, module in model.named_modules()
        ]

    before = state()
    run_shared(model, batch, "packed")
    assert state() == before


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ["llama3", "mistral-window-8", "gpt-oss-window-9"])
def test_attention_that_is_kept_runs_no_kernel_again_and_changes_nothing(family, schedule, monkeypatch):
    model, batch, calls, forward = build(family).train(), random_rollouts(SHAPE, 128), [], cpu.forward
    model.gradient_checkpointing_enable({"use_reentrant": False})
    monkeypatch.setattr(cpu, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))

    def run(keep: bool) -> tuple[dict, int]:
        calls.clear()
        found = measure(model, lambda: run_shared(model, batch, keep_attention=keep, **SCHEDULES[schedule]))
        return found, len(calls)

    (twice, num_twice), (once, num_once) = run(False), run(True)
    assert num_twice == 2 * num_once
    assert max(errors(once, twice).values()) < 1e-6

    class Wrong(dict):
        def pop(self, layer):
            out, lse = super().pop(layer)
            return out * 1.01, lse

    init = ForwardContext.__init__
    monkeypatch.setattr(
        ForwardContext,
        "__init__",
        lambda self, *args, **kw: (init(self, *args, **kw), setattr(self, "kept", Wrong()))[0],
    )
    wrong, _ = run(True)
    assert max(errors(wrong, twice).values()) > 1e-3


BERT_DECODER = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, is_decoder=True)


@pytest.mark.parametrize(
    ("config_class", "fields", "found"),
    [
        ("GlmMoeDsaConfig", {}, "index_topk=2048"),
        ("MambaConfig", {}, "state_size"),
        ("JambaConfig", {}, "mamba"),
        ("FalconH1Config", {}, "mamba"),
        ("NemotronHConfig", {}, "layer_types has .*; ssm_state_size=128"),
        ("Zamba2Config", {}, "mamba_d_state"),
        ("FalconMambaConfig", {}, "state_size"),
        ("Llama4TextConfig", {}, "chunked_attention"),
        ("Gemma3nTextConfig", {}, "num_kv_shared_layers"),
        ("T5Config", {}, "is_encoder_decoder"),
        ("Phi3Config", dict(rope_parameters={"rope_type": "longrope"}), "rope_type=longrope"),
        ("LlamaConfig", dict(attention_dropout=0.1), "attention_dropout=0.1"),
        ("SeedOssConfig", {}, "attention_dropout=0.1; residual_dropout=0.1.*override_config.residual_dropout=0.0"),
        ("Starcoder2Config", dict(residual_dropout=0.1), r"\+actor.*override_config.residual_dropout=0.0[.] "),
        ("Starcoder2Config", dict(embedding_dropout=0.1), "embedding_dropout=0.1"),
        ("OPTConfig", {}, "dropout=0.1"),
        ("PhimoeConfig", {}, "router_jitter_noise=0.01"),
        ("MixtralConfig", dict(router_jitter_noise=0.1), "router_jitter_noise=0.1"),
        ("PhimoeConfig", dict(router_jitter_noise=0.0, sliding_window=9), "sliding_window=9, which layers"),
        ("Qwen2MoeConfig", dict(sliding_window=9, layer_types=["sliding_attention"] * 24), "model: sliding_window=9, "),
        ("RobertaConfig", BERT_DECODER, "model: model_type=roberta, whose positions begin behind pad_token_id=1"),
        ("XLMRobertaXLConfig", BERT_DECODER, "model_type=xlm-roberta-xl, whose positions begin"),
        ("Qwen2VLConfig", {}, "model: vision_config of type qwen2_vl_vision; towers of qwen2_5_vl, "),
        ("InternVLConfig", {}, r"type internvl_vision \(no spatial_merge_size, .*grid of patches becomes tokens\); "),
        ("GotOcr2Config", {}, "vision_config of type (GotOcr2VisionConfig|got_ocr2_vision) "),
        ("Gemma3Config", {}, r"type siglip_vision_model \(no .* tokens; tokens of an image attend both ways\); towers"),
        ("PaliGemmaConfig", {}, "use_bidirectional_attention=True; vision_config of type siglip_vision_model "),
        ("VoxtralConfig", {}, "model: audio_config of type voxtral_encoder; towers"),
        ("Qwen2_5OmniThinkerConfig", {}, "two towers, vision_config of .* and audio_config of type qwen2_5_omni_"),
        (
            "BertConfig",
            dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
            "is_decoder=False, with which ",
        ),
        ("ElectraConfig", dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), "model: is_decoder=False, "),
        ("Qwen3OmniMoeConfig", {}, "model_type=qwen3_omni_moe, of which transformers has no causal language model"),
        ("BloomConfig", {}, "BloomForCausalLM, whose class does not promise to call transformers' attention"),
        ("StableLmConfig", {}, "StableLmForCausalLM, whose class does not promise"),
        ("DogeConfig", {}, "DogeForCausalLM, whose attention flash attention cannot compute"),
    ],
)
def test_what_would_be_wrong_is_refused_by_config(config_class, fields, found):
    config = getattr(transformers, config_class)()
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=f"{found}.*[sS]et {WITHOUT_SHARING}"):
        check_supported(config)


def test_the_dropout_of_a_section_is_turned_off_there():
    config = transformers.Qwen3VLConfig()
    check_supported(config)
    config.text_config.attention_dropout = 0.1
    with pytest.raises(
        ValueError, match=r"\+actor_rollout_ref.model.override_config.text_config.attention_dropout=0.0[.] Set"
    ):
        check_supported(config)


@pytest.mark.parametrize(
    ("config_class", "field"),
    [
        ("Qwen3Config", "dropout"), ("LlamaConfig", "embd_pdrop"), ("LlamaConfig", "classifier_dropout"),
        ("MistralConfig", "summary_first_dropout"), ("Qwen2MoeConfig", "router_jitter_noise"),
    ],
)  # fmt: skip
def test_a_dropout_that_the_model_does_not_apply_is_none(config_class, field):
    check_supported(getattr(transformers, config_class)(**{field: 0.1}))


def test_a_window_that_the_model_does_not_apply_is_none(float64_inside):  # noqa: F811
    model, batch = build("llama3").double(), random_rollouts(SHAPE, 128)
    model.config.sliding_window = 9
    model.config.layer_types = ["sliding_attention"] * 4
    float64_inside(model)
    check_supported(model.config)
    ours, truth = (torch.cat(run(model, batch, *how)) for run, how in ((run_shared, ["packed"]), (run_stock, [])))
    assert (ours - truth).norm() < 1e-9 * truth.norm()


def test_a_dropout_that_the_class_declares_counts_applied_or_not():
    """Phi-3's model does not read this one, and nothing but its source says so."""
    with pytest.raises(ValueError, match="embd_pdrop"):
        check_supported(transformers.Phi3Config(embd_pdrop=0.1))


def test_dropout_inside_the_model_is_refused():
    model = build("llama3")
    check_dropout(model)
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(model.model.layers[1].mlp.act_fn, torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"layers.1.mlp.act_fn.1 drops out with p=0.1"):
        check_dropout(model)


@pytest.mark.parametrize(
    "asked",
    [
        dict(prefix_context=None), dict(attention_mask=torch.zeros(1, 1, 1, 1)), dict(dropout=0.1),
        dict(sliding_window=9), dict(batch=2), dict(is_causal=False),
    ],
    ids=lambda asked: "".join(asked),
)  # fmt: skip
def test_what_a_layer_asks_for_and_would_not_get_is_refused(asked):
    attention = build("mistral-window-8").model.layers[0].self_attn
    options = dict(prefix_context=ForwardContext(packed_row.pack_groups([], [0]), "auto"), attention_mask=None)
    options |= dict(sliding_window=8, batch=1) | asked
    x = torch.zeros(options.pop("batch"), 4, 1, 8)
    with pytest.raises(RuntimeError, match=f"MistralAttention layer 0 called the .*; {WHOLE_ROWS}, and report"):
        grouped_attention_forward(attention, x, x, x, **options)


def test_a_layer_that_attends_both_ways_is_refused():
    model, batch = build("llama3"), random_rollouts(SHAPE, 128)
    model.model.layers[2].self_attn.is_causal = False
    with pytest.raises(RuntimeError, match=f"LlamaAttention layer 2 called .* is_causal=False; {WHOLE_ROWS}"):
        run_shared(model, batch, "packed")


@pytest.mark.parametrize(
    "options", [*SCHEDULES.values(), dict(schedule="packed", keep_attention=True)], ids=[*SCHEDULES, "kept"]
)
def test_layers_under_one_index_are_refused(options):
    """Of each layer the prefix cache, and what is kept for checkpointing, hold one run: the last, or the first."""
    model, batch = build("llama3").train(), random_rollouts(SHAPE, 128)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    run_shared(model, batch, **options)
    model.model.layers[2].self_attn.layer_idx = 1
    with pytest.raises(RuntimeError, match=f"layer 1 ran twice in one forward, .*; {WHOLE_ROWS}"):
        run_shared(model, batch, **options)


def test_recurrent_layers_under_one_index_are_refused_where_states_are_left():
    model, batch = build("lfm2"), random_rollouts(SHAPE, 128)
    model.model.layers[2].conv.layer_idx = 0
    with pytest.raises(RuntimeError, match=r"layer \('conv', 0\) ran twice in one forward"):
        run_shared(model, batch, **SCHEDULES["phased"])


def test_a_model_that_bypasses_the_attention_interface_is_noticed(monkeypatch):
    model, batch = build("llama3"), random_rollouts(SHAPE, 128)
    attention = model.model.layers[2].self_attn
    monkeypatch.setattr(attention, "o_proj", torch.nn.Linear(48, 48))
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **kwargs: (attention.o_proj(hidden_states), None))
    with pytest.raises(RuntimeError, match="3 of 4 layers of LlamaForCausalLM shared their prefixes"):
        run_shared(model, batch, "packed")
