"""`verl-prefix bench` at tiny size: its arms compute what they claim, and its report says what was measured."""

import copy
import errno
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from verl_prefix import cli, files, versions
from verl_prefix.auto.shape import model_shape
from verl_prefix.models.hookup import ATTENTION_NAME
from verl_prefix.tools import report as tools_report
from verl_prefix.tools.bench import arms, measure, memory, report
from verl_prefix.tools.bench.options import ARMS, SHAPES, Options, Size, build_model, full_depth, unavailable

ROOT = Path(__file__).resolve().parents[2]
SIZE = Size(37, 11, 5)
RUNNING = [arm for arm in ARMS if arm != "auto" and not unavailable(arm, "tiny")]
# Everything in one pass; a group in several pieces or waves, and more than one chunk of logits; one row at a time.
BUDGETS = [(10**6, 4096), (110, 7), (50, 5)]
Truth = tuple[torch.nn.Module, arms.Batch, dict[str, torch.Tensor], float]
COMMAND = "bench --shape tiny --device cpu --threads 1 --repeats 1 --no-memory --allow-dirty".split()


@pytest.fixture(autouse=True)
def no_more_rounds_than_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(measure, "QUICK_S", 0.0)


def build_truth() -> Truth:
    """A fp32 model, a batch, and the gradients and loss of a float64 copy in HF's own forward, row by row."""
    model, batch = build_model("tiny", 2, "cpu", torch.float32), arms.build_batch(SIZE, 997, "cpu")
    wide = copy.deepcopy(model).double()
    loss = 0.0
    for row in range(SIZE.group):
        place = torch.arange(row * SIZE.row, (row + 1) * SIZE.row)
        logits = wide(input_ids=batch.tokens.input_ids[place][None], use_cache=False).logits[0]
        kept = slice(SIZE.prefix, SIZE.row - 1)
        chosen = logits[kept].log_softmax(-1).gather(-1, batch.tokens.input_ids[place[kept] + 1, None])[:, 0]
        row_loss = (chosen * batch.weights[place[kept] + 1]).sum()
        row_loss.backward()
        loss += row_loss.item()
    return model, batch, {name: p.grad for name, p in wide.named_parameters()}, loss


truth = pytest.fixture(scope="module")(build_truth)
TURNS = Size(37, 8, 3, turns=4, thinking=6, tool=5)


@pytest.mark.parametrize("budget", [10**6, 110])
def test_rows_of_turns_have_the_gradients_of_stock_and_share_by_prompts_or_trees(budget: int) -> None:
    model, batch = build_model("tiny", 2, "cpu", torch.float32), arms.build_batch(TURNS, 997, "cpu")
    shape = model_shape(model, torch.float32)
    lens = [37 + 1 + 7 * turn + 8 for _ in range(3) for turn in range(4)]
    assert [b - a for a, b in pairwise(batch.tokens.offsets)] == lens and max(lens) == TURNS.row
    wide = copy.deepcopy(model).double()
    arms.run_arm(arms.Case(wide, batch, budget), "stock_lean", attention="sdpa")
    grads = {name: p.grad for name, p in wide.named_parameters()}
    tokens, flops = {}, {}
    for arm in ("stock", "stock_lean", "one_level", "packed", "phased"):
        arms.run_arm(arms.Case(model, batch, budget), arm)
        assert measure.gradient_error(model, grads) < 5e-6, arm
        tokens[arm] = sum(p.tokens for p in measure.arm_passes(shape, batch, arm, budget))
        flops[arm] = measure.update_flops(shape, TURNS, arm, budget)
    assert tokens["stock"] == sum(lens) and tokens["packed"] < tokens["one_level"] < tokens["stock"]
    assert flops["packed"] < flops["one_level"] < flops["stock_lean"] < flops["stock"]
    if budget == 10**6:  # turns 2 to 4 of a session begin with each other, and every row has a response
        assert tokens["packed"] == 37 + 3 * (3 * 7 + 4 * 8) and tokens["one_level"] == sum(lens) - 12 - 2 * 37
        for arm, ideal in (("packed", "ideal"), ("one_level", "ideal_one_level")):  # whose last layer runs whole
            skipped = sum(p.skipped for p in measure.arm_passes(shape, batch, arm, budget))
            assert skipped >= 37
            whole = flops[arm] + 3 * skipped * shape.last
            assert whole == measure.update_flops(shape, TURNS, ideal, budget), arm


