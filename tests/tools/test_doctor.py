"""`verl-prefix doctor` in fresh processes: verl loads plugins once, at the end of its import."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import verl_prefix
from verl_prefix.config.engines import MEGATRON, Engine
from verl_prefix.tools import doctor
from verl_prefix.versions import installed_version


@pytest.fixture
def run_doctor(fresh) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(cwd: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
        code = f"import runpy, sys; sys.argv[1:] = {['doctor', *words]}; "
        code += "runpy.run_module('verl_prefix.cli', None, '__main__')"
        return fresh(code, cwd, inherited | {"VERL_PLATFORM": "cpu"} | env)

    return run


def test_version_is_said_without_importing_verl_or_torch(tmp_path):
    code = (
        "import sys; sys.modules |= dict(verl=None, torch=None); from verl_prefix import cli; cli.main(['--version'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    ours, verl, torch_version = map(importlib.metadata.version, ("verl-prefix", "verl", "torch"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"verl-prefix {ours} (verl {verl}, torch {torch_version})\n"


def test_doctor_names_everything_that_is_registered(run_doctor, tmp_path):
    result = run_doctor(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in (
        f"verl {importlib.metadata.version('verl')} (supported: ",
        "platform CPUPlatform device=cpu VERL_PLATFORM=cpu",
        "engine 'prefix' {cuda: PrefixFSDPEngine, cpu: PrefixFSDPEngine",
        "trainer 'prefix_sync' PrefixPPOTrainerSync",
        "rollouts of this package: hf",
        "attention kernel cpu: ok",
        "prefix.attention=auto on cpu in torch.float32, head dim 128: cpu",
        f"Hydra search path: {Path(verl_prefix.__file__).parent / 'config'}",
        "model_engine=prefix composes actor: verl_prefix.config.",
        "model_engine=prefix composes ref: verl_prefix.config.",
        "model_engine=prefix_veomni composes actor: verl_prefix.config.veomni.",
        "model_engine=prefix_veomni composes ref: verl_prefix.config.veomni.",
        "model_engine=prefix_megatron composes actor: verl_prefix.config.megatron.",
        "model_engine=prefix_megatron composes ref: verl_prefix.config.megatron.",
    ):
        assert f"ok   {name}" in result.stdout, result.stdout
    version = installed_version("veomni")
    engine = "ok   engine 'prefix_veomni' {cuda: PrefixVeOmniEngine" if version else (
        "info engine 'prefix_veomni' needs veomni: pip install veomni=="
    )  # fmt: skip
    assert engine in result.stdout and f"veomni {version or 'not installed'}\n" in result.stdout
    assert "FAIL" not in result.stdout
    assert result.stdout.endswith("all fine: model_engine=prefix will be used, on cpu\n")
    json_says_what_lines_say(run_doctor(tmp_path, "--json"), result.stdout.splitlines())


def json_says_what_lines_say(result: subprocess.CompletedProcess[str], lines: list[str]) -> None:
    told = json.loads(result.stdout)
    assert result.returncode == 0 and told["versions"]["verl"] and told["device"] and "commit" in told["git"]
    found = told["findings"]
    assert [f"{one['state']:4} {one['line']}" for one in found] == [line for line in lines[:-1] if line[:5] != "     "]
    assert told["verdict"] == lines[-1] and {one["state"] for one in found} == {"ok", "info"}


NOISE = """
import logging, warnings
warnings.warn("of python")
logging.warning("of logging")
"""


@pytest.mark.more
def test_warnings_of_others_come_behind_the_findings(run_doctor, fresh, tmp_path):
    """Of a package that a check in the middle imports; stdout and stderr are one file, as on a terminal."""
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl/__init__.py").write_text(NOISE)
    code = "import os; os.dup2(1, 2); from verl_prefix import cli; raise SystemExit(cli.main(['doctor']))"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "PYTHONWARNINGS"))}
    lines = fresh(code, tmp_path, env).stdout.splitlines()
    noise = next(i for i, line in enumerate(lines) if line[:5] not in ("ok   ", "info ", "FAIL ", "     "))
    said = "\n".join(lines[noise:-1])
    assert all(f"of {name}" in said for name in ("python", "logging")) and "accelerator" not in said
    assert not any(line[:5] in ("ok   ", "info ", "FAIL ") for line in lines[noise:])
    told = run_doctor(tmp_path, "--json")
    assert json.loads(told.stdout)["findings"] and "of logging" in told.stderr


@pytest.mark.parametrize(("terminal", "no_colour"), [(True, ""), (True, "1"), (False, "")])
def test_states_have_colours_on_a_terminal_alone(monkeypatch, terminal, no_colour):
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(isatty=lambda: terminal))
    monkeypatch.setenv("NO_COLOR", no_colour)
    shown = [doctor._shown(doctor.Finding(state, "it", "do")) for state in ("ok", "info", "FAIL")]
    plain = ["ok   it\n     -> do", "info it\n     -> do", "FAIL it\n     -> do"]
    coloured = [f"\x1b[{colour}m{line[:4]}\x1b[0m{line[4:]}" for colour, line in zip((32, 36, 31), plain, strict=True)]
    assert shown == (coloured if terminal and not no_colour else plain)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a run would start on this machine's GPU")
def test_doctor_says_what_a_machine_without_a_gpu_needs(run_doctor, tmp_path):
    result = run_doctor(tmp_path, VERL_PLATFORM="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "info platform PlatformCUDA device=cuda VERL_PLATFORM=unset, not available here" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last == "registered; not runnable here: no CUDA device, set VERL_PLATFORM=cpu"


ANOTHER_PLUGIN = """
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
"""


@pytest.mark.more
def test_a_plugin_that_needs_the_cpu_platform_before_it_is_there_is_named(run_doctor, tmp_path):
    """verl loads plugins in the order of sys.path, and says nothing of one that fails."""
    installed = tmp_path / "another-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: another\nVersion: 0.1\n")
    (installed / "entry_points.txt").write_text("[verl.plugins]\nanother = another_plugin\n")
    (tmp_path / "another_plugin.py").write_text(ANOTHER_PLUGIN)
    told = run_doctor(tmp_path).stdout
    assert "info plugin 'another' of verl did not load: another_plugin\n" in told
    (first,) = re.findall(r"load ours first: (\w+)=(.+)", told)
    result = run_doctor(tmp_path, **dict([first]))
    assert result.returncode == 0 and "did not load" not in result.stdout


OLD = {"trl/__init__.py": "AutoModelForCausalLMWithValueHead = object"}
NEW = {"trl/__init__.py": "", "trl/experimental/__init__.py": "", "trl/experimental/ppo.py": OLD["trl/__init__.py"]}


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, None),
        (OLD, None),
        (NEW, None),
        ({"trl/__init__.py": ""}, "pip install 'trl<1.13', or pip uninstall trl"),
        ({"trl/__init__.py": "raise RuntimeError('another transformers')"}, "pip install 'trl<1.13'"),
    ],
)
def test_a_trl_that_ends_verls_workers_is_named(tmp_path, monkeypatch, files, problem):
    for name in ("trl", "trl.experimental", "trl.experimental.ppo"):
        monkeypatch.setitem(sys.modules, name, None)  # so that what is imported here goes with the test
        del sys.modules[name]
    for name, text in (files | {"trl-1.13.0.dist-info/METADATA": "Name: trl\nVersion: 1.13.0\n"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    findings = list(doctor._check_trl())
    assert len(findings) == bool(files)
    for state, line, advice in findings:
        assert line.startswith("trl 1.13.0") and state == ("FAIL" if problem else "ok")
        assert problem is None or (problem in advice and "Error: " in line)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("cpu/__init__.py", "the plugin does not load and verl goes on without it"),
        pytest.param("engine/__init__.py", "the engine of model_engine=prefix does not load", marks=pytest.mark.more),
        pytest.param(
            "trainer/__init__.py",
            "the trainers of trainer.v1.trainer_mode=prefix_* do not load",
            marks=pytest.mark.more,
        ),
    ],
)
def test_doctor_shows_the_error_that_is_hidden_or_comes_late(run_doctor, tmp_path, broken, said):
    package = Path(verl_prefix.__file__).parent
    shutil.copytree(package, tmp_path / "verl_prefix", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "verl_prefix" / broken).write_text('raise KeyError("broken on purpose")\n')
    result, as_json = run_doctor(tmp_path), run_doctor(tmp_path, "--json")
    assert result.returncode == as_json.returncode == 1
    last = json.loads(as_json.stdout)["findings"][-1]
    assert last["state"] == "FAIL" and last["line"].startswith(said) and "Traceback" in last["advice"]
    assert f"FAIL {said}: KeyError: 'broken on purpose'" in result.stdout
    assert "Traceback" in result.stderr and str(tmp_path / "verl_prefix" / broken) in result.stderr


@pytest.mark.parametrize("loads", [False, True])
def test_of_an_engine_that_is_not_there_our_own_error_is_shown_first(monkeypatch, loads):
    """MOCK: its package is there, verl's registry is empty, and our module is an empty one, or does not load."""
    from verl.workers.engine import EngineRegistry

    ours = "verl_prefix.backends.megatron"
    monkeypatch.setattr(Engine, "missing", None)
    monkeypatch.setattr(EngineRegistry, "_engines", {})
    monkeypatch.setitem(sys.modules, "verl_prefix.backends", types.ModuleType("verl_prefix.backends"))
    monkeypatch.setitem(sys.modules, ours, types.ModuleType(ours) if loads else None)
    state, line, advice = doctor._optional(MEGATRON)
    assert state == "FAIL" and ("Traceback" in advice) is not loads
    said = "engine 'prefix_megatron' {}" if loads else "the engine of model_engine=prefix_megatron does not load: "
    assert line.startswith(said) and advice.startswith("verl's own Megatron engine does not load: ") is loads


