"""Numbers that verl's loss would read from the device in every pass are read once, at the end of a mini-batch."""

import types
from contextlib import nullcontext

import pytest
import torch
from test_engine_equivalence import LOSS_MODES, _batch, _loss
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric

from verl_prefix.config import LOSSES_OF_ROWS
from verl_prefix.core.layout import build_layout
from verl_prefix.engine import mini_batch
from verl_prefix.engine.read_later import HostInts, ItemsLater, read_metrics
from verl_prefix.engine.rows import group_rows, row_keys

READ_LATER = [mode for mode in LOSSES_OF_ROWS if mode != "bypass_mode"]


@pytest.mark.parametrize("broken", ["", "items", "lengths"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", READ_LATER)
def test_verls_loss_reads_nothing_from_the_device_in_a_pass(monkeypatch, mode, padded, broken):
    """MOCK: the meta device stands for a GPU. Reading a value of it raises; broken on purpose, it does."""
    options = {"groups": [("a", 40, [20] * 8, ""), ("b", 30, [7, 9], "")], "use_kl_loss": True, "padded": padded}
    options["policy_loss"] = {"loss_mode": mode} | LOSS_MODES[mode]
    data = _batch(0, 97, options)
    tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=176.0, dp_size=1)
    engine = types.SimpleNamespace(module=torch.nn.Module(), get_data_parallel_group=lambda: None)
    engine.module.config = None
    monkeypatch.setattr(mini_batch, "get_device_id", lambda: "cpu")
    made = mini_batch.MiniBatch(engine, data, _loss(options), forward_only=False)
    made.names, groups = ["log_probs", "entropy"], group_rows(data, row_keys(data))
    layout = build_layout(groups, made.tokens.offsets)
    monkeypatch.setattr(mini_batch, "get_device_id", lambda: "meta")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    if broken == "items":
        monkeypatch.setattr(mini_batch, "ItemsLater", nullcontext)
    if broken == "lengths":
        monkeypatch.setattr(made, "_micro_batch", lambda rows: tu.index_select_tensor_dict(data, rows).to("meta"))
    outputs = torch.zeros(layout.num_tokens - layout.num_prefix, 2, device="meta", requires_grad=True)
    with pytest.raises(RuntimeError, match="meta") if broken else nullcontext():
        assert made.step(groups, layout, outputs).is_meta


def test_what_is_read_later_is_what_was_to_be_read():
    values = torch.tensor([0.1, 0.2, 0.3])
    with ItemsLater():
        total, count = values.sum(), torch.tensor(3).item()
        metrics = {"mean": Metric("mean", total / 3), "sum": total.item(), "count": count}
        total -= 1.0  # as verl's ppo_loss does with pg_loss
    assert read_metrics([metrics], [total]) == [pytest.approx(-0.4)]
    assert (metrics["mean"].values, metrics["sum"]) == ([(values.sum() / 3).item()], values.sum().item())
    assert type(metrics["count"]) is int and type(metrics["sum"]) is float


def test_integers_of_the_host_are_pythons_and_nothing_else_is():
    lens, floats, table = torch.tensor([3, 1, 2]), torch.tensor([0.5, 0.25]), torch.arange(6).reshape(2, 3)
    with HostInts():
        assert [type(n) for n in lens] == [int] * 3 and list(lens) == [3, 1, 2]
        assert lens.max().item() == 3 and (lens > 0).all() and not (lens == 5).any()
        assert all(torch.is_tensor(x) for x in (*floats, *table, *lens.split(1)))
        assert type(floats.sum().item()) is float and type(lens.sum() > 5) is torch.Tensor
        assert torch.tensor([5]).item() == 5 and not torch.tensor([0])
        with pytest.raises(RuntimeError, match="meta"):
            lens.to("meta").max().item()
