"""Real verl jobs of a tiny model that are killed or broken at one point, and what was lost.

Resume: a job is killed (SIGKILL, all of it) in step 3 during rollout, update or checkpoint save, then started again
with resume_mode=auto. Its step 3 must be that of a job that was never interrupted. Both engines, and each from the
other's checkpoint. Faults, also on stages of a Megatron pipeline: each must end the job within LIMIT seconds, behind
what a watchdog waits, with an error that says what to look for, leaving no process. Results: a JSON file, rewritten
after every case: what was tried, what was found, and whether that is as it should be; the exit status is 1 if something
is not.
"""

import argparse
import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from verl_prefix.files import write_whole
from verl_prefix.testing import write_tiny_model
from verl_prefix.tools.report import provenance

ROOT = Path(__file__).resolve().parents[2]
STEPS, BROKEN = 3, 3
LIMIT = 120  # seconds from a fault to the end of the job
RUN_LIMIT = 600
# Above all gradients: else Adam makes of their rounding, where they are near zero, a step of any size.
EPS = "actor_rollout_ref.actor.optim.override_optimizer_config={eps:0.1}"
ARMS = {
    "stock": ["model_engine=dp", "actor_rollout_ref.actor.strategy=fsdp2", EPS],
    "prefix": ["model_engine=prefix", "actor_rollout_ref.actor.prefix.schedule=phased", EPS],
}
HELPERS = ROOT / "tests" / "helpers"
# Broken alone, in .venv-megatron: two stages, with stand-ins of CUDA; no checkpoints.
STAGES = [
    "model_engine=prefix_megatron", "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "actor_rollout_ref.actor.prefix.schedule=phased", "actor_rollout_ref.actor.megatron.vanilla_mbridge=true",
    "actor_rollout_ref.model.external_lib=megatron_cpu", "trainer.save_freq=-1",
    "~actor_rollout_ref.actor.fsdp_config", "~actor_rollout_ref.ref.fsdp_config",
]  # fmt: skip
# What step 3 is compared by, beside weights and optimizer state.
METRICS = ("critic/rewards/mean", "response_length/mean", "actor/loss", "actor/grad_norm", "actor/ppo_kl")


class Fault(NamedTuple):
    """chaos: where, in which step, and how a job of so many ranks is broken, by `rank`, the last by default. said: what
    the log must say, as a pattern. sent: a signal to the driver. goes_on: the job ends as if nothing had been."""

    chaos: str
    said: str
    ranks: int = 2
    arm: str = "prefix"
    sent: int | None = None
    goes_on: bool = False
    rank: int | None = None


# The error of Ray, or of the other rank, which may come first.
KILLED = "ActorDiedError|Connection closed by peer"
# VERL_PREFIX_STALL_MINUTES: how long a phase may take where a worker hangs. The start is one, of Megatron's a long one.
STALL = {"prefix": 0.75, "stages": 3}
FAULTS = {
    "rollout server fails at start": Fault("server:start:raise", "injected: server", ranks=1),
    "OOM in a wave on one of two ranks": Fault("wave:2:oom", "actor.prefix.keep_attention=off"),
    "one of two workers killed in an update": Fault("update:1:die", KILLED),
    "one of two workers killed in an update, stock": Fault("update:1:die", KILLED, arm="stock"),
    "disk full while saving a checkpoint": Fault("save:3:full", "No space left on device", ranks=1),
    "disk full while a trace is written": Fault("trace:2:full", "No space left on device", goes_on=True),
    "SIGTERM to the driver during an update": Fault("update:3:block", "", ranks=1, sent=signal.SIGTERM),
    "one of two workers hangs in an update": Fault("update:3:hang", "takes longer than"),
    **{
        f"one of two ranks raises: {point}": Fault(f"{point}:3:raise", f"injected: {point}, rank 1")
        for point in ("describe", "exchange", "phase_a", "wave", "phase_c", "update", "checkpoint")
    },
    "the first of two stages raises in a wave": Fault("wave:2:raise", "injected: wave, rank 0", arm="stages", rank=0),
    "the last of two stages raises in phase C": Fault("phase_c:2:raise", "injected: phase_c, rank 1", arm="stages"),
    "OOM in a wave on the first of two stages": Fault("wave:2:oom", "actor.prefix.wave_tokens=", arm="stages", rank=0),
    "the last of two stages is killed in a wave": Fault("wave:2:die", KILLED, arm="stages"),
    "the first of two stages hangs in a wave": Fault("wave:2:hang", "takes longer than", arm="stages", rank=0),
    "the last of two stages hangs in phase C": Fault("phase_c:2:hang", "takes longer than", arm="stages"),
}


