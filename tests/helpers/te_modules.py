"""Modules of TransformerEngine, in plain torch on a CPU, with the signatures of its release 2.16.1: see `te_cpu`."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


def _mappings() -> Any:
    from megatron.core.tensor_parallel import mappings

    return mappings


class _Product(torch.autograd.Function):
    """x [s, ..., in], weight [out, in] -> [s, ..., out], with the communication of a parallel mode.

    As module/linear.py: backward gathers its input again; with `fuse_wgrad_accumulation` the weight's gradient goes to
    `main_grad`, over what is there where the forward was told `is_first_microbatch`, and what autograd gets means
    nothing (module/base.py, get_dummy_wgrad)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, module: Any, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = module, is_first_microbatch, weakref.ref(weight)
        y = _gathered(x, module, "column") @ weight.t()
        return _reduced(y, module, "row")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), (module, is_first_microbatch, origin) = ctx.saved_tensors, ctx.args
        grad = _gathered(grad, module, "row")
        total = _gathered(x, module, "column")
        grad_x = _reduced(grad @ weight, module, "column")
        grad_weight = grad.reshape(-1, grad.shape[-1]).t() @ total.reshape(-1, total.shape[-1])
        if module.fuse_wgrad_accumulation:
            weight = origin()  # hooks of saved tensors hand back others
            if is_first_microbatch:
                weight.main_grad.copy_(grad_weight)
            else:
                weight.main_grad.add_(grad_weight)
            weight.grad_added_to_main_grad = True
            grad_weight = torch.full_like(grad_weight, 0.0 if getattr(weight, "zero_out_wgrad", False) else torch.nan)
        return grad_x, grad_weight, None, None


def _gathered(x: torch.Tensor, module: Any, mode: str) -> torch.Tensor:
    is_shared = module.parallel_mode == mode and module.sequence_parallel and module.tp_size > 1
    found: torch.Tensor = _mappings()._gather_along_first_dim(x, module.tp_group) if is_shared else x
    return found


def _reduced(x: torch.Tensor, module: Any, mode: str) -> torch.Tensor:
    if module.parallel_mode != mode or module.tp_size == 1:
        return x
    reduce = _mappings()._reduce_scatter_along_first_dim if module.sequence_parallel else _mappings()._reduce
    found: torch.Tensor = reduce(x.contiguous(), module.tp_group)
    return found


class Parallel(torch.nn.Module):
    """What linear layers have in common: this rank's part of `num` matrices, and marks of how they are cut
    (distributed.py, set_tensor_model_parallel_attributes)."""

    def _build(
        self, names: list[str], in_features: int, out_features: int, *, sequence_parallel: bool,
        fuse_wgrad_accumulation: bool, tp_group: Any, tp_size: int, init_method: Callable | None, bias: bool,
        return_bias: bool, params_dtype: torch.dtype | None, parallel_mode: str | None, delay_wgrad_compute: bool,
    ) -> None:  # fmt: skip
        assert not delay_wgrad_compute
        self.fuse_wgrad_accumulation, self.sequence_parallel = fuse_wgrad_accumulation, sequence_parallel
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.use_bias, self.return_bias = bias, return_bias
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features //= tp_size
        elif parallel_mode == "row":
            self.in_features //= tp_size
        for name in names:
            weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=params_dtype))
            if init_method is not None:
                init_method(weight)
            _mark(weight, 1 if parallel_mode == "row" else 0)
            self.register_parameter(name, weight)
            if bias:
                added = torch.nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype))
                self.register_parameter(name.replace("weight", "bias"), added)
                if parallel_mode == "column":
                    _mark(added, 0)


def _mark(parameter: torch.nn.Parameter, dim: int) -> None:
    for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", 1)):
        setattr(parameter, name, value)


