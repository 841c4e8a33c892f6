"""What studies (tests/studies) name of the package and of its tests exists: no run of the suite starts them."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / "tests" / "studies").glob("*.py"))


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "studies"))
    return importlib.import_module("mutants")


def _imported(tree: ast.AST) -> dict[str, object]:
    """What a study imports of this package, by the name that it has there."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("verl_prefix"):
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                assert (error.name or "").startswith("megatron"), error  # in an environment of its own
                continue
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_what_a_study_imports_and_breaks_exists(path: Path) -> None:
    tree = ast.parse(path.read_text())
    found = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "before":  # of chaos_plugin.py: owner, method
            owner, name = ast.unparse(node.args[0]), ast.literal_eval(node.args[1])
            assert owner not in found or hasattr(found[owner], name), f"{path.name}: {owner}.{name}"


def test_files_that_are_changed_and_tests_that_are_asked_exist(mutants) -> None:
    assert [name for name in (*mutants.ALONE, *mutants.TOGETHER) if not (ROOT / "verl_prefix" / name).exists()] == []
    asked = {test for tests in mutants.TESTS.values() for test in tests.split()}
    for file, _, name in (test.partition("::") for test in asked):
        assert (ROOT / file).exists() and (not name or f"def {name}(" in (ROOT / file).read_text()), f"{file}::{name}"


def test_counts_of_several_runs_are_those_of_all_their_mutants(mutants) -> None:
    def one(shown: str, **more: object) -> dict:
        case = {"result": "wrong", "fp32": "sees", "bf16": "raises"} if shown == "wrong" else {"result": shown}
        return {"file": "core/planning.py", "shown by": shown, "ranks": [[case]], **more}

    runs = [
        {"schema": "mutants/1", "drawn_from": 9, "mutants": [one("wrong"), one("raises")]},
        {
            "schema": "mutants/1",
            "drawn_from": 7,
            "mutants": [one("nothing", why="x"), one("nothing", **{"seen by test": "t"})],
        },
    ]
    found = mutants.figures(runs)
    assert (found["drawn_from"], found["mutants"], found["files"]) == (16, 4, ["core/planning.py"])
    assert found["why"] == {"core/planning.py": {"x": 1}} and found["schema"] == "mutants/1"
    assert found["summary"] == {
        "wrong": 1, "raises": 1, "nothing": 2, "tests": {"seen": 1, "equal": 1, "new": 0},
        "self_check": {"wrong": 1, "fp32": 1, "fp32_raises": 0, "bf16": 0, "bf16_raises": 1},
    }  # fmt: skip
