"""The simulator against real runs on a CPU, and what it says of an 8B model's layers, held to the percent.

Every case runs in one other process: it registers a device with torch, which other tests must not see.
"""

import contextlib
import functools
import gc
import inspect
import io
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from simulations import H100, planned, training_command, without_step
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from verl_prefix.auto.cost import Memory
from verl_prefix.auto.shape import model_shape
from verl_prefix.core import kernels
from verl_prefix.core.calls import Call, Spans
from verl_prefix.core.groups import Group
from verl_prefix.core.kernels import KERNELS, aten, flash_attn
from verl_prefix.core.prefix_cache import PrefixCache
from verl_prefix.testing.rollouts import flatten, search_rollouts, turn_rollouts
from verl_prefix.tools.simulate import depth as simulator
from verl_prefix.tools.simulate import report
from verl_prefix.tools.simulate.accelerator import DEVICE, fake_accelerator
from verl_prefix.tools.simulate.hardware import GIB
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.model import whole_shape
from verl_prefix.tools.simulate.operations import KERNEL
from verl_prefix.tools.simulate.passes import Simulation
from verl_prefix.tools.simulate.report import as_json, compare, fit, longest
from verl_prefix.tools.simulate.tracker import Tracker

SMALL = LlamaConfig(
    hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=1024, max_position_embeddings=4096,
)  # fmt: skip
SIZES = {name: getattr(SMALL, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads",
                                                 "num_key_value_heads", "head_dim", "vocab_size")}  # fmt: skip
WIDE = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=128256, max_position_embeddings=16384, tie_word_embeddings=False,
)  # fmt: skip
TWO = Memory(2, checkpointed=False, logits_chunk=100)  # as of `small_job`, on two ranks
ARMS = {arm.name: arm for arm in (Arm("stock"), Arm("packed"), Arm("phased"), Arm("phased", offload=True))}


TREES = {
    "turns": turn_rollouts(120, 3, 3, 40, 20, 30, SMALL.vocab_size),
    "search": search_rollouts(120, 50, (2, 1, 2), SMALL.vocab_size),
}


def seeing(kind: str, layers: int = 1, depth: int = 2) -> PretrainedConfig:
    """SMALL with a vision tower, every second block of which attends to whole frames, or adds to text layers."""
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
    marked = list(range(1, depth, 2))
    fields = {"qwen2_5_vl": dict(fullatt_block_indexes=marked, window_size=48),
              "qwen3_vl": dict(deepstack_visual_indexes=marked, num_position_embeddings=64)}  # fmt: skip
    fields |= {"qwen3_vl_moe": fields["qwen3_vl"], "glm4v": dict(image_size=32), "glm4v_moe": dict(image_size=32)}
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48) if kind.endswith("moe") else {}
    if kind == "glm4v_moe":
        rope["partial_rotary_factor"], experts["n_routed_experts"] = 1.0, experts.pop("num_experts")
        experts["first_k_dense_replace"] = 0
    return AutoConfig.for_model(
        kind,
        text_config=SIZES | dict(num_hidden_layers=layers, rope_parameters=rope, bos_token_id=0, eos_token_id=0)
        | experts,
        vision_config=dict(depth=depth, hidden_size=64, num_heads=2, patch_size=4, intermediate_size=96,
                           out_hidden_size=64) | fields[kind],
    )  # fmt: skip


def small_job(dtype: torch.dtype, checkpointing: bool) -> Job:
    groups = (Group.of_prompt((0, 1, 2), 192, (64, 70, 50)), Group.of_prompt((3,), 100, (30,)))
    return Job(SMALL, groups, budget=600, memory=Memory(1, checkpointing, logits_chunk=100), wave_tokens=128,
               master=dtype, dtype=dtype, kept=99)  # fmt: skip


def clip_job(kind: str, dtype: torch.dtype = torch.bfloat16, checkpointing: bool = False) -> Job:
    """Three responses to a clip, whose 120 tokens the prompt begins with."""
    return replace(
        small_job(dtype, checkpointing), config=seeing(kind), budget=1024,
        groups=(Group.of_prompt((0, 1, 2), 192, (128, 140, 100)),),
        grids=(((1, 24, 20) if "glm" in kind else (2, 12, 20),),),
    )  # fmt: skip


def update_on_cpu(job: Job, arm: Arm, fake: bool) -> tuple[float, dict, dict]:
    """(peak bytes above the model and its gradients, FLOPs by kind, transfers) of one update on CPU tensors; real ones
    are also seen by the allocator, whose peak then counts, and by torch's FLOP counter."""
    tracker = Tracker(H100, "cpu", SMALL.vocab_size)
    gc.freeze()  # of the tracker's many collections; `fake_accelerator` thaws it
    # What oneDNN packs for a bf16 matmul differs by CPU, 4 % of the peak on some.
    with FakeTensorMode() if fake else torch.backends.mkldnn.flags(enabled=False):
        with tracker:
            simulation = Simulation(job, tracker, None, "cpu", kernel="cpu")
        for parameter in simulation.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with contextlib.nullcontext() if fake else FlopCounterMode(display=False) as counter:
            simulation.run(arm, update=True)  # what is allocated and imported once
        if not fake:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                simulation.run(arm, update=True)
            current = peak = 0
            for event in profiled.profiler.kineto_results.events():
                if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
                    current += event.nbytes()
                    peak = max(peak, current)
            flops = counter.get_flop_counts()["Global"]
            return peak, {str(op): n for op, n in flops.items()}, simulation.transfers
        with tracker:
            for parameter in simulation.model.parameters():
                tracker.note(parameter.grad)
            gc.collect()
            start = tracker.current
            simulation.run(arm, update=True)
        return max(phase["peak"] for name, phase in tracker.phases.items() if name != "setup") - start, {
            kind: sum(phase[f"flops/{kind}"] for phase in tracker.phases.values())
            for kind in ("linear", "lm_head", "attention")
        }, simulation.transfers  # fmt: skip


