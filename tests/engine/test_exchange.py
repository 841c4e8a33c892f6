"""Rows that travel between ranks inside the engine, against verl's stock engine with every group scattered over all of
them: 1, 2 and 4 gloo ranks, fp32. Does not exercise CUDA or NCCL.

One set of processes per number of ranks runs every case; the tests read what came back.
"""

import logging
import os
import random

import pytest
import torch
from engines import PAD, TOLERANCE, _engine, _loss, _padded, _relative, _responses, _turns
from whole_tensors import whole

from verl_prefix.testing import write_tiny_model

AGG_MODES = ("token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# (prompt length, response lengths) of each group, of all ranks together; rows are dealt to ranks in turn.
GROUPS = {
    "ragged": [
        (23, [9, 17, 5, 12]), (41, [3, 11, 1, 7, 4]), (1, [6, 8]), (17, [13]), (37, [5, 12, 19, 2]), (29, [12] * 4),
    ],
    "one_prompt": [(31, [2 + i % 7 for i in range(60)])],
    "groups_of_one": [(11 + 3 * i, [4 + i]) for i in range(8)],
    "fewer_groups_than_ranks": [(60, [2, 3]), (50, [1, 2])],
    "empty_responses": [(23, [0, 0, 4, 0]), (41, [0] * 4), (17, [5, 9, 2, 3])],
}  # fmt: skip
# Engines that every case runs in, by rank count; a batch of each case goes through stock and these.
ENGINES = {
    "packed": {"schedule": "packed"},
    "phased": {"schedule": "phased", "wave_tokens": 40},
    "auto": {"schedule": "auto", "min_speedup": 1e-6},
    "off": {"schedule": "packed", "exchange": "off"},
    "gate_shut": {"min_speedup": 1e6},
}
CASES = {
    "default": {},
    "fewer_groups_than_ranks": {"groups": "fewer_groups_than_ranks"},
    "one_prompt": {"groups": "one_prompt"},
    # A TensorDict without rows can hold tensors alone.
    "empty_rank": {"dealt": "empty", "budget": 10**5, "uid": False, "extra": False},
    "padded": {"padded": True, "use_kl_loss": True},
    "small_budget": {"budget": 60},
    "static_batch_size": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
    "temperature_per_row": {"temperature": "per_row"},
    "no_uid": {"uid": False},
    "groups_of_one": {"groups": "groups_of_one"},
    "empty_responses": {"groups": "empty_responses"},
    "uneven": {"dealt": "uneven", "budget": 10**5},
    "turns": {"turns": True},
    "turns_without_sessions": {"turns": True, "sessions": False},
    "turns_of_two_sessions": {"turns": "few"},
    "turns_padded": {"turns": True, "padded": True, "use_kl_loss": True},
    "turns_small_budget": {"turns": True, "budget": 130},
    "custom_loss": {"custom_loss": True},
    "gspo": {"policy_loss": {"loss_mode": "gspo"}},
    **{f"loss_{mode}": {"loss_agg_mode": mode} for mode in AGG_MODES},
}
# Of these alone at 1 and 4 ranks, in engines other than packed, and with packed's self-check.
FEW = (
    "default", "fewer_groups_than_ranks", "one_prompt", "empty_rank", "padded", "turns", "turns_of_two_sessions",
)  # fmt: skip
TREES = ("batch", "off")  # engines of the case turns alone


def scattered(rank: int, world: int, vocab: int, options: dict, seed: int = 0):
    """This rank's rows of a batch whose groups lie on all ranks; `row` is each row's number in the whole batch."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)
    made = turns_of_all(vocab, generator) if "turns" in options else []
    if options.get("turns") == "few":
        made = [row for row in made if row[0] == "c"]
    for uid, (prompt_len, lens) in enumerate([] if made else GROUPS[options.get("groups", "ragged")]):
        prompt = torch.randint(3, vocab, (prompt_len,), generator=generator)
        responses = (torch.randint(3, vocab, (n,), generator=generator) for n in lens)
        made += [(f"uid{uid}", prompt, response, session) for session, response in enumerate(responses)]
    rows = []
    for uid, prompt, response, session in made:
        n = len(response)
        floats = [
            torch.randn(n, generator=generator) * scale + shift for scale, shift in ((1, 1), (0.3, -6), (0.3, -6))
        ]
        mask = torch.ones(n, dtype=torch.int64) * (not uid.startswith("pad"))
        mask[2:4] = 0
        rows.append([uid, prompt, response, mask, *floats, torch.rand(1, generator=generator).item() + 0.5, session])
    dealt = [[i for i in range(len(rows)) if i % world == r] for r in range(world)]
    if "dealt" in options and world > 1:  # most of rank 0's rows, or all, are the last rank's
        kept = options["dealt"] == "uneven"
        dealt[-1], dealt[0] = dealt[-1] + dealt[0][kept:], dealt[0][:kept]
    chosen = [(i, rows[i]) for i in dealt[rank]]
    random.Random(rank).shuffle(chosen)
    order, rows = [i for i, _ in chosen], [row for _, row in chosen]

    if not rows:
        data = scattered(world - 1, world, vocab, options, seed)
        return tu.get_tensordict(
            {n: _nothing(x) for n, x in _per_row(data).items()},
            {n: x.data for n, x in data.items() if n not in _per_row(data)},
        )

    def nested(tensors):
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)

    fields = {
        "prompts": nested(r[1] for r in rows),
        "responses": nested(r[2] for r in rows),
        "input_ids": nested(torch.cat([r[1], r[2]]) for r in rows),
        "position_ids": nested(torch.arange(len(r[1]) + len(r[2])) for r in rows),
        "loss_mask": nested(r[3] for r in rows),
        "response_mask": nested(r[3] for r in rows),
        "advantages": nested(r[4] for r in rows),
        "old_log_probs": nested(r[5] for r in rows),
        "ref_log_prob": nested(r[6] for r in rows),
        "row": torch.tensor(order),
        "routed": nested(torch.full((len(r[1]) + len(r[2]), 2, 3), i, dtype=torch.int32) for i, r in chosen),
    }
    if options.get("extra", True):
        fields["extra_info"] = [{"row": i, 3: (None, [1.5, "text"]), "lens": torch.arange(i % 3)} for i in order]
    if options.get("uid", True):
        fields["uid"] = [r[0] for r in rows]
        if options.get("sessions", True):
            fields["session_id"] = [r[8] for r in rows]
    if options.get("temperature") == "per_row":
        fields["temperature"] = torch.tensor([r[7] for r in rows])
    flags = {
        "use_dynamic_bsz": options.get("use_dynamic_bsz", True),
        "max_token_len_per_gpu": options.get("budget", 400),
        "micro_batch_size_per_gpu": options.get("micro_batch_size_per_gpu", 2),
        "use_remove_padding": True,
        "calculate_entropy": True,
        "global_batch_size": len(made),
    }
    if "temperature" not in fields:
        flags["temperature"] = 0.9
    if options.get("padded"):
        fields.pop("routed")
        return _padded(fields, flags, width=128)
    return tu.get_tensordict(fields, flags)


def turns_of_all(vocab: int, generator: torch.Generator) -> list[tuple]:
    """(uid, prompt, response, session) of a row per turn. Two sessions have equal rows, one has a single turn, one an
    empty response, and one row is padding."""
    rows = [row for half in (0, 1) for row in _turns(half, vocab, generator)]
    single, (uid, *pair, _) = _turns(0, vocab, generator)[0], rows[0]
    empty = rows[-1][1], rows[-1][2][:0]
    return [*rows, (uid, *pair, 2), ("a", *single[1:3], 3), ("d", *empty, 1), (PAD, *single[1:3], 0)]


def _most_saved(vocab: int) -> int:
    """Tokens that any sharing inside of uids saves of the turns; an empty response is not computed."""
    rows = [
        (uid, *torch.cat(pair).tolist()[:-1]) for uid, *pair, _ in turns_of_all(vocab, torch.Generator().manual_seed(0))
    ]
    return sum(len(row) - 1 for row in rows) - len({row[: i + 1] for row in rows for i in range(1, len(row))})


def _per_row(data) -> dict:
    from tensordict import NonTensorData

    return {name: data.get(name) for name in data.keys() if not isinstance(data.get(name), NonTensorData)}


def _nothing(x: torch.Tensor) -> torch.Tensor:
    if not x.is_nested:
        return x[:0]
    return torch.nested.nested_tensor_from_jagged(x.values()[:0], torch.zeros(1, dtype=torch.int64))


def _in_order(data, outputs: dict) -> dict[str, torch.Tensor]:
    """Outputs of all ranks' rows, in the order of the whole batch."""
    names = ("log_probs", "entropy")
    rows = {name: _responses(outputs[name], data) if len(data) else [] for name in names}
    mine = {row: {name: rows[name][i] for name in names} for i, row in enumerate(data["row"].tolist())}
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    merged = dict(pair for one in every for pair in one.items())
    return {name: torch.cat([merged[row][name] for row in sorted(merged)]) for name in names}


def _reads_extra_info(loss):
    """A loss of a user's own, which reads what verl's do not."""
    from verl.utils import tensordict_utils as tu

    def custom(model_output, data, dp_group=None):
        assert [one["row"] for one in tu.get(data, "extra_info")] == data["row"].tolist()
        return loss(model_output=model_output, data=data, dp_group=dp_group)

    return custom


def _measure(engine, rank: int, world: int, options: dict, seed: int = 0) -> dict:
    """Outputs of all rows, total loss and gradients; weights stay."""
    data = scattered(rank, world, engine.model_config.hf_config.vocab_size, options, seed)
    own = data["row"].tolist()
    result = {}
    if not options.keys() & {"policy_loss", "loss_agg_mode"}:  # whose log-probs are those of the case default
        with engine.eval_mode(disable_auto_offload=True):
            inferred = engine.infer_batch(data.copy())
        assert data["row"].tolist() == own, "the caller's batch changed"
        result = _in_order(data, inferred["model_output"])
        assert inferred["model_output"]["log_probs"].offsets().diff().equal(data["input_ids"].offsets().diff())
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        loss = _loss(options)
        output = engine.forward_backward_batch(data, _reads_extra_info(loss) if options.get("custom_loss") else loss)
        result["grads"] = whole({n: p.grad for n, p in engine.module.named_parameters() if p.requires_grad})
    loss = torch.tensor(sum(output["loss"]), dtype=torch.float64)
    torch.distributed.all_reduce(loss)
    result["loss"], result["metrics"] = loss.item(), output["metrics"]
    return result


def _errors(ours: dict, stock: dict) -> dict[str, float]:
    errors = {name: _relative(ours[name], stock[name]) for name in ("log_probs", "entropy") if name in stock}
    errors["grads"] = max(_relative(ours["grads"][name], grad) for name, grad in stock["grads"].items())
    errors["loss"] = abs(ours["loss"] - stock["loss"]) / abs(stock["loss"])
    errors["metric names"] = float(bool(set(stock["metrics"]) - set(ours["metrics"])))
    return errors


def _torn(engine, rank: int, world: int) -> tuple[dict[str, float], list[str]]:
    """Metrics and log of a step of two mini-batches and as many epochs, without log-probs before it. Every rank has a
    prompt's rows in one of them, and a row of padding; all prompts but d, and the padding, are in the other one on the
    ranks beside."""
    from verl.utils import tensordict_utils as tu

    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("verl_prefix.engine.metrics.sharing_advice")
    logger.addHandler(handler)
    data = scattered(rank, world, engine.model_config.hf_config.vocab_size, CASES["turns"])
    uids = [uid if uid in ("a", "b", "c", "d") else PAD for uid in tu.get(data, "uid")]
    uids[uids.index("c")] = PAD
    tu.assign_non_tensor_stack(data, "uid", uids)
    place = [1 if uid == "d" else (rank + ["a", "b", PAD, "c"].index(uid)) % 2 for uid in uids]
    for i in range(4):  # the second epoch in another order, which verl's may have
        rows = tu.index_select_tensor_dict(data, (torch.tensor(place) == i % 2).nonzero().flatten())
        rows = rows if i < 2 else tu.index_select_tensor_dict(rows, torch.arange(len(rows)).flip(0))
        tu.assign_non_tensor(rows, update_lr_scheduler=i == 3)
        with engine.train_mode(disable_auto_offload=True):
            output = engine.train_batch(rows, _loss({}))
    logger.removeHandler(handler)
    every = [None] * world
    torch.distributed.all_gather_object(every, {*zip(uids, place, strict=True)})
    found = set().union(*every)
    metrics = {name: x[0] for name, x in output["metrics"].items() if name.startswith("prefix/")}
    return metrics | {"torn": sum({(uid, 0), (uid, 1)} <= found for uid in "abcd")}, said


def _train(engine, rank: int, world: int) -> torch.Tensor:
    """Weights after three mini-batches, scattered differently."""
    for seed in range(3):
        data = scattered(rank, world, engine.model_config.hf_config.vocab_size, {}, seed)
        with engine.train_mode(disable_auto_offload=True):
            engine.train_batch(data, _loss({}))
    return torch.cat([p.flatten() for p in whole(dict(engine.module.named_parameters())).values()])


def _worker(rank: int, world: int, rendezvous: str, path: str, out: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), VERL_PLATFORM="cpu")
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    stock, results, truth, warned = _engine("fsdp2", path, {}), {}, {}, []
    handler = logging.Handler()
    handler.emit = warned.append
    logging.getLogger("verl_prefix.engine.travel.exchange").addHandler(handler)
    for case, options in CASES.items():
        if world == 2 or case in FEW:
            # An empty rank is what stock cannot do.
            theirs = options | ({"dealt": "uneven"} if options.get("dealt") == "empty" else {})
            truth[case] = _measure(stock, rank, world, theirs)
    weights = _train(stock, rank, world)
    for name, engine_options in ENGINES.items():
        made = {"turns": True, "exchange": "auto", "verify": 1 if name == "packed" else "off"} | engine_options
        checked = unchecked = _engine("prefix", path, made)
        if name == "packed":
            unchecked = _engine("prefix", path, made | {"verify": "off"})
        for case in truth if name == "packed" else [case for case in FEW if case in truth]:
            if name in ("off", "gate_shut") and case != "default":
                continue
            engine = checked if case in FEW else unchecked
            ours = _measure(engine, rank, world, CASES[case])
            metrics = {n: x[0] for n, x in ours["metrics"].items() if n.startswith(("prefix/", "timing_s/prefix"))}
            metrics |= {"warnings": len(warned), "most": _most_saved(engine.model_config.hf_config.vocab_size)}
            results[name, case] = _errors(ours, truth[case]), metrics
        ours = _train(checked, rank, world)
        results[name, "default"][0]["weights"] = _relative(ours, weights)
    torn = _torn(
        _engine("prefix", path, {"exchange": "auto", "verify": "off", "schedule": "packed", "epochs": 2}), rank, world
    )
    results["packed", "torn_turns"] = {}, dict(torn[0], said=torn[1])
    if world == 2:
        lora = {"exchange": "auto", "lora_targets": "all-linear"}
        both = [_measure(_engine(backend, path, lora), rank, world, {}) for backend in ("prefix", "fsdp2")]
        results["packed", "lora"] = _errors(*both), {}
        for trees in TREES:
            engine = _engine("prefix", path, {"turns": True, "exchange": "auto", "verify": "off", "trees": trees})
            ours = _measure(engine, rank, world, CASES["turns"])
            metrics = {n: x[0] for n, x in ours["metrics"].items() if n.startswith("prefix/")}
            results[trees, "turns"] = _errors(ours, truth["turns"]), metrics
    torch.save(results, f"{out}.{rank}")
    torch.distributed.destroy_process_group()


