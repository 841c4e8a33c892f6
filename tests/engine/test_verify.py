"""The self-check: rounding passes over 100 seeds; kernels that are wrong on purpose are caught, in bf16 too; so are
states of recurrent layers, and gradients of states."""

import contextlib
import functools
import itertools
import re
import types
from unittest import mock

import pytest
import torch
import transformers
from broken_states import (
    ancestor_left_out,
    conv_tail_one_token_off,
    earlier_waves_dropped,
    fork_writes_into_the_state,
    gradients_dropped_in_packed,
    gradients_dropped_in_phased,
    gradients_of_keys_dropped_in_packed,
    gradients_of_keys_dropped_in_phased,
    gradients_of_one_layer_dropped,
    gradients_of_shared_outputs_dropped,
    scan_states_of_zero,
    states_of_zero,
)
from dialogues import rollouts, thinking_kept, thinking_stripped, tree_search
from nesting import BROKEN
from runners import random_rollouts, run_shared, run_stock
from verl.utils import tensordict_utils as tu

from verl_prefix.backends.hugging_face import HFBackend
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core import packed_row
from verl_prefix.core.attention import AttentionSite, GroupedAttention
from verl_prefix.core.calls import AttentionParams
from verl_prefix.core.groups import Fork, Group, Strand
from verl_prefix.core.kernels import cpu
from verl_prefix.core.nesting import Nesting
from verl_prefix.core.packed_row import PackedRow, pack_groups
from verl_prefix.core.plan import Plan
from verl_prefix.engine.backend import StockFacts
from verl_prefix.engine.checks import self_check as verify
from verl_prefix.engine.checks.both_paths import plan_to_check
from verl_prefix.engine.checks.checked_rows import candidates
from verl_prefix.engine.checks.layer_probe import MAX_ATTENTION, MAX_RECURRENCE, LayerProbe
from verl_prefix.engine.checks.noise import Figure
from verl_prefix.engine.checks.verify import Verification
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.rows import BatchRows
from verl_prefix.models.gradients import gradients_aside
from verl_prefix.models.hookup import HookedModel

