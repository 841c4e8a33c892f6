"""Nested passes that are wrong on purpose: each takes a `pytest.MonkeyPatch`."""

from verl_prefix.core import attention
from verl_prefix.core.prefix_cache import PrefixCache
from verl_prefix.core.runner import PlanRunner


def gradients_of_the_outermost_dropped(patch):
    """What passes two levels deeper send back to a strand."""
    backward = attention.GroupedAttention.backward

    def dropped(ctx, dout):
        caches = ctx.site.caches
        if len(caches) > 1:
            ctx.site = ctx.site._replace(caches=(_Deaf(caches[0]), *caches[1:]))
        return backward(ctx, dout)

    patch.setattr(attention.GroupedAttention, "backward", staticmethod(dropped))


class _Deaf:
    def __init__(self, cache):
        self.read, self.anchor = cache.read, cache.anchor

    def add_grad(self, *args):
        pass


def cache_freed_a_phase_early(patch):
    """A nested pass's phase C takes what was sent back to the phase A around it so far."""
    made, backward, open_ = PlanRunner.prefix_cache, PrefixCache.backward, []

    def kept(self, device):
        open_.append(made(self, device))
        return open_[-1]

    def early(self, *args):
        for cache in open_[: open_.index(self)]:
            cache._grads.clear()
        open_.remove(self)
        backward(self, *args)

    patch.setattr(PlanRunner, "prefix_cache", kept)
    patch.setattr(PrefixCache, "backward", early)


def gradients_of_siblings_counted_twice(patch):
    """What the first nested pass sends back is there again for the second."""
    packed = PlanRunner._packed

    def twice(self, tokens, planned, last, outer=None, part=""):
        yield from packed(self, tokens, planned, last, outer, part)
        for total in outer.caches[0]._grads.values() if outer else ():
            for one in total:
                one.mul_(2)

    patch.setattr(PlanRunner, "_packed", twice)


BROKEN = [gradients_of_the_outermost_dropped, cache_freed_a_phase_early, gradients_of_siblings_counted_twice]
