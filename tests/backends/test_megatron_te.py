"""`model_engine=prefix_megatron` on TransformerEngine's layer spec, which needs CUDA, as far as a CPU can tell: mcore's
own classes of that spec run on stand-ins of what they call in TransformerEngine.

The stand-ins' signatures, and what they do with `main_grad`, were read in TransformerEngine 2.16.1, which is not
importable here; `te_cpu` names the files. mcore's signatures are read in the installed one, so that another one fails
here. Does not exercise TransformerEngine's kernels, fp8, or streams.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from engines import TOLERANCE

pytest.importorskip("megatron.core")

import te_ranks  # noqa: E402
from megatron_engines import MODELS, engine, errors_of, measure, write_megatron_model  # noqa: E402

PACKED, PHASED = {"schedule": "packed"}, {"schedule": "phased", "wave_tokens": 20}
FUSED = {"override_transformer_config": {"gradient_accumulation_fusion": True}}
OVERLAP = {"override_ddp_config": {"overlap_grad_reduce": True}}
ROPE = {"override_transformer_config": {"apply_rope_fusion": True}}
EXPERTS = {"override_transformer_config": {"moe_router_fusion": True, "gradient_accumulation_fusion": True}}
SELECTIVE = {"override_transformer_config": {"recompute_granularity": "selective", "apply_rope_fusion": True}}
LATENT = {"override_transformer_config": {"recompute_granularity": "selective"}}
FULL = {
    "override_transformer_config": dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
        gradient_accumulation_fusion=True,
    ),
}  # fmt: skip
SP = {"tp": 2, "sp": True}
CASES: dict[int, dict[str, te_ranks.Case]] = {
    1: {
        "packed": ("qwen3", PACKED, ROPE, "steps"),
        "phased": ("qwen3", PHASED, {}, "steps"),
        "biases_fused_gradients": ("qwen2", PHASED, FUSED, "steps"),
        "tied_fused_gradients": ("qwen3_tied", PHASED, FUSED, "steps"),
        # lm_head, whose kernel is mcore's, runs in phase A, too.
        "offload_fused_gradients": ("qwen3", PHASED | {"offload": True}, FUSED | OVERLAP, "turns"),
        "first_update": ("qwen3", PHASED, FUSED, "update"),
        "overwritten": ("qwen3", PHASED, FUSED, "overwritten"),
        "fused_rope_selective": ("qwen3", PHASED, SELECTIVE, "steps"),
        "full": ("qwen3", PHASED, FULL, "steps"),
        "experts": ("qwen3_moe", PHASED, EXPERTS, "steps"),
        "latent_selective": ("deepseek_v3_yarn", PHASED, LATENT, "steps"),
    },
    2: {
        "tp2_sp": ("qwen3", PHASED, SP | FUSED, "steps"),
        "tp2_sp_experts": ("qwen3_moe", PHASED, SP | EXPERTS, "steps"),
        "tp2_sp_latent": ("deepseek_v3_yarn", PHASED, SP, "steps"),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    used = {case[0] for cases in CASES.values() for case in cases.values()}
    return {name: write_megatron_model(folder / name, name) for name in MODELS if name in used}


@pytest.fixture(scope="module")
def on_te(models, tmp_path_factory):
    """What ours finds on TE's spec in the cases of a number of ranks; one set of processes each."""
    found: dict[int, dict] = {}

    def cases(world: int) -> dict:
        if world not in found:
            found[world] = te_ranks.run(world, models, CASES[world], tmp_path_factory.mktemp("te"))
        return found[world]

    return cases


# What follows runs on ranks.
def _local(models: dict, name: str, runs: str = "steps") -> dict:
    """What verl's own engine finds on the local spec, whole."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    return measure(engine(MegatronEngineWithLMHead, models[name], model=name), te_ranks.ROWS[runs])


@pytest.mark.parametrize(
    ("world", "which"),
    [
        pytest.param(world, which, marks=pytest.mark.more if world == 2 else ())
        for world, cases in CASES.items()
        for which, case in cases.items()
        if case[3] in te_ranks.ROWS
    ],
)
def test_te_spec_is_the_local_spec(models, ranks, on_te, world, which):
    name, _, _, runs = CASES[world][which]
    (truth,) = ranks(1, models)(_local, name, runs)
    errors = errors_of(on_te(world)[which], truth)
    assert max(errors.values()) < TOLERANCE, (max(errors, key=errors.__getitem__), max(errors.values()))


def test_a_first_update_keeps_what_waves_add(models, ranks, on_te):
    """With gradient_accumulation_fusion the backward of a TE layer's first forward writes over its gradient."""
    (truth,) = ranks(1, models)(_local, "qwen3")

    def worst(which: str) -> float:
        found = on_te(1)[which]["grads"]
        return max(((found[name] - x).abs().max() / x.abs().max()).item() for name, x in truth["grads"].items())

    assert worst("first_update") < TOLERANCE
    assert worst("overwritten") > 100 * TOLERANCE


