"""The literature's settings and this project's shapes, simulated: speed-up, memory, the longest row. No GPU.

Writes examples/results/simulated_tables.json, .md and .png (`make -C examples/results simulated`). Every figure is
simulated, by `verl_prefix.tools.simulate`.
"""

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("VERL_PLATFORM", "cpu")

from transformers import AutoConfig, PretrainedConfig

from verl_prefix.auto.cost import Memory
from verl_prefix.core.groups import Group
from verl_prefix.files import write_whole
from verl_prefix.tools.arguments import Parser, json_to_write
from verl_prefix.tools.bench.options import SHAPES
from verl_prefix.tools.plots import Bars, save
from verl_prefix.tools.report import provenance, table
from verl_prefix.tools.simulate.depth import simulate
from verl_prefix.tools.simulate.hardware import GIB, GPUS
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.report import NOT_MODELLED, as_json, longest

ROOT = Path(__file__).resolve().parents[1]
STOCK, ROW, LEAN = Arm("stock"), Arm("stock", rows=1), Arm("stock_lean")
PACKED, PHASED, OFFLOAD = Arm("packed"), Arm("phased"), Arm("phased", offload=True)
# name: shape, GPU, ranks, (P, S, G, groups), tokens of a pass, gradient checkpointing
SETTINGS: dict[str, tuple[str, str, int, tuple[int, int, int, int], int, bool]] = {
    "MuSiQue": ("qwen3-8b", "h100", 8, (2400, 256, 8, 4), 18432, True),
    "video": ("qwen3-8b", "h100", 8, (6000, 512, 8, 2), 26624, True),
    "tool schemas": ("qwen3-8b", "h100", 8, (8000, 800, 16, 2), 35840, True),
    "long": ("llama3-8b", "h100", 8, (10240, 2048, 8, 1), 12289, True),
    "long, 2 rows": ("llama3-8b", "h100", 8, (10240, 2048, 8, 1), 26625, True),
    "DualKV": ("qwen3-8b", "h100", 8, (8191, 2048, 32, 2), 40960, True),
    "verl #4368": ("qwen3-4b", "h100", 4, (7167, 1024, 4, 8), 32768, True),
}
SPLITS = ((2048, 10240), (6144, 6144), (8192, 4096), (10240, 2048))
PAPER_PHASE_B = {2048: -20, 6144: -40, 8192: -49, 10240: -59}  # per cent of stock's peak, arXiv 2606.01143
GROUPS = (2, 8, 32)
CAPACITY, DEVICE = 75.0, 80.0  # GiB for the longest row, of a GPU with so many


def config_of(shape: str) -> PretrainedConfig:
    """The published shape of `bench`."""
    kind, (hidden, mlp, layers, heads, kv_heads, dim, vocab), others = SHAPES[shape]
    fields: dict[str, Any] = dict(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, vocab_size=vocab, max_position_embeddings=131072,
        tie_word_embeddings=False,
    )  # fmt: skip
    assert kind in ("llama", "qwen3")
    return AutoConfig.for_model(kind, **fields | others)


def job_of(shape: str, ranks: int, size: tuple[int, int, int, int], budget: int, checkpointing: bool) -> Job:
    prefix, suffix, rows, num_groups = size
    groups = tuple(
        Group.of_prompt(tuple(range(i * rows, (i + 1) * rows)), prefix, (suffix,) * rows) for i in range(num_groups)
    )
    return Job(config_of(shape), groups, budget, Memory(ranks, checkpointing))


def run(job: Job, arm: Arm, gpu: str, log_probs: bool = False, gib: float | None = None) -> dict[str, Any]:
    """An arm on a GPU, or on one like it with so much memory."""
    start = time.process_time()
    hardware = GPUS[gpu] if gib is None else replace(GPUS[gpu], capacity=gib * GIB)
    found = as_json(simulate(job, [arm], hardware, log_probs)[0])
    print(f"{arm.name:15} {found['update_seconds']:8.3f} s {found['peak_gib']:7.2f} GiB, "
          f"{time.process_time() - start:.0f} s of CPU", flush=True)  # fmt: skip
    return found


