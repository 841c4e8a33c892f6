"""A deep model by two smaller ones: every amount of a phase is a line through them."""

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

from tqdm import tqdm
from transformers import LlamaConfig, PretrainedConfig

from verl_prefix.auto.cost import ROOM_FACTOR, may_have_all_logits
from verl_prefix.core import host_memory
from verl_prefix.core.groups import Group
from verl_prefix.models.recurrent import is_recurrent
from verl_prefix.tools.simulate import scans
from verl_prefix.tools.simulate.accelerator import DEVICE, fake_accelerator
from verl_prefix.tools.simulate.hardware import GPUS, Hardware
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.model import whole_shape
from verl_prefix.tools.simulate.passes import Simulation
from verl_prefix.tools.simulate.stages import on_stages
from verl_prefix.tools.simulate.tower import deepstack_layers, kinds_of_blocks, with_blocks
from verl_prefix.tools.simulate.tracker import Phase, Tracker

DEPTH = 3  # layers of the smaller model that runs; with fewer, FSDP2 prefetches less than in the whole one
# Offload prefetches grad caches, one layer later. Of what phase A saved one storage is back ahead of backward, and so
# it is in the whole model, or two: with all 32 layers phase C's peak is 0.4 % higher.
OFFLOAD_DEPTH = 4


def _with_layers(config: PretrainedConfig, layers: int, blocks: Sequence[int]) -> PretrainedConfig:
    config = with_blocks(config, *blocks)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def _depths(config: PretrainedConfig, depth: int = DEPTH) -> tuple[list[PretrainedConfig], int]:
    """Two smaller models of at least `depth` layers, and how many times their difference makes the first one the whole
    model, with every kind of layer and of a tower's blocks in proportion; or the whole model alone, and 0."""
    text = config.get_text_config()
    layers, blocks = text.num_hidden_layers, kinds_of_blocks(config)
    kinds = list(getattr(text, "layer_types", None) or [0] * layers)
    period = next(n for n in range(1, layers + 1) if kinds[n:] == kinds[:-n])
    least = max(depth, period, deepstack_layers(config))
    choices = []
    for step in range(period, layers if any(blocks) else period + 1, period):
        first = least + (layers - least) % step
        times = (layers - first) // step
        if times > 1:
            steps = [max(0, n - 1) // times for n in blocks]
            if deepstack_layers(config):
                steps[0] = 0  # what blocks add to text layers is no layer's own
            starts = [n - times * by for n, by in zip(blocks, steps, strict=True)]
            choices.append((2 * (first + sum(starts)) + step + sum(steps), times, first, step, starts, steps))
    if not choices:
        return [config], 0
    _, times, first, step, starts, steps = min(choices)
    ends = [n + by for n, by in zip(starts, steps, strict=True)]
    return [_with_layers(config, first, starts), _with_layers(config, first + step, ends)], times


@functools.cache
def _warm_up() -> None:
    """Runs a first pass of a tiny model: what torch imports there keeps that pass's tensors."""
    tiny = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=64, vocab_size=128,
    )  # fmt: skip
    _run(Job(tiny, (Group.of_prompt((0,), 64, (64,)),), 256), (Arm("stock"), Arm("phased")), GPUS["h100"])


