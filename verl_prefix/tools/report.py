"""Parts of every report: of which code and machine it is, and tables in Markdown."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verl_prefix.versions import COMMIT, device_name, git_state, package_versions

PACKAGES = ("verl-prefix", "verl", "torch", "transformers", "tensordict", "ray", "TransferQueue", "prefix-grouper",
            "flash-attn")  # fmt: skip


def check_out(out: Path | None, allow_dirty: bool = True) -> None:
    """What can be said of a report's file before it is made.

    Args:
        allow_dirty: a report of uncommitted files is wanted.

    Raises:
        ValueError: it cannot be a file, or its code differs from the commit.
    """
    if out and (out.is_dir() or not out.parent.is_dir()):
        wrong = "is a folder" if out.is_dir() else f"is in {out.parent}, which is no folder here"
        raise ValueError(f"--out {out} {wrong}; write the name of a file in a folder that exists")
    if out and not allow_dirty and (git := git_state())["dirty"]:
        wrong = "the git tree has uncommitted files: commit them"
        if git["commit"] is None:
            wrong = f"this copy of verl_prefix is neither installed nor a git checkout: set {COMMIT} to its commit"
        raise ValueError(f"{wrong}, or add --allow-dirty")


def provenance(schema: str, device: str | None = None) -> dict[str, Any]:
    """Format, time, versions, machine and commit of the code (`git_state`).

    Args:
        device: "cpu" or "cuda"; None: what there is.
    """
    return {
        "schema": schema,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": package_versions(PACKAGES),
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "git": git_state(),
    }


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table, an empty one at the end."""
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ("---",) * len(head), *rows)] + [""]
