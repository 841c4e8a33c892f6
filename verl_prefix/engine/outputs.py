"""Makes verl's per-token outputs from logits of a mini-batch's tokens.

The backend calls verl's own functions, on suffix tokens instead of rows.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from verl_prefix.core.forward import TokenBatch
from verl_prefix.core.plan import Plan
from verl_prefix.core.runs import on_device, ranges
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.fields import PIXEL_INPUTS, RECORDS, TEACHER, flag
from verl_prefix.engine.rows import BatchRows
from verl_prefix.models.vision import PixelBatch, is_vision_config

# What verl's top-k losses make of logits (verl/trainer/distillation).
TOPK = ("distillation_losses", "student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage")
# verl's flags of a batch, and what each adds to the outputs; `distillation_only` takes log-probs away.
FLAGS: dict[str, tuple[str, ...]] = {
    "distillation_use_topk": TOPK, "distillation_only": (),
    "calculate_entropy": ("entropy",), "calculate_sum_pi_squared": ("sum_pi_squared",),
}  # fmt: skip


def flags_of(data: TensorDict) -> dict[str, bool]:
    """Reads the `FLAGS` of a batch."""
    return {name: bool(flag(data, name)) for name in FLAGS}


def policy_outputs(flags: Mapping[str, bool]) -> list[str]:
    """Names of a policy's outputs: log-probs, and what verl's flags ask for."""
    more = [name for asked, names in FLAGS.items() if flags[asked] for name in names]
    return more if flags["distillation_only"] else ["log_probs", *more]


def is_unscaled(data: TensorDict) -> bool:
    """Whether the temperature of all rows is known to be 1, so that verl divides no logits by it."""
    temperature = data["temperature"]
    return not isinstance(temperature, torch.Tensor) and float(temperature) == 1.0


class _Teacher(NamedTuple):
    """The teacher's rows of suffix tokens.

    Attributes:
        rows: by names of `TEACHER`.
        row_of_token: [N] int64, which of these rows is each token's. All tokens outside of suffixes have the last one:
            nobody reads their outputs.
    """

    rows: dict[str, torch.Tensor]
    row_of_token: torch.Tensor

    @classmethod
    def of(cls, rows: BatchRows, device: Any) -> "_Teacher":
        """Takes the teacher's rows of a batch to the device."""
        offsets, num_tokens = rows.offsets[:-1], rows.offsets[-1]
        lens = zip(offsets, rows.prompt_lens, rows.response_lens, strict=True)
        suffixes = [(start + prompt_len - 1, response_len) for start, prompt_len, response_len in lens]
        places = ranges([*suffixes, (num_tokens - 1, 1)])
        row_of_token = torch.full((num_tokens,), len(places) - 1)
        row_of_token[places] = torch.arange(len(places))
        values = {name: rows.data[name].values() for name in TEACHER}
        return cls({name: x[places.to(x.device)].to(device) for name, x in values.items()}, row_of_token.to(device))

    def at(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows of tokens `index` [n], by name."""
        return {name: x[self.row_of_token[index]] for name, x in self.rows.items()}


class TokenOutputs:
    """Makes outputs of a mini-batch's suffix tokens, as log-probs. `row_outputs.RowOutputs` puts them into rows.

        suffix token                                    lm_head   what the loss gets
        with response_mask 1                            runs      its outputs
        with response_mask 0, `needs_masked_outputs`    runs      its outputs
        with response_mask 0 else                       does not  its old log-prob, and 0 for entropy
        of a dead row, of which no layer runs           does not  its old log-prob, and 0 for entropy

    Args:
        needs_masked_outputs: somebody reads outputs where response_mask is 0.
        last_tokens: layers run on each row's last token, too, which is no suffix token: it has no output.
        processor: under `distillation_use_topk`, verl's function of logits and the teacher's rows.

    Attributes:
        tokens: the batch as the runner computes it.
        names: of the outputs, one column each (`Backend.output_names`).
        all_have_outputs: no suffix token of a computed row is without an output.
    """

    def __init__(
        self,
        backend: Backend,
        rows: BatchRows,
        *,
        needs_masked_outputs: bool,
        last_tokens: bool = False,
        processor: Callable[..., Any] | None = None,
    ) -> None:
        self._backend, self._rows, self._processor = backend, rows, processor
        self._device = get_device_id()
        self._flags = flags_of(rows.data)
        self.names = backend.output_names(self._flags)
        has_output = None if needs_masked_outputs else self._mask_of_suffixes()
        self.all_have_outputs = has_output is None
        self.tokens = self._token_batch(self._without_last_tokens(has_output) if last_tokens else has_output)
        self._token_temperature = self._temperatures()
        self._teacher = _Teacher.of(rows, self._device) if self._flags["distillation_use_topk"] else None
        self._offsets: dict[int, torch.Tensor] = {}  # [0, n] by n

    def _mask_of_suffixes(self) -> torch.Tensor | None:
        """Marks suffix tokens with a response_mask: [N] bool; None where all have one."""
        mask = self._rows.at_suffixes("response_mask").bool()
        return None if int(mask.sum()) == sum(self._rows.response_lens) else mask

    def _temperatures(self) -> torch.Tensor:
        """Returns the temperature of each token, [N] float32."""
        data = self._rows.data
        temperature = torch.as_tensor(data["temperature"], dtype=torch.float32, device=self._device).expand(len(data))
        return temperature.repeat_interleave(data["input_ids"].offsets().diff().to(self._device))

    def _without_last_tokens(self, is_read: torch.Tensor | None) -> torch.Tensor:
        """Returns `is_read` (None: all are read) without each row's last token, whose output nobody reads."""
        offsets = self._rows.offsets
        marks = torch.ones(offsets[-1], dtype=torch.bool) if is_read is None else is_read.clone()
        marks[torch.tensor(offsets[1:]) - 1] = False
        return marks

    def _token_batch(self, is_read: torch.Tensor | None) -> TokenBatch:
        """Makes the batch of the runner, with its pixels, and with routes to replay or to fill."""
        rows, data, config = self._rows, self._rows.data, self._backend.config
        input_ids = data["input_ids"].values()
        records = rows.flag(RECORDS)
        pixels = tu.get(data, PIXEL_INPUTS) if is_vision_config(config) else None
        return TokenBatch(
            input_ids.to(self._device), data["position_ids"].values().to(self._device), offsets=rows.offsets,
            pixels=None if pixels is None else PixelBatch(pixels, input_ids.cpu(), rows.offsets, config),
            is_read=is_read, routes=self._blank_routes() if records else rows.expert_routes, records=records,
        )  # fmt: skip

    def _blank_routes(self) -> torch.Tensor:
        """Makes the tensor that routes are recorded into. No token has a record yet (`backend.Replay`)."""
        replay = self._backend.replay
        assert replay is not None
        return torch.zeros(self._rows.offsets[-1], replay.layers, replay.chosen, dtype=torch.int16)

    def recorded(self, plan: Plan) -> torch.Tensor:
        """Returns the routes that passes recorded, jagged [rows, tokens, layers, k] int16. Routes of a strand are
        copied to every row that shares it. Tokens that nobody computed have zeros, as each row's last one without
        `last_tokens`.

        Args:
            plan: whose passes ran.
        """
        routes, offsets = self.tokens.routes, self.tokens.offsets
        assert routes is not None
        groups = (group for planned in plan.all_passes for group in planned.groups)
        for group in groups:
            for row, fork in zip(group.rows, group.forks, strict=True):
                for strand, start, end in group.strands_before(fork):
                    source, target = offsets[group.strands[strand].row], offsets[row]
                    routes[target + start : target + end] = routes[source + start : source + end]
        return torch.nested.nested_tensor_from_jagged(routes, self._rows.data["input_ids"].offsets().cpu())

    def of_logits(self, index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Makes outputs of suffix tokens from their logits: [n, k], one column per name in `names`.

        Args:
            index: [n] int64, of the tokens in the batch's flat values.
            logits: [n, this rank's part of the vocabulary].
        """
        # The batch's last token, which pads a rank's share of tokens, has no next one: nobody reads its output.
        following = (index + 1).clamp(max=len(self.tokens.input_ids) - 1)
        # A suffix token's label is the next token of its own row, which a roll of the packed row would not give.
        values = {"input_ids": self.tokens.input_ids[following]}
        if self._teacher is not None:
            values |= self._teacher.at(index)
        # One object of offsets per n, since a jagged tensor that checkpointing makes again is equal only if its offsets
        # are the same.
        if len(index) not in self._offsets:
            self._offsets[len(index)] = on_device(torch.tensor([0, len(index)]), index.device)
        offsets = self._offsets[len(index)]
        jagged = {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in values.items()}
        outputs = self._backend.token_outputs(
            logits, tu.get_tensordict(jagged, dict(self._flags)), self._token_temperature[index],
            unscaled=is_unscaled(self._rows.data), processor=self._processor,
        )  # fmt: skip
        columns = [outputs[name] for name in self.names]
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in columns))
        return torch.stack([x.to(dtype) for x in columns], dim=-1)

    def empty(self) -> torch.Tensor:
        """Outputs of no token: [0, k], in the dtype of verl's outputs for a token of made-up logits."""
        index = torch.tensor([-1], device=self.tokens.input_ids.device)
        return self.of_logits(index, self._backend.logits_like())[:0]
