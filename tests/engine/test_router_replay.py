"""Router replay: rows share what went to the same experts; ours is stock with the same routes forced on its rows."""

import pytest
import torch
from engines import as_batch

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
    are_cut = trees.are_cut(batch.uids, batch.keys)
    assert are_cut == (over == "batch"), "routes made turns of one prompt's rows"
    return group_rows(batch, trees, are_cut)


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
    assert found == group_rows(BatchRows(data), TreeRule(), False)


def test_an_expert_of_the_last_shared_token_keeps_rows_apart():
    rows = _rows([("a", 17, [4, 4])])
    (shared,) = _groups(rows, [16, 16])
    assert shared.prefix_len == 16
    for token, layer in ((15, 2), (0, 0), (7, 1)):
        from verl_prefix.engine.grouping import TreeRule, group_rows
        from verl_prefix.engine.rows import BatchRows

        routes = routed(rows, [16, 16])
        routes[1][token, layer] = routes[1][token, layer].flip(0)  # the same experts in another order
        assert len(group_rows(BatchRows(batch_of(rows, routes)), TreeRule(), False)) == 2


def test_routes_of_other_rows_are_refused():
    from verl_prefix.engine.rows import BatchRows

    rows = _rows([("a", 17, [4, 5])])
    data = batch_of(rows, routed(rows, [16, 16])[::-1])
    with pytest.raises(ValueError, match="routed_experts has other lengths than the rows"):
        BatchRows(data).routes  # noqa: B018
