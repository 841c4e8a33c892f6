"""Measures rows of a grid, one after the other, and writes the report after each; `bench` says what it holds."""

import copy
import functools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from verl_prefix.auto.calibration import measure
from verl_prefix.auto.chooser import Chooser, Workload
from verl_prefix.auto.cost import Memory, PassCost, Rates
from verl_prefix.auto.cost_model import CostModel
from verl_prefix.auto.shape import ModelShape, model_shape
from verl_prefix.core.forward import LogitsFn, PackedForward
from verl_prefix.core.plan import Plan
from verl_prefix.core.runner import PlanRunner, Step
from verl_prefix.files import parse_json
from verl_prefix.models.gradients import gradients_aside
from verl_prefix.models.hookup import HookedModel
from verl_prefix.tools.bench import report as tables
from verl_prefix.tools.bench.arms import WAVES_PER_BUDGET, Batch, Case, arm_plan, build_batch, run_arm, stock_attention
from verl_prefix.tools.bench.memory import added_peak, capacity, free_memory, in_fresh_process, warm_up
from verl_prefix.tools.bench.options import Options, Size, full_depth, unavailable
from verl_prefix.tools.report import provenance, show

SCHEMA = "verl_prefix.bench/3"  # 2: config.layers was a list of one or two depths
MOST_ROUNDS, QUICK_S = 15, 3.0
MIN_SPEEDUP = 1.05  # the default of actor.prefix.min_speedup


def update_flops(shape: ModelShape, size: Size, arm: str, budget: int) -> float:
    """FLOPs of one update in matmuls, of what the arm computes; a log-prob pass has a third of them.

    Forward, per layer: 2 per weight and token, and 4 H D per (query, key) pair; lm_head: 2 per weight and token that it
    sees. Backward counts as two forwards; checkpointing adds one of the layers. Left out: norms, softmax, rotary
    angles, what flash backward recomputes, lm_head forwards repeated beyond one logits chunk.

    Args:
        arm: of `ARMS` but auto, or "ideal": every token once, lm_head on responses alone; "ideal_one_level": with
            whole prompts shared alone.
    """
    return _flops(shape, arm_passes(shape, build_batch(size, 1 << 30, "meta"), arm, budget), arm)


def _flops(shape: ModelShape, passes: Sequence[PassCost], arm: str) -> float:
    layers = sum(p.linear(shape) + p.pairs * shape.pair for p in passes)
    return (4 if "+checkpoint" in arm else 3) * layers + 3 * shape.head * sum(p.head_tokens for p in passes)


def arm_passes(shape: ModelShape, batch: Batch, arm: str, budget: int, auto: Plan | None = None) -> list[PassCost]:
    """What an arm computes in an update; see `update_flops` and, of `auto`, `arm_plan`."""
    path = arm.partition("+")[0]
    plan = arm_plan(batch, path, budget, auto)
    if plan is None:
        (whole,) = shape.stock_passes(batch.groups, len(batch.weights), dense_mask=False)
        read = sum(n for group in batch.groups for n in group.output_lens)
        return [whole._replace(head_tokens=read) if path == "stock_lean" else whole]
    passes = shape.passes_of(plan)
    if path == "prefix_grouper":  # its prefix holds the last prompt token, too, and lm_head runs on everything
        passes = [PassCost(p.tokens + 1, p.tokens + 1, p.pairs) for p in passes]
    if path.startswith("ideal"):
        passes = [p._replace(skipped=0) for p in passes]
    return passes


def gradient_error(model: torch.nn.Module, truth: dict[str, torch.Tensor]) -> float:
    """The largest ||g - truth|| / ||truth|| over parameters, in float64; infinite where one is not a number."""
    pairs = ((parameter.grad, truth[name].double()) for name, parameter in model.named_parameters())
    errors = (((grad.double() - true).norm() / true.norm()).item() for grad, true in pairs if grad is not None)
    return max(math.inf if math.isnan(error) else error for error in errors)


