"""Dormant offload changes where bytes wait, never a bit of a result; what must stay stays; leaving frees everything.

All on CPU, where the copies are synchronous: streams, events and pinned memory are tests/gpu/test_offload_cuda.py's,
parameters that two FSDP2 ranks gather and free are tests/core/test_fsdp.py's.
"""

import functools
import gc
import weakref
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from runners import random_rollouts, run_shared
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

from verl_prefix.core import host_memory, meter, offload
from verl_prefix.core.host_memory import HostCopies, host_pages
from verl_prefix.core.offload import OffloadedPrefixCache
from verl_prefix.core.shelf import Shelf

CPU = torch.device("cpu")
LAYERS, PREFIX = 3, 22 + 40 + 6  # tokens of phase A
SHAPE = [(23, [9, 17, 5]), (41, [3, 1, 11, 7, 2]), (7, [13])]


@pytest.fixture(autouse=True)
def pages(monkeypatch, tmp_path):
    """A page pool of the test's own, on a machine with a terabyte free, whatever this one has."""
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "plenty")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    host_memory.MEMINFO.write_text(f"MemTotal: {2**30} kB\nMemAvailable: {2**30} kB\n")
    host_pages.cache_clear()
    yield host_pages(CPU)
    host_pages.cache_clear()


@pytest.fixture
def counts(monkeypatch) -> Counter:
    """Transfers of all runners of the test."""
    total = Counter()
    monkeypatch.setattr(meter, "Counter", lambda: total)
    return total


def build(dtype=torch.float64, checkpoint: bool = False, layers: int = LAYERS):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, initializer_range=0.1, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).train()
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def measure(model, **options) -> list[torch.Tensor]:
    """Log-probs and all gradients of one phased run."""
    model.zero_grad()
    log_probs = run_shared(model, random_rollouts(SHAPE, 97), "phased", wave_tokens=19, **options)
    return [*log_probs, *(p.grad for p in model.parameters())]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_room_for_prefetching_leaves_an_eighth_of_the_device(monkeypatch):
    """torch's module of a device, which no CPU has, stands in."""
    stats = {"reserved_bytes.all.current": 300, "active_bytes.all.current": 100}
    module = SimpleNamespace(mem_get_info=lambda _: (500, 1600), memory_stats=lambda _: stats)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert offload.device_room(torch.device("cuda")) == 500 + 300 - 100 - 200


@pytest.fixture
def packed(monkeypatch) -> list[tuple[torch.Tensor, int, bool]]:
    """(shape, address of the storage, whether it moved) of every tensor that phase A saves."""
    seen = []
    pack = OffloadedPrefixCache._pack

    def spy(self, tensor):
        saved = pack(self, tensor)
        seen.append((tuple(tensor.shape), tensor.untyped_storage()._cdata, not isinstance(saved, torch.Tensor)))
        return saved

    monkeypatch.setattr(OffloadedPrefixCache, "_pack", spy)
    return seen


@pytest.mark.parametrize("room", [10**9, 70_000, 0], ids=["prefetched", "some_prefetched", "on_demand"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        pytest.param(torch.float64, "cpu", id="float64-cpu", marks=pytest.mark.more),
        pytest.param(torch.float64, "reference", id="float64-reference"),
        pytest.param(torch.float32, "cpu", id="float32-cpu"),
        pytest.param(torch.float32, "reference", id="float32-reference", marks=pytest.mark.more),
    ],
)
def test_results_are_the_same_bits_with_and_without_offload(monkeypatch, counts, dtype, kernel, checkpoint, room):
    monkeypatch.setattr(offload, "device_room", lambda device: room)
    monkeypatch.setattr(offload, "AHEAD", 1.0)
    model = build(dtype, checkpoint)
    without = measure(model, kernel=kernel)
    assert not counts
    assert same_bits(measure(model, kernel=kernel, offload=True), without)
    assert counts["offloaded_bytes"] > PREFIX * 48 * LAYERS * dtype.itemsize
    if room >= counts["offloaded_bytes"]:
        assert counts["prefetched_bytes"] == counts["offloaded_bytes"] and not counts["demand_loads"]
    elif room == 0:
        assert counts["demand_loads"] and not counts["prefetched_bytes"]
    else:
        assert 0 < counts["prefetched_bytes"] <= counts["offloaded_bytes"]


