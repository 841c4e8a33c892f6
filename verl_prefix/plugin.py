"""Target of the `verl.plugins` entry point: runs at the end of `import verl`, in the driver and in every Ray worker.

It puts `pkg://verl_prefix.config` on Hydra's search path (so `model_engine=prefix` resolves before `@hydra.main` runs)
and registers platform, engine, trainer and rollout with verl's own registries. verl swallows what is raised here
(verl/__init__.py logs it at DEBUG); `verl-prefix doctor` imports this module again and shows the traceback.
"""

from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

CONFIG_PATH = "pkg://verl_prefix.config"


class PrefixSearchPathPlugin(SearchPathPlugin):
    """Appends verl_prefix/config to Hydra's search path, behind verl's own tree."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl_prefix", path=CONFIG_PATH)


Plugins.instance().register(PrefixSearchPathPlugin)

# The platform must be registered before any verl module resolves it at import. `import x.y`, not `from x import y`:
# when our engine is what triggers `import verl`, it re-enters here half-loaded.
import verl_prefix.cpu  # noqa: E402, I001
import verl_prefix.engine.prefix_engine  # noqa: E402
import verl_prefix.trainer.prefix_sync  # noqa: E402, F401


def registered() -> tuple[Any, dict[str, type], type | None, list[str]]:
    """What verl's registries hold for a run of this package: verl's platform, our language-model engines by device, the
    trainer of `prefix_sync`, and the names of rollouts that are ours."""
    from verl.plugin.platform import get_platform
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    loaders = RolloutReplicaRegistry._registry.items()
    rollouts = [name for name, load in loaders if load.__module__.startswith("verl_prefix")]
    engines = EngineRegistry._engines.get("language_model", {}).get("prefix", {})
    return get_platform(), engines, TRAINER_REGISTRY.get("prefix_sync"), rollouts
