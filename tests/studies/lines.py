"""Which lines and branches of each room the tests reach, together, in percent.

    PYTHONPATH=. .venv/bin/python tests/studies/lines.py examples/results/lines_cpu.json

The tests are those of make test-more.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path, PurePath

from verl_prefix.tools.report import provenance

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "outputs" / "lines"  # where pyproject.toml lets coverage write


def python(*words: str) -> None:
    env = os.environ | {"COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml")}
    subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=env, check=True)


def by_room(files: dict[str, dict]) -> dict[str, Counter]:
    """Counts of coverage's report by room of the package; "." are the files beside the rooms."""
    rooms: dict[str, Counter] = defaultdict(Counter)
    for path, one in files.items():
        parts = PurePath(path).parts[1:]
        rooms[parts[0] if len(parts) > 1 else "."].update({k: v for k, v in one["summary"].items() if type(v) is int})
    for room in rooms.values():  # lines and branches together, as coverage counts them
        reached, there = room["covered_lines"] + room["covered_branches"], room["num_statements"] + room["num_branches"]
        room["percent"] = round(100 * reached / max(1, there), 1)
    return rooms


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    python("pip", "install", "--quiet", "--disable-pip-version-check", "coverage==7.17.4")
    python("pytest", "-n", "logical", "--dist", "loadfile", "-m", "not full")
    python("coverage", "combine", "--quiet")
    python("coverage", "json", "--quiet", "-o", str(FOLDER / "lines.json"))
    rooms = by_room(json.loads((FOLDER / "lines.json").read_text())["files"])
    Path(sys.argv[1]).write_text(json.dumps(provenance("lines/1", "cpu") | {"rooms": rooms}, indent=1) + "\n")


if __name__ == "__main__":
    main()
