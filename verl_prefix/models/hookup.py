"""Hooks a Hugging Face model up: grouped attention in its layers, lm_head and most of the last layer on few tokens.

Our attention is registered with transformers' AttentionInterface. It is selected in `HookedModel.grouped_attention`
alone, which a run holds open around its passes, so that verl's own path keeps the implementation that the user chose.
"""

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from verl_prefix.core.calls import AttentionParams
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.forward import HeadFn
from verl_prefix.core.runs import on_device
from verl_prefix.models import vision
from verl_prefix.models.advice import WHOLE_ROWS, advising
from verl_prefix.models.experts import CountedRouters
from verl_prefix.models.head import ChunkedHead
from verl_prefix.models.last_layer import on_head_tokens
from verl_prefix.models.logits import check_contexts, readers, scales_logits, written_elsewhere
from verl_prefix.models.recurrent import is_recurrent, shared_states
from verl_prefix.models.replaced import replaced
from verl_prefix.models.replay import replayed_routers
from verl_prefix.models.support import layer_window
from verl_prefix.models.veomni import is_veomni, unsliced
from verl_prefix.models.verls_vision import own_attention
from verl_prefix.versions import warn_once

ATTENTION_NAME = "verl_prefix"

logger = logging.getLogger(__name__)


def grouped_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    prefix_context: ForwardContext | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Our attention behind transformers' interface: query [1, H, T, D], key [1, K, T, D], value [1, K, T, V], V <= D,
    s_aux (sinks) [H] -> [1, T, H, V].

    Values with V < D (multi-head latent attention) are padded with zeros, as transformers does for flash attention:
    kernels, caches and the self-check know one head dim.

    Raises:
        RuntimeError: the model asks for something that `unsupported_reasons` did not foresee.
    """
    wanted = layer_window(module.config.get_text_config(), module.layer_idx)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # as transformers reads it
    if (
        prefix_context is None or attention_mask is not None or dropout or sliding_window != wanted
        or query.shape[0] != 1 or not causal
    ):  # fmt: skip
        raise RuntimeError(
            f"{type(module).__name__} layer {module.layer_idx} called the shared-prefix attention with "
            f"prefix_context={prefix_context is not None}, attention_mask={attention_mask is not None}, "
            f"dropout={dropout}, sliding_window={sliding_window} (its config says {wanted}), "
            f"batch {query.shape[0]}, is_causal={causal}; {WHOLE_ROWS}, and report this model"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if torch.is_autocast_enabled(q.device.type):  # as SDPA does: norms may have left fp32 queries beside bf16 values
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    width = v.shape[-1]
    v = torch.nn.functional.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
    params = AttentionParams(q.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    out = prefix_context.attend(module.layer_idx, q, k, v, sinks=s_aux, params=params)
    return out[..., :width].unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(grouped_attention_forward))


class HookedModel:
    """A `core.forward.Model` for a Hugging Face causal LM, or a model of token classes (a critic), or its FSDP2 root.

    Attributes:
        model: every forward enters through it, so that its hooks run.
        replays: its routers do what `ForwardContext.routes` says.
        text_config: of its text model. expert_loads: of its updates. is_early_stage: of `core.forward.Model`.
    """

    is_early_stage = False

    def __init__(self, model: PreTrainedModel, replays: bool = False) -> None:
        self.model, self.replays = model, replays
        self.text_config: PretrainedConfig = model.config.get_text_config()
        self.expert_loads = CountedRouters(model)

    @contextmanager
    def grouped_attention(self) -> Iterator[None]:
        """Context of forwards by our attention, and of their backwards, in which gradient checkpointing calls layers
        again. The last layer leaves out what nobody reads (`models.last_layer`)."""
        config = self.text_config
        chosen = config._attn_implementation
        config._attn_implementation = ATTENTION_NAME
        try:
            with (
                own_attention(self.model), shared_states(self.model), on_head_tokens(self.model), unsliced(),
                _prefetched_in_backward(self.model), replayed_routers(self.model) if self.replays else nullcontext(),
            ):  # fmt: skip
                yield
        finally:
            config._attn_implementation = chosen

    @advising()
    def token_outputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        forward_context: ForwardContext,
        of_head: HeadFn | None,
        logits_chunk: int,
        pixels: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Runs one packed row, inside `grouped_attention`, and returns what `of_head` makes of its logits: [n, k].

        lm_head runs inside the model's forward, where FSDP2 has gathered its weight, on at most `logits_chunk` tokens
        at a time. All chunks but the last are checkpointed, so that at most logits_chunk x vocabulary logits exist at
        once. But all exist where somebody else sees them behind lm_head (`models.logits`).

        Args:
            input_ids: [T] int64. position_ids: [T] or [4, T] int64.
            forward_context: with `head_tokens` [n].
            of_head: (which of `head_tokens`, [m] int64; their logits [m, vocabulary]) -> [m, k]; None: sums come back,
                [n, 1]. They are of hidden states, so that lm_head's weight gets no gradient. Of a critic, and where
                others see all logits, they are of logits.
            pixels: of a vision model, `PixelBatch.of` this row.

        Raises:
            RuntimeError: a layer did not go through our attention, or the model returned other logits than those
                that it was asked for.
        """
        calls, head_tokens = forward_context.num_calls, forward_context.head_tokens
        assert head_tokens is not None
        lm_head = self.model.get_output_embeddings()
        whole = lm_head is None or self._needs_all_logits(lm_head, of_head)
        inputs = self.inputs(input_ids, position_ids, forward_context)
        with self.expert_loads.counting(forward_context, head_tokens.device), ExitStack() as stack:
            if not whole:
                head = ChunkedHead(lm_head.forward, of_head, logits_chunk)
                stack.enter_context(replaced(lm_head, "forward", head))
            logits = self.logits(inputs, head_tokens, dict(tower=forward_context.packed_row.phase != "wave", **pixels))
        self.check_calls(forward_context.num_calls - calls)
        if logits.shape[1] != len(head_tokens):
            raise RuntimeError(
                f"logits_to_keep asked {type(self.model).__name__} for logits of {len(head_tokens)} tokens, and it "
                f"returned those of {logits.shape[1]}; {WHOLE_ROWS}, and report this model"
            )
        if not whole and of_head is not None:
            self.check_handed_on(head.result, logits)
        if not whole:
            return logits[0]
        which = torch.arange(len(head_tokens), device=head_tokens.device)
        return logits[0].sum(-1, keepdim=True) if of_head is None else of_head(which, logits[0])

    def logits(self, inputs: dict[str, Any], keep: torch.Tensor, seen: dict[str, Any]) -> torch.Tensor:
        """Logits [1, n, vocabulary] of tokens `keep`, or what lm_head returns where it was replaced.

        Args:
            inputs: arguments of any model's forward. seen: those that `vision.forward` also takes.
            keep: [n] int64, transformers' `logits_to_keep`.

        Raises:
            RuntimeError: a vision model has a forward or hooks of others, which `vision.forward` would leave out.
        """
        logits: torch.Tensor
        if self.model.get_output_embeddings() is None:  # a head of one class costs next to nothing on all tokens
            logits = self.model(**inputs).logits[:, keep]
            return logits
        if (seeing := vision.vision_model(self.model)) is None:
            logits = self.model(**inputs, logits_to_keep=keep).logits
            return logits
        if elsewhere := written_elsewhere(seeing.forward):
            raise RuntimeError(
                f"{type(seeing).__name__} has a forward of {elsewhere}. A shared prefix replaces a vision model's "
                f"forward, and would leave it out; use a forward hook instead, or {WHOLE_ROWS}"
            )
        check_contexts(seeing, keep.device)
        with replaced(seeing, "forward", functools.partial(vision.forward, seeing)):
            logits = self.model(**inputs, keep=keep, **seen).logits
        return logits

    def check_handed_on(self, made: torch.Tensor | None, logits: torch.Tensor) -> None:
        """Raises RuntimeError unless the model returned what lm_head made, or the same values: some models scale them
        by 1, and wrappers may cast them, but to no fewer bits."""
        if logits is made:
            return
        if made is not None and logits.dtype.itemsize < made.dtype.itemsize:
            raise RuntimeError(
                f"{type(self.model).__name__} returns log-probs cast from {made.dtype} to {logits.dtype}, which loses "
                "their last bits; if it is of FSDP2, give fully_shard a MixedPrecisionPolicy with output_dtype=None"
            )
        if (
            made is None
            or logits.shape != made.shape
            or not torch.allclose(logits, made.to(logits.dtype), rtol=0, atol=0, equal_nan=True)
        ):
            raise RuntimeError(
                f"{type(self.model).__name__} changed what lm_head returned, and no hook, forward or config key shows "
                f"that; {WHOLE_ROWS}, and report this model"
            )

    def _needs_all_logits(self, lm_head: torch.nn.Module, of_head: HeadFn | None) -> bool:
        """Whether somebody behind lm_head has to see all logits: the model itself, which scales them, or hooks and
        forwards of others, which one warning names."""
        others = readers(self.model, lm_head)
        if others:
            text = "prefix: all logits of a pass exist at once, since %s may change them"
            warn_once(logger, text, ", ".join(others))
        return bool(others) or (of_head is not None and scales_logits(self.text_config))

    def inputs(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_context: ForwardContext
    ) -> dict[str, Any]:
        """Arguments of the forward of any model, on one packed row."""
        options: dict[str, Any] = dict(attention_mask=None, use_cache=False, prefix_context=forward_context)
        if is_veomni(self.model) and is_recurrent(self.text_config.model_type):  # which asks where rows begin
            options["cu_seq_lens_q"] = on_device(torch.tensor([0, len(input_ids)], dtype=torch.int32), input_ids.device)
        return dict(input_ids=input_ids[None], position_ids=position_ids.unsqueeze(-2), **options)

    def check_calls(self, num_calls: int) -> None:
        """Raises RuntimeError where a forward did not call our attention, or a scan, once in every layer."""
        num_layers = self.text_config.num_hidden_layers
        if num_calls != num_layers:
            raise RuntimeError(
                f"{num_calls} of {num_layers} layers of {type(self.model).__name__} shared their prefixes; "
                f"its code bypasses transformers' attention interface: {WHOLE_ROWS}"
            )


@contextmanager
def _prefetched_in_backward(model: PreTrainedModel) -> Iterator[None]:
    """Context in which FSDP2 gathers each layer while the layer above it runs backward. By itself it goes by the order
    of the forwards, and forgets that after every backward: phase C, behind backwards of waves, would wait for every
    layer. Lists of layers that a user set stay."""
    layers = [layer for layer in getattr(model.get_decoder(), "layers", ()) if isinstance(layer, FSDPModule)]
    above = [*layers[1:], model] if isinstance(model, FSDPModule) else layers[1:]
    with ExitStack() as undo:
        for layer, module in zip(layers, above, strict=False):
            if not module._get_fsdp_state()._states_to_backward_prefetch:
                module.set_modules_to_backward_prefetch([layer])
                undo.callback(module.set_modules_to_backward_prefetch, [])
        yield