# Functions and methods of megatron-core 0.16.1 that the hook-up replaces, calls, or counts on, by their file.
SIGNATURES = {
    "extensions/transformer_engine.py": {
        "TEDotProductAttention.forward": "self, query, key, value, attention_mask, attn_mask_type, "
        "attention_bias=None, packed_seq_params=None, num_splits=None",
        "TELinear.forward": "self, x",
        "TELayerNormColumnParallelLinear.forward": "self, x",
        "TEGroupedLinear.forward": "self, x, m_splits",
        "fused_apply_rotary_pos_emb": "t, freqs, transpose_output_memory=False, interleaved=False",
    },
    "tensor_parallel/layers.py": {
        "ColumnParallelLinear.forward": "self, input_, weight=None, runtime_gather_output=None",
    },
    "tensor_parallel/mappings.py": {
        "gather_from_sequence_parallel_region": "input_, tensor_parallel_output_grad=True, group=None, "
        "output_split_sizes=None, use_global_buffer=False",
    },
    "transformer/moe/router.py": {
        "TopKRouter.routing": "self, logits, padding_mask=None",
        "TopKRouter._apply_aux_loss": "self, probs, scores_for_aux_loss, routing_map, with_padding_mask=False",
        "TopKRouter._apply_seq_aux_loss": "self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, "
        "with_padding_mask=False",
    },
    "transformer/moe/router_replay.py": {
        "RouterReplay.get_replay_topk": "self, scores, topk, num_groups=None, group_topk=None, "
        "default_compute_topk=None",
    },
    "transformer/moe/moe_utils.py": {
        "get_tokens_per_expert_and_token_count": "routing_map, reduce_group, topk=None, with_padding_mask=False",
    },
    "transformer/utils.py": {
        "is_layer_window_attention": "window_size, window_attn_skip_freq, layer_number",
    },
    "models/common/embeddings/rotary_pos_embedding.py": {
        "RotaryEmbedding.forward": "self, max_seq_len, offset=0, packed_seq=False, cp_group=None",
    },
    "models/common/embeddings/yarn_rotary_pos_embedding.py": {
        "YarnRotaryEmbedding.forward": "self, max_seq_len, offset=0, packed_seq=False, cp_group=None",
    },
}
# Attributes that the hook-up reads or sets, and where mcore's constructors make them.
ATTRIBUTES = {
    "extensions/transformer_engine.py": {
        "TELinear": {"is_first_microbatch"}, "TELayerNormColumnParallelLinear": {"is_first_microbatch"},
        "TEGroupedLinear": {"is_first_microbatch"},
    },
    "tensor_parallel/layers.py": {
        "ColumnParallelLinear": {"sequence_parallel", "allreduce_dgrad", "output_size_per_partition"},
    },
    "transformer/attention.py": {"Attention": {"core_attention", "layer_number", "config"}},
    "transformer/multi_latent_attention.py": {
        "MultiLatentAttention": {"softmax_scale", "recompute_up_proj", "rotary_pos_emb", "core_attention"},
    },
    "transformer/transformer_layer.py": {"TransformerLayer": {"self_attention", "mlp", "layer_number"}},
    "transformer/moe/router.py": {
        "TopKRouter": {"enable_expert_bias", "local_tokens_per_expert", "expert_bias", "router_replay"},
    },
    "models/gpt/gpt_model.py": {"GPTModel": {"decoder", "output_layer", "rotary_pos_emb", "position_embedding_type"}},
}  # fmt: skip


def _tree(file: str) -> ast.Module:
    (folder,) = find_spec("megatron.core").submodule_search_locations
    return ast.parse(Path(folder, file).read_text())


def _definitions(file: str) -> dict[str, ast.AST]:
    """Functions, methods and classes of a file of mcore, by name; those under a condition too."""
    found: dict[str, ast.AST] = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ClassDef):
            found |= {node.name: node}
            found |= {f"{node.name}.{f.name}": f for f in node.body if isinstance(f, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, node)
    return found


def _signature(function: ast.FunctionDef) -> str:
    arguments = function.args
    for argument in (*arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    return ast.unparse(arguments)


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in SIGNATURES.items() for name in names])
def test_mcore_has_the_signatures_that_are_counted_on(file, name):
    assert _signature(_definitions(file)[name]) == SIGNATURES[file][name]


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in ATTRIBUTES.items() for name in names])
def test_mcore_makes_the_attributes_that_are_touched(file, name):
    targets = [
        target
        for node in ast.walk(_definitions(file)[f"{name}.__init__"])
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    made = {t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}
    made |= {
        ast.literal_eval(call.args[0])
        for call in ast.walk(_definitions(file)[f"{name}.__init__"])
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "self.register_buffer"
    }
    assert ATTRIBUTES[file][name] <= made


@pytest.mark.parametrize("file", ["transformer/attention.py", "transformer/multi_latent_attention.py"])
def test_core_attention_is_called_with_what_ours_takes(file):
    """Query, key, value and mask by place, the rest by name."""
    names = "self.core_attention", "apply_module(self.core_attention)"
    calls = [n for n in ast.walk(_tree(file)) if isinstance(n, ast.Call) and ast.unparse(n.func) in names]
    assert calls
    for call in calls:
        assert [ast.unparse(x) for x in call.args] == ["query", "key", "value", "attention_mask"]
