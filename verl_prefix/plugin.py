"""Target of the `verl.plugins` entry point: runs at the end of `import verl`, in the driver and in every Ray worker.

It puts verl_prefix/config on Hydra's search path (so `model_engine=prefix` resolves before `@hydra.main` runs) and
registers the platform, and resolvers by which that key and another ask who drives. The rest waits: the engine comes
with the class that `model_engine=prefix` names for `fsdp_config`, the trainers come behind verl's own. verl swallows
what is raised here (verl/__init__.py logs it at DEBUG); `verl-prefix doctor` imports this module again and shows the
traceback.
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
    """Imports our trainers right behind verl's, in whichever process does so: verl looks a trainer up by the name in
    `trainer.v1.trainer_mode` and asks nobody, and its registry takes no class before verl's trainers are loaded."""

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
    """`name`, wherever the config is resolved: the first that every driver of verl's does with it, before workers
    start."""
    from verl_prefix.config.driver import check_driver

    check_driver(_root_)
    return name


def _keeps_prompts(*, _root_: DictConfig) -> bool:
    from verl_prefix.config.driver import keeps_prompts

    return keeps_prompts(_root_)


def _add_trainers() -> None:
    try:
        import verl_prefix.trainer.prefix_sync  # noqa: F401
    except Exception:  # verl's own trainers work without
        logger.exception("trainer.v1.trainer_mode=prefix_* are missing")


OmegaConf.register_new_resolver("verl_prefix.engine_of", _engine_of, replace=True)
OmegaConf.register_new_resolver("verl_prefix.keeps_prompts", _keeps_prompts, replace=True)

# The platform must be registered before any verl module resolves it at import.
import verl_prefix.cpu  # noqa: E402, F401

sys.meta_path.insert(0, TrainersFinder())
