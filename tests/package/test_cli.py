"""The command line: what is wrong with it is said before anything slow is imported."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl_prefix import cli
from verl_prefix.tools import arguments
from verl_prefix.tools.ab import options as ab
from verl_prefix.tools.bench import options as bench

MISSING = "is in missing, which is no folder here; write the name of a file in a folder that exists"
ROOT = Path(__file__).resolve().parents[2]
NO_COMMAND = "comes to no python3 -m verl.trainer.main_ppo where no program runs and no file is written; give the words"
WRONG = {
    "": "the following arguments are required: COMMAND; see verl-prefix --help",
    "plans a=1": "invalid choice: 'plans'",
    "doctor --jsn": "unrecognized arguments: --jsn",
    "doctor now": "unrecognized arguments: now",
    "doctor --json=yes": "doctor: argument --json: ignored explicit argument 'yes'",
    "plan missing.sh": "plan: 'missing.sh' is no Hydra override (key=value) and no script that is here",
    "plan file": f"plan: file {NO_COMMAND}",
    "plan --jso a=1": "plan: '--jso' is no Hydra override",
    "plan --turns 1 a=1": "plan: argument --turns: '1': give a number of 2 or more",
    "plan --say 5 a=1": "plan: --say is of sessions of several turns; add --turns 10, or another number",
    "plan --gpu h100,speed=3 a=1": "plan: --gpu 'speed=3': write RATE=NUMBER, one of matmul_16",
    "plan --shares missing.jsonl a=1": "plan: missing.jsonl: no JSON-lines file and no TensorBoard events",
    "plan --shares junk.json a=1": "plan: junk.json, line 1 is not what verl's file logger writes",
    "bench --render junk.json": "bench: --render junk.json is not a report of verl-prefix bench",
    "bench --into file": "bench: --into is for --render",
    "bench --rows 9/4": "bench: argument --rows: '9/4': write P/S/G, numbers above 0",
    "ab --trace file": "ab: --trace file is not a folder; record a trace with",
    "ab --trace a --runs b c": "ab: argument --runs: not allowed with argument --trace",
    "ab --runs junk.json missing.jsonl": "ab: junk.json, line 1 is not what verl's file logger writes",
    "plan --out missing/plan.json a=1": f"plan: argument --out: missing/plan.json {MISSING}",
    "plan --out . a=1": "plan: argument --out: . is a folder; write the name of a file",
    "plan --out /proc/plan.json a=1": "plan: argument --out: /proc/plan.json cannot be written (No such file or",
    "plan --out /dev/null a=1": "plan: argument --out: /dev/null is no plain file",
    "plan --fit 75 a=1": "plan: --fit is for a simulation; add --simulate",
    "plan --simulate --gpu b300 a=1": "plan: --gpu 'b300' is unknown; use one of h100, h200, h20, a100",
    "plan --simulate --fit 0 a=1": "plan: argument --fit: '0': give a number of 0.001 or more",
    "plan --shares gen=0.5 a=1": "plan: --shares 'gen=0.5': write update=0.5",
    "plan --response-lengths many a=1": "plan: --response-lengths 'many': write MEAN, MEAN,STD",
    "plan --response-lengths 0 a=1": "plan: --response-lengths '0': write a mean of at least 1",
    "plan --response-lengths 20,-1 a=1": "a finite spread of at least 0",
    "plan --prompt-lengths": "plan: argument --prompt-lengths: expected one argument",
    "plan bash file": f"plan: file {NO_COMMAND}",
    "plan --cfg job": "plan: '--cfg' is no Hydra override",
    "bench --grid tiny --allow-dirty --out missing/bench.json": f"bench: argument --out: missing/bench.json {MISSING}",
    "bench --grid tiny --allow-dirty --out .": "bench: argument --out: . is a folder",
    "bench --grid tiny --allow-dirty --out /proc/b.json": "bench: argument --out: /proc/b.json cannot be written (",
    "bench --grid tiny --out b.md": "bench: argument --out: b.md does not end in .json, and .md and .png are written "
    "beside it; write b.json",
    "bench --grid tiny --out b": "bench: argument --out: b does not end in .json",
    "bench --grid papers": "bench: argument --grid: invalid choice: 'papers' (choose from",
    "bench --grid tiny --arms stocks": "bench: argument --arms: 'stocks': name each of stock, stock_lean,",
    "bench --grid tiny --shape gpt": "bench: argument --shape: invalid choice: 'gpt' (choose from",
    "bench --grid tiny --layers 0": "bench: argument --layers: '0': give a number of 1 or more",
    "bench --grid tiny --repeats 0": "bench: argument --repeats: '0': give a number of 1 or more",
    "bench --grid tiny --threads 0": "bench: argument --threads: '0': give a number of 1 or more",
    "bench --grid tiny --turns 3 --capacity 2": "bench: --capacity is of rows of one turn; remove it, or --turns",
    "bench --grid tiny --capacity 0": "bench: argument --capacity: '0': give a number of",
    "bench --render missing.json": "bench: --render missing.json is no file here",
    "ab --trace missing": "ab: --trace missing is not a folder",
    "ab --synthetic 9,4,2": "ab: --synthetic P,S,G,N needs --model",
    "ab --synthetic 9,4,1 --model m": "ab: --synthetic with groups of one row",
    "ab --synthetic 9,4,2 --model m --arms fast": "ab: argument --arms: 'fast': name each of auto, packed,",
    "ab --synthetic 9,4,2 --model m --steps 0": "ab: argument --steps: '0': give a number of 1 or more",
    "ab --synthetic 9,4,2 --model m --out file": "ab: argument --out: file cannot be written (Not a directory); name",
    "ab --runs a b --out /proc/x/y": "ab: argument --out: /proc/x/y cannot be written (No such file or directory)",
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


@pytest.fixture
def files(tmp_path) -> Path:
    """A folder with a file that is empty, and one that is JSON of another kind."""
    (tmp_path / "file").touch()
    (tmp_path / "junk.json").write_text("[]\n")
    return tmp_path


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_is_one_line_exit_code_2_and_no_file(files, words, monkeypatch, capsys) -> None:
    monkeypatch.chdir(files)
    try:
        code = cli.main(words.split())
    except SystemExit as error:  # of argparse
        code = error.code
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert code == 2 and line.startswith("verl-prefix") and WRONG[words] in line
    assert captured.out == "" and sorted(path.name for path in files.iterdir()) == ["file", "junk.json"]


def test_wrong_words_are_said_before_anything_slow_is_imported(files) -> None:
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(
        command, input="\n".join(WRONG), cwd=files, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


NO_VERL = "verl is not installed here: run pip install . in a clone of this package\n"


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        ("doctor", 1, f"FAIL {NO_VERL}", ""),
        ("plan a=1", 2, "", f"verl-prefix plan: {NO_VERL}"),
        ("plan --simulate --json python3 -m verl.trainer.main_ppo a=1", 2, "", f"verl-prefix plan: {NO_VERL}"),
        ("ab --trace .", 2, "", f"verl-prefix ab: {NO_VERL}"),
        ("ab --synthetic 9,4,2 --model m", 2, "", f"verl-prefix ab: {NO_VERL}"),
        ("ab --runs junk.json file", 2, "", f"verl-prefix ab: {NO_VERL}"),
        ("bench --grid tiny", 2, "", "verl-prefix bench: torch is not installed here: pip install torch\n"),
    ],
)
def test_where_verl_is_not_installed_one_line_says_what_installs_it(files, tmp_path, words, code, out, err) -> None:
    """Python without its packages (-S) has none but its own. A clone where a wheel was built has its metadata."""
    command = [sys.executable, "-S", "-m", "verl_prefix.cli", *words.split()]
    (tmp_path / "verl_prefix").symlink_to(ROOT / "verl_prefix")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=files, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)
    if words == "doctor":
        done = subprocess.run(
            [*command, "--json"], env=env, cwd=files, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 1 and json.loads(done.stdout)["verdict"] == NO_VERL.strip()


def test_where_a_wheel_is_installed_without_verl_no_clone_is_asked_for(tmp_path) -> None:
    (tmp_path / "verl_prefix-0.1.0.dist-info").mkdir()
    (tmp_path / "verl_prefix-0.1.0.dist-info" / "METADATA").write_text("Name: verl-prefix\nVersion: 0.1.0\n")
    command = [sys.executable, "-S", "-m", "verl_prefix.cli", "plan", "a=1"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    advice = "run pip install verl==0.9.1; verl-prefix doctor then names what else is missing"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"verl-prefix plan: verl is not installed here: {advice}\n"


def test_no_bytes_of_a_file_that_is_no_report_are_shown(files, capsys) -> None:
    (files / "picture.json").write_bytes(b"\x89PNG" * 999)
    assert cli.main(["bench", "--render", str(files / "picture.json")]) == 2
    assert len(capsys.readouterr().err) < 300


def test_a_variable_that_is_empty_is_no_command(capsys) -> None:
    assert cli.main(["plan", " "]) == 2 and capsys.readouterr().err.startswith("usage: verl-prefix plan ")


def test_no_command_of_the_repository_takes_half_an_option() -> None:
    for path in [*ROOT.glob("verl_prefix/**/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("recipes/**/*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("argparse.ArgumentParser", "super().__init__"):
                given = {word.arg: ast.unparse(word.value) for word in call.keywords}
                if ast.unparse(call.func) != "super().__init__" or "formatter_class" in given:
                    assert given.get("allow_abbrev") == "False", path


def test_every_report_is_known_to_be_writable_before_it_is_made() -> None:
    """By a reader of `arguments`, of each option that names what is written; a default is read if it is text."""
    found = []
    for path in [ROOT / "verl_prefix/cli.py", *ROOT.glob("examples/*.py")]:
        text = path.read_text()
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and re.match(r"(\w+\.add_argument|add)\('(--)?out(put)?'", ast.unparse(call)):
                given = {word.arg: ast.unparse(word.value) for word in call.keywords}
                assert "_to_write" in given["type"] or given["type"] == "_free", path  # demo.py's; it is run below
                assert "out.with_suffix" not in text or given["type"] == "json_to_write", path  # or it replaces itself
                assert given.get("default", "str(").startswith(("str(", "'")), path
                found.append(path.name)
    assert len(found) >= 10, found


@pytest.mark.parametrize("place", ["/proc/x", "file/x"])
@pytest.mark.parametrize(
    ("words", "variable", "said"),
    [
        ("demo.py --output", "", ": argument --output: {} cannot be written ("),
        ("learn.py --output", "", ": argument --output: {} cannot be written ("),
        ("ab_grpo.sh plan", "OUT", "OUT={} cannot be written: set OUT to a folder"),
        ("bench_gpu.sh", "RESULTS", "{} cannot be written: set RESULTS and OUT to folders"),
    ],
)
def test_an_example_says_in_one_line_that_it_cannot_write(files, python, words, variable, said, place) -> None:
    place, (name, *rest) = str(files / place), words.split()
    command = ["bash" if variable else python, ROOT / "examples" / name, *rest, *[place] * (not variable)]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | ({variable: place} if variable else {})
    done = subprocess.run(command, env=env, cwd=files, capture_output=True, text=True, timeout=300, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and said.format(place) in line and done.stdout == ""
    assert sorted(path.name for path in files.iterdir()) == ["file", "junk.json"]


@pytest.mark.parametrize(("model", "there"), [("model", "{}/model"), ("someone/model", "someone/model")])
def test_a_relative_folder_of_a_model_is_the_callers(tmp_path, model, there) -> None:
    """MOCK: a Python that prints the words of the last command, and does nothing else."""
    (tmp_path / "model").mkdir()
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$2" != verl_prefix.cli ] || printf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    env = os.environ | dict(PYTHON=str(tmp_path / "python"), MODEL=model, DATA="questions.jsonl", OUT="out")
    command = ["bash", ROOT / "examples/ab_grpo.sh", "plan"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert f"actor_rollout_ref.model.path={there.format(tmp_path)}" in done.stdout.splitlines()


def test_an_example_costs_what_its_page_says_and_its_threads_do_not_spin() -> None:
    page = (ROOT / "examples/README.md").read_text()
    known = []
    for path in ROOT.glob("examples/*.py"):
        before, _, text = path.read_text().partition("\nimport torch\n")
        if cost := re.search(r'^COST = "About (.+?) on two', text, re.M):
            assert re.search(rf"^\| `{path.name}` \| .+ \| {cost[1]} \|$", page, re.M), path
            assert 'os.environ.setdefault("OMP_WAIT_POLICY", "passive")' in before, path
            known.append(path)
    assert len(known) == 3


def test_what_can_be_written_is_not_made_yet(tmp_path) -> None:
    for read, place in (
        (arguments.folder_to_write, tmp_path / "a" / "b"), (arguments.file_to_write, tmp_path / "a"),
        (arguments.json_to_write, tmp_path / "a.json"),
    ):  # fmt: skip
        assert read(str(place)) == place and not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["", "doctor", "plan", "ab", "bench"])
def test_every_help_has_examples_and_exit_codes(command, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main([*command.split(), "--help"])
    told = capsys.readouterr().out
    assert error.value.code == 0 and "\nexamples:\n  verl-prefix " in told and "\nexit codes: 0 " in told


WARNS = "eval(compile('import warnings; warnings.warn(\"engine is not available\")', '', 'exec'), {'__name__': %r})"


@pytest.mark.parametrize(
    "inner",
    [WARNS % "verl.workers.engine", pytest.param("import verl.workers.engine", marks=pytest.mark.more)],
    ids=["MOCK", "verl"],
)
def test_verls_missing_engines_are_no_news_in_a_rank(python: str, inner: str) -> None:
    """In a process that a command starts, as `ab` does its ranks; seven seconds where that imports verl."""
    inner = [sys.executable, "-c", inner]
    code = f"import subprocess; from verl_prefix import cli; cli._quieten_verl(); subprocess.run({inner})"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    command = [python, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=env)
    assert "engine is not available" not in done.stderr


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
