"""Small changes of the code that computes, one at a time: who sees that results are wrong?

    python tests/studies/mutants.py --out outputs/mutants.json --count 300
    python tests/studies/mutants.py --out outputs/mutants.json --ask
    python tests/studies/mutants.py --out examples/results/mutants_cpu.json --sum outputs/mutants.json

A mutant has one comparison, number, sign, condition or statement changed. It runs batches of several kinds through a
prefix engine (gloo ranks, fp32), which stock's stored results judge as `make fuzz` does. Where they are wrong, the
self-check of a first update is asked, in fp32 and in bf16. Each runs in a process of its own. `--ask` then asks
`TESTS` about each mutant that no batch showed, up to the first test that fails. A mutant that changes nothing gets the
reason by hand, as `why` in the JSON file. `--sum` writes the counts of one or several such files, for the repository.
"""

import argparse
import ast
import functools
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
CORE = (
    "attention", "call_builder", "calls", "group_parts", "groups", "packed_row", "nesting", "offload", "shelf",
    "plan", "planning", "prefix_cache", "context", "prefix_source", "recurrence", "runner", "runs", "split_group",
    "states", "stretches", "trees",
)  # fmt: skip
ALONE = [f"core/{name}.py" for name in CORE] + [
    "models/hookup.py", "models/recurrent.py", "models/replaced.py", "models/vision.py", "models/verls_vision.py",
    "engine/rows.py", "engine/grouping.py", "engine/outputs.py", "engine/row_outputs.py", "engine/pass_results.py",
    "engine/loss.py", "engine/dead_rows.py",
    "core/forward.py", "core/kernels/cpu.py",
]  # fmt: skip
TOGETHER = [
    *(f"engine/travel/{name}.py" for name in ("exchange", "moves", "row_table", "session_pieces", "row_bytes")),
    "auto/placement.py",
]
SECONDS = 300  # that a mutant has; one that hangs is seen
RELOADED = tuple(f"verl_prefix.{name}" for name in ("core", "models", "engine", "auto", "api"))
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Div: ast.Mult, ast.And: ast.Or,
    ast.Or: ast.And, ast.BitXor: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


# hypothesis reports what fails at once, and not the smallest example.
FIRST_FAILURE = """
import hypothesis

hypothesis.settings.register_profile("first failure", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
hypothesis.settings.load_profile("first failure")
"""

