"""A verl plugin that breaks a run at one point: CHAOS=point:step:action, on rank CHAOS_RANK; CHAOS_DIR
for what processes tell each other.

chaos.py puts it on a run's path next to an entry point of its own, so neither verl nor verl_prefix knows about it.
"""

import errno
import os
import signal
import time
from pathlib import Path
from types import ModuleType

import torch

POINT, STEP, ACTION = os.environ["CHAOS"].split(":")
FOLDER = Path(os.environ["CHAOS_DIR"])


def at(point: str) -> bool:
    step = FOLDER / "step"
    return point == POINT and (STEP == "start" or (step.exists() and step.read_text() == STEP))


def act(half_written: str | None = None) -> None:
    (FOLDER / "hit").write_text(str(time.time()))
    if ACTION in ("block", "hang"):  # chaos.py kills a job that blocks
        time.sleep(3600)
    if ACTION == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if ACTION == "oom":
        raise torch.OutOfMemoryError("injected: out of memory")
    if ACTION == "full":
        raise OSError(errno.ENOSPC, "No space left on device", half_written)
    raise RuntimeError(f"injected: {POINT}, rank {os.environ.get('RANK', '-')}")


def broken_rank() -> bool:
    return torch.distributed.get_rank() == int(os.environ["CHAOS_RANK"])


def before(owner: type | ModuleType, name: str, breaks) -> None:
    """Runs `breaks` before the method or function."""
    method = getattr(owner, name)

    def patched(self, *args, **kwargs):  # Ray reads the names
        breaks(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    setattr(owner, name, patched)


def write_step(trainer, *_, **__) -> None:
    (FOLDER / "step").write_text(str(trainer.global_steps))


def break_save(save):
    def patched(obj, path, *args, **kwargs):
        if at("save") and "optim_world_size" in str(path):
            save(obj, path)
            with open(path, "r+b") as file:
                file.truncate(os.path.getsize(path) // 2)
            act(str(path))
        save(obj, path, *args, **kwargs)

    return patched


def break_wave(self, tokens, layout, caches=()) -> None:
    if caches and torch.is_grad_enabled() and at("wave") and broken_rank():
        act()


def break_phase_a(self, *_, **__) -> None:
    if torch.is_grad_enabled() and at("phase_a") and broken_rank():
        act()


def on_rank(point: str):
    return lambda *_, **__: at(point) and broken_rank() and act()


def install() -> None:
    import verl_prefix.plugin  # noqa: F401, I001  registers the platform, and comes after us otherwise

    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from verl_prefix.core.prefix_cache import PrefixCache
    from verl_prefix.core.forward import PackedForward
    from verl_prefix.cpu.server import HFServer
    from verl_prefix.engine.travel import moves
    from verl_prefix.engine.travel.row_bytes import RowCodec
    from verl_prefix.trace.writer import TraceWriter

    before(PPOTrainer, "step", write_step)
    before(FSDPEngine, "optimizer_step", on_rank("update"))
    before(FSDPEngine, "save_checkpoint", on_rank("checkpoint"))
    before(moves, "describe", on_rank("describe"))
    before(RowCodec, "pack", on_rank("exchange"))
    before(PrefixCache, "backward", on_rank("phase_c"))
    before(PackedForward, "phase_a", break_phase_a)
    before(TraceWriter, "_write_step", on_rank("trace"))
    before(HFServer, "__init__", lambda *_, **__: at("server") and act())
    before(HFServer, "_generate", lambda *_, **__: at("rollout") and act())
    before(PackedForward, "packed", break_wave)
    torch.save = break_save(torch.save)


install()