def test_storages_may_span_pages(monkeypatch, pages):
    monkeypatch.setattr(host_memory, "PAGE_BYTES", 7 * 512 + 3)
    model = build()
    assert same_bits(measure(model, offload=True), measure(model))
    assert pages.num_pages > 50


def test_wrong_bytes_from_the_host_show(monkeypatch):
    """The tests above can fail: one byte of one storage is enough."""
    model, copy_in = build(), OffloadedPrefixCache._copy_in

    def flip(self, dormant):
        copy_in(self, dormant)
        if dormant is next(iter(self._dormant.values())):
            dormant.on_device[:8] = 7

    without = measure(model)
    monkeypatch.setattr(OffloadedPrefixCache, "_copy_in", flip)
    assert not same_bits(measure(model, offload=True), without)


@pytest.mark.parametrize("moves", [True, False], ids=["offloaded", "control_without_moving"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpointed"])
def test_device_storages_are_freed_between_phase_a_and_phase_c(monkeypatch, counts, checkpoint, moves):
    model, sources, live = build(checkpoint=checkpoint), [], {}
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    pack, stays = OffloadedPrefixCache._pack, OffloadedPrefixCache._stays

    def spy(self, tensor):
        if not stays(self, tensor):
            sources.append((StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()))
        return pack(self, tensor)

    @contextmanager
    def look(last):
        if "wave" not in live:
            live["wave"] = sum({ref.cdata: nbytes for ref, nbytes in sources if not ref.expired()}.values())
        yield

    monkeypatch.setattr(OffloadedPrefixCache, "_pack", spy)
    if not moves:
        monkeypatch.setattr(OffloadedPrefixCache, "_stays", lambda self, tensor: True)
    measure(model, offload=True, gradient_sync=look)
    dormant = sum({ref.cdata: nbytes for ref, nbytes in sources}.values())
    assert dormant > PREFIX * 48 * LAYERS * 8 and not {ref.cdata for ref, _ in sources} & parameters
    assert live["wave"] == (0 if moves else dormant)
    assert counts["offloaded_bytes"] == (dormant if moves else 0)


def test_storages_return_in_reverse_within_the_room_and_go_again(monkeypatch, counts):
    """A device whose room is what the storages that came back leave of 300 kB: a quarter of all of them."""
    model, alive, order, peak = build(), [], [], 0
    copy_in = OffloadedPrefixCache._copy_in

    def taken() -> int:
        return sum(nbytes for ref, nbytes in alive if not ref.expired())

    def spy(self, dormant):
        nonlocal peak
        copy_in(self, dormant)
        alive.append((StorageWeakRef(dormant.on_device.untyped_storage()), dormant.nbytes))
        order.append(list(self._dormant.values()).index(dormant))
        peak = max(peak, taken())

    monkeypatch.setattr(OffloadedPrefixCache, "_copy_in", spy)
    monkeypatch.setattr(offload, "device_room", lambda device: 300_000 - taken())
    monkeypatch.setattr(offload, "AHEAD", 1.0)
    measure(model, offload=True)
    assert counts["prefetched_bytes"] == counts["offloaded_bytes"] > 1_100_000 and not counts["demand_loads"]
    assert order == sorted(order, reverse=True) and peak <= 300_000


def test_few_storages_are_back_before_backward_asks(monkeypatch, counts):
    """On a device with room for all."""
    ahead, prefetch = [], OffloadedPrefixCache._prefetch

    def spy(self):
        prefetch(self)
        waiting = [one for one in self._dormant.values() if one.is_ahead]
        assert self._num_ahead == sum(one.nbytes for one in waiting)
        if len(waiting) > 1:
            ahead.append(self._num_ahead / sum(one.nbytes for one in self._dormant.values()))

    monkeypatch.setattr(OffloadedPrefixCache, "_prefetch", spy)
    measure(build(layers=12), offload=True)
    assert len(ahead) > 50 and max(ahead) <= 1 / 16
    assert counts["prefetched_bytes"] == counts["offloaded_bytes"] and not counts["demand_loads"]


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpointed"])
def test_parameters_never_move(monkeypatch, packed, checkpoint):
    model = build(checkpoint=checkpoint)
    monkeypatch.setattr(offload, "TINY_BYTES", 1)
    measure(model, offload=True)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    moved = {storage for _, storage, moved in packed if moved}
    stayed = {storage for _, storage, moved in packed if not moved}
    # A checkpointed layer saves nothing of its inside, so only what is outside of layers can be seen staying:
    # the last norm's weight; lm_head has no part in a prefix graph.
    assert moved and len(stayed & parameters) >= (1 if checkpoint else 7 * LAYERS)
    assert not moved & parameters


def test_casts_of_parameters_never_move(monkeypatch):
    """Autocast makes a copy of every fp32 weight, which backward makes again."""
    autocast, copied = functools.partial(torch.autocast, "cpu", torch.bfloat16), []
    copy = OffloadedPrefixCache._find_or_copy
    monkeypatch.setattr(
        OffloadedPrefixCache, "_find_or_copy", lambda self, x: copied.append(tuple(x.shape)) or copy(self, x)
    )
    model = build(torch.float32)
    without = measure(model, context=autocast)
    assert same_bits(measure(model, context=autocast, offload=True), without)
    weights = {shape for p in model.parameters() for shape in (tuple(p.shape), tuple(p.shape)[::-1]) if p.dim() > 1}
    assert copied and not weights & set(copied), "of a few tokens each"


@pytest.mark.parametrize(
    "cast",
    [
        lambda p: p.to(torch.bfloat16, memory_format=torch.contiguous_format),
        lambda p: torch.no_grad()(torch.Tensor.mul_)(p.to(torch.bfloat16), 2),
        lambda p: p.to(torch.bfloat16),
    ],
    ids=["another layout", "written to", "plain"],
)
def test_casts_come_back_as_they_were(counts, cast):
    parameter = torch.nn.Parameter(torch.randn(64, 96).t())
    with OffloadedPrefixCache(CPU, counts) as cache, torch.no_grad():
        with torch.enable_grad():
            made = cast(parameter)
        back = cache._unpack(cache._pack(made))
        assert torch.equal(back, made) and back.stride() == made.stride()


def test_what_backward_never_asks_for_does_not_stay_or_stop_the_rest(counts):
    """A branch on which no result depends. Its graph is let go of; what it saved is neither loaded nor waited for."""
    x = torch.randn(64, 512, requires_grad=True)
    with OffloadedPrefixCache(CPU, counts) as cache:
        with cache.saving():
            y, dropped = x, []
            for i in range(64):
                y = y.sin()
                if i == 32:
                    dropped.append((torch.randn(512, 512) * y[0]).exp().sin())
        loads = counts["demand_loads"]
        cache._end_waves()
        dropped.clear()
        y.backward(torch.ones_like(y))
        assert counts["demand_loads"] == loads and cache._num_ahead == 0
        assert not any(one.on_device is not None or one.num_waiting for one in cache._dormant.values())


def test_checkpointed_layers_leave_their_inputs_and_nothing_else(packed):
    """torch's checkpoint saves a layer's inputs under our hooks, and all inside under its own."""
    measure(build(checkpoint=True), offload=True)
    shapes = [shape for shape, _, moved in packed if moved]
    assert shapes.count((1, PREFIX, 48)) >= LAYERS
    assert not [shape for shape in shapes if shape[-1] in (16, 80)], "attention's or the MLP's own tensors moved"


def test_a_storage_moves_once_and_its_views_come_back_as_views(counts):
    base = torch.randn(40, 30, dtype=torch.float64)
    views = [base, base.t(), base[3:7], base[:, 5], base.view(torch.float32)[::3, 4:8]]
    with OffloadedPrefixCache(CPU, counts) as cache:
        saved = [cache._pack(view) for view in views]
        back = [cache._unpack(x) for x in saved]
        assert counts == {"offloaded_bytes": base.nbytes, "demand_loads": 1}
        for view, copy in zip(views, back, strict=True):
            assert torch.equal(view, copy) and view.dtype == copy.dtype
            assert (view.stride(), view.storage_offset()) == (copy.stride(), copy.storage_offset())
        assert len({x.untyped_storage()._cdata for x in back}) == 1
        assert back[0].untyped_storage()._cdata != base.untyped_storage()._cdata
        assert torch.equal(cache._unpack(saved[1]), views[1]) and counts["demand_loads"] == 1
        del saved, back
        assert not any(one.on_device is not None for one in cache._dormant.values())
    assert counts["host_bytes"] == -(-base.nbytes // 512) * 512


def test_prefetching_begins_as_soon_as_there_is_room(monkeypatch, counts):
    """There is none at the end of the waves, and some once backward has loaded what it needs first."""
    rooms, model = iter([0]), build()
    monkeypatch.setattr(offload, "device_room", lambda device: next(rooms, 10**9))
    measure(model, offload=True)
    assert 0 < counts["demand_loads"] < 10 and counts["prefetched_bytes"] > counts["offloaded_bytes"] / 2


def test_what_is_back_or_was_used_does_not_come_again(counts):
    with OffloadedPrefixCache(CPU, counts) as cache:
        waiting, half_used, used = (torch.randn(n) for n in (2000, 3000, 4000))
        saved = [cache._pack(x) for x in (waiting, half_used, half_used, used)]
        cache._unpack(saved[3]), cache._unpack(saved[2])
        cache._end_waves()
        assert (counts["demand_loads"], counts["prefetched_bytes"]) == (2, waiting.nbytes)
        assert torch.equal(cache._unpack(saved[0]), waiting) and torch.equal(cache._unpack(saved[1]), half_used)


def test_a_small_view_takes_its_whole_storage_along(counts):
    base = torch.randn(4000)
    with OffloadedPrefixCache(CPU, counts) as cache:
        saved = cache._pack(base[7:9])
        source, wanted = StorageWeakRef(base.untyped_storage()), base[7:9].clone()
        del base
        assert source.expired() and torch.equal(cache._unpack(saved), wanted)


def test_a_storage_written_to_between_two_saves_is_copied_again(counts):
    with OffloadedPrefixCache(CPU, counts) as cache:
        x = torch.zeros(2000)
        first = cache._pack(x)
        x += 1
        second = cache._pack(x)
        assert (cache._unpack(first).sum(), cache._unpack(second).sum()) == (0, 2000)


def test_an_address_that_another_storage_gets_is_not_taken_for_the_old_one(counts):
    """The allocator hands freed memory out again at once."""
    with OffloadedPrefixCache(CPU, counts) as cache:
        saved = [cache._pack(torch.full((2000,), float(i))) for i in range(50)]
        assert [float(cache._unpack(x)[-1]) for x in saved] == list(range(50))


def test_what_is_tiny_or_whole_numbers_or_elsewhere_stays(counts):
    with OffloadedPrefixCache(CPU, counts) as cache:
        for stays in (torch.ones(9), torch.ones(3000, dtype=torch.int64), torch.ones(3000, device="meta")):
            assert isinstance(cache._pack(stays), torch.Tensor)
    assert not any(counts.values())


def test_a_shelf_has_two_keys_on_the_device_the_next_one_before_it_is_asked_for(monkeypatch):
    demanded, load = [], Shelf._load

    def spy(self, layer):
        if self._shelved[layer].on_device is None and layer == asked[-1]:
            demanded.append(len(asked) - 1)
        load(self, layer)

    monkeypatch.setattr(Shelf, "_load", spy)
    shelf, asked = Shelf(HostCopies(CPU), written=True), []
    truth = [(torch.randn(3, 5).bfloat16(), torch.randn(4).bfloat16().requires_grad_()) for _ in range(6)]
    layers = [3, 7, 11, 12, 20, 31]
    for i in reversed(range(6)):
        shelf[layers[i]] = (truth[i][0].t(), truth[i][1])
    for i in [*range(6), *reversed(range(6)), *range(6)]:
        asked.append(layers[i])
        x, y = shelf[layers[i]]
        assert torch.equal(x, truth[i][0].t()) and torch.equal(y, truth[i][1])
        assert x.dtype == y.dtype == torch.bfloat16 and (x.requires_grad, y.requires_grad) == (False, True)
        x += 1
        truth[i][0].add_(1)
        assert sum(one.on_device is not None for one in shelf._shelved.values()) <= 2
    assert demanded == [1, 7, 13], "behind each end the order is not known"
    assert 12 in shelf and torch.equal(shelf.pop(12)[0], truth[3][0].t())
    assert 12 not in shelf and shelf.pop(12, None) is None and len(shelf) == 5
    assert all(torch.equal(shelf[layers[i]][0], truth[i][0].t()) for i in (5, 4, 2)), "20 is next to 11 now"


def test_a_cache_that_was_put_away_brings_back_what_is_asked_for(counts):
    with OffloadedPrefixCache(CPU, counts) as cache:
        for layer in range(3):
            cache.capture(layer, torch.full((4,), float(layer), requires_grad=True))
        cache.add_grad(2, slice(0, 2), torch.ones(2))
        cache.put_away()
        shelved = [one for shelf in (cache._stored, cache._grads) for one in shelf._shelved.values()]
        assert len(shelved) == 4 and all(one.on_device is None for one in shelved)
        assert cache.read(2)[0].tolist() == [2] * 4 and cache.take(2)[0].tolist() == [1, 1, 0, 0]


def test_what_a_shelf_leaves_on_the_device(monkeypatch):
    shelf = Shelf(HostCopies(CPU), written=True)
    stays = {
        ("state", 0): (torch.ones(9),),
        5: (torch.ones(3, device="meta"),),
        6: (torch.ones(2), torch.ones(2).half()),
    }
    shelf.update(stays)
    shelf.update({1: (torch.ones(3),), 2: (torch.zeros(3),)})
    assert all(shelf[key] is tensors for key, tensors in stays.items()) and set(shelf) == {1, 2, *stays}
    assert len(shelf) == 5
    monkeypatch.setattr(host_memory, "host_room", lambda: 0)
    shelf._copies.num_used += host_memory.PAGE_BYTES  # the page that layer 1 took is full
    assert (float(shelf[1][0].sum()), float(shelf[2][0].sum())) == (3, 0) and 2 in shelf._staying
    shelf.clear()
    assert not len(shelf) and 1 not in shelf


def test_a_device_without_room_for_the_next_layer_has_this_one(monkeypatch):
    shelf, to_device, calls = Shelf(HostCopies(CPU), written=False), HostCopies.to_device, []
    shelf.update({layer: (torch.full((3,), float(layer)),) for layer in range(4)})

    def full(self, pieces):
        calls.append(1)
        if len(calls) % 2 == 0:
            raise torch.OutOfMemoryError("as the allocator says it")
        return to_device(self, pieces)

    monkeypatch.setattr(HostCopies, "to_device", full)
    assert [float(shelf[layer][0].sum()) for layer in (3, 2, 1, 0)] == [9, 6, 3, 0]


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpointed"])
def test_memory_is_neither_read_nor_given_up_before_its_copy_is_waited_for(monkeypatch, checkpoint):
    """Copies of a side stream, which no CPU has, stand here for themselves: each is done when it is waited for."""
    model, copies, to_device = build(checkpoint=checkpoint), [], HostCopies.to_device

    def late(self, pieces):
        into, _ = to_device(self, pieces)
        copies.append(SimpleNamespace(into=into, source=into.clone(), is_done=False))
        into.fill_(255)  # NaN in every dtype
        return into, copies[-1]

    def wait(self, copy):
        if copy is not None and not copy.is_done:
            copy.into.copy_(copy.source)
            copy.is_done = True

    without = measure(model)
    monkeypatch.setattr(HostCopies, "to_device", late)
    monkeypatch.setattr(HostCopies, "wait", wait)
    assert same_bits(measure(model, offload=True), without)
    assert len(copies) > 6 * LAYERS and all(copy.is_done for copy in copies)
    shelf = Shelf(HostCopies(CPU), written=False)
    shelf.update({layer: (torch.full((3,), float(layer)),) for layer in range(8)})
    # While the next layer is on its way, it is deleted, another one is asked for, and all are given up.
    assert float(shelf[6][0].sum()) == 18
    del shelf[5]
    assert float(shelf[4][0].sum()) == 12 and float(shelf[1][0].sum()) == 3
    assert [copy.is_done for copy in copies[-3:]] == [True, True, False], "of layers 3, 1 and 0"
    shelf.clear()
    assert all(copy.is_done for copy in copies)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpointed"])
def test_keys_values_and_their_gradients_leave_the_device_when_another_layer_asks(monkeypatch, checkpoint):
    model, refs, most = build(checkpoint=checkpoint), {"leaf": [], "grad": []}, {"leaf": 0, "grad": 0}
    get = Shelf.__getitem__

    def spy(self, key):
        found = get(self, key)
        name = "grad" if self._written else "leaf"
        refs[name] += [(key, StorageWeakRef(x.untyped_storage())) for x in found]
        most[name] = max(most[name], len({key for key, ref in refs[name] if not ref.expired()}))
        return found

    without = measure(model)
    monkeypatch.setattr(Shelf, "__getitem__", spy)
    assert same_bits(measure(model, offload=True), without)
    assert len({key for key, _ in refs["leaf"]}) == len({key for key, _ in refs["grad"]}) == LAYERS
    assert most == {"leaf": 1, "grad": 1}


@pytest.mark.parametrize("broken", ["gradients are not brought back", "keys of another layer"])
def test_a_shelf_that_is_broken_on_purpose_shows(monkeypatch, broken):
    model, get = build(), Shelf.__getitem__

    def wrong(self, key):
        if broken == "keys of another layer":
            return get(self, key if self._written else (key + 1) % LAYERS)
        self._written = False
        return get(self, key)

    without = measure(model)
    monkeypatch.setattr(Shelf, "__getitem__", wrong)
    found = measure(model, offload=True)
    assert max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, without, strict=True)) > 1e-2


def test_what_the_host_has_no_room_for_stays_on_the_device(monkeypatch, pages):
    """Pages for the activations and for some of the keys and values."""
    model, asked, reserve = build(), [], HostCopies.reserve
    without = measure(model)
    monkeypatch.setattr(host_memory, "PAGE_BYTES", 4096)
    measure(model, offload=True)
    monkeypatch.setattr(host_memory, "host_room", lambda: 0)
    monkeypatch.setattr(HostCopies, "reserve", lambda self, nbytes: asked.append(1) or reserve(self, nbytes))
    while pages.free:
        asked.clear()
        assert same_bits(measure(model, offload=True), without)
        assert len(asked) < 200, "what stays is not asked for again"
        del pages.free[-40:]


def test_without_room_on_the_host_tensors_stay(monkeypatch, counts):
    model = build()
    without = measure(model)
    monkeypatch.setattr(host_memory, "host_room", lambda: host_memory.PAGE_BYTES - 1)
    assert same_bits(measure(model, offload=True), without)
    assert not any(counts.values())


def test_where_the_host_refuses_a_page_tensors_stay(monkeypatch, counts, caplog):
    """By a limit on locked memory, for example, which `host_room` does not see."""

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *size, **options):
            raise RuntimeError("CUDA error: out of memory")

    model = build()
    without = measure(model)
    monkeypatch.setattr(host_memory, "torch", Torch())
    host_pages.cache_clear()
    assert same_bits(measure(model, offload=True), without)
    host_pages.cache_clear()
    assert not any(counts.values()) and caplog.text.count("stays on the GPU: CUDA error: out of memory") == 1