class Bench:
    """One model; `row` measures a grid row."""

    def __init__(self, options: Options, progress: tqdm) -> None:
        self.options, self.progress = options, progress
        self.model = options.model()
        self.shape = model_shape(self.model, self.model.dtype)
        costs = CostModel(
            shape=self.shape, dense_mask=False, wave_tokens=None, min_speedup=MIN_SPEEDUP,
            memory=Memory(1, False, no_sync=False, logits_chunk=Case.logits_chunk, offload=False),
        )  # fmt: skip
        self.chooser = Chooser(costs, {}, measure=self._rates, reduce_max=lambda values: values)
        for arm in options.running:
            warm_up(options, arm, self.model)

    def row(self, size: Size) -> dict[str, Any]:
        """Everything about one row, as it stands in the report."""
        options, budget = self.options, self.options.budget_of(size)
        batch = build_batch(size, self.model.config.vocab_size, options.device)
        arms, auto, plan = list(options.running), None, None
        if "auto" in arms:
            self._say(f"{size} chooser")
            plan, auto = self._choose(batch, budget, arms)
            if auto["same_as"]:
                arms.remove("auto")
        case = Case(self.model, batch, budget, auto=plan)
        passes = {arm: arm_passes(self.shape, batch, arm, budget, plan) for arm in arms}
        truth = self._truth(case) if options.truth != "none" else {}
        results: dict[str, dict[str, Any]] = {
            arm: {"tokens": sum(p.tokens for p in of_arm), "flops": _flops(self.shape, of_arm, arm)}
            for arm, of_arm in passes.items()
        }
        ideals = {"": "ideal", "+checkpoint": "ideal+checkpoint", "one_level": "ideal_one_level"}
        for arm, result in results.items():
            result |= self._memory(arm, case)
            result["seconds"] = {"update": [], "forward": [], "log_probs": []}
        alive = {arm: result for arm, result in results.items() if "failed" not in result}
        start = time.perf_counter()
        for turn in range(MOST_ROUNDS):
            if turn >= options.repeats and time.perf_counter() - start > QUICK_S:
                break
            for arm, result in alive.items():
                self._measure(arm, case, result=result, truth=truth, turn=turn)
        return size._asdict() | {
            "layers": options.layers, "budget": budget, "wave_tokens": budget // WAVES_PER_BUDGET, "auto": auto,
            "ideal_flops": {name: update_flops(self.shape, size, ideal, budget) for name, ideal in ideals.items()},
            "arms": results,
        }  # fmt: skip

    def capacity(self, size: Size) -> dict[str, int]:
        """Of every arm but auto, which takes another one for rows of another length."""
        longest = {}
        for arm in self.options.running:
            if arm != "auto":
                self._say(f"{size} capacity of {arm}")
                longest[arm] = capacity(self.options, arm, size=size, model=self.model)
        return longest

    def _say(self, text: str) -> None:
        self.progress.set_description(text, refresh=sys.stderr.isatty())

    def _measure(self, arm: str, case: Case, result: dict[str, Any], truth: dict[str, torch.Tensor], turn: int) -> None:
        self._say(f"{case.batch.size} round {turn + 1} {arm}")
        done = run_arm(case, arm)
        result["seconds"]["update"].append(done.seconds)
        result["seconds"]["forward"].append(done.forward)
        if truth and turn == 0:
            result["grad_error"] = gradient_error(self.model, truth)
        if "+" not in arm:  # what is added changes nothing without gradients
            result["seconds"]["log_probs"].append(run_arm(case, arm, train=False).seconds)

    def _rates(self, budget: int, batch_tokens: int, forward_only: bool) -> Rates:
        def new_runner(of_logits: LogitsFn, step: Step, forward_only: bool) -> PlanRunner:
            forward = PackedForward(HookedModel(self.model), of_logits)
            return PlanRunner(forward, step, None if forward_only else torch.Tensor.backward)

        return measure(
            self.shape, budget, batch_tokens=batch_tokens, device=self.model.device, new_runner=new_runner,
            gradients_aside=functools.partial(gradients_aside, self.model), forward_only=forward_only,
        )  # fmt: skip

    def _choose(self, batch: Batch, budget: int, arms: list[str]) -> tuple[Plan | None, dict[str, Any]]:
        if "update" not in self.chooser.rates:  # for the prediction, even where no rates would choose otherwise
            tokens = sum(group.num_logical_tokens for group in batch.groups)
            self.chooser.rates = {"update": self._rates(budget, tokens, forward_only=False)}
        plan, decision = self.chooser.choose(Workload(batch.groups, budget), forward_only=False)
        same = {arm_plan(batch, name, budget): name for name in ("stock", "packed", "phased") if name in arms}
        choice = "stock" if plan is None else "phased" if plan.phased else "packed"
        return plan, {"choice": choice, "predicted": decision.speedup, "same_as": same.get(plan)}

    def _truth(self, case: Case) -> dict[str, torch.Tensor]:
        self._say(f"{case.batch.size} truth")
        model = copy.deepcopy(self.model).to(getattr(torch, self.options.truth))
        run_arm(Case(model, case.batch, case.budget), "stock_lean", attention="sdpa")
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def _memory(self, arm: str, case: Case) -> dict[str, Any]:
        """On CUDA in this process, which also warms up; an arm that has not enough memory is out."""
        if not self.options.memory:
            return {}
        size = case.batch.size
        self._say(f"{size} memory of {arm}")
        if self.options.device == "cpu":
            return in_fresh_process(added_peak, self.options, arm, size, case.auto)
        try:
            return added_peak(self.options, arm, size, auto=case.auto, model=self.model)
        except torch.OutOfMemoryError as error:
            reason = f"out of memory: {str(error).splitlines()[0]}"
        free_memory()
        return {"failed": reason}


