"""Loads of experts without FSDP; tests/engine/test_sequence_parallel.py compares them with rows by themselves."""

import torch
from transformers import JetMoeConfig, JetMoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl_prefix.core.context import ForwardContext
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.runs import Segment
from verl_prefix.models.experts import CountedRouters


def test_tokens_are_counted_where_they_are_and_not_where_parameters_wait(monkeypatch):
    """MOCK: the meta device stands for a GPU, whose parameters wait in host memory (fsdp_config.offload_policy)."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    fields = dict(hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2, num_experts=4)
    fields |= dict(num_attention_heads=2, num_key_value_heads=1, num_experts_per_tok=2, vocab_size=20)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields))
    loads, router = CountedRouters(model), model.model.layers[0].mlp.gate
    five = ForwardContext(PackedRow(torch.arange(5), (Segment(5),)), "auto")
    with loads.counting(five, torch.device("meta")):
        (hook,) = router._forward_hooks.values()
        scores, chosen = torch.zeros(5, 4, device="meta"), torch.zeros(5, 2, dtype=torch.int64, device="meta")
        hook(router, (), (scores, scores[:, :2], chosen))
    assert not router._forward_hooks and loads._loads[0].is_meta
    with torch.no_grad(), loads.counting(five, torch.device("cpu")):
        assert not router._forward_hooks, "log-probs are not counted"


def test_a_router_that_sorts_tokens_by_expert_is_not_counted():
    """JetMoe's, which transformers 5.24 records by itself: its integers are places, not the choice of each token."""
    fields = dict(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, kv_channels=8)
    model = JetMoeForCausalLM(JetMoeConfig(**fields, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2))
    loads, packed_row = CountedRouters(model), PackedRow(torch.arange(5), (Segment(5),))
    loads._routers = [layer.mlp.router for layer in model.model.layers]
    with loads.counting(ForwardContext(packed_row, "auto"), torch.device("cpu")):
        model(input_ids=torch.arange(5)[None], use_cache=False)
    assert loads.metrics(list) == {}
