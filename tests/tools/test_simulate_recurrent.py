"""Gated delta nets in the simulator: FLOPs, memory, launches and host syncs of stand-ins for kernels that need a GPU.

MOCK: flash-linear-attention and causal_conv1d, by tools/simulate/scans.py. Every case runs in one other process.
"""

import contextlib
import gc
import json
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from simulations import planned, training_command, with_memory, without_step
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from verl_prefix.auto.cost import Memory, peak_bytes
from verl_prefix.auto.shape import DELTA_CHUNK, ModelShape, kept_by
from verl_prefix.core.groups import Group
from verl_prefix.core.prefix_cache import PrefixCache
from verl_prefix.models.recurrent import mixer_of
from verl_prefix.tools.simulate import depth as simulator
from verl_prefix.tools.simulate import scans
from verl_prefix.tools.simulate.accelerator import DEVICE, fake_accelerator
from verl_prefix.tools.simulate.hardware import GPUS
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.model import whole_shape
from verl_prefix.tools.simulate.passes import Simulation, plan_of
from verl_prefix.tools.simulate.report import NOT_MODELLED
from verl_prefix.tools.simulate.tracker import Tracker

H100 = GPUS["h100"]
PREFIX, SUFFIX, ROWS = 2400, 256, 8


def wide(checkpointing: bool = True, layers: int = 8, slices: int = 1) -> Job:
    """Qwen3.5-9B's layers, fewer of them: three gated delta nets and one of attention, twice; on eight ranks, of which
    some share rows that are as much longer."""
    config = AutoConfig.for_model(
        "qwen3_5_text", hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers, vocab_size=248320
    )
    n = slices
    groups = (Group.of_prompt(tuple(range(ROWS)), n * PREFIX, (n * SUFFIX,) * ROWS),)
    return Job(config, groups, budget=1 << 20, memory=Memory(8, checkpointing, slices=n), kept=99)


def small(kind: str, layers: int = 4) -> PretrainedConfig:
    """A tiny model; every second layer is recurrent."""
    text = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=512, layer_types=["linear_attention", "full_attention"] * (layers // 2),
        linear_key_head_dim=16, linear_value_head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64,
    )  # fmt: skip
    if kind != "qwen3_5":
        return AutoConfig.for_model(kind, **text)
    tower = dict(depth=2, hidden_size=64, num_heads=2, patch_size=4, intermediate_size=96, out_hidden_size=64)
    return AutoConfig.for_model(kind, text_config=text, vision_config=tower | dict(num_position_embeddings=64))


def small_job(kind: str, layers: int = 4) -> Job:
    groups = (Group.of_prompt((0, 1, 2), 300, (1, 64, 130)), Group.of_prompt((3,), 50, (1,)))
    return Job(small(kind, layers), groups, budget=1200, memory=Memory(2, logits_chunk=50), wave_tokens=128, kept=9)


def forgetful(ctx: Any, *inputs: Any) -> Any:
    """_DeltaRule.forward that keeps nothing for its backward."""
    ctx.inputs = [None if x is None else (x.shape, x.dtype, x.device) for x in inputs[:6]]
    found = _forward(ctx, *inputs)
    ctx.save_for_backward()
    return found


