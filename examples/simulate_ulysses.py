"""Qwen3-Next-80B-A3B under Ulysses sequence parallelism on H100s, simulated: packed, phased, verl's own path. No GPU.

Writes examples/results/simulated_ulysses.json and .md (`make -C examples/results simulated-ulysses`). Every figure is
simulated, by `verl_prefix.tools.simulate`.
"""

from typing import Any

from simulate_tables import GIB, GPUS, OFFLOAD, PACKED, PHASED, ROW, heading, run, write_report
from transformers import AutoConfig

from verl_prefix.auto.cost import Memory
from verl_prefix.core.groups import Group
from verl_prefix.tools.report import table
from verl_prefix.tools.simulate.job import Job

PROMPT, RESPONSE, ROLLOUTS = 8192, 2048, 8
BUDGET = 4096  # tokens of a pass on each rank
# GPUs, and how many of them compute a row together: one prompt is computed by as many.
SETTINGS = ((8, 8), (32, 8), (32, 1))


def simulated(gpus: int, together: int) -> dict[str, Any]:
    """One update of a prompt for every group of ranks, by every arm."""
    rows = Group.of_prompt(tuple(range(ROLLOUTS)), PROMPT - 1, (RESPONSE,) * ROLLOUTS)
    config = AutoConfig.for_model("qwen3_next")  # whose defaults are the published model's
    # A budget of one rank has to hold a row.
    budget = max(BUDGET * together, PROMPT + RESPONSE)
    job = Job(config, (rows,), budget, Memory(gpus, slices=together))
    found = {}
    for arm in (ROW, PACKED, PHASED, OFFLOAD):
        one = run(job, arm, "h100")
        sent = sum(phase["collective_bytes"].get("alltoall_base", 0.0) for phase in one["phases"].values())
        found[arm.name] = {
            "update_seconds": one["update_seconds"], "peak_gib": one["peak_gib"], "flops": one["flops"],
            "passes_peak_gib": max(x["peak_gib"] for name, x in one["phases"].items() if name != "optimizer"),
            "all_to_all_gib": sent * (together - 1) / together / GIB,
        }  # fmt: skip
    return {"gpus": gpus, "sequence_ranks": together, "budget": budget, "arms": found}


def markdown(report: dict[str, Any]) -> str:
    rows = []
    for setting in report["settings"]:
        for i, (name, arm) in enumerate(setting["arms"].items()):
            fits = "" if arm["peak_gib"] * GIB <= GPUS["h100"].capacity else ", does not fit"
            prompts = setting["gpus"] // setting["sequence_ranks"]
            first = [str(setting["gpus"]), str(setting["sequence_ranks"]), str(prompts), str(setting["budget"])]
            rows.append([
                *(first if i == 0 else [""] * 4), name, f"{arm['update_seconds']:.2f}", f"{arm['peak_gib']:.1f}{fits}",
                f"{arm['passes_peak_gib']:.1f}", f"{arm['all_to_all_gib']:.1f}",
            ])  # fmt: skip
    head = ("GPUs", "ranks of a row", "prompts", "tokens of a pass", "arm", "update s", "peak GiB", "peak of passes",
            "sent by all-to-all, GiB")  # fmt: skip
    lines = [
        *heading("Qwen3-Next-80B-A3B under Ulysses", "simulated-ulysses", report),
        f"One update on H100s (FSDP2, gradient checkpointing, bf16, fp32 master weights) of one prompt of {PROMPT} "
        f"tokens with {ROLLOUTS} responses of {RESPONSE} for every group of ranks. With 8 GPUs weights, gradients and "
        "moments alone do not fit.", "",
        *table(head, rows),
        "stock_row is verl's own path, a row in a pass. Under Ulysses it is the time of verl's engine, which sends "
        "nothing in recurrent layers, and whose results are wrong for this model. Where one rank computes a row, a "
        "pass has room for one, and packed shares nothing. On 32 GPUs every pass gathers weights from other nodes, and "
        "phased has more of them.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def measured() -> dict[str, Any]:
    return {"settings": [simulated(*setting) for setting in SETTINGS]}


if __name__ == "__main__":
    write_report(__doc__, "simulated_ulysses", "simulated_ulysses/1", measured, markdown)
