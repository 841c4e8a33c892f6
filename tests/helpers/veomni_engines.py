"""verl's VeOmni engine and ours over it, on a CPU: how both are built, and whole tensors of what they shard."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engines import _configs
from shared_models import OURS, SharedModels
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText
from veomni.arguments import MixedPrecisionConfig
from veomni.distributed import parallel_state
from veomni.ops.dispatch import OpSlot
from verl.workers.config import EngineRouterReplayConfig, VeOmniEngineConfig, VeOmniOptimizerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.veomni import transformer_impl as verls
from whole_tensors import whole

from verl_prefix.config.options import PrefixConfig
from verl_prefix.config.veomni import PrefixVeOmniEngineConfig
from verl_prefix.testing import tiny_models, write_tiny_model

# Of tiny models' towers: VeOmni's run on zeros of these sizes where a row has no image, whatever the config says.
_PATCHES = {
    "qwen2_5_vl": dict(patch_size=14, window_size=56),
    "qwen3_5": dict(patch_size=16),
    "qwen3_5_moe": dict(patch_size=16),
}
# Keys of verl's VeOmni engine, as they are named there, which cases may set.
KEYS = (
    "attn_implementation", "moe_implementation", "expert_parallel_size", "ulysses_parallel_size", "fsdp_size",
    "param_offload", "enable_reentrant", "forward_prefetch", "causal_conv1d_implementation",
    "chunk_gated_delta_rule_implementation", "cross_entropy_loss_implementation", "basic_modules", "mixed_precision",
    "enable_fsdp_offload",
)  # fmt: skip


def write_veomni_model(path: Path, family: str, as_on_the_hub: bool = False) -> str:
    """`write_tiny_model`, with the names in its file that VeOmni looks for: it renames no weights of the Qwen2.5-VL on
    the hub, and takes experts from Qwen3.5's as the hub has them, where transformers writes them one by one."""
    with mock.patch.dict(tiny_models._TOWERS.get(family, {}), _PATCHES.get(family, {})):
        # Qwen3-VL's experts are transposed or not, which VeOmni tells by sizes that differ.
        sizes = {"moe_intermediate_size": 48} if family == "qwen3_vl_moe" else {}
        written = write_tiny_model(path, family=family, **sizes)
    if family in tiny_models._TOWERS and not as_on_the_hub:
        model = AutoModelForImageTextToText.from_pretrained(written, dtype=torch.float32)
        model.save_pretrained(path, save_original_format=False)
    return written


def _engine(backend: str, model_path: str, options: dict, forward_only: bool = False) -> Any:
    """`engines._engine` of "veomni" or "prefix_veomni": options of rows, passes and losses as there, and `KEYS`."""
    import veomni_cpu  # noqa: F401  by ranks alone: models of other tests are VeOmni's own

    configs = _configs("fsdp2", model_path, options, forward_only)
    keys: dict[str, Any] = dict(attn_implementation="sdpa", moe_implementation="eager", mixed_precision=True)
    keys |= {k: options[k] for k in KEYS if k in options}
    if "replay" in options:
        keys["router_replay"] = EngineRouterReplayConfig(mode=options["replay"])
    if "ulysses" in options:  # as the FSDP2 engine's cases name it
        keys |= {"ulysses_parallel_size": options["ulysses"], "attn_implementation": "flash_attention_2"}
    shared: dict[str, Any] = dict(
        forward_only=forward_only, use_torch_compile=False,
        init_device="meta" if torch.distributed.get_world_size() > 1 else "cuda",
        optimizer_offload=options.get("param_offload", False),
    )  # fmt: skip
    if backend == "veomni":
        configs["engine_config"] = VeOmniEngineConfig(**shared, **keys)
    else:
        # Rows stay, so that what a rank computes is known, but where a case says so.
        prefix = {"min_speedup": 0, "exchange": "off"} | {key: options[key] for key in OURS if key in options}
        more = dict(freeze_vision_tower=options.get("frozen_tower", False), prefix=PrefixConfig(**prefix))
        configs["engine_config"] = PrefixVeOmniEngineConfig(**shared, **keys, **more)
    configs["optimizer_config"] = VeOmniOptimizerConfig(
        lr=1e-5, weight_decay=0.01, clip_grad=1.0, total_training_steps=10
    )
    # An engine takes the process's first topology, whatever its config says.
    parallel_state._PARALLEL_STATE = None
    parallel_state._PARALLEL_STATE_REGISTRY.clear()
    torch.manual_seed(0)
    engine = EngineRegistry.new(model_type="language_model", backend=backend, **configs)
    precision = verls.MixedPrecisionConfig
    if options.get("half"):  # as VeOmni's are without stand-ins
        precision, engine._autocast_dtype = MixedPrecisionConfig, torch.bfloat16

    def trained(self: verls.VeOmniEngine, module: torch.nn.Module) -> None:  # verl's VeOmni has no key for it
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(bool(re.search(options.get("trained", ""), name)))

    with (
        mock.patch.object(verls, "MixedPrecisionConfig", precision),
        mock.patch.object(verls.VeOmniEngine, "_maybe_apply_async_activation_offload", trained),
    ):
        engine.initialize()
    _bind(repr((model_path, *(keys.get(name) for name in KEYS))))
    return engine


_BOUND: dict[str, list[tuple[OpSlot, dict[str, Any]]]] = {}


def _bind(key: str) -> None:
    """VeOmni binds the kernels of a module of models for the whole process, when it builds one of its models. A model
    that was built before (`SharedModels`) gets its own again."""
    slots = [x for name, module in sys.modules.items() if name.startswith("veomni.") for x in vars(module).values()]
    bound = _BOUND.setdefault(key, [(slot, dict(vars(slot))) for slot in slots if isinstance(slot, OpSlot)])
    for slot, kernel in bound:
        vars(slot).update(kernel)


def whole_of_veomni(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`whole_tensors.whole` of VeOmni's, whose experts lie on the ranks of expert parallelism."""
    state = parallel_state.get_parallel_state()
    if not state.ep_enabled:
        return whole(tensors)
    found = {name: _gathered(x, state.ep_group) for name, x in tensors.items() if ".experts." in name}
    found |= whole({name: x for name, x in tensors.items() if name not in found})
    return {name: found[name] for name in tensors}


def _gathered(x: Any, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Experts [experts of this rank, in, out], of which FSDP2 shards `in`: all of them, whole. gloo's collectives of
    DTensor know the first dimension alone."""
    local = x.to_local() if isinstance(x, DTensor) else x
    if isinstance(x, DTensor):
        (dim,) = (at.dim for at in x.placements if at.is_shard())
        local = _all(local.detach(), x.device_mesh.get_group(x.device_mesh.ndim - 1), dim)
    return _all(local.detach(), group, 0)


def _all(x: torch.Tensor, group: torch.distributed.ProcessGroup, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


SHARED = SharedModels(_engine, verls.VeOmniEngine)


@contextmanager
def veomni_engines() -> Iterator[None]:
    """Context in which `engines._measure` is of "veomni" and "prefix_veomni"."""
    with mock.patch("engines._engine", SHARED), mock.patch("engines.whole", whole_of_veomni):
        yield
