"""The model of a simulated run: Hugging Face's own, the layer that a pass is in, and what becomes of its logits."""

import copy
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_utils import local_torch_dtype

from verl_prefix.auto.shape import ModelShape, model_shape
from verl_prefix.models.hookup import HookedModel
from verl_prefix.models.vision import is_vision_config
from verl_prefix.tools.simulate import scans
from verl_prefix.tools.simulate.job import Job
from verl_prefix.tools.simulate.tracker import Tracker


def build_model(job: Job) -> Any:
    """The job's model on the default device, in `job.master`."""
    seeing = is_vision_config(job.config)
    auto_class = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    with scans.without_package(auto_class._model_mapping[type(job.config)]):
        return auto_class.from_config(copy.deepcopy(job.config), dtype=job.master)


def whole_shape(job: Job) -> ModelShape:
    """Costs of the job's model, without its weights."""
    with torch.device("meta"):
        return model_shape(build_model(job), job.dtype)


def with_adapters(model: Any, options: dict[str, Any], dtype: torch.dtype, device: str) -> Any:
    """The model with LoRA's adapters, made where they stay: a fake tensor that others refer to cannot be moved."""
    import peft

    stays = mock.patch.object(torch.nn.Module, "to", lambda module, *_, **__: module)
    with torch.device(device), local_torch_dtype(dtype), stays:
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def tell_sites(model: Any, tracker: Tracker) -> None:
    """Has `tracker.site` name the layer that a pass is in (first, middle or last), and the direction."""
    layers = model.get_decoder().layers
    for i, module in enumerate(layers):
        name = {0: "first", len(layers) - 1: "last"}.get(i, "middle")

        def enter(*_: Any, layer: str = name) -> None:
            backward = torch._C._current_graph_task_id() != -1
            tracker.site = f"{'backward' if backward else 'forward'}, {layer}"

        def leave(_: Any, args: Any, out: Any, layer: str = name, enter: Any = enter) -> None:
            hidden = out[0] if isinstance(out, tuple) else out
            if hidden.requires_grad:  # its gradient comes where the layer's backward begins
                hidden.register_hook(lambda _: enter())
            if layer == "last" and tracker.site == "forward, last":
                tracker.site = "lm_head"

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


class FakeHookedModel(HookedModel):
    def check_handed_on(self, made: torch.Tensor | None, logits: torch.Tensor) -> None:
        """Does nothing: fake tensors have no values to compare."""


class _CrossEntropy(torch.autograd.Function):
    """flash_attn.ops.triton.cross_entropy: reads logits once, and writes their gradient over them where it may."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, inplace: bool) -> torch.Tensor:
        loss, lse = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
        logits.amax(-1)
        ctx.save_for_backward(logits, lse, labels)
        ctx.inplace = inplace
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, _, _ = ctx.saved_tensors
        scale = dloss.unsqueeze(-1).to(logits.dtype)
        return logits.mul_(scale) if ctx.inplace else logits * scale, None, None


def outputs_of(logits: torch.Tensor, labels: torch.Tensor, entropy: bool, temperature: float) -> torch.Tensor:
    """`prepare_model_outputs` of verl's engine: log-prob, and entropy where it is wanted: [n, 1 or 2] fp32."""
    from verl.utils.torch_functional import entropy_from_logits

    if temperature != 1.0:
        logits = logits / temperature
    columns = [entropy_from_logits(logits).float()] if entropy else []
    return torch.stack([-_CrossEntropy.apply(logits, labels, not entropy), *columns], dim=-1)
