"""The exchange of rows by itself, without engines: random batches on 2 to 4 gloo ranks, and every way to break it.

One set of processes runs all of it; the tests read what came back. Does not exercise NCCL.
"""

import contextlib
import ctypes
import os
import random
import sys
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from verl_prefix.auto.shape import ModelShape

WORLD = 4
SHAPE = ModelShape(1e6, 1e5, 1e2, (None, 64), 1.0, 1.0, 1.0, 100, tower=1e6)
WAITS = timedelta(minutes=10)  # that a rank would wait for others: an error must be seen without
END = 2  # token that ends a message
BROKEN = {
    "outputs in another order": "rank 1 sent outputs of rows",
    "a row lost": "rank 1 sent its rows",
    "a row twice": "rank 1 sent its rows",
    "a row of a rank that is not there": "there are 4",
    "another placement": "ranks placed the same rows differently",
    "no memory while rows are described": "rank 2 failed while describing rows",
    "no memory while rows are sent": "rank 2 failed while sending rows",
    "no memory while outputs are returned": "rank 2 failed while returning outputs",
    "an output lost": "do not have the",
    "other outputs": "ranks computed different outputs",
    "other tokens": "rows [0, 1, 2, 3, 4, 5, 6, 7] arrived as one group, and their prompts differ",
    "a uid that cannot travel": "failed while sending rows",
    "no memory while rows arrive": "rank 2 failed while making room for rows",
    "no pixels": "rank 2 failed while grouping rows",
    "no groups": "rank 2 failed while grouping rows",
    "no pixels where rows stay": "rank 2 failed while grouping rows",
    "no groups where rows stay": "rank 2 failed while grouping rows",
    "no pixels on verl's own path": "rank 2 failed while receiving pixels",
}


@st.composite
def batches(draw) -> dict:
    """Groups (prompt length, response lengths, pixels: none, a copy in every row, or carried by one), and each row's
    rank. Rows of a group have one prompt, or are turns, of two sessions or of no known one."""
    lens = st.lists(st.integers(0, 9), min_size=1, max_size=draw(st.sampled_from([1, 3, 20])))
    kinds = st.sampled_from(draw(st.sampled_from([["text"], ["text", "copies", "carried"]])))
    groups = draw(st.lists(st.tuples(st.integers(1, 40), lens, kinds), min_size=2, max_size=8))
    num_rows = sum(len(one[1]) for one in groups)
    world = draw(st.integers(2, min(WORLD, num_rows)))  # verl gives every rank a row
    ranks = draw(st.lists(st.integers(0, world - 1), min_size=num_rows, max_size=num_rows))
    ranks[:world] = range(world)
    kind = draw(st.sampled_from(["", "", "sessions", "no sessions"]))
    mrope = not kind and draw(st.booleans())
    return {"world": world, "groups": groups, "ranks": ranks, "mrope": mrope, "turns": kind}


def turns(groups: list, world: int, kind: str = "text", **fields: object) -> dict:
    """Groups (prompt length, response lengths) of turns, dealt to ranks."""
    groups = [(prompt_len, lens, kind) for prompt_len, lens in groups]
    num_rows = sum(len(lens) for _, lens, _ in groups)
    ranks = [i % world for i in range(num_rows)]
    return {"world": world, "groups": groups, "ranks": ranks, "mrope": False, "turns": "sessions"} | fields


def agents(kinds: dict[str, str]) -> list[dict]:
    """Rows of sessions by their names, each of five turns: those that are `kept` go on behind the row before them, the
    others begin anew behind a question of four hundred tokens, all but for the system prompt. Prompts have ten messages
    and more, a turn adds two or three."""
    generator, rows = torch.Generator().manual_seed(0), []

    def some(length: int) -> torch.Tensor:
        return torch.cat([torch.randint(5, 100, (length - 1,), generator=generator), torch.tensor([END])])

    for uid in dict.fromkeys(name[0] for name in kinds):
        system, question = some(50), torch.cat([some(3) for _ in range(10)])
        for session, kind in ((name[1:], kind) for name, kind in kinds.items() if name[0] == uid):
            prompt = torch.cat([system, question])
            for _ in range(5):
                response = some(20)
                ids = torch.cat([prompt, response])
                rows.append({"uid": uid, "session_id": session, "prompts": prompt, "responses": response,
                             "input_ids": ids, "position_ids": torch.arange(len(ids))})  # fmt: skip
                prompt = torch.cat([ids, some(10), some(20)] if kind == "kept" else [system, some(400)])
    return rows


def placed_anywhere(seed: int) -> dict:
    """A row per rank, or some more, and the rank that each goes to, whatever that costs."""
    rng = random.Random(seed)
    world = rng.choice([3, 4])
    kinds = rng.choice([["copies", "text"], ["copies", "copies"], ["carried", "copies"]])
    groups = [(rng.randint(2, 40), [3] * rng.randint(2, 4), kind) for kind in kinds]
    num_rows = sum(len(lens) for _, lens, _ in groups)
    ranks, homes = (
        rng.sample([*range(world), *(rng.randrange(world) for _ in range(num_rows - world))], num_rows) for _ in "ab"
    )
    return {"world": world, "groups": groups, "ranks": ranks, "homes": homes, "mrope": False}