RANKS = [pytest.param(n, id=f"{n}ranks", marks=pytest.mark.more if n == 2 else pytest.mark.full) for n in (1, 2, 4)]


@pytest.fixture(scope="module", params=RANKS)
def results(request, tmp_path_factory, spawn):
    tmp, world = tmp_path_factory.mktemp("exchange"), request.param
    args = (world, str(tmp / "rendezvous"), write_tiny_model(tmp / "model"), str(tmp / "out"))
    spawn(_worker, args=args, nprocs=world)
    return [torch.load(f"{tmp / 'out'}.{rank}") for rank in range(world)]


def test_scattered_groups_are_computed_as_stock_computes_them(results):
    assert len(results[0]) >= len(ENGINES) + 2 * len(FEW)
    for rank, result in enumerate(results):
        for case, (errors, _) in result.items():
            worst = {name: error for name, error in errors.items() if not error <= TOLERANCE}
            assert not worst, f"rank {rank}, {case}: relative errors over {TOLERANCE}: {worst}"
        split = {case for (_, case), (_, metrics) in result.items() if metrics.get("prefix/split_uids")}
        assert all("turns" in case for case in split), split


def test_torn_groups_share_as_much_as_whole_ones(results):
    world = len(results)
    for engine in ("packed", "phased", "auto"):
        metrics = [result[engine, "default"][1] for result in results]
        groups = GROUPS["ragged"]
        logical = sum(n + (p - 1) * len(lens) for p, lens in groups for n in [sum(lens)])
        computed = sum(p - 1 + sum(lens) for p, lens in groups)
        (saved,) = {one["prefix/tokens_saved"] for one in metrics}  # of all ranks
        # A split group, of which there are more ranks than prompts, computes its prefix twice.
        assert logical - computed >= saved >= 0.85 * (logical - computed), engine
        if world == 1:
            assert "prefix/exchanged_rows" not in metrics[0]
            continue
        assert metrics[0]["prefix/exchanged_rows"] > len(groups)
        for one in metrics:
            assert one["prefix/split_groups"] == 0 and one["prefix/placement_imbalance"] < 1.6
            assert 1e-4 < one["prefix/exchanged_mib"] < 1 and one["timing_s/prefix_exchange"] > 0


