"""`verl-prefix ab`: replays a trace, or made-up rows, through the stock engine and ours, and writes the report.

Starts one process per rank itself, or runs as a rank under torchrun. `report` holds the tolerances and the verdict.
"""

import dataclasses
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import verl_prefix.plugin  # noqa: F401  first: whatever imports verl imports it, and must not find us half imported
from verl_prefix.config import SCHEDULES
from verl_prefix.engine.trace import StepRows, Trace, TraceError, join_rows, model_fingerprint
from verl_prefix.tools.ab import report
from verl_prefix.tools.ab.diagnosis import first_diverging
from verl_prefix.tools.ab.replay import (
    REPACKED,
    STOCK,
    TRUTH,
    Arm,
    errors_by_parameter,
    largest,
    parameter_distance,
    precision,
    relative_error,
    response_part,
    synthetic_manifest,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for; None leaves a value to the trace.

    Raises:
        TraceError: an option cannot be, or does not go with the trace.
    """

    trace: str | None = None
    synthetic: tuple[int, int, int, int] | None = None
    model: str | None = None
    arms: tuple[str, ...] = ("auto",)
    steps: int | None = None
    ranks: int | None = None
    dtype: str | None = None
    truth_steps: int = 3
    lr: float | None = None

    def __post_init__(self) -> None:
        known = (*(name for name in SCHEDULES if name != STOCK), REPACKED)
        for name in self.arms:
            if name not in known or self.arms.count(name) > 1:
                raise TraceError(f"--arms {','.join(self.arms)}: name each of {', '.join(known)} at most once")
        if self.arms == (REPACKED,):
            raise TraceError(f"--arms {REPACKED} is stock again; add one of {', '.join(known[:-1])} to compare")
        for option, value in (("steps", self.steps), ("ranks", self.ranks)):
            if value is not None and value < 1:
                raise TraceError(f"--{option} {value}: give 1 or more")
        if self.truth_steps < 0:
            raise TraceError(f"--truth-steps {self.truth_steps}: give 0 or more")
        if self.lr is not None and not 0 <= self.lr < math.inf:
            raise TraceError(f"--lr {self.lr}: give a learning rate of 0 or more")
        if self.synthetic and (self.model is None or min(self.synthetic) < 1):
            raise TraceError("--synthetic P,S,G,N needs four numbers of 1 or more, and --model with a model's folder")
        if self.synthetic and self.synthetic[2] == 1:
            raise TraceError("--synthetic with groups of one row has advantages of zero; give G of 2 or more")

    @property
    def judged(self) -> list[str]:
        """The arms that have tolerances to keep: ours."""
        return [name for name in self.arms if name != REPACKED]


# Modules that a trace may name as optimizer_impl: verl imports what stands there.
OPTIMIZERS = ("torch.optim", "torchao.optim", "bitsandbytes.optim")


class Source:
    """Steps to replay, the same for every arm: those of a trace, its ranks joined if fewer run here, or made-up ones.

    Attributes:
        manifest: what `build_engine` reads, with the command line's model and dtype. num_steps, ranks: ints.
    """

    def __init__(self, options: Options) -> None:
        self.synthetic, self.trace = options.synthetic, None
        if options.trace is not None:
            self.trace = Trace(options.trace)
            recorded = self.trace.world_size
            self.manifest = self.trace.manifest
            self.num_steps = options.steps or self.trace.num_steps
            if self.num_steps > self.trace.num_steps:
                raise TraceError(f"--steps {options.steps}: {options.trace} holds {self.trace.num_steps}; leave it out")
            self.ranks = options.ranks or recorded
            if recorded % self.ranks:
                raise TraceError(f"--ranks {self.ranks} does not divide the trace's {recorded} ranks")
            model = options.model or self.manifest["model"]["local_path"] or self.manifest["model"]["path"]
            self.trace.check_model(model)
            module = self.manifest["optimizer"].get("optimizer_impl") or "torch.optim"
            if module not in OPTIMIZERS:
                raise TraceError(f"optimizer_impl={module!r} in the trace: verl would import it; known: {OPTIMIZERS}")
            for _ in self.trace.check():
                pass
        else:
            self.manifest = synthetic_manifest(options.synthetic)
            self.num_steps, self.ranks, model = options.steps or 5, options.ranks or 1, options.model
            if model_fingerprint(model) is None:
                raise TraceError(f"--model {model} has no config.json; give a model's folder")
        self.manifest = self.manifest | {"model": self.manifest["model"] | {"path": str(model)}}
        if options.dtype:
            mixed = dict(param_dtype=options.dtype, reduce_dtype="fp32", buffer_dtype="fp32")
            self.manifest["engine"] = self.manifest["engine"] | {"mixed_precision": mixed}
        if precision(self.manifest) == "fp16":
            raise TraceError(
                "the trace is of fp16, whose loss scale moves from step to step; give --dtype bf16 or --dtype fp32"
            )
        if precision(self.manifest) != "fp32" and not options.truth_steps:
            raise TraceError(f"--truth-steps 0: {precision(self.manifest)} is judged against a truth; give 1 or more")
        if options.lr is not None:
            self.manifest["optimizer"] = self.manifest["optimizer"] | {"lr": options.lr}

    def rows(self, step: int, rank: int, vocab_size: int) -> StepRows:
        """What `rank` of this replay trains on in `step`."""
        if self.trace is None:
            return synthetic_rows(*self.synthetic, vocab_size, seed=1000 * step + rank, ranks=self.ranks)
        joined = self.trace.world_size // self.ranks
        return join_rows([self.trace.read(step, rank * joined + i) for i in range(joined)])


def synthetic_rows(prompt: int, response: int, group: int, count: int, vocab_size: int, seed: int, ranks: int = 1):
    """`count` groups of `group` rows, random tokens; group-relative advantages; `old_log_probs` left to stock."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = count * group
    prompts = torch.randint(vocab_size, (count, prompt), generator=generator).repeat_interleave(group, 0)
    responses = torch.randint(vocab_size, (num_rows, response), generator=generator)
    rewards = torch.randn(count, group, generator=generator)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).nan_to_num()
    whole = torch.cat([prompts, responses], 1)
    fields = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": whole,
        "position_ids": torch.arange(prompt + response).expand_as(whole),
        "loss_mask": torch.ones_like(responses),
        "response_mask": torch.ones_like(responses),
        "advantages": advantages.flatten().unsqueeze(1).expand(num_rows, response),
    }
    jagged = {name: (x.flatten().contiguous(), torch.full((num_rows,), x.shape[1])) for name, x in fields.items()}
    flags = {
        "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "use_remove_padding": True, "temperature": 1.0,
        "calculate_entropy": False, "global_batch_size": num_rows * ranks,
    }  # fmt: skip
    return StepRows(jagged, {}, [f"{seed}-{i // group}" for i in range(num_rows)], flags)


