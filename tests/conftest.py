"""Tests run tiny models: more threads than one only wait for each other, most of all beside other jobs."""

import dataclasses
import functools
import gc
import importlib.util
import io
import logging
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing import forkserver
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; also of the processes that tests start
os.environ.setdefault("VERL_PLATFORM", "cpu")  # before any test imports verl

import pytest  # noqa: E402
from fork_server import ForkServer  # noqa: E402
from ranks import Ranks  # noqa: E402
from warm_python import warm_python  # noqa: E402

pytest_plugins = ["processes"]


@pytest.fixture(autouse=True)
def nothing_warned_of() -> None:
    """What is warned of once is warned of anew, whatever other tests did."""
    if versions := sys.modules.get("verl_prefix.versions"):
        versions.WARNED.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Random tests draw the same every time, and no clock fails one; `--hypothesis-seed` draws others."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "tests", derandomize=config.getoption("--hypothesis-seed", None) is None, database=None, print_blob=False,
        deadline=None, suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # pytest then puts those together that share a parameter of a module's fixture
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Trainings, and what make test leaves out, may take an hour; the others what pyproject.toml says. Files with
    trainings come first, since what is left at the end runs beside nothing.

    ORDER_SEED in the environment shuffles files, and the tests of each.
    """
    if ids := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"an address is in the names of tests, which differ in every process: {ids}")
    train = {item.path for item in items if item.get_closest_marker("ray")}
    items.sort(key=lambda item: item.path not in train)
    for item in items:
        if any(item.get_closest_marker(name) for name in ("ray", "more", "full")):
            item.add_marker(pytest.mark.timeout(3600))  # behind one of its own
    if seed := os.environ.get("ORDER_SEED"):
        shuffle(items, seed)


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """The same order in every process, as xdist wants it, and each file in one piece."""

    def place(name: str) -> float:
        return random.Random(f"{seed} {name}").random()

    items.sort(key=lambda item: (place(item.nodeid.split("::")[0]), place(item.nodeid)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws does not depend on what was drawn before it, nor do its threads and what it logs on what was
    set before it, as by a command."""
    logging.getLogger("verl_prefix").setLevel(logging.NOTSET)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            attrgetter(seed)(sys.modules[name])(0)


