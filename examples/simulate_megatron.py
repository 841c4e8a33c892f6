"""verl's Megatron engine with one pipeline stage and with several, on H100s, simulated: stock, packed, phased. No GPU.

Writes examples/results/simulated_megatron.json and .md (`make -C examples/results simulated-megatron`). Every figure is
simulated, by `verl_prefix.tools.simulate`.
"""

import itertools
from typing import Any

from simulate_tables import GIB, GPUS, OFFLOAD, PACKED, PHASED, STOCK, heading, run, write_report
from simulate_veomni import MODELS as OF_VEOMNI
from transformers import AutoConfig

from verl_prefix.auto.cost import Memory
from verl_prefix.auto.megatron import Division
from verl_prefix.core.groups import Group
from verl_prefix.tools.report import table
from verl_prefix.tools.simulate.job import Job
from verl_prefix.tools.simulate.model import whole_shape

PROMPTS = {False: 4, True: 16}  # of each data-parallel rank in an update, with one stage and with several
ROWS = ((8192, 1024, 8), (16384, 4096, 16))  # P, S, G; a pass has the tokens of two rows
_QWEN3 = dict(num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False)
# As the models' config.json has them; and ranks, TP (with sequence parallelism), EP, PP; experts' matrices are whole.
MODELS: dict[str, tuple[str, dict[str, Any], Division]] = {
    "Qwen3-8B": ("qwen3", _QWEN3 | dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    ), Division(8, 2, True)),
    "Qwen3-32B": ("qwen3", _QWEN3 | dict(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
    ), Division(32, 8, True)),
    "Qwen3-30B-A3B": (*OF_VEOMNI["Qwen3-30B-A3B"], Division(32, 4, True, 8)),
    "Moonlight-16B-A3B": ("deepseek_v3", dict(
        hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, vocab_size=163840, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, n_group=1, topk_group=1, first_k_dense_replace=1, tie_word_embeddings=False,
    ), Division(8, 1, False, 8)),
    "GLM-4.5-Air": ("glm4_moe", dict(
        hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=46,
        num_attention_heads=96, num_key_value_heads=8, head_dim=128, vocab_size=151552, n_routed_experts=128,
        n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1, attention_bias=True, use_qk_norm=False,
        tie_word_embeddings=False,
    ), Division(64, 4, True, 16)),
    "Qwen3-235B-A22B": ("qwen3_moe", _QWEN3 | dict(
        hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94,
        num_attention_heads=64, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    ), Division(64, 4, True, 4, stages=8)),
    "DeepSeek-V3": ("deepseek_v3", dict(
        hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
        num_attention_heads=128, num_key_value_heads=128, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, vocab_size=129280, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3, tie_word_embeddings=False,
    ), Division(96, 8, True, 8, stages=12)),
}  # fmt: skip
ARMS = (STOCK, PACKED, PHASED, OFFLOAD)


