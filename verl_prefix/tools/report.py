"""Parts of every report: of which code and machine it is, and tables in Markdown."""

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from verl_prefix.versions import device_name, git_state, package_versions

PACKAGES = ("verl-prefix", "verl", "torch", "transformers", "tensordict", "ray", "TransferQueue", "prefix-grouper",
            "flash-attn")  # fmt: skip


def provenance(schema: str, device: str | None = None, allow_dirty: bool = True) -> dict[str, Any]:
    """Format, time, versions, machine and the commit of the checkout that this file is in.

    Args:
        device: "cpu" or "cuda"; None: what there is. allow_dirty: a report of uncommitted files is wanted.

    Raises:
        ValueError: the files differ from the commit, and `allow_dirty` is not set.
    """
    git = git_state()
    if git["dirty"] and not allow_dirty:
        raise ValueError("the git tree has uncommitted files: commit them, or add --allow-dirty")
    return {
        "schema": schema,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": package_versions(PACKAGES),
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "git": git,
    }


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table, an empty one at the end."""
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ("---",) * len(head), *rows)] + [""]
