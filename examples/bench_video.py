"""Time and memory of one actor update on a video question, on CPU or CUDA, without verl: stock, packed and phased.

    python examples/bench_video.py --suffixes 256,32 --out bench.json

G rows ask about one random video; the update is forward and backward of the weighted sum of their response log-probs,
through text layers, merger and vision tower of a random Qwen2.5-VL or Qwen3-VL. The prompt stays the same and the
length of the responses varies, so that the prompt's share of a row is what differs. Measured per arm: seconds (rounds
of all arms in turn), peak memory above model, gradients and rows (a fresh process per arm), and the largest relative
gradient error of a parameter against stock. Also what the rows' pixels take in host memory as verl delivers them, each
row with its own copy, and after `vision.share_pixels`.

- stock: HF's own forward with sdpa on one whole row at a time, lm_head on every token, as verl's FSDP engine runs it.
- stock_lean: the same, with lm_head on response tokens only, as ours.
- packed, phased: `runner.PlanRunner`; phased in waves of one suffix.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText, PreTrainedModel

from verl_prefix.api.pixels import positions_of_row
from verl_prefix.core.forward import PackedForward, TokenBatch
from verl_prefix.core.groups import group_by_key
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.planning import make_plan
from verl_prefix.core.runner import PlanRunner
from verl_prefix.files import write_whole
from verl_prefix.models.hookup import HookedModel
from verl_prefix.models.vision import PixelBatch, share_pixels
from verl_prefix.testing import visual_prompt
from verl_prefix.tools.arguments import Parser, at_least, file_to_write, numbers
from verl_prefix.tools.bench.measure import gradient_error
from verl_prefix.tools.bench.memory import in_fresh_process
from verl_prefix.tools.memory import memory_mib, reset_peak_mib
from verl_prefix.tools.report import provenance, refuse_dirty

SCHEMA = "verl_prefix.bench_video/2"
ARMS = ("stock", "stock_lean", "packed", "phased")
TINY = ["1,4,4", 3]
TOWERS = {
    "qwen2_5_vl": ("Qwen2_5_VLConfig", {"fullatt_block_indexes": [3]}),
    "qwen3_vl": ("Qwen3VLConfig", {"deepstack_visual_indexes": [0, 1, 2]}),
}


def build_model(options: argparse.Namespace) -> PreTrainedModel:
    """A random model with gradients of zero: text layers of 64 per head, a tower of four blocks."""
    torch.manual_seed(0)
    name, tower = TOWERS[options.family]
    text = dict(
        vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=3 * options.hidden, head_dim=64,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64, num_key_value_heads=2,
        bos_token_id=None, eos_token_id=None, rope_parameters={"rope_type": "default", "mrope_section": [8, 12, 12]},
    )  # fmt: skip
    vision = dict(
        depth=4, hidden_size=options.tower_hidden, intermediate_size=3 * options.tower_hidden, num_heads=4,
        out_hidden_size=options.hidden, patch_size=14,
    )  # fmt: skip
    ids = dict(vision_start_token_id=3, vision_end_token_id=4, image_token_id=5, video_token_id=6)
    config = getattr(transformers, name)(text_config=text, vision_config=vision | tower, **ids)
    with torch.device(options.device):
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, options.dtype)).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


class Batch:
    """Rows of one group, each with its own copy of the pixels until `share` is called."""

    def __init__(self, options: argparse.Namespace, model: PreTrainedModel, video: str, suffix: int) -> None:
        generator = torch.Generator().manual_seed(0)
        grid = tuple(int(x) for x in video.split(","))
        prompt, pixels = visual_prompt([8, grid, options.question], model.config, generator)
        self.prompt_len, self.suffix, group = len(prompt), suffix, options.group
        vocab = model.config.text_config.vocab_size
        responses = [torch.randint(7, vocab, (suffix,), generator=generator) for _ in range(group)]
        self.ids = [torch.cat([prompt, response]) for response in responses]
        positions = [positions_of_row(model, row, pixels, 0) for row in self.ids]
        self.weights = torch.randn(group, suffix, generator=generator).to(options.device)
        self.flat = torch.cat(self.ids).to(options.device)
        self.positions = torch.cat(positions, 1).to(options.device)
        self.rows = [{name: tensor.clone() for name, tensor in pixels.items()} for _ in range(group)]
        self.groups = group_by_key([0] * group, [len(prompt)] * group, [suffix] * group)

    def share(self) -> None:
        share_pixels(self.rows)

    def loss(self, rows: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """Log-probs [rows, suffix] times their weights."""
        return (log_probs * self.weights[rows]).sum()


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[n, vocabulary], [n] -> [n], in fp32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -torch.nn.functional.cross_entropy(wide, labels, reduction="none")


def run_stock(model: PreTrainedModel, batch: Batch, lean: bool) -> None:
    device, length = batch.flat.device, batch.prompt_len + batch.suffix
    for row, pixels in enumerate(batch.rows):
        ids = batch.flat[row * length : (row + 1) * length]
        kept = slice(batch.prompt_len - 1, -1)
        logits = model(
            input_ids=ids[None],
            position_ids=batch.positions[:, None, row * length : (row + 1) * length],
            use_cache=False,
            logits_to_keep=torch.arange(length, device=device)[kept] if lean else 0,
            **{name: tensor.to(device) for name, tensor in pixels.items()},
        ).logits[0]
        chosen = log_probs(logits if lean else logits[kept], ids[batch.prompt_len :])
        batch.loss(torch.tensor([row]), chosen[None]).backward()


def run_shared(model: PreTrainedModel, batch: Batch, schedule: str) -> None:
    length = batch.prompt_len + batch.suffix
    offsets = range(0, len(batch.flat) + 1, length)
    pixels = PixelBatch(batch.rows, batch.flat.cpu(), offsets, model.config)

    def outputs(index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return log_probs(logits, batch.flat[index + 1]).unsqueeze(-1)

    def step(packed_row: PackedRow, chosen: torch.Tensor) -> torch.Tensor:
        rows = torch.tensor([row for group in packed_row.groups for row in group.rows])
        return batch.loss(rows, chosen[:, 0].view(len(rows), batch.suffix))

    # The wave budget is that of one suffix, the pass's that of the whole group.
    plan = make_plan(batch.groups, batch.groups[0].num_physical_tokens, schedule, batch.suffix)
    tokens = TokenBatch(batch.flat, batch.positions, offsets, pixels)
    PlanRunner(PackedForward(HookedModel(model), outputs), step, torch.Tensor.backward).run(tokens, plan)


def run_arm(model: PreTrainedModel, arm: str, batch: Batch) -> float:
    """One update on zeroed gradients; its seconds."""
    model.zero_grad(set_to_none=False)
    synchronize = torch.cuda.synchronize if batch.flat.is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    if arm.startswith("stock"):
        run_stock(model, batch, arm == "stock_lean")
    else:
        run_shared(model, batch, arm)
    synchronize()
    return time.perf_counter() - start


def added_peak_mib(options: argparse.Namespace, arm: str, suffix: int) -> float:
    """MiB that an update adds at its peak to model, gradients and rows; in a fresh process."""
    torch.set_num_threads(options.threads)
    model = build_model(options)
    run_arm(model, arm, Batch(options, model, *TINY))
    batch = Batch(options, model, options.video, suffix)
    batch.share()
    before = reset_peak_mib(options.device)
    run_arm(model, arm, batch)
    return memory_mib(options.device)[1] - before


def pixels_mib(options: argparse.Namespace) -> dict[str, float]:
    """Host memory of one group's pixels before and after rows share them; in a fresh process."""
    model = build_model(options)
    empty = Batch(options, model, *TINY)
    empty.share()  # imports what it needs
    start = memory_mib("cpu")[0]
    batch = Batch(options, model, options.video, 1)
    delivered = memory_mib("cpu")[0]
    batch.share()
    return {"delivered": delivered - start, "shared": memory_mib("cpu")[0] - start}


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    model = build_model(options)
    shapes = {}
    for suffix in options.suffixes:
        batch = Batch(options, model, options.video, suffix)
        arms: dict[str, Any] = {arm: {"seconds": [], "grad_error": 0.0} for arm in ARMS}
        for arm in ARMS:
            run_arm(model, arm, Batch(options, model, *TINY))
        truth = {}
        for turn in range(options.repeats):
            for name, arm in arms.items():
                arm["seconds"].append(run_arm(model, name, batch))
                truth = truth or {n: parameter.grad.clone() for n, parameter in model.named_parameters()}
                arm["grad_error"] = max(arm["grad_error"], gradient_error(model, truth))
                console.print(f"S={suffix}, round {turn + 1}/{options.repeats} {name}: {arm['seconds'][-1]:.2f} s")
        for name, arm in arms.items():
            arm["median_s"] = statistics.median(arm["seconds"])
            arm["speedup"] = arms["stock"]["median_s"] / arm["median_s"]
            arm["added_peak_mib"] = in_fresh_process(added_peak_mib, options, name, suffix)
        prefix = batch.prompt_len - 1
        row = batch.prompt_len + suffix
        shapes[f"S={suffix}"] = {
            "prompt_tokens": batch.prompt_len,
            "prompt_share_of_a_row": batch.prompt_len / row,
            "tokens_stock_over_ours": options.group * row / (prefix + options.group * suffix),
            "arms": arms,
        }
    return {"pixels_mib": in_fresh_process(pixels_mib, options), "shapes": shapes}