@pytest.mark.parametrize(
    ("name", "checkpointing", "dtype", "kind"),
    [("stock", False, torch.float32, ""), ("packed", True, torch.bfloat16, ""),
     ("phased", False, torch.float32, "search"),
     *(pytest.param(*case, marks=pytest.mark.more) for case in (
         ("packed", True, torch.float32, "search"), ("phased", True, torch.float32, "turns"),
         ("phased", False, torch.bfloat16, ""), ("phased", True, torch.float32, ""),
         ("packed", True, torch.bfloat16, "qwen2_5_vl"), ("stock", False, torch.float32, "qwen3_vl"),
         ("packed", True, torch.bfloat16, "qwen3_vl_moe"), ("packed", True, torch.bfloat16, "glm4v"),
         ("packed", True, torch.bfloat16, "glm4v_moe")))],
)  # fmt: skip
def test_the_peak_is_the_allocator_s_and_flops_are_the_counter_s(elsewhere, name, checkpointing, dtype, kind):
    if kind in TREES:
        job = replace(small_job(dtype, checkpointing), groups=tuple(flatten(TREES[kind], "cpu")[2]))
    else:
        job = clip_job(kind, dtype, checkpointing) if kind else small_job(dtype, checkpointing)
    peak, flops, _ = elsewhere(update_on_cpu, job, ARMS[name], True)
    real_peak, real_flops, _ = elsewhere(update_on_cpu, job, ARMS[name], False)
    assert peak == pytest.approx(real_peak, rel=0.01)
    names = ("aten.mm", "aten.addmm", "aten.bmm", "aten.convolution", "aten.convolution_backward")
    matmuls = sum(n for op, n in real_flops.items() if op in names)
    if kind.endswith("moe"):  # torch's counter lacks products of two experts each: forward twice, and backward's two
        matmuls += 4 * 2 * (192 + 128 + 140 + 100) * 2 * 3 * 64 * 48
    assert flops["linear"] + flops["lm_head"] == pytest.approx(matmuls, rel=1e-6)


def attention_flops(name: str) -> float:
    """Simulated FLOPs of one layer's attention kernels in an update."""
    job = small_job(torch.bfloat16, checkpointing=False)
    with fake_accelerator(1), Tracker(H100, DEVICE, SMALL.vocab_size) as tracker:
        Simulation(job, tracker, None, DEVICE).run(ARMS[name], update=True)
    return sum(phase["flops/attention"] for phase in tracker.phases.values()) / SMALL.num_hidden_layers


@functools.cache
def products(num_keys: int) -> tuple[int, int]:
    """FLOPs, by torch's counter, of one query's real products with so many keys: forward, and with backward."""
    heads, dim = SMALL.num_attention_heads, SMALL.head_dim
    q, k, v = (torch.zeros(heads, n, dim, requires_grad=True) for n in (1, num_keys, num_keys))
    with FlopCounterMode(display=False) as counter:
        out = (q @ k.mT) @ v
        forward = counter.get_total_flops()
        out.sum().backward()
    return forward, counter.get_total_flops()


@pytest.mark.more
@pytest.mark.parametrize("name", ["stock", "packed", "phased"])
def test_attention_counts_what_real_products_of_queries_with_their_keys_do(elsewhere, name):
    """Each computed token, of ours all but a row's last, against the keys that it sees, in torch's counter; a flash
    kernel's backward also makes the scores again, half a forward."""
    seen = []
    for group in small_job(torch.bfloat16, False).groups:
        whole = [range(1, group.num_own_strand_tokens + 2 + n) for n in group.suffix_lens]
        own = [range(group.num_own_strand_tokens + 1, group.num_own_strand_tokens + 1 + n) for n in group.suffix_lens]
        seen += whole if name == "stock" else [range(1, group.num_own_strand_tokens + 1), *own]
    forward, both = map(sum, zip(*(products(n) for row in seen for n in row), strict=True))
    assert elsewhere(attention_flops, name) == pytest.approx(both + forward / 2, rel=1e-9)


def offloaded(fake: bool) -> Counter[str]:
    """Transfers of one offloaded update, on the fake accelerator without FSDP2 or on the CPU."""
    job = small_job(torch.bfloat16, checkpointing=False)
    device = DEVICE if fake else "cpu"
    tracker = Tracker(H100, device, SMALL.vocab_size)
    with fake_accelerator(1) if fake else contextlib.nullcontext(), tracker if fake else contextlib.nullcontext():
        simulation = Simulation(job, tracker, None, device, kernel="simulated" if fake else "cpu")
        simulation.run(ARMS["phased+offload"], update=True)
    return simulation.transfers