class Linear(Parallel):
    """module/linear.py."""

    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None, rng_tracker_name: str | None = None,
        init_method: Callable | None = None, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None, parameters_split: Any = None,
        device: torch.device | str = "cuda", ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        ub_name: str | None = None, delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None,
        save_original_input: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._build(
            ["weight"], in_features, out_features, sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, tp_group=tp_group, tp_size=tp_size,
            init_method=init_method, bias=bias, return_bias=return_bias, params_dtype=params_dtype,
            parallel_mode=parallel_mode, delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:  # fmt: skip
        out = _Product.apply(inp, self.weight, self, is_first_microbatch)  # type: ignore[no-untyped-call]
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out


class LayerNormLinear(Parallel):
    """module/layernorm_linear.py: the norm is of this rank's tokens, and the product gathers them."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None, init_method: Callable | None = None, bias: bool = True,
        normalization: str = "LayerNorm", return_bias: bool = False, params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None, return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False, parameters_split: Any = None,
        zero_centered_gamma: bool = False, device: torch.device | str = "cuda", ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False, ub_name: str | None = None, delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert normalization == "RMSNorm" and not zero_centered_gamma and not return_layernorm_output
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype))
        self.layer_norm_weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self._build(
            ["weight"], in_features, out_features, sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, tp_group=tp_group, tp_size=tp_size,
            init_method=init_method, bias=bias, return_bias=return_bias, params_dtype=params_dtype,
            parallel_mode=parallel_mode, delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:  # fmt: skip
        normed = torch.nn.functional.rms_norm(inp, (inp.shape[-1],), self.layer_norm_weight, self.eps)
        out = _Product.apply(normed, self.weight, self, is_first_microbatch)  # type: ignore[no-untyped-call]
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out


class GroupedLinear(Parallel):
    """module/grouped_linear.py: one product an expert, of `m_splits` tokens behind one another, some of none."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None, rng_tracker_name: str | None = None,
        init_method: Callable | None = None, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None,
        device: torch.device | str = "cuda", ub_overlap_rs: bool = False, ub_overlap_ag: bool = False,
        ub_name: str | None = None, delay_wgrad_compute: bool = False, save_original_input: bool = False,
        single_grouped_weight: bool = False, single_grouped_bias: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_gemms = num_gemms
        self._build(
            [f"weight{i}" for i in range(num_gemms)], in_features, out_features, sequence_parallel=False,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, tp_group=tp_group, tp_size=tp_size,
            init_method=init_method, bias=bias, return_bias=return_bias, params_dtype=params_dtype,
            parallel_mode=parallel_mode, delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip
        self.parallel_mode = None  # mcore's dispatcher communicates

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        assert all(type(n) is int for n in m_splits) and sum(m_splits) == len(inp) and not self.use_bias
        parts = zip(inp.split(m_splits), range(self.num_gemms), strict=True)
        return torch.cat(
            [_Product.apply(x, getattr(self, f"weight{i}"), self, is_first_microbatch) for x, i in parts]  # type: ignore[no-untyped-call]
        )


class RMSNorm(torch.nn.RMSNorm):
    """module/rmsnorm.py, whose keywords go to ops/basic/rmsnorm.py."""

    def __init__(
        self, normalized_shape: Iterable[int] | int | None = None, eps: float = 1e-5,
        sequence_parallel: bool | None = None, params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False, hidden_size: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        assert not zero_centered_gamma and set(kwargs) <= {"device"}
        super().__init__(hidden_size if normalized_shape is None else normalized_shape, eps=eps, dtype=params_dtype)  # type: ignore[arg-type]
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return super().forward(inp.contiguous())  # a copy of what is not, so that backward does not need `inp` itself


class DotProductAttention(torch.nn.Module):
    """attention/dot_product_attention/dot_product_attention.py."""

    def __init__(
        self, num_attention_heads: int, kv_channels: int | tuple[int, int], num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False, tp_size: int = 1, get_rng_state_tracker: Callable | None = None,
        tp_group: Any = None, layer_number: int | None = None, attention_type: str = "self", cp_group: Any = None,
        cp_global_ranks: list[int] | None = None, cp_stream: Any = None, cp_comm_type: str = "p2p",
        softmax_scale: float | None = None, softmax_type: str = "vanilla", return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert cp_group is None and not attention_dropout and not return_max_logit
        width = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.scale, self.window_size = softmax_scale or width**-0.5, window_size
        self.softmax_offset: torch.Tensor | None = None
        heads = num_attention_heads // tp_size
        if softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(heads)
        if softmax_type == "learnable":
            self.register_parameter("softmax_offset", torch.nn.Parameter(torch.zeros(heads)))

    def forward(
        self, query_layer: torch.Tensor, key_layer: torch.Tensor, value_layer: torch.Tensor,
        attention_mask: Any = None, qkv_format: str | None = None, cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None, cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None, max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None, attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False, core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True, inference_params: Any = None, pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False, num_splits: int | None = 1,
    ) -> torch.Tensor:  # fmt: skip
        """thd: query [T, H, D], key [T, K, D], value [T, K, V] -> [T, H V]. verl's own path has no other format."""
        from megatron_cpu import _attend_rows

        assert qkv_format == "thd" and attn_mask_type == "padding_causal", (qkv_format, attn_mask_type)
        ends = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        assert ends is not None
        rows = query_layer, key_layer, value_layer, ends[1:].tolist(), self.scale
        return _attend_rows(*rows, self.window_size, self.softmax_offset).flatten(1)
