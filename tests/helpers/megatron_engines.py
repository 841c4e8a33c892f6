"""verl's Megatron engine and ours over it, on gloo ranks of a CPU: models, how both are built, and whole tensors of
what they shard, by their names on the hub."""

import gc
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engines import _batch, _loss, _responses, rows_of
from safetensors.torch import load_file, save_file
from teachers import tell_update
from torch.distributed import distributed_c10d
from transformers import AutoModelForCausalLM

from verl_prefix.config.options import PrefixConfig
from verl_prefix.testing import write_tiny_model

YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1,
    original_max_position_embeddings=64,
)  # fmt: skip
# name -> (family, fields of its config, what verl's megatron.override_transformer_config sets for it).
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    # The second of two layers has the window.
    "qwen2_window": (
        "qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
        dict(window_size=(7, 0), window_attn_skip_freq=[0, 1]),
    ),
    "qwen3": ("qwen3", {}, {}),
    "qwen3_deep": ("qwen3", {"num_hidden_layers": 4}, {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}, {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}, {}),
    # mbridge's biases, of which it moves none by itself; scores of experts that were not normalised
    # (mbridge/models/mixtral.py:99).
    "glm4_moe": ("glm4_moe", {"attention_bias": True}, {"moe_router_bias_update_rate": 0.001}),
    "mixtral": ("mixtral", {}, {"moe_router_pre_softmax": False}),
    "deepseek_v3": ("deepseek_v3", {}, {}),
    "deepseek_v3_yarn": ("deepseek_v3", {"rope_parameters": YARN}, {}),
}  # fmt: skip

# Rows of 4 n tokens, for `engines._batch`: verl's engine pads others, to an even number under sequence parallelism and
# to 4 n on two ranks of context parallelism, and its routers count the padding.
EVEN = {"groups": [("a", 24, [12, 16, 8], ""), ("b", 40, [4, 12, 4, 8, 20], ""), ("c", 4, [8, 12], "")]}


OUTPUTS = "log_probs", "entropy", "sum_pi_squared"


def write_megatron_model(path: Path, name: str) -> str:
    """`write_tiny_model` of `MODELS`, in fp32, with weights at which attention and routing matter."""
    family, fields, _ = MODELS[name]
    written = write_tiny_model(path, family=family, vocab_size=420, initializer_range=0.08, **fields)
    weights, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    for weight in weights.values():
        if weight.dim() == 1:  # norms and biases
            weight.add_(torch.rand(weight.shape, generator=generator) * 0.3)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return written


