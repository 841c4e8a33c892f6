"""Megatron engines of random batches, which share what takes longest to build: models, optimizers, process groups."""

import copy
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_cpu  # noqa: F401  first: mcore looks CUDA up
import torch
from megatron_engines import engine, gradients
from shared_models import OURS
from verl.utils.megatron.router_replay_patch import RouterReplay

from verl_prefix.config.options import PrefixConfig

# What an engine is built by: arguments of `megatron_engines.engine`, and names in `RECOMPUTE` and `OVERLAP`.
BUILT_BY = (
    "tp", "sp", "ep", "etp", "cp", "distributed_optimizer", "recompute", "overlap", "forward_only", "frozen",
    "use_remove_padding", "lr", "pipeline_model_parallel_size", "replay",
)  # fmt: skip
FULL = {"recompute_granularity": "full"}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "uniform": FULL | {"recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform of all": FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
    "block": FULL | {"recompute_method": "block", "recompute_num_layers": 1},
}
OVERLAP: dict[str, dict[str, Any]] = {
    "none": {},
    "gradients": {"overlap_grad_reduce": True, "bucket_size": 20_000},
    "none, and looks for NaN": {"check_for_nan_in_grad": True},
    "both": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000},
}


class SharedEngines:
    """`shared(backend, path, options)`: an engine of "megatron" or "prefix_megatron" whose model is as it was at first.

    Engines of one backend that are built alike have one model. Its optimizer has a learning rate of 0, so that a step
    tells the norm of the gradients and moves nothing but the biases of experts.
    """

    def __init__(self) -> None:
        self.sizes: tuple | None = None
        self.groups: dict[tuple | None, dict[str, Any]] = {}  # mcore's, by its sizes; None: before there are any
        self.built: dict[str, tuple[Any, list[torch.Tensor]]] = {}

    def __call__(self, backend: str, path: str, options: dict[str, Any]) -> Any:
        fields = {name: options[name] for name in BUILT_BY if name in options}
        stages = fields.get("pipeline_model_parallel_size", 1)
        self._use((fields.get("tp", 1), fields.get("ep", 1), fields.get("etp"), fields.get("cp", 1), stages))
        if (key := repr((backend, path, sorted(fields.items())))) not in self.built:
            made = _build(backend, path, **fields)
            self.built[key] = made, [x.detach().clone() for x in _tensors(made)]
        made, first = self.built[key]
        with torch.no_grad():
            for x, as_first in zip(_tensors(made), first, strict=True):
                x.copy_(as_first)
        if "replay" in options:  # verl knows the routers of the engine that was built last
            found = (getattr(module, "router_replay", None) for module in made.module[0].modules())
            RouterReplay.router_instances[:] = filter(None, found)
        return _under(made, options) if backend == "prefix_megatron" else made

    def _use(self, sizes: tuple) -> None:
        """Makes mcore's groups of these sizes those it has, where verl would keep the first."""
        from megatron.core import parallel_state

        state = vars(parallel_state)
        if sizes != self.sizes:
            self.groups[self.sizes] = {k: x for k, x in state.items() if k.startswith("_") and k.isupper()}
            state.update(self.groups.get(sizes, self.groups[None]))
            self.sizes = sizes


def _tensors(made: Any) -> list[torch.Tensor]:
    """Weights, and what routers have counted."""
    (chunk,) = made.module
    return [x for _, x in (*chunk.named_parameters(), *chunk.named_buffers())]


def _build(
    backend: str, path: str, recompute: str = "none", overlap: str = "none", frozen: str | None = None, lr: float = 0.0,
    **fields: Any,
) -> Any:  # fmt: skip
    """frozen: a pattern of the names, in mcore, of parameters that are not trained."""
    from verl.models.mcore import mbridge
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from verl_prefix.backends.megatron import PrefixMegatronEngine

    name, ours = Path(path).name, backend == "prefix_megatron"
    override = RECOMPUTE[recompute]
    if frozen is not None:  # verl's key for routers: it has none for others
        fields["override_mcore_model_config"] = {"moe_config": {"freeze_moe_router": True}}

    def freeze(model: torch.nn.Module, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not re.search(frozen or "", name))

    with mock.patch.object(mbridge, "freeze_moe_router", freeze):
        return engine(
            PrefixMegatronEngine if ours else MegatronEngineWithLMHead, path, model=name, prefix={} if ours else None,
            override_transformer_config=override, override_ddp_config=OVERLAP[overlap], lr=lr, **fields,
        )  # fmt: skip


def _under(made: Any, options: dict[str, Any]) -> Any:
    """An engine of ours with another's model, under options of its own."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    from verl_prefix.backends.megatron import MegatronBackend

    again = copy.copy(made)
    chosen = {name: options[name] for name in OURS if name in options}
    again.prefix_config = PrefixConfig(**{"min_speedup": 0, "exchange": "off"} | chosen)
    again.set_backend(MegatronBackend(again), made.engine_config, made.model_config)
    with mock.patch.object(MegatronEngine, "initialize", lambda self: None):
        again.initialize()
    return again


# The module, which a function of its name hides.
finalizing = sys.modules["megatron.core.distributed.finalize_model_grads"]
_COUNTS: list[torch.Tensor] = []  # tokens by layer and expert, of all ranks, of the updates since they were read


def _counted(counts: torch.Tensor, *args: Any, updated: Any = finalizing.get_updated_expert_bias) -> Any:
    found = updated(counts, *args)  # which sums over ranks in place
    _COUNTS.append(counts.clone())
    return found


finalizing.get_updated_expert_bias = _counted


def left_by_update(made: Any) -> dict[str, torch.Tensor]:
    """Whole gradients and their norm, loads of experts and the biases that follow them."""
    found = {f"gradient of {name}": x for name, x in gradients(made).items()}
    found["grad norm"] = torch.tensor(float(made.optimizer_step()), dtype=torch.float64)
    biases = [x for name, x in made.module[0].named_buffers() if name.endswith("expert_bias")]
    if biases:
        *_, counts = _COUNTS  # a self-check reduces gradients before
        found |= {"loads of experts": counts, "biases of experts": torch.cat(biases)}
        _COUNTS.clear()
    return found
