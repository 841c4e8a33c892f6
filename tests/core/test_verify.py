"""The self-check: rounding passes over 100 seeds; kernels that are wrong on purpose are caught, in bf16 too."""

import contextlib
import dataclasses

import pytest
import torch
import transformers

from verl_prefix.core.attention import AttentionParams, GroupedAttention
from verl_prefix.core.groups import Group
from verl_prefix.core.kernels import cpu
from verl_prefix.core.layout import Layout, build_layout
from verl_prefix.engine import self_check as verify
from verl_prefix.models.hookup import HookedModel
from verl_prefix.testing import random_rollouts, run_shared, run_stock

CONFIGS = {
    "qwen3": ("Qwen3Config", {}),
    "gpt-oss": ("GptOssConfig", dict(num_local_experts=2, num_experts_per_tok=2, sliding_window=9)),
    "gemma2": ("Gemma2Config", dict(attn_logit_softcapping=2.0, sliding_window=9)),
}


def verdict(seed: int, dtype: torch.dtype, family: str = "qwen3", broken=None) -> verify.Verdict:
    name, fields = CONFIGS[family]
    config = getattr(transformers, name)(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, attention_dropout=0.0, initializer_range=0.1, **fields,
    )  # fmt: skip
    torch.manual_seed(seed)
    attention = "sdpa" if family == "qwen3" else "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    batch = random_rollouts([(40 + seed % 7, [20 + seed % 5, 11])], 256, seed)

    def ours(schedule, inspect):
        with pytest.MonkeyPatch.context() as patch:
            if broken:
                broken(patch)
            return torch.cat(run_shared(model, batch, schedule, train=False, inspect=inspect))

    with torch.no_grad():
        return verify.check(
            lambda: torch.cat(run_stock(model, batch, train=False)), ours, lambda: verify.rounding_noise(model, dtype)
        )


def scaled_kernel(patch):
    forward = cpu.forward
    patch.setattr(
        cpu, "forward", lambda *args, **options: (lambda out, lse: (out * 1.01, lse))(*forward(*args, **options))
    )


def last_prefix_token_dropped(patch):
    made = Layout._reads_of

    def shorter(self, *args):
        segments = tuple(s._replace(prefix_len=max(0, s.prefix_len - 1)) for s in self.segments)
        return made(dataclasses.replace(self, segments=segments), *args)

    patch.setattr(Layout, "_reads_of", shorter)


def window_ignored(patch):
    reads = Layout.reads
    patch.setattr(Layout, "reads", lambda self, window, device: reads(self, None, device))


def positions_restarted(patch):
    token_outputs = HookedModel.token_outputs
    patch.setattr(
        HookedModel, "token_outputs",
        lambda self, ids, positions, *args: token_outputs(self, ids, positions.clamp(max=30), *args),
    )  # fmt: skip


def test_bf16_rounding_passes_over_100_seeds():
    verdicts = [verdict(seed, torch.bfloat16) for seed in range(100)]
    assert not [v for v in verdicts if v.missed], [str(v) for v in verdicts if v.missed]
    assert max(v.attention for v in verdicts) > 0.5, "the figure measures something"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_rounding_passes_in_every_dtype_and_core(family, dtype):
    for seed in range(5):
        assert not verdict(seed, dtype, family).missed, str(verdict(seed, dtype, family))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("prefix_len", "mean"), [(64, 0.0), (2048, 1.0), (4096, 1.0)])
def test_long_prefixes_round_as_short_ones(prefix_len, mean, dtype):
    """In fp32 the rounding of log-sum-exps is the larger part where many values have a mean."""
    torch.manual_seed(0)
    group = Group((0, 1), prefix_len, (24, 24))
    layout = build_layout([group], [0, prefix_len + 24])
    q, k = (torch.randn(layout.num_tokens, heads, 16).to(dtype) for heads in (4, 2))
    v = (torch.randn(layout.num_tokens, 2, 16) + mean).to(dtype)
    scores = AttentionParams(0.25)
    out = GroupedAttention.apply(q, k, v, None, layout, cpu, scores, None, 0)
    found = [verify.AttentionCheck() for _ in range(2)]
    found[0](0, layout, q, k, v, None, scores, out)
    found[1](0, layout, q, k, v, None, scores, out * (1 + 1e-2))
    assert found[0].worst < 1.5 and found[1].worst > verify.MAX_ATTENTION


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("broken", [scaled_kernel, last_prefix_token_dropped])
def test_a_wrong_kernel_is_caught(broken, dtype):
    for seed in range(5):
        found = verdict(seed, dtype, broken=broken)
        assert found.missed and found.attention > 1.5 * verify.MAX_ATTENTION, str(found)


def test_a_window_that_is_ignored_is_caught():
    found = verdict(0, torch.bfloat16, "gpt-oss", broken=window_ignored)
    assert found.attention > 10 * verify.MAX_ATTENTION and "attention of layer" in str(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_wrong_positions_are_caught_by_log_probs(dtype):
    found = verdict(0, dtype, broken=positions_restarted)
    assert found.attention <= verify.MAX_ATTENTION < verify.MAX_LOG_PROBS < found.log_probs, str(found)


def test_few_tokens_of_one_rank_are_judged_together_with_those_of_the_others():
    def found(reduce_sum=lambda values: values, ours=(5.0, 0.0)):
        stock = iter([[0.0, 0.0], *[[1.0, 0.0]] * 3])  # the truth, then perturbed
        return verify.check(
            lambda: torch.tensor(next(stock)), lambda *args: torch.tensor(ours), contextlib.nullcontext, reduce_sum
        )

    assert found().log_probs == pytest.approx(5) and found().missed
    seven_others = found(lambda values: [values[0] + 7, values[1] + 7, values[2] + 7])
    assert seven_others.log_probs == pytest.approx(2) and not seven_others.missed
    assert found(ours=(float("nan"), 0.0)).missed
    assert not verify.check(lambda: torch.ones(0), lambda *args: torch.ones(0), contextlib.nullcontext).missed


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
    with verify.rounding_noise(module, torch.bfloat16):
        off = (module(x)[0] - x).abs().max()
    assert 0 < off <= torch.finfo(torch.bfloat16).eps