def test_prefetch_out_of_device_memory_is_left_to_demand(monkeypatch, counts):
    model, copy_in = build(), OffloadedPrefixCache._copy_in
    prefetch = OffloadedPrefixCache._prefetch

    def full(self, dormant):
        raise torch.OutOfMemoryError("as the allocator says it")

    def prefetch_in_full_memory(self):
        monkeypatch.setattr(OffloadedPrefixCache, "_copy_in", full)
        prefetch(self)
        monkeypatch.setattr(OffloadedPrefixCache, "_copy_in", copy_in)

    without = measure(model)
    monkeypatch.setattr(OffloadedPrefixCache, "_prefetch", prefetch_in_full_memory)
    assert same_bits(measure(model, offload=True), without)
    assert counts["demand_loads"] and not counts["prefetched_bytes"]


def num_tensors() -> int:
    gc.collect()
    return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("when", ["phase_a", "phase_b", "phase_c", "in_backward"])
def test_an_exception_leaves_nothing_behind(monkeypatch, pages, when):
    model, refs = build(), []
    measure(model, offload=True)
    before, num_pages = num_tensors(), pages.num_pages
    pack, copy_in, calls = OffloadedPrefixCache._pack, OffloadedPrefixCache._copy_in, Counter()

    def spy(self, tensor):
        calls["pack"] += 1
        refs.append(weakref.ref(self))
        refs.append(weakref.ref(tensor)) if tensor.grad_fn is not None else None
        if when == "phase_a" and calls["pack"] == 60:
            raise KeyError("on purpose")
        return pack(self, tensor)

    def broken_copy(self, dormant):
        calls["copy"] += 1
        if when == "in_backward" and calls["copy"] == 8:  # after others, torch leaks the graph: nodes of its own
            raise KeyError("on purpose")
        copy_in(self, dormant)

    @contextmanager
    def sync(last):
        calls["backward"] += 1
        if (when, last) in (("phase_b", False), ("phase_c", True)) and calls["backward"] > 1:
            raise KeyError("on purpose")
        yield

    monkeypatch.setattr(OffloadedPrefixCache, "_pack", spy)
    monkeypatch.setattr(OffloadedPrefixCache, "_copy_in", broken_copy)
    monkeypatch.setattr(offload, "device_room", lambda device: 0)
    try:
        measure(model, offload=True, gradient_sync=sync)
    except KeyError:
        pass
    else:
        raise AssertionError("no exception, nothing tested")
    assert len(pages.free) == pages.num_pages == num_pages, "host pages in use"
    gc.collect()
    assert len(refs) > 60 and not [ref for ref in refs if ref() is not None], "graph, activation or cache alive"
    num_calls = calls["pack"]
    (torch.randn(5000, requires_grad=True).exp() * 2).sum()
    assert calls["pack"] == num_calls, "hooks are still on"
    model.zero_grad()
    measure(model, offload=True)
    assert num_tensors() <= before


