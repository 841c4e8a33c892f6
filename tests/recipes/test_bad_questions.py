"""Questions that are broken at random: prepare.py says so in one line and writes nothing, or prepares them."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet
import pytest
from broken_files import broken, files, fuzzed, lines_of, put
from hypothesis import example, given
from PIL import Image

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PARAGRAPHS = [{"idx": i, "title": f"t{i}", "paragraph_text": "words", "is_supporting": i == 0} for i in range(2)]
MUSIQUE = [
    {
        "id": f"2hop__{i}", "question": "who?", "answer": "she", "answer_aliases": [], "answerable": True,
        "question_decomposition": [{"id": 1, "question": "who?", "answer": "she", "paragraph_support_idx": 0}],
        "paragraphs": PARAGRAPHS,
    } for i in range(3)
]  # fmt: skip
VIDEO = [
    {
        "problem_id": i, "problem": "how many?", "data_type": "image", "problem_type": "numerical", "options": [],
        "solution": "<answer>3</answer>", "path": f"./{i}.png",
    } for i in range(3)
]  # fmt: skip


def prepare_of(recipe: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A recipe's prepare.py, which imports what lies beside it."""
    monkeypatch.syspath_prepend(str(RECIPES / recipe))
    for name in ("reward", "probe"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location(f"broken_{recipe}", RECIPES / recipe / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("recipe", "name", "whole", "values", "options"),
    [
        ("musique", "questions.jsonl", lines_of(MUSIQUE), MUSIQUE, []),
        ("musique", "questions.jsonl", lines_of(MUSIQUE), MUSIQUE, ["--search"]),
        ("video_rlvr", "questions.json", json.dumps(VIDEO).encode(), [VIDEO], []),
        ("video_rlvr", "questions.jsonl", lines_of(VIDEO), VIDEO, ["--bad", "skip"]),
    ],
)
def test_broken_questions(recipe, name, whole, values, options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    prepare = prepare_of(recipe, monkeypatch)
    for i in range(len(VIDEO)):
        Image.new("RGB", (8, 8)).save(f"{i}.png")

    @fuzzed
    @given(broken(whole, values))
    @example(("deep", b"DEEP"))
    @example(("value", json.dumps([VIDEO[0] | {"path": "a\nb"}]).encode()))
    @example(("value", json.dumps([MUSIQUE[0] | {"id": "a\nb"}] * 2).encode()))
    def run(drawn):
        for path in Path("data").glob("*"):
            path.unlink()
        put(Path(name), *drawn)
        before = files(tmp_path)
        code = prepare.main(["--input", name, "--output", "data", "--val-size", "1", *options])
        said = capsys.readouterr().err.splitlines()
        if code:
            assert code == 1 and len(said) == 1 and said[0].startswith("prepare: "), said
            assert files(tmp_path) == before
        else:
            made = sorted(path.name for path in Path("data").iterdir())
            assert made == ["train.parquet", "val.parquet"] and not said
            assert all(pyarrow.parquet.read_table(Path("data", part)).num_rows for part in made)

    run()
