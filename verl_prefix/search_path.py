"""Puts verl_prefix/config on Hydra's search path, behind verl's own folders, when it is imported.

`verl-prefix plan` composes a command's config before it imports verl. So this module imports Hydra alone, and names a
folder: of a `pkg://` Hydra would import the package.
"""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

CONFIG_PATH = f"file://{Path(__file__).resolve().parent / 'config'}"


class PrefixSearchPathPlugin(SearchPathPlugin):
    """Appends verl_prefix/config to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl_prefix", path=CONFIG_PATH)


Plugins.instance().register(PrefixSearchPathPlugin)
