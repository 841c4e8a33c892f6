"""Wrong words of the examples that need no verl are said in one line, before a model is built."""

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WRONG = {
    "tree_search --ways 0": "argument --ways: '0': give a number of 1 or more",
    "tree_search --ways 1 1": "--ways 1 1: give one level 2 or more, so that turns branch",
    "tree_search --prompts -1": "argument --prompts: '-1': give a number of 1 or more",
    "tree_search --threads 0": "argument --threads: '0': give a number of 1 or more",
    "tree_search --model /none": "argument --model: /none has no config.json; name a model's folder, or",
    "tree_search --model .": "argument --model: . has no config.json",
    "shared_prefix_step --model nope": "argument --model: nope cannot be read here (",
    "shared_prefix_step --group 1": "argument --group: '1': give a number of 2 or more",
    "shared_prefix_step --wave-tokens 0": "argument --wave-tokens: '0': give a number of 1 or more",
    "shared_prefix_step --device cuda": "--device cuda: torch.cuda.is_available() is False; use --device cpu",
    "judge_scoring --text /none.txt": "argument --text: /none.txt is no file here; name one that is",
    "judge_scoring --max-tokens many": "argument --max-tokens: 'many': give a number of 1 or more",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_words_are_said_in_one_line(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    name, *rest = words.split()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main(rest)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and WRONG[words] in line
