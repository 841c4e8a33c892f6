"""`verl-prefix ab`: replays a trace, or made-up rows, in one process per rank, and writes the report."""

import dataclasses
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

import verl_prefix.plugin  # noqa: F401  first: whatever imports verl imports it, and must not find us half imported
from verl_prefix.tools.ab import verdict
from verl_prefix.tools.ab.arm import precision
from verl_prefix.tools.ab.options import Options
from verl_prefix.tools.ab.render import STEPS, blocks, draw, print_step, write, write_json
from verl_prefix.tools.ab.replay import replay
from verl_prefix.tools.ab.source import Source
from verl_prefix.tools.report import provenance


@dataclasses.dataclass(frozen=True)
class Record:
    """Steps as they are measured: one line each in steps.jsonl, and report.json is that of the steps so far.

    Attributes:
        described: see `verdict.build`.
    """

    output: Path
    described: dict[str, Any]

    def start(self) -> None:
        """Empties the file now, not after an hour: it shows that the folder can be written."""
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / STEPS).write_text("")

    def add(self, step: dict[str, Any]) -> None:
        with (self.output / STEPS).open("a") as out:
            out.write(json.dumps(step) + "\n")
        write_json(verdict.build(self.described, self.steps()), self.output)

    def steps(self) -> list[dict[str, Any]]:
        """Those that are there."""
        lines = (self.output / STEPS).read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # a full disk cuts the last one


def join_ranks(rank: int, ranks: int, init_method: str) -> None:
    """Starts this rank's process group, on its GPU where there are GPUs. All ranks are of one machine: gloo listens on
    its loopback alone.

    Args:
        init_method: file:// and a path where ranks meet.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))  # as torchrun tells verl
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # of torch's own renaming
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", init_method, rank=rank, world_size=ranks)


def _run_rank(rank: int, ranks: int, init_method: str, source: Source, options: Options, record: Record) -> None:
    """Replays on this rank; rank 0 records every step as soon as it is measured."""
    join_ranks(rank, ranks, init_method)
    try:
        steps = replay(source, options, rank)
        for step in tqdm(steps, total=source.num_steps, unit="step", disable=None if rank == 0 else True):
            if rank == 0:
                record.add(step)
                print_step(step, options.arms)
    finally:
        dist.destroy_process_group()


def _described(source: Source, options: Options) -> dict[str, Any]:
    """What a report says before any step is measured."""
    model = source.manifest["model"]
    return {
        **provenance(verdict.SCHEMA),  # of the code that runs, before it can change
        # Names, not paths: a report is for others to read.
        "options": {k: Path(v).name if k in ("trace", "model") and v else v for k, v in vars(options).items()},
        "model": {"name": Path(model["path"]).name, **{k: model.get(k) for k in ("revision", "fingerprint")}},
        "recorded": {k: source.manifest[k] for k in ("optimizer", "loss")},
        "ranks": source.ranks,
        "dtype": precision(source.manifest),
        "judged": options.judged,
        "num_steps": source.num_steps,
    }


def run(options: Options, output: Path) -> int:
    """The command; returns its exit code: 0 only if every tolerance holds, 2 if not all steps were replayed.

    Raises:
        ValueError: the trace, the model or an option is not usable.
        OSError: `output` cannot be written.
    """
    source, failure, code = Source(options), None, 0
    record = Record(output, _described(source, options))
    record.start()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # ranks that spin at barriers slow each other down
    try:
        with tempfile.TemporaryDirectory() as scratch:
            arguments = source.ranks, f"file://{scratch}/rendezvous", source, options, record
            mp.spawn(_run_rank, arguments, nprocs=source.ranks)
    except KeyboardInterrupt:
        failure = "interrupted"
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        failure = f"the replay failed: {error}"
    if steps := record.steps():
        code = write(verdict.build(record.described, steps), blocks, draw, output)
    (output / STEPS).unlink()
    if failure and steps:
        print(f"the report is of the first {len(steps)} of {source.num_steps} steps: {failure}")
    elif failure:
        print(f"verl-prefix ab: {failure}", file=sys.stderr)
    return 2 if failure else code
