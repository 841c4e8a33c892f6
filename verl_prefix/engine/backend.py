"""What `verl_prefix.engine` asks of a backend, the part that only one engine of verl knows; and `VerlEngine`, what a
backend asks of the engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils.device import get_device_id

from verl_prefix.auto.cost import Memory
from verl_prefix.auto.shape import ModelShape
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.forward import LOGITS_CHUNK, LogitsFn, Model, PackedForward
from verl_prefix.core.meter import Meter
from verl_prefix.core.runner import PlanRunner, Step
from verl_prefix.engine.checks.gradients import Gradients
from verl_prefix.engine.loss import LossFunction
from verl_prefix.engine.rows import BatchRows


@dataclass(frozen=True)
class Ranks:
    """Where this rank stands among all.

    Attributes:
        data_group: the data-parallel process group: ranks that have different rows, one of each model-parallel set.
        data_rank: this rank's number in it.
        data_size: how many ranks it has.
        model_size: how many ranks a model-parallel set has, of tensor, sequence, context and pipeline parallelism
            together. They have the same rows. `sum_over_ranks` counts each of them, so that its callers divide.
        sequence_size: how many of these ranks cut one packed row among themselves: of sequence or context parallelism.
        sequence_group: their process group; None where `sequence_size` is 1.
        pipeline_size: how many stages the pipeline has.
        has_outputs: whether this rank sees outputs and losses, as the last stage alone does.
        is_writer: True on one rank of a model-parallel set.
    """

    data_group: dist.ProcessGroup
    data_rank: int
    data_size: int
    model_size: int = 1
    sequence_size: int = 1
    sequence_group: dist.ProcessGroup | None = None
    pipeline_size: int = 1
    has_outputs: bool = True
    is_writer: bool = True

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks, model-parallel ones too, so that all decide alike. Exact for integers
        below 2**53. Every rank calls it."""
        return _reduce(values, dist.ReduceOp.MAX)

    def ranges_over_ranks(self, *values: int) -> list[tuple[int, int]]:
        """Returns the smallest and the largest of all ranks, for each value. Every rank calls it."""
        bounds = self.max_over_ranks([x for value in values for x in (-value, value)])
        return [(-int(negated), int(largest)) for negated, largest in zip(bounds[::2], bounds[1::2], strict=True)]

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks, model-parallel ones too. Every rank calls it."""
        return _reduce(values, dist.ReduceOp.SUM)


def _reduce(values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    reduced = torch.tensor(values, dtype=torch.float64, device=get_device_id())
    dist.all_reduce(reduced, op=op)
    return reduced.tolist()


class StockFacts(NamedTuple):
    """What the stock path does with this model.

    Attributes:
        dense_mask: rows of one micro-batch read a T x T mask, as by sdpa. It makes long micro-batches cost more.
        separates_rows: rows are computed one by one, since packed ones would leak state; padded where ranks have
            different numbers of rows. Costs are then of single rows.
        wrong_when_sharded: why verl's sequence parallelism would be wrong here. Each rank of a sequence-parallel group
            then computes whole rows. None: it is right.
        equal_tower_runs: every micro-batch runs a vision tower equally often, whatever it shows. If False, the
            self-check takes rows that run it equally often on every rank.
        row_begins: where verl begins a row in a pack. At "zeros": position ids 0. At "jumps": ids that do not go up by
            1. At "places": verl reads no ids, and knows where rows begin; it numbers each row's tokens 0, 1, 2, ...
            Rows with other position ids are refused.
    """

    dense_mask: bool
    separates_rows: bool
    wrong_when_sharded: str | None
    equal_tower_runs: bool = False
    row_begins: Literal["zeros", "jumps", "places"] = "jumps"


class Replay(NamedTuple):
    """Router replay. In mode R3 each token goes to the experts that it went to in the rollout. In mode R2 it goes to
    those of old log-probs, whose passes record them.

    For a token without a record the router chooses (`models.replay.chosen_experts`). Its routes name one expert k
    times, as zeros do. On Megatron they may also be -1.

    Attributes:
        mode: verl's.
        layers: how many layers a token's routes have: all layers of the model, with experts or without. Routes that
            Megatron records have only the layers with experts.
        chosen: k, how many experts a token goes to in a layer.
    """

    mode: Literal["R2", "R3"]
    layers: int
    chosen: int


class VerlEngine(Protocol):
    """What every backend uses of its engine: the class of verl's engine, with `PrefixEngine` before it among its bases.
    Backends extend it by what their engines of verl have.

    Attributes:
        module: the model, as verl wraps it. It is there once verl's engine is initialized.
    """

    module: Any
    model_config: Any
    engine_config: Any

    def get_data_parallel_group(self) -> dist.ProcessGroup: ...

    def get_data_parallel_rank(self) -> int: ...

    def get_data_parallel_size(self) -> int: ...

    def is_mp_src_rank_with_outputs(self) -> bool: ...

    def verls_forward_backward(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool
    ) -> dict[str, Any]:
        """Computes a batch by verl's own method, see `PrefixEngine`."""


