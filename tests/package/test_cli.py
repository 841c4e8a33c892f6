"""The command line: what is wrong with it is said before anything slow is imported."""

import subprocess
import sys

import pytest

from verl_prefix import cli
from verl_prefix.tools.ab import options as ab
from verl_prefix.tools.bench import options as bench

MISSING = "is in missing, which is no folder here; write the name of a file in a folder that exists"
WRONG = {
    "plan --out missing/plan.json a=1": f"plan: --out missing/plan.json {MISSING}",
    "plan --out . a=1": "plan: --out . is a folder",
    "plan --fit 75 a=1": "plan: --fit is for a simulation; add --simulate",
    "plan --simulate --gpu b300 a=1": "plan: --gpu 'b300' is unknown; use one of h100, h200, h20, a100",
    "plan --simulate --fit 0 a=1": "plan: argument --fit: '0': give a number of 0.001 or more",
    "plan --shares gen=0.5 a=1": "plan: --shares 'gen=0.5': write update=0.5",
    "plan --response-lengths many a=1": "plan: --response-lengths 'many': write MEAN, MEAN,STD",
    "plan --response-lengths 0 a=1": "plan: --response-lengths '0': write a mean of at least 1",
    "plan --response-lengths 20,-1 a=1": "a finite STD of at least 0",
    "plan --cfg job": "plan: '--cfg' is no Hydra override",
    "bench --grid tiny --allow-dirty --out missing/bench.json": f"bench: --out missing/bench.json {MISSING}",
    "bench --grid tiny --allow-dirty --out .": "bench: --out . is a folder",
    "bench --grid papers": "bench: argument --grid: invalid choice: 'papers' (choose from",
    "bench --grid tiny --arms stocks": "bench: argument --arms: 'stocks': name each of stock, stock_lean,",
    "bench --grid tiny --shape gpt": "bench: argument --shape: invalid choice: 'gpt' (choose from",
    "bench --grid tiny --layers 0": "bench: argument --layers: '0': give a number of 1 or more",
    "bench --grid tiny --repeats 0": "bench: argument --repeats: '0': give a number of 1 or more",
    "bench --grid tiny --threads 0": "bench: argument --threads: '0': give a number of 1 or more",
    "bench --grid tiny --capacity 0": "bench: argument --capacity: '0': give a number of",
    "bench --render missing.json": "bench: [Errno 2] No such file or directory: 'missing.json'",
    "ab --trace missing": "ab: --trace missing is not a folder",
    "ab --synthetic 9,4,2": "ab: --synthetic P,S,G,N needs --model",
    "ab --synthetic 9,4,1 --model m": "ab: --synthetic with groups of one row",
    "ab --synthetic 9,4,2 --model m --arms fast": "ab: argument --arms: 'fast': name each of auto, packed,",
    "ab --synthetic 9,4,2 --model m --steps 0": "ab: argument --steps: '0': give a number of 1 or more",
    "ab --synthetic 9,4,2 --model m --out file": "ab: --out file is a file; give a folder",
    "ab --runs a b --steps 3": "ab: --runs compares finished runs, --steps is for a replay",
    "ab --runs a b": "ab: a: no JSON-lines file and no TensorBoard events",
}
CODE = """
import sys
from verl_prefix import cli
for words in sys.stdin.read().splitlines():
    try:
        code = cli.main(words.split())
    except SystemExit as error:  # of argparse
        code = error.code
    assert code == 2, words
    slow = {"torch", "transformers", "verl", "ray", "hydra", "pyarrow", "matplotlib"} & sys.modules.keys()
    assert not slow, (words, slow)
"""


def test_wrong_words_are_said_before_anything_slow_is_imported(tmp_path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(
        command, input="\n".join(WRONG), cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) == len(WRONG), done.stderr
    for line, says in zip(lines, WRONG.values(), strict=True):
        assert line.startswith("verl-prefix ") and says in line


@pytest.mark.parametrize("words", ["bench --grid tiny --repeat 2", "ab --runs a b --step 2", "doctor --hel"])
def test_half_an_option_is_none(words: str, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(words.split())
    assert error.value.code == 2 and f"unrecognized arguments: {words[words.rindex('--') :]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "options", "name", "default"),
    [
        ("bench", bench.Options, "repeats", 77),
        ("bench", bench.Options, "shape", "tiny"),
        ("bench", bench.Options, "truth", "float32"),
        ("ab", ab.Options, "arms", ("packed", "phased")),
        ("ab", ab.Options, "truth_steps", 77),
        ("ab", ab, "MADE_UP_STEPS", 77),
    ],
)
def test_help_tells_the_default_that_holds(command, options, name, default, monkeypatch, capsys) -> None:
    monkeypatch.setattr(options, name, default)
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert ("or {}" if options is ab else "default {}").format(",".join(default) if name == "arms" else default) in told
