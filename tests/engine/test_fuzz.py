"""Random batches through PrefixFSDPEngine and, row by row, through verl's stock fsdp2 engine: gloo ranks, fp32.

    make fuzz BATCHES=1000 SEED=1

draws so many (in make test 40, always the same) and writes what it saw to outputs/fuzz.json. A failure is shrunk by
hypothesis, which prints the case: keep it as an `@example` of the test. Not drawn: images, CUDA, several nodes.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import broken_states
import pytest
import torch
from engines import TOLERANCE, _engine, _loss, _responses, as_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_models import OURS, SharedModels
from torch.distributed import get_rank, get_world_size
from whole_tensors import whole

from verl_prefix.config import PrefixConfig
from verl_prefix.testing import write_tiny_model

BATCHES = int(os.environ.get("FUZZ_BATCHES", 40))
REPORT = os.environ.get("FUZZ_REPORT")
END = 2  # of a message, as the tiny models' tokenizer has it
FAMILIES = {
    "qwen3": {}, "llama": {}, "qwen3 tied": dict(tie_word_embeddings=True),
    "qwen3 window": dict(use_sliding_window=True, sliding_window=25, max_window_layers=1),
    "qwen3_moe": {}, "gpt_oss": {}, "qwen3_5_text": {}, "qwen3_next": {}, "olmo_hybrid": {}, "lfm2": {},
    "granitemoehybrid": {}, "bamba": {},
}  # fmt: skip


class Prompt(NamedTuple):
    """Rows of one prompt."""

    uid: str
    tokens: int
    responses: tuple[int, ...]


class Session(NamedTuple):
    """A row per turn: (thoughts, said, what comes back) of each. kept: histories have the thoughts."""

    uid: str
    tokens: int
    turns: tuple[tuple[int, int, int], ...]
    kept: bool


class Again(NamedTuple):
    """More rows of the prompt that stands `back` before it, or a branch of that session behind its first `turns`."""

    back: int
    turns: int


class Case(NamedTuple):
    ranks: int
    family: str
    rows: tuple[Prompt | Session | Again, ...]
    system: int  # tokens that all rows begin with
    masked: float  # share of response tokens that no loss reads
    seed: int
    options: tuple[tuple[str, object], ...]


uids = st.sampled_from("aab")
few = st.integers(1, 12)
PROMPTS = st.builds(Prompt, uids, st.integers(1, 40), st.lists(st.integers(0, 20), min_size=1, max_size=6).map(tuple))
TURNS = st.lists(st.tuples(st.integers(0, 9), few, st.integers(0, 12)), min_size=1, max_size=4).map(tuple)
SESSIONS = st.builds(Session, uids, st.integers(1, 25), TURNS, st.booleans())
ROWS = st.lists(
    st.one_of(PROMPTS, SESSIONS, st.builds(Again, st.integers(1, 3), st.integers(0, 3))), min_size=1, max_size=7
)


def some(values: list[tuple[str, st.SearchStrategy]]) -> st.SearchStrategy:
    """Some of these options, the others as they are by default."""
    return st.fixed_dictionaries({}, optional=dict(values)).map(lambda chosen: tuple(sorted(chosen.items())))


OPTIONS = some([
    ("schedule", st.sampled_from(["packed", "phased", "auto"])), ("budget", st.integers(20, 500)),
    ("wave_tokens", st.integers(1, 80)), ("logits_chunk", st.integers(1, 60)), ("offload", st.just(True)),
    ("trees", st.sampled_from(["batch", "off"])), ("exchange", st.just("auto")), ("padded", st.just(True)),
    ("temperature", st.sampled_from([0.7, "per_row"])), ("gradient_checkpointing", st.just(True)),
    ("use_dynamic_bsz", st.just(False)), ("micro_batch_size_per_gpu", st.integers(1, 4)),
    ("use_no_sync", st.just(False)), ("fsdp_size", st.just(1)), ("use_kl_loss", st.just(True)),
    ("loss_agg_mode", st.sampled_from(["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])),
    ("trained", st.sampled_from([r"layers\.1|norm", r"layers\.0", "lm_head"])), ("calculate_entropy", st.just(False)),
    ("lora_targets", st.just("all-linear")), ("min_speedup", st.just(1.05)),
])  # fmt: skip
RANKS = st.sampled_from([1, 2] if not REPORT else [1, 1, 2, 2, 4])
ANY = st.builds(
    Case, RANKS, st.sampled_from([*FAMILIES]), ROWS.map(tuple), st.sampled_from([0, 0, 9]),
    st.sampled_from([0.0, 0.4]), st.integers(0, 99), OPTIONS,
)  # fmt: skip


def makes_sense(case: Case) -> bool:
    """False where what is drawn has no meaning, or would be refused."""
    options = dict(case.options)
    if "trained" in options and ("lora_targets" in options or "tied" in case.family):
        return False
    if isinstance(case.rows[0], Again):
        return False
    if "min_speedup" in options and "use_dynamic_bsz" in options:
        return False  # verl's own path wants whole micro-batches, to which its trainers pad
    try:
        PrefixConfig(**{key: value for key, value in options.items() if key in OURS})
    except ValueError:
        return False
    return any(mask.any() for _, _, _, mask, _ in rows_of(case, 100))


def rows_of(case: Case, vocab: int) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """(uid, prompt, response, loss mask, session), as many for every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    end, header = torch.tensor([END]), torch.tensor([5, 6])

    def some(length: int) -> torch.Tensor:
        return torch.randint(3, vocab, (length,), generator=generator)

    system = torch.cat([some(case.system), end]) if case.system else some(0)
    rows, made = [], []
    for number, one in enumerate(case.rows):
        history: list[torch.Tensor] = []
        if isinstance(one, Again):
            turns = one.turns
            one, question, history = made[max(0, len(made) - one.back)]
            history = history[: 2 * turns]
        else:
            question = torch.cat([system, some(one.tokens), *([end] if isinstance(one, Session) else [])])
        if isinstance(one, Prompt):
            rows += [(one.uid, question, some(length), number) for length in one.responses]
        else:
            for thoughts, answer, back in one.turns[len(history) // 2 :]:
                said = torch.cat([some(thoughts + answer), end])
                rows.append((one.uid, torch.cat([question, *history, header]), said, number))
                history += [torch.cat([header, said if one.kept else said[thoughts:]]), torch.cat([some(back), end])]
        made.append((one, question, history))
    while len(rows) % case.ranks:
        rows.append((f"pad{len(rows)}", some(9), some(1), number))
    masks = [(torch.rand(len(row[2]), generator=generator) >= case.masked).long() for row in rows]
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [(*rows[i][:3], masks[i] * (not rows[i][0].startswith("pad")), rows[i][3]) for i in order]


# What follows runs on ranks, which are given `models` first; engines share what takes longest to build.
SHARED = SharedModels(_engine)


def _measure(backend: str, path: str, case: Case, options: dict) -> dict[str, torch.Tensor]:
    engine = SHARED(backend, path, options)
    all_rows = rows_of(case, engine.model_config.hf_config.vocab_size)
    rows = all_rows[get_rank() :: get_world_size()]
    generator = torch.Generator().manual_seed(case.seed + 1 + get_rank())
    data = as_batch([row[:4] for row in rows], [row[4] for row in rows], options, generator)
    with engine.eval_mode(disable_auto_offload=True):
        inferred = engine.infer_batch(data.copy())["model_output"]
    found = {name: torch.cat(_responses(x, data)) for name, x in inferred.items()}
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data.copy(), _loss(options))
        grads = whole({n: p.grad for n, p in engine.module.named_parameters() if p.grad is not None})
    found["loss"] = torch.tensor(sum(output["loss"]), dtype=torch.float64)
    torch.distributed.all_reduce(found["loss"])
    saved = output["metrics"].get("prefix/tokens_saved", 0.0)
    return found | {f"gradient of {name}": x for name, x in grads.items()} | {"tokens saved": torch.tensor(saved)}