def paper() -> list[dict[str, Any]]:
    """Llama3-8B, rows of 12,288 tokens, no checkpointing, suffixes one by one, one H20 of eight."""
    rows = []
    for prefix, suffix in SPLITS:
        for num_rows in GROUPS if prefix == 10240 else (2,):
            job = job_of("llama3-8b", 8, (prefix, suffix, num_rows, 1), 12289, checkpointing=False)
            stock = run(job, ROW, "h20")
            found = {"P": prefix, "S": suffix, "G": num_rows, "stock_peak_gib": stock["peak_gib"]}
            for arm in (PHASED, OFFLOAD):
                # Waves of one row, and all of the prefix alive beside them.
                ours = run(replace(job, budget=1 << 20, wave_tokens=suffix), arm, "h20")
                found[arm.name] = {
                    "speedup": stock["update_seconds"] / ours["update_seconds"],
                    "phase_b_gib": ours["phases"]["wave"]["peak_gib"],
                    "peak_gib": ours["peak_gib"],
                    "seconds_by_phase": {name: phase["seconds"] for name, phase in ours["phases"].items()},
                }
            found["paper_phase_b_percent"] = PAPER_PHASE_B[prefix]
            rows.append(found)
    return rows


def longest_rows() -> dict[str, Any]:
    """Tokens of the longest row of a group of two, a sixth of it response, that trains in CAPACITY GiB; what it takes
    of host memory."""
    found: dict[str, Any] = {}

    @functools.cache
    def update(tokens: int, arm: Arm) -> dict[str, Any]:
        suffix = tokens // 6
        job = job_of("llama3-8b", 8, (tokens - suffix - 1, suffix, 2, 1), 1 << 20, checkpointing=False)
        return run(replace(job, wave_tokens=suffix), arm, "h20", gib=DEVICE)

    for arm in (ROW, PHASED, OFFLOAD):

        def peak(tokens: int, arm: Arm = arm) -> float:
            return update(tokens, arm)["peak_gib"]

        found[arm.name] = longest(peak, CAPACITY, 2048, 65536)
    phases = update(found[OFFLOAD.name], OFFLOAD)["phases"].values()
    return found | {"host_gib": max(phase["host_gib"] for phase in phases)}


def shapes() -> dict[str, Any]:
    """Every setting of SETTINGS on all arms, update and log-probs."""
    found = {}
    for name, (shape, gpu, ranks, size, budget, checkpointing) in SETTINGS.items():
        job = job_of(shape, ranks, size, budget, checkpointing)
        arms = {arm.name: run(job, arm, gpu, log_probs=True) for arm in (STOCK, LEAN, PACKED, PHASED, OFFLOAD)}
        found[name] = {"shape": shape, "gpu": gpu, "ranks": ranks, "P/S/G/groups": size, "budget": budget, "arms": arms}
    return found


def heading(title: str, target: str, report: dict[str, Any]) -> list[str]:
    """The first lines of a page, made by a target of examples/results/Makefile: what its figures are."""
    rates = f"Rates: {report['rates']}. " if "rates" in report else ""
    return [
        f"# Simulated: {title}", "",
        "**Every figure here is simulated** by `verl_prefix.tools.simulate` on fake tensors; no GPU ran. Made by "
        f"`make -C examples/results {target}` at {report['git']['commit'][:7]}, torch {report['versions']['torch']}. "
        f"{rates}Not modelled: {NOT_MODELLED}.", "",
    ]  # fmt: skip


def write_report(
    about: str | None, name: str, schema: str, measured: Callable[[], dict[str, Any]],
    words: Callable[[dict[str, Any]], str],
) -> tuple[dict[str, Any], Path]:  # fmt: skip
    """The command of a script: writes what it measures as NAME.json, and in words as .md. Returns the report, its file.

    Args:
        about: the script's docstring. measured: makes the report, but for its provenance.
    """
    parser = Parser(description=(about or "").partition("\n")[0])
    parser.add_argument("--out", type=json_to_write, default=str(ROOT / f"examples/results/{name}.json"))
    out: Path = parser.parse_args().out
    start = time.process_time()
    report = provenance(schema, "cpu") | measured()
    report["cpu_seconds"] = round(time.process_time() - start)
    write_whole(out, json.dumps(report, indent=1) + "\n")
    write_whole(out.with_suffix(".md"), words(report))
    return report, out


