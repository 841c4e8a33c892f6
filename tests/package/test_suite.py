"""The suite itself: no clock decides a test, and no order; cases in pairs leave none out."""

import ast
import itertools
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from pairs import in_pairs

TESTS = Path(__file__).resolve().parents[1]
CLOCKS = {"sleep", "time", "monotonic", "perf_counter", "process_time", "thread_time"}
# Files that read a clock or sleep, and why no test's outcome depends on it.
READ = {
    "engine/test_fuzz.py": "seconds of a report",
    "examples/test_demo_report.py": "looks again until a process has spoken",
    "examples/test_learn.py": "looks again until a process has spoken",
    "helpers/ranks.py": "the limit of a job, ten minutes",
    "helpers/test_ranks.py": "hangs on purpose",
    "helpers/test_warm_python.py": "looks again until a process is gone, five minutes",
}
# Limits of less than five minutes.
SHORT = {
    "core/test_fsdp.py": "looks again whether ranks are there; ranks that were told to end",
}
APART = ("studies", "clients", "gpu")  # no part of make test


def files() -> list[tuple[str, ast.AST]]:
    paths = [path.relative_to(TESTS) for path in TESTS.rglob("*.py")]
    return [(str(path), ast.parse((TESTS / path).read_text())) for path in paths if path.parts[0] not in APART]


def test_no_clock_decides():
    read, short = set(), set()
    for path, tree in files():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                read |= {path} if node.attr in CLOCKS else set()
            if isinstance(node, ast.keyword) and node.arg == "timeout" and isinstance(node.value, ast.Constant):
                short |= {path} if node.value.value and node.value.value < 300 else set()
    assert read == READ.keys() and short == SHORT.keys()


def test_random_tests_draw_the_same_every_time_and_have_no_deadline(pytestconfig):
    hypothesis = pytest.importorskip("hypothesis")
    settings = hypothesis.settings.default
    assert settings.deadline is None and hypothesis.HealthCheck.too_slow in settings.suppress_health_check
    assert settings.derandomize == (pytestconfig.getoption("--hypothesis-seed") is None)
    given = [
        (path, ast.unparse(keyword))
        for path, tree in files()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("settings")
        for keyword in node.keywords
        if keyword.arg in ("deadline", "derandomize")
    ]
    assert given == [("helpers/broken_files.py", "derandomize=not LONG")], "the profile of conftest.py has them"


def test_a_seed_orders_files_and_the_tests_of_each():
    from conftest import shuffle

    names = [f"{file}.py::test_{i}" for file in "abcd" for i in range(5)]
    orders = []
    for seed in "112":
        items = [SimpleNamespace(nodeid=name) for name in names]
        shuffle(items, seed)
        orders.append([item.nodeid for item in items])
    first, again, other = orders
    assert first == again != other != names != first and sorted(first) == sorted(other) == names
    for order in (first, other):
        file_of = [name.split("::")[0] for name in order]
        assert sum(a != b for a, b in pairwise(file_of)) == 3, "a file is in one piece"


def test_cases_that_run_by_default_show_every_pair_of_values():
    settings = ("abc", (1, 2, 3, 4), (True, False))
    cases = in_pairs(*settings)
    assert sorted(case.values for case in cases) == sorted(itertools.product(*settings))
    shown = [case.values for case in cases if not case.marks]
    for (i, first), (j, second) in itertools.combinations(enumerate(settings), 2):
        assert {(case[i], case[j]) for case in shown} == {*itertools.product(first, second)}
    assert len(shown) == 12 < len(cases)  # as few as values of the two longest settings make pairs
