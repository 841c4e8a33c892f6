"""Files of users', broken at random: `broken` draws one, `put` leaves it, and `files` is what a folder then holds.

FUZZ_FILES=2000 in the environment draws so many of each kind; without it a test has 30, always the same.
"""

import contextlib
import copy
import json
import math
import os
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings

LONG = int(os.environ.get("FUZZ_FILES", 0))
DEEP = b"[" * 100_000
NUMBERS = [0, -1, 2**31, 2**63, 10**400, 0.5, 1e308, -1e308, 1e-320, math.nan, math.inf, -math.inf]
ODD = [None, True, "", "a\nb", "\0", "x" * 300, "1", "\ud800", [], {}, [[]], [None], {"": 1}, *NUMBERS]
KINDS = ["bytes", "cut", "flipped", "value", "value", "value", "gone", "deep", "folder", "missing", "loop", "link"]

fuzzed = settings(max_examples=LONG or 30, derandomize=not LONG, suppress_health_check=[*HealthCheck])


def changed(draw, value, gone):
    """A JSON value with one part of it replaced, or left out."""
    value = copy.deepcopy(value)
    inside = value
    while True:
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        if not keys:
            return draw(st.sampled_from(ODD))
        key = draw(st.sampled_from(keys))
        if isinstance(inside[key], list | dict) and inside[key] and draw(st.booleans()):
            inside = inside[key]
            continue
        if gone:
            del inside[key]
        else:
            inside[key] = draw(st.sampled_from(ODD) | st.text(max_size=5) | st.floats() | st.integers())
        return value


@st.composite
def broken(draw, whole: bytes, values: list | None = None):
    """(kind, content) of a file that was `whole`; with `values`, its lines' JSON."""
    kind = draw(st.sampled_from(KINDS if values else [kind for kind in KINDS if kind not in ("value", "gone", "deep")]))
    if kind == "bytes":
        return kind, draw(st.binary(max_size=200))
    if kind == "cut":
        return kind, whole[: draw(st.integers(0, len(whole)))]
    if kind == "flipped":
        content = bytearray(whole)
        for place in draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8)):
            content[place] = draw(st.integers(0, 255))
        return kind, bytes(content)
    if kind in ("value", "gone", "deep"):
        line = draw(st.integers(0, len(values) - 1))
        lines = [json.dumps(value) for value in values]
        lines[line] = draw(st.sampled_from(["DEEP", '{"a": DEEP', '{"data": DEEP']))
        if kind != "deep":
            lines[line] = json.dumps(changed(draw, values[line], kind == "gone"))
        return kind, "\n".join(lines).encode()
    return kind, whole


def put(path: Path, kind: str, content: bytes) -> None:
    """Leaves of what was at `path` what was drawn."""
    with contextlib.suppress(OSError):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "link":
        path.with_name(f"{path.name}.real").write_bytes(content)
        path.symlink_to(f"{path.name}.real")
    elif kind != "missing":
        path.write_bytes(content.replace(b"DEEP", DEEP) if kind == "deep" else content)


def files(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def lines_of(values: list) -> bytes:
    return "\n".join(map(json.dumps, values)).encode()
