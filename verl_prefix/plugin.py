"""Target of the `verl.plugins` entry point: runs at the end of `import verl`, in the driver and in every Ray worker.

It puts `pkg://verl_prefix.config` on Hydra's search path (so `model_engine=prefix` resolves before `@hydra.main` runs)
and registers platform, engine, trainer and rollout with verl's own registries; verl's own engine learns to warn of a
leak. verl swallows what is raised here (verl/__init__.py logs it at DEBUG); `verl-prefix doctor` imports this module
again and shows the traceback.
"""

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
import verl_prefix.engine.stock_warning  # noqa: E402
import verl_prefix.trainer.prefix_sync  # noqa: E402, F401