def replay(source: Source, options: Options, rank: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """Runs all steps on this rank. Every rank hands the same figures of every step to `keep` (read by `report.build`).

    From stock's weights, each arm computes a step's passes once, and those are timed: after step 1, which warms up, no
    arm has seen a trace's rows before, and who comes first changes from step to step. All but stock then compute the
    update again from their own weights and take the optimizer's step; `values` are of that. So does the truth, whose
    passes from stock's weights tell each arm's own error.
    """
    dtype = precision(source.manifest)
    arms = {name: Arm(name, source.manifest) for name in (STOCK, *options.arms)}
    order = list(arms.values())
    stock, *others = order
    truth = Arm(TRUTH, source.manifest) if options.truth_steps else None
    vocab_size = stock.engine.model_config.hf_config.get_text_config().vocab_size
    diagnosed, stock_error = set(), {}
    for number in range(source.num_steps):
        rows = source.rows(number, rank, vocab_size)
        if "old_log_probs" not in rows.jagged:
            found = response_part(stock.infer(rows)["log_probs"], rows)
            rows.jagged["old_log_probs"] = torch.cat(found).float().cpu(), rows.jagged["responses"][1]
        record: dict[str, Any] = {"step": number + 1}
        if number == 0:
            record["recorded_log_prob_gap"] = _warm_up(order, rows)
        start = [w.clone() for w in stock.weights()]
        at_truth = truth is not None and number < options.truth_steps
        if at_truth:
            with truth.at(start):
                truth.passes(rows, infer=False, optimize=False)
        results: dict[str, Any] = dict.fromkeys(arms)
        turn = number % len(order)
        for arm in order[turn:] + order[:turn]:
            if arm is stock:
                results[STOCK] = stock.passes(rows)
                continue
            with arm.at(start):
                results[arm.name] = arm.passes(rows, optimize=False)
        results[STOCK]["values"] = stock.values
        errors = {arm.name: _truth_errors(arm, truth) for arm in order} if at_truth else {}
        stock_error = errors.get(STOCK, stock_error)
        same = {arm.name: _same_weights(arm, stock, rows) for arm in others}
        record["first_diverging"] = {}
        limits = report.same_weights_limits(dtype, stock_error, same.get(REPACKED))
        for name in options.judged:
            if name in diagnosed or all(same[name][key] <= limit for key, limit in limits.items()):
                continue
            if place := first_diverging(arms[name], stock, rows, start, dtype, limits):
                record["first_diverging"][name] = place
                diagnosed.add(name)
        for arm in others:
            own = arm.passes(rows, infer=False)
            for figures in ("seconds", "added_gib"):
                results[arm.name][figures] = own[figures] | results[arm.name][figures]  # the optimizer's is own's
            distances = {
                "log_probs_max": _max_over_ranks(largest(arm.log_probs.double() - stock.log_probs.double())),
                "grads": relative_error(list(zip(arm.grads, stock.grads, strict=True))),
                "params": parameter_distance(arm, stock),
            }
            results[arm.name] |= {"values": arm.values, "same_weights": same[arm.name], "own_weights": distances}
        if at_truth:
            truth.passes(rows, infer=False)
        for arm in order if at_truth else ():
            errors[arm.name]["params"] = relative_error(list(zip(arm.weights(), truth.weights(), strict=True)))
        keep(record | {"arms": results, "truth_errors": errors})


def _warm_up(arms: list[Arm], rows: StepRows) -> float | None:
    """One of each pass per arm; returns how far stock's log-probs are from the recorded old ones, at most."""
    for arm in arms:
        arm.passes(rows, optimize=False)
    old, lengths = rows.jagged["old_log_probs"]
    if not torch.equal(lengths, rows.jagged["responses"][1]):
        return None
    return _max_over_ranks(largest((arms[0].log_probs.float() - old)[rows.jagged["response_mask"][0].bool()]))


def _max_over_ranks(value: float) -> float:
    top = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    return float(top)


def _same_weights(arm: Arm, stock: Arm, rows: StepRows) -> dict[str, float]:
    """Relative errors against stock, of all gradients and of the worst parameter's; the loss relative to the mean size
    of the advantages that it averages."""
    advantages = rows.jagged["advantages"][0].abs()
    scale = _max_over_ranks(float(advantages.mean()) if len(advantages) else 0.0)
    return {
        "log_probs": relative_error([(arm.log_probs, stock.log_probs)]),
        "infer_log_probs": relative_error([(arm.infer_log_probs, stock.infer_log_probs)]),
        "grads": relative_error(list(zip(arm.grads, stock.grads, strict=True))),
        "worst_grad": max(errors_by_parameter(arm, stock)),
        "loss": abs(arm.values["loss"] - stock.values["loss"]) / max(scale, abs(stock.values["loss"]), 1e-300),
    }


def _truth_errors(arm: Arm, truth: Arm) -> dict[str, float]:
    return {
        "log_probs": relative_error([(arm.log_probs, truth.log_probs)]),
        "grads": relative_error(list(zip(arm.grads, truth.grads, strict=True))),
        "worst_grad": max(errors_by_parameter(arm, truth)),
    }


def _worker(rank: int, ranks: int, rendezvous: str, source: Source, options: Options, steps: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    _run_rank(rank, ranks, f"file://{rendezvous}", source, options, steps)


def _run_rank(rank: int, ranks: int, init_method: str, source: Source, options: Options, steps: Path) -> None:
    """Replays on this rank; rank 0 appends every step to the file `steps` as soon as it is measured."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", init_method, rank=rank, world_size=ranks)
    try:
        with report.Display(source.num_steps, options.arms, shown=rank == 0) as display:

            def keep(record: dict[str, Any]) -> None:
                if rank == 0:
                    with steps.open("a") as out:
                        out.write(json.dumps(record) + "\n")
                display.step(record)

            replay(source, options, rank, keep)
    finally:
        dist.destroy_process_group()


def run(options: Options, output: Path, force: bool) -> int:
    """The command; returns its exit code: 0 only if every tolerance holds.

    Raises:
        TraceError: the trace, the model or an option is not usable, or `output` cannot hold the report.
        OSError: `output` cannot be written.
    """
    report.refuse_overwrite(output, force)
    source = Source(options)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    rank, ranks = (int(os.environ[name]) if under_torchrun else 0 for name in ("RANK", "WORLD_SIZE"))
    if under_torchrun and ranks != source.ranks:
        raise TraceError(f"torchrun started {ranks} ranks, the replay has {source.ranks}: add --ranks {ranks}")
    steps, failure = output / report.STEPS, None
    if rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        steps.write_text("")  # now, not after an hour: it shows that the folder can be written
    model = source.manifest["model"]
    described = {
        **report.provenance(),  # of the code that runs, before it can change
        # Names, not paths: a report is for others to read.
        "options": {k: Path(v).name if k in ("trace", "model") and v else v for k, v in vars(options).items()},
        "model": {"name": Path(model["path"]).name, **{k: model.get(k) for k in ("revision", "fingerprint")}},
        "recorded": {k: source.manifest[k] for k in ("optimizer", "loss")},
        "ranks": source.ranks,
        "dtype": precision(source.manifest),
    }
    try:
        if under_torchrun:
            _run_rank(rank, ranks, "env://", source, options, steps)
        else:
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # ranks that spin at barriers slow each other down
            with tempfile.TemporaryDirectory() as scratch:
                mp.spawn(_worker, (source.ranks, f"{scratch}/rendezvous", source, options, steps), nprocs=source.ranks)
    except KeyboardInterrupt:
        failure = "interrupted"
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        failure = f"the replay failed: {error}"
    except Exception:  # of this rank, under torchrun; mp.spawn catches as much of a rank, to report what was measured
        failure = f"the replay failed: {traceback.format_exc()}"
    if rank:
        if failure:
            print(f"rank {rank}: {failure}", file=sys.stderr)
        return 2 if failure else 0
    return report.finish(output, source.num_steps, options.judged, described, failure)
