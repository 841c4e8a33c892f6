"""Target of the `verl.plugins` entry point: runs at the end of `import verl`, in the driver and in every Ray worker.

It puts verl_prefix/config on Hydra's search path before `@hydra.main` runs, so that `model_engine=prefix` resolves.
It registers the platform for CPUs, and two resolvers by which a config is checked and adapts to verl's trainer. The
rest comes later: our trainers, and engine and rollout for CPUs, are imported when verl's are, and the engine with the
class that `model_engine=prefix` names for `fsdp_config`. verl swallows what is raised here (verl/__init__.py logs it at
DEBUG); `verl-prefix doctor` imports this module again and shows the traceback.
"""

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

import verl_prefix.search_path  # noqa: F401

logger = logging.getLogger(__name__)


class FollowingFinder(MetaPathFinder):
    """Imports modules of ours right behind those of verl's whose registries they enter, in any process that imports
    those: `following` says which. No process pays for a part of verl that it does not use."""

    def __init__(self, following: Mapping[str, str]) -> None:
        self.following = following

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = self.following.get(fullname)
        if ours is None:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_both(module: ModuleType) -> None:
                run(module)
                _import(ours)

            loader.exec_module = run_both
        return spec


def _engine_of(name: str, *, _root_: DictConfig) -> str:
    """Returns `name`, after a check of the whole config: every driver of verl resolves it before workers start."""
    from verl_prefix.config.driver import check_driver

    check_driver(_root_)
    return name


def _keeps_prompts(*, _root_: DictConfig) -> bool:
    """Whether verl's own dispatch keeps whole prompts in mini-batches, see `config.driver`."""
    from verl_prefix.config.driver import keeps_prompts

    return keeps_prompts(_root_)


def _import(ours: str) -> None:
    try:
        importlib.import_module(ours)
    except Exception:  # verl's own work without ours
        logger.exception("what %s adds to verl is missing", ours)


OmegaConf.register_new_resolver("verl_prefix.engine_of", _engine_of, replace=True)
OmegaConf.register_new_resolver("verl_prefix.keeps_prompts", _keeps_prompts, replace=True)

# The platform must be registered before any verl module resolves it at import.
import verl_prefix.cpu.platform  # noqa: E402, F401
from verl_prefix.cpu import FOLLOWING  # noqa: E402

sys.meta_path.insert(0, FollowingFinder({"verl.trainer.ppo.v1": "verl_prefix.trainer.prefix_sync"} | FOLLOWING))
