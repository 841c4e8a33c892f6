"""`verl-prefix plan --simulate`: a training command's own model, sizes and options as a `Job`, and tables of it."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any

import torch
from transformers import PretrainedConfig
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.torch_dtypes import PrecisionType

from verl_prefix.auto.cost import Memory
from verl_prefix.auto.megatron import Division, State
from verl_prefix.auto.shape import ModelShape
from verl_prefix.config.engines import FSDP2, MEGATRON, VEOMNI, engine_of, slices_of
from verl_prefix.core.group_parts import renumbered
from verl_prefix.core.groups import Group
from verl_prefix.tools.report import Table
from verl_prefix.tools.simulate.hardware import GIB, read_hardware
from verl_prefix.tools.simulate.job import Job
from verl_prefix.tools.simulate.report import NOT_MODELLED, compare, fit, settings
from verl_prefix.tools.simulate.tower import Grids


def dtypes(actor: Any) -> tuple[torch.dtype, torch.dtype]:
    """Of weights, gradients and moments, and of passes, by `actor_rollout_ref.actor`. VeOmni computes in bf16. Megatron
    has weights in the dtype that it computes in; of gradients and moments see `state_of_megatron`."""
    if engine_of(actor) is MEGATRON:
        dtype = PrecisionType.to_dtype(actor.megatron.dtype)
        return dtype, dtype
    if engine_of(actor) is VEOMNI:
        return torch.float32 if actor.veomni.mixed_precision else torch.bfloat16, torch.bfloat16
    fsdp = actor.fsdp_config
    names = fsdp.get("model_dtype") or "fp32", (fsdp.get("mixed_precision") or {}).get("param_dtype", "bf16")
    master, compute = map(PrecisionType.to_dtype, names)
    return master, compute


def state_of_megatron(config: Any, division: Division, shape: ModelShape) -> State:
    """Bytes of a rank's weights, gradients and optimizer on verl's Megatron engine, by `actor_rollout_ref`. What
    optimizer_offload moves is on the device in an update; what optimizer_cpu_offload computes on the host is not
    (verl/workers/engine/megatron/transformer_impl.py, verl/utils/megatron/optimizer.py)."""
    ddp, optim = config.actor.megatron.get("override_ddp_config") or {}, config.actor.optim
    size = {name: PrecisionType.to_dtype(optim.get(name) or "fp32").itemsize
            for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")}  # fmt: skip
    aware = bool(optim.get("use_precision_aware_optimizer"))
    gradient = size["main_grads_dtype"] if aware else 4
    if (in_fp32 := ddp.get("grad_reduce_in_fp32")) is not None:
        gradient = 4 if in_fp32 else 2
    moments = size["exp_avg_dtype"] + size["exp_avg_sq_dtype"] if aware else 8
    override = optim.get("override_optimizer_config") or {}
    on_host = float(override.get("optimizer_offload_fraction", 0.0)) if override.get("optimizer_cpu_offload") else 0.0
    weight = dtypes(config.actor)[1].itemsize
    return division.state(shape, weight, gradient, (4 + moments) * (1 - on_host))


def memory_of_engine(config: Any, gpus: int) -> Memory:
    """What updates of `actor_rollout_ref` keep on so many GPUs."""
    actor, checkpointed = config.actor, bool(config.model.enable_gradient_checkpointing)
    if engine_of(actor) is MEGATRON:
        return Memory.of_megatron(actor.megatron, gpus, actor.prefix)
    if engine_of(actor) is VEOMNI:
        return Memory.of_veomni(actor.veomni, gpus, checkpointed, actor.prefix)
    _, slices = slices_of("actor", actor)
    return Memory.of_fsdp(actor.fsdp_config, gpus, checkpointed, slices, actor.prefix)


def read_job(
    config: Any, hf_config: PretrainedConfig, groups: Sequence[Group], shown: Sequence[Grids], budgets: dict[str, int],
    gpus: int,
) -> Job:  # fmt: skip
    """The job of a rank that holds `groups` in a mini-batch.

    Args:
        config: `actor_rollout_ref`. shown: see `Job.grids`. budgets: tokens of a pass of "update" and "old".
    """
    actor, model, rollout = config.actor, config.model, config.rollout
    lora = None
    if model.get("lora_rank", 0) > 0:
        keys = ("target_modules", "target_parameters", "exclude_modules")
        options = {key: convert_to_regular_types(model[key]) for key in keys if model.get(key)}
        lora = dict(r=model.lora_rank, lora_alpha=model.lora_alpha, **options)
    ends = accumulate(len(group.rows) for group in groups)
    in_order = [
        renumbered(group, dict(zip(group.rows, range(end - len(group.rows), end), strict=True)))
        for group, end in zip(groups, ends, strict=True)
    ]
    memory = memory_of_engine(config, gpus)
    master, dtype = dtypes(actor)
    return Job(
        config=hf_config,
        groups=tuple(in_order),
        budget=budgets["update"],
        log_prob_budget=budgets["old"],
        memory=memory,
        replicas=gpus // memory.ranks,
        wave_tokens=actor.prefix.wave_tokens,
        keep_attention=actor.prefix.keep_attention,
        reshard=engine_of(actor) is not FSDP2 or bool(actor.fsdp_config.get("reshard_after_forward", True)),
        master=master,
        dtype=dtype,
        lora=lora,
        entropy=bool(actor.get("calculate_entropy")) or actor.entropy_coeff != 0,
        temperature=float(rollout.temperature),
        grids=tuple(shown),
        freeze_tower=bool(actor.get("freeze_vision_tower", False)),
    )


def simulated(job: Job, gpu: str, fit_gib: float | None, per_node: int) -> dict[str, Any]:
    """The part of `plan`'s report: arms, the cheapest settings, what fits, and the assumptions.

    Args:
        gpu: see `read_hardware`. fit_gib: of one GPU, to search what fits; or None. per_node: GPUs of a node.

    Raises:
        ValueError: attention kernels do not take the job's dtype or heads.
    """
    hardware = replace(read_hardware(gpu), per_node=per_node)
    if job.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"--simulate: flash attention takes 16-bit inputs, and param_dtype is {job.dtype}; on FSDP2 set "
            "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16"
        )
    arms, fitting, division = compare(job, hardware), {}, job.memory.division
    if fit_gib:
        fitting = {"fits_gib": fit_gib, "fits": fit(job, hardware, fit_gib)}
    return {
        "gpu": gpu,
        "hardware": asdict(hardware),
        "rows": sum(len(group.rows) for group in job.groups),
        "ranks": job.memory.ranks * job.replicas,
        "engine": "megatron" if division else "veomni" if job.memory.veomni else "fsdp2",
        "tensor_ranks": division.tensor if division else 1,
        "expert_ranks": division.experts if division else job.memory.expert_ranks,
        "not_modelled": NOT_MODELLED,
        "arms": arms,
        "settings": settings(job, hardware, arms),
        **fitting,
    }


def tables(simulation: dict[str, Any]) -> list[str | Table]:
    """What `simulated` returned, in tables and words."""

    def peak(outcome: dict[str, Any]) -> str:
        return f"{outcome['peak_gib']:.1f}" + ("" if outcome["fits"] else " does not fit")

    head = ("simulated", "update s", "log-probs s", "speed-up", "over lean", "FLOP ratio", "peak GiB", "of which")
    arms = []
    for name, arm in simulation["arms"].items():
        highest = max(arm["phases"].values(), key=lambda phase: phase["peak_gib"])
        owners = sorted(highest["owners_gib"].items(), key=lambda item: -item[1])[:2]
        arms.append((
            name, f"{arm['update_seconds']:.3g}", f"{arm['log_prob_seconds']:.3g}", f"{arm['speedup']:.2f}",
            f"{arm['speedup_over_lean']:.2f}", f"{arm['flop_ratio']:.2f}", peak(arm),
            ", ".join(f"{owner} {gib:.1f}" for owner, gib in owners),
        ))  # fmt: skip
    shared = f", of which {n} share matrices" if (n := simulation["tensor_ranks"]) > 1 else ""
    shared += f", of which {n} share experts" if (n := simulation["expert_ranks"]) > 1 else ""
    title = (
        f"one mini-batch of the rank with most tokens on {simulation['gpu']}, {simulation['rows']} rows, "
        f"{simulation['ranks']} ranks{shared}, simulated; lean: stock with lm_head on responses alone"
    )
    ways = [("\n".join(way["overrides"]), f"{way['seconds']:.3g}", peak(way)) for way in simulation["settings"]]
    blocks: list[str | Table] = [
        Table(head, arms, title), Table(("simulated: settings, cheapest first", "s", "peak GiB"), ways)
    ]  # fmt: skip
    if "fits" in simulation:
        rows = []
        for name, longest in simulation["fits"].items():
            cells = (longest.get(key, "") for key in ("prompt", "group", "wave"))
            rows.append((name, *("nothing" if x is None else x for x in cells)))
        sizes = (f"simulated: fits {simulation['fits_gib']:g} GiB", "longest prompt", "largest group", "largest wave")
        blocks.append(Table(sizes, rows))
    reason = fits_nothing(simulation)
    return [*blocks, f"not modelled: {simulation['not_modelled']}", *([f"warning: {reason}"] if reason else ())]


def fits_nothing(simulation: dict[str, Any]) -> str | None:
    """A line where no way to share fits the GPU."""
    smallest = min(simulation["settings"], key=lambda way: way["peak_gib"])
    if smallest["fits"]:
        return None
    gib, gpu = simulation["hardware"]["capacity"] / GIB, simulation["gpu"]
    return (
        f"no schedule fits {gib:.0f} GiB of {gpu} (simulated): the smallest peak is {smallest['peak_gib']:.0f} GiB, "
        f"with {' '.join(smallest['overrides'])}; use more ranks"
    )
