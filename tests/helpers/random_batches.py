"""Random batches: rows of prompts, sessions and branches, with options of an engine; how far what ours makes of them is
from verl's stock fsdp2 engine, which takes one row after the other."""

import copy
import functools
import math
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from engines import PAD, TOLERANCE, _engine, _loss, _responses, as_batch
from forced_routes import forced, routes_as
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_models import OURS, SharedModels
from teachers import ONLY, add_teacher, or_nothing, tell_update
from torch.distributed import all_gather_object, get_rank, get_world_size
from whole_tensors import whole

from verl_prefix.api.pixels import positions_of_row
from verl_prefix.config.options import PrefixConfig
from verl_prefix.models.verls_vision import towers_of_tensors
from verl_prefix.testing import visual_prompt, write_tiny_model

BATCHES = int(os.environ.get("FUZZ_BATCHES", 2))
END = 2  # of a message, as the tiny models' tokenizer has it
FAMILIES = {
    "qwen3": {}, "llama": {}, "qwen3 tied": dict(tie_word_embeddings=True),
    "qwen3 window": dict(use_sliding_window=True, sliding_window=25, max_window_layers=1),
    "qwen3_moe": {}, "gpt_oss": {}, "deepseek_v3": {}, "qwen3_5_text": {}, "qwen3_next": {}, "olmo_hybrid": {},
    "lfm2": {}, "granitemoehybrid": {}, "bamba": {}, "qwen3_vl": {}, "qwen3_vl_moe": {}, "qwen3_5": {},
    "glm4v_moe": {}, "glm4_moe": {},
}  # fmt: skip
# Families that a critic may have: transformers has token classification of them.
CRITICS = (
    "qwen3", "llama", "qwen3 tied", "qwen3 window", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next",
)  # fmt: skip
VISION = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v_moe")  # every prompt and some of a session's turns have pixels


REPLAYED = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe")
Found = tuple[dict[str, float], float, int]  # of `errors_of`
COUNTS = ("tokens_saved", "pass_depth")  # of an update
RECORDED = "recorded"  # routes of the log-prob pass (R2), where others are of a rollout (R3)


class Prompt(NamedTuple):
    """Rows of one prompt. equal: the same tokens in all responses, as far as they go."""

    uid: str
    tokens: int
    responses: tuple[int, ...]
    equal: bool = False


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
LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=6)
MANY = st.lists(st.integers(0, 3), min_size=20, max_size=40)
RESPONSES = st.one_of([LENGTHS] * 9 + [MANY]).map(tuple)
PROMPTS = st.builds(Prompt, uids, st.integers(1, 40), RESPONSES, st.sampled_from([False] * 4 + [True]))
TURNS = st.lists(st.tuples(st.integers(0, 9), few, st.integers(0, 12)), min_size=1, max_size=4).map(tuple)
SESSIONS = st.builds(Session, uids, st.integers(1, 25), TURNS, st.booleans())
ROWS = st.lists(
    st.one_of(PROMPTS, SESSIONS, st.builds(Again, st.integers(1, 3), st.integers(0, 3))), min_size=1, max_size=7
)


def some(values: list[tuple[str, st.SearchStrategy]]) -> st.SearchStrategy:
    """Some of these options, the others as they are by default."""
    return st.fixed_dictionaries({}, optional=dict(values)).map(lambda chosen: tuple(sorted(chosen.items())))


