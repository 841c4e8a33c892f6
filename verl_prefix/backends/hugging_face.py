"""What the backends of FSDP2 and VeOmni have in common: both train Hugging Face models."""

import functools
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import torch_functional
from verl.utils.device import get_device_id, get_device_name
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group

from verl_prefix.auto.shape import ModelShape, model_shape
from verl_prefix.backends.verl_engines import VerlHFEngine
from verl_prefix.config.model import check_dealt, check_sequence_parallel
from verl_prefix.core.forward import PackedForward
from verl_prefix.core.meter import Meter
from verl_prefix.core.runner import PlanRunner, Step
from verl_prefix.engine.backend import Backend, Ranks, Replay
from verl_prefix.engine.checks.gradients import Gradients
from verl_prefix.engine.checks.noise import disturbed_outputs
from verl_prefix.engine.outputs import policy_outputs
from verl_prefix.models import vision
from verl_prefix.models.gradients import gradients_aside
from verl_prefix.models.hookup import HookedModel
from verl_prefix.models.recurrent import mixers
from verl_prefix.models.replaced import replaced
from verl_prefix.models.support import check_adapters, check_dropout, check_supported


class HFBackend(Backend):
    """A Hugging Face model on a `VerlHFEngine`."""

    counts_last_tokens = False
    after_not_finite = "verl skips an update whose gradient norm is not finite"

    def __init__(self, engine: VerlHFEngine) -> None:
        self._engine = engine
        self.trains: bool = not engine.engine_config.forward_only
        self.deterministic: bool = engine.engine_config.full_determinism
        size = engine.ulysses_sequence_parallel_size
        self.ranks = Ranks(
            engine.get_data_parallel_group(), engine.get_data_parallel_rank(), engine.get_data_parallel_size(),
            model_size=size, sequence_size=size, sequence_group=engine.ulysses_parallel_group,
            is_writer=engine.is_mp_src_rank_with_outputs(),
        )  # fmt: skip

    @abstractmethod
    def _gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a backward in which gradients are reduced as on the stock path.

        Args:
            last: the backward is the last of the update.
        """

    def check_model(self) -> None:
        check_adapters(self._engine.module)
        check_dropout(self._engine.module)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of autocast. With fp32 there is no autocast."""

    @property
    def config(self) -> Any:
        return self._engine.module.config

    @functools.cached_property
    def replay(self) -> Replay | None:
        mode = self._engine.engine_config.router_replay.mode
        if mode == "disabled":
            return None
        text = self.config.get_text_config()
        return Replay(mode, text.num_hidden_layers, text.num_experts_per_tok)

    @functools.cached_property
    def shape(self) -> ModelShape:
        return model_shape(self._engine.module, self.dtype)

    def gradient_bytes(self) -> float:
        if not self.trains:
            return 0.0
        shards = (local_shard(p) for p in self._engine.module.parameters() if p.requires_grad)
        return float(sum(shard.nbytes for shard in shards if shard.device.type != "cpu"))

    def _hooked_model(self) -> HookedModel:
        return HookedModel(self._engine.module, replays=self.replay is not None)

    def _runner(
        self, forward: PackedForward, step: Step, forward_only: bool, offload: bool, meter: Meter
    ) -> PlanRunner:
        if forward_only:
            return PlanRunner(forward, step, meter=meter)
        return PlanRunner(forward, step, self._backward, self._gradient_sync, offload, meter)

    def model_metrics(self, runner: PlanRunner) -> dict[str, float]:
        assert isinstance(runner.forward.model, HookedModel)
        return runner.forward.model.expert_loads.metrics(self.ranks.sum_over_ranks)

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self.dtype)

    def output_names(self, flags: Mapping[str, bool]) -> list[str]:
        return policy_outputs(flags)

    def token_outputs(
        self, logits: torch.Tensor, tokens: TensorDict, temperature: torch.Tensor, unscaled: bool,
        processor: Callable[..., Any] | None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Calls verl's `prepare_model_outputs`, as for one row."""
        labels = tokens["input_ids"].values()
        output_args = {
            "temperature_is_one": unscaled, "temperature_rmpad": temperature, "input_ids_rmpad_rolled": labels,
            "pad_size": 0,
        }  # fmt: skip
        # Under sequence parallelism verl's engine would gather outputs here, and its processor would cut the teacher's
        # rows. Here all tensors have this rank's tokens alone: the runner gathers the outputs of a pass once.
        with replaced(self._engine, "use_ulysses_sp", False), without_ulysses():
            model_output = SimpleNamespace(logits=logits.unsqueeze(0))
            outputs = self._engine.prepare_model_outputs(model_output, output_args, tokens, processor)
        return {name: x.values() for name, x in outputs.items()}

    def reads_logits_once(self, flags: Mapping[str, bool]) -> bool:
        """With flash-attn's cross entropy log-probs need no copy: it writes the gradient over the logits. Entropy needs
        several copies in fp32. So do log-probs without flash-attn."""
        is_installed = torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
        is_disabled = os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") == "1"
        return is_installed and not is_disabled and not any(flags.values())

    def logits_like(self) -> torch.Tensor:
        vocab_size = self.config.get_text_config().vocab_size
        return torch.zeros((1, vocab_size), dtype=self.dtype, device=get_device_id())

    def gradients(self) -> Gradients:
        """Mixers are compared whole. Layers and the vision tower are compared in part."""
        model: Any = self._engine.module
        layers = {f"layer {i}": layer for i, layer in enumerate(getattr(model.get_decoder(), "layers", ()))}
        tower = {"the vision tower": vision.tower_of(model)} if vision.is_vision_config(model.config) else {}
        whole = {f"the mixer of layer {mixer.layer_idx}": mixer for mixer in mixers(model)}
        return Gradients(model, whole, layers | tower, _local_grad)

    def rounding_noise(self, seed: int) -> AbstractContextManager[None]:
        model = self._engine.module
        attention = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]
        return disturbed_outputs(attention, mixers(model), self.dtype, seed)

    def gradients_aside(self) -> AbstractContextManager[None]:
        return gradients_aside(self._engine.module)


