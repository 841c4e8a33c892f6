"""What .github/FOR_VERL.md says of verl: every reproduction prints what stands below it."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / ".github/FOR_VERL.md"
DEFECTS = PAGE.read_text().split("## Found")[1]
FOUND = re.findall(r"\*\*(.+?)\*\*.*?```python\n(.+?)```\n\n```text\n(.+?)```", DEFECTS, re.S)


@pytest.mark.more
def test_the_plugin_of_the_extension_guide_is_loaded_and_registers_its_engine(tmp_path):
    (points,) = re.findall(r"```toml\n\[project.entry-points.\"(.+?)\"\]\n(.+?)\n```", PAGE.read_text(), re.S)
    (module,) = re.findall(r"```text\n(# my_package/plugin.py\n.+?)```", PAGE.read_text(), re.S)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "plugin.py").write_text(module)
    installed = tmp_path / "my_package-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: my-package\nVersion: 0.1\n")
    (installed / "entry_points.txt").write_text("[{}]\n{}\n".format(points[0], points[1].replace('"', "")))
    code = "import verl; from verl.workers.engine.base import EngineRegistry as r; print(*r._engines['language_model'])"
    env = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"} | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=env)
    assert "mine" in done.stdout.split()


def test_the_page_says_how_long_the_platform_is():
    lines = sum(len(file.read_text().splitlines()) for file in (ROOT / "verl_prefix/cpu").glob("*.py"))
    assert f"`verl_prefix/cpu`, {round(lines, -2)} lines" in PAGE.read_text()


def test_the_page_has_reproductions():
    assert len(FOUND) >= 5


@pytest.mark.parametrize(("code", "printed"), [pytest.param(*rest, id=name) for name, *rest in FOUND])
def test_a_defect_is_still_there(code: str, printed: str):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, PAGE.name, "exec"), {})
    assert out.getvalue() == printed