def engine(
    cls: type, path: str, *, model: str = "qwen3", tp: int = 1, ep: int = 1, etp: int | None = None, cp: int = 1,
    sp: bool = False, per_token: bool = False, dtype: str = "float32", forward_only: bool = False,
    distributed_optimizer: bool = True, lr: float = 1e-5, replay: str = "disabled",
    override_transformer_config: dict[str, Any] | None = None, override_ddp_config: dict[str, Any] | None = None,
    prefix: dict[str, Any] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """An initialized engine of a class of verl's or ours.

    Args:
        path: a checkpoint of `write_megatron_model`, whose name in `MODELS` is `model`.
        etp: None leaves it to mcore, which takes `tp`.
        sp: whether ranks of TP share a row's tokens between the layers.
        per_token: verl's loss is mcore's per token, which Megatron-Bridge sets under CP, and no user.
        replay: verl's mode of router replay.
        prefix: fields of PrefixConfig; None for verl's own engine.
        more: other keys of verl's McoreEngineConfig.
    """
    import megatron_cpu  # noqa: F401  by ranks alone: what it replaces stays
    from megatron.core import parallel_state
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import EngineRouterReplayConfig, HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

    sizes = (tp, ep, tp if etp is None else etp, more.get("pipeline_model_parallel_size", 1), cp)
    if parallel_state.is_initialized() and _sizes(parallel_state) != sizes:
        _forget(parallel_state)  # verl keeps the first topology
    model_config = HFModelConfig(path=path, use_remove_padding=True)
    _as_transformers_4(model_config.hf_config)
    transformer_config = MODELS[model][2] | (override_transformer_config or {})
    if not sp:  # mbridge has it on wherever TP is, whatever verl's key says (mbridge/core/llm_bridge.py:82)
        transformer_config["sequence_parallel"] = False
    fields: dict[str, Any] = dict(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        context_parallel_size=cp, sequence_parallel=sp, use_distributed_optimizer=distributed_optimizer,
        vanilla_mbridge=True, forward_only=forward_only, override_transformer_config=transformer_config,
        override_ddp_config=dict(override_ddp_config or {}), router_replay=EngineRouterReplayConfig(mode=replay),
        **more,
    )  # fmt: skip
    if prefix is None:
        engine_config = McoreEngineConfig(**fields)
    else:
        from verl_prefix.config.megatron import PrefixMegatronEngineConfig

        # Rows stay, so that what a rank computes is known.
        options = PrefixConfig(**{"min_speedup": 0, "exchange": "off"} | prefix)
        engine_config = PrefixMegatronEngineConfig(**fields, prefix=options)
    engine_config.override_transformer_config["calculate_per_token_loss"] = per_token
    object.__setattr__(engine_config, "dtype", dtype)  # of which it knows bfloat16 and float16 (engine.py:218)
    optimizer_config = McoreOptimizerConfig(
        lr=lr, lr_warmup_steps=0, total_training_steps=10, weight_decay=0.01, clip_grad=1.0
    )
    built = cls(model_config, engine_config, optimizer_config, CheckpointConfig())
    bridge_class = type(_bridge_of(model_config.hf_config))
    with mock.patch.dict(bridge_class._DIRECT_MAPPING):  # tied weights are noted for the whole class
        built.initialize()
        built.bridge._DIRECT_MAPPING = dict(bridge_class._DIRECT_MAPPING)
    _CHUNKS.update(built.module)
    return built


_CHUNKS: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def _forget(state: Any) -> None:
    """mcore drops its groups without an end to them: each of gloo's has a thread that wakes up 100 times a second, and
    hooks on parameters hold the modules that hold the groups."""
    state.destroy_model_parallel()
    for group in list(distributed_c10d._world.pg_map):
        if group is not distributed_c10d._get_default_group():
            torch.distributed.destroy_process_group(group)
    for chunk in list(_CHUNKS):
        vars(chunk).clear()
    gc.collect()


def _sizes(state: Any) -> tuple[int, ...]:
    return (
        state.get_tensor_model_parallel_world_size(), state.get_expert_model_parallel_world_size(),
        state.get_expert_tensor_parallel_world_size(), state.get_pipeline_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
    )  # fmt: skip


def _bridge_of(hf_config: Any) -> Any:
    from mbridge.core.bridge import _MODEL_REGISTRY

    return _MODEL_REGISTRY[hf_config.model_type].__new__(_MODEL_REGISTRY[hf_config.model_type])


def _as_transformers_4(config: Any) -> None:
    """The fields from which mbridge 0.15.1 reads rotary angles, which transformers 5 keeps in `rope_parameters`."""
    rope = dict(config.rope_parameters)
    config.rope_theta = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        config.partial_rotary_factor = rope["partial_rotary_factor"]
    if rope["rope_type"] != "default":  # "rope_scaling" is another name of the same now, which `in` does not find
        config.rope_parameters["type"] = rope["rope_type"]
        vars(config)["rope_scaling"] = None


def exported(engine: Any, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors of what `of` gives in a parameter's place, as verl hands weights to the rollout: by names on the
    hub, gathered over TP and EP."""
    from megatron_cpu import NamedAsTE

    def alike(parameter: torch.nn.Parameter) -> torch.Tensor:
        found = of(parameter).detach().clone()
        for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            setattr(found, name, getattr(parameter, name))
        return found

    named = engine.bridge.export_weights([NamedAsTE(module, alike) for module in engine.module])
    return {name: x.clone() for name, x in named if not name.endswith("e_score_correction_bias")}


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Whole gradients after a batch's last pass. The distributed optimizer leaves each rank its part of their sum."""
    for chunk in engine.module:
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            if not group.ddp_config.use_distributed_optimizer:
                continue
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                parts = bucket.grad_data.view(ranks.size(), -1)
                torch.distributed.all_gather(list(parts.unbind()), parts[ranks.rank()].clone(), group=ranks)
    return exported(engine, lambda p: p.main_grad if p.requires_grad else torch.zeros_like(p))


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Whole weights. With overlap_param_gather the next forward gathers them."""
    for chunk in engine.module:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    return exported(engine, lambda parameter: parameter)


def batch_of(engine: Any, ranks: Sequence[int], options: dict[str, Any]) -> Any:
    """The rows of data ranks behind one another: those of each are `engines._batch`."""
    from verl.utils import tensordict_utils as tu

    vocab = engine.model_config.hf_config.vocab_size
    return tu.concat_tensordict([_batch(rank, vocab, rows_of(rank, options)) for rank in ranks])


def routes_of(data: Any, config: Any, numbers: Sequence[int]) -> torch.Tensor:
    """Routes of a batch's rows as a rollout might have recorded them, jagged int16 [rows, tokens, layers, k]. A token's
    follow from its row's uid and all tokens up to it, and after the last whole block of 16 prompt tokens from the row's
    number as well. The last token has none; in some rows one token of the prompt has one expert several times.
    """
    from verl.utils import tensordict_utils as tu

    from verl_prefix.engine.rows import BatchRows
    from verl_prefix.models.support import num_experts

    shape, generator, found = (config.num_hidden_layers, num_experts(config)), torch.Generator(), []
    rows = zip(numbers, tu.get(data, "uid"), data["input_ids"].unbind(), BatchRows(data).prompt_lens, strict=True)
    for number, uid, ids, prompt_len in rows:
        state, own, some = sum(map(ord, uid)), (prompt_len - 1) // 16 * 16, []
        for place, token in enumerate(ids.tolist()):
            state = (state * 1_000_003 + token + 7919 * (number + 1) * (place == own)) % 2**61
            scores = torch.rand(*shape, generator=generator.manual_seed(state))
            some.append(scores.topk(config.num_experts_per_tok)[1])
        row = torch.stack(some)
        row[own][:] = row[own][:, :1] if number % 3 == 0 else row[own]
        row[-1] = 0
        found.append(row.to(torch.int16))
    return torch.nested.as_nested_tensor(found, layout=torch.jagged)


def measure(engine: Any, options: dict[str, Any], ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """As `engines._measure`: outputs of an engine, gradients and their norm of a step, and weights after two. Every
    stage of a pipeline has what its last one found.

    ranks: whose rows this rank has; None for its own. Two ranks of data parallelism that have the rows of both find
    what one has that is alone.
    """
    data = batch_of(engine, (engine.get_data_parallel_rank(),) if ranks is None else ranks, options)
    with engine.eval_mode(disable_auto_offload=True):
        inferred = engine.infer_batch(data.copy()).get("model_output") or {}
    found: dict[str, Any] = {name: torch.cat(_responses(x, data)) for name, x in inferred.items()}
    found["lens"] = data["input_ids"].offsets().diff()
    if inferred:
        assert torch.equal(inferred["log_probs"].offsets().diff(), found["lens"])
    if "distillation" in options:
        options = options | {"strategy": "megatron"}
        tell_update(data, options)
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data.copy(), _loss(options))
        found["grads"] = gradients(engine)
        found["grad_norm"] = float(engine.optimizer_step())
        engine.lr_scheduler_step()
        engine.train_batch(data.copy(), _loss(options))
    if inferred:
        found["loss"], found["metrics"] = sum(output["loss"]), output["metrics"]
    return of_last_stage(found) | {"params": weights(engine)}


def of_last_stage(found: dict[str, Any]) -> dict[str, Any]:
    """What the last stage of this pipeline found, on all of its stages."""
    from megatron.core import parallel_state

    group, box = parallel_state.get_pipeline_model_parallel_group(), [found]
    if group.size() > 1:
        last = torch.distributed.get_global_rank(group, group.size() - 1)
        torch.distributed.broadcast_object_list(box, src=last, group=group)
    return box[0]


def together(engine: Any, found: dict[str, Any]) -> dict[str, Any]:
    """What data-parallel ranks `measure`d of their own rows, as one would that had them all."""
    group = engine.get_data_parallel_group()
    every: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(every, found, group=group)
    whole = {name: torch.cat([each[name] for each in every]) for name in (*OUTPUTS, "lens") if name in found}
    return found | whole | {"loss": sum(each["loss"] for each in every) / len(every)}


def errors_of(found: dict[str, Any], truth: dict[str, Any]) -> dict[str, float]:
    """Largest differences over the largest value of each tensor; of weights, of all as one vector."""
    assert set(found["grads"]) == set(truth["grads"])
    pairs = {f"gradient of {name}": (found["grads"][name], x) for name, x in truth["grads"].items()}
    pairs |= {name: (found[name], truth[name]) for name in OUTPUTS if name in truth}
    errors = {name: ((a - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()}
    if "params" in truth:
        a, b = (torch.cat([each["params"][name].flatten() for name in truth["params"]]) for each in (found, truth))
        errors["params"] = ((a - b).norm() / b.norm()).item()
    return errors | {name: abs(found[name] - truth[name]) / abs(truth[name]) for name in ("loss", "grad_norm")}


def as_on_the_hub(path: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by names of transformers' modules, by those of the checkpoint in `path`: as transformers itself saves
    them."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for x in model.state_dict().values():
            x.fill_(float("nan"))
        parameters = dict(model.named_parameters())
        for name, x in tensors.items():
            parameters[name].copy_(x)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(Path(folder, "model.safetensors"))
    return {name: x for name, x in saved.items() if not x.isnan().all()}