# bf16 is what runs have, and the harder to tell from rounding.
DTYPES = [
    pytest.param(torch.bfloat16, id="torch.bfloat16"),
    pytest.param(torch.float32, id="torch.float32", marks=pytest.mark.full),
]
CONFIGS = {
    "qwen3": ("Qwen3Config", {}),
    "gpt-oss": ("GptOssConfig", dict(num_local_experts=2, num_experts_per_tok=2, sliding_window=9)),
    "gemma2": ("Gemma2Config", dict(attn_logit_softcapping=2.0, sliding_window=9)),
}
DELTA_NET = dict(
    layer_types=["linear_attention"] * 2 + ["full_attention"], linear_conv_kernel_dim=4, linear_key_head_dim=16,
    linear_value_head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
MAMBA = dict(
    mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=4, mamba_chunk_size=32,
    layer_types=["mamba", "mamba", "attention"], num_local_experts=0, shared_intermediate_size=96,
)  # fmt: skip
RECURRENT = {
    "qwen3.5": ("Qwen3_5TextConfig", DELTA_NET),
    "qwen3-next": ("Qwen3NextConfig", DELTA_NET | EXPERTS),
    "olmo-hybrid": ("OlmoHybridConfig", DELTA_NET | dict(linear_num_key_heads=4)),
    "lfm2": ("Lfm2Config", dict(layer_types=["conv", "conv", "full_attention"], conv_L_cache=3)),
    "granite": ("GraniteMoeHybridConfig", MAMBA),
}


@pytest.fixture(autouse=True)
def cheap():
    """Without oneDNN, which compiles a bf16 matmul for every new shape: a sixth of the time."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


NOISE: dict[tuple, list] = {}  # of stock's passes, which tests of the same model and rows have in common


class Comparison(verify.Comparison):
    """One that asks NOISE, under `key`, before it runs passes. What is broken in a test is ours, and not in them."""

    def __init__(self, key: tuple, *args) -> None:
        super().__init__(*args)
        self._key = key

    def _perturb(self, num_passes, truth, seed):
        key = *self._key, num_passes, seed
        if key not in NOISE:
            NOISE[key] = super()._perturb(num_passes, truth, seed)
        return [*NOISE[key]]


def backend_of(model: torch.nn.Module, dtype: torch.dtype) -> types.SimpleNamespace:
    """What `HFBackend`'s methods for the self-check read of theirs."""
    return types.SimpleNamespace(_engine=types.SimpleNamespace(module=model), dtype=dtype)


def verdict(
    seed: int, dtype: torch.dtype, family: str = "qwen3", broken=None, perturbed: int = 1, rows=None
) -> verify.Verdict:
    name, fields = (CONFIGS | RECURRENT)[family]
    config = getattr(transformers, name)(**dict(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, attention_dropout=0.0, initializer_range=0.1,
    ) | fields)  # fmt: skip
    torch.manual_seed(seed)
    attention = "eager" if family in ("gpt-oss", "gemma2") else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # as drawn, a state would be gone after a token or two
            torch.nn.init.uniform_(parameter, -3.0, 1.0)
    batch = random_rollouts([(40 + seed % 7, [20 + seed % 5, 11])], 256, seed)
    if rows:
        batch = rollouts(rows, seed)
    for weight in batch.weights:  # as of `both_paths._weighted_loss`
        weight.copy_(1 / torch.arange(1, len(weight) + 1))

    def deepest(groups):
        return Plan(tuple(Nesting(group, 1, 1, offload=False).deepest() for group in groups))

    def ours(schedule, context_type):
        with pytest.MonkeyPatch.context() as patch:
            if broken:
                broken(patch)
            plan = deepest if rows and schedule == "phased" else None
            return torch.cat(run_shared(model, batch, schedule, context_type=context_type, wave_tokens=1, plan=plan))

    backend = backend_of(model, dtype)
    noise = functools.partial(HFBackend.rounding_noise, backend)
    with gradients_aside(model):
        stock = functools.partial(run_stock, model, batch)
        key = seed, dtype, family, rows
        comparison = Comparison(
            key, lambda: torch.cat(stock()), ours, noise, HFBackend.gradients(backend), lambda sums: sums, "log-probs"
        )
        return comparison.verdict(perturbed)


def scaled_kernel(patch):
    forward = cpu.forward
    patch.setattr(
        cpu, "forward", lambda *args, **options: (lambda out, lse: (out * 1.01, lse))(*forward(*args, **options))
    )


def last_prefix_token_dropped(patch):
    made = packed_row.calls_of

    def shorter(segments, *args):
        return made([s._replace(path=tuple((a, n - 1) for a, n in s.path if n > 1)) for s in segments], *args)

    patch.setattr(packed_row, "calls_of", shorter)


def window_ignored(patch):
    calls = PackedRow.calls
    patch.setattr(PackedRow, "calls", lambda self, params, device: calls(self, params._replace(window=None), device))


def positions_restarted(patch):
    token_outputs = HookedModel.token_outputs
    patch.setattr(
        HookedModel, "token_outputs",
        lambda self, ids, positions, *args, **kw: token_outputs(self, ids, positions.clamp(max=30), *args, **kw),
    )  # fmt: skip


@pytest.mark.parametrize("seeds", [10, pytest.param(100, marks=pytest.mark.full)])
def test_bf16_rounding_passes(seeds):
    verdicts = [verdict(seed, torch.bfloat16) for seed in range(seeds)]
    assert not [v for v in verdicts if v.missed], [str(v) for v in verdicts if v.missed]
    assert max(v.attention.ratio for v in verdicts) > 0.5, "the figure measures something"


@pytest.mark.parametrize(
    ("dtype", "seeds"),
    [
        (torch.bfloat16, 3), pytest.param(torch.float32, 3, marks=pytest.mark.full),
        *(pytest.param(dtype, 10, marks=pytest.mark.full) for dtype in (torch.bfloat16, torch.float32)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "rows", [thinking_stripped, *(pytest.param(x, marks=pytest.mark.more) for x in (thinking_kept, tree_search))]
)
def test_rounding_of_trees_passes(rows, dtype, seeds):
    verdicts = [verdict(seed, dtype, rows=rows) for seed in range(seeds)]
    assert not [v for v in verdicts if v.missed], [str(v) for v in verdicts if v.missed]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [thinking_stripped, pytest.param(tree_search, marks=pytest.mark.more)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.more) for seed in (1, 2))])
