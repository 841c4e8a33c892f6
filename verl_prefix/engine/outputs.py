"""Makes verl's per-token outputs from logits of a mini-batch's tokens, and verl's rows from those.

The outputs are those of verl's own `prepare_model_outputs`, on suffix tokens instead of rows. Source:
verl/workers/engine/fsdp/transformer_impl.py, FSDPEngineWithLMHead.
"""

import functools
import os
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional
from verl.utils.device import get_device_id

from verl_prefix.core.calls import on_device
from verl_prefix.core.groups import Group
from verl_prefix.core.layout import Layout
from verl_prefix.core.schedule import TokenBatch
from verl_prefix.engine.protocol import Engine
from verl_prefix.engine.rows import PIXELS, row_lens
from verl_prefix.models.recurrent import replaced
from verl_prefix.models.vision import PixelBatch, is_vision_config

# verl's flags of a batch, and what each adds to the outputs.
FLAGS = {"calculate_entropy": "entropy", "calculate_sum_pi_squared": "sum_pi_squared"}


def reads_logits_once(data: TensorDict) -> bool:
    """Whether verl's outputs of this batch need logits once: log-probs alone, by flash-attn's cross entropy, which
    writes the gradient over the logits. Entropy, and log-probs without that package, need several copies in fp32."""
    by_flash_attn = torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
    by_flash_attn = by_flash_attn and os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") != "1"
    return by_flash_attn and not any(tu.get_non_tensor_data(data, flag, False) for flag in FLAGS)


class TokenOutputs:
    """Outputs of a mini-batch's suffix tokens: log-probs, and what verl's flags ask for.

    Args:
        reads_masked: whether somebody reads outputs where response_mask is 0; lm_head skips those tokens otherwise.

    Attributes:
        tokens: the batch as the schedule wants it. names: of the outputs, one column each.
    """

    def __init__(self, engine: Engine, data: TensorDict, reads_masked: bool) -> None:
        self.engine, self.data = engine, data
        device, config = get_device_id(), engine.module.config
        input_ids, position_ids = data["input_ids"], data["position_ids"]
        offsets = input_ids.offsets().tolist()
        pixels = tu.get(data, PIXELS) if is_vision_config(config) else None
        if pixels is not None:
            pixels = PixelBatch(pixels, input_ids.values().cpu(), offsets, config)
        self._flags = {flag: tu.get_non_tensor_data(data, flag, False) for flag in FLAGS}
        self.names = ["log_probs", *(name for flag, name in FLAGS.items() if self._flags[flag])]
        is_read = None if reads_masked or "sum_pi_squared" in self.names else self._is_read(offsets)
        if is_read is not None:
            self._old_log_probs = self._at_suffixes("old_log_probs", offsets)
        self.tokens = TokenBatch(
            input_ids.values().to(device), position_ids.values().to(device), offsets=offsets, pixels=pixels,
            is_read=is_read,
        )  # fmt: skip
        temperature = torch.as_tensor(data["temperature"], dtype=torch.float32, device=device).expand(len(data))
        self._token_temperature = temperature.repeat_interleave(input_ids.offsets().diff().to(device))
        self._offsets: dict[int, torch.Tensor] = {}

    def _is_read(self, offsets: Sequence[int]) -> torch.Tensor | None:
        """[N] bool: suffix tokens with a response_mask; None where all have one."""
        mask = self._at_suffixes("response_mask", offsets).bool()
        return None if int(mask.sum()) == sum(row_lens(self.data)[1]) else mask

    def _at_suffixes(self, name: str, offsets: Sequence[int]) -> torch.Tensor:
        """A field of the responses (jagged, or padded right) as [N]; a token's value stands at the token before it."""
        prompt_lens, response_lens = row_lens(self.data)
        values = [row[:n].cpu() for row, n in zip(self.data[name].unbind(), response_lens, strict=True)]
        flat = torch.zeros(offsets[-1], dtype=values[0].dtype)
        for start, prompt_len, row in zip(offsets, prompt_lens, values, strict=False):
            flat[start + prompt_len - 1 :][: len(row)] = row
        return flat

    def of_tokens(self, index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """verl's prepare_model_outputs on suffix tokens: [n, k], one column per name in `names`.

        Args:
            index: [n] of the tokens in the batch's flat values. logits: [n, vocabulary].
        """
        temperature = self.data["temperature"]
        output_args = {
            "temperature_is_one": not isinstance(temperature, torch.Tensor) and float(temperature) == 1.0,
            "temperature_rmpad": self._token_temperature[index],
            # A suffix token's label is the next token of its own row, which a roll of the packed row would not give.
            "input_ids_rmpad_rolled": self.tokens.input_ids[index + 1],
            "pad_size": 0,
        }
        # One offsets tensor per length: a recomputed jagged tensor is the same size only if its offsets are the same.
        if len(index) not in self._offsets:
            self._offsets[len(index)] = on_device(torch.tensor([0, len(index)]), index.device)
        one_row = torch.nested.nested_tensor_from_jagged(self.tokens.input_ids[index], self._offsets[len(index)])
        tokens = tu.get_tensordict({"input_ids": one_row}, self._flags)
        # Under sequence parallelism verl's engine would gather outputs here. They stay on the rank of their token: the
        # schedule gathers those of a pass once.
        with replaced(self.engine, "use_ulysses_sp", False):
            model_output = SimpleNamespace(logits=logits.unsqueeze(0))
            outputs = self.engine.prepare_model_outputs(model_output, output_args, tokens, None)
        columns = [outputs[name].values() for name in self.names]
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in columns))
        return torch.stack([x.to(dtype) for x in columns], dim=-1)

    def of_no_tokens(self) -> torch.Tensor:
        """[0, k], in the dtype of a token's outputs, which is that of verl's outputs for a token of made-up logits."""
        vocab_size, device = self.engine.module.config.get_text_config().vocab_size, self.tokens.input_ids.device
        logits = torch.zeros((1, vocab_size), dtype=self.engine._autocast_dtype, device=device)
        return self.of_tokens(torch.tensor([-1], device=device), logits)[:0]

    def of_rows(
        self, groups: Sequence[Group], layout: Layout, outputs: torch.Tensor, offsets: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Every output at its position in its row, zeros in the prompt: verl's nested full-length form.
        A token that lm_head skips has entropy 0, and its old log-prob.

        Args:
            groups, layout: of a pass. outputs: [outputs that are read, k]. offsets: of its rows, one after the other.
        """
        starts = [self.tokens.offsets[row] for group in groups for row in group.rows]
        ends = [self.tokens.offsets[row + 1] for group in groups for row in group.rows]
        *row_starts, num_tokens = accumulate((end - start for start, end in zip(starts, ends, strict=True)), initial=0)
        firsts = torch.tensor(starts, dtype=torch.int64)
        order = firsts.argsort()
        rows = order[torch.searchsorted(firsts[order], layout.read_places, right=True) - 1]
        moves = (torch.tensor(row_starts, dtype=torch.int64) - firsts)[rows]
        full = outputs.new_zeros(num_tokens, outputs.shape[-1])
        if self.tokens.is_read is not None:  # where False: no entropy, and the log-probs that the update starts from
            old = torch.cat([self._old_log_probs[start:end] for start, end in zip(starts, ends, strict=True)])
            full[:, self.names.index("log_probs")] = on_device(old, outputs.device).to(full.dtype)
        full = full.index_copy(0, on_device(layout.read_places + moves, outputs.device), outputs)
        return {
            name: torch.nested.nested_tensor_from_jagged(column, offsets)
            for name, column in zip(self.names, full.unbind(-1), strict=True)
        }
