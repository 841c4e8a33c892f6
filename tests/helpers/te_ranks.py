"""Ranks whose megatron-core builds TransformerEngine's layer spec, of the stand-ins of `te_cpu`. They are processes of
their own, since megatron-core looks for TransformerEngine once, when it is imported."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A model of `megatron_engines.MODELS`, fields of PrefixConfig, how the engine is built, and what it runs: "steps" as
# `megatron_engines.measure`, and "turns" likewise, of agents; "update", the first that the model runs, as under
# rollout.bypass_mode; "overwritten", an update in which TE's linear layers take phase A for the first forward of their
# lives.
Case = tuple[str, dict[str, Any], dict[str, Any], str]
ROWS: dict[str, dict[str, Any]] = {"steps": {}, "turns": {"turns": "kept"}}


def run(world: int, models: dict[str, str], cases: dict[str, Case], folder: Path) -> dict[str, dict[str, Any]]:
    """What our engine finds in each case: as `megatron_engines.measure`, or gradients alone."""
    mp.spawn(_rank, (world, models, cases, folder), nprocs=world)
    found: dict[str, dict[str, Any]] = torch.load(folder / "found", weights_only=False)
    return found


def _rank(rank: int, world: int, models: dict[str, str], cases: dict[str, Case], folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), VERL_PLATFORM="cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    import te_cpu  # noqa: F401  before anything that imports megatron.core

    _build_te_specs()
    found = {name: _measure(models, *case) for name, case in cases.items()}
    if rank == 0:
        torch.save(found, folder / "found")
    dist.destroy_process_group()


def _build_te_specs() -> None:
    """Has mbridge ask for the spec that it asks for on a GPU, lm_head's own kernel of gradients be there, and verl free
    what checkpoints have read, which it does where there is CUDA (transformer_impl.py:234).

    A matrix that every rank of TP has whole is marked as such: TE marks all matrices as parts (module/linear.py,
    reset_parameters), and mbridge 0.15.1 would put copies behind one another."""
    import megatron_cpu
    from megatron.core.extensions.transformer_engine import TELinear
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel import layers
    from verl.models.mcore.patch import apply_patch_megatron_recomputation_backward

    def accumulate(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(grad.t() @ x)

    build = TELinear.__init__

    def marked(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if kwargs["parallel_mode"] == "duplicated":
            self.weight.tensor_model_parallel = False

    TELinear.__init__ = marked
    apply_patch_megatron_recomputation_backward()
    megatron_cpu.llm_bridge.get_gpt_decoder_block_spec = get_gpt_decoder_block_spec
    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)


def _measure(
    models: dict[str, str], name: str, prefix: dict[str, Any], layout: dict[str, Any], runs: str
) -> dict[str, Any]:
    from engines import _loss
    from megatron.core.extensions import transformer_engine as extensions
    from megatron_engines import batch_of, engine, gradients, measure

    from verl_prefix.backends.megatron import PrefixMegatronEngine

    built = engine(PrefixMegatronEngine, models[name], model=name, prefix={"verify": "off"} | prefix, **layout)
    kinds = {type(part) for part in built.module[0].modules()}
    assert {extensions.TEDotProductAttention, extensions.TERowParallelLinear} <= kinds
    if runs in ROWS:
        return measure(built, ROWS[runs])
    with built.train_mode(disable_auto_offload=True), _overwriting(runs == "overwritten"):
        built.optimizer_zero_grad()
        built.forward_backward_batch(batch_of(built, (0,), {}), _loss({}))
        return {"grads": gradients(built)}


@contextlib.contextmanager
def _overwriting(is_on: bool) -> Iterator[None]:
    from verl_prefix.models.mcore import MegatronModel

    grouped = MegatronModel.grouped_attention

    @contextlib.contextmanager
    def as_new(self: Any) -> Iterator[None]:
        with grouped(self):
            for module in self._model.modules():
                if hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = True
            yield

    with mock.patch.object(MegatronModel, "grouped_attention", as_new) if is_on else contextlib.nullcontext():
        yield
