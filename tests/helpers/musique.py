"""The MuSiQue recipe's scripts."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "musique"


def recipe(script: str, *args: object) -> None:
    subprocess.run([sys.executable, RECIPE / script, *map(str, args)], check=True, timeout=300)