@contextmanager
def without_ulysses() -> Iterator[None]:
    """Context in which verl's functions know of no sequence parallelism."""
    group = get_ulysses_sequence_parallel_group()
    set_ulysses_sequence_parallel_group(None)
    try:
        yield
    finally:
        set_ulysses_sequence_parallel_group(group)


def local_shard(x: Any) -> torch.Tensor:
    """Returns this rank's shard of a tensor that FSDP2 has sharded. Any other tensor comes back as it is."""
    return x.to_local() if hasattr(x, "to_local") else x


def _local_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns this rank's shard of the parameter's gradient; zeros where there is no gradient."""
    return local_shard(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).detach()


# What the engines for FSDP2 and VeOmni call while they and their models are built.


def check_in_worker(model_config: Any, key: str, size: int, model: str = "actor_rollout_ref.model") -> None:
    """Checks the model's layers, and how many ranks share a row. The driver makes the same checks, but only where it
    sees the model. Workers always see it.

    Args:
        key: the config key that sets how many ranks share a row.
        size: how many ranks share a row.
        model: the config key of the model's section.

    Raises:
        ValueError: naming what stands in the way.
    """
    check_supported(model_config.hf_config, model)
    check_sequence_parallel(key, size, torch.distributed.get_world_size(), model_config, model)
    check_dealt(key, size, model_config.hf_config)


def freeze_vision_tower(model: Any, engine_config: Any) -> None:
    """Freezes the model's vision tower if `actor.freeze_vision_tower` says so, a key that verl's own engines ignore.
    Our engines call this function after verl has built the model, and before verl shards it.

    Raises:
        ValueError: the model has no tower.
    """
    if engine_config.freeze_vision_tower:
        vision.tower_of(model).requires_grad_(False)