# Two rows of one picture and a text, each of which goes to where another comes from.
IN_A_RING = {
    "world": 3, "groups": [(9, [1, 9], "copies"), (9, [1], "text")], "ranks": [0, 1, 2], "homes": [1, 2, 0],
    "mrope": False,
}  # fmt: skip
# Turns of more and of fewer sessions than ranks, of one turn each, and without a response.
EXAMPLES = [
    IN_A_RING,
    *map(placed_anywhere, range(12)),
    *(turns([(30, [5] * 6), (20, [4, 0, 3, 0, 2]), (25, [3, 8])], world) for world in (2, 4)),
    turns([(30, [5] * 8)], 4),
    turns([(30, [5] * 8)], 4, kind="carried"),
    turns([(30, [5] * 6), (20, [4] * 3)], 3, turns="no sessions"),
    turns([(30, [0] * 6), (20, [0] * 3)], 2),
]


def examples(count: int) -> list[dict]:
    found = []

    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(batches())
    def collect(batch):
        found.append(batch)

    collect()
    return [*EXAMPLES, *found]


def rows_of(batch: dict, seed: int) -> list[dict]:
    """All rows, each as a dict of what its batch holds for it."""
    from verl_prefix.models.vision import CARRIED_BY, CARRIES

    generator = torch.Generator().manual_seed(seed)
    rows = []

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    for group, (prompt_len, lens, kind) in enumerate(batch["groups"]):
        prompt = torch.randint(100, (prompt_len,), generator=generator)
        pixels = {"pixel_values": torch.randn(8, 3, generator=generator), "image_grid_thw": torch.tensor([[1, 4, 2]])}
        question, histories = prompt, [prompt, prompt]
        for i, n in enumerate(lens):
            turns = batch.get("turns")
            prompt = histories[i % 2] if turns else question
            ids = torch.cat([prompt, torch.randint(100, (n,), generator=generator)])
            histories[i % 2] = torch.cat([ids, torch.tensor([END, 7, END, 8])])
            positions = torch.arange(len(ids))
            seen = {"second_per_grid_ts": [0.5]} if group % 2 else {}
            if kind == "copies":
                seen |= {name: x.clone() for name, x in pixels.items()}
            elif kind == "carried":
                seen |= {CARRIES: f"{group}_0"} | pixels if i == 0 else {CARRIED_BY: f"{group}_0"}
            session = {} if turns == "no sessions" else {"session_id": torch.tensor(i % 2) if turns else i}
            rows.append(
                session
                | {
                    "uid": f"uid{group}", "prompts": prompt, "responses": ids[len(prompt) :],
                    "input_ids": ids, "position_ids": positions.expand(3, -1) if batch["mrope"] else positions,
                    "loss_mask": torch.ones(n, dtype=torch.bool), "half": noise(n).to(torch.bfloat16),
                    "wide": noise(n, 2, 3), "row": torch.tensor(len(rows)), "square": noise(2, 2),
                    "extra": {"row": len(rows), 3: (None, "text", [1.5])}, "multi_modal_inputs": seen,
                    "pixels": pixels if kind != "text" else {},
                }
            )  # fmt: skip
    return rows


def batch_of(rows: list[dict]):
    from verl.utils import tensordict_utils as tu

    fields = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name == "pixels":
            continue
        if name in ("row", "square") or (name == "session_id" and isinstance(values[0], torch.Tensor)):
            fields[name] = torch.stack(values)
        elif isinstance(values[0], torch.Tensor):
            fields[name] = tu.nested_tensor_from_tensor_list(values, values[0].dim() if name == "position_ids" else 1)
        else:
            fields[name] = values
    return tu.get_tensordict(fields, {"temperature": 0.7, "max_token_len_per_gpu": 100})


def outputs_of(data) -> dict[str, torch.Tensor]:
    """Per token, a value that no other row has."""
    values = [
        row * 1000.0 + torch.arange(len(ids)) for row, ids in zip(data["row"], data["input_ids"].unbind(), strict=True)
    ]
    nested = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return {"log_probs": nested, "entropy": nested.to(torch.bfloat16)}


def opened(data, trees, option: str = "auto"):
    """The exchange of this rank's batch with all ranks."""
    import torch.distributed as dist

    from verl_prefix.engine.loss import Loss
    from verl_prefix.engine.rows import BatchRows
    from verl_prefix.engine.travel.exchange import open_exchange

    ranks = SimpleNamespace(data_group=dist.group.WORLD, data_rank=dist.get_rank(), data_size=dist.get_world_size())
    backend = SimpleNamespace(ranks=ranks, shape=SHAPE)
    return open_exchange(
        backend,
        BatchRows(data),
        Loss(None),
        exchange_option=option,
        tree_rule=trees,
        skips_dead=False,
    )


