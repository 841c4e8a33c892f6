"""Tiny models of families that are not `write_tiny_model`'s."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl_prefix.models.support import unsupported_reasons


def write_other_model(path: Path, kind: str) -> str:
    """With dropout (`seed_oss`), or with values of another size than keys (`deepseek_v3`)."""
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
    fields = {
        "seed_oss": dict(num_key_value_heads=2, head_dim=32, attention_dropout=0.1, residual_dropout=0.1),
        "deepseek_v3": dict(
            num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=16,
            v_head_dim=20, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            moe_intermediate_size=64, first_k_dense_replace=1,
        ),
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **sizes, **fields[kind])
    refused = {"seed_oss": ["attention_dropout=0.1", "residual_dropout=0.1"], "deepseek_v3": []}
    assert unsupported_reasons(config) == refused[kind]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)
