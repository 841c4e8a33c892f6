"""States of recurrent layers, paths of trees, and gradients of prefixes, that are wrong on purpose: each takes a
`pytest.MonkeyPatch`."""

import torch

from verl_prefix.core import attention, layout, recurrence
from verl_prefix.core.prefix_cache import PrefixCache, ReadRows


def states_of_zero(patch):
    """Suffixes start as if they had no prefix."""
    made = recurrence._continued

    def zero(*args):
        found = made(*args)
        return None if found is None else torch.zeros_like(found)

    patch.setattr(recurrence, "_continued", zero)


def conv_tail_one_token_off(patch):
    made = recurrence._continued

    def off(attention_pass, key, *args):
        found = made(attention_pass, key, *args)
        return found if found is None or key[0] == "scan" else found.roll(1, dims=1)

    patch.setattr(recurrence, "_continued", off)


def gradients_dropped_in_packed(patch):
    backward = ReadRows.backward

    def dropped(ctx, grad):
        return backward(ctx, torch.zeros_like(grad) if ctx.args[1] is None else grad)

    patch.setattr(ReadRows, "backward", staticmethod(dropped))


def gradients_dropped_in_phased(patch):
    add = PrefixCache.add_grad
    patch.setattr(
        PrefixCache, "add_grad", lambda self, key, *args: None if isinstance(key, tuple) else add(self, key, *args)
    )


def fork_writes_into_the_state(patch):
    """As a kernel that works in place: a later wave goes on from what an earlier one left."""
    forward = ReadRows.forward

    def written(ctx, states, *args):
        found = forward(ctx, states, *args)
        states.detach().mul_(-1)
        return found

    patch.setattr(ReadRows, "forward", staticmethod(written))


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
        self._grad.pop(key, None)
        add(self, key, *args)

    patch.setattr(PrefixCache, "add_grad", replaced)


def ancestor_left_out(patch):
    """Of what a segment goes on behind, the first piece, where there are several."""
    changed_paths(patch, lambda path: path[1:] if len(path) > 1 else path)


def last_token_left_out(patch):
    changed_paths(patch, lambda path: tuple((a, n - (i == len(path) - 1)) for i, (a, n) in enumerate(path) if n > 1))


def changed_paths(patch, change):
    made = layout.calls_of

    def calls_of(segments, *args):
        return made([segment._replace(path=change(segment.path)) for segment in segments], *args)

    patch.setattr(layout, "calls_of", calls_of)


def gradients_of_shared_outputs_dropped(patch):
    add = PrefixCache.add_grad
    patch.setattr(PrefixCache, "add_grad", lambda self, key, *args: key == "outputs" or add(self, key, *args))
