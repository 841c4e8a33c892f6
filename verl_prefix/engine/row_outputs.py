"""Puts outputs of tokens into verl's rows."""

import torch

from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.runs import on_device, ranges
from verl_prefix.engine.outputs import TokenOutputs
from verl_prefix.engine.rows import BatchRows


class RowOutputs:
    """Puts the outputs of a pass into verl's nested full-length rows.

    Two rows of the mini-batch, of 5 and 4 tokens, share a prompt of 3. A token's output stands at the token before the
    one that it predicts, and the second row's last response token is masked:

        row 0    prompt 3, response 2    [ 0  0  a  b  0 ]
        row 1    prompt 3, response 1    [ 0  0  o  0 ]          o: its old log-prob

    A response token has no output if lm_head skips it, or if its row is dead (`TokenOutputs`). Such a token gets
    entropy 0 and its old log-prob. No result depends on these values: the loss masks the token, or multiplies it by an
    advantage of 0, and outputs are not given back.

    Args:
        rows: the mini-batch's, on this rank.
        token_outputs: what makes the outputs.
    """

    def __init__(self, rows: BatchRows, token_outputs: TokenOutputs) -> None:
        self._names, self._starts = token_outputs.names, rows.offsets
        self._old_log_probs: torch.Tensor | None = None
        if "log_probs" in self._names and (rows.dead or not token_outputs.all_have_outputs):
            # A loss that does not read old log-probs (gpg) would not mask a NaN of theirs.
            self._old_log_probs = rows.at_suffixes("old_log_probs").nan_to_num(0.0, 0.0, 0.0)
        # Scratch, [N]: each call writes the entries of its own rows, and reads no others.
        self._token_at = torch.empty(rows.offsets[-1], dtype=torch.int64)

    def of_pass(self, packed_row: PackedRow, outputs: torch.Tensor, offsets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the rows of a pass with their outputs, jagged [rows, tokens] by name.

        Args:
            packed_row: of the pass.
            outputs: [outputs that are read, k].
            offsets: [rows + 1] int64, of the pass's rows, one after the other.
        """
        starts = self._starts
        rows = (row for group in packed_row.groups for row in group.rows)
        places = ranges([(starts[row], starts[row + 1] - starts[row]) for row in rows])
        self._token_at[places] = torch.arange(len(places))
        full = outputs.new_zeros(len(places), outputs.shape[-1])
        if self._old_log_probs is not None:
            old = on_device(self._old_log_probs[places], outputs.device)
            full[:, self._names.index("log_probs")] = old.to(full.dtype)
        full = full.index_copy(0, on_device(self._token_at[packed_row.output_places], outputs.device), outputs)
        return {
            name: torch.nested.nested_tensor_from_jagged(column, offsets)
            for name, column in zip(self._names, full.unbind(-1), strict=True)
        }
