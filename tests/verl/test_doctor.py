"""`verl-prefix doctor` in fresh processes: verl loads plugins once, at the end of its import."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import verl_prefix
from verl_prefix import doctor


def run_doctor(cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    return subprocess.run(
        [sys.executable, "-m", "verl_prefix.cli", "doctor"],
        cwd=cwd,
        env=inherited | {"VERL_PLATFORM": "cpu"} | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_doctor_names_everything_that_is_registered(tmp_path):
    result = run_doctor(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in (
        f"verl {importlib.metadata.version('verl')} (supported: ",
        "platform CPUPlatform device=cpu VERL_PLATFORM=cpu",
        "engine 'prefix' {cuda: PrefixFSDPEngine, cpu: PrefixFSDPEngine",
        "trainer 'prefix_sync' PrefixPPOTrainerSync",
        "rollouts of this package: hf",
        "attention kernel cpu: ok",
        "Hydra search path: verl_prefix.config",
        "model_engine=prefix composes actor: verl_prefix.config.",
        "model_engine=prefix composes ref: verl_prefix.config.",
    ):
        assert f"ok   {name}" in result.stdout, result.stdout
    assert "FAIL" not in result.stdout


def test_doctor_shows_the_error_that_verl_hides(tmp_path):
    package = Path(verl_prefix.__file__).parent
    shutil.copytree(package, tmp_path / "verl_prefix", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "verl_prefix" / "engine" / "__init__.py").write_text('raise KeyError("broken on purpose")\n')
    result = run_doctor(tmp_path)
    assert result.returncode == 1
    assert "FAIL the plugin does not load and verl goes on without it: KeyError: 'broken on purpose'" in result.stdout
    assert "Traceback" in result.stderr and str(tmp_path / "verl_prefix" / "engine" / "__init__.py") in result.stderr


def test_doctor_says_which_variable_keeps_the_plugin_out(tmp_path):
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
    monkeypatch.setattr(doctor, "_version", lambda name: verl_version if name == "verl" else "1.0")
    problems = {line.split()[0]: problem for problem, line in doctor._check_versions()}
    assert problems["verl"].startswith("install verl")


def test_versions_that_are_optional_may_be_absent(monkeypatch):
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("vllm", "flash-attn") else installed(name))
    findings = list(doctor._check_versions())
    assert (None, "vllm not installed") in findings and (None, "flash-attn not installed") in findings
    assert all(problem is None for problem, _ in findings)
