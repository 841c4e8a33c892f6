"""Tiny models of every supported family, and float64 inside of them."""

import sys

import pytest
import torch
import transformers
from float64_torch import Float64Torch

from verl_prefix.models.support import check_supported

COMMON = dict(
    vocab_size=128, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.1, attention_dropout=0.0,
    bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
MOE = dict(num_experts_per_tok=2, num_local_experts=4)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
QWEN2_WINDOW = dict(use_sliding_window=True, sliding_window=7, max_window_layers=2)
QWEN3_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SHARED_EXPERT = QWEN3_MOE | dict(shared_expert_intermediate_size=32)
MLA = dict(
    kv_lora_rank=20, qk_nope_head_dim=16, head_dim=8, qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4,
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
    first_k_dense_replace=1,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=64,
)  # fmt: skip
GLM4_MOE = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1)
GEMMA3 = dict(query_pre_attn_scalar=24, layer_types=["sliding_attention"] * 3 + ["full_attention"])
GEMMA2 = dict(attn_logit_softcapping=2.0, final_logit_softcapping=5.0, query_pre_attn_scalar=24)
DELTA_NET = dict(
    layer_types=["linear_attention"] * 3 + ["full_attention"], linear_conv_kernel_dim=4, linear_key_head_dim=8,
    linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
TWO_LAYERS = DELTA_NET | dict(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
OLMO = TWO_LAYERS | dict(linear_num_key_heads=4)
DELTA_NET_MOE = TWO_LAYERS | SHARED_EXPERT
SHORT_CONV = dict(layer_types=["conv", "full_attention"] * 2, conv_L_cache=3)
SHORT_CONV_MOE = SHORT_CONV | QWEN3_MOE | dict(num_dense_layers=1)
MAMBA = dict(
    mamba_n_heads=8, mamba_d_head=12, mamba_n_groups=2, mamba_d_state=10, mamba_expand=2, mamba_d_conv=4,
    mamba_chunk_size=16,
)  # fmt: skip
GRANITE = MAMBA | dict(layer_types=["mamba", "attention"] * 2, shared_intermediate_size=64)
# name -> (config class, what it adds, feature, core). Layers alternate where the family's do.
FAMILIES = {
    "llama3": ("LlamaConfig", dict(rope_parameters=LLAMA3_ROPE), "rope llama3", "merged"),
    "smollm2": ("LlamaConfig", dict(num_key_value_heads=4, tie_word_embeddings=True), "MHA, tied", "merged"),
    "qwen2.5": ("Qwen2Config", {}, "biases", "merged"),
    "qwen2-window-7": ("Qwen2Config", QWEN2_WINDOW, "window < P", "merged"),
    "qwen3": ("Qwen3Config", {}, "qk norm", "merged"),
    "mistral-window-8": ("MistralConfig", dict(sliding_window=8), "window < P", "merged"),
    "mistral-window-26": ("MistralConfig", dict(sliding_window=26), "window ends in a suffix", "merged"),
    "mistral-window-300": ("MistralConfig", dict(sliding_window=300), "window > row", "merged"),
    "mistral-mqa": ("MistralConfig", dict(sliding_window=None, num_key_value_heads=1), "MQA", "merged"),
    "mixtral": ("MixtralConfig", MOE | dict(sliding_window=None), "MoE", "merged"),
    "qwen2-moe": ("Qwen2MoeConfig", SHARED_EXPERT, "biases, MoE", "merged"),
    "qwen3-moe": ("Qwen3MoeConfig", QWEN3_MOE, "MoE", "merged"),
    "phi3": ("Phi3Config", dict(sliding_window=None), "fused qkv", "merged"),
    "phi3-window-9": ("Phi3Config", dict(sliding_window=9), "window < P", "merged"),
    "glm4": ("Glm4Config", dict(partial_rotary_factor=0.5), "partial rope", "merged"),
    "glm4-moe": ("Glm4MoeConfig", GLM4_MOE, "partial rope, biases, MoE", "merged"),
    "seed-oss": ("SeedOssConfig", dict(residual_dropout=0.0), "biases, head dim of its own", "merged"),
    "deepseek-v3": ("DeepseekV3Config", MLA | dict(q_lora_rank=24), "MLA, MoE", "merged"),
    "deepseek-v3-yarn": (
        "DeepseekV3Config", MLA | dict(q_lora_rank=24, rope_parameters=YARN, first_k_dense_replace=4),
        "MLA, scaled scores", "merged",
    ),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", MLA | dict(q_lora_rank=None), "MLA, MoE", "merged"),
    "olmo2": ("Olmo2Config", {}, "post-norm", "merged"),
    "gemma2-window-9": ("Gemma2Config", GEMMA2 | dict(sliding_window=9), "softcap, alternating window", "reference"),
    "gemma3-window-9": ("Gemma3TextConfig", GEMMA3 | dict(sliding_window=9), "alternating window", "merged"),
    "gpt-oss-window-9": ("GptOssConfig", MOE | dict(sliding_window=9), "sinks, alternating window, MoE", "merged"),
    "head-dim-64": ("Qwen3Config", dict(head_dim=64), "D=64", "merged"),
    "head-dim-96": ("Qwen3Config", dict(head_dim=96), "D=96", "merged"),
    "head-dim-128": ("Qwen3Config", dict(head_dim=128), "D=128", "merged"),
    "head-dim-256": ("Qwen3Config", dict(head_dim=256), "D=256", "merged"),
    "qwen3.5": ("Qwen3_5TextConfig", DELTA_NET, "gated delta rule", "merged, states"),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", DELTA_NET_MOE, "gated delta rule, MoE", "merged, states"),
    "qwen3-next": ("Qwen3NextConfig", DELTA_NET_MOE, "gated delta rule, MoE", "merged, states"),
    "olmo-hybrid": ("OlmoHybridConfig", OLMO, "gated delta rule", "merged, states"),
    "lfm2": ("Lfm2Config", SHORT_CONV, "short convolution", "merged, states"),
    "lfm2-moe": ("Lfm2MoeConfig", SHORT_CONV_MOE, "short convolution, MoE", "merged, states"),
    "granite4-h": ("GraniteMoeHybridConfig", GRANITE | dict(num_local_experts=0), "Mamba-2", "merged, states"),
    "granite4-h-moe": ("GraniteMoeHybridConfig", GRANITE | MOE, "Mamba-2, MoE", "merged, states"),
    "bamba": ("BambaConfig", MAMBA | dict(attn_layer_indices=[1, 3]), "Mamba-2", "merged, states"),
}  # fmt: skip


def build(family: str, dtype: torch.dtype = torch.float32):
    config_class, fields, _, core = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**COMMON | fields)
    check_supported(config)
    attention = "eager" if core == "reference" or config.model_type == "gpt_oss" else "sdpa"
    config._experts_implementation = "eager"  # grouped_mm has no float64
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
        if name.endswith("A_log"):  # as drawn, a state would be gone after a token or two
            torch.nn.init.uniform_(parameter, -3.0, 1.0)
    return model.to(dtype).train()


def compute_in_float64(model, monkeypatch):
    """HF computes norms, softmax and router scores in fp32 whatever the model's dtype is: now in float64."""
    for name in {type(part).__module__ for part in model.modules()}:
        if name.startswith(("transformers.models.", "veomni.models.")):
            monkeypatch.setattr(sys.modules[name], "torch", Float64Torch())
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self.double())


@pytest.fixture
def float64_inside(monkeypatch):
    yield lambda model: compute_in_float64(model, monkeypatch)
