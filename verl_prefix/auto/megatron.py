"""How Megatron's ranks divide a model: parameters, gradients, moments, and what passes keep.

Source: megatron/core/parallel_state.py, distributed/distributed_data_parallel.py, distributed/param_and_grad_buffer.py,
optimizer/distrib_optimizer.py (megatron-core 0.16.1); verl/utils/megatron_utils.py. Example: on 8 ranks with tensor=2
and experts=4, a rank has half of every matrix, a quarter of the experts, and the moments of a quarter of the former
(4 ranks have the same half) and of all of the latter where nobody else has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from verl_prefix.auto.shape import ModelShape


class State(NamedTuple):
    """What one rank has, as numbers or as bytes.

    Attributes:
        parameters, gradients: of the rank's part of the model.
        optimizer: of what its optimizer keeps.
    """

    parameters: float
    gradients: float
    optimizer: float


@dataclass(frozen=True)
class Division:
    """What divides what.

    Attributes:
        world: all ranks.
        tensor: how many share every matrix, the heads and the vocabulary.
        sequence: these also share the tokens between attention and MLP (sequence parallelism).
        experts: how many share a layer's experts. expert_tensor: how many share each expert's matrices.
        distributed: ranks of the same parameters share the moments and fp32 weights of them.
        stages: how many share the layers. The first one has the embeddings, the last one lm_head.
    """

    world: int
    tensor: int = 1
    sequence: bool = False
    experts: int = 1
    expert_tensor: int = 1
    distributed: bool = True
    stages: int = 1

    @classmethod
    def of(cls, megatron: Mapping[str, Any], world: int) -> "Division":
        """By the keys of verl's `megatron` config; as there, expert_tensor_parallel_size=null is that of all else, and
        one rank has no sequence parallelism."""
        tensor = int(megatron.get("tensor_model_parallel_size", 1))
        own = megatron.get("expert_tensor_parallel_size")
        return cls(
            world, tensor, tensor > 1 and bool(megatron.get("sequence_parallel", True)),
            int(megatron.get("expert_model_parallel_size", 1)), tensor if own is None else int(own),
            bool(megatron.get("use_distributed_optimizer", True)), int(megatron.get("pipeline_model_parallel_size", 1)),
        )  # fmt: skip

    @property
    def data(self) -> int:
        """Ranks that have the same part of the matrices."""
        return self.world // self.stages // self.tensor

    @property
    def expert_data(self) -> int:
        """Ranks that have the same part of the experts. Without expert parallelism mcore reduces experts' gradients
        among the same ranks as all others: tensor_parallel/layers.py sets `allreduce` to False for experts alone, and
        only under expert parallelism."""
        spread = self.stages * self.experts * self.expert_tensor
        return max(1, self.world // spread) if self.experts > 1 else self.data

    @property
    def tokens(self) -> int:
        """Ranks that share the tokens between attention and MLP."""
        return self.tensor if self.sequence else 1

    def numbers(self, shape: ModelShape) -> State:
        """How many parameters a rank has of the whole model `shape`, and of how many it keeps gradients and moments, on
        the stage that has most: an equal part of the layers, and one of the two ends."""
        matrix = shape.head / 2  # of the embeddings, and of lm_head, which may be the same
        ends = round((shape.parameters - shape.layers * shape.layer_parameters) / matrix) if self.stages > 1 else 0
        layers = shape.parameters - ends * matrix
        dense = (layers - shape.expert_parameters - shape.undivided) / self.tensor + shape.undivided
        dense = dense / self.stages + (ends > 0) * matrix / self.tensor
        experts = shape.expert_parameters / (self.experts * self.expert_tensor) / self.stages
        kept = dense / self.data + experts / self.expert_data if self.distributed else dense + experts
        return State(dense + experts, dense + experts, kept)

    def state(self, shape: ModelShape, weight: float = 2, gradient: float = 4, moments: float = 12) -> State:
        """Bytes of a rank's parameters, gradients and optimizer, as verl keeps them: weights in bf16, gradients of all
        its parameters in one buffer in fp32 (`grad_reduce_in_fp32`), which no rank shares; fp32 weights and AdamW's two
        moments in fp32.

        Args:
            weight, gradient, moments: bytes of each number.
        """
        numbers = self.numbers(shape)
        return State(weight * numbers.parameters, gradient * numbers.gradients, moments * numbers.optimizer)

    def part_of(self, shape: ModelShape) -> ModelShape:
        """What one rank computes and keeps of a token of the whole model `shape`. If ranks are more than heads of keys
        and values, several ranks have the same head. Of experts' inputs and outputs (`routed`) a rank has as many as
        its own tokens need, times `expert_tensor`, since the ranks that share an expert's matrices gather theirs."""
        shared = shape.activations - shape.residual
        return replace(
            shape,
            linear=shape.linear / self.tensor,
            head=shape.head / self.tensor,
            pair=shape.pair / self.tensor,
            last=shape.last / self.tensor,
            activations=shared / self.tensor + shape.residual / self.tokens,
            residual=shape.residual / self.tokens,
            boundary=shape.boundary / self.tokens,
            attention=shape.attention / self.tensor,
            kv=shape.kv / min(self.tensor, shape.kv_heads),
            kv_heads=max(1, shape.kv_heads // self.tensor),
            logits=shape.logits / self.tensor,
            routed=shape.routed / self.tensor * self.expert_tensor,
        )
