"""Router replay: tokens go to the experts that they are recorded to have gone to before.

A router of transformers scores all experts, and takes the best by `torch.topk`, the one call that is replaced: by the
recorded experts, with the scores that the router has for them now. All else is the router's own code. So weights are
normalised and scaled as the model does it, and the gate gets their gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from verl_prefix.models.advice import WITHOUT_SHARING
from verl_prefix.models.experts import router_kinds
from verl_prefix.models.replaced import ContextForward, context_forwards
from verl_prefix.models.support import num_experts

# Models whose routers choose by one `torch.topk` over all experts.
MODEL_TYPES = ("qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3")
# Those of them that VeOmni, which replays on verl's own path, has wired (veomni/utils/moe_router_replay.py).
VEOMNI_TYPES = ("qwen3_moe",)


class Routed(Protocol):
    """What runs through a model: one of our passes, or a micro-batch on verl's own path.

    Attributes:
        routes: as of `core.context.ForwardContext`.
    """

    routes: torch.Tensor | None


def why_not_replayed(config: PretrainedConfig, types: Sequence[str] = MODEL_TYPES) -> str:
    """Why routers of a model are not replayed, where those of `types` are; "": they are."""
    text = config.get_text_config()
    if config.model_type not in types:
        return f"{config.model_type} has other routers than {', '.join(types)}"
    if text.num_experts_per_tok == 1:
        return "num_experts_per_tok=1, where a token without a record cannot be told from one of expert 0"
    if types == VEOMNI_TYPES and (text.mlp_only_layers or text.decoder_sparse_step != 1):
        return "its layers without experts (mlp_only_layers, decoder_sparse_step) shift what VeOmni records of others"
    return ""


def chosen_experts(routes: torch.Tensor, layer: int, own: torch.Tensor) -> torch.Tensor:
    """The experts of tokens in a layer, [n, k]: recorded ones, and the router's `own` where these are not all
    different. They are written to `routes` [n, layers, k], so that backward, which may run the layer again, and who
    records have the same.

    Raises:
        RuntimeError: the layer runs on other tokens than the pass has.
    """
    recorded = routes[:, layer].to(own.dtype)
    if recorded.shape != own.shape:
        raise RuntimeError(f"layer {layer} routes {list(own.shape)}, of a pass with routes {list(recorded.shape)}")
    ordered = recorded.sort(-1)[0]
    unrecorded = (ordered[:, 1:] == ordered[:, :-1]).any(-1, keepdim=True)
    chosen = torch.where(unrecorded, own, recorded)
    routes[:, layer] = chosen.to(routes.dtype)
    return chosen


class _Chosen(TorchFunctionMode):
    """Context in which the best of `num_experts` scores are those of the recorded experts.

    Attributes:
        num_calls: how often they were asked for.
    """

    def __init__(self, routes: torch.Tensor, layer: int, num_experts: int) -> None:
        super().__init__()
        self.routes, self.layer, self.num_experts, self.num_calls = routes, layer, num_experts, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[1:] != (self.num_experts,):
            return found  # as of groups of experts
        self.num_calls += 1
        chosen = chosen_experts(self.routes, self.layer, found.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


class _Replayed(ContextForward):
    """Replaces what in a layer chooses experts.

    Args:
        micro_batch: what runs where it is no pass.
    """

    def __init__(self, forward: Callable[..., Any], layer: int, num_experts: int, micro_batch: Routed | None) -> None:
        self.forward, self.layer, self.num_experts, self.micro_batch = forward, layer, num_experts, micro_batch

    @torch.compiler.disable
    def __call__(self, *args: Any) -> Any:
        running: Routed | None = self.forward_context or self.micro_batch
        self.end_run()
        if running is None:
            raise RuntimeError(f"the router of layer {self.layer} ran without a prefix_context; set {WITHOUT_SHARING}")
        if running.routes is None:
            return self.forward(*args)
        with _Chosen(running.routes, self.layer, self.num_experts) as choice:
            found = self.forward(*args)
        if choice.num_calls != 1:
            raise RuntimeError(
                f"the router of layer {self.layer} chose experts {choice.num_calls} times; set router_replay.mode="
                "disabled and report this model"
            )
        return found


@contextmanager
def replayed_routers(model: PreTrainedModel, micro_batch: Routed | None = None) -> Iterator[None]:
    """Context in which tokens go where `micro_batch` says, or the pass that they run in. Inside another it does
    nothing.

    Raises:
        RuntimeError: the model has no router that is known.
    """
    kinds, experts = router_kinds(model), num_experts(model.config.get_text_config())
    with ExitStack() as undo:
        num_routers = 0
        for number, layer in enumerate(model.get_decoder().layers):
            for module in layer.modules():
                by_block = hasattr(module, "route_tokens_to_experts")  # GLM-4.5, DeepSeek-V3
                if not by_block and not isinstance(module, kinds):
                    continue
                num_routers += 1
                name = "route_tokens_to_experts" if by_block else "forward"
                own = getattr(module, name)
                if not isinstance(own, _Replayed):
                    call = _Replayed(own, number, experts, micro_batch)
                    undo.enter_context(context_forwards({module: call}, {layer, *layer.children()}, name))
        if not num_routers:
            raise RuntimeError(f"{type(model).__name__} has no routers that are known; set router_replay.mode=disabled")
        yield