@pytest.mark.more
def test_what_is_offloaded_is_what_a_real_run_offloads(elsewhere):
    real, fake = elsewhere(offloaded, False), elsewhere(offloaded, True)
    assert real["offloaded_bytes"] > 1 << 20
    assert fake == real


def copies() -> tuple[dict, dict]:
    """Phases of one update on 4 ranks, and on two copies of them on two nodes."""
    job = Job(SMALL, (Group.of_prompt((0, 1), 200, (64, 30)),), budget=1 << 16, memory=Memory(4))
    nodes = replace(H100, per_node=4)
    return tuple(
        as_json(simulator.simulate(one, [ARMS["packed"]], nodes, log_probs=False)[0])["phases"]["packed"]
        for one in (job, replace(job, replicas=2))
    )


@pytest.mark.more
def test_copies_of_the_parameters_sum_their_shards_gradients(elsewhere):
    """HSDP: what a copy's ranks gather and scatter stays as it is; a rank's share of the gradients goes to the copies,
    over the network between nodes."""
    one, two = elsewhere(copies)
    bytes_of_one, bytes_of_two = one["collective_bytes"], dict(two["collective_bytes"])
    assert bytes_of_two.pop("allreduce") == pytest.approx(bytes_of_one["reduce_scatter_base"] / 4, rel=0.01)
    assert bytes_of_two == bytes_of_one and two["seconds"] > one["seconds"]