def header(options: Options) -> dict[str, Any]:
    """A report without rows: code, machine, model and how it is measured."""
    return provenance(SCHEMA, options.device) | {
        "config": options.asdict(),
        "full_depth": full_depth(options.shape),
        "stock_attention": stock_attention(options.device, options.torch_dtype),
        "cannot_run": {arm: why for arm in options.arms if (why := unavailable(arm, options.shape, options.turns))},
        "rows": [],
    }


def resume(fresh: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """The report in `out`, where there is one of the same run, else `fresh`.

    Raises ValueError where `out` holds anything else.
    """
    if out is None or not out.exists():
        return fresh
    try:
        report = dict(parse_json(out.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--out {out} is not JSON of a report ({error}); delete it, or name another file") from error
    for key in ("schema", "git", "device", "versions", "config"):
        if report.get(key) != fresh[key]:
            raise ValueError(
                f"--out {out} is of another run: its {key} is {report.get(key)}, this one's is {fresh[key]}; delete "
                "it, or name another file"
            )
    return report


def run(options: Options, out: Path | None = None) -> int:
    """Measures what is not in `out` yet, writes after every row, and prints the table; returns the exit code.

    Raises:
        ValueError: `out` holds another run.
        OSError: the disk is full; the table is printed before.
    """
    torch.set_num_threads(options.threads)
    report = resume(header(options), out)
    try:
        _measure_rows(options, report, out)
    finally:
        if report["rows"]:
            tables.compare(report)
            show(tables.blocks(report))
    if out:
        tables.draw(report, out.with_suffix(".png"))
    return 0


def _measure_rows(options: Options, report: dict[str, Any], out: Path | None) -> None:
    """Adds the rows that the report has not yet."""
    done = {tuple(row[k] for k in Size._fields) for row in report["rows"]}
    if not (sizes := [size for size in options.sizes if size not in done]):
        return
    every = 0.1 if sys.stderr.isatty() else 20  # a log gets a line now and then
    with tqdm(total=len(sizes), unit="row", mininterval=every, maxinterval=every) as progress:
        bench = Bench(options, progress)
        for size in sizes:
            row = bench.row(size)
            if options.capacity:
                row["capacity"] = bench.capacity(size)
            report["rows"].append(row)
            progress.update()
            if out:
                tables.compare(report)
                tables.write(report, out)
