"""Target of the `verl.plugins` entry point: runs at the end of `import verl`, in the driver and in every Ray worker.

It puts verl_prefix/config on Hydra's search path, so that `model_engine=prefix` resolves before `@hydra.main` runs.
It registers the platform for CPUs, and two resolvers by which a config is checked and adapts to verl's trainer. The
rest comes later: our trainers are imported when verl's are, and the engine with the class that `model_engine=prefix`
names for `fsdp_config`. verl swallows what is raised here (verl/__init__.py logs it at DEBUG);
`verl-prefix doctor` imports this module again and shows the traceback.
"""

import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

import verl_prefix.search_path  # noqa: F401

VERLS_TRAINERS = "verl.trainer.ppo.v1"

logger = logging.getLogger(__name__)


class TrainersFinder(MetaPathFinder):
    """Imports our trainers right behind verl's, in any process that imports those. verl looks a trainer up by its name,
    `trainer.v1.trainer_mode`, in a registry of its own, which is there once verl's trainers are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == VERLS_TRAINERS else None
        if spec is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_then_add(module: ModuleType) -> None:
                run(module)
                _add_trainers()

            loader.exec_module = run_then_add
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


def _add_trainers() -> None:
    try:
        import verl_prefix.trainer.prefix_sync  # noqa: F401
    except Exception:  # verl's own trainers work without ours
        logger.exception("trainer.v1.trainer_mode=prefix_* are missing")


OmegaConf.register_new_resolver("verl_prefix.engine_of", _engine_of, replace=True)
OmegaConf.register_new_resolver("verl_prefix.keeps_prompts", _keeps_prompts, replace=True)

# The platform must be registered before any verl module resolves it at import.
import verl_prefix.cpu  # noqa: E402, F401

sys.meta_path.insert(0, TrainersFinder())