def simulated(name: str, rows: tuple[int, int, int]) -> dict[str, Any]:
    """One update, by every arm."""
    kind, fields, division = MODELS[name]
    prompt, response, rollouts = rows
    groups = [
        Group.of_prompt(tuple(range(start, start + rollouts)), prompt - 1, (response,) * rollouts)
        for start in range(0, PROMPTS[division.stages > 1] * rollouts, rollouts)
    ]
    budget = 2 * (prompt + response)
    job = Job(
        AutoConfig.for_model(kind, **fields), tuple(groups), budget,
        Memory(division.tensor, division=division), division.data * division.stages,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for arm in ARMS:
        one = run(job, arm, "h100")
        sent: dict[str, float] = {"tensor": 0.0, "experts": 0.0}
        passes = (phase for phase_name, phase in one["phases"].items() if phase_name != "optimizer")
        for collective, nbytes in (item for phase in passes for item in phase["collective_bytes"].items()):
            ranks, of = (division.experts, "experts") if "alltoall" in collective else (division.tensor, "tensor")
            sent[of] += nbytes * (1 + ("allreduce" in collective)) * (ranks - 1) / ranks
        found[arm.name] = {
            "update_seconds": one["update_seconds"], "peak_gib": one["peak_gib"], "flops": one["flops"],
            "optimizer_seconds": one["phases"]["optimizer"]["seconds"],
            "bubble": one["phases"].get("pipeline", {}).get("bubble", 0.0),
            **{f"sent_{of}_gib": nbytes / GIB for of, nbytes in sent.items()},
        }  # fmt: skip
        stock = found["stock"]
        found[arm.name]["speedup"] = stock["update_seconds"] / one["update_seconds"]
        found[arm.name]["flop_ratio"] = stock["flops"] / one["flops"]
    return {
        "model": name, "parameters": whole_shape(job).parameters, "gpus": division.world, "tensor": division.tensor,
        "experts": division.experts, "stages": division.stages, "P/S/G": rows, "prompts": PROMPTS[division.stages > 1],
        "budget": budget, "arms": found,
    }  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    rows = []
    for setting in report["settings"]:
        layout = f"{setting['gpus']}, TP {setting['tensor']}, EP {setting['experts']}"
        layout += f", PP {setting['stages']}" if setting["stages"] > 1 else ""
        for i, (name, arm) in enumerate(setting["arms"].items()):
            fits = "" if arm["peak_gib"] * GIB <= GPUS["h100"].capacity else ", does not fit"
            first = [setting["model"], layout, "/".join(map(str, setting["P/S/G"]))]
            rows.append([
                *(first if i == 0 else [""] * 3), name, f"{arm['update_seconds']:.2f}", f"{arm['speedup']:.2f}",
                f"{arm['flop_ratio']:.2f}", f"{arm['bubble']:.2f}" if setting["stages"] > 1 else "",
                f"{arm['peak_gib']:.1f}{fits}",
                f"{arm['sent_tensor_gib']:.0f}, {arm['sent_experts_gib']:.0f}",
            ])  # fmt: skip
    head = ("model", "GPUs", "P/S/G", "arm", "simulated update s", "simulated speed-up", "simulated FLOP ratio",
            "simulated bubble", "simulated peak GiB", "simulated GiB sent by TP, EP")  # fmt: skip
    lines = [
        *heading("verl's Megatron engine", "simulated-megatron", report),
        f"One update on H100s (bf16, gradients and moments in fp32, distributed optimizer, "
        f"recompute_granularity=full) of {PROMPTS[False]} prompts of P tokens, on pipelines {PROMPTS[True]}, with G "
        "responses of S for every data-parallel rank, two rows' tokens in a pass. TP with sequence parallelism; "
        "experts' matrices are whole. Norms, rotary angles and SwiGLU run as Hugging Face's code, not as "
        "TransformerEngine's kernels; nothing is sent while something is computed.",
        "",
        *table(head, rows),
        "No pass gathers parameters, and what TP and EP send shrinks with the tokens, as FLOPs do. What does not "
        "shrink is the optimizer's step: gradients reduced and weights gathered once per update, between nodes where "
        "data parallelism spans them.",
        "",
        "On a pipeline (PP) passes run as on one stage with all layers; `verl_prefix.auto.pipeline` says when each "
        "stage could run its part, an equal one of the layers, with hidden states on the wire. The bubble is the part "
        "of the passes' time that a stage waits or sends. Sharing leaves fewer micro-batches to fill the pipeline, so "
        "the speed-up is less than the FLOP ratio. Peaks of pipelines are estimates, as those of `plan`; what does not "
        "fit wants more data-parallel ranks, or the optimizer on the host.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def measured() -> dict[str, Any]:
    return {"settings": [simulated(*setting) for setting in itertools.product(MODELS, ROWS)]}


if __name__ == "__main__":
    write_report(__doc__, "simulated_megatron", "simulated_megatron/1", measured, markdown)
