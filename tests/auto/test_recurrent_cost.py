"""What recurrent layers cost: FLOPs that run, states, memory, and what sharing gains on models of published sizes."""

import sys

import pytest
import torch
import transformers
from runners import random_rollouts, run_shared
from torch.utils.flop_counter import FlopCounterMode

from verl_prefix.auto import cost
from verl_prefix.auto.calibration import calibrate
from verl_prefix.auto.cost import Memory, PassCost, Rates
from verl_prefix.auto.shape import ModelShape, kept_by, model_shape
from verl_prefix.core.groups import Group
from verl_prefix.core.planning import make_plan
from verl_prefix.models.recurrent import GatedDeltaNet, Mamba2, _EmptyCache, mixer_of
from verl_prefix.models.support import unsupported_reasons
from verl_prefix.testing import write_tiny_model

GIB = 2**30


def on_meta(config) -> ModelShape:
    seeing = getattr(config, "vision_config", None) is not None
    auto_class = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return model_shape(auto_class.from_config(config), torch.bfloat16)


MOE = dict(num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize(
    ("family", "fields", "tolerance"),
    [
        ("qwen3_5_text", {}, 5e-4),
        ("qwen3_next", {}, 5e-3),  # its router, whose weight is no Linear's, is left out
        ("olmo_hybrid", {}, 5e-4),
        ("lfm2", {}, 5e-4),  # whose convolutions are 1e-3 of all
        ("bamba", dict(mamba_n_groups=8), 5e-4),  # in torch, heads of a group do not share a product
        ("granitemoehybrid", dict(mamba_n_groups=8) | MOE, 5e-4),
    ],
)
def test_flops_are_those_of_the_matmuls_and_convolutions_that_run(tmp_path, family, fields, tolerance):
    """A prefix and suffixes of one chunk of the delta rule, which nothing pads."""
    config = transformers.AutoConfig.from_pretrained(write_tiny_model(tmp_path, family=family, **fields))
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    batch = random_rollouts([(65, [64, 64, 64])], 400)
    with FlopCounterMode(display=False) as counter:
        run_shared(model, batch, "packed", train=False)
    found = model_shape(model, torch.float32)
    linear = 256 * found.linear - 64 * found.last
    assert counter.get_total_flops() == pytest.approx(linear + 192 * found.head, rel=tolerance)
    assert (found.last > 0) == (family in ("qwen3_5_text", "olmo_hybrid", "lfm2", "bamba"))
    assert (found.windows, found.layers, found.recurrent_layers) == ((None,), 2, 1)
    assert found.kv == 2.0 * 2 * 32 * 4, "one of two layers has keys and values"
    assert found.pairs(64, 0) == 64 * 65 / 2


CONV = {"layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)]}
GRANITE = dict(
    hidden_size=4096, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8, intermediate_size=768,
    shared_intermediate_size=1536, num_local_experts=72, num_experts_per_tok=10, vocab_size=100352, mamba_n_heads=128,
    mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_expand=2,
    layer_types=["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
)  # fmt: skip
# Config class, fields -> parameters and those that a token meets in its layers, in 1e9; layers with attention and
# without; fp32 numbers of a state, by hand.
MODELS = {
    "Qwen3.5-9B": ("Qwen3_5TextConfig", {}, 8.95, 6.9, 8, 24, 32 * 128 * 128 + 3 * 8192),
    "Qwen3.5-35B-A3B": ("Qwen3_5MoeTextConfig", {}, 34.7, 2.4, 10, 30, 32 * 128 * 128 + 3 * 8192),
    "Qwen3-Next-80B-A3B": ("Qwen3NextConfig", {}, 79.7, 3.2, 12, 36, 32 * 128 * 128 + 3 * 8192),
    "LFM2-1.2B": ("Lfm2Config", dict(hidden_size=2048, num_hidden_layers=16) | CONV, 1.17, 1.04, 6, 10, 2 * 2048),
    "Granite-4-H-Small": ("GraniteMoeHybridConfig", GRANITE, 32.6, 8.4, 4, 36, 128 * 64 * 128 + 3 * 8448),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_of_published_sizes(name):
    config_class, fields, parameters, active, attention, recurrent, state = MODELS[name]
    config = getattr(transformers, config_class)(**fields)
    assert not unsupported_reasons(config)
    found = on_meta(config)
    assert found.parameters / 1e9 == pytest.approx(parameters, rel=0.01)
    assert found.linear / 2e9 == pytest.approx(active, rel=0.05)
    assert (len(found.windows), found.recurrent_layers) == (attention, recurrent)
    assert found.state == 4 * recurrent * state


@pytest.mark.parametrize(("prefix", "over_stock", "over_lean"), [(2400, 5.1, 4.5), (8000, 7.2, 6.4)])
def test_what_sharing_gains_on_a_model_like_qwen3_5_9b(prefix, over_stock, over_lean):
    """Counted by hand for a report of its own, with the recurrence as verl counts it (15 FLOPs per number of a state,
    forward and backward): lean is stock with lm_head on responses alone. It has the last layer compute every token."""
    found, rates, row = on_meta(transformers.Qwen3_5TextConfig()), Rates(), prefix + 256
    (ours,) = found.passes_of(make_plan([Group.of_prompt(tuple(range(8)), prefix, (256,) * 8)], 10**6, "packed"))
    for head, gain in ((row, over_stock), (256, over_lean)):
        stock = [PassCost(row, head, found.pairs(row, 0))] * 8
        whole = rates.seconds(found, [ours._replace(skipped=0)])
        assert rates.seconds(found, stock) / whole == pytest.approx(gain, abs=0.05)
    assert whole / rates.seconds(found, [ours]) == pytest.approx(1.02, abs=0.01)


def test_states_are_in_the_peak_of_an_update():
    """Qwen3.5-9B-like, on 8 ranks: 50 MiB of states for each prefix and each suffix that starts from one."""
    found = on_meta(transformers.Qwen3_5TextConfig())
    without = {**vars(found), "state": 0.0}
    without.pop("_layers_by_window", None)
    stateless = ModelShape(**without)

    def added(groups, schedule, checkpointed):
        """GiB that states add, and all that an update adds."""
        memory = Memory(8, checkpointed, False, 4096, False)
        plan = make_plan(groups, 1 << 20, schedule, 256 if schedule == "phased" else None)
        peaks = [cost.peak_bytes(shape, plan, (), memory) / GIB for shape in (found, stateless)]
        return peaks[0] - peaks[1], peaks[0]

    many, few = ([Group.of_prompt(tuple(range(8 * i, 8 * i + 8)), 64, (32,) * 8) for i in range(n)] for n in (32, 1))
    each = found.state / GIB
    assert each == pytest.approx(50.2 / 1024, abs=1e-4)
    assert added(few, "packed", False)[0] == pytest.approx(8 * each)
    assert added(few, "packed", True)[0] == pytest.approx(8 * each * 2 / 24), "of one layer, with gradients"
    assert added(many, "phased", False)[0] == pytest.approx(2 * 32 * each + 8 * each), (
        "the cache, its gradients, a wave"
    )
    share, whole = added(many, "phased", True)
    assert share == pytest.approx(2 * 32 * each + 8 * each * 2 / 24) and share > whole / 4


class Keeps(torch.autograd.Function):
    """Stands for a kernel: like its first input, with these tensors kept for backward."""

    @staticmethod
    def forward(ctx, like, *kept):
        ctx.save_for_backward(*kept)
        return torch.empty_like(like)


def delta_rule(q, k, v, g, beta, **options):
    """What flash-linear-attention 0.6 keeps: all inputs, contiguous, normalised q and k, and a chunk's triangle."""
    tokens, heads = q.shape[1:3]
    kept = (q.clone(), k.clone(), v.contiguous(), g.clone(), beta.contiguous(), q.new_empty(tokens, heads, 64))
    return Keeps.apply(v, *kept, *(torch.empty(tokens, heads) for _ in range(2))), None


def convolution(x, weight, **options):
    return Keeps.apply(x, x, weight)


def state_space(x, dt, A, B, C, **options):
    """What mamba_ssm 2.3 keeps of packed rows (models/recurrent.py): inputs, output, and a cumulative sum in fp32."""
    kept = (*(y.contiguous().clone() for y in (x, dt, B, C)), torch.empty_like(x), torch.empty(dt.shape))
    return Keeps.apply(x, *kept), None


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid", "lfm2"])
def test_a_mixer_keeps_what_is_counted(family, monkeypatch, tmp_path):
    """Bytes that autograd holds after a bf16 forward with stand-ins for the kernels."""
    wide = dict(linear_key_head_dim=64, linear_value_head_dim=64) if family == "qwen3_5_text" else {}
    config = transformers.AutoConfig.from_pretrained(write_tiny_model(tmp_path, family=family, **wide))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    (mixer,) = filter(None, map(mixer_of, model.modules()))
    module, held = mixer.module, {}
    hidden = torch.randn(1, 96, 128, dtype=torch.bfloat16).requires_grad_()
    ignored = {x.untyped_storage().data_ptr() for x in (hidden, *module.parameters())}

    def hold(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in ignored:
            held[storage.data_ptr()] = storage.nbytes(), x  # x: no other tensor gets its address
        return x

    if isinstance(mixer, GatedDeltaNet):
        monkeypatch.setattr(module, "chunk_gated_delta_rule", delta_rule)
        monkeypatch.setattr(module, "causal_conv1d_fn", convolution)
        fused = torch.nn.Identity()  # flash-linear-attention's norm keeps both inputs
        fused.forward = lambda x, gate: Keeps.apply(x, x, gate, torch.empty(len(x)))
        monkeypatch.setattr(module, "norm", fused)
        run = module
    elif isinstance(mixer, Mamba2):
        space = sys.modules[type(module).__module__]
        monkeypatch.setattr(space, "causal_conv1d_fn", convolution)
        monkeypatch.setattr(space, "mamba_chunk_scan_combined", state_space)

        def run(hidden):
            return module.cuda_kernels_forward(hidden, _EmptyCache(), None)
    else:
        run = module.slow_forward
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x):
        out = run(hidden)
    assert out.requires_grad and len(held) > 3
    counted = sum(nbytes for nbytes, _ in held.values()) / 96 / 2
    assert kept_by(mixer) == pytest.approx(counted, rel=0.05)


def test_calibration_of_a_model_without_attention_layers_has_no_rate_for_it():
    config = transformers.GraniteMoeHybridConfig(num_hidden_layers=2, layer_types=["mamba"] * 2, num_local_experts=0)
    found, true, clock = on_meta(config), Rates(1e-3, 1e-12, 0.0, 2e-12), [0.0]
    assert found.windows == () and found.pairs(100, 10) == 0

    def run(groups):
        clock[0] += true.seconds(found, [found.pass_of(groups)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_prefix.auto.calibration.time.perf_counter", lambda: clock[0])
        rates = calibrate(found, run, max_tokens=512, unit=64)
    assert rates.attention == 0.0
    assert (rates.fixed, rates.linear, rates.head) == pytest.approx((true.fixed, true.linear, true.head), rel=1e-3)


def test_a_least_time_step_is_refused():
    """Rows of a scan are padded by tokens of time step 0, which a model with a least one would not have."""
    assert not unsupported_reasons(transformers.BambaConfig())
    (reason,) = unsupported_reasons(transformers.BambaConfig(time_step_limit=(0.001, 0.1)))
    assert reason.startswith("time_step_limit=(0.001, 0.1)")


@pytest.mark.parametrize("config_class", ["BambaConfig", "Qwen3NextConfig"])
def test_another_activation_behind_convolutions_is_refused(config_class):
    """Bamba would then convolve across segments, past causal_conv1d; others would leave the activation out."""
    (reason,) = unsupported_reasons(getattr(transformers, config_class)(hidden_act="gelu"))
    assert reason.startswith("hidden_act=gelu")
