"""States of recurrent layers, paths of trees, and gradients of prefixes, that are wrong on purpose: each takes a
`pytest.MonkeyPatch`."""

import torch

from verl_prefix.core import attention, packed_row, recurrence
from verl_prefix.core.prefix_cache import PrefixCache, ReadPrefix
from verl_prefix.core.sequence_parallel import Shards


def changed_states(patch, change):
    """Suffixes start from other states: change(forward_context, key, states)."""
    made = recurrence._initial_states

    def changed(forward_context, key, of, device, own=None):
        found = made(forward_context, key, of, device, own)
        return found if found is None or of == "strands" else change(forward_context, key, found)

    patch.setattr(recurrence, "_initial_states", changed)


def states_of_zero(patch):
    """Suffixes start as if they had no prefix."""
    changed_states(patch, lambda forward_context, key, found: torch.zeros_like(found))


def scan_states_of_zero(patch):
    """Of the two that a layer leaves, its convolution's inputs are right."""
    changed_states(patch, lambda forward_context, key, found: torch.zeros_like(found) if key[0] == "scan" else found)


def conv_tail_one_token_off(patch):
    changed_states(patch, lambda forward_context, key, found: found if key[0] == "scan" else found.roll(1, dims=1))


def gradients_dropped_in_packed(patch):
    backward = ReadPrefix.backward

    def dropped(ctx, grad):
        return backward(ctx, torch.zeros_like(grad) if ctx.args[1] is None else grad)

    patch.setattr(ReadPrefix, "backward", staticmethod(dropped))


def gradients_dropped_in_phased(patch):
    add = PrefixCache.add_grad
    patch.setattr(
        PrefixCache, "add_grad", lambda self, key, *args: None if isinstance(key, tuple) else add(self, key, *args)
    )


def fork_writes_into_the_state(patch):
    """As a kernel that works in place: a later wave goes on from what an earlier one left."""
    forward = ReadPrefix.forward

    def written(ctx, states, *args):
        found = forward(ctx, states, *args)
        states.detach().mul_(-1)
        return found

    patch.setattr(ReadPrefix, "forward", staticmethod(written))


def states_of_another_ranks_heads(patch):
    """Under sequence parallelism."""

    def others(forward_context, key, found):
        if key[0] != "scan":
            return found
        shards = forward_context.shards
        of_ranks = [torch.empty_like(found) for _ in range(shards.size)]
        torch.distributed.all_gather(of_ranks, found.detach().contiguous(), group=shards.group)
        return found + (of_ranks[shards.rank - 1] - found).detach()

    changed_states(patch, others)


def channels_in_wrong_order(patch):
    """What comes back of a convolution: every rank's first channel, then its second."""
    to_tokens = Shards.to_tokens

    def dealt(self, out):
        found = to_tokens(self, out)
        return found if found.dim() > 2 else found.unflatten(1, (self.size, -1)).transpose(1, 2).flatten(1)

    patch.setattr(Shards, "to_tokens", dealt)


def heads_in_wrong_order(patch):
    """Of what a scan reads, the values."""
    to_heads = Shards.to_heads

    def turned(self, *tensors):
        found = to_heads(self, *tensors)
        values = {5: 2, 4: 0}.get(len(found))  # of the delta rule, of Mamba
        return [x.flip(1) if i == values else x for i, x in enumerate(found)]

    patch.setattr(Shards, "to_heads", turned)


def gradients_of_dealt_weights_too_small(patch):
    heads = Shards.heads

    def nth(self, weights):
        found = heads(self, weights)
        return found / self.size + (found - found / self.size).detach()

    patch.setattr(Shards, "heads", nth)


def gradients_of_keys_dropped_in_packed(patch):
    """Of prefix keys and values, what suffixes send back."""
    patch.setattr(attention, "add_at", lambda total, rows, part: None)


def gradients_of_keys_dropped_in_phased(patch):
    patch.setattr(PrefixCache, "add_grad", lambda self, key, *args: None)


def gradients_of_one_layer_dropped(patch):
    add = PrefixCache.add_grad
    patch.setattr(PrefixCache, "add_grad", lambda self, key, *args: None if key == 1 else add(self, key, *args))


def earlier_waves_dropped(patch):
    """Each wave's gradients take the place of those before it."""
    add = PrefixCache.add_grad

    def replaced(self, key, *args):
        self._grads.pop(key, None)
        add(self, key, *args)

    patch.setattr(PrefixCache, "add_grad", replaced)


def ancestor_left_out(patch):
    """Of what a segment goes on behind, the first piece, where there are several."""
    changed_paths(patch, lambda path: path[1:] if len(path) > 1 else path)


def last_token_left_out(patch):
    changed_paths(patch, lambda path: tuple((a, n - (i == len(path) - 1)) for i, (a, n) in enumerate(path) if n > 1))


def changed_paths(patch, change):
    made = packed_row.calls_of

    def calls_of(segments, *args):
        return made([segment._replace(path=change(segment.path)) for segment in segments], *args)

    patch.setattr(packed_row, "calls_of", calls_of)


def gradients_of_shared_outputs_dropped(patch):
    add = PrefixCache.add_grad
    patch.setattr(PrefixCache, "add_grad", lambda self, key, *args: key == "outputs" or add(self, key, *args))