@pytest.mark.parametrize(("budget", "chunk"), BUDGETS)
@pytest.mark.parametrize("arm", RUNNING)
def test_every_arm_has_the_gradients_and_log_probs_of_stock(truth, arm: str, budget: int, chunk: int) -> None:
    model, batch, grads, loss = truth
    job = arms.Case(model, batch, budget, chunk)
    done = arms.run_arm(job, arm)
    assert measure.gradient_error(model, grads) < 5e-6
    assert done.loss == pytest.approx(loss, rel=5e-6)
    assert 0 < done.forward < done.seconds
    assert arms.run_arm(job, arm, train=False).loss == pytest.approx(loss, rel=5e-6)
    # The same error is found where there is one.
    model.lm_head.weight.grad[0] += 1e-3
    assert measure.gradient_error(model, grads) > 1e-4
    model.lm_head.weight.grad[0] = math.nan  # of the last parameter, which a maximum would lose
    assert measure.gradient_error(model, grads) == math.inf


@pytest.mark.parametrize("arm", ["stock", "stock_lean"])
def test_stock_on_a_varlen_kernel_is_stock(truth, arm: str) -> None:
    model, batch, grads, _ = truth
    for budget in (10**6, 110):
        arms.run_arm(arms.Case(model, batch, budget), arm, attention=ATTENTION_NAME)
        assert measure.gradient_error(model, grads) < 5e-6


@pytest.mark.parametrize("arm", ["stock", "stock_lean", "prefix_grouper", "packed", "stock+checkpoint"])
@pytest.mark.parametrize("budget", [10**6, 110])
def test_flops_are_those_of_the_matmuls_that_run(truth, arm: str, budget: int) -> None:
    if arm == "prefix_grouper":
        pytest.importorskip("prefix_grouper")
    model, batch, _, _ = truth
    arms.run_arm(arms.Case(model, batch, budget), arm)  # what is cached must not be made under the counter
    with FlopCounterMode(display=False) as counter:
        arms.run_arm(arms.Case(model, batch, budget), arm)
    # torch does not count the CPU attention kernels: query-key pairs of P=37, S=11, G=5 by hand; 110 tokens hold 6 rows
    # of a group, or 2 whole ones.
    whole, shared = 5 * 49 * 50 / 2, 37 * 38 / 2 + 5 * (11 * 37 + 11 * 12 / 2)
    pairs = shared if arm in ("packed", "prefix_grouper") else whole
    attention = (4 if "checkpoint" in arm else 3) * 2 * 4 * 64 * pairs
    # Rotary angles are a small matmul too, which the model leaves out.
    found = measure.update_flops(model_shape(model, torch.float32), SIZE, arm, budget)
    if arm == "stock+checkpoint":  # torch stops running a layer again before its last matmul
        found -= 2 * 2 * 192 * 64 * 5 * SIZE.row
    if arm == "prefix_grouper":  # its suffix reads the last prompt token as a key, not as a query
        assert found == pytest.approx(counter.get_total_flops() + attention, rel=1e-2)
    else:
        assert found == pytest.approx(counter.get_total_flops() + attention, rel=1e-4)


def test_flops_of_a_split_group_count_its_prefix_again() -> None:
    shape = model_shape(build_model("tiny", 2, "cpu", torch.float32), torch.float32)
    once = measure.update_flops(shape, SIZE, "packed", 10**6)
    pieces = [measure.update_flops(shape, SIZE._replace(group=rows), "packed", 10**6) for rows in (2, 2, 1)]
    assert measure.update_flops(shape, SIZE, "packed", 60) == pytest.approx(sum(pieces))
    assert measure.update_flops(shape, SIZE, "phased", 60) == pytest.approx(once)
    whole = once + 3 * SIZE.prefix * shape.last  # whose last layer runs whole
    assert measure.update_flops(shape, SIZE, "ideal", 60) == pytest.approx(whole)


