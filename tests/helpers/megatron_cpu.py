"""What megatron-core 0.16.1, mbridge 0.15.1 and verl's Megatron engine lack on a CPU, as stand-ins: torch.cuda, and
TransformerEngine's attention, norms and names of weights. They then run on gloo ranks, with the local layer spec.

What is replaced here is no code of ours, and both arms have it. Rows are attended by torch's own attention, one by one.
Importing this module replaces it for the process; a worker imports it by

    ... actor_rollout_ref.model.external_lib=megatron_cpu
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from float64_torch import Float64Torch
from torch.nn.functional import pad, scaled_dot_product_attention

CPU = torch.device("cpu")


class _Stream:
    """A stream or an event: on a CPU all is done in order."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def _nothing(self, *args: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None: ...


# The device of new tensors (tensor_parallel/layers.py:236 and wherever else), of which verl's stands in `to("cpu:0")`.
torch.cuda.current_device = lambda: CPU
# Host code that waits for a device, frees its memory (p2p_communication.py:242, param_and_grad_buffer.py:394) or seeds
# its generator (tensor_parallel/random.py:235, 422).
for _name in ("synchronize", "set_device", "empty_cache", "manual_seed"):
    setattr(torch.cuda, _name, lambda *args, **kwargs: None)  # one each: torch.compile looks them up
torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
# Streams of the token dispatcher, shared experts and gradient buckets (token_dispatcher.py:445, shared_experts.py:121).
torch.cuda.Stream = torch.cuda.Event = _Stream
torch.cuda.current_stream = lambda *args: _Stream()
torch.cuda.default_stream = lambda *args: _Stream()
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.cuda.is_current_stream_capturing = lambda: False  # transformer/cuda_graphs.py:66
# Weights and optimizer states that move (language_module.py:244, optimizer.py:375).
torch.Tensor.cuda = lambda self, *args, **kwargs: self
torch.Tensor.record_stream = _nothing  # token_dispatcher.py:873
torch.Tensor.pin_memory = lambda self, *args: self  # verl/utils/megatron_utils.py, offload

# Optimizers know dtypes by names of CUDA's tensor types, and no float64 (clip_grads.py:167, optimizer.py:671, 690,
# distrib_optimizer.py:361, 420).
_type = torch.Tensor.type


