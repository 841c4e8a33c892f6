"""Mixtures of experts on verl's VeOmni engine, on H100s, simulated: verl's own path, packed, phased. No GPU.

Writes examples/results/simulated_veomni.json and .md (`make -C examples/results simulated-veomni`). Every figure is
simulated, by `verl_prefix.tools.simulate`.
"""

import itertools
from typing import Any

from simulate_tables import GIB, GPUS, OFFLOAD, PACKED, PHASED, STOCK, heading, run, write_report
from transformers import AutoConfig, PretrainedConfig

from verl_prefix.auto.cost import Memory
from verl_prefix.core.groups import Group
from verl_prefix.tools.report import table
from verl_prefix.tools.simulate.job import Job
from verl_prefix.tools.simulate.model import whole_shape

PROMPT, RESPONSE, ROLLOUTS = 8192, 1024, 8
BUDGET = 18432  # tokens of a pass: two rows, or a whole group
# As the models' config.json has them; of Qwen3.5 the text.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B": ("qwen3_moe", dict(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128,
        num_experts_per_tok=8, tie_word_embeddings=False,
    )),
    "Qwen3.5-122B-A10B": ("qwen3_5_moe_text", dict(
        hidden_size=3072, moe_intermediate_size=1024, shared_expert_intermediate_size=1024, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=2, head_dim=256, vocab_size=248320, num_experts=256,
        num_experts_per_tok=8, linear_num_key_heads=16, linear_num_value_heads=64, tie_word_embeddings=False,
    )),
}  # fmt: skip
ARMS = (STOCK, PACKED, PHASED, OFFLOAD)


def config_of(name: str) -> PretrainedConfig:
    kind, fields = MODELS[name]
    return AutoConfig.for_model(kind, **fields)


def simulated(name: str, gpus: int, expert_ranks: int) -> dict[str, Any]:
    """One update of a prompt for every rank, by every arm."""
    rows = Group.of_prompt(tuple(range(ROLLOUTS)), PROMPT - 1, (RESPONSE,) * ROLLOUTS)
    job = Job(config_of(name), (rows,), BUDGET, Memory(gpus, veomni=True, expert_ranks=expert_ranks))
    found: dict[str, Any] = {}
    for arm in ARMS:
        one = run(job, arm, "h100")
        sent = sum(phase["collective_bytes"].get("alltoall_base", 0.0) for phase in one["phases"].values())
        found[arm.name] = {
            "update_seconds": one["update_seconds"], "peak_gib": one["peak_gib"], "flops": one["flops"],
            "all_to_all_gib": sent * (expert_ranks - 1) / expert_ranks / GIB,
        }  # fmt: skip
        stock = found["stock"]
        found[arm.name]["speedup"] = stock["update_seconds"] / one["update_seconds"]
        found[arm.name]["of_flop_ratio"] = found[arm.name]["speedup"] / (stock["flops"] / one["flops"])
    return {
        "model": name, "parameters": whole_shape(job).parameters, "gpus": gpus, "expert_ranks": expert_ranks,
        "arms": found,
    }  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    rows = []
    for setting in report["settings"]:
        for i, (name, arm) in enumerate(setting["arms"].items()):
            fits = "" if arm["peak_gib"] * GIB <= GPUS["h100"].capacity else ", does not fit"
            first = [setting["model"], str(setting["gpus"]), str(setting["expert_ranks"])]
            rows.append([
                *(first if i == 0 else [""] * 3), name, f"{arm['update_seconds']:.2f}", f"{arm['speedup']:.2f}",
                f"{arm['of_flop_ratio']:.2f}", f"{arm['peak_gib']:.1f}{fits}", f"{arm['all_to_all_gib']:.0f}",
            ])  # fmt: skip
    head = ("model", "GPUs", "EP", "arm", "update s", "speed-up", "of the FLOP ratio", "peak GiB",
            "sent to experts, GiB")  # fmt: skip
    lines = [
        *heading("mixtures of experts on verl's VeOmni engine", "simulated-veomni", report),
        f"One update on H100s (VeOmni's FSDP2 and fused experts, gradient checkpointing, bf16, fp32 master weights, "
        f"gradients reduced in every pass) of one prompt of {PROMPT} tokens with {ROLLOUTS} responses of {RESPONSE} "
        f"for every rank, {BUDGET} tokens in a pass. EP: ranks that share a layer's experts, inside a node of eight.",
        "",
        *table(head, rows),
        "Without expert parallelism every pass gathers all experts of a layer, from other nodes where there are any; "
        "fewer passes then gain more than FLOPs say, and waves gain less. With it a rank gathers its own part of them, "
        "and tokens travel inside the node.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def measured() -> dict[str, Any]:
    return {"settings": [simulated(*setting) for setting in itertools.product(MODELS, (8, 32), (1, 8))]}


if __name__ == "__main__":
    write_report(__doc__, "simulated_veomni", "simulated_veomni/1", measured, markdown)
