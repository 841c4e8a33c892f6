"""`verl-prefix plan --simulate`: a training command's own model, sizes and options as a `Job`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig
from verl.utils.torch_dtypes import PrecisionType

from verl_prefix.auto.cost import shard_size, syncs_once
from verl_prefix.core.groups import Group
from verl_prefix.tools.simulate.hardware import GIB, read_hardware
from verl_prefix.tools.simulate.job import Job
from verl_prefix.tools.simulate.report import assumptions, compare, fit, hardware_json, positions, settings, show
from verl_prefix.tools.simulate.tower import Grids


@dataclass(frozen=True)
class Request:
    """Options of the command line.

    Args:
        gpu: see `read_hardware`. gib: of `--fit`, or None.

    Raises:
        ValueError: an unknown GPU, or GiB that no device has.
    """

    gpu: str = "h100"
    gib: float | None = None

    def __post_init__(self) -> None:
        read_hardware(self.gpu)
        if self.gib is not None and not 0 < self.gib < 1 << 20:
            raise ValueError(f"--fit {self.gib}: give the GiB of one GPU, a number above 0")


def read_job(
    config: Any, hf_config: PretrainedConfig, groups: Sequence[Group], shown: Sequence[Grids], budgets: dict[str, int],
    ranks: int,
) -> Job:  # fmt: skip
    """The job of a rank that holds `groups` in a mini-batch.

    Args:
        config: `actor_rollout_ref`. shown: see `Job.grids`. budgets: tokens of a pass of "update" and "old".
    """
    actor, model, rollout = config.actor, config.model, config.rollout
    fsdp = actor.fsdp_config
    mixed = fsdp.get("mixed_precision") or {}
    lora = None
    if model.get("lora_rank", 0) > 0:
        keys = ("target_modules", "target_parameters", "exclude_modules")
        options = {key: OmegaConf.to_object(OmegaConf.create({"x": model.get(key)}))["x"] for key in keys}  # type: ignore[call-overload, index]
        lora = dict(r=model.lora_rank, lora_alpha=model.lora_alpha, **{k: x for k, x in options.items() if x})
    start, placed = 0, []
    for group in groups:
        placed.append(replace(group, rows=tuple(range(start, start + len(group.rows)))))
        start += len(group.rows)
    sharded = shard_size(fsdp.get("fsdp_size", -1), ranks)
    return Job(
        config=hf_config,
        groups=tuple(placed),
        budget=budgets["update"],
        log_prob_budget=budgets["old"],
        ranks=sharded,
        replicas=ranks // sharded,
        wave_tokens=actor.prefix.wave_tokens,
        logits_chunk=actor.prefix.logits_chunk,
        keep_attention=actor.prefix.keep_attention,
        checkpointing=bool(model.enable_gradient_checkpointing),
        no_sync=syncs_once(fsdp),
        reshard=bool(fsdp.get("reshard_after_forward", True)),
        master=PrecisionType.to_dtype(fsdp.get("model_dtype") or "fp32"),
        dtype=PrecisionType.to_dtype(mixed.get("param_dtype", "bf16")),
        lora=lora,
        entropy=bool(actor.get("calculate_entropy")) or actor.entropy_coeff != 0,
        temperature=float(rollout.temperature),
        grids=tuple(shown),
        freeze_tower=bool(actor.get("freeze_vision_tower", False)),
    )


def simulated(job: Job, request: Request, per_node: int) -> dict[str, Any]:
    """What `plan` adds to its JSON: arms, the cheapest settings, what fits, and the assumptions.

    Args:
        per_node: GPUs of a node.

    Raises:
        ValueError: attention kernels do not take the job's dtype or heads.
    """
    hardware = replace(read_hardware(request.gpu), per_node=per_node)
    if job.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"--simulate: flash attention takes 16-bit inputs, and param_dtype is {job.dtype}; set "
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16"
        )
    arms = compare(job, hardware)
    return {
        "gpu": request.gpu,
        "hardware": hardware_json(hardware),
        "rows": sum(len(group.rows) for group in job.groups),
        "ranks": job.ranks * job.replicas,
        "not_modelled": assumptions(job.config),
        "arms": arms,
        "settings": settings(job, hardware, arms),
        **(
            {"fits_gib": request.gib, "fits": fit(job, hardware, request.gib), "positions": positions(job.config)}
            if request.gib
            else {}
        ),
    }


def show_simulated(found: dict[str, Any], console: Console) -> None:
    """Prints what `simulated` found."""
    show(found["arms"], f"{found['gpu']}, {found['rows']} rows, {found['ranks']} ranks", console)
    ways = Table("simulated: settings, cheapest first", "s", "peak GiB")
    for way in found["settings"]:
        gib = f"{way['peak_gib']:.1f}" + ("" if way["fits"] else " does not fit")
        ways.add_row("\n".join(way["overrides"]), f"{way['seconds']:.3g}", gib)
    console.print(ways)
    if "fits" in found:
        sizes = Table(
            f"simulated: fits {found['fits_gib']:g} GiB", "longest prompt", "largest group", "largest wave",
            caption=f"the model takes rows of {found['positions']} tokens",
        )  # fmt: skip
        for arm, sizes_of in found["fits"].items():
            cells = (sizes_of.get(key, "") for key in ("prompt", "group", "wave"))
            sizes.add_row(arm, *("nothing" if x is None else str(x) for x in cells))
        console.print(sizes)
    lines = [f"not modelled: {found['not_modelled']}"]
    if reason := fits_nothing(found):
        lines.append(f"warning: {reason}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def fits_nothing(found: dict[str, Any]) -> str | None:
    """A line where no way to share fits the GPU."""
    smallest = min(found["settings"], key=lambda way: way["peak_gib"])
    if smallest["fits"]:
        return None
    return (
        f"no schedule fits {found['hardware']['capacity'] / GIB:.0f} GiB of {found['gpu']} (simulated): the smallest "
        f"peak is {smallest['peak_gib']:.0f} GiB, with {' '.join(smallest['overrides'])}; use more ranks"
    )