def pytest_collection_finish() -> None:
    """Keeps what was imported until now out of garbage collections, which some tests ask for by the dozen."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # of what a test makes little is garbage


def pytest_unconfigure() -> None:
    for child in multiprocessing.active_children():  # ranks of a test at its limit: Python would wait for them
        child.kill()
    gc.unfreeze()  # what stays frozen at the end of the process triton reports as leaked


@pytest.fixture(scope="session")
def warm(python: str) -> Iterator[Callable[..., AbstractContextManager]]:
    """Within `with warm():` processes of the start method forkserver come from one that has imported verl, under
    VERL_PLATFORM=cpu.

    The import takes 8 CPU seconds, 1.4 behind what `python` has imported, most ranks less. They have the environment
    and the modules of the session: what a test sets or patches in its own process does not reach them.
    """
    path = os.pathsep.join([str(Path(__file__).parent / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = ForkServer(python, ["warm_ranks"], os.environ | {"VERL_PLATFORM": "cpu", "PYTHONPATH": path})

    @contextmanager
    def run() -> Iterator[None]:
        with (
            mock.patch.dict(os.environ, VERL_PLATFORM="cpu", PYTHONPATH=path),
            mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
        ):
            yield

    yield run
    server.close()


@pytest.fixture(scope="session")
def spawn(warm: Callable[..., AbstractContextManager]) -> Callable[..., None]:
    """`torch.multiprocessing.spawn` of `warm` processes."""

    def run(fn: Callable[..., None], args: tuple = (), nprocs: int = 1) -> None:
        import torch.multiprocessing as mp  # not by the process that deals files to others

        with warm():
            mp.start_processes(fn, args, nprocs, start_method="forkserver")

    return run


@pytest.fixture(scope="module")
def ranks(
    warm: Callable[..., AbstractContextManager], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Ranks]]:
    """`ranks(world, *first)`: see `Ranks`. Of a file's own, since its jobs patch what they like; a fork costs 0.1 s."""
    made: dict[int, Ranks] = {}

    def run(world: int, *first: Any) -> Ranks:
        if world not in made:
            made[world] = Ranks(world, first, lambda: tmp_path_factory.mktemp("ranks"), warm)
        return made[world]

    yield run
    for one in made.values():
        one.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """All processes of xdist have one `python`, which the process that deals files to them starts, and are its own."""
    stack = ExitStack()
    config.add_cleanup(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    config.warm_python = str(stack.enter_context(warm_python(folder)))
    for spec in specs:
        spec.python = config.warm_python


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["python"] = node.config.warm_python


@pytest.fixture(scope="session")
def python(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A `python` that starts with what verl imports of others: 8 of the 11 CPU seconds of `import verl`.

    test_doctor.py and test_cpu_platform.py take 25 CPU seconds by it, 70 without.
    """
    if hasattr(pytestconfig, "workerinput"):
        yield pytestconfig.workerinput["python"]
        return
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
    """Hydra parses verl's 30 YAML files for every config that it composes.

    tests/config takes 38 CPU seconds without this fixture and the next, 24 with this one, 15 with both.
    """
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


@pytest.fixture(scope="session", autouse=True)
def interpolations_parsed_once() -> Iterator[None]:
    """OmegaConf parses the text of an interpolation whenever it resolves it: a fifth of the time of tests/config."""
    if importlib.util.find_spec("omegaconf") is None:
        yield
        return
    from omegaconf import base

    with mock.patch.object(base, "parse", functools.cache(base.parse)):
        yield


@pytest.fixture(scope="session", autouse=True)
def configs_composed_once() -> Iterator[None]:
    """Hydra takes verl's 30 YAML files together anew for every config, whose keys are then set: most of its time.

    What they make together depends on the search path and on the groups that are chosen; a user's folder is read anew.
    """
    if importlib.util.find_spec("hydra") is None or importlib.util.find_spec("verl") is None:
        yield
        return
    from hydra import version
    from hydra._internal import config_loader_impl as loader
    from hydra._internal.defaults_list import Overrides

    list_files, compose = loader.create_defaults_list, loader.ConfigLoaderImpl._compose_config_from_defaults_list
    packages = [Path(importlib.util.find_spec(name).origin).resolve().parent for name in ("verl", "verl_prefix")]
    found: dict[str, bytes] = {}

    def once(make: Callable[[], Any], repo: Any, *key: Any) -> Any:
        sources = [(source.scheme(), source.path) for source in repo.get_sources()]
        folders = [Path(path).resolve() for scheme, path in sources if scheme == "file"]
        if not all(any(map(folder.is_relative_to, packages)) for folder in folders):
            return make()
        key = repr((key, sources, version.getbase()))
        if key not in found:
            found[key] = pickle.dumps(make())
        return pickle.loads(found[key])  # a third of the time of a deep copy

    def files(repo, config_name, overrides_list, **options):
        chosen = [each.input_line for each in overrides_list if repo.group_exists(each.key_or_group)]
        make = functools.partial(list_files, repo, config_name, overrides_list, **options)
        made = once(make, repo, config_name, chosen, options)
        return dataclasses.replace(made, config_overrides=Overrides(repo, overrides_list).config_overrides)

    def composed(self, defaults, repo):
        return once(functools.partial(compose, self, defaults, repo), repo, [vars(default) for default in defaults])

    with (
        mock.patch.object(loader, "create_defaults_list", files),
        mock.patch.object(loader.ConfigLoaderImpl, "_compose_config_from_defaults_list", composed),
    ):
        yield