def _errors(models: dict, case: Case) -> tuple[dict[str, float], float]:
    """Relative errors of what ours gives from what stock does, one row after the other; tokens saved."""
    path, options = models[case.family], {"turns": True, **dict(case.options)}  # so that the tokenizer is loaded
    if case.family == "gpt_oss":
        options["attn_implementation"] = "eager"
    alone = {k: v for k, v in options.items() if k not in OURS} | {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 1,
    }
    ours = _measure("prefix", path, case, {"verify": "off", **options})
    stock = _measure("fsdp2", path, case, alone)
    saved = ours.pop("tokens saved")
    stock.pop("tokens saved")
    assert ours.keys() == stock.keys(), ours.keys() ^ stock.keys()
    # Small next to terms that cancel: a loss, whose terms are about 1, and a parameter beside all others' gradients.
    norms = {name: x.double().norm() for name, x in stock.items()}
    total = sum(norm**2 for name, norm in norms.items() if name.startswith("gradient of ")) ** 0.5
    least = {name: 0.1 * total if name.startswith("gradient of ") else 1e-30 for name in stock} | {"loss": 1.0}
    errors = {name: ((ours[name] - x).double().norm() / max(norms[name], least[name])).item()
              for name, x in stock.items()}  # fmt: skip
    worst = max((error for name, error in errors.items() if name.startswith("gradient of ")), default=0.0)
    return {name: error for name, error in errors.items() if error > TOLERANCE or "gradient" not in name} | {
        "gradients": worst
    }, float(saved)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("fuzz")
    return {
        name: write_tiny_model(tmp / name.replace(" ", "_"), family=name.split()[0], **fields)
        for name, fields in FAMILIES.items()
    }