# Tests that are asked about a mutant of a file or a room, the first that its name begins with.
NESTING = "tests/core/test_nesting.py"
ROWS = f"tests/core/test_packed_row.py tests/core/test_trees.py {NESTING}"
COST = "tests/auto/test_cost.py::test_"
CUT = (
    "tests/core/test_trees.py::test_a_tree_is_cut_where_the_fewest_tokens_are_computed "
    "tests/core/test_trees.py::test_a_prompt_is_cut_behind_as_many_rows_as_fit"
)
FAMILIES = "tests/models/test_families.py::test_"
VERIFY = "tests/engine/test_verify.py"
DUMMIES = f"{FAMILIES}dummies_of_a_rank_without_rows_give_every_parameter_a_gradient_of_zero"
TESTS = {
    "auto/placement": "tests/auto/test_placement.py",
    "core/call": "tests/core/test_kernels.py tests/core/test_flash_attn_package.py tests/core/test_packed_row.py",
    "core/kernels": "tests/core/test_kernels.py",
    "core/attention": "tests/core/test_kernels.py tests/core/test_runner.py tests/core/test_fused_merge.py "
    f"tests/models/test_frozen.py {FAMILIES}a_model_that_bypasses_the_attention_interface_is_noticed {VERIFY} "
    "tests/engine/test_sequence_parallel.py",
    "core/recurrence": f"{FAMILIES}one_long_response_pads_no_short_one {FAMILIES}family_equals_hf {VERIFY} "
    "tests/models/test_recurrent_packages.py",
    "core/states": f"tests/core/test_trees.py {FAMILIES}family_equals_hf {VERIFY}",
    "core/runner": "tests/core/test_runner.py tests/core/test_lifetime.py tests/core/test_offload.py "
    f"{DUMMIES} tests/engine/test_engine_equivalence.py::test_lm_head_runs_where_the_loss_reads_alone",
    "core/trees": "tests/core/test_trees.py", "core/nesting": NESTING, "core/stretches": NESTING,
    "core/plan.py": ROWS, "core/group": ROWS, "core/runs": ROWS, "core/prefix_source": ROWS,
    "core/context": "tests/core/test_kernels.py tests/core/test_runner.py",
    "core/packed_row": f"{ROWS} {DUMMIES} tests/models/test_experts.py",
    "core/planning": f"tests/core/test_packed_row.py {CUT} {COST}passes_of_a_plan_count_each_token_once "
    f"{COST}what_does_not_fit_is_cut_or_phased_by_cost {COST}waves_hide_their_own_cost_for_an_eighth_of_memory "
    f"{COST}plan_says_what_the_engine_does",
    "core/offload": "tests/core/test_offload.py tests/core/test_fsdp.py tests/core/test_lifetime.py",
    "core/shelf": "tests/core/test_offload.py",
    "core/prefix_cache": "tests/core/test_lifetime.py tests/core/test_runner.py tests/core/test_precision.py",
    "core/": f"tests/core/test_kernels.py tests/core/test_runner.py tests/core/test_lifetime.py {DUMMIES} "
    f"{FAMILIES}attention_that_is_kept_runs_no_kernel_again_and_changes_nothing",
    "models/recurrent": "tests/auto/test_recurrent_cost.py tests/models/test_recurrent_packages.py "
    f"{FAMILIES}a_run_leaves_modules_and_hooks_as_they_were "
    "tests/engine/test_recurrent_engine.py::test_verls_packed_rows_leak_and_our_stock_path_does_not",
    "models/vision": "tests/models/test_vision.py tests/models/test_frozen.py tests/engine/test_vision_engine.py "
    "tests/engine/test_sequence_parallel.py",
    "models/": f"tests/core/test_runner.py tests/api {FAMILIES}what_a_layer_asks_for_and_would_not_get_is_refused",
    "engine/pass_results": "tests/engine/test_faults.py tests/engine/test_engine_equivalence.py",
    "engine/dead_rows": "tests/engine/test_zero_advantage.py",
    "engine/outputs": "tests/engine/test_engine_equivalence.py",
    "engine/row_outputs": "tests/engine/test_engine_equivalence.py",
    "engine/": "tests/engine/test_exchange_rows.py tests/engine/test_exchange.py",
}  # fmt: skip


def changes(tree: ast.Module) -> list[tuple[int, str, Callable[[], None]]]:
    """Line, description and act of every change of a file. What raises, logs or annotates stays as it is."""
    return [(node.lineno, what, act) for node in _that_run(tree) for what, act in _changes(node)]


def _that_run(node: ast.AST) -> Iterator[Any]:
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise | ast.Assert):
            continue
        for one in child if isinstance(child, list) else [child]:
            if isinstance(one, ast.AST) and not _is_talk(one):
                yield one
                yield from _that_run(one)


def _is_talk(node: ast.AST) -> bool:
    """A message, or a call that logs or warns."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.JoinedStr) or "warn" in called or "logger" in called or "timed" in called


def _changes(node: Any) -> list[tuple[str, Callable[[], None]]]:
    def put(name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(node, name, value)

    def swapped(op: ast.AST) -> Any:
        return SWAPPED[type(op)]()

    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
        new = swapped(node.ops[0])
        return [(f"{type(node.ops[0]).__name__} -> {type(new).__name__}", put("ops", [new]))]
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        new = swapped(node.op)
        return [(f"{type(node.op).__name__} -> {type(new).__name__}", put("op", new))]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [(f"{node.value} -> {not node.value}", put("value", not node.value))]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return [(f"{node.value} -> {node.value + 1}", put("value", node.value + 1))]
    if isinstance(node, ast.If | ast.IfExp) and not ast.unparse(node.test).startswith("TYPE_CHECKING"):
        return [("condition turned round", put("test", ast.UnaryOp(ast.Not(), node.test)))]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return [("minus dropped", put("op", ast.UAdd()))]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_talk(node.value):
        return [(f"{ast.unparse(node.value.func)}() not called", put("value", ast.Constant(None)))]
    if isinstance(node, ast.AugAssign):
        return [("nothing added", put("value", ast.Constant(0)))] if type(node.op) in (ast.Add, ast.Sub) else []
    return []


class Changed(MetaPathFinder):
    """Loads one module from a tree."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name, self.tree = name, tree

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        spec = PathFinder.find_spec(fullname, path) if fullname == self.name else None
        if spec is not None:
            loader: Any = spec.loader
            loader.get_code = lambda _: compile(self.tree, spec.origin or self.name, "exec")
        return spec


