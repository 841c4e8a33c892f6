"""`verl-prefix doctor` says whether verl will use this package, what would run on this machine, and if not, why.

verl logs a plugin that fails to load at DEBUG and goes on without it (the end of verl/__init__.py). A failure here is
an exit code: 0 only when everything that a run needs is registered and composes.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

from verl_prefix.config.engines import ENGINES, Engine
from verl_prefix.tools.report import provenance, warnings_last
from verl_prefix.versions import (
    INSTALL,
    install_verl,
    installed_version,
    moving_verl,
    untested_transformers,
    untested_verl,
)

PACKAGE = "verl-prefix"
PLUGIN = "prefix"
VERSIONS = (
    "verl-prefix", "verl", "torch", "transformers", "ray", "TransferQueue", "vllm", "flash-attn",
    *(engine.package for engine in ENGINES if engine.package), "mbridge",
)  # fmt: skip
HEAD_DIM = 128  # of nearly every model; only for what kernel would be chosen
# Recurrent layers, the package whose kernels they run, and transformers' test for it.
RECURRENT = (
    ("gated delta rule (Qwen3.5, Qwen3-Next, OLMo-Hybrid)", "flash-linear-attention", "flash_linear_attention"),
    ("state spaces (Granite 4 H, Bamba)", "mamba-ssm", "mamba_2_ssm"),
    ("convolutions of both", "causal-conv1d", "causal_conv1d"),
)
COLOURS = {"ok": 32, "info": 36, "FAIL": 31}  # of a terminal


class Finding(NamedTuple):
    """The result of a check: ok, info (a run does without) or FAIL, a line, and what to do about it."""

    state: str
    line: str
    advice: str | None = None


class _Broken(Exception):
    """A module does not load; `__cause__` is its own error, None where the module is not there."""


def _required(problem: str | None, line: str) -> Finding:
    """The finding of what every run needs: FAIL where there is a problem."""
    return Finding("FAIL" if problem else "ok", line, problem)


def _load(module: str, headline: str) -> Any:
    """Imports a module; raises _Broken where that fails."""
    try:
        return importlib.import_module(module)
    except BaseException as error:
        raise _Broken(f"{headline}: {type(error).__name__}: {error}") from error


def _check_versions() -> Iterator[Finding]:
    if importlib.util.find_spec("verl") is None:
        raise _Broken(f"verl is not installed here: {install_verl()}")
    from packaging.requirements import Requirement

    lines = importlib.metadata.requires(PACKAGE) or [] if installed_version(PACKAGE) else []
    wanted = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": ""})]
    ranges = {requirement.name.lower(): requirement for requirement in wanted}
    known = {name.lower() for name in VERSIONS}
    for name in (*VERSIONS, *(requirement.name for key, requirement in ranges.items() if key not in known)):
        version, requirement = installed_version(name), ranges.get(name.lower())
        supported = f" (supported: {requirement.specifier})" if requirement and requirement.specifier else ""
        problem = INSTALL if version is None and name == PACKAGE else None
        if requirement and not (version and requirement.specifier.contains(version, prereleases=True)):
            problem = f"install {requirement}"
        state = "FAIL" if problem else "ok" if version else "info"
        yield Finding(state, f"{name} {version or 'not installed'}{supported}", problem)
    if problem := untested_verl():
        yield Finding("FAIL", "verl is a version that this package was run with", problem)
    if problem := untested_transformers():
        yield Finding("FAIL", "transformers is a version that this package was run with", problem)
    if warning := moving_verl():
        yield Finding("info", warning)


def _check_trl() -> Iterator[Finding]:
    """verl's workers patch a class of trl's wherever trl is installed (verl/models/transformers/monkey_patch.py)."""
    if not importlib.util.find_spec("trl"):
        return
    problem, line = None, f"trl {installed_version('trl') or 'without metadata'}"
    try:
        try:
            from trl.experimental.ppo import AutoModelForCausalLMWithValueHead  # noqa: F401
        except ImportError:
            from trl import AutoModelForCausalLMWithValueHead  # noqa: F401
    except Exception as error:  # as in the worker, which would end with it
        problem = "verl's workers import it: pip install 'trl<1.13', or pip uninstall trl"
        line += f": {type(error).__name__}: {error}"
    yield _required(problem, line)


def _policy(plugin: str = PLUGIN) -> tuple[str, bool]:
    """VERL_USE_EXTERNAL_PLUGINS as verl/__init__.py reads it, and whether it lets a plugin in."""
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    return policy, policy == "auto" or plugin in {name.strip() for name in policy.split(",")}


def _check_policy() -> Iterator[Finding]:
    entries = importlib.metadata.entry_points(group="verl.plugins", name=PLUGIN)
    targets = [entry.value for entry in entries] or f"none named {PLUGIN}"
    yield _required(None if entries else INSTALL, f"entry point verl.plugins: {targets}")
    policy, allowed = _policy()
    advice = f"verl does not load this plugin: unset VERL_USE_EXTERNAL_PLUGINS, or add {PLUGIN} to its names"
    yield _required(None if allowed else advice, f"VERL_USE_EXTERNAL_PLUGINS={policy}")


def _check_plugin() -> Iterator[Finding]:
    verl = _load("verl", "import verl")
    loaded_by_verl = "verl_prefix.plugin" in sys.modules
    _load("verl_prefix.plugin", "the plugin does not load and verl goes on without it")
    hidden = "its error: python -c 'import logging; logging.basicConfig(level=10); import verl'"
    if _policy()[1]:
        problem = None if loaded_by_verl else f"verl could not load it; {hidden}"
        yield _required(problem, f"plugin loaded by {verl.__file__}: {loaded_by_verl}")
    for other in importlib.metadata.entry_points(group="verl.plugins"):
        if _policy(other.name)[1] and other.module not in sys.modules:
            first = "; if that is Unknown platform 'cpu', load ours first: VERL_USE_EXTERNAL_MODULES=verl_prefix.plugin"
            yield Finding("info", f"plugin {other.name!r} of verl did not load: {other.value}", hidden + first)


def _platform() -> Any:
    """verl's platform of this machine."""
    from verl.plugin.platform import get_platform

    return get_platform()


