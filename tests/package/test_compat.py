"""An unknown verl or transformers is refused where the user sees it: constructors and calls, not imports (verl hides
those of a plugin)."""

import importlib.metadata
import os
import re

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from verl.utils.config import omega_conf_to_dataclass

from verl_prefix import phased_update, response_hidden_states, response_log_probs, versions
from verl_prefix.config.fsdp import PrefixActorConfig, PrefixEngineConfig
from verl_prefix.tools import doctor
from verl_prefix.trainer.prefix_sync import PrefixPPOTrainerSync


def pretend(monkeypatch, version, allowed=None, package="verl", variable=versions.OVERRIDE):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else real(name))
    monkeypatch.delenv(variable, raising=False)
    if allowed is not None:
        monkeypatch.setenv(variable, allowed)


def test_this_verl_is_one_that_was_tested(monkeypatch):
    monkeypatch.delenv(versions.OVERRIDE, raising=False)
    versions.check_versions()


@pytest.mark.parametrize("version", ["0.10.0", "0.9.2", "0.9.1.dev1", "0.9.0"])
@pytest.mark.parametrize(
    "construct",
    [
        PrefixEngineConfig,
        lambda: PrefixActorConfig(rollout_n=2, ppo_micro_batch_size_per_gpu=1),
        lambda: PrefixPPOTrainerSync(None),
    ],
    ids=["engine", "actor", "trainer"],
)
def test_another_verl_is_refused_by_every_constructor(monkeypatch, version, construct):
    pretend(monkeypatch, version)
    with pytest.raises(ImportError, match=rf"verl {version} .*pip install verl==0.9.1, or set {versions.OVERRIDE}=1"):
        construct()


def test_the_variable_lets_another_verl_in(monkeypatch):
    pretend(monkeypatch, "0.10.0", allowed="1")
    versions.check_versions()


def test_verls_main_branch_is_taken_with_one_warning(monkeypatch, caplog):
    pretend(monkeypatch, versions.VERL_MAIN)
    for _ in range(3):
        PrefixEngineConfig()
    (record,) = caplog.records
    assert re.search("main branch, of which commit [0-9a-f]{9} of .* was tested", record.message)
    assert any(versions.TESTED_MAIN in found.line for found in doctor._check_versions())


def test_another_value_of_the_variable_is_an_error(monkeypatch):
    pretend(monkeypatch, "0.9.1", allowed="yes")
    with pytest.raises(ImportError, match="'yes': set it to 1"):
        versions.check_versions()


CALLS = {
    "api": lambda: response_log_probs(torch.nn.Linear(1, 1), [[1, 2]], [[3]]),
    "hidden": lambda: response_hidden_states(torch.nn.Linear(1, 1), [[1, 2]], [[3]]),
    "waves": lambda: phased_update(torch.nn.Linear(1, 1), [[1, 2]], [[3]]),
    "engine": PrefixEngineConfig,
    "trainer": lambda: PrefixPPOTrainerSync(None),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("version", ["5.25.0", "6.0.0", "5.5.3", "4.57.1", "main"])
def test_another_transformers_is_refused(monkeypatch, version, call):
    variable = versions.OVERRIDE_TRANSFORMERS
    pretend(monkeypatch, version, package="transformers", variable=variable)
    told = rf"transformers {version} .*\(5.6 to 5.24\).*pip install 'transformers>=5.6,<5.25', or set {variable}=1"
    with pytest.raises(ImportError, match=told):
        CALLS[call]()
    assert any(f"transformers {version} is" in (found.advice or "") for found in doctor._check_versions())


@pytest.mark.parametrize(
    ("version", "allowed"), [("5.6.2", None), ("5.24.3", None), ("5.24.0.dev0", "0"), ("5.25.0", "1"), ("main", "1")]
)
def test_a_known_or_allowed_transformers_is_let_in(monkeypatch, version, allowed):
    pretend(monkeypatch, version, allowed, package="transformers", variable=versions.OVERRIDE_TRANSFORMERS)
    PrefixEngineConfig()
    with pytest.raises(TypeError, match="model is a Linear"):  # the next thing that is checked
        CALLS["api"]()


def test_the_driver_and_the_doctor_say_it(monkeypatch):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["model_engine=prefix"])
    pretend(monkeypatch, "0.99.0")
    with pytest.raises(InstantiationException, match="verl 0.99.0 is not one of those"):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert any("verl 0.99.0 is not one of those" in (found.advice or "") for found in doctor._check_versions())


def test_fsdp2s_engine_runs_beside_a_megatron_core_that_ours_does_not_know(fresh, tmp_path):
    code = """
import sys
sys.modules["verl_prefix.backends.megatron"] = None  # its import fails
import verl.workers.engine as engines
engines.MegatronEngineWithLMHead = type("MegatronEngineWithLMHead", (), {})
from verl_prefix.backends.fsdp import PrefixFSDPEngine
"""
    done = fresh(code, tmp_path, dict(os.environ, VERL_PLATFORM="cpu"))
    assert done.returncode == 0, done.stderr
    assert "prefix: model_engine=prefix_megatron is not there: " in done.stderr