def _goes_to(batch: dict):
    """What `place_rows` is to find: the `homes` of a batch, of rows that are numbered rank after rank."""
    from verl_prefix.auto.placement import placed_on

    pairs = sorted(zip(batch["ranks"], batch["homes"], strict=True), key=lambda pair: pair[0])
    return lambda keys, prefixes, suffixes, _, num_ranks, __: placed_on(
        keys, prefixes, suffixes, [home for _, home in pairs], num_ranks
    )


def _problems(batch: dict, seed: int) -> list[str]:
    """What is wrong with the exchange of a batch, as this rank sees it."""
    import torch.distributed as dist
    from verl.utils import tensordict_utils as tu

    from verl_prefix.engine.grouping import TreeRule
    from verl_prefix.models.vision import CARRIES

    rank, problems = dist.get_rank(), []
    every = rows_of(batch, seed)
    mine = [row for row, at in zip(every, batch["ranks"], strict=True) if at == rank]
    data = batch_of(mine)
    calls, fetched = [], []
    carriers = {row["multi_modal_inputs"].get(CARRIES): row["multi_modal_inputs"] for row in every}

    def counted(function):
        return lambda *args, **kwargs: (calls.append(1), function(*args, **kwargs))

    counting = [
        mock.patch.object(dist, name, counted(getattr(dist, name)))
        for name in ("all_reduce", "all_gather", "all_to_all_single")
    ]
    counting.append(
        mock.patch(
            "verl_prefix.engine.travel.pixels._fetch",
            lambda keys: fetched.extend(keys) or [carriers[k] for k in keys],
        )
    )
    if "homes" in batch:
        counting.append(mock.patch("verl_prefix.engine.travel.row_table.place_rows", _goes_to(batch)))
    for one in counting:
        one.start()
    # Of a batch before, whose rows stayed, one rank may have seen turns alone.
    trees = TreeRule("uid", frozenset([END])) if batch.get("turns") else TreeRule()
    trees.cuts_rows = bool(batch.get("turns")) and rank == seed % 2
    exchange = opened(data, trees)
    found = exchange.computed.data
    if sorted(row for one in exchange.groups for row in one.rows) != list(range(len(found))):
        problems.append(f"{len(found)} rows are groups {exchange.groups}")
    back, _ = exchange.give_back(outputs_of(found))
    for one in counting:
        one.stop()
    here, moves = found["row"].tolist(), [None] * batch["world"]
    dist.all_gather_object(moves, exchange.metrics["prefix/exchanged_rows"])
    moves = any(moves)
    for name, wanted in outputs_of(data).items():
        if not all(torch.equal(a, b) for a, b in zip(back[name].unbind(), wanted.unbind(), strict=True)):
            problems.append(f"{name} came back in another order")
        if back[name].dtype != wanted.dtype:
            problems.append(f"{name} is {back[name].dtype}")
    if ("extra" in found.keys()) == moves:
        problems.append("what neither outputs nor verl's losses read travels, or is lost where rows stay")
    arrived = {name: tu.get(found, name) for name in every[0] if name not in ("pixels", "extra")}
    arrived = {name: x.unbind() if isinstance(x, torch.Tensor) else list(x) for name, x in arrived.items()}
    for i, row in enumerate(here):
        for name, wanted in every[row].items():
            if name in ("pixels", "multi_modal_inputs", "extra"):
                continue
            value = arrived[name][i]
            same = torch.equal(value, wanted) if isinstance(wanted, torch.Tensor) else value == wanted
            if not same or (isinstance(wanted, torch.Tensor) and value.dtype != wanted.dtype):
                problems.append(f"{name} of row {row} is {value}, not {wanted}")
        seen = arrived["multi_modal_inputs"][i]
        pixels = {name: x for name, x in seen.items() if name != "second_per_grid_ts"}
        others = {name: x for name, x in seen.items() if name not in pixels}
        wanted = {"second_per_grid_ts": [0.5]} if int(every[row]["uid"].removeprefix("uid")) % 2 else {}
        if pixels.keys() != every[row]["pixels"].keys() or others != wanted:
            problems.append(f"row {row} sees {sorted(seen)}")
        elif not all(torch.equal(x, every[row]["pixels"][name]) for name, x in pixels.items()):
            problems.append(f"row {row} sees other pixels")
    kept = [row for row, at in zip(rows_of(batch, seed), batch["ranks"], strict=True) if at == rank]
    for row, wanted in zip(tu.get(data, "multi_modal_inputs"), kept, strict=True):
        wanted = wanted["multi_modal_inputs"]
        if row.keys() != wanted.keys():
            problems.append(f"the caller's row sees {sorted(row)}, not {sorted(wanted)}")
    pixels = [x for row in tu.get(data, "multi_modal_inputs") for x in row.values() if isinstance(x, torch.Tensor)]
    if len({id(x) for x in pixels}) != len({(x.dtype, x.shape, x.numpy().tobytes()) for x in pixels}):
        problems.append("equal pixels of the caller's rows are held more than once")
    if tu.get(found, "temperature") != 0.7 or tu.get(found, "max_token_len_per_gpu") != 100:
        problems.append("what the batch has once is lost")
    lists = [None] * batch["world"]
    dist.all_gather_object(lists, (here, {uid for uid in tu.get(found, "uid") if uid.startswith("uid")}))
    if sorted(row for rows, _ in lists for row in rows) != list(range(len(every))):
        problems.append(f"rows on ranks: {lists}")
    if not all(rows for rows, _ in lists):
        problems.append(f"a rank has no row: {lists}")
    if trees.cuts_rows:
        homes = {row: rank for rank, (rows, _) in enumerate(lists) for row in rows}
        pixels = any(row["pixels"] for row in every)
        sessions = [row["uid"] if pixels else f"{row['uid']} {row.get('session_id')}" for row in every]
        torn = len(set(zip(sessions, map(homes.get, range(len(every))), strict=True))) - len(set(sessions))
        # Of fewer sessions than ranks, balance may put two on one rank; each rank without any gets a row of another's.
        if torn > (batch["world"] - 1 if len(set(sessions)) < batch["world"] else 0):
            problems.append(f"{torn} sessions are torn: {lists}")
    held = [uid for _, uids in lists for uid in uids]
    metrics, split = exchange.metrics, {uid for uid in held if held.count(uid) > 1}
    if bool(split) != (metrics["prefix/cost_split_groups"] > 0) or metrics["prefix/split_groups"]:
        problems.append(f"{split} are on several ranks, and metrics say {metrics}")
    if not {f"uid{key.partition('_')[0]}" for key in fetched} <= split:
        problems.append(f"pixels of {fetched} were asked for, and only {split} are on several ranks")
    if len(calls) > (14 if moves else 4) + (2 if batch.get("turns") else 0):
        problems.append(f"{len(calls)} collectives")
    if (metrics["prefix/exchanged_rows"] > 0) != bool(set(r["row"].item() for r in mine) - set(here)):
        problems.append(f"{metrics['prefix/exchanged_rows']} rows are said to have left")
    return problems