# Of experts, which are replayed. The first is R2, the others are R3.
ROUTES = st.sampled_from([RECORDED, "agree", "tails", "replicas", "free"])
OPTIONS = some([
    ("schedule", st.sampled_from(["packed", "phased", "auto"])), ("budget", st.integers(20, 500)),
    ("wave_tokens", st.integers(1, 80)), ("logits_chunk", st.integers(1, 60)), ("offload", st.just(True)),
    ("trees", st.sampled_from(["batch", "off"])), ("exchange", st.just("auto")), ("padded", st.just(True)),
    ("temperature", st.sampled_from([0.7, "per_row"])), ("gradient_checkpointing", st.just(True)),
    ("use_dynamic_bsz", st.just(False)), ("micro_batch_size_per_gpu", st.integers(1, 4)),
    ("use_no_sync", st.just(False)), ("fsdp_size", st.just(1)), ("use_kl_loss", st.just(True)),
    ("loss_agg_mode", st.sampled_from(["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])),
    ("policy_loss", st.sampled_from(["gspo", "sapo", "gpg", "cispo", "dppo_tv"]).map(lambda x: (("loss_mode", x),))),
    ("trained", st.sampled_from([r"layers\.1|norm", r"layers\.0", "lm_head"])), ("calculate_entropy", st.just(False)),
    ("lora_targets", st.just("all-linear")), ("min_speedup", st.just(1.05)), ("ulysses", st.just(2)),
    ("routes", ROUTES),
    ("dead", st.integers(2, 4)),  # every so-manieth row has no advantage, and is left out
    ("distillation", st.sampled_from([(), tuple(ONLY.items()), (("loss_mode", "k3"),)])),
])  # fmt: skip


def cases_on(ranks: list[int], families: Iterable[str] = FAMILIES) -> st.SearchStrategy[Case]:
    """Random cases on one of these numbers of ranks."""
    cases = st.builds(
        Case, st.sampled_from(ranks), st.sampled_from([*families]), ROWS.map(tuple), st.sampled_from([0, 0, 9]),
        st.sampled_from([0.0, 0.4]), st.integers(0, 99), OPTIONS,
    )  # fmt: skip
    return cases.map(as_it_can_be).filter(makes_sense)


def routed_cases_on(ranks: list[int]) -> st.SearchStrategy[Case]:
    """Random cases whose routers are replayed."""

    def routed(case: Case, routes: str) -> Case:
        kept = [one for one in case.options if one[0] != "routes"]
        return case._replace(options=(*kept, ("routes", routes)))

    return st.builds(routed, cases_on(ranks, REPLAYED), ROUTES).filter(makes_sense)


def of_deep_tree(case: Case, rows: tuple[Session | Again, ...], budget: int, schedule: str) -> Case:
    """A case of one tree, under a budget that may nest its passes."""
    kept = [one for one in case.options if one[0] not in ("budget", "schedule", "trees", "min_speedup")]
    return case._replace(rows=rows, options=(*kept, ("budget", budget), ("schedule", schedule)))


def deep_cases_on(ranks: list[int], families: Iterable[str] = FAMILIES) -> st.SearchStrategy[Case]:
    """Random cases of a session of several turns, and of branches of it."""
    turns = st.lists(st.tuples(st.integers(0, 9), few, st.integers(0, 12)), min_size=3, max_size=5).map(tuple)
    session = st.builds(Session, st.just("a"), st.integers(1, 25), turns, st.booleans())
    branches = st.lists(st.builds(Again, st.integers(1, 3), st.integers(0, 3)), min_size=2, max_size=5)
    rows = st.builds(lambda one, more: (one, *more), session, branches)
    cases = st.builds(
        of_deep_tree, cases_on(ranks, families), rows, st.integers(30, 150), st.sampled_from(["phased", "auto"])
    )
    return cases.filter(makes_sense)


def of_critic(case: Case) -> Case:
    """The same rows for a critic, without what is the actor's alone."""
    of_actor = ("dead", "distillation", "lora_targets", "policy_loss", "routes", "use_kl_loss")
    kept = [one for one in case.options if one[0] not in of_actor and one[1] != "lm_head"]
    return case._replace(options=(*kept, ("critic", True)))


def as_it_can_be(case: Case) -> Case:
    """Under Ulysses an even number of ranks; routes of experts where they are replayed."""
    if case.family not in REPLAYED:
        case = case._replace(options=tuple(one for one in case.options if one[0] != "routes"))
    return case._replace(ranks=max(2, case.ranks)) if "ulysses" in dict(case.options) else case


def write_models(folder: Path, families: Iterable[str] = FAMILIES) -> dict[str, str]:
    """The model of every family."""
    return {
        name: write_tiny_model(folder / name.replace(" ", "_"), family=name.split()[0], **fields)
        for name, fields in ((name, FAMILIES[name]) for name in families)
    }


def makes_sense(case: Case) -> bool:
    """False where what is drawn has no meaning, or would be refused."""
    options = dict(case.options)
    if "trained" in options and ("lora_targets" in options or "tied" in case.family):
        return False
    if "lora_targets" in options and case.family in (
        *VISION,
        "deepseek_v3",
        "glm4_moe",
    ):  # PEFT hides what its router reads
        return False
    if isinstance(case.rows[0], Again):
        return False
    if "min_speedup" in options and ("use_dynamic_bsz" in options or case.family == "gpt_oss"):
        # verl's own path wants whole micro-batches, to which its trainers pad, and eager attention reads across rows.
        return False
    try:
        PrefixConfig(**{key: value for key, value in options.items() if key in OURS})
    except ValueError:
        return False
    if "dead" in options and ("use_kl_loss" in options or "distillation" in options):
        return False
    if "distillation" in options and "min_speedup" in options:  # verl's loss raises where no token counts
        return False
    rows = enumerate(rows_of(case, SimpleNamespace(vocab_size=100)))
    return any(row.mask.any() for number, row in rows if "dead" not in options or number % options["dead"])


class Row(NamedTuple):
    uid: str
    prompt: torch.Tensor
    response: torch.Tensor
    mask: torch.Tensor
    session: int
    pixels: dict[str, torch.Tensor]


def rows_of(case: Case, config: Any) -> list[Row]:
    """As many for every rank, in an order of their own. config: the model's."""
    generator, masks = (torch.Generator().manual_seed(case.seed + more) for more in (0, 1000))
    sees = hasattr(config, "vision_config")
    lowest, vocab = (10, config.text_config.vocab_size) if sees else (3, config.vocab_size)
    end, header = torch.tensor([END]), torch.arange(2) + lowest - 2

    def some(length: int) -> torch.Tensor:
        return torch.randint(lowest, vocab, (length,), generator=generator)

    def shown(length: int, behind: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Text, and in it an image; on one rank, a video (not of GLM) or nothing instead: the stock tower runs
        on all ranks or on none, once for images and once for videos."""
        if not sees or (case.ranks == 1 and length % 5 == 4):
            return torch.cat([some(length), behind]), {}
        has_video = case.ranks == 1 and length % 5 == 3 and case.family != "glm4v_moe"
        grid = (2, 4, 4) if has_video else (4, 4 + 4 * (length % 2))
        text, pixels = visual_prompt([length, grid, 2], config, generator)
        return torch.cat([text.masked_fill(text == END, lowest), behind]), pixels

    def together(pixels: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        names = dict.fromkeys(name for one in pixels for name in one)
        return {name: torch.cat([one[name] for one in pixels if name in one]) for name in names}

    system = torch.cat([some(case.system), end]) if case.system else some(0)
    rows, made = [], []
    for number, one in enumerate(case.rows):
        history: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
        if isinstance(one, Again):
            turns = one.turns
            one, question, history = made[max(0, len(made) - one.back)]
            history = history[: 2 * turns]
        else:
            # A chat template ends the message; behind an image others may not.
            text, pixels = shown(one.tokens, end[: isinstance(one, Session) or (sees and one.tokens % 3 > 0)])
            question = torch.cat([system, text]), pixels
        if isinstance(one, Prompt):
            same = some(max(one.responses)) if one.equal else None
            said = [some(length) if same is None else same[:length] for length in one.responses]
            rows += [(one.uid, *question, response, number) for response in said]
        else:
            for thoughts, answer, back in one.turns[len(history) // 2 :]:
                said = torch.cat([some(thoughts + answer), end])
                texts, pixels = zip(question, *history, strict=True)
                rows.append((one.uid, torch.cat([*texts, header]), together(pixels), said, number))
                answered = torch.cat([header, said if one.kept else said[thoughts:]]), {}
                history = [*history, answered, shown(back, end) if back % 2 else (torch.cat([some(back), end]), {})]
        made.append((one, question, history))
    padding = PAD, *shown(9, end[:0]), some(1), number  # verl's are of one prompt, too
    rows += [padding] * (-len(rows) % case.ranks)
    found = []
    for uid, prompt, pixels, response, session in rows:
        mask = (torch.rand(len(response), generator=masks) >= case.masked).long() * (not uid.startswith("pad"))
        found.append(Row(uid, prompt, response, mask, session, copy.deepcopy(pixels)))
    return [found[i] for i in torch.randperm(len(rows), generator=masks).tolist()]


# What follows runs on ranks, which are given `models` first; engines share what takes longest to build.
SHARED = SharedModels(_engine)


@functools.cache
def _meta_model(path: str) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path))


def _batch(case: Case, path: str, config: Any, options: dict, chosen: slice) -> tuple[list[int], Any]:
    """Which rows of a case are chosen, and these."""
    from verl.utils import tensordict_utils as tu

    numbers, rows = map(list, zip(*[*enumerate(rows_of(case, config))][chosen], strict=True))

    def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    # Each row's own, whichever rank has it.
    noise = [torch.Generator().manual_seed(1 + case.seed + 100 * number) for number in numbers]
    scales = {"advantages": (1.0, 1.0), "old_log_probs": (0.3, -6.0), "ref_log_prob": (0.3, -6.0)}
    more: dict[str, Any] = {
        name: nested(
            [torch.randn(len(row.response), generator=g) * scale + shift for row, g in zip(rows, noise, strict=True)]
        )
        for name, (scale, shift) in scales.items()
    }
    if options.get("critic"):
        of_rows = [torch.randn(2, len(row.response), generator=g) for row, g in zip(rows, noise, strict=True)]
        # Values as those of the model: where all are clipped there is no gradient to compare.
        more |= {"values": nested([0.1 * x[0] for x in of_rows]), "returns": nested([x[1] + 1 for x in of_rows])}
    if "dead" in options:
        lives = torch.tensor([number % options["dead"] > 0 for number in numbers])
        more["advantages"] = nested([x * live for x, live in zip(more["advantages"].unbind(), lives, strict=True)])
    if options.get("temperature") == "per_row":
        more["temperature"] = torch.cat([torch.rand(1, generator=g) + 0.5 for g in noise])
    if hasattr(config, "vision_config"):
        ids = [torch.cat([row.prompt, row.response]) for row in rows]
        more["position_ids"] = tu.nested_tensor_from_tensor_list(
            [positions_of_row(_meta_model(path), x, row.pixels, 0) for x, row in zip(ids, rows, strict=True)]
        )
        more["multi_modal_inputs"] = [row.pixels for row in rows]
    if options.get("routes", RECORDED) != RECORDED:
        named = [(number, row.uid, row.prompt, row.response) for number, row in zip(numbers, rows, strict=True)]
        more["routed_experts"] = routes_as(options["routes"], named, config)
    sessions = [row.session for row in rows]
    data = as_batch([row[:4] for row in rows], sessions, options, torch.Generator(), **more)
    if "distillation" in options:
        vocab = config.get_text_config().vocab_size
        add_teacher(
            data, options, [torch.Generator().manual_seed(case.seed + 999 * number) for number in numbers], vocab
        )
    return numbers, data


def _of_all_ranks(rows: list[int], values: list[torch.Tensor]) -> torch.Tensor:
    """The values of all rows, one behind the other."""
    parts: list[Any] = [None] * get_world_size()
    all_gather_object(parts, (rows, values))
    found = {row: value for some, theirs in parts for row, value in zip(some, theirs, strict=True)}
    return torch.cat([found[row] for row in sorted(found)])


def of_update(engine: Any, whole: Callable[[dict], dict[str, torch.Tensor]] = whole) -> dict[str, torch.Tensor]:
    """What an update leaves in an engine: whole gradients."""
    grads = whole({n: p.grad for n, p in engine.module.named_parameters() if p.grad is not None})
    return {f"gradient of {name}": x for name, x in grads.items()}


def measured(
    backend: str, path: str, case: Case, options: dict, shared: Callable[..., Any] = SHARED,
    left: Callable[[Any], dict[str, torch.Tensor]] = of_update,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What is measured of a case. left: what its update leaves, by `of_update` or as it does."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    # See test_vision_engine.
    with mock.patch.object(BaseModelOutputWithPooling, "mean", lambda x: x.pooler_output.mean(), create=True):
        engine = shared(backend, path, options)
        size = math.prod(options.get(name, 1) for name in ("ulysses", "tp", "cp"))  # ranks that have the same rows
        chosen = slice(get_rank() // size, None, get_world_size() // size)
        rows, data = _batch(case, path, engine.model_config.hf_config, options, chosen)
        is_forced = backend == "fsdp2" and "routed_experts" in data  # recorded ones are where stock's go by themselves
        with (
            towers_of_tensors(engine.module) if backend == "fsdp2" else nullcontext(),
            forced(engine) if is_forced else nullcontext(),
        ):
            return _passes(backend, engine, data, rows, options, left)


def _passes(
    backend: str, engine: Any, data: Any, rows: list[int], options: dict, left: Callable[[Any], dict]
) -> dict[str, torch.Tensor]:
    """Outputs and loss of an update, and what it leaves; outputs of ours in a log-prob pass, too."""
    from verl.utils import tensordict_utils as tu

    found = {}
    records = options.get("replay") == "R2" and backend != "fsdp2"
    if backend.startswith("prefix") or records:
        with engine.eval_mode(disable_auto_offload=True):
            inferred = engine.infer_batch(data.copy())["model_output"]
        if records:
            data["routed_experts"] = inferred.pop("routed_experts")
        found = {f"inferred {name}": _of_all_ranks(rows, _responses(x, data)) for name, x in inferred.items()}
    if "distillation" in options:
        tell_update(data, options)
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        tu.assign_non_tensor(data, return_model_output=not options.get("skip_zero_advantage"))
        # Stock's micro-batches are of one row, of which verl's loss of distillation wants a token that counts.
        loss = _loss(options) if backend.startswith("prefix") else or_nothing(_loss(options))
        output = engine.forward_backward_batch(data.copy(), loss)
        of_engine = left(engine)
    # Not the teacher's ids among the student's likeliest: two of these may be as likely.
    outputs = {name: x for name, x in output["model_output"].items() if not name.startswith("overlap_")}
    found |= {name: _of_all_ranks(rows, _responses(x, data)) for name, x in outputs.items()}
    found["loss"] = torch.tensor(sum(output["loss"]), dtype=torch.float64)
    torch.distributed.all_reduce(found["loss"])
    found["loss"] /= get_world_size()  # verl multiplies it by ranks of data, and those of a group have the same
    counts = {name: output["metrics"].get(f"prefix/{name}", 0.0) for name in COUNTS}
    return found | of_engine | {name: torch.tensor(count) for name, count in counts.items()}


def options_of(case: Case) -> dict[str, Any]:
    """Of an engine of ours; "turns" so that the tokenizer is loaded."""
    eager = {"attn_implementation": "eager"} if case.family == "gpt_oss" else {}
    dead = {"skip_zero_advantage": True, "entropy_coeff": 0.0} if "dead" in dict(case.options) else {}
    routes = dict(case.options).get("routes")
    replay = {"replay": "R2" if routes == RECORDED else "R3"} if routes else {}
    return {"verify": "off", "turns": True, **eager, **dead, **replay, **dict(case.options)}


def stock_options(case: Case) -> dict[str, Any]:
    """One row after the other."""
    alone = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    apart = (*OURS, "ulysses", "expert_parallel_size", "moe_implementation")
    return {k: v for k, v in options_of(case).items() if k not in apart} | alone


def errors_of(
    models: dict, case: Case, ours_of: Callable[..., dict[str, torch.Tensor]] | None = None,
    stock_of: Callable[..., dict[str, torch.Tensor]] | None = None,
) -> Found:  # fmt: skip
    """Relative errors of what ours gives from what stock does, one row after the other; tokens saved, and how many
    passes were in one another."""
    path = models[case.family]
    ours_of, stock_of = (
        ours_of or functools.partial(measured, "prefix"),
        stock_of or functools.partial(measured, "fsdp2"),
    )
    ours = ours_of(path, case, options_of(case))
    stock = stock_of(path, case, stock_options(case))
    saved, depth = (float(ours.pop(name)) for name in COUNTS)
    stock = {name: x for name, x in stock.items() if name not in COUNTS}
    stock |= {f"inferred {name}": stock[name] for name in ("log_probs", "entropy", "values") if name in stock}
    ours = {name: x for name, x in ours.items() if name in stock or not name.startswith("inferred ")}
    if "dead" in dict(case.options):  # outputs of the update are not wanted: they would be of every row
        stock = {name: x for name, x in stock.items() if name in ours or name not in ("log_probs", "entropy")}
    assert ours.keys() == stock.keys(), ours.keys() ^ stock.keys()
    # Small next to terms that cancel: a loss, whose terms are about 1, a parameter beside all others' gradients, and a
    # value, which sums up 128 hidden states of about 1, each times a weight that is drawn with a deviation of 0.02.
    norms = {name: x.double().norm() for name, x in stock.items()}
    total = sum(norm**2 for name, norm in norms.items() if name.startswith("gradient of ")) ** 0.5
    least = {name: 0.1 * total if name.startswith("gradient of ") else 1e-30 for name in stock} | {"loss": 1.0}
    least |= {name: 0.02 * (128 * len(x)) ** 0.5 for name, x in stock.items() if name.endswith("values")}
    errors = {name: ((ours[name] - x).double().norm() / max(norms[name], least[name])).item()
              for name, x in stock.items()}  # fmt: skip
    worst = max((error for name, error in errors.items() if name.startswith("gradient of ")), default=0.0)
    return (
        {name: error for name, error in errors.items() if error > TOLERANCE or "gradient" not in name}
        | {"gradients": worst},
        saved,
        int(depth),
    )


def run_batches(cases: st.SearchStrategy[Case], errors: Callable[[Case], list[Found]]) -> None:
    """`errors`, what `errors_of` finds on each rank, of a third of BATCHES cases, since other engines than
    FSDP2's, which test_fuzz.py draws, have its `verl_prefix.engine`: none is over TOLERANCE, and some case shares."""
    shared = []

    @settings(max_examples=max(3, -(-BATCHES // 3)), suppress_health_check=[*HealthCheck])
    @given(case=cases)
    def run(case: Case) -> None:
        found = errors(case)
        for name, error in ((name, error) for each, *_ in found for name, error in each.items()):
            assert error <= TOLERANCE, (name, error)
        shared.append(any(saved > 0 for _, saved, _ in found))

    run()
    assert any(shared)