def simulated(name: str, broken: str = "", log_probs: bool = True) -> dict:
    """Phases of one update at 8B width, four layers, eight ranks."""
    groups = (Group.of_prompt((0, 1, 2, 3), 8192, (512,) * 4),)
    job = Job(WIDE, groups, budget=1 << 20 if name != "stock" else 2 * 8705, wave_tokens=1024,
              memory=Memory(8, logits_chunk=1 << 20 if broken == "logits are not chunked" else 1000))  # fmt: skip
    kept = []

    def take(cache: PrefixCache, layer: int) -> Any:
        kept.append(cache._grads[layer])
        return cache._grads.pop(layer)

    forward = aten.forward

    def forward_that_reads(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        q[0, 0, :1].cpu()
        return forward(q, *args, **kwargs)

    patches = {
        "the grad cache outlives phase C": mock.patch.object(PrefixCache, "take", take),
        "a layer reads a value": mock.patch.object(aten, "forward", forward_that_reads),
    }
    with patches.get(broken, contextlib.nullcontext()):
        return as_json(simulator.simulate(job, [ARMS[name]], H100, log_probs)[0])["phases"]


# (GiB, launches, host syncs, GB of collectives) per phase: a change of the schedule, of a model or of FSDP2 moves them.
# A wave launches half of the phase. Stock's host waits for a pass's loss and its indices; ours behind all passes.
PINNED = {
    "stock": {
        "log_probs/micro_batch": (15.165, 396, 4, 7.693),
        "micro_batch": (12.972, 1401, 4, 30.77),
        "optimizer": (4.478, 18, 1, 0.0),
    },
    "packed": {
        "log_probs/packed": (5.455, 247, 0, 3.846),
        "packed": (8.172, 778, 0, 15.385),
        "optimizer": (4.478, 18, 1, 0.0),
    },
    "phased+offload": {
        "log_probs/phase_a": (5.238, 198, 0, 3.846),
        "log_probs/wave": (5.502, 450, 0, 7.693),
        "phase_a": (5.680, 209, 0, 3.846),
        "wave": (8.095, 1509, 0, 30.77),
        "phase_c": (7.541, 566, 0, 9.437),
        "optimizer": (4.478, 18, 1, 0.0),
    },
}


def moved(phases: dict, pins: dict[str, tuple]) -> set[str]:
    """Phases and what of them is not as pinned."""
    assert phases.keys() == pins.keys()
    found = set()
    for name, (gib, *counts) in pins.items():
        phase = phases[name]
        gigabytes = round(sum(phase["collective_bytes"].values()) / 1e9, 3)
        if phase["peak_gib"] != pytest.approx(gib, rel=0.01):
            found.add(f"{name}: {phase['peak_gib']:.3f} GiB")
        if [phase["launches"], phase["host_syncs"], gigabytes] != counts:
            found.add(f"{name}: {phase['launches']} launches, {phase['host_syncs']} syncs, {gigabytes} GB")
    return found


@pytest.mark.parametrize("name", [x if x == "packed" else pytest.param(x, marks=pytest.mark.more) for x in PINNED])
def test_an_8b_model_s_layers_take_what_they_took(elsewhere, name):
    assert moved(elsewhere(simulated, name), PINNED[name]) == set()


@pytest.mark.parametrize(
    ("name", "broken", "phase", "says"),
    [
        ("packed", "logits are not chunked", "log_probs/packed", "6.206 GiB"),
        pytest.param(
            "phased+offload", "the grad cache outlives phase C", "optimizer", "4.728 GiB", marks=pytest.mark.more
        ),
        ("packed", "a layer reads a value", "packed", "syncs"),
    ],
)
def test_what_is_broken_on_purpose_moves_them(elsewhere, name, broken, phase, says):
    log_probs = phase.startswith("log_probs/")
    pins = {key: pin for key, pin in PINNED[name].items() if log_probs or not key.startswith("log_probs/")}
    found = moved(elsewhere(simulated, name, broken, log_probs), pins)
    assert any(line.startswith(phase) and says in line for line in found), found


def long_prompt(arms: list[Arm], budget: int = 12289, checkpointing: bool = True) -> list[tuple[float, float, float]]:
    """Seconds, GiB and FLOPs of an update of Llama3-8B on 8 H100s, P 10240, S 2048, G 8; a row a pass by default."""
    config = LlamaConfig.from_dict(WIDE.to_dict() | {"num_hidden_layers": 32})
    groups = (Group.of_prompt(tuple(range(8)), 10240, (2048,) * 8),)
    waves = None if checkpointing else 2048  # else two responses, whose activations are most of what there is
    job = Job(config, groups, budget, Memory(8, checkpointing), wave_tokens=waves)
    found = map(as_json, simulator.simulate(job, arms, H100, log_probs=False))
    return [(one["update_seconds"], one["peak_gib"], one["flops"]) for one in found]


@pytest.mark.more
@pytest.mark.parametrize(
    ("checkpointing", "speedup", "share"), [(True, 3.26, 0.9), (False, 2.0, 0.41)],
    ids=["checkpointed", "activations_kept"],
)  # fmt: skip
def test_offload_needs_less_memory_than_stock_row_by_row(elsewhere, checkpointing, speedup, share):
    """The whole update's peak; arXiv 2606.01143 has 41 % of stock's in phase B, without checkpointing."""
    arms = [Arm("stock", rows=1), ARMS["phased+offload"]]
    (stock_seconds, stock, _), (seconds, ours, _) = elsewhere(long_prompt, arms, 12289, checkpointing)
    assert stock_seconds / seconds >= speedup and ours <= share * stock


@pytest.mark.more
def test_packed_is_as_much_faster_as_it_computes_less(elsewhere):
    """Passes of two rows: 0.96 of the FLOP ratio. It was 0.97 before empty blocks of the causal call's grid took time;
    stock's rows of one length have none."""
    (stock_seconds, _, stock), (seconds, _, ours) = elsewhere(long_prompt, [Arm("stock"), ARMS["packed"]], 26625)
    assert stock_seconds / seconds >= 0.96 * stock / ours


def tied_peaks() -> list[float]:
    """Peak of an update of five layers: by two smaller models, and as it is."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=4096, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=8,
        head_dim=64, vocab_size=4000, tie_word_embeddings=True,
    )  # fmt: skip
    job = Job(config, (Group.of_prompt((0, 1), 600, (300, 200)),), budget=1 << 16, memory=Memory(4))
    phases = [run(job, [ARMS["packed"]], H100, False)[0] for run in (simulator.simulate, simulator._run)]
    return [one["packed"]["peak"] for one in phases]


@pytest.mark.more
def test_smaller_models_tell_the_peak_of_a_tied_one(elsewhere):
    """Two layers have less gathered at their peak than any more, and told 8 % too much."""
    told, seen = elsewhere(tied_peaks)
    assert told == pytest.approx(seen, rel=1e-3)


def deep_peaks() -> dict[str, tuple[float, float, float]]:
    """Per phase of an update of 16 layers: its peak by two smaller models, as it is, and by one line through theirs."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=8,
        head_dim=64, vocab_size=64000, tie_word_embeddings=False,
    )  # fmt: skip
    job = Job(
        config, tuple(Group.of_prompt((i, i + 1), 2000, (50, 50)) for i in (0, 2)), budget=1 << 16, memory=Memory(4)
    )
    job = replace(job, shape=whole_shape(job))
    told, seen = (run(job, [ARMS["phased"]], H100, False)[0] for run in (simulator.simulate, simulator._run))
    configs, times = simulator._depths(config)
    first, second = (simulator._run(replace(job, config=c), [ARMS["phased"]], H100, False)[0] for c in configs)

    def line(name: str) -> float:
        return first[name]["peak"] + times * (second[name]["peak"] - first[name]["peak"])

    names = ("phase_a", "wave", "phase_c")
    return {name: (told[name]["peak"], seen[name]["peak"], line(name)) for name in names}


@pytest.mark.more
def test_smaller_models_tell_a_peak_that_is_in_another_layer_than_theirs(elsewhere):
    """Theirs are where the embedding gets its gradient, and those of many layers where all wait for their backward."""
    found = elsewhere(deep_peaks)
    for name, (told, seen, _) in found.items():
        assert told == pytest.approx(seen, rel=1e-3), name
    assert min(line / seen for _, seen, line in found.values()) < 0.9


