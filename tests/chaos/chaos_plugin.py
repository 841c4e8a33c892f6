"""A verl plugin that breaks a run at one point: CHAOS=point:step:action, CHAOS_DIR for what processes tell each other.

run.py puts it on a run's path next to an entry point of its own, so neither verl nor verl_prefix knows about it.
"""

import errno
import os
import signal
import time
from pathlib import Path

import torch

POINT, STEP, ACTION = os.environ["CHAOS"].split(":")
FOLDER = Path(os.environ["CHAOS_DIR"])


def at(point: str) -> bool:
    step = FOLDER / "step"
    return point == POINT and (STEP == "start" or (step.exists() and step.read_text() == STEP))


def act(half_written: str | None = None) -> None:
    (FOLDER / "hit").write_text(str(time.time()))
    if ACTION == "block":  # run.py kills the job now
        time.sleep(3600)
    if ACTION == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if ACTION == "oom":
        raise torch.OutOfMemoryError("injected: out of memory")
    if ACTION == "full":
        raise OSError(errno.ENOSPC, "No space left on device", half_written)
    raise RuntimeError(f"injected: {POINT}")


def last_rank() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def before(owner: type, name: str, breaks) -> None:
    """Runs `breaks` before the method."""
    method = getattr(owner, name)

    def patched(self, *args, **kwargs):
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


def break_wave(self, tokens, groups, layout, cache=None) -> None:
    if cache is not None and self.backward is not None and at("wave") and last_rank():
        act()


def install() -> None:
    import verl_prefix.plugin  # noqa: F401, I001  registers the platform, and comes after us otherwise

    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from verl_prefix.cpu.server import HFServer
    from verl_prefix.core.schedule import Schedule

    before(PPOTrainer, "step", write_step)
    before(FSDPEngine, "optimizer_step", lambda *_, **__: at("update") and last_rank() and act())
    before(HFServer, "__init__", lambda *_, **__: at("server") and act())
    before(HFServer, "_generate", lambda *_, **__: at("rollout") and act())
    before(Schedule, "_suffixes", break_wave)
    torch.save = break_save(torch.save)


install()