@pytest.fixture(scope="module")
def seen():
    found = {"batches": Counter(), "worst": {}, "shared": 0}
    yield found
    if REPORT:
        from verl_prefix.files import write_whole
        from verl_prefix.tools.report import provenance

        report = provenance("fuzz/1", "cpu") | {"num_batches": BATCHES} | found
        write_whole(Path(REPORT), json.dumps(report, indent=1) + "\n")


def check(ranks, models, case: Case, seen: dict) -> None:
    for errors, saved in ranks(case.ranks, models)(_errors, case):
        seen["shared"] += saved > 0
        for name, error in errors.items():
            assert error <= TOLERANCE, (name, errors)
            seen["worst"][name] = max(seen["worst"].get(name, 0.0), error)


def test_random_batches_are_computed_as_by_stock(ranks, models, seen):
    @settings(
        max_examples=BATCHES, deadline=None, database=None, print_blob=False, derandomize=REPORT is None,
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    @given(case=ANY.filter(makes_sense))
    def run(case: Case) -> None:
        check(ranks, models, case, seen)
        seen["batches"][case.family] += 1

    run()


def _broken(models: dict, case: Case, name: str) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        getattr(broken_states, name)(patch)
        return _errors(models, case)[0]


@pytest.mark.parametrize("ranks_of_case", [1, 2])
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("ancestor_left_out", "packed"), ("gradients_of_keys_dropped_in_packed", "packed"),
        ("earlier_waves_dropped", "phased"), ("gradients_of_shared_outputs_dropped", "phased"),
    ],
)  # fmt: skip
def test_what_is_broken_on_purpose_is_seen(ranks, models, name, schedule, ranks_of_case):
    turns = tuple((4, 5 + i, 8) for i in range(3))
    rows = (Session("a", 20, turns, True), Again(1, 1), Again(2, 1), Again(1, 2))
    options = (("schedule", schedule), *([("wave_tokens", 20)] * (schedule == "phased")))
    case = Case(ranks_of_case, "qwen3", rows, 9, 0.0, 1, options)
    whole = ranks(case.ranks, models)(_errors, case)
    assert max(max(errors.values()) for errors, _ in whole) <= TOLERANCE and whole[0][1] > 0
    assert all(max(errors.values()) > 100 * TOLERANCE for errors in ranks(case.ranks, models)(_broken, case, name))