def head_tokens(chunk: int | None = None, entropy: bool = False) -> dict[str, float]:
    """Tokens that lm_head computes in an update of 6000 suffix tokens, forward and backward as three, on a GPU with
    room and on one without."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, vocab_size=1000, tie_word_embeddings=False,
    )  # fmt: skip
    memory = Memory(2, logits_chunk=chunk)
    job = Job(config, (Group.of_prompt((0, 1), 300, (3000, 3000)),), 1 << 16, memory, entropy=entropy)
    rooms = {"room": H100, "none": replace(H100, capacity=1.0)}
    found = {}
    for name, hardware in rooms.items():
        (phases,) = simulator.simulate(job, [ARMS["packed"]], hardware, False)
        found[name] = phases["packed"]["flops/lm_head"] / (2 * 64 * 1000)
    return found


@pytest.mark.more
def test_all_logits_of_a_pass_exist_where_there_is_room(elsewhere):
    """As in the engine. Otherwise those of the first 6000 - 4096 tokens are computed twice."""
    at_once, in_chunks = 3 * 6000, 3 * 6000 + 6000 - 4096
    assert elsewhere(head_tokens) == {"room": at_once, "none": in_chunks}
    assert elsewhere(functools.partial(head_tokens, entropy=True)) == {"room": in_chunks, "none": in_chunks}
    assert elsewhere(functools.partial(head_tokens, 4096)) == {"room": in_chunks, "none": in_chunks}


MOE = Qwen3MoeConfig(
    hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, vocab_size=1024, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip


def linear_flops(config: PretrainedConfig, lora: dict | None) -> tuple[float, float, float]:
    """(simulated FLOPs of the layers' matmuls in a packed log-prob pass, those of `model_shape`, optimizer's GiB)."""
    job = Job(config, (Group.of_prompt((0, 1), 200, (64, 30)),), budget=1 << 16, memory=Memory(2), lora=lora)
    phases = simulator.simulate(job, [ARMS["packed"]], H100)[0]
    with torch.device("meta"):
        shape = model_shape(AutoModelForCausalLM.from_config(config), torch.bfloat16)
    linear = shape.pass_of(job.groups).linear(shape)
    return phases["log_probs/packed"]["flops/linear"], linear, phases["optimizer"]["peak/optimizer"] / GIB


@pytest.mark.more
def test_experts_and_adapters_count_what_runs(elsewhere):
    """Experts that a token meets, in the grouped matmul; adapters beside frozen weights, which have no moments.
    Depths 3 and 4 stand for 5."""
    experts, expected, _ = elsewhere(linear_flops, MOE, None)
    assert experts == pytest.approx(expected, rel=0.02)  # the router is no layer of `model_shape`
    adapted, plain, moments = elsewhere(linear_flops, SMALL, dict(r=4, lora_alpha=8, target_modules="all-linear"))
    assert plain < adapted < 1.5 * plain
    assert moments < 1e-3


def tower_flops(kind: str, names: list[str], freeze: bool = False) -> dict[str, float]:
    """Simulated FLOPs per phase of a clip's second frame, whose tokens the prompt holds in any case: the tower's; and
    those of attention in packed log-probs."""
    found = []
    for frames in (2, 1):
        job = replace(clip_job(kind), freeze_tower=freeze, grids=(((frames, 12, 20),),))
        with fake_accelerator(1), Tracker(H100, DEVICE, SMALL.vocab_size) as tracker:
            simulation = Simulation(job, tracker, None, DEVICE)
            for name in names:
                for update in (True, False):
                    simulation.run(ARMS[name], update)
        found.append({name: sum(phase[f"flops/{part}"] for part in ("linear", "attention", "lm_head"))
                      for name, phase in tracker.phases.items()})  # fmt: skip
        found[-1]["attention"] = tracker.phases["log_probs/packed"]["flops/attention"]
    return {name: n - found[1][name] for name, n in found[0].items()}


@pytest.mark.more
def test_stock_runs_the_tower_for_every_row_and_a_wave_runs_none(elsewhere):
    found = elsewhere(tower_flops, "qwen2_5_vl", ["stock", "packed", "phased"])
    # One block sees 12 x 20 patches, the other windows of 12 x 12 and 12 x 8; 64 numbers per query and key.
    assert found["attention"] == 4 * 64 * (240**2 + 144**2 + 96**2)
    assert found["micro_batch"] == pytest.approx(3 * found["packed"], rel=1e-9)
    assert found["log_probs/micro_batch"] == pytest.approx(3 * found["log_probs/packed"], rel=1e-9)
    assert found["wave"] == 0 == found["log_probs/wave"]
    assert found["phase_a"] + found["phase_c"] == pytest.approx(found["packed"], rel=1e-9)


def trained(kind: str, freeze: bool) -> tuple[int, float, float, float]:
    """Parameters of the tower; bytes of gradients, of the optimizer, and of activations, on one of two ranks."""
    job = replace(clip_job(kind), memory=TWO, freeze_tower=freeze, master=torch.float32)
    phases = simulator._run(job, [ARMS["packed"]], H100, log_probs=False)[0]
    with torch.device("meta"):
        tower = AutoModelForImageTextToText.from_config(job.config).model.visual
    of = phases["optimizer"]
    parameters = sum(parameter.numel() for parameter in tower.parameters())
    return parameters, of["peak/gradients"], of["peak/optimizer"], phases["packed"]["peak/activations"]


@pytest.mark.more
def test_a_frozen_tower_has_no_gradients_moments_or_activations(elsewhere):
    parameters, *free = elsewhere(trained, "qwen3_vl", False)
    _, *frozen = elsewhere(trained, "qwen3_vl", True)
    gradients, optimizer, activations = (a - b for a, b in zip(free, frozen, strict=True))
    assert gradients == pytest.approx(4 * parameters / 2, rel=0.02)  # the allocator's blocks
    assert optimizer == pytest.approx(12 * parameters / 2, rel=0.02)  # two moments, and the root of one in a step
    assert activations > 2 * 480 * 64 * 20  # bf16, of two blocks
    cost = elsewhere(tower_flops, "qwen3_vl", ["packed"], True)
    assert cost["packed"] == cost["log_probs/packed"] > 0


def depths(kind: str, layers: int, depth: int) -> list[dict]:
    """Phases of a packed update, of the whole model and as two smaller ones tell."""
    job = replace(clip_job(kind), config=seeing(kind, layers, depth), memory=TWO)
    runs = (simulator._run, simulator.simulate)
    return [as_json(run(job, [ARMS["packed"]], H100, False)[0])["phases"] for run in runs]


@pytest.mark.more
def test_two_depths_of_text_and_tower_stand_for_the_whole(elsewhere):
    smaller, times = simulator._depths(seeing("qwen3_vl", 5, 5))
    sizes = [(small.text_config.num_hidden_layers, small.vision_config.depth) for small in smaller]
    assert (sizes, times) == ([(3, 3), (4, 4)], 2)
    whole, told = elsewhere(depths, "qwen3_vl", 5, 5)
    assert whole.keys() == told.keys()
    for name, phase in whole.items():
        for amount in ("flops", "launches", "host_syncs", "collective_bytes", "peak_gib", "seconds"):
            assert told[name][amount] == pytest.approx(phase[amount], rel=1e-6), (name, amount)


def test_a_tower_of_two_kinds_of_blocks_has_two_smaller_ones():
    """28 blocks see windows and 4 whole frames: 28 = 3 + 25, as the text's layers are, and 4 = 4 + 25 * 0."""
    config = seeing("qwen2_5_vl", 28, 32)
    config.vision_config.fullatt_block_indexes = [7, 15, 23, 31]
    smaller, times = simulator._depths(config)
    towers = [small.vision_config for small in smaller]
    assert times == 25 and [small.text_config.num_hidden_layers for small in smaller] == [3, 4]
    assert [(tower.depth, tower.fullatt_block_indexes) for tower in towers] == [(7, [0, 2, 4, 6]), (8, [1, 3, 5, 7])]