def _check_registered() -> Iterator[Finding]:
    _load("verl_prefix.backends.fsdp", f"the engine of model_engine={PLUGIN} does not load")
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    platform = _platform()
    device, asked = platform.device_name, os.environ.get("VERL_PLATFORM") or "unset"
    state, usable = ("ok", "available") if platform.is_available() else ("info", "not available here")
    yield Finding(state, f"platform {type(platform).__name__} device={device} VERL_PLATFORM={asked}, {usable}")

    engines = EngineRegistry._engines.get("language_model", {}).get(PLUGIN, {})
    listed = ", ".join(f"{key}: {engine.__name__}" for key, engine in engines.items())
    missing = None if device in engines else f"verl_prefix.backends.fsdp registers no engine for device {device}"
    yield _required(missing, f"engine {PLUGIN!r} {{{listed}}}")

    yield from (_optional(engine) for engine in ENGINES if engine.package)

    trainer = TRAINER_REGISTRY.get("prefix_sync")
    if not trainer:
        _load("verl_prefix.trainer.prefix_sync", "the trainers of trainer.v1.trainer_mode=prefix_* do not load")
    missing = None if trainer else "verl_prefix.plugin adds no trainer to verl's"
    yield _required(missing, f"trainer 'prefix_sync' {trainer.__name__ if trainer else 'missing'}")

    loaders = RolloutReplicaRegistry._registry.items()
    ours = [name for name, load in loaders if load.__module__.startswith("verl_prefix")]
    missing = "verl_prefix.cpu registers no rollout" if device == "cpu" and not ours else None
    yield _required(
        missing, f"rollouts of this package: {', '.join(ours) or 'none (they belong to VERL_PLATFORM=cpu)'}"
    )


def _optional(engine: Engine) -> Finding:
    """An engine that a run does without where its package is not installed."""
    from verl.workers.engine.base import EngineRegistry

    if engine.missing:
        return Finding("info", f"engine {engine.name!r} needs {engine.package}: {engine.missing}")
    headline = f"the engine of model_engine={engine.name} does not load"
    _load("verl_prefix.backends", headline)
    found = EngineRegistry._engines.get("language_model", {}).get(engine.name, {})
    if not found:  # `backends` made a warning of its error
        try:
            _load(f"verl_prefix.backends.{engine.verls}", headline)
        except _Broken as error:
            return Finding("FAIL", str(error), "".join(traceback.format_exception(error.__cause__)).rstrip())
    listed = ", ".join(f"{key}: {kind.__name__}" for key, kind in found.items())
    problem = f"verl's own {engine.title} engine does not load: python -c 'import verl.workers.engine'"
    return _required(None if found else problem, f"engine {engine.name!r} {{{listed}}}")


