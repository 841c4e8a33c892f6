"""Rows of a batch against verl's own selection of them, to the bit."""

import pytest
import torch
import verl  # noqa: F401  # first: it imports its plugin, ours
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.engine.rows import select_rows

LENS = [0, 7, 3, 12, 1, 5]


def jagged(of_row) -> torch.Tensor:
    return torch.nested.as_nested_tensor([of_row(n) for n in LENS], layout=torch.jagged)


@pytest.fixture
def batch() -> TensorDict:
    """Fields of every form that verl's batches have."""
    fields = {
        "input_ids": jagged(torch.arange), "advantages": jagged(torch.randn),
        "teacher_logprobs": jagged(lambda n: torch.randn(n, 3)),
        "routed_experts": jagged(lambda n: torch.randint(9, (n, 3, 2), dtype=torch.int16)),
        "position_ids": tu.nested_tensor_from_tensor_list([torch.arange(4 * n).view(4, n) for n in LENS]),
        "attention_mask": torch.arange(24).view(6, 4), "uid": [str(n) for n in LENS],
    }  # fmt: skip
    batch = tu.get_tensordict(fields, {"temperature": 0.5})
    lens = torch.tensor(LENS)
    batch["of_a_view"] = torch.nested.narrow(torch.randn(6, 20), 1, torch.arange(6), lens, layout=torch.jagged)
    assert batch["of_a_view"].lengths() is not None
    return batch


@pytest.mark.parametrize("rows", [[2], [5, 1, 0, 3], [4, 4, 1], [0], list(range(6))], ids=str)
def test_rows_are_those_that_verl_selects(batch, rows):
    found, wanted = select_rows(batch, rows), tu.index_select_tensor_dict(batch, rows)
    assert list(found.keys()) == list(wanted.keys()) and found.batch_size == wanted.batch_size
    for name, x in wanted.items():
        ours = dict(found.items())[name]
        assert type(ours) is type(x), name
        if not isinstance(x, torch.Tensor):
            assert tu.get(found, name) == tu.get(wanted, name)
            continue
        assert ours.dtype == x.dtype and ours.is_nested == x.is_nested
        if x.is_nested:
            assert ours._ragged_idx == x._ragged_idx and ours.lengths() is None, name
            assert torch.equal(ours.offsets(), x.offsets()) and ours.offsets().dtype == x.offsets().dtype
            assert (ours._min_seqlen, ours._max_seqlen) == (x._min_seqlen, x._max_seqlen), name
            ours, x = ours.values(), x.values()
        assert torch.equal(ours, x) and ours.is_contiguous() == x.is_contiguous(), name