def cases() -> dict[int, list[Any]]:
    """By ranks: kinds of rows and options that together reach what is changed."""
    from random_batches import Again, Case, Prompt, Session

    prompts = (Prompt("a", 9, (5, 7, 4)), Prompt("b", 14, (6, 0, 3)), Prompt("c", 1, (4,)))
    turns = (Session("a", 12, ((3, 4, 5), (2, 6, 3), (4, 5, 2)), True), Again(1, 1), Again(2, 2))
    turns_apart = (Session("a", 12, ((3, 4, 5), (2, 6, 3)), False), Again(1, 1), Prompt("b", 8, (3, 4)))
    waves = ("wave_tokens", 12), ("schedule", "phased")
    packed = (("schedule", "packed"),)

    def case(family: str, rows: tuple, *options: tuple, ranks: int = 1, system: int = 0, masked: float = 0.0) -> Any:
        return Case(ranks, family, rows, system, masked, 1, tuple(sorted(options)))

    alone = [
        case("qwen3", prompts, *packed),
        case("qwen3", prompts, *waves, ("logits_chunk", 7), masked=0.4),
        case("qwen3", turns, *packed, ("temperature", "per_row"), system=9),
        case("qwen3", turns, *waves, ("trees", "batch"), ("gradient_checkpointing", True), system=9),
        case("qwen3 window", turns, *packed, ("budget", 40)),
        case("gpt_oss", turns_apart, *waves, ("offload", True)),
        case("qwen3_next", turns, *waves, ("padded", True)),
        case("granitemoehybrid", turns_apart, *packed),
        case("qwen3_vl", turns, *waves),
        case("qwen3", turns, ("schedule", "phased"), ("budget", 50)),
    ]
    moving = ("exchange", "auto")
    together = [
        case("qwen3", (*prompts, Prompt("d", 20, (3, 3))), *packed, moving, ranks=2),
        case("qwen3", turns, *waves, moving, ranks=2, system=9),
        case("qwen3_vl", turns_apart, *packed, moving, ranks=2),
    ]
    return {1: alone, 2: together}


def in_ranks(world: int, job: Callable[[], Any]) -> list[Any]:
    """What `job` returns on each of so many forked processes of one gloo group, or how that failed."""
    with tempfile.TemporaryDirectory() as folder:
        left = {_forked(rank, world, Path(folder), job) for rank in range(world)}
        deadline = time.monotonic() + SECONDS
        while left and time.monotonic() < deadline:
            running = {pid for pid in left if os.waitpid(pid, os.WNOHANG) == (0, 0)}
            if running < left:  # the others wait for one that failed, or are done as well
                deadline = min(deadline, time.monotonic() + 10)
            left = running
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        answers = [Path(folder, str(rank)) for rank in range(world)]
        return [pickle.loads(x.read_bytes()) if x.exists() else raised("hangs or died") for x in answers]


def raised(error: str) -> list[dict]:
    return [{"result": "raises", "error": error.replace(f"{ROOT}/", "")}]


def _forked(rank: int, world: int, folder: Path, job: Callable[[], Any]) -> int:
    import torch

    if pid := os.fork():
        return pid
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
        answer = pickle.dumps(job())
    except BaseException:
        answer = pickle.dumps(raised(traceback.format_exc(limit=-2)))
    (folder / f"part{rank}").write_bytes(answer)
    (folder / f"part{rank}").rename(folder / str(rank))
    os._exit(0)