class _Break:
    """Breaks one rank's exchange in one of the ways of `BROKEN`."""

    def __init__(self, how: str, rank: int) -> None:
        from verl_prefix.engine.travel import exchange, moves, row_bytes, row_table

        self.patches = []
        real_pack, real_place = row_bytes.RowCodec.pack, row_table.place_rows
        real_groups, real_empty = exchange.group_rows, torch.empty

        def no_memory(*args, **kwargs):
            raise MemoryError("injected")

        def no_room(*args, **kwargs):
            received = kwargs.get("dtype") == torch.uint8 and "device" in kwargs
            return (no_memory if received else real_empty)(*args, **kwargs)

        def other_tokens(rows, *args):
            rows.data["input_ids"].values()[2] += 1
            return real_groups(rows, *args)

        def pack(change, outputs):
            def changed(one, rows):
                is_outputs = "input_ids" not in one._tensors
                return real_pack(one, change(list(rows)) if is_outputs == outputs else rows)

            return changed

        def placed(change):
            def changed(*args, **kwargs):
                found = real_place(*args, **kwargs)
                found.ranks[:] = change(found.ranks)
                return found

            return changed

        broken = {
            "outputs in another order": (row_bytes.RowCodec, "pack", pack(lambda rows: rows[::-1], True), 1),
            "a row lost": (row_bytes.RowCodec, "pack", pack(lambda rows: rows[:-1], False), 1),
            "a row twice": (row_bytes.RowCodec, "pack", pack(lambda rows: rows + rows[-1:], False), 1),
            "a row of a rank that is not there": (row_table, "place_rows", placed(lambda ranks: [9, *ranks[1:]]), None),
            "another placement": (row_table, "place_rows", placed(lambda ranks: ranks[::-1]), 1),
            "no memory while rows are described": (moves, "describe", no_memory, 2),
            "no memory while rows are sent": (row_bytes.RowCodec, "pack", pack(no_memory, False), 2),
            "no memory while outputs are returned": (row_bytes.RowCodec, "pack", pack(no_memory, True), 2),
            "other tokens": (exchange, "group_rows", other_tokens, 1),
            "no memory while rows arrive": (torch, "empty", no_room, 2),
            "no pixels": (exchange, "receive_pixels", no_memory, 2),
            "no groups": (exchange, "group_rows", no_memory, 2),
        }  # fmt: skip
        how = how.partition(" where rows stay")[0].partition(" on verl's own path")[0]
        if how in broken:
            target, name, function, at = broken[how]
            if at in (None, rank):
                self.patches.append(mock.patch.object(target, name, function))

    def __enter__(self):
        for one in self.patches:
            one.start()

    def __exit__(self, *_):
        for one in self.patches:
            one.stop()


