"""Parts of every report: of which code and machine it is, and its text and tables, in Markdown and on a terminal."""

import contextlib
import importlib.util
import io
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from verl_prefix.versions import COMMIT, device_name, git_state, package_versions

PACKAGES = ("verl-prefix", "verl", "torch", "transformers", "tensordict", "ray", "TransferQueue", "prefix-grouper",
            "flash-attn")  # fmt: skip


def code_of(report: dict[str, Any]) -> str:
    """Whose code a report's is, as a line of it says: a commit's, or an installed package's of some version."""
    commit, dirty = report["git"]["commit"], report["git"]["dirty"]
    if commit or dirty:
        return f"commit {(commit or 'unknown')[:12]}" + ", uncommitted files" * dirty
    return f"verl-prefix {report['versions']['verl-prefix']}"


def refuse_dirty() -> None:
    """Raises ValueError where the code that makes a report differs from its commit."""
    if (git := git_state())["dirty"]:
        wrong = "the git tree has uncommitted files: commit them"
        if git["commit"] is None:
            wrong = f"this copy of verl_prefix is neither installed nor a git checkout: set {COMMIT} to its commit"
        raise ValueError(f"{wrong}, or add --allow-dirty")


@contextlib.contextmanager
def warnings_last() -> Iterator[None]:
    """Context whose stderr comes behind it: an answer stands first, and no warning within it. It holds what Python
    writes, not what C code does."""
    held = io.StringIO()
    try:
        with contextlib.redirect_stderr(held):
            yield
    finally:
        sys.stderr.write(held.getvalue())


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


class Table(NamedTuple):
    """A table of a report; the title is for terminals."""

    head: Sequence[object]
    rows: Iterable[Sequence[object]]
    title: str = ""


def markdown(blocks: Iterable[str | Table]) -> str:
    """Paragraphs and tables, an empty line between them."""
    return "\n\n".join(
        block if isinstance(block, str) else "\n".join(table(block.head, block.rows)[:-1]) for block in blocks
    )


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table, an empty one at the end."""
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ("---",) * len(head), *rows)] + [""]


def show(blocks: Iterable[str | Table], style: str | None = None) -> None:
    """Prints paragraphs, in a style, and tables, whose cells are never cut. In Markdown where rich is not installed,
    since `bench` needs torch and transformers alone."""
    if importlib.util.find_spec("rich") is None:
        print(markdown(blocks))
        return
    from rich.console import Console
    from rich.table import Table as Grid

    console, endless = Console(), Console(width=10_000)
    for block in blocks:
        if isinstance(block, str):
            of_block = "bold" if block.startswith("# ") else style
            console.print(block.removeprefix("# "), style=of_block, markup=False, highlight=False, soft_wrap=True)
            continue
        if block.title:  # a line of its own: rich would break it to the table's width
            console.print(block.title, style="italic", markup=False, highlight=False, soft_wrap=True)
        grid = Grid(*map(str, block.head))
        for row in block.rows:
            grid.add_row(*(str(cell).strip("*") for cell in row))
        Console(width=max(console.width, endless.measure(grid).maximum)).print(grid, markup=False)