def without_inputs(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """_DeltaRule.backward of `forgetful`."""
    made = (None if x is None else torch.empty(x[0], dtype=x[1], device=x[2]) for x in ctx.inputs)
    return *made, None, None, None


_forward, _capture = scans._DeltaRule.forward, PrefixCache.capture


def dropping(cache: PrefixCache, key: Any, *tensors: torch.Tensor, **options: Any) -> Any:
    """PrefixCache.capture that keeps no layer's states."""
    found = _capture(cache, key, *tensors, **options)
    if isinstance(key, tuple) and key[0] == "scan":
        cache._stored.pop(key, None)
    return found


BROKEN = {
    "nothing is saved": lambda: (
        mock.patch.object(scans._DeltaRule, "forward", staticmethod(forgetful)),
        mock.patch.object(scans._DeltaRule, "backward", staticmethod(without_inputs)),
    ),
    "states are not kept": lambda: (mock.patch.object(PrefixCache, "capture", dropping),),
}


def update(job: Job, path: str, broken: str = "", log_probs: bool = False) -> tuple[dict, ModelShape]:
    """Phases of one update, and the model's costs."""
    with contextlib.ExitStack() as stack:
        for patch in BROKEN[broken]() if broken else ():
            stack.enter_context(patch)
        (phases,) = simulator.simulate(job, [Arm(path, keeps_attention=False)], H100, log_probs)
    return {name: dict(phase) for name, phase in phases.items()}, whole_shape(job)


@pytest.mark.more
def test_flops_are_those_of_the_cost_model(elsewhere):
    """Forward, and in an update back twice as much; of a scan back 2.5 times as much. Tails of convolutions, which the
    cost model leaves out, are less than 1 in 10,000."""
    job = wide(checkpointing=False, layers=4)
    phases, shape = elsewhere(update, job, "packed", "", True)
    cost = shape.pass_of(job.groups)
    forward = {name: phases["log_probs/packed"][f"flops/{name}"] for name in ("linear", "recurrent", "attention")}
    assert forward["attention"] == shape.pair * cost.pairs
    assert forward["linear"] + forward["recurrent"] == pytest.approx(cost.linear(shape), rel=1e-4)
    text = job.config
    keys, values = text.linear_key_head_dim, text.linear_value_head_dim
    scan = 2 * DELTA_CHUNK * (3 * keys + 2 * values) + 6 * keys * values  # of a head and token
    scans_of_all = 3 * text.linear_num_value_heads * scan * cost.tokens
    tails = 3 * (1 + ROWS)  # of convolutions, which see four tokens
    channels = 2 * text.linear_num_key_heads * keys + text.linear_num_value_heads * values
    convs = 3 * 2 * 4 * channels * (cost.tokens + tails)
    assert forward["recurrent"] == pytest.approx(scans_of_all + convs, rel=1e-9)
    of_update = phases["packed"]
    assert of_update["flops/recurrent"] == pytest.approx(3.5 * scans_of_all + 3 * convs, rel=1e-9)
    counted = 3 * cost.linear(shape)
    assert of_update["flops/linear"] + of_update["flops/recurrent"] == pytest.approx(counted, rel=0.01)


def sent(job: Job) -> list[float]:
    """Bytes that pass all-to-alls, and FLOPs, of packed log-probs and of verl's own."""
    arms = Arm("packed"), Arm("stock_lean")
    phases = simulator.simulate(job, arms, H100)
    names = "log_probs/packed", "log_probs/micro_batch"
    found = [of[name] for of, name in zip(phases, names, strict=True)]
    return [of["collective/alltoall_base"] for of in found] + [
        sum(x for name, x in of.items() if name.startswith("flops/")) for of in found
    ]


@pytest.mark.more
@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_send_heads_and_channels_and_ranks_share_flops(elsewhere, ranks):
    """Attention q, k, v and its output; a gated delta net what its convolution and its scan read and give. verl's
    engine sends nothing in the latter."""
    job = with_memory(small_job("qwen3_next"), ranks=4)
    alone, spread = elsewhere(sent, job), elsewhere(sent, with_memory(job, slices=ranks))
    packed, rows, *flops = spread
    prefix, suffixes = 300 + 50, [1, 64, 130, 1]
    tokens = -(-prefix // ranks) - (-sum(suffixes) // ranks)
    attention = (2 * 4 + 2 * max(2, ranks)) * 16 * 2
    channels = 2 * 2 * 16 + 4 * 24
    delta_net = 2 * channels * 2 + 4 * (2 * 16 + 2 * 24 + 1) * 2 + 4 * 4  # decays are in fp32
    assert packed == 2 * tokens * (attention + delta_net)
    lengths = [300 + 1 + n for n in suffixes[:3]] + [50 + 1 + 1]
    assert rows == pytest.approx(2 * sum(-(-n // ranks) for n in lengths) * attention, rel=0.05)
    for one, of_all in zip(flops, alone[2:], strict=True):
        assert one == pytest.approx(of_all / ranks, rel=0.02)
    assert alone[:2] == [0.0, 0.0]


@pytest.mark.more  # test_simulate.py has it of text
@pytest.mark.parametrize("path", ["packed", "phased"])
@pytest.mark.parametrize(("checkpointing", "slices"), [(True, 1), (False, 1), (True, 4)])
def test_the_estimated_peak_is_within_15_per_cent(elsewhere, path, checkpointing, slices):
    """Of four layers; of eight where every layer's activations are part of it."""
    job = replace(wide(checkpointing, 4 if checkpointing else 8, slices), kept=1)
    phases, shape = elsewhere(update, job, path)
    plan = plan_of(job, shape, Arm(path), job.budget)
    peak = max(phase.get("peak", 0.0) for name, phase in phases.items() if name != "optimizer")
    assert peak_bytes(shape, plan, (), job.memory) == pytest.approx(
        peak - 16 * shape.parameters / job.memory.ranks, rel=0.15
    )


def kept(broken: str = "") -> tuple[float, float]:
    """Bytes per token that a mixer's forward keeps beside its input: simulated, and as the cost model counts."""
    config, tokens = wide(layers=4).config, 640
    with fake_accelerator(1), Tracker(H100, DEVICE, config.vocab_size) as tracker, contextlib.ExitStack() as stack:
        for patch in BROKEN[broken]() if broken else ():
            stack.enter_context(patch)
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            x = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        scans.stand_in(model)
        mixer = model.model.layers[0].linear_attn
        gc.collect()
        start = tracker.current
        out = mixer(x)
        gc.collect()
        found = tracker.current - start - out.numel() * out.element_size()
        return found / tokens, 2 * kept_by(mixer_of(mixer))


def test_a_mixer_keeps_what_the_cost_model_counts(elsewhere):
    simulated, counted = elsewhere(kept)
    assert counted == pytest.approx(simulated, rel=0.02)
    less, _ = elsewhere(kept, "nothing is saved")
    assert counted > 1.3 * less


def cached(job: Job, broken: str = "") -> float:
    """Bytes in the prefix cache at the peak of phase B of log-probs, which hold nothing else of a prefix."""
    tracker = Tracker(H100, DEVICE, job.config.vocab_size)
    with fake_accelerator(job.memory.ranks) as meshes, tracker, contextlib.ExitStack() as stack:
        for patch in BROKEN[broken]() if broken else ():
            stack.enter_context(patch)
        Simulation(job, tracker, meshes, DEVICE).run(Arm("phased"), update=False)
    return tracker.phases["log_probs/wave"]["peak/prefix cache"]


def test_the_prefix_cache_holds_one_state_per_prefix(elsewhere):
    """In fp32 as counted; the convolutions' tails in bf16, which the count has in fp32 too."""
    job = wide(layers=4)
    job = replace(job, groups=(*job.groups, Group.of_prompt(tuple(range(ROWS, 2 * ROWS)), PREFIX, (SUFFIX,) * ROWS)))
    shape, text = whole_shape(job), job.config
    keys, values = (text.linear_num_key_heads * text.linear_key_head_dim,
                    text.linear_num_value_heads * text.linear_value_head_dim)  # fmt: skip
    tails = 3 * 3 * (2 * keys + values)
    states = 2 * (shape.state - 2 * tails)
    assert elsewhere(cached, job) == shape.kv * 2 * PREFIX + states
    with pytest.raises(RuntimeError, match=r"layer \('scan', 0\) runs in a nested pass and did not run"):
        elsewhere(cached, job, "states are not kept")


def launches() -> tuple[int, int]:
    """Kernels of a forward and of a backward of one scan on contiguous inputs."""
    config = small("qwen3_5_text")
    with fake_accelerator(1), Tracker(H100, DEVICE, config.vocab_size) as tracker:
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config)
            q, k, v = (torch.empty(1, 200, 4, n, requires_grad=True) for n in (16, 16, 24))
            g, beta = (torch.empty(1, 200, 4, requires_grad=True) for _ in range(2))
            states, bounds = torch.empty(2, 4, 16, 24, requires_grad=True), torch.empty(3, dtype=torch.int32)
        scans.stand_in(model)
        rule = model.model.layers[0].linear_attn.chunk_gated_delta_rule
        counts = []
        for _ in range(2):
            start = tracker.phase["launches"]
            found = rule(
                q, k, v, g=g, beta=beta, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True,
                cu_seqlens=bounds,
            )  # fmt: skip
            counts.append(tracker.phase["launches"] - start)
        start = tracker.phase["launches"]
        grads = torch.autograd.grad(found, (q, k, v, g, beta, states), [torch.empty_like(x) for x in found])
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v, g, beta, states)]
        return counts[1], tracker.phase["launches"] - start


def test_a_scan_launches_what_the_package_does(elsewhere):
    """Of chunk_gated_delta_rule: seven kernels and two zeros; back nine kernels, a sum and two additions."""
    assert elsewhere(launches) == (9, 12)


def host_syncs(kind: str, layers: int) -> list[dict[str, float]]:
    """Host syncs by phase of packed and offloaded updates and log-probs."""
    job = replace(small_job(kind, layers), kept=1)
    return without_step(job, [Arm("packed"), Arm("phased", offload=True)], "host_syncs")


@pytest.mark.more
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_no_recurrent_layer_waits_for_the_device(elsewhere, kind):
    """The package counts chunks once for the bounds of a pass."""
    two, four = elsewhere(host_syncs, kind, 2), elsewhere(host_syncs, kind, 4)
    for a, b in zip(two, four, strict=True):
        assert a == pytest.approx(b, rel=0.05)  # waves of log-probs stand for each other by what they cost


def micro_batches(kind: str) -> list[float]:
    """Launches of stock's update, of rows together where they may, and of one row each."""
    found = without_step(small_job(kind, 2), [Arm("stock"), Arm("stock", rows=1)], "launches", log_probs=False)
    return [phases["micro_batch"] for phases in found]


@pytest.mark.more
def test_stock_packs_rows_where_verl_tells_mixers_their_bounds(elsewhere):
    """Of Qwen3.5 with its tower; a packed row of any other would leak state."""
    together, alone = elsewhere(micro_batches, "qwen3_5")
    assert 1.5 * together < alone
    together, alone = elsewhere(micro_batches, "qwen3_5_text")
    assert together == alone


def with_package(kind: str) -> float:
    """An update where flash-linear-attention is installed."""

    def norm(*args: Any, **options: Any) -> None:
        raise RuntimeError("a norm that asks for a GPU")

    job = small_job(kind, 2)
    space = sys.modules[AutoModelForCausalLM._model_mapping[type(job.config)].__module__]
    with mock.patch.object(space, "FusedRMSNormGated", norm):
        return update(job, "packed")[0]["packed"]["launches"]


@pytest.mark.more
def test_an_installed_package_changes_nothing(elsewhere):
    without, _ = elsewhere(update, small_job("qwen3_next", 2), "packed")
    assert elsewhere(with_package, "qwen3_next") == without["packed"]["launches"] > 0


@pytest.mark.more
def test_plan_simulates_a_hybrid_and_says_what_fits_and_what_nobody_measured(elsewhere, tmp_path):
    words = [*training_command(tmp_path, family="qwen3_5_text"), "trainer.v1.trainer_mode=prefix_sync"]
    options = ["--simulate", "--response-lengths", "32,0", "--out", str(tmp_path / "plan.json")]
    code, out, err = elsewhere(planned, [*options, *words])
    assert (code, err) == (0, "") and NOT_MODELLED in out
    found = json.loads((tmp_path / "plan.json").read_text())["simulated"]
    packed = found["arms"]["packed"]
    assert packed["flop_ratio_over_lean"] > 2 and packed["fits"]
    assert [way["fits"] for way in found["settings"]] == [True] * 5