def markdown(report: dict[str, Any]) -> str:
    lines = [
        *heading("the literature's settings and ours", "simulated", report),
        "## One step (FSDP2, gradient checkpointing), simulated", "",
    ]  # fmt: skip
    rows = []
    for name, one in report["shapes"].items():
        stock, lean = one["arms"]["stock"], one["arms"]["stock_lean"]
        for arm in ("packed", "phased", "phased+offload"):
            ours = one["arms"][arm]
            rows.append((
                name, f"{one['shape']}, {one['ranks']} x {one['gpu']}", "/".join(map(str, one["P/S/G/groups"])), arm,
                f"{stock['update_seconds'] / ours['update_seconds']:.2f}",
                f"{lean['update_seconds'] / ours['update_seconds']:.2f}",
                f"{stock['log_prob_seconds'] / ours['log_prob_seconds']:.2f}",
                f"{stock['flops'] / ours['flops']:.2f}",
                f"{stock['peak_gib']:.1f} -> {ours['peak_gib']:.1f}",
            ))  # fmt: skip
    head = ("setting", "model, GPUs", "P/S/G/groups per rank", "arm", "update", "update over lean", "log-probs",
            "FLOP ratio", "peak GiB, stock -> ours")  # fmt: skip
    lines += table(head, rows)
    lines += [
        "Speed-ups over verl's own path; lean is that path with lm_head on responses alone. DualKV reports 1.63 to "
        "2.09 for the update (N=32, P up to 8192, R up to 2048, verl 0.7.0, several lengths); verl #4368 1.70 (n=4, "
        "context 8K, H800, padded).", "",
        "## Schedule-level reuse (arXiv 2606.01143): Llama3-8B, 12,288 tokens per row, no checkpointing, simulated", "",
    ]  # fmt: skip
    rows = []
    for one in report["paper"]:
        base = one["stock_peak_gib"]
        for arm in ("phased", "phased+offload"):
            b = one[arm]["phase_b_gib"]
            rows.append((f"{one['P']}/{one['S']}/{one['G']}", arm, f"{one[arm]['speedup']:.2f}", f"{base:.1f}",
                         f"{b:.1f} ({100 * (b / base - 1):+.0f} %)", f"{one['paper_phase_b_percent']} %",
                         f"{one[arm]['peak_gib']:.1f}"))  # fmt: skip
    lines += table(("P/S/G", "arm", "update, H20", "stock GiB", "phase B GiB", "paper, phase B", "peak GiB"), rows)
    found = report["longest"]
    lines += [
        "On 8 ranks. Stock one row at a time. Without offload all of the prefix stays beside a wave. The paper "
        "reports up to 4.395 eager at 10k/2k and its largest N.", "",
        f"Longest row of a group of two in {CAPACITY:g} of {DEVICE:g} GiB (simulated): stock {found['stock_row']}, "
        f"phased {found['phased']}, phased with offload {found['phased+offload']} tokens, for "
        f"{found['host_gib']:.0f} GiB of pinned host memory per rank; the paper: 17,920 -> 29,696.", "",
        "![simulated](simulated_tables.png)", "",
    ]  # fmt: skip
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> bool:
    """Speed-ups over stock, and peaks, of every setting; False: see `plots.save`."""
    names = [name.replace(" ", "\n", 1) for name in report["shapes"]]
    bars = {
        arm: [
            one["arms"]["stock"]["update_seconds"] / one["arms"][arm]["update_seconds"]
            for one in report["shapes"].values()
        ]
        for arm in ("packed", "phased", "phased+offload")
    }
    peaks = {
        arm: [one["arms"][arm]["peak_gib"] for one in report["shapes"].values()]
        for arm in ("stock", "packed", "phased", "phased+offload")
    }
    best = [max(column) for column in zip(*bars.values(), strict=True)]
    offload = max(ours / stock for ours, stock in zip(peaks["phased+offload"], peaks["stock"], strict=True))
    faster = f"Simulated: the fastest of ours is {min(best):.1f} to {max(best):.1f} times as fast"
    smaller = f"Simulated: with offload a peak is at most {offload:.2f} of stock's"
    panels = [Bars(faster, "times stock", "setting", names, bars), Bars(smaller, "GiB", "setting", names, peaks)]
    return save(path, "Updates on GPUs as the simulator has them; no GPU ran", panels)


def main() -> None:
    def measured() -> dict[str, Any]:
        rates = "those of verl_prefix/tools/simulate/hardware.py"
        return {"rates": rates, "shapes": shapes(), "paper": paper(), "longest": longest_rows()}

    report, out = write_report(__doc__, "simulated_tables", "simulated/1", measured, markdown)
    draw(report, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