def test_backward_after_leaving_is_refused(pages, counts):
    with OffloadedPrefixCache(CPU, counts) as cache:
        x = torch.randn(3000, requires_grad=True)
        with cache.saving():
            y = (x * 2).exp().sum()
    assert len(pages.free) == pages.num_pages == 1
    with pytest.raises(RuntimeError, match="was left before"):
        y.backward()


@pytest.mark.more
def test_fifty_steps_grow_neither_pages_nor_tensors(pages, counts):
    model = build()

    def step(i: int) -> None:
        run_shared(model, random_rollouts(SHAPE[i % 2 :], 97, seed=i), "phased", wave_tokens=19, offload=True)

    for i in range(3):
        step(i)
    before, num_pages = num_tensors(), pages.num_pages
    for i in range(50):
        step(i)
    assert (num_tensors(), pages.num_pages, len(pages.free)) == (before, num_pages, num_pages)


def test_host_room_leaves_an_eighth_of_machine_and_of_each_limit_above_the_process(monkeypatch, tmp_path):
    """As in a container, whose limit is the root's, and in Slurm's job, whose limit is above the task's cgroup."""
    (tmp_path / "meminfo").write_text("MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable: 5000 kB\nHugePages_Total: 0\n")
    (tmp_path / "own").write_text("4:memory:/v1\n0::/slurm/job_7/task_0\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_CGROUP", tmp_path / "own")

    def limit(cgroup: str, limit: str, used: int = 0):
        (tmp_path / cgroup).mkdir(parents=True, exist_ok=True)
        (tmp_path / cgroup / "memory.max").write_text(f"{limit}\n")
        (tmp_path / cgroup / "memory.current").write_text(f"{used + 100}\n")
        (tmp_path / cgroup / "memory.stat").write_text("anon 1\ninactive_file 100\n")

    assert host_memory.host_room() == 4000 << 10
    limit("", "max")
    limit("slurm/job_7/task_0", "max")
    limit("slurm/job_8", "8")
    assert host_memory.host_room() == 4000 << 10
    limit("slurm/job_7", "1600", 700)
    assert host_memory.host_room() == 1400 - 700
    limit("", "800", 400)
    assert host_memory.host_room() == 700 - 400
    (tmp_path / "own").write_text("0::/\n")
    assert host_memory.host_room() == 700 - 400
    (tmp_path / "own").unlink()
    assert host_memory.host_room() == 700 - 400


def test_pages_are_taken_where_the_room_of_the_host_is_not_known(monkeypatch, tmp_path, pages):
    """As on macOS, which has no /proc/meminfo."""
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "none")
    assert host_memory.host_room() is None
    assert pages.take() is not None


def test_a_storage_that_is_back_and_never_asked_for_waits_for_its_copy_before_it_is_freed(monkeypatch):
    """MOCK: the event behind a copy to the device, which on CPU there is none of."""
    waited, events, to_device = [], [], HostCopies.to_device

    def with_event(self, pieces):
        events.append(object())
        return to_device(self, pieces)[0], events[-1]

    monkeypatch.setattr(HostCopies, "to_device", with_event)
    monkeypatch.setattr(HostCopies, "wait", lambda self, event: waited.append(event))
    with OffloadedPrefixCache(CPU, Counter()) as cache:
        with cache.saving():
            unused = torch.randn(2**12, requires_grad=True).sin()
        cache._end_waves()
        assert len(events) == 1 and not waited
        del unused
        assert waited == events