def prepare(folder: Path) -> None:
    plugin = folder / "plugin"
    info = plugin / "chaos-0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("chaos_plugin.py"), plugin)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chaos\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nchaos = chaos_plugin\n")
    write_tiny_model(folder / "model")
    prompts = [[{"role": "user", "content": f"Count the {i} rivers. " * 5}] for i in range(2 * STEPS)]
    table = {"data_source": "toy", "prompt": prompts, "reward_model": [{"style": "rule", "ground_truth": ""}]}
    table["reward_model"] *= len(prompts)
    table["data_source"] = ["toy"] * len(prompts)
    pq.write_table(pa.table(table), folder / "data.parquet")


def command(folder: Path, run: Path, arm: str, ranks: int) -> list[str]:
    python = ROOT / ".venv-megatron/bin/python" if arm == "stages" else sys.executable
    return [
        str(python), "-m", "verl.trainer.main_ppo", "+platform=cpu", *ARMS.get(arm, []),
        "+ray_kwargs.ray_init.address=local", f"trainer.n_gpus_per_node={ranks}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'data.parquet'}", f"data.val_files={folder / 'data.parquet'}",
        "data.train_batch_size=2", "data.max_prompt_length=256", "data.max_response_length=12", "data.seed=7",
        "data.dataloader_num_workers=0", "data.shuffle=false",
        "reward.custom_reward_function.path=pkg://verl_prefix.testing",
        "reward.custom_reward_function.name=letter_share",
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.seed=7",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.logger=[console,file]",
        f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false", "trainer.test_freq=-1",
        "trainer.save_freq=1", "trainer.resume_mode=auto", f"trainer.default_local_dir={run / 'checkpoints'}",
        f"hydra.run.dir={run / 'hydra'}", *(STAGES if arm == "stages" else []),
    ]  # fmt: skip


def in_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return found


def kill_all(session: int) -> None:
    left = in_session(session)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=20)


