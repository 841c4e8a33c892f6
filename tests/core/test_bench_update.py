"""examples/bench_update.py at tiny size: what it reports, and that its arms and its FLOP count are what they claim."""

import ast
import json
from pathlib import Path
from types import ModuleType

import pytest
from torch.utils.flop_counter import FlopCounterMode

import verl_prefix.testing

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZE = (
    "--device cpu --prefix 37 --suffix 11 --group 3 --groups-count 2 --hidden 64 --layers 2 --heads 4 --kv-heads 2 "
    "--vocab 997 --threads 1 --repeats 2"
).split()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import bench_update

    return bench_update


def test_report_has_time_error_and_ceiling_of_every_arm(bench: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert bench.main([*SIZE, "--arms", "stock,packed", "--no-memory", "--allow-dirty", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["schema"] == "verl_prefix.bench_update/1"
    assert report["truth"] == "stock in float64"
    assert {"commit", "dirty", "created", "device", "versions", "config"} <= set(report)
    assert list(report["arms"]) == ["stock", "packed"]
    for arm in report["arms"].values():
        assert len(arm["seconds"]) == 2
        assert 0 < arm["grad_error"] < 5e-6
        assert arm["of_ceiling"] == pytest.approx(arm["speedup"] / arm["ceiling"])
    assert report["arms"]["packed"]["baseline"] == "stock"
    assert report["arms"]["packed"]["ceiling"] > 1.5


def test_added_memory_holds_the_logits_at_least(bench: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    # G=3 times S=11 tokens: 33 x 20000 fp32 logits and their gradients.
    argv = ["--arms", "packed", "--vocab", "20000", "--truth", "stock", "--repeats", "1"]
    assert bench.main([*SIZE, *argv, "--allow-dirty", "--out", str(out)]) == 0
    added = json.loads(out.read_text())["arms"]["packed"]["added_peak_mib"]
    assert 2 * 33 * 20000 * 4 / 2**20 < added < 60


def test_needs_neither_verl_nor_ray() -> None:
    # tests/core/test_borders.py holds the same of all that verl_prefix.testing imports.
    for path in (EXAMPLES / "bench_update.py", Path(verl_prefix.testing.__file__)):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        assert "torch" in names
        assert not {"verl", "ray", "hydra", "omegaconf", "tensordict"} & {name.split(".")[0] for name in names}


@pytest.mark.parametrize("change", [[], ["--logits-chunk", "5"], ["--wave-rows", "1"]], ids=" ".join)
def test_every_arm_has_the_gradients_of_stock(bench: ModuleType, change: list[str]) -> None:
    options = bench.parse([*SIZE, *change])
    model, batch = bench.build_model(options), bench.build_batch(options)
    bench.run_stock(model, batch, rows_per_pass=1, logits_chunk=4096)
    truth = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for arm in options.arms:
        bench.run_arm(model, arm, batch, options)
        assert bench.gradient_error(model, truth) < 5e-6, arm
    model.zero_grad(set_to_none=False)
    bench.run_stock(model, batch, rows_per_pass=4, logits_chunk=options.logits_chunk)
    assert bench.gradient_error(model, truth) < 5e-6
    model.lm_head.weight.grad[0] += 1e-3
    assert bench.gradient_error(model, truth) > 1e-4


@pytest.mark.parametrize("arm", ["stock", "stock_lean", "packed"])
def test_flops_are_those_of_the_matmuls_that_run(bench: ModuleType, arm: str) -> None:
    options = bench.parse(SIZE)
    model, batch = bench.build_model(options), bench.build_batch(options)
    with FlopCounterMode(display=False) as counter:
        bench.run_arm(model, arm, batch, options)
    # torch does not count the CPU attention kernels: query-key pairs of P=37, S=11, G=3 and two groups by hand.
    whole, shared = 3 * 49 * 50 / 2, 37 * 38 / 2 + 3 * (11 * 37 + 11 * 12 / 2)
    pairs = shared if arm == "packed" else whole
    attention = 2 * 3 * 2 * 4 * 64 * pairs
    # Rotary angles are a small matmul too, which the model leaves out.
    assert bench.update_flops(model, arm, options) == pytest.approx(counter.get_total_flops() + attention, rel=1e-4)


def test_dirty_tree_writes_no_report(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "git_state", lambda: {"commit": "0" * 40, "dirty": True})
    assert bench.main([*SIZE, "--out", str(tmp_path / "report.json")]) == 2
    assert "--allow-dirty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "argv", [["--arms", "stocks"], ["--arms", "stock_packed"], ["--prefix", "0"], ["--out", "missing/report.json"]]
)
def test_wrong_options_say_what_to_type(bench: ModuleType, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse([*SIZE, *argv])
    assert argv[0] in capsys.readouterr().err.splitlines()[-1]


def test_gate_bench_predicts_and_measures_each_row(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bench_gate

    monkeypatch.setattr(bench_gate, "ROWS", ((60, 5, 4), (3, 20, 2)))
    out = tmp_path / "gate.json"
    assert bench_gate.main([*SIZE, "--allow-dirty", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["schema"] == "verl_prefix.bench_gate/1" and "commit" in report
    for row in report["rows"]:
        assert row["predicted"] > 0 and len(row["seconds"]["ours"]) == 2
        assert (row["choice"] == "stock") == (row["predicted"] < 1.05)
