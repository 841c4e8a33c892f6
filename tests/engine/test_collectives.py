"""Every rank reaches every collective of a mini-batch: with rows, without any to compute, and without outputs.

Four gloo ranks: two data-parallel ones, each of two sequence-parallel ones (Ulysses). MOCK: the second of each two has
no outputs, as the first stages of a pipeline have none; it computes what it would, and then drops it.
"""

import ast
import dataclasses
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from engines import _batch, _engine, _loss, _responses
from shared_models import SharedModels
from torch.distributed import get_rank

import verl_prefix
from verl_prefix.backends.fsdp import FSDPBackend
from verl_prefix.engine.planner import StockPath
from verl_prefix.testing import write_tiny_model

PACKAGE = Path(verl_prefix.__file__).parent
OURS = [PACKAGE / "engine", PACKAGE / "backends"]
CALLED = ("all_reduce", "all_gather", "all_to_all_single", "all_gather_object")
# Functions whose collectives these batches do not meet, and the test that does.
ELSEWHERE = {
    "FSDPStockPath._without_ulysses": "engine/test_sequence_parallel.py",
    "FSDPStockPath._separate_rows": "engine/test_recurrent_engine.py",
    "MegatronSelfCheck.gradients": "backends/test_megatron.py",
    "Planner._new_chooser": "engine/test_faults.py",
    "PrefixEngine._run_stock_path": "engine/test_exchange.py",  # under gate_shut
    "PrefixEngine.initialize": "engine/test_recurrent_engine.py",
    "PrefixEngine.train_batch": "engine/test_engine_equivalence.py",  # under mini_batches=prompts
    "Verification._has_gradient_of_idle_rows": "engine/test_zero_advantage.py",
}
OPTIONS = {
    "ulysses": 2, "attn_implementation": "varlen_on_cpu", "exchange": "auto", "schedule": "auto", "min_speedup": 1e-6,
    "trees": "uid", "gradient_checkpointing": True,
}  # fmt: skip
# By data rank: rows of two prompts that are spread over ranks; or on the second nothing but empty responses.
ROWS = {
    "rows": [[("a", 30, [9, 7], ""), ("b", 50, [5], "")], [("a", 30, [6], ""), ("b", 50, [4, 8], "")]],
    "idle": [[("a", 30, [9, 7], ""), ("b", 50, [5], "")], [("c", 20, [0, 0], "")]],
}


SHARED = SharedModels(_engine)  # on ranks


def functions() -> set[str]:
    """Functions of verl_prefix.engine and of backends that call a collective: torch's, `together`, or `Ranks`'."""
    found = set()

    def look(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = within
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{within}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call) and within:
                called = ast.unparse(child.func)
                owner, _, last = called.rpartition(".")
                torchs = last in CALLED and owner in ("dist", "torch.distributed")
                if torchs or last in ("together", "max_over_ranks", "ranges_over_ranks", "sum_over_ranks"):
                    found.add(within)
            look(child, name)

    for path in (path for room in OURS for path in room.rglob("*.py")):
        look(ast.parse(path.read_text()), "")
    return found


def _seen(frame) -> list[str]:
    """Functions of ours that a call stands in."""
    seen = []
    while frame is not None:
        if any(Path(frame.f_code.co_filename).is_relative_to(room) for room in OURS):
            seen.append(frame.f_code.co_qualname.replace(".<locals>", ""))
        frame = frame.f_back
    return seen


def _walk(models: dict, rows: str, has_outputs: bool) -> tuple[list, list[str], list, list[int]]:
    """One rank's collectives in order, each with the size of its group; the functions of ours that made them; the
    log-probs that it gave back, by uid; how many metrics it reported."""
    import varlen  # noqa: F401  # which transformers then knows
    import verl  # noqa: F401  # first: it imports its plugin, ours

    calls, within, copy = [], set(), get_rank() % 2
    made = FSDPBackend.__init__

    def without(self, *args):
        made(self, *args)
        self.ranks = dataclasses.replace(self.ranks, has_outputs=has_outputs or copy == 0)

    def recorded(name: str):
        real = getattr(dist, name)

        def call(*args, **kwargs):
            ours = _seen(sys._getframe(1))
            if ours:
                calls.append((name, dist.get_world_size(kwargs.get("group"))))
                within.update(ours)
            return real(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with mock.patch.object(FSDPBackend, "__init__", without):
        engine = SHARED("prefix", models["qwen3"], OPTIONS)
    data = _batch(get_rank() // 2, engine.model_config.hf_config.vocab_size, {"groups": ROWS[rows][get_rank() // 2]})
    patches = [recorded(name) for name in CALLED]
    for one in patches:
        one.start()
    try:
        with engine.eval_mode(disable_auto_offload=True):
            log_probs = engine.infer_batch(data.copy())
            with mock.patch.object(engine._planner, "only_stock_path", lambda batch, loss: StockPath("asked for")):
                engine.infer_batch(data.copy())
        with engine.train_mode(disable_auto_offload=True):
            loss = _loss({"policy_loss": {"loss_mode": "bypass_mode"}})  # which needs a token
            metrics = engine.train_batch(data.copy(), loss)["metrics"]
    finally:
        for one in patches:
            one.stop()
    found = log_probs["model_output"]
    found = [x.tolist() for x in _responses(found["log_probs"], data)] if found else []
    return calls, sorted(within), found, [len(log_probs["metrics"]), len(metrics)]


@pytest.fixture(scope="module")
def walk(tmp_path_factory, ranks):
    return ranks(4, {"qwen3": write_tiny_model(str(tmp_path_factory.mktemp("model")), family="qwen3")})


# A rank of nothing but empty responses is in test_engine_equivalence.py too.
@pytest.mark.more
@pytest.mark.parametrize("rows", ["rows", "idle"])
def test_ranks_without_rows_or_outputs_reach_every_collective(walk, rows):
    whole, staged = (walk(_walk, rows, has_outputs) for has_outputs in (True, False))
    for found in (whole, staged):
        calls = [rank[0] for rank in found]
        assert len(calls[0]) > 15 and all(one == calls[0] for one in calls), "ranks differ in their collectives"
    assert [rank[0] for rank in staged] == [rank[0] for rank in whole]
    assert [rank[2] for rank in staged[::2]] == [rank[2] for rank in whole[::2]], "who has outputs gets the same"
    assert all(rank[2] for rank in whole) and not any(rank[2] for rank in staged[1::2])
    unseen = functions() - {name for rank in whole for name in rank[1]} - set(ELSEWHERE)
    assert unseen <= {"_gather_pieces"} and (rows == "idle" or not unseen), (  # idle rows are of no turns
        f"no batch here reaches the collectives of {sorted(unseen)}"
    )


def test_the_walk_finds_collectives_in_the_source():
    found = functions()
    assert {"_swap", "together", "PrefixEngine._with_loss_fields", "Verification._verdict"} <= found
    assert set(ELSEWHERE) <= found
