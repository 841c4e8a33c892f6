"""An unknown verl is refused where the user sees it: constructors, not imports (verl hides those of a plugin)."""

import importlib.metadata
import re

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from verl.utils.config import omega_conf_to_dataclass

from verl_prefix import versions
from verl_prefix.config import PrefixActorConfig, PrefixEngineConfig
from verl_prefix.tools import doctor
from verl_prefix.trainer.prefix_sync import PrefixPPOTrainerSync


def pretend(monkeypatch, version, allowed=None):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "verl" else real(name))
    monkeypatch.delenv(versions.OVERRIDE, raising=False)
    if allowed is not None:
        monkeypatch.setenv(versions.OVERRIDE, allowed)


def test_this_verl_is_one_that_was_tested(monkeypatch):
    monkeypatch.delenv(versions.OVERRIDE, raising=False)
    versions.check_verl_version()


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
    versions.check_verl_version()


def test_verls_main_branch_is_taken_with_one_warning(monkeypatch, caplog):
    pretend(monkeypatch, versions.VERL_MAIN)
    versions.warn_once.cache_clear()
    for _ in range(3):
        PrefixEngineConfig()
    (record,) = caplog.records
    assert re.search("main branch, of which commit [0-9a-f]{9} of .* was tested", record.message)
    assert any(versions.TESTED_MAIN in found.line for found in doctor._check_versions())


def test_another_value_of_the_variable_is_an_error(monkeypatch):
    pretend(monkeypatch, "0.9.1", allowed="yes")
    with pytest.raises(ImportError, match="'yes': set it to 1"):
        versions.check_verl_version()


def test_the_driver_and_the_doctor_say_it(monkeypatch):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["model_engine=prefix"])
    pretend(monkeypatch, "0.99.0")
    with pytest.raises(InstantiationException, match="verl 0.99.0 is not one of those"):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert any("verl 0.99.0 is not one of those" in (found.advice or "") for found in doctor._check_versions())