def _check_kernels() -> Iterator[Finding]:
    import torch

    from verl_prefix.core.kernels import available_kernels, choose_kernel
    from verl_prefix.core.kernels.package_advice import missing_package
    from verl_prefix.models.advice import advising

    for name, state in available_kernels().items():
        yield Finding("ok" if state == "ok" else "info", f"attention kernel {name}: {state}")
    platform = _platform()
    device, dtype = platform.device_name, torch.bfloat16
    if device == "cpu" or not platform.is_available():
        device, dtype = "cpu", torch.float32  # of +platform=cpu
    line = f"prefix.attention=auto on {device} in {dtype}, head dim {HEAD_DIM}"
    try:
        with advising():
            chosen = choose_kernel("auto", device, dtype, HEAD_DIM).__name__
    except ValueError as error:
        yield Finding("FAIL", line, str(error))
    else:
        yield Finding("ok", f"{line}: {chosen.rpartition('.')[2]}")
    if device == "cuda" and (missing := missing_package(HEAD_DIM, softcap=False)):
        yield Finding("info", *missing)


def _check_recurrent() -> Iterator[Finding]:
    """Names what recurrent layers run; transformers takes the packages on a machine with a GPU alone."""
    from transformers.utils import import_utils

    for layers, package, name in RECURRENT:
        version, line = installed_version(package), f"recurrent layers, {layers}: "
        if getattr(import_utils, f"is_{name}_available")():
            yield Finding("ok", f"{line}{package} {version}")
        elif version:
            yield Finding("info", f"{line}torch; {package} {version} is for a newer version of it, or for a GPU")
        else:
            yield Finding("info", f"{line}torch, slow on a GPU: pip install {package}")


def _check_config() -> Iterator[Finding]:
    from verl_prefix.tools.plan.compose import PlanError, prefix_engine_sources

    for engine in (engine.name for engine in ENGINES):
        try:
            sources, targets = prefix_engine_sources(engine)
        except PlanError as error:
            yield Finding("FAIL", f"model_engine={engine} does not compose", str(error))
            return
        problem = None if sources else "verl_prefix.plugin adds no entry"
        if engine == PLUGIN:
            yield _required(problem, f"Hydra search path: {', '.join(sources) or 'missing'}")
        for role, target in targets.items():
            problem = None if target.startswith("verl_prefix.") else f"another package provides model_engine={engine}"
            yield _required(problem, f"model_engine={engine} composes {role}: {target}")


CHECKS = (
    _check_versions, _check_policy, _check_plugin, _check_registered, _check_trl, _check_kernels, _check_recurrent,
    _check_config,
)  # fmt: skip


def doctor(as_json: bool = False) -> int:
    """Prints a line per check, or all as JSON, and returns the exit code: 0, or 1 with what to do for each problem."""
    findings: list[Finding] = []
    try:
        with warnings_last(), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            for finding in itertools.chain.from_iterable(check() for check in CHECKS):
                findings.append(finding)
                if not as_json:
                    print(_shown(finding), flush=True)
            verdict = _verdict(sum(finding.state == "FAIL" for finding in findings))
    except Exception as error:  # a report of what is broken must say so, whatever it is
        verdict = str(error) if isinstance(error, _Broken) else f"{type(error).__name__}: {error}"
        cause = error.__cause__ if isinstance(error, _Broken) else error
        findings.append(Finding("FAIL", verdict, traceback.format_exc() if cause else None))
        if not as_json:
            print(_shown(findings[-1]._replace(advice=None)), flush=True)
            if cause is None:
                return 1
            raise cause from None
    if as_json:
        report = {"verdict": verdict, "findings": [finding._asdict() for finding in findings]}
        print(json.dumps(provenance("verl_prefix.doctor/1") | report, indent=1))
    else:
        print(verdict)
    return int(any(finding.state == "FAIL" for finding in findings))


def _shown(finding: Finding) -> str:
    """A finding in words; its state in colour on a terminal, unless NO_COLOR is set. Without rich, which may be what is
    broken."""
    state, line, advice = finding
    word = f"{state:4}"
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        word = f"\033[{COLOURS[state]}m{word}\033[0m"
    return f"{word} {line}" + (f"\n     -> {advice}" if advice else "")


def _verdict(problems: int) -> str:
    platform = _platform()
    if problems:
        return f"{problems} problem(s)"
    if platform.is_available():
        return f"all fine: model_engine={PLUGIN} will be used, on {platform.device_name}"
    return f"registered; not runnable here: no {platform.device_name.upper()} device, set VERL_PLATFORM=cpu"