@pytest.mark.more
def test_plan_simulates_a_command_and_says_that_nothing_fits(elsewhere, tmp_path):
    """What fits: test_simulate_recurrent.py."""
    words = [*training_command(tmp_path), "actor_rollout_ref.model.enable_gradient_checkpointing=false"]
    options = [
        "--simulate",
        "--gpu",
        "h100,capacity=1000",
        "--response-lengths",
        "32,0",
        "--out",
        str(tmp_path / "plan.json"),
    ]
    code, out, err = elsewhere(planned, [*options, *words])
    assert (code, err) == (1, "") and "simulated" in out
    assert "warning: no schedule fits 0 GiB of h100,capacity=1000 (simulated)" in out
    (wave,) = set(re.findall(r"wave_tokens=(\d+)", out))
    assert int(wave) == 4 * 4 * 32 // 4, "a quarter of all responses: what may fit where nothing else does"
    found = json.loads((tmp_path / "plan.json").read_text())["simulated"]
    assert list(found["arms"]) == ["stock", "stock_row", "stock_lean", "packed", "phased", "phased+offload"]
    for arm in found["arms"].values():
        keys = {"peak_gib", "owners_gib", "host_gib", "flops", "seconds", "launches", "host_syncs", "collective_bytes"}
        assert all(phase.keys() == keys for phase in arm["phases"].values())
    packed = found["arms"]["packed"]
    assert packed["flop_ratio"] > packed["flop_ratio_over_lean"] > 2 and not packed["fits"]
    assert [way["fits"] for way in found["settings"]] == [False] * 5
    seconds = [way["seconds"] for way in found["settings"]]
    assert seconds == sorted(seconds)


@pytest.mark.more
def test_plan_simulates_rows_of_turns(elsewhere, tmp_path):
    """Four prompts of four sessions of three turns: half of what two ranks have."""
    turns = ["--simulate", "--turns", "3", "--thinking", "20", "--say", "8", "--tool", "16"]
    words = [*turns, "--out", str(tmp_path / "plan.json"), *training_command(tmp_path)]
    code, out, err = elsewhere(planned, [*words, "actor_rollout_ref.actor.ppo_mini_batch_size=24"])
    assert (code, err) == (0, "") and out.startswith("Worth it: update ")
    found = json.loads((tmp_path / "plan.json").read_text())
    simulated, tokens = found["simulated"], {over: one["tokens"]["update"] for over, one in found["trees"].items()}
    assert simulated["rows"] == 4 * 4 * 3
    assert tokens["batch"] <= tokens["uid"] < tokens["off"] / 2
    assert simulated["arms"]["packed"]["flop_ratio"] > found["tokens"]["logical"] / tokens["off"]


