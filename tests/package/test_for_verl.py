"""What .github/FOR_VERL.md says of verl: every reproduction prints what stands below it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / ".github/FOR_VERL.md"
DEFECTS = PAGE.read_text().split("## Found")[1]
FOUND = re.findall(r"\*\*(.+?)\*\*.*?```python\n(.+?)```\n\n```text\n(.+?)```", DEFECTS, re.S)


def test_the_page_has_reproductions():
    assert len(FOUND) >= 5


@pytest.mark.parametrize(("code", "printed"), [pytest.param(*rest, id=name) for name, *rest in FOUND])
def test_a_defect_is_still_there(code: str, printed: str):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, PAGE.name, "exec"), {})
    assert out.getvalue() == printed