def _run(
    job: Job, arms: Sequence[Arm], hardware: Hardware, log_probs: bool = True, shown: bool = False
) -> list[dict[str, Phase]]:
    vocab_size = job.config.get_text_config().vocab_size
    if division := job.memory.division:
        vocab_size = -(-vocab_size // division.tensor)
    phases: list[dict[str, Phase]] = []
    of_path: dict[tuple[str, bool], dict[str, Phase]] = {}
    what = f"arms of {job.config.get_text_config().num_hidden_layers} layers"
    fake = fake_accelerator(job.memory.ranks, job.replicas, job.memory.expert_ranks)
    with fake as meshes, Tracker(hardware, DEVICE, vocab_size) as tracker:
        simulation = Simulation(job, tracker, meshes, DEVICE)
        optimizer = simulation.optimizer()
        for arm in tqdm(arms, what, disable=None if shown else True):  # None: unless stderr is a terminal
            tracker.restart()
            host_memory.host_pages.cache_clear()
            if log_probs and (arm.path, arm.offload) not in of_path:
                simulation.run(arm, update=False)
                of_path[arm.path, arm.offload] = dict(tracker.phases)
            simulation.run(arm, update=True)
            if phases:
                optimizer.zero_grad()
                tracker.phases["optimizer"] = phases[0]["optimizer"]
            else:
                simulation.step(optimizer)
            phases.append({**of_path.get((arm.path, arm.offload), {}), **tracker.phases})
        del simulation, optimizer
        gc.collect()
    return phases


def _deeper(a: Phase, b: Phase, times: int, arm: Arm) -> Phase:
    """A phase of the whole model. Its peak may be in another layer than those of the smaller models, so each site's
    peak is a line of its own. With offload few layers wait on the device for their backward, and one line tells more:
    what is on its way depends on time."""
    whole = Phase({name: a[name] + (b[name] - a[name]) * times for name in b})
    sites = [name for name in b if "@" in name and "/" not in name and name in a]
    if sites and not arm.offload:
        highest = max(sites, key=lambda site: whole[site])
        whole |= {name.replace(highest, "peak"): x for name, x in whole.items() if name.startswith(highest)}
    return whole


def simulate(
    job: Job, arms: Sequence[Arm], hardware: Hardware, log_probs: bool = True, shown: bool = False
) -> list[dict[str, Phase]]:
    """Per arm {phase: amounts} of an update and, if wanted, its log-probs: "log_probs/...", "micro_batch" or "packed",
    "phase_a", "wave", "phase_c", "optimizer".

    A deep model runs at two smaller depths; every amount of a phase is a line through them, and so is its peak at each
    `Tracker.site`. Arms run one after the other on one model, whose lazy start the first one pays: log-probs once for
    every path, which rows one by one do not change, and the optimizer's step once. An arm without `ROOM_FACTOR` times
    the room that it needs has its logits in chunks, and if that is not enough keeps no attention, as in the engine.
    shown: with progress on a terminal.

    Raises:
        ValueError: the model has recurrent layers whose kernels are not simulated.
    """
    if is_recurrent(kind := job.config.get_text_config().model_type) and kind not in scans.MODEL_TYPES:
        raise ValueError(
            f"--simulate: a {kind} model's recurrent layers run kernels that no stand-in here knows (those of "
            f"{', '.join(scans.MODEL_TYPES)} have one); leave it out: the plan itself counts their FLOPs and states"
        )
    _warm_up()
    configs, times = _depths(job.config, OFFLOAD_DEPTH if any(arm.offload for arm in arms) else DEPTH)
    stages = job.memory.stages
    if stages > 1 and not times:
        raise ValueError(
            f"--simulate: {stages} pipeline stages have a part of at least {DEPTH + 2} layers each, and the model "
            f"has {job.config.get_text_config().num_hidden_layers}"
        )
    shape = job.shape or whole_shape(job)
    job = replace(job, shape=shape)

    def phases(arms: Sequence[Arm]) -> list[dict[str, Phase]]:
        runs = [_run(replace(job, config=config), arms, hardware, log_probs, shown) for config in configs]
        if not times:
            return runs[0]
        pairs = zip(arms, *runs, strict=True)
        whole = [{phase: _deeper(a[phase], b[phase], times, arm) for phase in b} for arm, a, b in pairs]
        if stages == 1:
            return whole
        first, second, all_layers = (one.get_text_config().num_hidden_layers for one in (*configs, job.config))
        for of_arm, a, b in zip(whole, *runs, strict=True):
            for name, phase in of_arm.items():
                of_layers = (b[name]["seconds"] - a[name]["seconds"]) / (second - first) * all_layers
                phase["layer_seconds"] = min(max(0.0, of_layers), phase["seconds"])
        return [on_stages(job, arm, of_arm, hardware) for arm, of_arm in zip(arms, whole, strict=True)]

    def lacks_room(of: dict[str, Phase]) -> bool:
        resident = of["optimizer"]["peak"]
        return ROOM_FACTOR * (max(phase["peak"] for phase in of.values()) - resident) > hardware.capacity - resident

    lesser: list[Callable[[Arm], Arm]] = []
    if stages > 1:
        return phases(arms)
    if may_have_all_logits(shape, job.memory.logits_chunk, logits_once=job.reads_logits_once):
        lesser.append(lambda arm: replace(arm, all_logits=False))
    if job.memory.checkpointed:
        lesser.append(lambda arm: replace(arm, keeps_attention=False))
    of_arms, tried = phases(arms), list(arms)
    for less in lesser:
        more = [i for i, arm in enumerate(tried) if arm.path in ("packed", "phased") and arm != less(arm)]
        if again := [i for i in more if lacks_room(of_arms[i])]:
            for i in again:
                tried[i] = less(tried[i])
            for i, of_arm in zip(again, phases([tried[i] for i in again]), strict=True):
                of_arms[i] = of_arm
    return of_arms