def run_cases(
    world: int, models: dict[str, str], stock: list[list[dict]] | None = None,
    mutant: tuple[str, ast.Module] | None = None,
) -> list[dict]:  # fmt: skip
    """On a rank: what stock gives of every case; or, where that is known by rank, what a mutant does, up to the first
    case that raises or is wrong, and whether the self-check sees that in fp32 and bf16."""
    if mutant:
        for name in [name for name in sys.modules if name.startswith(RELOADED)]:
            del sys.modules[name]
        sys.meta_path.insert(0, Changed(*mutant))
    import random_batches

    measure, found = random_batches.measured, []
    for number, case in enumerate(cases()[world]):
        if stock is None:
            found.append(measure("fsdp2", models[case.family], case, random_batches.stock_options(case)))
            continue

        def ours(backend: str, *args: Any, number: int = number) -> Any:
            return measure(backend, *args) if backend == "prefix" else dict(stock[int(os.environ["RANK"])][number])

        with mock.patch.object(random_batches, "measured", ours):
            try:
                errors = random_batches.errors_of(models, case)[0]
            except Exception:
                return found + raised(traceback.format_exc(limit=-2))
        wrong = {name: error for name, error in errors.items() if not error <= random_batches.TOLERANCE}
        found.append({"result": "wrong" if wrong else "same", "case": number})
        if wrong or not mutant:
            found[-1] |= {dtype: _sees(models[case.family], case, dtype) for dtype in ("fp32", "bf16")}
        if wrong:
            found[-1]["errors"] = wrong
            break
    return found


def _sees(model: str, case: Any, dtype: str) -> str:
    """What the self-check of a first update does: it "sees" that results are wrong, its passes "raise" something else,
    or "nothing"."""
    import random_batches

    options = random_batches.options_of(case) | {"verify": "first_step", "param_dtype": dtype}
    try:
        random_batches.measured("prefix", model, case, options)
    except Exception as error:
        return "sees" if str(error).startswith("prefix.verify") else "raises"
    return "nothing"


def shown_by(ranks: list[list[dict]]) -> str:
    results = {case["result"] for rank in ranks for case in rank}
    return next((result for result in ("raises", "wrong") if result in results), "nothing")


def summary(found: list[dict]) -> dict[str, Any]:
    """Mutants by what showed them; of those that batches do not show, how many a test sees, and how many nothing can;
    of batches that were wrong, how many the self-check alone sees, and in how many more its passes raise."""
    wrong = [[rank[-1] for rank in one["ranks"]] for one in found if one["shown by"] == "wrong"]
    seen: dict[str, Any] = {}
    for dtype in ("fp32", "bf16"):
        said = [{rank.get(dtype) for rank in ranks} for ranks in wrong]
        seen[dtype] = sum("sees" in of_ranks for of_ranks in said)
        seen[f"{dtype}_raises"] = sum("raises" in of_ranks and "sees" not in of_ranks for of_ranks in said)
    rest = [one for one in found if one["shown by"] == "nothing"]
    tests = {"seen": sum(bool(one.get("seen by test")) for one in rest), "equal": sum("why" in one for one in rest)}
    tests["new"] = sum(one.get("test is new", False) for one in rest)
    shown = Counter(one["shown by"] for one in found)
    return {**shown, "tests": tests, "self_check": {"wrong": len(wrong), **seen}}


def figures(reports: list[dict]) -> dict[str, Any]:
    """Counts of all mutants of the reports, and how often which reason says that a mutant changes nothing, by file."""
    mutants = [one for report in reports for one in report["mutants"]]
    for one in mutants:
        if one["shown by"] == "nothing":
            assert bool(one.get("seen by test")) != bool(one.get("why")), one
    reasons: dict[str, Counter] = defaultdict(Counter)
    for one in mutants:
        if one.get("why"):
            reasons[one["file"]][one["why"]] += 1
    counts = {"drawn_from": sum(report["drawn_from"] for report in reports), "mutants": len(mutants)}
    files = {"files": sorted({one["file"] for one in mutants})}
    told = {name: value for name, value in reports[-1].items() if name not in (*counts, *files)}
    return told | counts | files | {"summary": summary(mutants), "why": reasons}


