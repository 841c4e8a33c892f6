"""Hooks a GPTModel of megatron-core up: grouped attention, rotary angles by position, lm_head on few tokens, and
routers whose statistics count a prefix as often as the batch has it.

Layers find the pass that runs in this object. It is told so twice: where the pass's forward begins, and where its
backward reaches the model's output, by a hook. So what mcore computes again in backward (recompute_granularity
selective and full are both reentrant) finds its own pass, though forwards of other passes have run since. Nothing of
mcore is replaced outside of `grouped_attention`.

Under context parallelism a pass is `core.sequence_parallel`'s: this rank's tokens are those of its slices.

Source: megatron-core 0.16.1, megatron/core/models/gpt/gpt_model.py (GPTModel.forward), transformer/attention.py,
transformer/multi_latent_attention.py, transformer/moe/router.py, tensor_parallel/layers.py (ColumnParallelLinear).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention

from verl_prefix.core.calls import AttentionParams
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.forward import HeadFn
from verl_prefix.core.runs import len_of, on_device
from verl_prefix.models.advice import WITHOUT_SHARING, advising
from verl_prefix.models.experts import ExpertLoads, multiplicity
from verl_prefix.models.head import ChunkedHead
from verl_prefix.models.replaced import replaced


@dataclass(frozen=True)
class _Running:
    """The pass that runs.

    Attributes:
        positions: [t] int64, of the pass's tokens on this rank; under sequence parallelism with padding, so that its
            ranks divide t. There each of these ranks has t / ranks tokens of what follows.
        num_tokens: of the pass, without that padding.
        longest: tokens of the longest row that it computes a part of.
        weights: [t / ranks] float32, how often the batch has each of this rank's tokens; 0 for padding.
        routes: [t / ranks, layers, k] int16, the experts of these tokens; -1: its router chooses. None: all routers do.
    """

    forward_context: ForwardContext
    positions: torch.Tensor
    num_tokens: int
    longest: int
    weights: torch.Tensor
    routes: torch.Tensor | None


class MegatronModel:
    """A `core.forward.Model` for a GPTModel of megatron-core: this rank's part of it, on its pipeline stage.

    Args:
        module: the model as verl's engine holds it, within mcore's wrappers. Every forward enters through it.

    Attributes:
        is_early_stage: of `core.forward.Model`. expert_loads: of its updates.
        auxiliary_weight: of each pass's auxiliary losses, beside `scale_auxiliary_losses`. layers: of this stage.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self._model = module, unwrapped(module)
        self._config, self._with_experts = self._model.config, layers_with_experts(self._model.config)
        self.is_early_stage = not self._model.post_process
        self.layers: list[Any] = list(self._model.decoder.layers)
        self.expert_loads = ExpertLoads()
        self.auxiliary_weight = 1.0
        self._running: _Running | None = None

    @contextmanager
    def grouped_attention(self) -> Iterator[None]:
        """Context of forwards by our attention, and of their backwards, in which recomputation calls layers again."""
        for module in self._model.modules():
            # TransformerEngine's linear layers add to gradients themselves (gradient_accumulation_fusion). The backward
            # of their very first forward overwrites: if that was a phase A, what waves have added would be lost.
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = False
        with ExitStack() as stack:
            stack.callback(setattr, self, "_running", None)
            rotary = [getattr(module, "rotary_pos_emb", None) for module in self._attentions_and_model()]
            for module in filter(None, rotary):
                angles = functools.partial(self._angles, module.forward)
                stack.enter_context(replaced(module, "forward", angles))
            for layer in self.layers:
                core = layer.self_attention.core_attention
                attend = functools.partial(self._attend, layer.layer_number, layer.self_attention)
                stack.enter_context(replaced(core, "forward", attend))
                if (router := getattr(layer.mlp, "router", None)) is not None:
                    number = layer.layer_number - 1
                    route = functools.partial(self._route, number, router, router.routing)
                    stack.enter_context(replaced(router, "routing", route))
                    replay = SimpleNamespace(get_replay_topk=functools.partial(self._choose, number))
                    stack.enter_context(replaced(router, "router_replay", replay))
                    for name in ("_apply_aux_loss", "_apply_seq_aux_loss"):
                        weigh = functools.partial(self._weigh, getattr(router, name))
                        stack.enter_context(replaced(router, name, weigh))
            yield

    def _attentions_and_model(self) -> list[Any]:
        return [self._model, *(layer.self_attention for layer in self.layers)]

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
        """As `core.forward.Model` says. Logits are those of this rank's part of the vocabulary. An earlier stage
        returns hidden states [t, 1, H] for the next one, which has got them by `set_input_tensor`; under sequence
        parallelism [t / ranks, 1, H].

        Raises:
            RuntimeError: a layer did not go through our attention.
        """
        running = self._begin(forward_context, position_ids)
        calls, more = forward_context.num_calls, len(running.positions) - len(input_ids)
        ids = torch.nn.functional.pad(input_ids, (0, more))
        with ExitStack() as stack:
            if not self.is_early_stage:
                layer = self._model.output_layer
                assert forward_context.head_tokens is not None
                head = functools.partial(self._head, layer.forward, forward_context.head_tokens, of_head, logits_chunk)
                stack.enter_context(replaced(layer, "forward", head))
            result: torch.Tensor = self._module(ids[None], running.positions[None], None)
        if running.routes is not None and self._config.sequence_parallel and not torch.is_grad_enabled():
            every = gather_from_sequence_parallel_region(running.routes.view(torch.uint8))  # NCCL has no int16
            forward_context.routes = every.view(torch.int16)[: len(input_ids)]
        result = result if self.is_early_stage else result[0]  # GPTModel makes [1, sequence, k] of [sequence, 1, k]
        if (found := forward_context.num_calls - calls) != len(self.layers):
            raise RuntimeError(
                f"{found} of {len(self.layers)} layers of this Megatron model shared their prefixes; set "
                f"{WITHOUT_SHARING} and report this model"
            )
        if result.requires_grad:
            result.register_hook(functools.partial(self._begin_backward, running))
        return result

    def _begin(self, forward_context: ForwardContext, position_ids: torch.Tensor) -> _Running:
        packed_row, shards, ranks = forward_context.packed_row, forward_context.shards, 1
        if self._config.sequence_parallel:
            ranks = self._config.tensor_model_parallel_size
        more = -len(position_ids) % ranks
        weights = torch.nn.functional.pad(multiplicity(packed_row, shards), (0, more)).float()
        routes = forward_context.routes
        if ranks > 1:
            rank = parallel_state.get_tensor_model_parallel_rank()
            weights = weights.chunk(ranks)[rank]
            if routes is not None:
                routes = torch.nn.functional.pad(routes, (0, 0, 0, 0, 0, more), value=-1).chunk(ranks)[rank]
        self._running = _Running(
            forward_context,
            torch.nn.functional.pad(position_ids, (0, more)),
            len(position_ids),
            max(len_of(segment.path) + segment.length for segment in packed_row.segments),
            on_device(weights, position_ids.device),
            routes,
        )
        return self._running

    def _begin_backward(self, running: _Running, grad: torch.Tensor) -> None:
        self._running = running

    def _angles(self, forward: Callable[..., Any], length: int, *args: Any, **kwargs: Any) -> Any:
        """Replaces the forward of a rotary embedding, of the model or of a layer of multi-head latent attention: angles
        [t, 1, 1, D] of this rank's tokens by their positions, not by their places in the packed row. Told that rows are
        packed, mcore makes those of all positions under context parallelism, too."""
        assert self._running is not None
        found = forward(self._running.longest, *args, **kwargs | {"packed_seq": True})
        positions = self._running.positions
        return (found[0][positions], *found[1:]) if isinstance(found, tuple) else found[positions]

    def _attend(
        self, layer_number: int, attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        *args: object, **kwargs: object,
    ) -> torch.Tensor:  # fmt: skip
        """Replaces the forward of a layer's core attention: query [t, 1, H, D], key [t, 1, K, D], value [t, 1, K, V],
        V <= D, of this rank's tokens and its heads of tensor parallelism -> [t, 1, H V]."""
        assert self._running is not None
        one, core = self._running.forward_context, attention.core_attention
        # Padding of sequence parallelism stands behind them.
        q, k, v = (x[: self._running.num_tokens, 0] for x in (query, key, value))
        if one.own_cache is not None and getattr(attention, "recompute_up_proj", False):
            k, v = k.clone(), v.clone()  # mcore empties their memory until backward, and waves read them before
        width = v.shape[-1]
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
        sinks = getattr(core, "softmax_offset", None)
        out = one.attend(
            layer_number - 1, q, k, v, sinks=None if sinks is None else sinks.flatten(),
            params=AttentionParams(scale_of(attention, q.shape[-1]), window_of(self._config, layer_number)),
        )  # fmt: skip
        out = torch.nn.functional.pad(out[..., :width], (0, 0, 0, 0, 0, len(query) - len(q)))
        return out.flatten(1).unsqueeze(1)

    def _head(
        self, forward: Callable[..., Any], head_tokens: torch.Tensor, of_head: HeadFn | None, chunk: int,
        hidden: torch.Tensor, weight: torch.Tensor | None = None, **kwargs: object,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Replaces the forward of the output layer: hidden states of t tokens, or this rank's of them -> what `of_head`
        makes of the logits of `head_tokens` [n, 1, k]."""
        layer = self._model.output_layer
        sequence = layer.sequence_parallel
        if sequence:  # backward gives each rank its tokens' part; the layer itself adds the parts of the vocabulary up
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            with (
                replaced(layer, "sequence_parallel", False),
                replaced(layer, "allreduce_dgrad", layer.allreduce_dgrad or sequence),
            ):
                found: torch.Tensor = forward(hidden.unsqueeze(1), weight=weight)[0]
            return found.squeeze(1)

        chosen = hidden.squeeze(1).index_select(0, head_tokens)
        return ChunkedHead(logits, of_head, chunk)(chosen.unsqueeze(0)).transpose(0, 1), None

    def _route(
        self, layer: int, router: Any, routing: Callable[..., tuple[torch.Tensor, torch.Tensor]], logits: torch.Tensor,
        *args: Any, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Replaces TopKRouter.routing, of mcore or as verl patches it for router replay, by the same that counts tokens
        by expert, where gradients flow, as often as the batch has them."""
        with replaced(router, "enable_expert_bias", False):  # else it counts them itself
            probs, routing_map = routing(logits, *args, **kwargs)
        if torch.is_grad_enabled():
            assert self._running is not None
            self.expert_loads.add(layer, (routing_map * self._running.weights.unsqueeze(1)).sum(0))
        return probs, routing_map

    def _choose(
        self, layer: int, scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Replaces RouterReplay.get_replay_topk, of mcore or verl: scores [t, experts] -> those of a token's experts,
        and the experts, [t, k] each. These are the pass's `routes`; where they are -1, the router's own choice, which
        is written there, so that a layer that runs again in backward takes it again. They have all layers, as a
        rollout's, or those with experts alone, as verl records them."""
        assert self._running is not None and default_compute_topk is not None
        own, routes = default_compute_topk(scores, topk, num_groups, group_topk), self._running.routes
        if routes is None:
            return own
        whole = routes.shape[1] == self._config.num_layers
        chosen = routes[:, layer if whole else self._with_experts.index(layer)]
        experts = torch.where(chosen < 0, own[1], chosen)
        chosen.copy_(experts)
        return scores.gather(1, experts), experts

    def _weigh(
        self, apply: Callable[..., torch.Tensor], probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor,
        *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Replaces a router's auxiliary loss by the same with every token as often as the batch has it; a dummy has
        none. Told that tokens are masked, mcore divides by the number of those that count."""
        assert self._running is not None
        if not self._running.forward_context.packed_row.groups:
            return probs
        weights = self._running.weights.unsqueeze(1)
        return apply(
            probs,
            scores * (weights * self.auxiliary_weight),
            routing_map * weights,
            *args,
            **kwargs | {"with_padding_mask": True},
        )


def unwrapped(module: Any) -> Any:
    """The GPTModel within mcore's wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def layers_with_experts(config: Any) -> list[int]:
    """Numbers of the whole model's layers that have experts, from 0, if it has any experts: this reads
    `moe_layer_freq` alone, by default of all layers."""
    every = config.moe_layer_freq
    return [i for i in range(config.num_layers) if (i % every == 0 if isinstance(every, int) else every[i])]


def router_counts(module: torch.nn.Module) -> list[torch.Tensor]:
    """Tokens by expert [experts] that each router with a bias has counted since gradients were last reduced."""
    routers: list[Any] = [m for m in module.modules() if getattr(m, "enable_expert_bias", False)]
    return [router.local_tokens_per_expert for router in routers]


def is_last_stage() -> bool:
    """Whether this rank has the last layers, and so logits."""
    return bool(parallel_state.is_pipeline_last_stage())


def scale_auxiliary_losses(module: torch.nn.Module, num_passes: int, device: torch.device) -> None:
    """Sets the factor of auxiliary losses' gradients, as mcore does by the number of micro-batches and of ranks that
    have parts of the tokens (pipeline_parallel/schedules.py, forward_step_calc_loss)."""
    config, ones = unwrapped(module).config, torch.ones(1, device=device)
    scaled = ones if config.grad_scale_func is None else config.grad_scale_func(ones)
    MoEAuxLossAutoScaler.set_loss_scale(scaled * config.context_parallel_size / max(num_passes, 1))


def counts_tokens(module: torch.nn.Module) -> bool:
    """Whether routers learn from counts of tokens, by biases or auxiliary losses. The same on every stage."""
    config = unwrapped(module).config
    coefficients = config.moe_aux_loss_coeff
    balanced = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    balanced = balanced and config.moe_router_load_balancing_type not in ("none", ["none"])
    biased = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate != 0
    return config.num_moe_experts is not None and (biased or balanced)


def scale_of(attention: Any, width: int) -> float:
    """The factor of a layer's scores, as mcore gives it to its core attention (transformer/attention.py,
    transformer/multi_latent_attention.py); `width`: of a query's head."""
    scale = getattr(attention, "softmax_scale", None) or attention.config.softmax_scale
    return float(scale or width**-0.5)


def window_of(config: Any, layer_number: int) -> int | None:
    """Tokens that a query of the layer sees, itself included; None: all before it. Layers count from 1."""
    window = config.window_size
    if not is_layer_window_attention(window, config.window_attn_skip_freq, layer_number) or window[0] < 0:
        return None
    return int(window[0]) + 1


def unsupported_reasons(module: torch.nn.Module) -> list[str]:
    """What of a built model cannot be shared, beyond what its options show."""
    model = unwrapped(module)
    config, reasons = model.config, []
    dropouts = {name: getattr(config, name) for name in ("attention_dropout", "hidden_dropout")}
    if set(dropouts.values()) != {0.0} and model.training:
        reasons.append(f"it drops activations at random ({dropouts})")
    others = {type(layer.self_attention).__name__ for layer in model.decoder.layers}
    others -= {SelfAttention.__name__, MLASelfAttention.__name__}
    if others:
        reasons.append(f"its layers attend by {', '.join(sorted(others))}")
    return reasons