class Backend(ABC):
    """One engine of verl. Attributes are known at construction, properties once verl's engine has its model.

    Attributes:
        ranks: who computes what with whom.
        trains: the engine has updates. False: it computes log-probs alone, as ref does.
        deterministic: the run must not depend on a clock.
        after_not_finite: what verl's engine does with gradients that are not finite, for the log.
    """

    ranks: Ranks
    trains: bool
    deterministic: bool
    after_not_finite: str

    # What the model is, and what updates keep: for plans and their memory.

    @abstractmethod
    def check_model(self) -> None:
        """Checks verl's model, once it is built. Configs are checked before, when the engine is made.

        Raises:
            ValueError: the model has something that cannot be shared.
        """

    @property
    @abstractmethod
    def config(self) -> Any:
        """The model's config, of Hugging Face."""

    @property
    @abstractmethod
    def shape(self) -> ModelShape:
        """The shape of the whole model, not of this rank's part."""

    @abstractmethod
    def memory(self, options: PrefixConfig) -> Memory:
        """What an update keeps at least, for the cost model."""

    @abstractmethod
    def gradient_bytes(self) -> float:
        """Bytes that gradients will add to this rank's device in an update; 0 where their memory is allocated already,
        and in engines without updates."""

    @abstractmethod
    def reads_logits_once(self, flags: Mapping[str, bool]) -> bool:
        """Whether `token_outputs` makes no copy of the logits by these flags, at temperature 1."""

    # How passes run, and what becomes of their logits.

    def begin_shared_path(self, rows: BatchRows) -> None:
        """Sets in verl's engine what its own `forward_backward_batch` would set. By default it sets nothing."""
        return

    def new_runner(
        self,
        of_logits: LogitsFn,
        step: Step,
        forward_only: bool,
        offload: bool = False,
        meter: Meter | None = None,
        kernel: str = "auto",
        logits_chunk: int = LOGITS_CHUNK,
        keep_attention: bool = False,
        context_type: Callable[..., ForwardContext] = ForwardContext,
    ) -> PlanRunner:
        """Makes a runner of plans on this model, with its autocast and its synchronisation of gradients.

        Args:
            of_logits, kernel, logits_chunk, keep_attention, context_type: of `core.forward.PackedForward`.
            step, offload, meter: of `core.runner.PlanRunner`.
            forward_only: without backward.
        """
        forward = PackedForward(
            self._hooked_model(), of_logits, context=self.autocast, kernel=kernel, logits_chunk=logits_chunk,
            keep_attention=keep_attention, context_type=context_type, sequence_group=self.ranks.sequence_group,
        )  # fmt: skip
        return self._runner(forward, step, forward_only, offload, meter or Meter())

    @abstractmethod
    def _hooked_model(self) -> Model:
        """The model as `PackedForward` calls it, with an attention that shares prefixes."""

    @abstractmethod
    def _runner(
        self, forward: PackedForward, step: Step, forward_only: bool, offload: bool, meter: Meter
    ) -> PlanRunner:
        """Makes the runner of `new_runner`."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """Context of forwards and losses."""

    @abstractmethod
    def output_names(self, flags: Mapping[str, bool]) -> list[str]:
        """Names of `token_outputs` by these flags; the first is one that losses have a gradient in."""

    @abstractmethod
    def token_outputs(
        self,
        logits: torch.Tensor,
        tokens: TensorDict,
        temperature: torch.Tensor,
        unscaled: bool,
        processor: Callable[..., Any] | None,
    ) -> dict[str, torch.Tensor]:
        """verl's outputs of tokens, `output_names` among them, [n] each.

        Args:
            logits: [n, this rank's part of the vocabulary].
            tokens: one row as verl's micro-batch: labels as `input_ids`, jagged [1, n] int64, the teacher's rows, and
                verl's flags (`outputs.FLAGS`).
            temperature: [n] float32.
            unscaled: all temperatures are known to be 1.
            processor: verl's function of logits, under `distillation_use_topk`.
        """

    @abstractmethod
    def logits_like(self) -> torch.Tensor:
        """Returns logits of a made-up token, [1, this rank's part of the vocabulary], in their dtype in passes."""

    @property
    @abstractmethod
    def counts_last_tokens(self) -> bool:
        """Whether updates on the stock path take something from each row's last token, though nobody reads its
        output: routers that count it for their biases or auxiliary losses."""

    @abstractmethod
    def model_metrics(self, runner: PlanRunner) -> dict[str, float]:
        """Returns prefix/* of what the model's forwards did in this runner's runs. Every rank calls it."""

    # The stock path.

    @abstractmethod
    def run_stock_path(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool
    ) -> dict[str, Any]:
        """Computes a batch on the stock path; returns verl's output."""

    @property
    @abstractmethod
    def stock_facts(self) -> StockFacts:
        """What the stock path does with the model."""

    # Expert routes, on both paths.

    @property
    @abstractmethod
    def replay(self) -> Replay | None:
        """Whether and how passes and the stock path replay routers; None: they do not, and routers choose. A pass that
        replays does it as `ForwardContext.routes` says."""

    @property
    def ignores_routes(self) -> bool:
        """Whether routers choose, whatever routes a batch has: in engines of ref and values."""
        return not self.trains

    def aligned_routes(self, data: TensorDict) -> TensorDict:
        """Returns a batch with the rollout's routes in the form in which this engine's routers replay them."""
        return data

    # For the self-check.

    @abstractmethod
    def gradients(self) -> Gradients:
        """Returns the parts of this rank's model whose gradients the self-check compares. Every rank has equally many,
        by the same names. Every rank calls it."""

    @abstractmethod
    def rounding_noise(self, seed: int) -> AbstractContextManager[None]:
        """Context in which layers' outputs are rounded differently each time, for the self-check.

        Args:
            seed: the same on all ranks, since some of them compute the same tokens.
        """

    @abstractmethod
    def gradients_aside(self) -> AbstractContextManager[None]:
        """Context in which parameters have no gradients; those that they had come back."""