def show(report: dict[str, Any], console: Console) -> None:
    for name, shape in report["shapes"].items():
        tokens = f"tokens {shape['tokens_stock_over_ours']:.2f} to 1"
        title = f"P={shape['prompt_tokens']} {name} G={report['config']['group']}, {tokens}"
        table = Table("arm", "n", "median s", "speed-up", "over stock_lean", "added MiB", "gradient error", title=title)
        for arm, x in shape["arms"].items():
            cells = (
                str(len(x["seconds"])),
                f"{x['median_s']:.2f}",
                f"{x['speedup']:.2f}",
                f"{shape['arms']['stock_lean']['median_s'] / x['median_s']:.2f}",
                f"{x['added_peak_mib']:.0f}",
                f"{x['grad_error']:.1e}",
            )
            table.add_row(arm, *cells)
        console.print(table)
    console.print(
        "MiB of pixels in the rows: {delivered:.0f} as delivered, {shared:.0f} shared".format(**report["pixels_mib"])
    )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    sizes = {
        "question": 24,
        "group": 8,
        "hidden": 512,
        "layers": 6,
        "tower-hidden": 256,
        "vocab": 16000,
        "repeats": 2,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help=f"{default} by default")
    parser.add_argument("--family", choices=list(TOWERS), default="qwen2_5_vl")
    parser.add_argument("--video", default="8,28,28", help="frames (two pictures each), height and width in patches")
    parser.add_argument("--suffixes", type=numbers("S,S,...", range(1, 100)), default="256,32", help="response lengths")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=None)
    parser.add_argument("--threads", type=at_least(1), default=torch.get_num_threads())
    parser.add_argument("--out", type=file_to_write, help="write a JSON report there")
    parser.add_argument("--allow-dirty", action="store_true", help="write it from uncommitted files too")
    options = parser.parse_args(argv)
    if options.out and not options.allow_dirty:
        try:
            refuse_dirty()
        except ValueError as error:
            parser.error(str(error))
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 120)
    config = {key: value for key, value in vars(options).items() if key != "out"}
    report = provenance(SCHEMA, options.device) | {"config": config} | measure(options, console)
    show(report, console)
    if options.out:
        write_whole(options.out, json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
