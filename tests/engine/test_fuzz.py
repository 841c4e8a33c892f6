"""Random batches through PrefixFSDPEngine and, row by row, through verl's stock fsdp2 engine: gloo ranks, fp32.

    make fuzz BATCHES=1000 SEED=1

draws so many (in make test 2, always the same; of deep trees, critics, replayed routers and other engines a third) and
adds what it saw to outputs/fuzz.json, unless one failed. A failure is shrunk by hypothesis, which prints the
case: keep it as an `@example` of the test. Not drawn: CUDA, several nodes, Qwen2.5-VL, whose stock attention verl
patches for the whole process.
"""

import json
import os
import time
from collections import Counter
from pathlib import Path

import broken_states
import pytest
from engines import TOLERANCE
from hypothesis import HealthCheck, example, given, settings
from random_batches import (
    BATCHES,
    CRITICS,
    RECORDED,
    Again,
    Case,
    Prompt,
    Session,
    cases_on,
    deep_cases_on,
    errors_of,
    of_critic,
    routed_cases_on,
    write_models,
)

ROUTED = ("routes", "tails")
TREE = (Session("a", 20, ((4, 5, 8), (4, 6, 8), (3, 5, 9), (2, 4, 5)), True), Again(1, 1), Again(2, 2))
NESTED = Case(1, "qwen3", TREE, 9, 0.0, 1, (("budget", 60), ("schedule", "phased")))
TURNS = (Session("a", 20, ((4, 5, 8), (4, 6, 8)), True), Again(1, 1))
REPORT = os.environ.get("FUZZ_REPORT")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(scope="module")
def seen(request):
    """What a run saw, and the runs before it that are in the report."""
    report = json.loads(Path(REPORT).read_text()) if REPORT and Path(REPORT).exists() else {}
    counts = {name: Counter(report.get(name)) for name in ("families", "ranks", "rows", "options", "shared", "depths")}
    found = {"runs": report.get("runs", []), **counts, "worst": report.get("worst", {})}
    start, before, failed = time.time(), found["families"].total(), request.session.testsfailed
    yield found
    if REPORT and request.session.testsfailed == failed:
        from verl_prefix.files import write_whole
        from verl_prefix.tools.report import provenance

        report = provenance("fuzz/2", "cpu")
        run = {name: report[name] for name in ("created", "load_average", "git")}
        run |= {"seed": os.environ.get("FUZZ_SEED"), "batches": found["families"].total() - before}
        found["runs"].append(run | {"seconds": round(time.time() - start)})
        write_whole(Path(REPORT), json.dumps(report | found, indent=1) + "\n")


@pytest.mark.parametrize(
    "kind", ["actor", *(pytest.param(kind, marks=pytest.mark.more) for kind in ("trees", "critic", "routes"))]
)
def test_random_batches_are_computed_as_by_stock(ranks, models, seen, kind):
    numbers = [1] * 6 + [2] * 3 + [4] if REPORT else [1, 2]
    in_an_image = Case(1, "qwen3_vl", (Prompt("a", 6, (4, 5)),), 9, 0.0, 0, (("trees", "batch"),))  # it ends
    routed = Case(2, "qwen3_moe", (*TURNS, Prompt("b", 37, (4, 5, 9))), 9, 0.0, 0, (("exchange", "auto"), ROUTED))
    in_text = of_critic(in_an_image._replace(family="qwen3"))

    # A row of one value, which is nearly 0.
    tiny = of_critic(Case(1, "qwen3", (Session("a", 1, ((0, 1, 0),), False),), 0, 0.0, 0, ()))
    recorded = routed._replace(options=(*routed.options[:-1], ("routes", RECORDED)))
    examples = {
        "actor": (in_an_image, routed), "critic": (tiny, in_text, of_critic(routed)), "trees": (NESTED,),
        "routes": (routed, recorded),
    }  # fmt: skip
    cases = {
        "actor": cases_on(numbers), "critic": cases_on(numbers, CRITICS).map(of_critic),
        "trees": deep_cases_on(numbers), "routes": routed_cases_on(numbers),
    }  # fmt: skip

    @settings(max_examples=BATCHES if kind == "actor" else -(-BATCHES // 3), suppress_health_check=[*HealthCheck])
    @given(case=cases[kind])
    def run(case: Case) -> None:
        found = ranks(case.ranks, models)(errors_of, case)
        for name, error in ((name, error) for errors, *_ in found for name, error in errors.items()):
            assert error <= TOLERANCE, (name, error)
            worst = seen["worst"].setdefault(case.family, {})
            worst[name] = max(worst.get(name, 0.0), error)
        seen["shared"][str(any(saved > 0 for _, saved, _ in found))] += 1
        seen["depths"][str(max(depth for *_, depth in found))] += 1
        seen["families"][case.family] += 1
        seen["ranks"][str(case.ranks)] += 1
        seen["rows"].update({type(one).__name__ for one in case.rows})
        seen["options"].update(name for name, _ in case.options)
        seen["options"].update(
            "R2" if routes == RECORDED else "R3" for name, routes in case.options if name == "routes"
        )

    for case in examples[kind]:
        run = example(case)(run)
    run()


def _broken(models: dict, case: Case, name: str) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        getattr(broken_states, name)(patch)
        return errors_of(models, case)[0]


@pytest.mark.parametrize("ranks_of_case", [pytest.param(1, marks=pytest.mark.more), 2])
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("earlier_waves_dropped", "phased"), pytest.param("ancestor_left_out", "packed", marks=pytest.mark.more),
        pytest.param("gradients_of_keys_dropped_in_packed", "packed", marks=pytest.mark.more),
        pytest.param("gradients_of_shared_outputs_dropped", "phased", marks=pytest.mark.more),
    ],
)  # fmt: skip
def test_what_is_broken_on_purpose_is_seen(ranks, models, name, schedule, ranks_of_case):
    turns = tuple((4, 5 + i, 8) for i in range(3))
    rows = (Session("a", 20, turns, True), Again(1, 1), Again(2, 1), Again(1, 2))
    options = (("schedule", schedule), *([("wave_tokens", 20)] * (schedule == "phased")))
    case = Case(ranks_of_case, "qwen3", rows, 9, 0.0, 1, options)
    whole = ranks(case.ranks, models)(errors_of, case)
    assert max(max(errors.values()) for errors, *_ in whole) <= TOLERANCE and whole[0][1] > 0
    assert all(max(errors.values()) > 100 * TOLERANCE for errors in ranks(case.ranks, models)(_broken, case, name))
