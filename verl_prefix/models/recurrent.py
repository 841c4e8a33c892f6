"""Recurrent mixers of transformers: while our attention is selected, their states follow the tree of a pass.

A mixer (gated delta net, Mamba-2, short convolution) projects, calls a convolution and a scan, and projects back. These
two calls are replaced by ones that follow the pass's segments (`core.recurrence`); the rest is the model's own code,
patched by verl or not. transformers has a registry of attention functions, but none of mixers. So while a mixer runs,
the kernels that it calls are replaced: its own attributes or, since transformers 5.15, functions of its Python module.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from verl_prefix.core.calls import Spans
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.groups import rows_by_key
from verl_prefix.core.recurrence import Scan, Scanned, shared_conv, shared_scan
from verl_prefix.models.advice import WHOLE_ROWS
from verl_prefix.models.replaced import ContextForward, context_forwards, replaced
from verl_prefix.models.state_space import chunk_scan

# Text models whose mixers `mixer_of` knows.
MODEL_TYPES = (
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "lfm2", "lfm2_moe", "bamba", "granitemoehybrid",
)  # fmt: skip

# Models to whose mixers verl says where packed rows begin (verl/models/transformers/monkey_patch.py).
_TOLD_BOUNDS = ("qwen3_5", "qwen3_5_moe")

# A time step of Mamba-2 before its softplus, which makes it 0: the state stays as it is.
_NO_STEP = -1e4


def is_recurrent(model_type: str) -> bool:
    """Whether a text model of this type has recurrent layers, whose prefixes are shared."""
    return model_type in MODEL_TYPES


class Mixer(ContextForward):
    """A mixer's forward while our attention is selected. A subclass says what is replaced in it.

    Args:
        module: the mixer, a child of a decoder layer.

    Attributes:
        module: as above.
        forward: the mixer's own.
        cache: what the mixer's own forward gets as its cache.
    """

    cache: Any = None

    def __init__(self, module: Any) -> None:
        self.module = module
        # Before transformers 5.15 Mamba-2 and LFM2 have a forward for kernels, and one without any.
        self.forward = getattr(module, "cuda_kernels_forward", module.forward)

    def replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yields (object, name of its attribute, replacement)."""
        raise NotImplementedError

    @torch.compiler.disable
    def __call__(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Replaces the module's forward."""
        with ExitStack() as undo:
            undo.callback(self.end_run)
            for owner, name, call in self.replacements():
                undo.enter_context(replaced(owner, name, call))
            out: torch.Tensor = self.forward(hidden_states, self.cache)
        return out

    def kernel(self, *names: str) -> tuple[Any, str, Any]:
        """Finds a kernel: (object, name of its attribute, value) of the first name that the mixer or the Python module
        of one of its classes has.

        Raises:
            RuntimeError: there is none.
        """
        kind = type(self.module)
        for owner in (self.module, *(sys.modules[part.__module__] for part in kind.__mro__)):
            for name in names:
                if hasattr(owner, name):
                    return owner, name, getattr(owner, name)
        raise RuntimeError(f"{kind.__name__} has no {' or '.join(names)}, which would be replaced; {WHOLE_ROWS}")

    def _context(self) -> ForwardContext:
        if self.forward_context is None:
            name = type(self.module).__name__
            raise RuntimeError(f"{name} layer {self.module.layer_idx} ran without a prefix_context; {WHOLE_ROWS}")
        return self.forward_context

    def conv_replacement(self) -> tuple[Any, str, Callable[..., Any]]:
        """What replaces causal_conv1d_fn."""
        owner, name, conv = self.kernel("causal_conv1d_fn")
        return owner, name, functools.partial(self._conv_call, conv)

    def _conv_call(
        self, kernel: Callable[..., torch.Tensor] | None, x: torch.Tensor, weight: torch.Tensor,
        bias: torch.Tensor | None = None, activation: str | None = None, **kwargs: object,
    ) -> Any:  # fmt: skip
        """x [1, C, T] -> [1, C, T]. VeOmni's mixers call flash-linear-attention's, and tell it where rows begin: x
        [1, T, C] -> ([1, T, C], no state)."""
        if "cu_seqlens" not in kwargs:
            return self._conv(x[0].T, weight, bias, activation, kernel=kernel).T.unsqueeze(0)
        run = kernel and (lambda row, *args, **options: kernel(row.mT, *args, **options)[0].mT)
        return self._conv(x[0], weight, bias, activation, kernel=run).unsqueeze(0), None

    def _conv(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None,
        part: str = "conv", kernel: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """x [T, C], weight [C, width] -> [T, C], by causal_conv1d's `kernel` or torch."""
        shards = self._context().shards
        if shards is not None:
            (x,), weight = shards.to_heads(x), shards.heads(weight)
            bias = None if bias is None else shards.heads(bias)

        def conv(row: torch.Tensor) -> torch.Tensor:
            row = row.T.unsqueeze(0)
            if kernel is not None:
                return kernel(row, weight, bias, activation=activation)[0].T
            padded = F.pad(row, (weight.shape[-1] - 1, 0))
            out = F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))
            return (F.silu(out) if activation in ("silu", "swish") else out)[0].T

        out = shared_conv(self._context(), (part, self.module.layer_idx), x=x, width=weight.shape[-1], conv=conv)
        return out if shards is None else shards.to_tokens(out)

    def _scan(self, inputs: Sequence[torch.Tensor], scan: Scan, neutral: Sequence[float]) -> torch.Tensor:
        forward_context = self._context()
        forward_context.num_calls += 1
        shards = forward_context.shards
        if shards is not None:
            inputs = shards.to_heads(*inputs)
        out = shared_scan(forward_context, ("scan", self.module.layer_idx), inputs=inputs, scan=scan, neutral=neutral)
        return out if shards is None else shards.to_tokens(out)