def test_prompts_with_rows_in_several_mini_batches_are_counted_once_and_said_by_one_rank(results):
    for rank, result in enumerate(results):
        metrics = result["packed", "torn_turns"][1]
        assert metrics["prefix/split_groups"] == metrics["torn"] == (3 if len(results) > 1 else 0)
        told = [line for line in metrics["said"] if "have rows in several mini-batches" in line]
        assert len(told) == (len(results) > 1 and rank == 0) and all(
            line.startswith("prefix: 3 prompts ") and "computes them again. Set" in line for line in told
        )


def test_turns_share_what_their_uid_has_in_common_wherever_they_came_from(results):
    for engine in ("packed", "phased", "auto"):
        for metrics in (result[engine, "turns"][1] for result in results):
            # A uid whose sessions are on several ranks computes its question on each.
            assert 0.85 * metrics["most"] < metrics["prefix/tokens_saved"] <= metrics["most"], engine
            assert metrics["prefix/tree_depth"] == 2
    if len(results) == 2:
        saved = {name: results[0][name, "turns"][1]["prefix/tokens_saved"] for name in ("off", "packed", "batch")}
        assert saved["off"] < 0.5 * saved["packed"]
        assert results[0]["packed", "turns_without_sessions"][1]["prefix/tokens_saved"] > 0.8 * saved["packed"]
        no_uid, default = (results[0]["packed", case][1]["prefix/tokens_saved"] for case in ("no_uid", "default"))
        assert no_uid == default


def test_rows_stay_where_they_are_told_to_and_go_verls_own_path_where_sharing_does_not_pay(results):
    for result in results:
        assert "prefix/exchanged_rows" not in result["off", "default"][1]
        assert result["gate_shut", "default"][1]["prefix/stock_rows"] > 0
        if len(results) == 2:
            assert "prefix/exchanged_rows" not in result["packed", "custom_loss"][1]
            assert result["packed", "custom_loss"][1]["warnings"] == 1
    if len(results) > 1:
        off, on = (results[0][e, "default"][1]["prefix/tokens_saved"] for e in ("off", "packed"))
        assert off < 0.8 * on