def test_the_longest_size_that_fits_is_found_on_a_line_and_on_a_plateau():
    asked = []

    def peak(tokens: int) -> float:
        asked.append(tokens)
        return 3.0 + tokens / 1000

    assert 11_760 <= longest(peak, 15.0, 64, 100_000) <= 12_000 and len(asked) <= 12
    assert 38_000 <= longest(lambda n: min(peak(n), 74.0) if n < 40_000 else 300.0, 75.0, 64, 100_000) < 40_000
    assert longest(peak, 2.0, 64, 100_000) is None
    assert longest(peak, 1e6, 64, 100_000) == 100_000


def syncs(kind: str, layers: int) -> list[dict[str, float]]:
    """Host syncs by phase of packed, phased and offloaded updates and log-probs, on one-token responses too."""
    fields = {
        "qwen2": dict(use_sliding_window=True, sliding_window=25, max_window_layers=1),
        "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=32),  # with attention sinks
    }
    config = AutoConfig.for_model(kind, **SIZES, **fields.get(kind, {}), num_hidden_layers=layers)
    groups = (Group.of_prompt((0, 1, 2), 300, (1, 64, 130)), Group.of_prompt((3,), 50, (1,)))
    job = Job(config, groups, 600, Memory(2, logits_chunk=50), wave_tokens=128, kept=1)
    return without_step(job, [Arm("packed"), Arm("phased"), Arm("phased", offload=True)], "host_syncs")


@pytest.mark.more
@pytest.mark.parametrize(("kind", "layers"), [("llama", 4), ("qwen2", 2), ("gpt_oss", 2)])
def test_no_layer_waits_for_the_device(elsewhere, kind, layers):
    """In bf16 with checkpointing and chunks of logits; windows and sinks too, in every second layer. The host waits
    behind all passes of log-probs, and of an update."""
    for phases in elsewhere(syncs, kind, layers):
        assert {name: n for name, n in phases.items() if n} == {"setup": 2}


class Counted:
    """A kernel module where it could not run: what it calls is counted, and computes nothing."""

    def __init__(self, module: Any) -> None:
        self.module, self.calls = module, Counter()

    def forward(self, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        self.calls["forward"] += 1
        return self.module.forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        self.calls["backward"] += 1
        return self.module.backward(*args, **options)

    def unavailable(self) -> None:
        return None

    def unsupported(self, *args: Any, **options: Any) -> None:
        return None


def package_on_fake_tensors(recorded: str) -> tuple[str, Callable[..., Any], Callable[..., Any]]:
    """A flash-attn package as `flash_attn._choose` finds it: functions with the recorded arguments, which return
    empty tensors."""
    known = json.loads((Path(__file__).parents[1] / "core" / "flash_attn_signatures.json").read_text())["interfaces"]
    name = getattr(flash_attn, recorded[:3])
    return name, *(_without_values(known[recorded][function]) for function in flash_attn._INTERFACES[name][:2])


def _without_values(arguments: list[Any]) -> Callable[..., Any]:
    named = [x if isinstance(x, list) else (x, inspect.Parameter.empty) for x in arguments]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind, default=default) for name, default in named])

    def run(*args: Any, **options: Any) -> tuple[Any, ...]:
        given = signature.bind(*args, **options).arguments
        inputs = q, _, _ = given["q"], given["k"], given["v"]
        assert all(x.dtype == torch.bfloat16 and x.stride(-1) == 1 for x in inputs)
        for name, x in zip(("dq", "dk", "dv"), inputs, strict=True):
            assert name not in given or (given[name].shape, given[name].dtype) == (x.shape, x.dtype)
        return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), None, None

    run.__signature__ = signature
    return run


def kernel_on_fake_tensors(kernel: str) -> tuple[Counter[str], list[float]]:
    """Calls of a kernel module, and host syncs by phase, in packed and phased updates and packed log-probs in bf16:
    layers with and without a window, attention sinks, checkpointing, chunks of logits and one-token responses."""
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    config = AutoConfig.for_model("gpt_oss", **SIZES, **experts, sliding_window=32, num_hidden_layers=2)
    groups = (Group.of_prompt((0, 1, 2), 300, (1, 64, 130)), Group.of_prompt((3,), 50, (1,)))
    job = Job(config, groups, 600, Memory(logits_chunk=50), wave_tokens=128, kept=9, master=torch.bfloat16)
    found = package_on_fake_tensors(kernel) if kernel.startswith("FA") else None
    counted = Counted(flash_attn if found else KERNELS[kernel])
    kernels._chosen.cache_clear()
    with (
        mock.patch.dict(KERNELS, counted=counted), mock.patch.object(flash_attn, "_choose", lambda *args: found),
        fake_accelerator(1), Tracker(H100, DEVICE, SMALL.vocab_size) as tracker,
    ):  # fmt: skip
        simulation = Simulation(job, tracker, None, DEVICE, kernel="counted")
        for name, update in (("packed", False), ("packed", True), ("phased", True)):
            simulation.run(ARMS[name], update=update)
    return counted.calls, [phase["host_syncs"] for phase in tracker.phases.values()]