def test_doctor_says_which_variable_keeps_the_plugin_out(run_doctor, tmp_path):
    result = run_doctor(tmp_path, VERL_USE_EXTERNAL_PLUGINS="none")
    assert result.returncode == 1, result.stderr
    assert "FAIL VERL_USE_EXTERNAL_PLUGINS=none" in result.stdout
    assert "unset VERL_USE_EXTERNAL_PLUGINS" in result.stdout
    assert "1 problem(s)" in result.stdout


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [("auto", True), (" Auto ", True), ("other, prefix", True), ("none", False), ("other", False)],
)
def test_the_plugin_policy_is_read_as_verl_reads_it(monkeypatch, policy, allowed):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    assert doctor._policy()[1] is allowed


@pytest.mark.parametrize("verl_version", ["0.8.0", "0.10.0", None])
def test_a_verl_outside_the_supported_range_is_a_problem(monkeypatch, verl_version):
    monkeypatch.setattr(doctor, "installed_version", lambda name: verl_version if name == "verl" else "1.0")
    advice = {found.line.split()[0]: found.advice for found in doctor._check_versions()}
    assert advice["verl"].startswith("install verl")


def test_versions_that_are_optional_may_be_absent(monkeypatch):
    installed, optional = doctor.installed_version, ("vllm", "flash-attn")
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name in optional else installed(name))
    findings = list(doctor._check_versions())
    assert {("info", "vllm not installed", None), ("info", "flash-attn not installed", None)} <= set(findings)
    assert all(finding.state != "FAIL" for finding in findings)
