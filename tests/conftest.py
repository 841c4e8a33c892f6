"""Tests run tiny models: more threads than one only wait for each other, most of all beside other jobs."""

import copy
import gc
import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, get_context
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Keeps what was imported until now out of garbage collections, which some tests ask for by the dozen."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def spawn() -> Callable[..., None]:
    """`torch.multiprocessing.spawn` whose processes come from one that has imported verl, under VERL_PLATFORM=cpu.

    The import takes 12 CPU seconds, most ranks less. They have the environment and the modules of the session's first
    call: what a test sets or patches in its own process does not reach them.
    """
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["verl.workers.engine_workers", "verl_prefix.tools.ab.replay"])

    def run(fn: Callable[..., None], args: tuple = (), nprocs: int = 1) -> None:
        with (
            mock.patch.dict(os.environ, VERL_PLATFORM="cpu"),
            mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
        ):
            mp.start_processes(fn, args, nprocs, start_method="forkserver")

    return run


@pytest.fixture
def fresh(fresh_server: forkserver.ForkServer, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python -c CODE` in a process that has yet to import verl and this package, with the environment given.

    What verl imports of others, 9 of its 11 CPU seconds, is there already.
    """

    def run(code: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        streams = [tmp_path / "stdout", tmp_path / "stderr"]
        begin = (
            "import os, sys\n"
            "assert not {'verl', 'verl_prefix'} & sys.modules.keys()\n"
            f"os.environ.clear(); os.environ.update({env!r})\n"
            f"os.chdir({str(cwd)!r}); sys.path.insert(0, {str(cwd)!r})\n"
            f"for fd, path in enumerate({[str(path) for path in streams]!r}, 1):\n"
            "    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)\n"
        )
        with mock.patch.object(forkserver, "connect_to_new_process", fresh_server.connect_to_new_process):
            process = get_context("forkserver").Process(target=exec, args=(begin + code, {"__name__": "__main__"}))
            process.start()
        process.join(timeout=300)
        process.kill()
        process.join()
        return subprocess.CompletedProcess(code, process.exitcode, *(path.read_text() for path in streams))

    return run


@pytest.fixture(scope="session")
def fresh_server() -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(
        ["torch._dynamo", "torchvision", "transformers", "tensordict", "ray", "peft", "datasets", "hydra", "fastapi"]
    )
    return server


@pytest.fixture(scope="session", autouse=True)
def yaml_read_once() -> Iterator[None]:
    """Hydra parses verl's 30 YAML files for every config that it composes: nearly half of its time."""
    if importlib.util.find_spec("hydra") is None:
        yield
        return
    from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource

    read, found = ImportlibResourcesConfigSource._read_config, {}

    def read_once(self, file):
        key = (self.provider, self.path, str(file))
        if key not in found:
            found[key] = read(self, file)
        return copy.deepcopy(found[key])

    with mock.patch.object(ImportlibResourcesConfigSource, "_read_config", read_once):
        yield