def job(
    folder: Path, run: Path, arm: str, ranks: int = 1, chaos: str | None = None, send: int | None = None,
    rank: int | None = None,
) -> dict:  # fmt: skip
    """Runs one job to its end or, where `chaos` blocks, until `send` (default: SIGKILL to all of it) has ended it."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "hit").unlink(missing_ok=True)
    stall = STALL[arm] if chaos and chaos.endswith(":hang") else 0
    env = os.environ | {
        "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive", "HYDRA_FULL_ERROR": "1",
        "VERL_PREFIX_STALL_MINUTES": str(stall),
        "VERL_FILE_LOGGER_PATH": str(run / "metrics.jsonl"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HELPERS), *([str(folder / "plugin")] if chaos else [])]),
        "MEGATRON_CPU_DTYPE": "float32", "CHAOS_RANK": str(ranks - 1 if rank is None else rank),
    }  # fmt: skip
    env.pop("RAY_ADDRESS", None)
    extra = []
    if chaos:
        env |= {"CHAOS": chaos, "CHAOS_DIR": str(run)}
        if chaos.startswith("trace"):
            extra = [f"actor_rollout_ref.actor.prefix.trace_dir={run / 'trace'}"]
        if chaos.endswith("hang"):  # verl's own trainers wait without a limit
            extra = ["trainer.v1.trainer_mode=prefix_sync"]
    kill = chaos is not None and chaos.endswith(":block") and send is None
    start, hit, ended = time.time(), None, None
    with (run / "log").open("ab") as log:
        process = subprocess.Popen(
            command(folder, run, arm, ranks) + extra, env=env, cwd=run, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and time.time() - start < RUN_LIMIT:
                if hit is None and (run / "hit").exists():
                    hit = time.time()
                    if kill:
                        break
                    if send is not None:
                        process.send_signal(send)
                if hit is not None and time.time() - hit > LIMIT + 60 * stall:
                    break
                time.sleep(0.2)
            if process.poll() is not None:
                ended = time.time()
                deadline = ended + 20  # Ray's daemons follow their driver
                while in_session(process.pid) and time.time() < deadline:
                    time.sleep(0.5)
            left = sorted(p.name() for p in in_session(process.pid))
        finally:
            kill_all(process.pid)
            process.wait()
    return {
        "seconds": round(time.time() - start),
        "exit": process.returncode if ended else "killed by the harness",
        "fault_reached": hit is not None if chaos else None,
        "seconds_from_fault_to_end": round(ended - hit, 1) if ended and hit else None,
        "processes_left": [] if kill else left,
    }


def step_metrics(run: Path, step: int) -> dict[str, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["data"] for line in lines if line["step"] == step and "actor/grad_norm" in line["data"]][-1]


def state(run: Path) -> list[torch.Tensor]:
    """Weights and optimizer moments of the last checkpoint (one rank). weights_only: they hold DTensors of one rank."""
    folder = run / "checkpoints" / f"global_step_{STEPS}" / "actor"
    model = torch.load(folder / "model_world_size_1_rank_0.pt", weights_only=False)
    optim = torch.load(folder / "optim_world_size_1_rank_0.pt", weights_only=False)["state"]
    moments = [optim[key][name] for key in sorted(optim) for name in ("exp_avg", "exp_avg_sq")]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in (*model.values(), *moments)]


def difference(run: Path, truth: Path) -> dict[str, float]:
    """Largest relative differences of step 3: metrics, weights with optimizer state. A loss and a KL are sums of terms
    of size one that cancel, and so metrics below one count as one."""
    ours, theirs = step_metrics(run, STEPS), step_metrics(truth, STEPS)
    metrics = {name: abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1.0) for name in METRICS if name in theirs}
    tensors = max(
        ((a - b).double().norm() / b.double().norm().clamp(min=1e-30)).item()
        for a, b in zip(state(run), state(truth), strict=True)
    )
    return {"metrics": max(metrics.values()), "weights_and_optimizer": tensors}


def resumed_from(run: Path) -> int | None:
    lines = [
        line for line in (run / "log").read_text(errors="replace").splitlines() if "setting global step to" in line
    ]
    return int(lines[-1].rsplit(" ", 1)[-1]) if lines else None


def start_from(source: Path, run: Path, step: int | None) -> None:
    """An empty run folder, with another run's checkpoint of a step as its latest."""
    shutil.rmtree(run, ignore_errors=True)
    if step is None:
        return
    name = f"global_step_{step}"
    shutil.copytree(source / "checkpoints" / name, run / "checkpoints" / name)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))


class Report:
    """The cases so far, in `path` too, from where earlier ones come."""

    def __init__(self, path: Path) -> None:
        self.path, self.provenance = path, provenance("verl_prefix.chaos/1")
        self.cases: list[dict] = json.loads(path.read_text())["cases"] if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, found: dict) -> None:
        """A case that is run again takes the place of its last result."""
        self.cases = [case for case in self.cases if (case["case"], case["arm"]) != (found["case"], found["arm"])]
        self.cases.append({"ok": False, "commit": self.provenance["git"]["commit"]} | found)
        print(json.dumps(self.cases[-1]), flush=True)
        summary = {"tried": len(self.cases), "failed": self.failed}
        write_whole(self.path, json.dumps(self.provenance | summary | {"cases": self.cases}, indent=1) + "\n")

    @property
    def failed(self) -> list[str]:
        return [f"{case['case']} ({case['arm']})" for case in self.cases if not case["ok"]]


