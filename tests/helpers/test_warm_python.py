"""The `python` of conftest.py does what python does: words, streams, environment, exit codes, and an end."""

import os
import subprocess
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("code", "returned", "printed"),
    [
        ("print('done')", 0, "done\n"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('wrong')", 1, "wrong\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", 128 + 9, ""),
        ("import os; os.killpg(0, 9)", 128 + 9, ""),  # as Ray does to its workers
        ("import atexit; atexit.register(print, 'last')", 0, "last\n"),
        ("import sys; print(*{'verl', 'verl_prefix', 'ray'} & sys.modules.keys())", 0, "\n"),
        ("import os, sys; print(sys.argv[1:], os.getcwd() == os.environ['HERE'])", 0, "['a', 'b c'] True\n"),
        ("import mine; print(mine.__name__)", 0, "mine\n"),
        ("print(open(0).read())", 0, "in\n"),
    ],
)
def test_code_runs_as_in_python(python: str, tmp_path: Path, code: str, returned: int, printed: str) -> None:
    (tmp_path / "mine.py").write_text("")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HERE": str(tmp_path)}
    words = [python, "-c", code, "a", "b c"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, input="in", timeout=300)
    assert done.returncode == returned and (done.stdout + done.stderr).endswith(printed), done.stderr


def test_modules_and_scripts_are_main(python: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "main.py").write_text(
        "import beside, sys\nprint(__name__, sys.argv[1:], sys.modules['__main__'].__file__)"
    )
    for words in (["main.py", "x"], ["-m", "main", "x"], ["-u", "main.py", "x"]):
        done = subprocess.run([python, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.stdout.startswith("__main__ ['x'] ") and done.stdout.endswith("main.py\n"), done.stderr


def test_what_is_ended_from_outside_ends(python: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    process = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    process.kill()
    assert process.stdout.read() == ""  # which ends when nobody holds it
    process.wait()
    with pytest.raises(ProcessLookupError):
        for _ in range(3000):
            os.kill(pid, 0)
            time.sleep(0.1)
