"""What is simulated: a mini-batch of one rank (`Job`), and a path through it (`Arm`)."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig

from verl_prefix.auto.cost import Memory
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.tools.simulate.tower import Grids


@dataclass(frozen=True)
class Arm:
    """A path of a mini-batch.

    Args:
        path: "stock": verl's own, whole rows up to the budget in a micro-batch, logits of every token; "stock_lean":
            the same with lm_head on responses alone; "packed" or "phased".
        rows: of a micro-batch of stock at most; None: as the budget allows.
        offload: `prefix.offload`, of phases.
        keeps_attention: packed and phased, under gradient checkpointing; see `PackedForward.keep_attention`.
        all_logits: packed and phased, where `Memory.logits_chunk` is None and there is no entropy: all logits of a pass
            of an update exist at once.
    """

    path: str
    rows: int | None = None
    offload: bool = False
    keeps_attention: bool = True
    all_logits: bool = True

    @property
    def name(self) -> str:
        return self.path + ("_row" if self.rows == 1 else "") + ("+offload" if self.offload else "")


@dataclass(frozen=True)
class Job:
    """A mini-batch of one rank, and how it is trained on.

    Args:
        config: of the model. groups: of the rank's mini-batch; rows lie one after the other.
        budget: tokens of a pass or micro-batch, on all ranks that share it.
        memory: what an update keeps, and how ranks share it; what it offloads and keeps more is an arm's. With several
            `slices` the job is not for vision models, and recurrent layers of stock send nothing, as in verl's
            engine. `ranks` of Megatron's engine are its tensor-parallel ones.
        replicas: copies of the parameters (HSDP). wave_tokens, keep_attention: see `PrefixConfig`.
        reshard: verl's reshard_after_forward.
        master, dtype: of parameters and optimizer, and of the computation.
        lora: arguments of peft's LoraConfig, or None.
        entropy: computed with the log-probs of an update too (entropy_coeff is not 0).
        temperature: other than 1 scales a copy of the logits.
        log_prob_budget: of log-probs, where it is another.
        kept: passes of each kind that run in an update, and waves of the costliest; every other one runs half as many
            waves, and log-probs run one pass. A pass or wave that runs also counts for those that cost about as much.
        grids: per group, what its prompt shows a vision model; empty: nothing.
        freeze_tower: the vision tower is not trained.
        shape: costs of the whole model, where `config` is of a smaller one; waves are as long as they say.
    """

    config: PretrainedConfig
    groups: tuple[Group, ...]
    budget: int
    memory: Memory = field(default_factory=Memory)
    replicas: int = 1
    wave_tokens: int | None = None
    keep_attention: str = "auto"
    reshard: bool = True
    master: torch.dtype = torch.float32
    dtype: torch.dtype = torch.bfloat16
    lora: dict[str, Any] | None = None
    entropy: bool = False
    temperature: float = 1.0
    log_prob_budget: int | None = None
    kept: int = 2
    grids: tuple[Grids, ...] = ()
    freeze_tower: bool = False
    shape: ModelShape | None = None

    @property
    def reads_logits_once(self) -> bool:
        """As `Backend.reads_logits_once` of an update, at temperature 1."""
        return not self.entropy and self.memory.division is None and self.temperature == 1.0