# The published number of parameters, in millions.
@pytest.mark.parametrize(
    ("shape", "millions"),
    [("smollm2-135m", 134.5), ("qwen3-0.6b", 596.0), ("qwen3-4b", 4022.5), ("qwen3-8b", 8190.7), ("llama3-8b", 8030.3)],
)
def test_shapes_are_the_published_ones(shape: str, millions: float) -> None:
    model = build_model(shape, full_depth(shape), "meta", torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_report_has_time_error_and_ceiling_of_every_arm(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert cli.main([*COMMAND, "--grid", "tiny", "--layers", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["schema"] == "verl_prefix.bench/3"
    assert {"git", "created", "device", "versions", "config"} <= set(found)
    assert set(found["cannot_run"]) == set(ARMS) - set(RUNNING) - {"auto"}
    assert [(row["layers"], row["prefix"]) for row in found["rows"]] == [(1, 37), (1, 20)]
    for row in found["rows"]:
        assert set(RUNNING) <= set(row["arms"])
        assert row["auto"]["predicted"] > 0 and row["auto"]["choice"] in ("stock", "packed", "phased")
        assert row["budget"] == 2 * (row["prefix"] + 1 + row["suffix"])
        assert (row["auto"]["same_as"] or "auto") in row["arms"]
        for name, arm in row["arms"].items():
            assert 0 < arm["grad_error"] < 5e-6
            assert 0 < arm["update"]["p20"] <= arm["update"]["p50"] <= arm["update"]["p80"]
            assert arm["forward"]["p50"] < arm["update"]["p50"]  # round by round a part of it
            assert ("log_probs" in arm) == ("+" not in name)
            stock = row["arms"]["stock+checkpoint" if "+checkpoint" in name else "stock"]
            assert arm["speedup"] == pytest.approx(stock["update"]["p50"] / arm["update"]["p50"])
        assert row["arms"]["packed"]["ceiling"] > 1.3
        assert row["arms"]["packed"]["of_ceiling"] == pytest.approx(
            row["arms"]["packed"]["speedup"] / row["arms"]["packed"]["ceiling"]
        )
    text = out.with_suffix(".md").read_text()
    assert "with random weights, 1 of 2 layers. " in text
    assert "Never below 0.97 of stock with auto" in text
    if "matplotlib" in sys.modules:
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_report_of_turns_has_tokens_and_flop_ratios(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [*COMMAND, *"--arms stock,one_level,packed,phased --rows 9/4/2 --turns 3 --out".split(), str(out)]
    assert cli.main(command) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert [row[key] for key in Size._fields] == [9, 4, 2, 3, 3, 4]
    for name, arm in row["arms"].items():
        if name != "stock":
            assert arm["of_ceiling"] == pytest.approx(arm["speedup"] / arm["ceiling"])
    ceilings = {name: arm.get("ceiling", 1.0) for name, arm in row["arms"].items()}
    assert 1 < ceilings["one_level"] < ceilings["packed"] == ceilings["phased"]
    text = out.with_suffix(".md").read_text()
    assert "| FLOP ratio | tokens |" in text and "| 9/4/2 x 3 turns | stock |" in text


def test_an_unfinished_report_is_continued_and_another_run_is_refused(tmp_path: Path, capsys) -> None:
    out = tmp_path / "bench.json"
    command = [*COMMAND, "--arms", "stock,packed", "--out", str(out), "--rows"]
    assert cli.main([*command, "9/4/2"]) == 0
    first = json.loads(out.read_text())["rows"]
    assert cli.main([*command, "9/4/2", "5/6/2"]) == 0
    both = json.loads(out.read_text())["rows"]
    assert both[0] == first[0]  # to the last digit: it was not measured again
    assert [row["prefix"] for row in both] == [9, 5]
    assert cli.main([*command, "9/4/2", "--truth", "none"]) == 2
    assert "is of another run: its config" in capsys.readouterr().err
    out.write_text("{")
    assert cli.main([*command, "9/4/2"]) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_a_full_disk_leaves_the_old_report_and_the_table_is_printed(tmp_path: Path, monkeypatch, capsys) -> None:
    command = [*COMMAND, "--arms", "stock", "--out", str(tmp_path / "bench.json"), "--rows", "9/4/2"]
    assert cli.main(command) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    assert cli.main([*command, "5/6/2"]) == 2
    printed = capsys.readouterr()
    assert "│ 5/6/2 │ stock │" in printed.out and "| --- |" not in printed.out
    assert "No space left on device" in printed.err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_of_two_writers_each_writes_a_whole_file_and_nothing_is_left_beside_it(tmp_path: Path, monkeypatch) -> None:
    """The second writes, start to end, while the first one waits for its disk; the third is interrupted there."""
    path, fsync = tmp_path / "report.json", files.os.fsync

    def meanwhile(_: int) -> None:
        monkeypatch.setattr(files.os, "fsync", fsync)
        files.write_whole(path, "second")
        assert path.read_text() == "second"

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", meanwhile)
    files.write_whole(path, "first")
    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_whole(path, "third")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_dirty_tree_writes_no_report(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tools_report, "git_state", lambda: {"commit": "0" * 40, "dirty": True})
    command = [word for word in COMMAND if word != "--allow-dirty"]
    assert cli.main([*command, "--grid", "tiny", "--out", str(tmp_path / "bench.json")]) == 2
    assert "--allow-dirty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--arms prefix_grouper --grid tiny --shape small-hybrid", "none of --arms prefix_grouper can run: it shares"),
        ("--grid tiny --layers 99", "--layers 99: tiny has 2; give at most that, or another --shape"),
        ("", "nothing to measure: give --grid cpu"),
        ("--rows 9/4/2 --tool 3", "--thinking and --tool are of sessions of several turns; add --turns 6"),
        ("--rows 9/4/2 --turns 2 --thinking 5", "--thinking 5: a response has 4 tokens (S); give at most that"),
        ("--rows 9/4/2 --arms one_level", "none of --arms one_level can run: rows of one turn have one level"),
    ],
)
def test_wrong_options_say_what_to_type(words: str, says: str, capsys) -> None:
    assert cli.main([*COMMAND, *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verl-prefix bench: ") and says in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *((f"--rows {row}", f"--rows: '{row}': write P/S/G") for row in ("1/2", "0/4/2", "1/2/3/4", "a/b/c", "1/-2/3")),
        *((f"--layers {layers}", f"--layers: '{layers}': give a number of 1 or more") for layers in ("x", "1,2")),
        ("--arms stock,flex", "--arms: 'stock,flex': name each of stock, stock_lean,"),
        ("--capacity nan", "--capacity: 'nan': give a number of"),
        ("--truth half", "--truth: invalid choice"),
    ],
)
def test_words_that_are_no_numbers_are_one_line(words: str, says: str, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main([*COMMAND, *words.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and says in line and line.endswith("see verl-prefix bench --help")


def test_every_grid_row_can_be_asked_for() -> None:
    for name in report.GRIDS:
        sizes = [Size(*row) for row in report.grid([name])]
        assert sizes and all(min(size[:3]) > 0 for size in sizes)
    assert len(report.grid(["cpu", "cpu"])) == len(report.GRIDS["cpu"])
    assert Options((SIZE, Size(1, 2, 3), SIZE), device="cpu").sizes == (SIZE, Size(1, 2, 3))


@pytest.mark.more
def test_a_fresh_process_measures_memory() -> None:
    options = Options((SIZE,), shape="tiny", device="cpu", threads=1)
    small, large = (
        memory.in_fresh_process(memory.added_peak, options, "stock", Size(37, length, 2))["added_peak_mib"]
        for length in (11, 1100)
    )
    # 1138 tokens: logits of one row in fp32, and their gradients.
    assert large - max(small, 0) > 2 * 1138 * 997 * 4 / 2**20


@pytest.mark.parametrize(
    ("limit", "longest"), [(0, 0), (511, 0), (512, 512), (3000, 2560), (17920, 17920), (10**9, 4096)]
)
def test_capacity_search_finds_the_boundary(limit: int, longest: int) -> None:
    asked = []

    def trains(total: int) -> bool:
        asked.append(total)
        return total <= limit

    most = 4096 if limit == 10**9 else 1 << 19
    assert memory.longest_total(trains, most=most) == longest
    assert len(asked) == len(set(asked)) <= 20


def test_capacity_counts_model_gradients_and_what_an_update_adds(monkeypatch) -> None:
    options = replace(Options((SIZE,), shape="tiny", device="cpu", threads=1), capacity=20 / 1024)
    monkeypatch.setattr(
        memory, "in_fresh_process", lambda function, options, arm, size: {"added_peak_mib": size.row / 100}
    )
    weights = 2 * sum(p.numel() * 4 for p in build_model("tiny", 2, "meta", torch.float32).parameters()) / 2**20
    longest = memory.capacity(options, "packed", SIZE, options.model())
    assert longest / 100 <= 20 - weights < (longest + memory.CAPACITY_STEP) / 100


def test_runs_where_nothing_but_torch_and_transformers_is_installed(fresh) -> None:
    """The command's imports, with verl, ray and the like made impossible."""
    code = (
        "import sys\n"
        "for name in ('verl', 'ray', 'hydra', 'omegaconf', 'tensordict', 'rich', 'matplotlib', 'prefix_grouper'):\n"
        "    sys.modules[name] = None\n"
        "from verl_prefix import cli\n"
        "from verl_prefix.tools.bench import measure\n"
        "measure.QUICK_S = 0.0\n"
        f"sys.exit(cli.main({[*COMMAND, '--rows', '9/4/2', '--arms', 'stock,auto,packed']!r}))\n"
    )
    done = fresh(code, ROOT, dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert re.search(r"\| 9/4/2 \| stock( \(auto's choice\))? \|", done.stdout), done.stdout  # by measured rates


def test_a_report_without_a_plot_says_what_to_install(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "bench.json"
    assert cli.main([*COMMAND, "--rows", "9/4/2", "--arms", "stock", "--out", str(out)]) == 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]


def test_the_page_of_results_shows_the_committed_ones() -> None:
    source, words = ROOT / "examples/results/bench_cpu.json", (ROOT / "examples/results/README.md").read_text()
    start, end = report.MARKS
    shown = words.split(start)[1].split(end)[0].strip()
    found = json.loads(source.read_text())
    assert found["git"]["dirty"] is False
    assert shown == report.markdown(report.blocks(found))


def test_render_replaces_what_is_between_the_marks(tmp_path: Path, capsys) -> None:
    out, page = tmp_path / "bench.json", tmp_path / "page.md"
    assert cli.main([*COMMAND, "--arms", "stock,packed", "--rows", "9/4/2", "--out", str(out)]) == 0
    before = out.with_suffix(".md").read_text()
    page.write_text(f"above\n{report.MARKS[0]}\nold\n{report.MARKS[1]}\nbelow\n")
    assert cli.main(["bench", "--render", str(out), "--into", str(page)]) == 0
    assert out.with_suffix(".md").read_text() == before
    assert page.read_text() == f"above\n{report.MARKS[0]}\n{before.strip()}\n{report.MARKS[1]}\nbelow\n"
    page.write_text("no marks")
    assert cli.main(["bench", "--render", str(out), "--into", str(page)]) == 2
    assert report.MARKS[0] in capsys.readouterr().err


def test_the_gpu_script_runs_its_jobs_and_goes_on(tmp_path: Path, python: str) -> None:
    """Tiny model and rows on a CPU; the second call finds the first one's job done."""
    results, out = tmp_path / "results", tmp_path / "out"
    out.mkdir()
    once = tmp_path / "python"  # runs `-m verl_prefix.cli WORDS` with no more rounds than asked for
    code = "import sys; from verl_prefix import cli; from verl_prefix.tools.bench import measure; measure.QUICK_S = 0.0"
    once.write_text(f'#!/bin/sh\nshift 2\nexec "{python}" -c "{code}; sys.exit(cli.main())" "$@"\n')
    once.chmod(0o755)
    command = ["bash", ROOT / "examples/bench_gpu.sh"]
    settings = dict(DRY_RUN="1", JOBS="llama", RESULTS=str(results), OUT=str(out), PYTHON=str(once))
    environment = os.environ | settings
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "== llama" in done.stdout and "== small" not in done.stdout
    found = json.loads((out / "llama.json").read_text())
    assert [(row["layers"], row["group"]) for row in found["rows"]] == [(2, 2), (2, 5)]
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and "== llama" not in again.stdout


def test_the_gpu_script_asks_for_what_there_is() -> None:
    """Every job's options are valid, which DRY_RUN shows of the first alone."""
    text = (ROOT / "examples/bench_gpu.sh").read_text().replace("\\\n", " ")
    names = {name: text.split(f"\n{name}=")[1].splitlines()[0] for name in ("ALL", "FEW")}
    for name, value in names.items():
        text = text.replace(f"${name}", value)
    jobs = [line.split()[2:] for line in text.splitlines() if line.startswith("job ")]
    assert len(jobs) == 8 and {job[1] for job in jobs} == {"qwen3-8b", "qwen3-4b", "llama3-8b"}
    for job in jobs:
        words = dict(zip(job, job[1:], strict=False))
        assert words["--shape"] in SHAPES
        assert set(words["--arms"].split(",")) <= set(ARMS)
        grids = [name for option, name in zip(job, job[1:], strict=False) if option == "--grid"]
        assert report.grid(grids) or "--rows" in job


@pytest.mark.parametrize("known", [True, False])
def test_a_copy_without_git_has_the_commit_it_was_told(known: bool, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "verl_prefix" / "versions.py"))
    monkeypatch.delenv(versions.COMMIT, raising=False)
    if known:
        monkeypatch.setenv(versions.COMMIT, "a" * 40)
    expected = {"commit": "a" * 40, "dirty": False} if known else {"commit": None, "dirty": True}
    assert versions.git_state() == expected
