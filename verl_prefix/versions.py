"""Refuses a verl or transformers that this package was not tested with; names code, packages and device for reports.

verl hides what a plugin raises while it is imported (the end of verl/__init__.py logs it at DEBUG). So versions are not
checked there, but where our configs, trainers and the API's batches are made: there the message reaches the user. This
module imports the standard library alone, since it must work where verl does not.
"""

import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import subprocess
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

TESTED_VERL = ("0.9.1",)
VERL_MAIN = "0.10.0.dev0"  # what verl's main branch calls itself, whichever commit it is
TESTED_MAIN = "1dda039b9 of 2026-08-22"
TESTED_VEOMNI = ("0.1.12",)
TESTED_MEGATRON = ("0.16.1",)  # of megatron-core
OVERRIDE = "VERL_PREFIX_ALLOW_UNTESTED_VERL"
TESTED_TRANSFORMERS = (5, 6), (5, 24)  # the first and the last release; all between them are let in
OVERRIDE_TRANSFORMERS = "VERL_PREFIX_ALLOW_UNTESTED_TRANSFORMERS"
# verl hands few environment variables on to workers; those of a Ray cluster that is up already have that cluster's.
IN_RAY = "(in a running Ray cluster also \"+ray_kwargs.ray_init.runtime_env.env_vars.{}='{}'\")"
INSTALL = "run pip install . in a clone of this package"
WARNED: set[Hashable] = set()  # what `warn_once` has logged
COMMIT = "VERL_PREFIX_COMMIT"  # the commit of a copy of this code that is neither installed nor a checkout


def installed_version(name: str) -> str | None:
    """The version of a package; None: it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_verl() -> str:
    """What to run where verl is missing. Of a wheel that was installed without what it needs there is no clone."""
    if installed_version("verl-prefix") is None:
        return INSTALL
    return f"run pip install verl=={TESTED_VERL[-1]}; verl-prefix doctor then names what else is missing"


def _verl_version() -> str:
    return installed_version("verl") or "unknown (no package metadata)"


def untested_verl() -> str | None:
    """Why the installed verl is refused; None: it was tested, is `VERL_MAIN`, or the variable `OVERRIDE` is 1."""
    version = _verl_version()
    told = (
        f"verl {version} is not one of those that verl_prefix was tested with ({', '.join(TESTED_VERL)}), and it "
        f"overrides methods of verl: pip install verl=={TESTED_VERL[-1]}, or set {OVERRIDE}=1 "
        f"{IN_RAY.format(OVERRIDE, 1)} to try this one (tests/package/test_contract.py names what changed)"
    )
    return _fault(OVERRIDE, told, known=version in (*TESTED_VERL, VERL_MAIN))


def untested_transformers() -> str | None:
    """Why the installed transformers is refused; None: it was tested, or the variable `OVERRIDE_TRANSFORMERS` is 1."""
    version = installed_version("transformers") or "unknown (no package metadata)"
    first, last = TESTED_TRANSFORMERS
    told = (
        f"transformers {version} is not one of those that verl_prefix was tested with ({first[0]}.{first[1]} to "
        f"{last[0]}.{last[1]}), and it replaces parts of transformers' models: pip install "
        f"'transformers>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}', or set {OVERRIDE_TRANSFORMERS}=1 "
        f"{IN_RAY.format(OVERRIDE_TRANSFORMERS, 1)} to try this one (tests/models compares every family "
        "with transformers' own forward)"
    )
    found = re.match(r"(\d+)\.(\d+)", version)
    known = found is not None and first <= (int(found[1]), int(found[2])) <= last
    return _fault(OVERRIDE_TRANSFORMERS, told, known)


def _fault(override: str, told: str, known: bool) -> str | None:
    """`told`; None: the version is `known`, or the environment variable `override` is 1, and lets any in."""
    allowed = os.environ.get(override, "0").strip()
    if allowed not in ("0", "1"):
        return f"{override}={allowed!r}: set it to 1, or unset it"
    return None if known or allowed == "1" else told


def moving_verl() -> str | None:
    """A warning for users of verl's main branch, whose version does not say which commit it is; None: it is another."""
    if _verl_version() != VERL_MAIN:
        return None
    return (
        f"verl {VERL_MAIN} is its main branch, of which commit {TESTED_MAIN} was tested; make test-verl-main tests "
        f"another, pip install verl=={TESTED_VERL[-1]} takes the release"
    )


def warn_once(log: logging.Logger, message: str, *values: object, key: object = None) -> None:
    """Logs a warning once in a process. The same message with other values is another warning; with a `key` it is one
    for each key, logged with its first values."""
    warning = log, message, values if key is None else key
    if warning not in WARNED:
        WARNED.add(warning)
        log.warning(message, *values)


def check_versions() -> None:
    """Refuses a verl or transformers that this package was not tested with; warns of verl's main branch, once.

    Raises:
        ImportError: verl's version is neither in `TESTED_VERL` nor `VERL_MAIN`, and the environment variable `OVERRIDE`
            is not 1; or as `check_transformers_version`.
    """
    if problem := untested_verl():
        raise ImportError(problem)
    check_transformers_version()
    if warning := moving_verl():
        warn_once(logger, warning)


def check_transformers_version() -> None:
    """Refuses a transformers that this package was not tested with.

    Raises:
        ImportError: its version is not within `TESTED_TRANSFORMERS`, and the environment variable
            `OVERRIDE_TRANSFORMERS` is not 1.
    """
    if problem := untested_transformers():
        raise ImportError(problem)


def warn_of_untested(package: str, tested: Sequence[str]) -> None:
    """Warns once of a version of an engine's package that this package was not tested with."""
    if (version := installed_version(package)) not in (None, *tested):
        warn_once(
            logger,
            "%s %s is not one of those that verl_prefix was tested with (%s): the self-check of the first update "
            "compares with its own path",
            package,
            version,
            ", ".join(tested),
        )


def git_state() -> dict[str, Any]:
    """The commit of this package's code, and whether its files differ from that commit, those of results apart.

    A checkout is asked by git. An installed package has its version instead, and so no commit: None, False, whatever
    repository it lies in. Any other copy has the commit that the variable `COMMIT` names; without it None, True.
    """
    root = Path(__file__).resolve().parents[1]
    if any(root.glob("verl_prefix-*.dist-info")):
        return {"commit": None, "dirty": False}
    setup, known = root / "setup.py", os.environ.get(COMMIT)
    if not ((root / ".git").exists() and setup.is_file() and 'name="verl-prefix"' in setup.read_text()):
        return {"commit": known, "dirty": not known}
    status = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch"]
    files = ["--", ":/", ":(exclude,top)examples/results"]
    try:
        lines = subprocess.run([*status, *files], capture_output=True, text=True, check=True).stdout.splitlines()
    except (subprocess.CalledProcessError, OSError):  # a broken checkout, or no git
        return {"commit": known, "dirty": not known}
    return {"commit": lines[0].split()[-1], "dirty": not all(line.startswith("# ") for line in lines)}


def package_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Versions of Python and of the packages; None for one that is not installed."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in packages}


def device_name(device: str | None = None) -> str:
    """The name of the GPU, or of the processor.

    Args:
        device: "cuda" or "cpu"; None: the GPU where there is one.
    """
    if device != "cpu" and importlib.util.find_spec("torch"):
        import torch

        if device == "cuda" or torch.cuda.is_available():
            return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return cpu[1] if cpu else platform.machine()