def test_an_ancestor_that_is_left_out_is_caught(rows, dtype, seed):
    found = verdict(seed, dtype, broken=ancestor_left_out, rows=rows)
    assert found.missed and found.attention.ratio > 1.5 * MAX_ATTENTION, str(found)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (thinking_kept, torch.float32), (tree_search, torch.bfloat16),
        pytest.param(thinking_kept, torch.bfloat16, marks=pytest.mark.more),
        pytest.param(tree_search, torch.float32, marks=pytest.mark.more),
    ],
)  # fmt: skip
def test_a_dropped_gradient_of_shared_outputs_is_caught_by_gradients_alone(rows, dtype):
    found = verdict(0, dtype, broken=gradients_of_shared_outputs_dropped, rows=rows)
    assert found.outputs.ratio <= verify.MAX_OUTPUTS and found.attention.ratio <= MAX_ATTENTION, str(found)
    assert found.gradients.ratio > (10 if dtype == torch.bfloat16 else 1e4), str(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(  # the first is in test_nested_engine.py
    "broken", [pytest.param(x, marks=() if i else pytest.mark.more) for i, x in enumerate(BROKEN)]
)
def test_broken_nesting_is_caught_by_gradients_alone(broken, dtype):
    found = verdict(0, dtype, broken=broken, rows=tree_search)
    assert found.outputs.ratio <= verify.MAX_OUTPUTS and found.attention.ratio <= MAX_ATTENTION, str(found)
    assert found.gradients.ratio > (10 if dtype == torch.bfloat16 else 1e4), str(found)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if (family == "gpt-oss") == (dtype == torch.float16) else pytest.mark.more)
        for family in CONFIGS for dtype in (torch.float32, torch.float16)
    ],
    ids=str,
)  # fmt: skip
def test_rounding_passes_in_every_dtype_and_core(family, dtype):
    for seed in range(3):
        found = verdict(seed, dtype, family)
        assert not found.missed, str(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "family",
    [pytest.param(x, marks=pytest.mark.more if x in ("qwen3-next", "olmo-hybrid") else ()) for x in RECURRENT],
)  # fmt: skip
def test_rounding_passes_in_recurrent_models(family, dtype):
    found = verdict(0, dtype, family)
    assert not found.missed, str(found)
    assert found.gradients.ratio > 0.1, "the figure measures something"


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", RECURRENT)
def test_rounding_passes_in_recurrent_models_over_100_seeds(family, dtype):
    found = [verdict(seed, dtype, family) for seed in range(100)]
    assert not [v for v in found if v.missed], [str(v) for v in found if v.missed]


