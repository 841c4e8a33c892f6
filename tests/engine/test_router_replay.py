"""Router replay: rows share what went to the same experts; ours is stock with the same routes forced on its rows."""

import contextlib
from collections.abc import Iterable

import pytest
import torch
from engines import TOLERANCE, _batch, _engine, _loss, _relative, _responses, as_batch
from forced_routes import forced
from pairs import every_value
from shared_models import OURS, SharedModels
from torch.distributed import all_reduce, get_rank, get_world_size
from whole_tensors import whole

from verl_prefix.engine import grouping, outputs
from verl_prefix.engine.together import RankError
from verl_prefix.testing import write_tiny_model

LAYERS, EXPERTS, CHOSEN = 3, 8, 2


def _routes(generator: torch.Generator, n: int) -> torch.Tensor:
    """[n, layers, k] int16, k different experts of each."""
    return torch.rand(n, LAYERS, EXPERTS, generator=generator).topk(CHOSEN)[1].to(torch.int16)


def routed(rows: list, agree: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Routes of rows (uid, prompt, response, mask), of which each agrees with its uid's in so many first tokens; the
    last token of a row has none, as a rollout records none."""
    generator, of_uid, found = torch.Generator().manual_seed(seed), {}, []
    for (uid, prompt, response, _), n in zip(rows, agree, strict=True):
        own = _routes(generator, len(prompt) + len(response))
        same = of_uid.setdefault(uid, _routes(generator, 400))
        own[:n] = same[:n]
        own[-1:] = 0
        found.append(own)
    return found


def _rows(lens: list[tuple[str, int, list[int]]], seed: int = 0) -> list:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for uid, prompt_len, response_lens in lens:
        prompt = torch.randint(3, 100, (prompt_len,), generator=generator)
        for n in response_lens:
            rows.append((uid, prompt, torch.randint(3, 100, (n,), generator=generator), torch.ones(n)))
    return rows


def batch_of(rows: list, routes: list[torch.Tensor]):
    nested = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
    return as_batch(rows, [0] * len(rows), {}, torch.Generator().manual_seed(9), routed_experts=nested)


def _groups(rows: list, agree: list[int], over: str = "uid") -> list:
    from verl_prefix.engine.grouping import TreeRule, group_rows
    from verl_prefix.engine.rows import BatchRows

    batch, trees = BatchRows(batch_of(rows, routed(rows, agree))), TreeRule(over)
    trees.see(batch.uids, batch.keys)
    assert trees.cuts_rows == (over == "batch"), "routes made turns of one prompt's rows"
    return group_rows(batch, trees)


@pytest.mark.parametrize("over", ["off", "uid", "batch"])
def test_rows_share_what_went_to_the_same_experts(over):
    rows = _rows([("a", 55, [4, 9, 6, 5, 3]), ("b", 55, [4, 4])])
    # Of "a": two agree in the whole prompt; one up to a block's end and a bit, one up to just before it; one nowhere.
    one, alone, other = _groups(rows, [54, 54, 50, 47, 0, 54, 54], over)
    shared = {row: fork.start for row, fork in zip(one.rows, one.forks, strict=True)}
    assert shared == {0: 54, 1: 54, 2: 54, 3: 54} and alone.rows == (4,) and other.rows == (5, 6)
    assert one.num_physical_tokens == 48 + 2 * 6 + (54 - 32) + 4 + 9 + 6 + 5  # tails are strands of their own
    assert other.num_physical_tokens == 54 + 8


def test_rows_that_went_the_same_way_are_the_groups_of_a_batch_without_routes():
    from verl_prefix.engine.grouping import TreeRule, group_rows
    from verl_prefix.engine.rows import BatchRows

    rows = _rows([("a", 55, [4, 9, 6]), ("b", 17, [1, 2]), ("d", 300, [2])])
    found = _groups(rows, [len(row[1]) - 1 for row in rows])
    data = batch_of(rows, routed(rows, [0] * len(rows))).exclude("routed_experts")
    assert found == group_rows(BatchRows(data), TreeRule())


def test_without_trees_rows_of_two_prompts_share_nothing_though_one_begins_with_the_other():
    from verl_prefix.engine.grouping import TreeRule, group_rows
    from verl_prefix.engine.rows import BatchRows

    (short,) = _rows([("a", 40, [4])])
    rows = [short, ("a", torch.cat([*short[1:3], short[1]]), *short[2:])]
    data = batch_of(rows, [_routes(torch.Generator().manual_seed(3), len(row[1]) + len(row[2])) for row in rows])
    for over, count in (("off", 2), ("batch", 1)):
        trees = TreeRule(over)
        assert len(group_rows(BatchRows(data), trees)) == count


def test_an_expert_of_the_last_shared_token_keeps_rows_apart():
    rows = _rows([("a", 17, [4, 4])])
    (shared,) = _groups(rows, [16, 16])
    assert shared.num_own_strand_tokens == 16
    for token, layer in ((15, 2), (0, 0), (7, 1)):
        from verl_prefix.engine.grouping import TreeRule, group_rows
        from verl_prefix.engine.rows import BatchRows

        routes = routed(rows, [16, 16])
        routes[1][token, layer] = routes[1][token, layer].flip(0)  # the same experts in another order
        assert len(group_rows(BatchRows(batch_of(rows, routes)), TreeRule())) == 2


def test_routes_of_other_rows_are_refused():
    from verl_prefix.engine.rows import BatchRows

    rows = _rows([("a", 17, [4, 5])])
    data = batch_of(rows, routed(rows, [16, 16])[::-1])
    with pytest.raises(ValueError, match="routed_experts has other lengths than the rows"):
        BatchRows(data).expert_routes  # noqa: B018


EXPERTS_OF = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"} | dict.fromkeys(
    ("glm4_moe", "deepseek_v3"), "n_routed_experts"
)
EAGER = {"family": "gpt_oss", "attn_implementation": "eager", "use_remove_padding": False}
PHASED = {"schedule": "phased", "wave_tokens": 40}
VARLEN = {"ulysses": 2, "attn_implementation": "varlen_on_cpu"}
CASES = {
    "packed": {"schedule": "packed"},
    "phased": PHASED,
    "auto": {"min_speedup": 1e-6},
    "gpt_oss": EAGER | {"schedule": "packed"},
    "gpt_oss_phased": EAGER | PHASED,
    "glm4_moe": {"family": "glm4_moe", "schedule": "packed"},
    "glm4_moe_phased": {"family": "glm4_moe"} | PHASED,
    "deepseek_v3": {"family": "deepseek_v3", "schedule": "packed"},
    "deepseek_v3_phased_checkpointed": {"family": "deepseek_v3", "gradient_checkpointing": True} | PHASED,
    "checkpointed": {"schedule": "packed", "gradient_checkpointing": True},
    "phased_checkpointed": PHASED | {"gradient_checkpointing": True, "offload": True},
    "agree": {"schedule": "packed", "routes": "agree"},
    "replicas": {"schedule": "packed", "routes": "replicas"},
    "free": {"schedule": "packed", "routes": "free"},
    "exchanged": {"schedule": "packed", "exchange": "auto"},
    "replicas_exchanged_phased": PHASED | {"routes": "replicas", "exchange": "auto"},
    "turns": {"schedule": "packed", "turns": True, "routes": "agree"},
    "turns_tails_exchanged": {"schedule": "packed", "turns": "odd", "exchange": "auto"},
    "turns_phased": PHASED | {"turns": "kept", "routes": "agree"},
    "trees_of_the_batch": {"schedule": "packed", "trees": "batch", "routes": "agree"},
    "trees_off": {"schedule": "packed", "trees": "off"},
    "padded": {"schedule": "packed", "padded": True},
    "tool_tokens_phased": PHASED | {"tool_tokens": True},
    "no_advantage": {"schedule": "packed", "dead": ("b", "e"), "skip_zero_advantage": True, "entropy_coeff": 0.0},
    "upper_layers_trained": {"schedule": "packed", "trained": r"layers\.2|lm_head"},
    "verified": {"schedule": "packed", "verify": "first_step"},
    "verified_phased": PHASED | {"verify": "first_step", "routes": "agree"},
    "stock": {"schedule": "stock"},
    "stock_padded": {"schedule": "stock", "use_remove_padding": False},
    "stock_checkpointed": {"schedule": "stock", "gradient_checkpointing": True},
    "ulysses": VARLEN | {"schedule": "packed"},
    "ulysses_phased_checkpointed": VARLEN | PHASED | {"gradient_checkpointing": True},
    "ulysses_verified": VARLEN | {"schedule": "packed", "verify": "first_step"},
    "ulysses_stock": VARLEN | {"schedule": "stock"},
}  # fmt: skip
QUICK = ("turns_tails_exchanged", "ulysses_phased_checkpointed")
IN_MORE = every_value(CASES, QUICK)
SHARED = SharedModels(_engine)  # on ranks
GATES = ("gate.weight", "router.weight")


def _options(case: str, **more: object) -> dict:
    return {"routes": "tails", "replay": "R3", "verify": "off", "family": "qwen3_moe"} | CASES[case] | more


def _of_stock(options: dict) -> dict:
    return {k: v for k, v in options.items() if k not in (*OURS, "ulysses", "replay")}


def _engine_and_rows(backend: str, path: str, options: dict) -> tuple:
    """An engine and this rank's rows, which are those of all ranks of a Ulysses group."""
    if options.get("attn_implementation") == "varlen_on_cpu":
        import varlen  # noqa: F401
    engine = SHARED(backend, path, options)
    config = engine.model_config.hf_config
    return engine, _batch(get_rank() // options.get("on_copies", 1), config.vocab_size, options | {"config": config})


def _inferred(engine, data) -> dict:
    with engine.eval_mode(disable_auto_offload=True):
        return engine.infer_batch(data.copy())["model_output"]


def _updated(engine, data, options: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """What an update leaves, and its metrics."""
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data.copy(), _loss(options))
        grads = whole({n: p.grad for n, p in engine.module.named_parameters() if p.grad is not None})
        norm = engine.optimizer_step()
    loss = torch.tensor(sum(output["loss"]), dtype=torch.float64)
    all_reduce(loss)
    return {
        "loss": loss, "grad_norm": torch.tensor(norm), "grads": torch.cat([g.flatten() for g in grads.values()]),
        "gates": torch.cat([torch.zeros(1), *(g.flatten() for n, g in grads.items() if n.endswith(GATES))]),
        "params": torch.cat([p.flatten() for p in whole(dict(engine.module.named_parameters())).values()]),
    }, output["metrics"]  # fmt: skip


def _outputs(inferred: dict, data) -> dict[str, torch.Tensor]:
    return {name: torch.cat(_responses(inferred[name], data)) for name in ("log_probs", "entropy")}


def _measured(backend: str, path: str, options: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """Log-probs, what an update leaves, and its metrics; stock's with forced routes."""
    engine, data = _engine_and_rows(backend, path, options)
    with contextlib.nullcontext() if backend == "prefix" else forced(engine):
        outputs = _outputs(_inferred(engine, data), data)
        left, metrics = _updated(engine, data, options)
    return outputs | left, metrics


def _errors(models: dict, case: str, **more: object) -> tuple[dict[str, float], dict]:
    options = _options(case, **more)
    options["on_copies"] = options.get("ulysses", 1)
    path = models[options["family"]]
    ours, metrics = _measured("prefix", path, options)
    stock, _ = _measured("fsdp2", path, _of_stock(options))
    return {name: _relative(ours[name], x) for name, x in stock.items()}, metrics


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("replay")
    return {
        name: write_tiny_model(tmp / name, family=name, num_hidden_layers=3, **{field: EXPERTS})
        for name, field in EXPERTS_OF.items()
    } | {"qwen3": write_tiny_model(tmp / "qwen3")}


def _worlds(cases: Iterable[str], shown: Iterable[str] = QUICK) -> list:
    """Of these cases those of make test are `shown`."""

    def marks(world: int, case: str) -> object:
        if world == 1 and "ulysses" in CASES[case]:
            return None
        quick = () if case in shown else pytest.mark.more if case in (*QUICK, *IN_MORE) else pytest.mark.full
        return pytest.mark.full if world == 1 else quick

    found = [(world, case, marks(world, case)) for world in (2, 1) for case in cases]
    return [pytest.param(w, c, marks=m, id=f"{w}-{c}") for w, c, m in found if m is not None]


@pytest.mark.parametrize(("world", "case"), _worlds(CASES))
def test_ours_replays_what_is_forced_on_stock_rows(ranks, models, world, case):
    found = ranks(world, models)(_errors, case)
    for errors, metrics in found:
        assert max(errors.values()) <= TOLERANCE, errors
        assert ("prefix/verify_gradients" in metrics) == ("verify" in CASES[case])
    if CASES[case].get("schedule") != "stock":
        saved = [metrics["prefix/tokens_saved"][0] for _, metrics in found]
        assert (max(saved) > 0) == (CASES[case].get("routes") != "free"), saved


def _without_replay(models: dict, case: str) -> float:
    """How far log-probs are off where ours routes by itself."""
    options = _options(case)
    (ours, data), (stock, _) = (
        _engine_and_rows(backend, models[options["family"]], of)
        for backend, of in (("prefix", options | {"replay": "disabled"}), ("fsdp2", options))
    )
    own = _outputs(_inferred(ours, data.exclude("routed_experts")), data)["log_probs"]
    with forced(stock):
        return _relative(own, _outputs(_inferred(stock, data), data)["log_probs"])


@pytest.mark.parametrize("case", ["packed", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_routes_matter(ranks, models, case):
    assert ranks(1, models)(_without_replay, case)[0] > 100 * TOLERANCE


def _recorded(models: dict, case: str) -> tuple[dict[str, float], list[int], dict]:
    """R2: errors of the log-probs that record, against stock rows with their own routes, and of the update that replays
    the record, against stock rows with that forced; rows whose record is not where stock's tokens went; metrics."""
    from verl.utils import tensordict_utils as tu

    options = _options(case, replay="R2")
    options["on_copies"] = options.get("ulysses", 1)
    path = models[options["family"]]
    (ours, data), (stock, _) = (
        _engine_and_rows(backend, path, of) for backend, of in (("prefix", options), ("fsdp2", _of_stock(options)))
    )
    inferred = _inferred(ours, data.exclude("routed_experts"))
    data["routed_experts"] = torch.zeros_like(data["routed_experts"])
    one_by_one = data.copy()
    tu.assign_non_tensor(one_by_one, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    with forced(stock) as own:
        theirs = _outputs(_inferred(stock, data), data)
        own.clear()
        _inferred(stock, one_by_one)
    errors = {name: _relative(_outputs(inferred, data)[name], x) for name, x in theirs.items()}
    record, lens = inferred["routed_experts"], [len(row) for row in _responses(inferred["log_probs"], data)]
    assert record.dtype == torch.int16 and torch.equal(record.offsets(), data["input_ids"].offsets())
    assert not any(row[-1].any() for row in record.unbind()) or options.get("turns") or options["schedule"] == "stock"
    wrong = [
        row for row, (found, native, n) in enumerate(zip(record.unbind(), own, lens, strict=True))
        if n and not torch.equal(found[:-1].sort(-1).values, native[: len(found) - 1].sort(-1).values)
    ]  # fmt: skip
    data["routed_experts"] = record
    mine, metrics = _updated(ours, data, options)
    with forced(stock):
        left, _ = _updated(stock, data, options)
    return errors | {name: _relative(mine[name], x) for name, x in left.items()}, wrong, metrics


R2 = (
    "packed", "phased", "auto", "gpt_oss", "glm4_moe_phased", "deepseek_v3", "phased_checkpointed", "exchanged",
    "turns",
    "turns_tails_exchanged", "trees_of_the_batch", "padded", "stock", "stock_padded", "ulysses",
    "ulysses_phased_checkpointed", "ulysses_stock", "verified",
)  # fmt: skip


@pytest.mark.parametrize(("world", "case"), _worlds(R2, shown=QUICK[:1]))
def test_old_log_probs_record_and_updates_replay(ranks, models, world, case):
    for errors, wrong, metrics in ranks(world, models)(_recorded, case):
        assert max(errors.values()) <= TOLERANCE, errors
        assert not wrong, wrong
        assert "stock" in case or metrics["prefix/tokens_saved"][0] > 0


def _shifted(patch) -> None:
    """A token goes where the token before it went."""
    run = outputs.TokenBatch
    patch.setattr(outputs, "TokenBatch", lambda *args, routes, **more: run(*args, routes=routes.roll(1, 0), **more))


def _of_another_row(patch) -> None:
    """Tokens go where the row behind theirs went."""
    run = outputs.TokenBatch

    def other(*args, routes, offsets, **more):
        return run(*args, routes=routes.roll(offsets[1] - offsets[-1], 0), offsets=offsets, **more)

    patch.setattr(outputs, "TokenBatch", other)


def _shared_by_prompt(patch) -> None:
    """Rows of a prompt share it wherever they went."""
    patch.setattr(grouping, "_experts_before", lambda routes, _: torch.zeros(len(routes), dtype=torch.int64))


def _gate_without_gradient(patch) -> None:
    gather = torch.Tensor.gather
    patch.setattr(torch.Tensor, "gather", lambda x, *args: gather(x.detach() + 0 * x if x.dim() == 2 else x, *args))


def _weights_of_own_choice(patch) -> None:
    """Tokens go to the recorded experts, with the weights of those that the router finds best."""
    gather = torch.Tensor.gather

    def best(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        return x.topk(CHOSEN).values if index.shape[1:] == (CHOSEN,) else gather(x, dim, index)

    patch.setattr(torch.Tensor, "gather", best)


BROKEN = {
    "shifted": _shifted, "of_another_row": _of_another_row, "shared_by_prompt": _shared_by_prompt,
    "gate_without_gradient": _gate_without_gradient, "weights_of_own_choice": _weights_of_own_choice,
}  # fmt: skip


def _wrong(models: dict, case: str, how: str) -> tuple[float, str]:
    """The largest error of what is broken, and what the self-check says of it."""
    options = _options(case, routes="free" if how == "shared_by_prompt" else "tails")
    path, said = models[options["family"]], ""
    stock, _ = _measured("fsdp2", path, _of_stock(options))
    with pytest.MonkeyPatch.context() as patch:
        BROKEN[how](patch)
        ours, _ = _measured("prefix", path, options)
        try:
            _measured("prefix", path, options | {"verify": "first_step"})
        except RuntimeError as error:
            said = str(error)
    return max(_relative(ours[name], x) for name, x in stock.items()), said


@pytest.mark.parametrize("case", ["packed", pytest.param("phased", marks=pytest.mark.more)])
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.more if how == "of_another_row" else ()) for how in BROKEN]
)
def test_what_is_broken_on_purpose_is_seen(ranks, models, how, case):
    error, said = ranks(1, models)(_wrong, case, how)[0]
    assert error > 100 * TOLERANCE
    # verl's own path, with which the self-check compares, runs the same routers.
    is_seen = how not in ("gate_without_gradient", "weights_of_own_choice")
    assert ("prefix.verify, update 1: " in said) == is_seen, said


def _of_ref(models: dict) -> list[float]:
    """How far ref's log-probs are from stock's with its own routes, where batches have others: those of an engine for
    ref alone, in R2 and R3 of the actor without its adapters, and of the actor."""
    options, path, found = _options("packed"), models["qwen3_moe"], []
    stock, data = _engine_and_rows("fsdp2", path, options)
    own = _outputs(_inferred(stock, data.exclude("routed_experts")), data)["log_probs"]
    ref, _ = _engine("prefix", path, {k: x for k, x in options.items() if k != "replay"}, True), None
    found.append(_relative(_outputs(_inferred(ref, data), data)["log_probs"], own))
    for mode in ("R2", "R3"):
        engine = _engine("prefix", path, options | {"replay": mode, "lora_targets": ["q_proj"]})
        with engine.disable_adapter():
            inferred = _inferred(engine, data)
        assert "routed_experts" not in inferred
        found.append(_relative(_outputs(inferred, data)["log_probs"], own))
    return [*found, _relative(_outputs(_inferred(engine, data), data)["log_probs"], own)]


def test_ref_replays_nothing(ranks, models):
    *of_ref, of_actor = ranks(1, models)(_of_ref)[0]
    assert max(of_ref) <= TOLERANCE and of_actor > 100 * TOLERANCE


def _refusals(models: dict) -> None:
    options, path = _options("packed"), models["qwen3_moe"]
    for mode, batch, message in (
        ("R3", lambda data: data.exclude("routed_experts"), "mode=R3, .* no routed_experts; set .* hand on out.routed"),
        ("disabled", lambda data: data, "routed_experts, which nobody replays"),
        ("R3", _with_more_layers, r"routed_experts has \[4, 2\] layers and experts of a token, and the model \[3, 2\]"),
    ):
        engine, data = _engine_and_rows("prefix", path, options | {"replay": mode})
        with pytest.raises(ValueError, match=message):
            _inferred(engine, batch(data))
    engine, data = _engine_and_rows("prefix", path, options | {"replay": "R2"})
    with pytest.raises(ValueError, match="mode=R2, and the batch has no routed_experts, which old log-probs record"):
        _updated(engine, data.exclude("routed_experts"), options)
    with pytest.raises(ValueError, match="router_replay.mode=R2: qwen3 has other routers than"):
        _engine("prefix", models["qwen3"], {"replay": "R2"})


def _with_more_layers(data):
    data = data.copy()
    routes = data["routed_experts"]
    data["routed_experts"] = torch.nested.nested_tensor_from_jagged(routes.values()[:, [0, 0, 1, 2]], routes.offsets())
    return data


def test_what_nobody_can_replay_is_refused(ranks, models):
    ranks(1, models)(_refusals)


def _fails_on_the_last(models: dict) -> str:
    engine, data = _engine_and_rows("prefix", models["qwen3_moe"], _options("packed") | {"replay": "R3"})
    is_last = get_rank() == get_world_size() - 1
    with pytest.raises((ValueError, RankError)) as error:
        _inferred(engine, _with_more_layers(data) if is_last else data)
    return str(error.value)


def test_routes_that_one_rank_cannot_replay_end_all_ranks(ranks, models):
    first, last = ranks(2, models)(_fails_on_the_last)
    assert "rank 1 failed while reading routes" in first and "layers and experts of a token" in last


def _loads(models: dict) -> dict:
    options = _options("packed")
    engine, data = _engine_and_rows("prefix", models["qwen3_moe"], options)
    routes = torch.zeros_like(data["routed_experts"].values())
    routes[..., 1] = 3  # all tokens of all rows
    data["routed_experts"] = torch.nested.nested_tensor_from_jagged(routes, data["routed_experts"].offsets())
    return _updated(engine, data, options)[1]


def test_loads_of_experts_are_those_of_recorded_routes(ranks, models):
    metrics = ranks(1, models)(_loads)[0]
    assert metrics["prefix/moe/max_vio/avg"][0] == EXPERTS / CHOSEN - 1


def _half(models: dict, case: str) -> dict[str, dict[str, float]]:
    """What bf16 misses of fp32, ours and stock's, with the same routes, and by a loss that clips nothing: a choice of a
    router's own, or a ratio beside the clip, would decide by rounding."""
    options, found = _options(case, routes="whole", policy_loss={"loss_mode": "gpg"}), {}
    path = models[options["family"]]
    truth, _ = _measured("fsdp2", path, _of_stock(options))
    for name, backend, of in (("ours", "prefix", options), ("stock", "fsdp2", _of_stock(options))):
        half, _ = _measured(backend, path, of | {"param_dtype": "bf16"})
        found[name] = {n: _relative(half[n].float(), truth[n]) for n in ("log_probs", "entropy", "grads")}
    return found


@pytest.mark.parametrize(
    "case", ["glm4_moe", *(pytest.param(x, marks=pytest.mark.more) for x in ("packed", "phased", "deepseek_v3"))]
)
def test_half_precision_misses_fp32_by_no_more_than_stock_does(ranks, models, case):
    found = ranks(1, models)(_half, case)[0]
    for name, error in found["ours"].items():
        assert error <= 1.3 * found["stock"][name], (name, found)