class GatedDeltaNet(Mixer):
    """The mixer of Qwen3-Next, Qwen3.5 (also as verl patches it) and OLMo-Hybrid. It scans by flash-linear-attention,
    or by the mixer's own torch rule, which takes padded rows."""

    def rule(self) -> tuple[Any, str, Any]:
        """The scan, as `kernel` finds it."""
        return self.kernel("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule")

    def replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        owner, name, rule = self.rule()
        yield owner, name, functools.partial(self._rule, rule)
        convs = [name for name in ("q_conv1d", "k_conv1d", "v_conv1d") if hasattr(self.module, name)]
        for name in convs:  # OLMo-Hybrid's, before transformers 5.15
            yield getattr(self.module, name), "forward", functools.partial(self._olmo_conv, name)
        if not convs:
            yield self.conv_replacement()

    def _olmo_conv(self, name: str, x: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        conv = getattr(self.module, name)  # transformers' own, or flash-linear-attention's, which has no `act_fn`
        return self._conv(x[0], conv.weight.squeeze(1), conv.bias, "silu", part=name).unsqueeze(0), None

    def _rule(
        self, rule: Callable[..., tuple[torch.Tensor, torch.Tensor]], query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **kwargs: object,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)

        def padded(inputs: Sequence[torch.Tensor], initial: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v, g, beta = inputs
            return rule(q, k, v, g=g, beta=beta, initial_state=initial, **options)

        def varlen(inputs: Sequence[torch.Tensor], segments: Spans, initial: torch.Tensor | None) -> Scanned:
            q, k, v, g, beta = (x.unsqueeze(0) for x in inputs)
            cu_seqlens, _ = segments.cu_seqlens(q.device)
            outputs, states = rule(q, k, v, g=g, beta=beta, initial_state=initial, cu_seqlens=cu_seqlens, **options)
            return Scanned(outputs[0], states)

        neutral = [0.0] * 5  # where k, v, beta and g are 0 the state stays
        segmented = "cu_seqlens" in inspect.signature(_chosen(rule)).parameters
        scan = varlen if segmented else functools.partial(_scan_padded, padded, neutral)
        return self._scan([x[0] for x in (query, key, value, g, beta)], scan, neutral).unsqueeze(0), None


class ShortConv(Mixer):
    """The mixer of LFM2: a convolution between two gates. It has no other state."""

    def replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        owner, name, _ = self.kernel("causal_conv1d_fn")
        yield owner, name, self._whole

    def _whole(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._context().num_calls += 1
        return self._conv_call(None, *args, **kwargs)


class Mamba2(Mixer):
    """The mixer of Bamba and Granite 4 H. It scans by mamba_ssm on CUDA where that is installed, else by torch. With a
    cache it calls its kernels one by one, not the fused one."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.cache = _EmptyCache()

    def replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        yield self.conv_replacement()
        owner, name, scan = self.kernel("mamba_chunk_scan_combined", "mamba2_chunk_scan")
        yield owner, name, functools.partial(self._chunk_scan, scan)

    def _chunk_scan(
        self, kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None, x: torch.Tensor, dt: torch.Tensor,
        A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunk_size: int, D: torch.Tensor, dt_bias: torch.Tensor,
        dt_limit: tuple[float, float] = (0.0, float("inf")), **kwargs: object,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        if kernel is None or not x.is_cuda:
            run = chunk_scan
        else:
            run = functools.partial(kernel, dt_softplus=True, return_final_states=True)
        if (shards := self._context().shards) is not None:
            A, D, dt_bias = map(shards.heads, (A, D, dt_bias))

        def padded(inputs: Sequence[torch.Tensor], initial: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            x, B, C, dt = inputs
            return run(
                x, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias,
                initial_states=initial, dt_limit=dt_limit,
            )  # fmt: skip

        neutral = (0.0, 0.0, 0.0, _NO_STEP)
        scan = functools.partial(_scan_padded, padded, neutral)
        return self._scan([y[0] for y in (x, B, C, dt)], scan, neutral).unsqueeze(0), None


# (inputs [n, longest, ...] of n padded segments, states [n, ...] from which they start; None: zeros) -> outputs and
# final states of these shapes
_PaddedScan = Callable[[Sequence[torch.Tensor], torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def _scan_padded(
    scan: _PaddedScan, fills: Sequence[float], inputs: Sequence[torch.Tensor], segments: Spans,
    initial: torch.Tensor | None,
) -> Scanned:  # fmt: skip
    """A `Scan` by a kernel that takes segments of one length, padded at the end by `fills`, one value per input.

    Segments of up to 64 tokens, about a kernel's chunk, run together; then those of up to 128, and so on. In one call
    a single long response would pad every short one to its length."""
    lens = segments.lens
    of_segments = [x.split(lens) for x in inputs]
    outputs, states = list(of_segments[0]), [inputs[0]] * len(lens)
    starts = None if initial is None else initial.unbind()
    for members in rows_by_key(max(length - 1, 63).bit_length() for length in lens).values():
        longest = max(lens[i] for i in members)
        padded = [
            torch.stack([F.pad(x[i], (0, 0) * (x[i].ndim - 1) + (0, longest - lens[i]), value=fill) for i in members])
            for x, fill in zip(of_segments, fills, strict=True)
        ]
        scanned = scan(padded, None if starts is None else torch.stack([starts[i] for i in members]))
        for i, out, state in zip(members, *scanned, strict=True):
            outputs[i], states[i] = out[: lens[i]], state
    return Scanned(torch.cat(outputs), torch.stack(states))


def _chosen(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a kernel runs. Since transformers 5.15 a kernel may be a closure that has chosen between a
    package's function and its own."""
    return inspect.getclosurevars(rule).nonlocals.get("implementation", rule) if inspect.isfunction(rule) else rule


class _EmptyCache:
    """A cache that keeps nothing, with the methods that a Mamba-2 mixer calls in a forward of a whole row."""

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_conv_state = get_recurrent_state = has_previous_state

    def update_conv_state(self, state: torch.Tensor, layer_idx: int, **kwargs: object) -> torch.Tensor:
        return state

    update_recurrent_state = update_conv_state


def mixer_of(module: torch.nn.Module) -> Mixer | None:
    """A recurrent mixer, or None for any other module."""
    if not hasattr(module, "layer_idx"):
        return None
    own = {name for name, _ in (*module.named_parameters(recurse=False), *module.named_children())}
    if "A_log" in own:
        return Mamba2(module) if "D" in own else GatedDeltaNet(module)
    return ShortConv(module) if {"in_proj", "conv", "out_proj"} <= own else None


def mixers(model: torch.nn.Module) -> list[Any]:
    """The recurrent mixers of a model, in the order of its layers."""
    return [module for module in model.modules() if mixer_of(module) is not None]


def packing_leak(model: Any) -> str | None:
    """Why verl's own path would carry the state of a row into the next one, where it packs rows one behind the other
    (use_remove_padding); or None."""
    return _untold(model, "cu_seqlens", "where packed rows begin")


def sharding_leak(model: Any) -> str | None:
    """Why verl's own path would start every rank's tokens from a state of zero under sequence parallelism; or None."""
    return _untold(model, "cp_context", "which tokens other ranks have")


def _untold(model: Any, argument: str, told: str) -> str | None:
    """Why the model's mixers do not learn what verl would say by `argument`; None: they do. verl 0.9.1 tells the mixers
    of Qwen3.5 alone, and these hand it to their rule. transformers' own torch rule drops it among its **kwargs."""
    found = [mixer for mixer in map(mixer_of, model.modules()) if mixer is not None]
    if not found:
        return None
    name = type(found[0].module).__name__
    if model.config.model_type not in _TOLD_BOUNDS:
        return f"verl does not tell {name} layers {told}"
    rules = (mixer.rule()[-1] for mixer in found if isinstance(mixer, GatedDeltaNet))
    if all(argument in inspect.signature(_chosen(rule)).parameters for rule in rules):
        return None
    return f"the rule of {name} layers ignores {told}; flash-linear-attention's would not, which is not here or too old"


@contextmanager
def shared_states(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the model's mixers follow the pass that their decoder layer, or they, get as `prefix_context`.

    Inside another such context, such as for log-probs between two waves, it does nothing."""
    with ExitStack() as undo:
        for layer in model.modules():
            for mixer in filter(None, map(mixer_of, layer.children())):
                if not isinstance(mixer.module.forward, Mixer):
                    undo.enter_context(context_forwards({mixer.module: mixer}, (layer, mixer.module)))
        yield