def ask(out: Path, then: list[str]) -> None:
    """Adds to a report, of every mutant that no batch showed, the test that fails with it, or None. One that changes
    nothing may say so there, as `why`: it is not asked about.

    Args:
        then: tests that are asked last, whatever the mutant.
    """
    report = json.loads(out.read_text())
    for one in report["mutants"]:
        if one["shown by"] != "nothing" or one.get("seen by test") or one.get("why"):
            continue
        tree = ast.parse((ROOT / "verl_prefix" / one["file"]).read_text())
        line, what, act = changes(tree)[one["number"]]
        if (line, what) != (one["line"], one["what"]):
            raise SystemExit(f"{one['file']} is no longer what the report is of")
        asked = next(tests for name, tests in TESTS.items() if one["file"].startswith(name)).split() + then
        before = one.get("asked", [])
        if not (asked := [test for test in asked if test not in before]):
            continue
        act()
        with tempfile.TemporaryDirectory() as folder:
            for name in ("verl_prefix", "tests", "recipes", "examples", "pyproject.toml", "setup.py", "Makefile"):
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, Path(folder, name))
            Path(folder, "verl_prefix", one["file"]).write_text(ast.unparse(ast.fix_missing_locations(tree)))
            with Path(folder, "tests", "conftest.py").open("a") as conftest:
                conftest.write(FIRST_FAILURE)
            words = ["-n", "0", "-x", "-q", "-m", "not full and not ray", "-p", "no:cacheprovider"]
            words += ["--timeout", "60", "--timeout-method", "thread"]  # which ends pytest where a mutant hangs
            command = [sys.executable, "-m", "pytest", *words, *asked]
            done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": folder}, text=True,
                                  capture_output=True, check=False)  # fmt: skip
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.M)
        one["asked"], one["seen by test"] = [*before, *asked], failed and failed[1]
        if done.returncode and not failed:
            one["seen by test"] = f"exit code {done.returncode}"
        report["summary"] = summary(report["mutants"])
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{one['file']}:{line} {what}: {one['seen by test']}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results, written after every mutant")
    parser.add_argument("--count", type=int, default=300, help="of mutants, drawn from all")
    parser.add_argument("--only", default="", help="files whose name has this in it")
    parser.add_argument("--ask", nargs="*", metavar="TEST", help="the suite, about mutants of --out; and these tests")
    parser.add_argument("--sum", nargs="+", type=Path, metavar="JSON", help="files of earlier runs; counts go to --out")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
    os.environ |= {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if args.sum:
        found = figures([json.loads(path.read_text()) for path in args.sum])
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    if args.ask is not None:
        ask(args.out, args.ask)
        return 0

    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  what every process needs, once
    import verl.workers.engine_workers  # noqa: F401

    from verl_prefix.files import write_whole
    from verl_prefix.tools.report import provenance

    sources = {file: (ROOT / "verl_prefix" / file).read_text() for file in (*ALONE, *TOGETHER) if args.only in file}
    drawn = [(file, i) for file, source in sources.items() for i in range(len(changes(ast.parse(source))))]
    random.Random(0).shuffle(drawn)
    report = provenance("mutants/1", "cpu") | {"drawn_from": len(drawn), "summary": {}, "mutants": []}
    with tempfile.TemporaryDirectory() as folder:
        models = in_ranks(1, lambda: __import__("random_batches").write_models(Path(folder)))[0]
        stock = {world: in_ranks(world, functools.partial(run_cases, world, models)) for world in (1, 2)}
        for world in (1, 2):
            ranks = in_ranks(world, functools.partial(run_cases, world, models, stock[world]))
            if shown_by(ranks) != "nothing" or any(
                x[dtype] != "nothing" for rank in ranks for x in rank for dtype in ("fp32", "bf16")
            ):
                raise SystemExit(f"without a change, {world} ranks: {ranks}")
        for file, number in drawn[: args.count]:
            tree = ast.parse(sources[file])
            line, what, act = changes(tree)[number]
            act()
            world = 1 if file in ALONE else 2
            module = "verl_prefix." + file.removesuffix(".py").replace("/", ".")
            ranks = in_ranks(
                world,
                functools.partial(run_cases, world, models, stock[world], (module, ast.fix_missing_locations(tree))),
            )
            found = {"file": file, "number": number, "line": line, "what": what}
            found |= {"shown by": shown_by(ranks), "ranks": ranks}
            report["mutants"].append(found)
            report["summary"] = summary(report["mutants"])
            write_whole(args.out, json.dumps(report, indent=1) + "\n")
            print(f"{file}:{line} {what}: {found['shown by']} {[rank[-1] for rank in ranks]}", flush=True)
    print(report["summary"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