# Two prompts with eight rows each on every rank.
TORN = {"world": WORLD, "groups": [(9, [3] * 8, "text")] * 4, "ranks": [i % 4 for i in range(32)], "mrope": False}


class _Uid:
    def __init__(self, uid: str) -> None:
        self.uid = uid

    def __str__(self) -> str:
        return self.uid


def _broken(how: str, rank: int) -> str:
    from verl.utils import tensordict_utils as tu

    from verl_prefix.engine.grouping import TreeRule
    from verl_prefix.engine.together import together
    from verl_prefix.engine.travel import exchange as room

    data = batch_of([r for r, at in zip(rows_of(TORN, 0), TORN["ranks"], strict=True) if at == rank])
    if how == "a uid that cannot travel" and rank == 3:
        tu.assign_non_tensor(data, uid=[_Uid(uid) for uid in tu.get(data, "uid")])
    try:
        with _Break(how, rank):
            if "own path" in how:
                with together("receiving pixels"):  # as the engine does
                    room.receive_pixels(data)
            if "stay" in how:
                opened(data, TreeRule(), option="off")
            exchange = opened(data, TreeRule())
            outputs = outputs_of(exchange.computed.data)
            if how == "an output lost" and rank == 1:
                outputs = {
                    n: torch.nested.as_nested_tensor(x.unbind()[1:], layout=torch.jagged) for n, x in outputs.items()
                }
            if how == "other outputs" and rank == 1:
                del outputs["entropy"]
            exchange.give_back(outputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _worker(rank: int, rendezvous: str, batches: list[dict], out: str) -> None:
    import torch.distributed as dist

    world = batches[0]["world"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), VERL_PLATFORM="cpu")
    dist.init_process_group("gloo", timeout=WAITS, init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    results = {"problems": [(batch, x) for seed, batch in enumerate(batches) for x in _problems(batch, seed)]}
    if world < WORLD:
        torch.save(results, f"{out}.{rank}")
        return
    for how in BROKEN:
        results[how] = _broken(how, rank)
        dist.barrier()
    torch.save(results, f"{out}.{rank}")
    # Last, since the others cannot go on: a rank that dies while rows travel.
    if rank == 1:
        with mock.patch("verl_prefix.engine.travel.row_bytes.RowCodec.pack", lambda *_: os._exit(0)):
            _broken("", rank)
    results["a rank dies"] = _broken("", rank)
    torch.save(results, f"{out}.{rank}")
    os._exit(0)


@pytest.fixture(scope="module", params=[10, pytest.param(210, marks=pytest.mark.full)], ids="{}batches".format)
def results(request, tmp_path_factory, spawn):
    tmp = tmp_path_factory.mktemp("rows")
    drawn = examples(request.param)
    assert len(drawn) >= request.param - 10
    of_world = {}
    for world in range(2, WORLD + 1):
        out, some = tmp / f"out{world}", [batch for batch in drawn if batch["world"] == world]
        spawn(_worker, args=(str(tmp / f"rendezvous{world}"), some, str(out)), nprocs=world)
        of_world[world] = [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(world)]
    return of_world


def test_the_example_of_the_readme():
    """The table in verl_prefix/engine/README.md."""
    from verl_prefix.engine.travel.moves import Moves

    table = SimpleNamespace(keys=[*"abab"], sources=[0, 0, 1, 1], starts=[0, 2, 4], has_pixels=[False] * 4)
    ranks = [SimpleNamespace(data_rank=rank, data_size=2) for rank in range(2)]
    first, second = (Moves(table, [0, 1, 0, 1], rank, {}) for rank in ranks)
    assert (first.kept, first.sent, first.got, first.table_rows) == ([0], [[], [1]], [[], [0]], [0, 2])
    assert (second.kept, second.sent, second.got, second.table_rows) == ([1], [[0], []], [[1], []], [3, 1])


def test_the_example_of_session_pieces():
    from verl_prefix.engine.travel.session_pieces import costs_of_sessions

    pieces = [
        (0, {"S": 9, "SQ": 5, "SQC": 3, "logits of SQC": 0.3}),
        (1, {"S": 9, "SQ": 5, "SQC": 3, "SQCR": 4, "SQCRA": 6, "logits of SQCRA": 0.6}),
        (2, {"S": 9, "SQ": 5, "SQG": 7, "logits of SQG": 0.7}),
    ]
    columns = [(row, hash(name), cost) for row, costs in pieces for name, cost in costs.items()]
    rows, names, costs = (np.array(column) for column in zip(*columns, strict=True))
    table = torch.from_numpy(np.stack([rows, names, costs.view(np.int64)], 1))
    trunks, branches = costs_of_sessions([[0, 1], [2]], [7, 7], table, np.zeros(3))
    assert trunks == [14, 14] and branches == pytest.approx([3 + 4 + 6 + 0.3 + 0.6, 7 + 0.7])
    # A third session of dead rows has no pieces, and the others have the same trunk as before.
    trunks, with_dead = costs_of_sessions([[0, 1], [2], [3]], [7, 7, 7], table, np.zeros(4))
    assert trunks == [14, 14, 14] and with_dead == [*branches, 0]


def test_random_batches_arrive_whole_and_their_outputs_come_back_in_order(results):
    problems = [problem for of_ranks in results.values() for result in of_ranks for problem in result["problems"]]
    assert not problems, problems[:3]


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_exchange_is_an_error_on_every_rank_and_none_waits(results, how):
    errors = [result[how] for result in results[WORLD]]
    assert all(errors), errors
    assert any(BROKEN[how] in error for error in errors), errors
    assert not any("timed out" in error.lower() for error in errors), errors


def test_an_error_of_this_rank_is_raised_where_the_others_cannot_be_told(monkeypatch):
    from verl_prefix.engine import together

    def is_gone(*args: object, **options: object) -> None:
        raise RuntimeError("a peer is gone")

    monkeypatch.setattr(together.dist, "all_reduce", is_gone)
    monkeypatch.setattr(together.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(together, "get_device_id", lambda: "cpu")
    with pytest.raises(ValueError, match="mine") as raised, together.together("testing"):
        raise ValueError("mine")
    assert str(raised.value.__cause__) == "a peer is gone"
    with pytest.raises(RuntimeError, match="a peer is gone"), together.together("testing"):
        pass


def test_rows_of_one_uid_prompt_positions_and_pixels_are_a_group_and_no_others():
    from verl_prefix.engine.grouping import TreeRule, group_rows
    from verl_prefix.engine.loss import Loss
    from verl_prefix.engine.rows import BatchRows
    from verl_prefix.engine.travel.exchange import open_exchange

    rows = rows_of({"groups": [(5, [3] * 5, "copies")], "mrope": True}, 0)
    rows[1]["uid"] = "another"
    rows[2]["position_ids"] = rows[2]["position_ids"] + (torch.arange(8) == 2)
    rows[3]["multi_modal_inputs"]["pixel_values"] += 1
    rows[4]["position_ids"] = rows[4]["position_ids"] + (torch.arange(8) > 4)  # of the response alone
    data = batch_of(rows)
    groups = group_rows(BatchRows(data), TreeRule())
    assert [(group.rows, group.num_own_strand_tokens, group.suffix_lens) for group in groups] == [
        ((0, 4), 4, (3, 3)), ((1,), 4, (3,)), ((2,), 4, (3,)), ((3,), 4, (3,))
    ]  # fmt: skip
    with mock.patch("verl_prefix.engine.travel.exchange.together", lambda *_: contextlib.nullcontext()):
        ranks = SimpleNamespace(data_size=1)
        backend = SimpleNamespace(ranks=ranks)
        exchange = open_exchange(
            backend, BatchRows(data), Loss(None), exchange_option="auto", tree_rule=TreeRule(),
            skips_dead=False,
        )  # fmt: skip
    assert exchange.groups == groups
    pixels = [row["multi_modal_inputs"]["pixel_values"] for row in rows]
    assert pixels[0] is pixels[4] is pixels[1] and pixels[0] is not pixels[3], "equal pixels are held once"
    empty = batch_of(rows_of({"groups": [(5, [3], "text"), (0, [3], "text")], "mrope": False}, 0))
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        group_rows(BatchRows(empty), TreeRule())


def test_rows_are_cut_by_uid_once_a_uid_had_several_prompts():
    from verl_prefix.engine.grouping import TreeRule

    one, several = ("aab", [1, 1, 2]), ("aab", [1, 3, 2])
    rules = [TreeRule(over) for over in ("off", "uid", "batch")]
    found = {rule.scope: [] for rule in rules}
    for rule in rules:
        for rows in (one, several, one):
            rule.see(*rows)
            found[rule.scope].append(rule.cuts_rows)
    assert found == {"off": [False] * 3, "uid": [False, True, True], "batch": [True] * 3}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sessions_are_balanced_by_the_tokens_of_their_trees(ranks):
    """A row's cost is its tokens here, so that what placement expects of the longest rank is what it computes."""
    from verl_prefix.engine.grouping import TreeRule, group_rows
    from verl_prefix.engine.rows import BatchRows
    from verl_prefix.engine.travel.row_table import RowTable, describe
    from verl_prefix.engine.travel.session_pieces import describe_pieces

    shape, trees = ModelShape(1.0, 0.0, 0.0, (None,), 1.0, 1.0, 1.0, 100), TreeRule("uid", frozenset([END]))
    trees.cuts_rows = True
    kept = [f"{uid}{session}" for uid in "ab" for session in range(8)]
    rows = agents(dict.fromkeys(kept, "kept") | {"c0": "anew", "c1": "kept"})
    parts = [BatchRows(batch_of(rows[rank::ranks])) for rank in range(ranks)]
    table = RowTable([describe(part, shape) for part in parts])
    placed = table.by_session(ranks, [describe_pieces(part, shape, trees) for part in parts])
    every, computed = [row for rank in range(ranks) for row in rows[rank::ranks]], []
    for rank in range(ranks):
        here = batch_of([row for row, home in zip(every, placed.ranks, strict=True) if home == rank])
        groups = group_rows(BatchRows(here), trees)
        computed.append(sum(group.num_physical_tokens for group in groups))
    assert placed.longest == pytest.approx(1e-12 * max(computed))
    assert max(computed) < 1.1 * sum(computed) / ranks
    assert len({(row["uid"], row["session_id"], home) for row, home in zip(every, placed.ranks, strict=True)}) == 18


def test_turns_that_show_most_are_alone_on_their_rank():
    from verl_prefix.engine.grouping import TreeRule
    from verl_prefix.engine.rows import BatchRows
    from verl_prefix.engine.travel.row_table import RowTable, describe
    from verl_prefix.engine.travel.session_pieces import describe_pieces

    groups = [(30, [5] * 4, "text"), (10, [2] * 4, "copies"), (30, [5] * 4, "text")]
    data = BatchRows(batch_of(rows_of({"groups": groups, "mrope": False, "turns": "sessions"}, 0)))
    shape = replace(SHAPE, tower=1e8)
    pieces = [describe_pieces(data, shape, TreeRule("uid", frozenset([END])))]
    homes = RowTable([describe(data, shape)]).by_session(2, pieces).ranks
    assert homes[:4] == homes[8:] != homes[4:8] and len({*homes[4:8]}) == 1


def test_prompts_with_rows_in_several_mini_batches_are_counted_and_said_once_after_the_first_step(caplog):
    from verl.utils import tensordict_utils as tu

    from verl_prefix.config.options import PrefixConfig
    from verl_prefix.engine.grouping import TreeRule
    from verl_prefix.engine.metrics.metric_table import GROUP_TOKENS
    from verl_prefix.engine.metrics.step_metrics import StepMetrics
    from verl_prefix.engine.rows import BatchRows
    from verl_prefix.engine.travel.exchange import Exchange

    def said(*batches: tuple[int, ...], epochs: int = 1, **options: str) -> list[str]:
        """Of log-probs and then updates, two of them a step: tokens of groups, rows of 101 tokens, and groups, where
        not three. One prompt of three lies in both."""
        caplog.clear()
        ranks = SimpleNamespace(sum_over_ranks=list, max_over_ranks=list, model_size=1, pipeline_size=1, data_size=2)
        metrics = StepMetrics(SimpleNamespace(ranks=ranks, trains=False), PrefixConfig(**options), epochs)
        for i, (tokens, rows, *groups) in enumerate(batches):
            ids = torch.nested.as_nested_tensor([torch.full([101], i)] * rows, layout=torch.jagged)
            place = i % (1 + 2 * epochs)
            data = tu.get_tensordict({"input_ids": ids}, {"update_lr_scheduler": place == 2 * epochs})
            batch = BatchRows(data, keys=range(rows))
            exchange = Exchange(batch, [], set(("bc", "ab")[place % 2]))
            assert metrics.count_rows(exchange, TreeRule(), forward_only=place == 0) == {"prefix/split_uids": 0}
            own = {GROUP_TOKENS: tokens, "prefix/stock_rows": 0, "prefix/groups": sum(groups or [3])}
            found = metrics.report(own, batch, forward_only=place == 0)
            assert not any("tokens of" in name for name in found)
            assert found.get("prefix/split_groups") == ([1] if place == 2 * epochs else None)
        return [record.getMessage() for record in caplog.records]

    with mock.patch("torch.distributed.get_rank", lambda: 0):
        (told,) = said((1000, 16), (600, 8), (650, 8), (1000, 16), (900, 8), (900, 8))
        assert "prefix: 1 prompts have rows" in told and "trainer_mode=prefix_sync" in told
        assert "(250 tokens more than 1000 in an epoch of this step, +25%)" in told
        assert "actor_rollout_ref.actor.prefix.mini_batches=prompts" in told
        assert not said((1000, 16), (505, 8), (505, 8)), "next to nothing"
        alone = [(1000, 16), (0, 8, 0), (0, 8, 0)]
        assert not said(*alone), "verl's own path"
        (told,) = said(*alone, (1000, 16), (600, 8), (650, 8))
        assert "+25%)" in told, "of the first step that shares"
        assert not said((1000, 16), *[(505, 8)] * 4, epochs=2), "next to nothing in either epoch"
        (told,) = said((1000, 16), *[(600, 8), (650, 8)] * 2, epochs=2)
        assert "(250 tokens more than 1000 in an epoch of this step, +25%)" in told
        (told,) = said((1000, 16), (600, 8), (650, 8), exchange="off")
        assert "prefix: at least 1 prompts have rows" in told and "(250 tokens more" in told
        # Other rows than those before; log-probs on verl's own path, or none, as in bypass mode; a custom loss, which
        # keeps rows on ranks that they left for log-probs.
        for batches in ([(1000, 16), (600, 8), (600, 9)], [(0, 16), (600, 8), (600, 8)], [(1000, 16), (0, 8), (0, 8)]):
            (told,) = said(*batches)
            least = "" if batches[1][0] else "at least "
            assert f"prefix: {least}1 prompts have rows in several mini-batches, each of" in told
            assert "computes them again. Set" in told


UPDATE = """
import os
import sys
import torch
import verl.workers.engine_workers
from engines import _batch, _engine, _loss
from verl_prefix.testing import write_tiny_model

torch.distributed.init_process_group("gloo", init_method=f"file://{os.getcwd()}/ranks", rank=0, world_size=1)
engine = _engine("prefix", write_tiny_model("model", family="qwen3"), {})
data = _batch(0, 97, {})
data["multi_modal_inputs"] = [{} for _ in range(len(data))]  # as verl's agent loop sends text
with engine.train_mode(disable_auto_offload=True):
    engine.train_batch(data, _loss({}))
parts = "verl.trainer.ppo.v1", "verl.experimental.agent_loop", "verl_prefix.trainer", "verl.tools"
print([name for name in sys.modules if name.startswith(parts)])
"""


def test_an_engine_that_sees_text_loads_no_trainer_and_no_agent_loop(fresh, tmp_path):
    env = dict(os.environ, VERL_PLATFORM="cpu", RANK="0", WORLD_SIZE="1", PYTHONPATH=os.pathsep.join(sys.path))
    done = fresh(UPDATE, tmp_path, env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_rank_that_dies_is_an_error_on_the_others(results):
    for rank in (0, 2, 3):
        error = results[WORLD][rank]["a rank dies"]
        assert error and "timed out" not in error.lower(), error


def test_a_number_per_row_is_laid_out_otherwise_than_a_jagged_row_of_numbers():
    from verl_prefix.engine.travel.row_bytes import RowCodec

    jagged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    layouts = [RowCodec({"x": x}).format for x in (torch.ones(2), torch.ones(2, 1), torch.ones(3), jagged)]
    assert layouts[0] == layouts[2] and len(set(layouts)) == 3


def test_what_cannot_travel_is_named_by_its_type():
    from verl_prefix.engine.travel.row_bytes import RowCodec

    rows = torch.nested.as_nested_tensor([torch.arange(3)], layout=torch.jagged)
    numbered = RowCodec({"input_ids": rows}, {"session_id": [np.int64(7)]})
    assert numbered.unpack(numbered.pack([numbered.row(0, number=0)]))[0].others == {"session_id": 7}
    codec = RowCodec({"input_ids": rows}, {"multi_modal_inputs": [{"second_per_grid_ts": np.ones(2)}]})
    with pytest.raises(
        TypeError, match="multi_modal_inputs cannot travel .*: a ndarray is neither a tensor nor JSON; set"
    ):
        codec.pack([codec.row(0, number=0)])


def test_rows_of_any_length_leave_no_type_behind():
    """ctypes keeps a type per length of an array for ever: by safetensors.torch, 6 KB for each length of a row."""
    from verl_prefix.engine.travel.row_bytes import RowCodec

    rows = torch.nested.as_nested_tensor([torch.arange(n) for n in range(1, 300)], layout=torch.jagged)
    batch = RowCodec({"input_ids": rows, "half": rows.to(torch.bfloat16)})
    before = len(ctypes.Array.__subclasses__())
    found = batch.unpack(batch.pack([batch.row(i, number=i) for i in range(len(rows))]))
    assert len(ctypes.Array.__subclasses__()) == before
    assert all(torch.equal(row.tensors["half"], x.to(torch.bfloat16)) for row, x in zip(found, rows, strict=True))


def test_rows_have_the_pixels_of_their_own_carrier_in_whatever_order_these_are_fetched(monkeypatch):
    from verl_prefix.engine.travel.pixels import with_carried_pixels
    from verl_prefix.models.vision import CARRIED_BY, CARRIES

    fetched = [{CARRIES: key, "pixel_values": torch.tensor([float(i)])} for i, key in enumerate("ab")]
    monkeypatch.setattr("verl_prefix.engine.travel.pixels._fetch", lambda keys: fetched[::-1])
    rows = with_carried_pixels([{CARRIED_BY: "b"}, {CARRIED_BY: "a"}, {CARRIED_BY: "b"}])
    assert [row["pixel_values"].item() for row in rows] == [1.0, 0.0, 1.0]
