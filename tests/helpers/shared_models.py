"""Engines of equivalence tests that share what takes longest to build: models, optimizers, process groups, configs."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

# Options of the prefix engine alone, and of rows, passes and losses: a model is the same under all of them.
OURS = (
    "schedule", "exchange", "wave_tokens", "logits_chunk", "offload", "attention", "min_speedup", "verify",
    "verify_action", "trace_dir", "trees", "mini_batches", "keep_attention", "skip_zero_advantage",
)  # fmt: skip
NOT_OF_MODELS = (
    *OURS, "batch", "budget", "calculate_entropy", "calculate_sum_pi_squared", "config", "dead", "distillation",
    "empty", "entropy_coeff", "groups", "loss", "loss_agg_mode", "masked", "micro_batch_size_per_gpu", "on_policy",
    "padded", "policy_loss", "rank", "replay", "return_model_output", "routes", "scattered", "temperature",
    "tool_tokens", "uid", "use_dynamic_bsz",
    "use_kl_loss",
)  # fmt: skip


class SharedModels:
    """An `_engine` whose engines have one model, its config and optimizer, as at first, where the same would be built.

    Every engine is new but for these. Adapters, which tests change, and the scaler of fp16 are built for each.
    """

    def __init__(self, make: Callable[..., Any], engine: type | None = None) -> None:
        """engine: verl's class, if it is not its FSDPEngine."""
        self.make, self.engine, self.built, self.weights, self.configs = make, engine, {}, {}, {}

    def __call__(self, backend: str, path: str, options: dict[str, Any], *args: Any) -> Any:
        from verl.workers import config
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        if "lora_targets" in options or options.get("param_dtype") == "fp16":
            return self.make(backend, path, options, *args)
        key = repr((backend, path, args, sorted((k, v) for k, v in options.items() if k not in NOT_OF_MODELS)))
        of_verl = self.engine or FSDPEngine
        build, init_mesh = of_verl._build_model_optimizer, FSDPEngine._init_device_mesh
        make_config = config.HFModelConfig

        def model(engine: Any) -> None:
            if self._once(key, engine, build):
                self.weights[key] = [weight.clone() for weight in _weights(engine)]
                return
            for weight, first in zip(_weights(engine), self.weights[key], strict=True):
                weight.copy_(first)
            engine.optimizer_zero_grad()
            for optimizer in getattr(engine.optimizer, "optimizers_dict", {"": engine.optimizer}).values():
                optimizer.state.clear()

        def mesh(engine: Any) -> None:
            sizes = engine.engine_config.fsdp_size, engine.engine_config.ulysses_sequence_parallel_size
            self._once(sizes, engine, init_mesh)

        def model_config(**fields: Any) -> Any:
            if (found := self.configs.get(key)) is None:
                found = self.configs[key] = make_config(**fields)
            return found

        with (
            mock.patch.object(of_verl, "_build_model_optimizer", model),
            mock.patch.object(FSDPEngine, "_init_device_mesh", mesh),
            mock.patch.object(config, "HFModelConfig", model_config),
        ):
            return self.make(backend, path, options, *args)

    def _once(self, key: Any, engine: Any, build: Callable[[Any], None]) -> bool:
        """Builds, or gives the engine what was built before; whether it built."""
        if found := self.built.get(key):
            vars(engine).update(found)
            return False
        before = dict(vars(engine))
        build(engine)
        self.built[key] = {k: v for k, v in vars(engine).items() if k not in before or before[k] is not v}
        return True


def _weights(engine: Any) -> list[torch.Tensor]:
    """What this rank holds of them."""
    return [p.to_local() if hasattr(p, "to_local") else p for p in map(torch.Tensor.detach, engine.module.parameters())]