def resume_case(folder: Path, arm: str, point: str, results: Report) -> None:
    run = folder / f"{arm}-{point}"
    start_from(folder / arm, run, BROKEN - 1)
    broken = job(folder, run, arm, chaos=f"{point}:{BROKEN}:block")
    again = job(folder, run, arm)
    found = {"case": f"kill -9 in step {BROKEN}: {point}", "arm": arm, "broken": broken, "again": again}
    if again["exit"] == 0:
        found |= {"resumed_from": resumed_from(run), "difference": difference(run, folder / arm)}
        found["steps_lost"] = BROKEN - 1 - found["resumed_from"]
        found["ok"] = broken["fault_reached"] and found["steps_lost"] == 0 and same(found["difference"])
    results.add(found)


def crossed_case(folder: Path, source: str, arm: str, results: Report) -> None:
    run = folder / f"{source}-to-{arm}"
    start_from(folder / source, run, BROKEN - 1)
    again = job(folder, run, arm)
    found = {"case": f"checkpoint of {source}, resumed by {arm}", "arm": arm, "again": again}
    if again["exit"] == 0:
        found |= {"resumed_from": resumed_from(run), "difference": difference(run, folder / arm)}
        found["across_uninterrupted_arms"] = difference(folder / source, folder / arm)
        found["ok"] = found["resumed_from"] == BROKEN - 1
    results.add(found)


def fault_case(folder: Path, name: str, results: Report) -> None:
    fault = FAULTS[name]
    run = folder / re.sub("[^a-z_0-9]+", "-", name.lower())
    start_from(folder / fault.arm, run, BROKEN - 1 if fault.ranks == 1 and f":{BROKEN}:" in fault.chaos else None)
    ended = job(folder, run, fault.arm, fault.ranks, fault.chaos, fault.sent, fault.rank)
    log = (run / "log").read_text(errors="replace").replace(f"{folder}/", "")
    said = [line.strip()[-300:] for line in log.splitlines() if fault.said and re.search(fault.said, line)]
    found = {"case": name, "arm": fault.arm, "ranks": fault.ranks, **ended, "said": said[-1] if said else None}
    in_time = fault.goes_on or ended["seconds_from_fault_to_end"] is not None
    found["ok"] = (ended["exit"] == 0) == fault.goes_on and in_time and bool(said or not fault.said)
    found["ok"] = found["ok"] and not ended["processes_left"]
    if f":{BROKEN}:" in fault.chaos and fault.sent is None:
        again = job(folder, run, fault.arm, fault.ranks)
        found["again"] = again
        found["resumed_from"] = resumed_from(run)
        found["ok"] = found["ok"] and again["exit"] == 0 and found["resumed_from"] == BROKEN - 1
    results.add(found)


def same(difference: dict[str, float]) -> bool:
    """fp32 on one machine: the tolerance of the equivalence tests."""
    return all(value <= 5e-6 and not math.isnan(value) for value in difference.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="work folder; finished uninterrupted runs are kept")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results; cases that are there stay")
    parser.add_argument("--only", default="", help="run the cases whose name has this in it")
    args = parser.parse_args()
    folder, results = args.folder.resolve(), Report(args.out.resolve())
    prepare(folder)
    cases = {name: functools.partial(fault_case, folder, name) for name in FAULTS}
    for point in ("save", "update", "rollout"):
        for arm in ARMS:
            cases[f"kill -9 in step {BROKEN}: {point} {arm}"] = functools.partial(resume_case, folder, arm, point)
    for source, arm in (tuple(ARMS), tuple(reversed(ARMS))):
        cases[f"checkpoint of {source}, resumed by {arm}"] = functools.partial(crossed_case, folder, source, arm)
    chosen = [name for name in cases if args.only in name]
    for arm in ARMS if any(name not in FAULTS or FAULTS[name].arm in ARMS for name in chosen) else ():
        if not (folder / arm / "finished").exists():
            shutil.rmtree(folder / arm, ignore_errors=True)
            found = {"case": "uninterrupted", "arm": arm, "again": job(folder, folder / arm, arm)}
            results.add(found | {"ok": found["again"]["exit"] == 0})
            if found["again"]["exit"] != 0:
                print((folder / arm / "log").read_text(errors="replace")[-4000:])
                return 1
            (folder / arm / "finished").touch()
    for name in chosen:
        cases[name](results)
    print(f"{len(results.cases)} tried, {len(results.failed)} not as expected: {results.failed}")
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