# A delta rule, a short convolution alone, and a state space.
STATEFUL = ["qwen3.5", *(pytest.param(family, marks=pytest.mark.more) for family in ("lfm2", "granite"))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize(
    "broken",
    [pytest.param(states_of_zero, marks=pytest.mark.more), scan_states_of_zero, conv_tail_one_token_off],
)
def test_a_wrong_state_is_caught_by_the_recurrence_of_its_layer(broken, family, dtype):
    scan_alone = broken is scan_states_of_zero
    if scan_alone and family == "lfm2":
        pytest.skip("it scans nothing")
    found = verdict(0, dtype, family, broken)
    least = 1e5 if dtype == torch.float32 else 2 * MAX_RECURRENCE if scan_alone else 10
    assert found.missed and found.recurrence.ratio > least, str(found)
    assert " differs from whole rows by " in str(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize(
    "broken", [gradients_dropped_in_packed, pytest.param(gradients_dropped_in_phased, marks=pytest.mark.more)]
)
def test_a_dropped_gradient_of_states_is_caught_by_gradients_alone(broken, family, dtype):
    found = verdict(0, dtype, family, broken)
    assert found.outputs.ratio <= verify.MAX_OUTPUTS, str(found)
    assert found.recurrence.ratio <= MAX_RECURRENCE, str(found)
    assert found.gradients.ratio > (10 if dtype == torch.bfloat16 else 1e4), str(found)


KEY_GRADIENTS = (
    gradients_of_keys_dropped_in_packed, gradients_of_keys_dropped_in_phased, gradients_of_one_layer_dropped,
    earlier_waves_dropped,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "broken"),
    [
        pytest.param(family, broken, marks=() if family == "qwen3" or broken is quick else pytest.mark.more)
        for family, quick in zip(CONFIGS, (None, KEY_GRADIENTS[3], KEY_GRADIENTS[0]), strict=True)
        for broken in KEY_GRADIENTS
    ],
)
def test_a_dropped_gradient_of_keys_is_caught_by_gradients_alone(family, broken, dtype):
    found = verdict(0, dtype, family, broken)
    assert found.outputs.ratio <= verify.MAX_OUTPUTS and found.attention.ratio <= MAX_ATTENTION, str(found)
    assert found.gradients.ratio > (10 if dtype == torch.bfloat16 else 1e4), str(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", STATEFUL)
def test_a_state_that_a_fork_writes_into_is_caught_by_the_next_wave(family, dtype):
    found = verdict(0, dtype, family, fork_writes_into_the_state)
    assert found.missed and found.gradients.ratio > (10 if dtype == torch.bfloat16 else 1e4), str(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("prefix_len", "mean"), [(64, 0.0), (2048, 1.0), (4096, 1.0)])
def test_long_prefixes_round_as_short_ones(prefix_len, mean, dtype):
    """In fp32 the rounding of log-sum-exps is the larger part where many values have a mean."""
    torch.manual_seed(0)
    group = Group.of_prompt((0, 1), prefix_len, (24, 24))
    packed_row = pack_groups([group], [0, prefix_len + 24])
    q, k = (torch.randn(packed_row.num_tokens, heads, 16).to(dtype) for heads in (4, 2))
    v = (torch.randn(packed_row.num_tokens, 2, 16) + mean).to(dtype)
    scores = AttentionParams(0.25)
    out = GroupedAttention.apply(q, k, v, None, None, AttentionSite(packed_row, cpu, scores, (), 0), None)
    found = [LayerProbe() for _ in range(2)]
    found[0].attention(0, packed_row, q, k, v, None, scores, out)
    found[1].attention(0, packed_row, q, k, v, None, scores, out * (1 + 1e-2))
    assert found[0].worst_attention.ratio < 1.5 and found[1].worst_attention.ratio > MAX_ATTENTION


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [scaled_kernel, last_prefix_token_dropped])
def test_a_wrong_kernel_is_caught(broken, dtype):
    for seed in range(3):
        found = verdict(seed, dtype, broken=broken)
        assert found.missed and found.attention.ratio > 1.5 * MAX_ATTENTION, str(found)


def test_a_window_that_is_ignored_is_caught():
    found = verdict(0, torch.bfloat16, "gpt-oss", broken=window_ignored)
    assert found.attention.ratio > 10 * MAX_ATTENTION
    assert re.search(r"attention of layer \d differs from dense float64 by \S+ times rounding noise", str(found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_wrong_positions_are_caught_by_log_probs(dtype):
    found = verdict(0, dtype, broken=positions_restarted)
    assert found.attention.ratio <= MAX_ATTENTION < verify.MAX_OUTPUTS < found.outputs.ratio, str(found)


@pytest.mark.parametrize("nests", [True, False])
def test_a_tree_that_no_budget_holds_is_checked_whole_by_what_its_engine_runs(nests):
    """Stages of a pipeline, which nest no passes, would leave out the rows of nested ones."""
    strands = (Strand(0, 0, 9), Strand(0, 9, 39, 0), Strand(1, 9, 39, 0))
    group = Group((0, 1, 2), (44, 44, 14), strands, (Fork(1, 39), Fork(2, 39), Fork(0, 9)), (39, 39, 9))
    plans = {path: plan_to_check(group, 50, path, nests) for path in ("packed", "phased")}
    assert {path: plan.depth for path, plan in plans.items()} == {"packed": 1, "phased": 2 if nests else 1}
    in_waves = sorted(row for wave in plans["phased"].waves for piece in wave.groups for row in piece.rows)
    assert in_waves == [0, 1, 2]


def _vision_rows(responses: list[list[int]], pixels: list) -> tuple:
    """Rows whose prompt is 1 5 1, where 5 is the token of an image, and a backend on one of two ranks."""

    def nested(rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    rows = {"prompts": [[1, 5, 1]] * len(responses), "responses": responses}
    rows["input_ids"] = [[*pair[0], *pair[1]] for pair in zip(*rows.values(), strict=True)]
    fields = {name: nested(x) for name, x in rows.items()} | {"multi_modal_inputs": pixels, "uid": ["a"] * len(pixels)}
    data = tu.get_tensordict(fields, {"max_token_len_per_gpu": 100})
    config = types.SimpleNamespace(model_type="qwen3_vl", image_token_id=5, video_token_id=6)
    ranks = types.SimpleNamespace(max_over_ranks=lambda lacking: lacking)
    facts = StockFacts(dense_mask=False, separates_rows=False, wrong_when_sharded=None)
    return BatchRows(data), types.SimpleNamespace(config=config, ranks=ranks, stock_facts=facts, trains=True)


def test_every_row_of_a_checked_tree_runs_the_tower_as_often_as_those_of_other_ranks():
    """Turns of a session may show more and more. A rank whose stock passes ran the tower once more would wait for ever:
    the other rank, which stands in here, has an image with every row."""
    image, clip = {"pixel_values": torch.ones(1)}, {"pixel_values_videos": torch.ones(1)}
    data, backend = _vision_rows([[1]] * 6, [image, image | clip, image, {}, clip, None])
    groups = [
        Group.of_prompt((0, 1), 1, (1, 1)),
        Group.of_prompt((2, 3), 1, (1, 1)),
        Group.of_prompt((4, 5), 1, (1, 1)),
    ]
    backend.ranks.max_over_ranks = lambda lacking: [a or b for a, b in zip(lacking, (False, True), strict=True)]
    assert candidates(backend, data, groups, 100) == groups[1:]
    # With VeOmni every row runs it twice, so that any will do.
    backend.stock_facts = backend.stock_facts._replace(equal_tower_runs=True)
    backend.ranks.max_over_ranks = lambda lacking: lacking
    assert candidates(backend, data, groups, 100) == groups


def test_rows_that_verls_own_path_cannot_compute_are_not_checked():
    """A model may sample the token of an image (5) or video (6)."""
    data, backend = _vision_rows([[1, 1], [1, 5], [6, 1], [1, 1]], [{"pixel_values": torch.ones(1)}] * 4)
    groups = [Group.of_prompt((0, 1), 2, (2, 2)), Group.of_prompt((2,), 2, (2,)), Group.of_prompt((3,), 2, (2,))]
    strands, forks = (Strand(1, 0, 2), Strand(1, 2, 3, 0)), (Fork(1, 3), Fork(1, 3), Fork(0, 2))
    tree = Group((0, 1, 3), (4, 3, 4), strands, forks, (2, 2, 2))
    assert [group.rows for group in candidates(backend, data, groups, 100)] == [(0,), (3,)]
    # A row that lies wholly in strands goes with the row behind it, whose tokens it has.
    assert [group.rows for group in candidates(backend, data, [tree], 100)] == [(0,)]
    assert candidates(backend, data, groups[1:2], 100) == []


def test_a_check_that_failed_is_due_again(monkeypatch):
    data, backend = _vision_rows([[1, 1]] * 2, [{"pixel_values": torch.ones(1)}] * 2)
    checks = Verification(backend, PrefixConfig(), None)
    verdict = mock.Mock(side_effect=[torch.OutOfMemoryError(), verify.Verdict(*[Figure(0.0, 1.0, "")] * 4)])
    monkeypatch.setattr(checks, "_verdict", verdict)
    backend.shape, backend.output_names = types.SimpleNamespace(recurrent_layers=0), lambda flags: ["log_probs"]
    args = data, [Group.of_prompt((0, 1), 2, (2, 2))], Plan(()), Loss(None), False
    with pytest.raises(torch.OutOfMemoryError):
        checks.check(*args)
    assert "prefix/verify_log_probs" in checks.check(*args)[1] and checks.check(*args) == (None, {})


def test_a_miss_names_the_update_and_the_rows(monkeypatch):
    """Updates count that took verl's own path, or waited for a rank's group; log-probs do not."""
    data, backend = _vision_rows([[1, 1]] * 2, [{"pixel_values": torch.ones(1)}] * 2)
    checks = Verification(backend, PrefixConfig(), None)
    monkeypatch.setattr(checks, "_verdict", lambda *args: verify.Verdict(*[Figure(9.0, 1.0, "")] * 4))
    args = data, [Group.of_prompt((0, 1), 2, (2, 2))], Plan(()), Loss(None)
    for forward_only in (False, True, False, False):
        checks.count(forward_only)
    assert checks.check(*args, True) == (None, {})
    with pytest.raises(RuntimeError, match=r"prefix.verify, update 3: .*\(this rank compared rows of uid a\)"):
        checks.check(*args, False)
    goes_on = Verification(backend, PrefixConfig(verify_action="fallback"), None)
    monkeypatch.setattr(goes_on, "_verdict", checks._verdict)
    backend.shape, backend.output_names = types.SimpleNamespace(recurrent_layers=0), lambda flags: ["log_probs"]
    path, _ = goes_on.check(*args, False)
    assert "updates of this step still go by log-probs of the shared path" in path.reason


def test_few_tokens_of_one_rank_are_judged_together_with_those_of_the_others():
    none = types.SimpleNamespace(parts={}, keep=list, distances=list, clear=lambda: None)

    def found(reduce_sum=lambda values: values, ours=(5.0, 0.0)):
        stock = itertools.chain([[0.0, 0.0]], itertools.repeat([1.0, 0.0]))  # the truth, then perturbed
        return verify.Comparison(
            lambda: torch.tensor(next(stock)),
            lambda *args: torch.tensor(ours),
            contextlib.nullcontext,
            none,
            reduce_sum,
            "log-probs",
        ).verdict(3)

    assert found().outputs.ratio == pytest.approx(5) and found().missed
    seven_others = found(lambda values: [values[0] + 7, values[1] + 7, values[2] + 7, values[3]])
    assert seven_others.outputs.ratio == pytest.approx(2) and not seven_others.missed
    assert found(ours=(float("nan"), 0.0)).missed
    nothing = verify.Comparison(
        lambda: torch.ones(0), lambda *args: torch.ones(0), contextlib.nullcontext, none, list, "log-probs"
    )
    assert not nothing.verdict(3).missed


def test_what_missed_is_said_first():
    right, wrong, none = Figure(1.0, 2.0, "this is off"), Figure(float("inf"), 2.0, "that is off"), Figure(0.0, 2.0, "")
    said = str(verify.Verdict(right, wrong, none, right)).split("; within limits: ")
    assert said[0].startswith("that is off by inf") and said[1].count("this is off by 1 times") == 2
    assert str(verify.Verdict(right, none, none, none)).startswith("this is off by 1 times")


@pytest.mark.parametrize("off", [1e-3, float("nan"), 0.0])
def test_a_part_without_noise_may_not_be_off(off):
    """Its ratio has no unit. Where ours is off by nothing too, rows are empty or nothing reaches the part."""
    # Perturbed, packed, phased, and perturbed again.
    distances = itertools.chain([[0.0]] * 4, [[off]], itertools.repeat([0.0]))
    part = types.SimpleNamespace(
        parts={"a part": []}, keep=lambda: [1.0], distances=lambda: next(distances), clear=lambda: None
    )
    zeros = verify.Comparison(
        lambda: torch.zeros(2), lambda *args: torch.zeros(2), contextlib.nullcontext, part, list, "log-probs"
    )
    found = zeros.verdict(3)
    assert found.missed == (off != 0) == ("gradients of a part differ from the stock path's" in str(found))


def test_a_part_that_is_not_finite_with_noise_has_no_unit():
    """An error over infinite noise would be 0. The other part is compared."""
    distances = itertools.chain([[float("inf"), 1.0]] * 3, itertools.repeat([1e9, 4.0]))
    parts = types.SimpleNamespace(
        parts={"a": [], "b": []}, keep=lambda: [1.0, 1.0], distances=lambda: next(distances), clear=lambda: None
    )
    ones = verify.Comparison(
        lambda: torch.ones(2), lambda *args: torch.ones(2), contextlib.nullcontext, parts, list, "log-probs"
    )
    found = ones.verdict(3)
    assert found.not_finite == ["gradients of a"] and found.gradients.ratio == 2 and not found.missed


def test_what_rounding_does_in_some_passes_alone_is_not_missed():
    """Ours takes a token's other expert, as some perturbed passes do, but none of the first. Wrong stays wrong."""

    def ratio(ours: float) -> tuple[float, bool, int]:
        passes = itertools.count()
        seeds.clear()
        moved = (0.0, 1.0, 1.0, 1.0, *[1.0, 30.0, 1.0, 1.0] * 2)  # the truth, perturbed, perturbed once more
        stock = (torch.tensor([moved[i]]) for i in passes)
        none = types.SimpleNamespace(parts={}, keep=list, distances=list, clear=lambda: None)
        comparison = verify.Comparison(
            lambda: next(stock), lambda *args: torch.tensor([ours]), noise, none, list, "log-probs"
        )
        found = comparison.verdict(3)
        return found.outputs.ratio, found.missed, next(passes)

    def noise(seed: int) -> contextlib.AbstractContextManager:
        seeds.append(seed)
        return contextlib.nullcontext()

    seeds: list[int] = []
    assert ratio(2.0) == (pytest.approx(2.0), False, 4) and seeds == [0]
    assert ratio(30.0) == (pytest.approx((900 * 11 / 1809) ** 0.5), False, 12) and seeds == [0, 3]
    assert ratio(300.0)[1:] == (True, 12)


def test_noise_is_where_the_output_is():
    """Parameters wait on the host under fsdp_config.offload_policy=True; here on meta, where no generator is."""

    class Attention(torch.nn.Module):
        layer_idx, is_causal = 0, True

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1, device="meta"))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x, None

    module, x = Attention(), torch.ones(100)
    found = []
    for seed in (0, 3):
        with HFBackend.rounding_noise(backend_of(module, torch.bfloat16), seed):
            found += [module(x)[0] for _ in range(2)]
        assert all(0 < (one - x).abs().max() <= torch.finfo(torch.bfloat16).eps for one in found)
    assert not any(torch.equal(*pair) for pair in itertools.combinations(found, 2))


def test_gradients_that_a_run_has_gathered_wait_for_the_check():
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Lfm2Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, layer_types=["conv", "full_attention"], pad_token_id=0,
        )
    )  # fmt: skip
    batch = random_rollouts([(9, [4, 3])], 64)
    run_stock(model, batch)
    gathered = [parameter.grad.clone() for parameter in model.parameters()]
    gradients = HFBackend.gradients(backend_of(model, torch.float32))
    with gradients_aside(model):
        assert all(parameter.grad is None for parameter in model.parameters())
        run_stock(model, batch)
        norms = gradients.keep()
        gradients.clear()
        run_stock(model, batch)
        assert list(gradients.parts) == ["the mixer of layer 0", "layer 0", "layer 1", "all else"] and min(norms) > 0
        assert max(gradients.distances()) == 0.0
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), gathered, strict=True))
