"""Tests run tiny models: more threads than one only wait for each other, most of all beside other jobs."""

import gc
import importlib.util
import io
import os
import pickle
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; also of the processes that tests start

import pytest  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from warm_python import warm_python  # noqa: E402


def pytest_collection_finish() -> None:
    """Keeps what was imported until now out of garbage collections, which some tests ask for by the dozen."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What stays frozen at the end of the process triton reports as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def warm() -> Callable[..., AbstractContextManager]:
    """Within `with warm():` processes of the start method forkserver come from one that has imported verl, under
    VERL_PLATFORM=cpu.

    The import takes 12 CPU seconds, most ranks less. They have the environment and the modules of the session's first
    call: what a test sets or patches in its own process does not reach them.
    """
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["warm_ranks"])
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])

    @contextmanager
    def run() -> Iterator[None]:
        with (
            mock.patch.dict(os.environ, VERL_PLATFORM="cpu", PYTHONPATH=path),
            mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
        ):
            yield

    return run


@pytest.fixture(scope="session")
def spawn(warm: Callable[..., AbstractContextManager]) -> Callable[..., None]:
    """`torch.multiprocessing.spawn` of `warm` processes."""

    def run(fn: Callable[..., None], args: tuple = (), nprocs: int = 1) -> None:
        with warm():
            mp.start_processes(fn, args, nprocs, start_method="forkserver")

    return run


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A `python` that starts with what verl imports of others: 8 of the 11 CPU seconds of `import verl`."""
    with warm_python(tmp_path_factory.mktemp("python")) as executable:
        yield str(executable)


@pytest.fixture
def fresh(python: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python -c CODE` in a process that has yet to import verl and this package, with the environment given."""

    def run(code: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture(scope="session", autouse=True)
def yaml_read_once() -> Iterator[None]:
    """Hydra parses verl's 30 YAML files for every config that it composes: nearly half of its time."""
    if importlib.util.find_spec("omegaconf") is None:
        yield
        return
    from omegaconf import OmegaConf

    load, found = OmegaConf.load, {}

    def load_once(file):
        text = file.read() if hasattr(file, "read") else Path(file).read_text(encoding="utf-8")
        if text not in found:
            found[text] = pickle.dumps(load(io.StringIO(text)))
        return pickle.loads(found[text])  # a third of the time of a deep copy

    with mock.patch.object(OmegaConf, "load", load_once):
        yield