@pytest.mark.more
def test_kernel_modules_run_on_tensors_without_values_and_wait_for_nothing(elsewhere):
    """Of the simulator's device; kernels/cpu is of the CPU alone. MOCK: the packages' functions, which no machine here
    has, are what was recorded of them."""
    calls, syncs = elsewhere(kernel_on_fake_tensors, "simulated")  # aten's
    assert min(calls["forward"], calls["backward"]) >= 2 * 2 * 3
    for kernel in ("reference", "FA2 v2.8.3", "FA3 v2.8.0", "FA3 main", "FA4 main"):
        of_kernel = elsewhere(kernel_on_fake_tensors, kernel)
        assert of_kernel[0] == calls, kernel
        assert all(found <= aten for found, aten in zip(of_kernel[1], syncs, strict=True)), kernel


def fitting(gib: float) -> tuple[dict, list[float]]:
    """What fits one layer, and the peaks of the prompt that is said to, and of one a twentieth longer."""
    config = LlamaConfig.from_dict(SMALL.to_dict() | dict(num_hidden_layers=1, max_position_embeddings=1400))
    job = Job(config, (Group.of_prompt((0, 1), 600, (300, 200)),), budget=1 << 16, memory=Memory(4))
    found = fit(job, H100, gib, [ARMS["packed"]])["packed"]
    prompts = [found["prompt"], found["prompt"] * 1.05]
    groups = [Group.of_prompt((0, 1), int(prompt), (300, 300)) for prompt in prompts]
    jobs = [replace(job, groups=(group,), budget=1 << 40, kept=1) for group in groups]
    arm = replace(ARMS["packed"], keeps_attention=False)
    return found, [as_json(simulator.simulate(one, [arm], H100)[0])["peak_gib"] for one in jobs]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_search_of_what_fits_shows_its_progress_on_a_terminal(monkeypatch, capsys, terminal):
    monkeypatch.setattr(report, "simulate", lambda *_: [{}])
    monkeypatch.setattr(report, "as_json", lambda _: {"peak_gib": 1.0})
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    job = Job(SMALL, (Group.of_prompt((0, 1), 600, (300, 200)),), budget=1 << 16, memory=Memory(4))
    assert fit(job, H100, 75, list(ARMS.values())[:2]).keys() == set(list(ARMS)[:2])
    printed = capsys.readouterr()
    assert printed.out == "" and ("2/2" in printed.err) == terminal


def progress_of_arms(terminal: bool) -> str:
    """What `compare` writes to stderr of two arms of a model of two layers."""
    with contextlib.redirect_stderr(io.StringIO()) as err, mock.patch.object(err, "isatty", lambda: terminal):
        compare(Job(SMALL, (Group.of_prompt((0, 1), 600, (300, 200)),), budget=1 << 16), H100, list(ARMS.values())[:2])
    return err.getvalue()


@pytest.mark.parametrize("terminal", [True, pytest.param(False, marks=pytest.mark.more)])
def test_the_arms_of_a_simulation_show_their_progress_on_a_terminal(elsewhere, terminal):
    said = elsewhere(progress_of_arms, terminal)
    assert f"arms of {SMALL.num_hidden_layers} layers" in said and "2/2" in said if terminal else said == ""


@pytest.mark.more
def test_the_prompt_that_fits_fits_and_a_longer_one_does_not(elsewhere):
    found, (fits, longer) = elsewhere(fitting, 0.005)
    assert fits <= 0.005 < longer
    assert 64 < found["prompt"] < 1400 - 301 and found["group"] >= 1


@pytest.mark.parametrize(("backward", "blocks"), [(False, 3 * 64 - 64 - 2 - 1), (True, 3 * 64 - 64 - 3 - 1)])
def test_blocks_of_a_grid_that_find_no_token_are_counted(monkeypatch, backward, blocks):
    """Three segments in a grid of the longest, over queries, and in backward over keys."""
    spans = Spans((0, 8192, 8400, 8401), (0, 8192, 8500, 8501))
    monkeypatch.setattr(KERNEL, "call", Call(spans, causal=True, scale=1.0), raising=False)
    assert KERNEL.empty_blocks(backward) == blocks


def seconds_of_empty_blocks() -> list[float]:
    """Of a packed update of two layers of four heads, if an empty block takes 1 ms or 2."""
    config = LlamaConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=1000, tie_word_embeddings=False,
    )  # fmt: skip
    job = Job(config, (Group.of_prompt((0, 1, 2), 1000, (100, 100, 100)),), budget=1 << 16, memory=Memory(2))
    gpus = (replace(H100, empty_block=seconds) for seconds in (1e-3, 2e-3))
    return [simulator.simulate(job, [ARMS["packed"]], gpu, False)[0]["packed"]["seconds"] for gpu in gpus]


def test_blocks_that_find_no_token_take_time(elsewhere):
    """4 x 8 blocks a head for 8 + 3 of tokens, forward and backward; attention that is kept does not run again."""
    less, more = elsewhere(seconds_of_empty_blocks)
    assert more - less == pytest.approx(1e-3 * 2 * 2 * 4 * (4 * 8 - 8 - 3), rel=1e-3)