def _type_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _type(self, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.").replace("Double", "Float") if isinstance(found, str) else found


torch.Tensor.type = _type_on_cuda
# `jit_fuser` and verl's entropy compile (megatron/core/jit.py:23, verl/utils/megatron/tensor_parallel.py:118).
torch._dynamo.config.disable = True

import megatron.core.utils as core_utils  # noqa: E402
from mbridge.core import bridge, llm_bridge  # noqa: E402
from mbridge.models import DeepseekV3Bridge  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models import backends  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.models.common.language_module import language_module  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.optimizer import clip_grads, grad_scaler, optimizer  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.tensor_parallel import mappings, model_parallel_cuda_manual_seed, random  # noqa: E402
from megatron.core.transformer import (  # noqa: E402
    MLATransformerConfig,  # noqa: E402
    multi_latent_attention,
    torch_norm,
    utils,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.moe import moe_utils, router, token_dispatcher  # noqa: E402
from verl.utils import megatron_utils  # noqa: E402
from verl.utils.torch_dtypes import PrecisionType  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.megatron import transformer_impl as verls  # noqa: E402


class _Torch:
    """torch for modules that name the device "cuda", or pinned memory: all of it lies in the host's."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _on_cpu(found) if name in ("empty", "ones", "tensor", "zeros") else found


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, device=CPU if device is not None else None, **kwargs)

    return run


# schedules.py:596, clip_grads.py:90, grad_scaler.py:15, optimizer.py:473, moe_utils.py:998, transformer/utils.py:35,
# core/utils.py:1207, rope_utils.py:62; verl's megatron_utils.py, offload.
_LITERAL = (schedules, clip_grads, grad_scaler, optimizer, moe_utils, utils, core_utils, rope_utils, megatron_utils)
for _module in _LITERAL:
    _module.torch = _Torch()


class _Double(_Torch, Float64Torch): ...


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Context in which what mcore computes in fp32 whatever the model's dtype is, such as norms of gradients, is in
    float64. Its routers want `moe_router_dtype="fp64"`."""
    with contextlib.ExitStack() as stack:
        for module in (*_LITERAL, router):
            stack.enter_context(mock.patch.object(module, "torch", _Double()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", lambda self: self.double()))
        stack.enter_context(mock.patch.object(PrecisionType, "to_dtype", _to_dtype))
        yield


def _to_dtype(precision: Any, of_verl: Callable[[Any], torch.dtype] = PrecisionType.to_dtype) -> torch.dtype:
    return torch.float64 if precision in ("float64", torch.float64) else of_verl(precision)


# TE's state of fp8, of which recomputed layers ask (tensor_parallel/random.py:589, 592, 687).
random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
random.activation_recompute_forward = random.fp8_autocast = lambda **kwargs: contextlib.nullcontext()

# The GPU's generator: here it draws nothing (tensor_parallel/random.py:250, 447).
_generator = [torch.get_rng_state()]
random._get_cuda_rng_state = lambda *args, **kwargs: _generator[0]
random._set_cuda_rng_state = lambda state, *args, **kwargs: _generator.__setitem__(0, state)
logging.getLogger(random.__name__).setLevel(logging.ERROR)  # what is drawn for a GPU changes the host's state here
# verl leaves its seed out where there is no GPU (verl/workers/engine/megatron/utils.py:34).
_seed = verls.set_random_seed


def _seeded(seed: int) -> None:
    _seed(seed)
    model_parallel_cuda_manual_seed(seed)


verls.set_random_seed = _seeded
# verl's config knows bfloat16 and float16 alone (verl/workers/config/engine.py:218): a run's environment says another.
_init = verls.MegatronEngine.__init__


def _of_dtype(self: Any, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
    if dtype := os.environ.get("MEGATRON_CPU_DTYPE"):
        object.__setattr__(engine_config, "dtype", dtype)
    _init(self, model_config, engine_config, *args, **kwargs)


verls.MegatronEngine.__init__ = _of_dtype


def _attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int], scale: float,
    window: tuple[int, int] | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of rows behind one another: query [T, H, D], key [T, K, D], value [T, K, V], the last bounds of
    rows, a window's (tokens behind, ahead; -1 is all), sinks [H]. Returns [T, H, V]."""
    found, start = [], 0
    for end in ends:
        q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        at = torch.arange(end - start)
        behind = at.unsqueeze(1) - at
        seen = behind >= 0
        if window is not None and window[0] >= 0:
            seen &= behind <= window[0]
        mask = seen
        if sinks is not None:  # a key of zeros, whose value is zero, with the sink for its score
            mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, float("-inf")).expand(len(sinks), -1, -1)
            mask = torch.cat([mask, sinks.to(q.dtype).view(-1, 1, 1).expand(-1, end - start, 1)], -1)
            k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
        row = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        found.append(row.squeeze(0).transpose(0, 1))
        start = end
    assert start == len(query), f"rows of {start} tokens, of which there are {len(query)}"
    return torch.cat(found)


class _Gathered(torch.autograd.Function):
    """[t, ...] of every rank -> [ranks t, ...]"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        found = x.new_empty(group.size(), *x.shape)
        torch.distributed.all_gather(list(found), x.contiguous(), group=group)
        return found.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


def _zigzag(ends: list[int], ranks: int) -> torch.Tensor:
    """[T] int64: where tokens of rows stand among those of rank 0, then rank 1, and so on, of which rank i has the i-th
    and the i-th last part of every row."""
    found = [torch.empty(0, dtype=torch.int64) for _ in range(ranks)]
    for start, end in zip([0, *ends], ends, strict=False):
        parts = torch.arange(start, end).chunk(2 * ranks)
        found = [torch.cat([x, parts[i], parts[-1 - i]]) for i, x in enumerate(found)]
    return torch.cat(found).argsort()


class RowAttention(DotProductAttention):
    """TEDotProductAttention (extensions/transformer_engine.py:1058): rows packed as thd, which the local one refuses
    (dot_product_attention.py:159), also over ranks of context parallelism (:58), and MLA, whose heads of values it does
    not know (multi_latent_attention.py:158)."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any):
        with mock.patch.object(kwargs["config"], "context_parallel_size", 1):  # over which `forward` knows rows
            super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None, attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """thd: query [T, H, D], key [T, K, D], value [T, K, V]; returns [T, H * V]. Else [S, rows, H, D] and so on, to
        [S, rows, H * V]: causal as TE's, which reads no mask then; rows are padded at their ends."""
        assert attention_bias is None and not (self.training and self.attention_dropout.p)
        window = self.scale_mask_softmax.window_size
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            length, rows = query.shape[:2]
            flat = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
            ends = [length * (row + 1) for row in range(rows)]
            found = _attend_rows(*flat, ends, self.softmax_scale, window, self.softmax_offset)
            return found.flatten(1).unflatten(0, (rows, length)).transpose(0, 1)
        bounds = packed_seq_params.cu_seqlens_q_padded  # rows as they lie in memory
        ends = (packed_seq_params.cu_seqlens_q if bounds is None else bounds)[1:].tolist()
        if (group := parallel_state.get_context_parallel_group()).size() == 1:
            return _attend_rows(query, key, value, ends, self.softmax_scale, window, self.softmax_offset).flatten(1)
        order = _zigzag(ends, group.size())
        query, key, value = (_Gathered.apply(x, group)[order] for x in (query, key, value))
        found = _attend_rows(query, key, value, ends, self.softmax_scale, window, self.softmax_offset)
        return found.flatten(1)[order.argsort().chunk(group.size())[group.rank()]]


backends.LocalSpecProvider.core_attention = lambda self: RowAttention


def _norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> torch.nn.Module:
    """TENorm (extensions/transformer_engine.py:401): in the dtype of the model, its weight marked where ranks of TP
    share rows, which the local one refuses (torch_norm.py:33)."""
    assert config.normalization == "RMSNorm", config.normalization
    norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


torch_norm.WrappedTorchNorm.__new__ = _norm
# TE's environment is of one kind of attention for a whole process (language_module.py:102).
language_module.LanguageModule._set_attention_backend = _nothing
# Without TE its linear layers are mocks, no types (multi_latent_attention.py:185), and the router's GEMM has no name
# (moe_utils.py:1192).
multi_latent_attention.HAVE_TE = False
moe_utils.te_general_gemm = None


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """moe_utils.py:1078 makes numpy of what was on a GPU; others take the counts for such (token_dispatcher.py:886)."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


token_dispatcher.maybe_move_tensor_to_cpu = _on_host

# gloo gathers and scatters equal parts alone; ranks of an expert's TP have as many tokens as were routed to them
# (tensor_parallel/mappings.py:150, 193).
_gather, _reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


def _gather_uneven(x: torch.Tensor, group: Any, sizes: list[int] | None = None, *args: Any) -> torch.Tensor:
    if sizes is None or group.size() == 1:
        return _gather(x, group, sizes, *args)
    parts = [x.new_empty(max(sizes), *x.shape[1:]) for _ in sizes]
    mine = torch.cat([x, x.new_zeros(max(sizes) - len(x), *x.shape[1:])])
    torch.distributed.all_gather(parts, mine, group=group)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


def _reduce_scatter_uneven(x: torch.Tensor, group: Any, sizes: list[int] | None = None, *args: Any) -> torch.Tensor:
    if sizes is None or group.size() == 1:
        return _reduce_scatter(x, group, sizes, *args)
    whole = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(whole, group=group)
    return whole.split(sizes)[group.rank()].clone()


mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = _gather_uneven, _reduce_scatter_uneven

# What kernels of TE and Apex fuse (torch_norm.py:31, fused_softmax.py:216, mlp.py:210, experts.py:100).
_FUSED = (
    "persist_layer_norm", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "moe_grouped_gemm",
    "gradient_accumulation_fusion",
)  # fmt: skip


def _local_spec(config: Any, use_transformer_engine: bool, **kwargs: Any) -> Any:
    """mbridge asks for TE's (llm_bridge.py:149), in which every rank has MLA's whole down projections. The local one's
    are sharded, and it loses the gradient of keys' rotary part of other ranks' heads (multi_latent_attention.py:597).
    """
    for name in _FUSED:
        setattr(config, name, False)
    spec = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm", **kwargs)
    for layer in spec.layer_specs if config.multi_latent_attention else []:
        attention = layer.submodules.self_attention.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = multi_latent_attention.Linear
    return spec


llm_bridge.get_gpt_decoder_block_spec = _local_spec


class NamedAsTE:
    """A model of the local spec with the names of TE's, which alone mbridge knows (bridge.py:190, 336): norms within
    linear layers, weights of experts side by side. `of` gives what is exported in a parameter's place."""

    def __init__(self, model: torch.nn.Module, of: Callable[[torch.nn.Parameter], torch.Tensor] = lambda p: p) -> None:
        self.model, self.of = bridge.unwrap_model(model), of
        self.decoder, self.config = self.model.decoder, self.model.config
        self.names = {name: self._name(name) for name in self.model.state_dict()}

    def _name(self, name: str) -> str:
        if not (found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)):
            return name
        layer, config = self.decoder.layers[int(found[1])], self.config
        mla = bool(getattr(config, "multi_latent_attention", False))
        renamed = {"self_attention.q_layernorm": "self_attention.linear_q_up_proj.layer_norm"} if mla else {}
        renamed |= {"self_attention.kv_layernorm": "self_attention.linear_kv_up_proj.layer_norm"} if mla else {}
        renamed |= {} if mla else {"input_layernorm": "self_attention.linear_qkv.layer_norm"}
        if not hasattr(layer.mlp, "router"):
            renamed["pre_mlp_layernorm"] = "mlp.linear_fc1.layer_norm"
        inner = found[2]
        for local, of_te in renamed.items():
            inner = re.sub(rf"^{re.escape(local)}\.(weight|bias)$", rf"{of_te}_\1", inner)
        inner = re.sub(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc\d)\.(\w+)$", r"mlp.experts.\2.\3\1", inner)
        return f"decoder.layers.{found[1]}.{inner}"

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {self.names[name]: x for name, x in self.model.state_dict().items()}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        alike: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}  # weights of experts follow one another
        for name, parameter in self.model.named_parameters():
            alike.setdefault(self.names[name].rstrip("0123456789"), []).append((self.names[name], parameter))
        for named in alike.values():
            yield from ((name, self.of(parameter)) for name, parameter in named)


_load, _export = bridge.Bridge.load_weights, bridge.Bridge.export_weights


def _named(models: list) -> list[NamedAsTE]:
    return [model if isinstance(model, NamedAsTE) else NamedAsTE(model) for model in models]


bridge.Bridge.load_weights = lambda self, models, *args, **kwargs: _load(self, _named(models), *args, **kwargs)
bridge.Bridge.export_weights = lambda self, models: _export(self, _named(models))
# It reads DeepSeek's weights onto a GPU, those in fp8 by a kernel of Triton (mbridge/models/deepseek_v3.py:281).
DeepseekV3Bridge._get_safetensor_io = bridge.Bridge._get_safetensor_io


def _mla_config(max_position_embeddings: int, **fields: Any) -> MLATransformerConfig:
    """mcore has another name for the length that YaRN was trained on (mbridge/models/deepseek_v3.py:165)."""
    return MLATransformerConfig(original_max_position_embeddings=max_position_embeddings, **fields)


DeepseekV3Bridge.TransformerConfigClass = staticmethod(_mla_config)
EngineRegistry.register("language_model", backend="megatron", device="cpu")(verls.MegatronEngineWithLMHead)

from verl_prefix.backends.megatron import PrefixMegatronEngine  # noqa: E402  over the engine above

EngineRegistry.register("language_model", backend="prefix_megatron", device="cpu")(PrefixMegatronEngine)
