"""Dormant offload where copies are asynchronous: pinned pages, the side stream, events, prefetch and peak memory.

float64 by the dense reference kernel, so that one wrong byte is far above round-off. Uninitialised memory is filled
with NaN: a tensor that backward reads before its copy has come is seen. Does not exercise FSDP2 or more than one GPU.
"""

import gc
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from runners import random_rollouts, run_shared

from verl_prefix.core import host_memory, meter, offload
from verl_prefix.core.host_memory import HostCopies, host_pages
from verl_prefix.core.offload import OffloadedPrefixCache
from verl_prefix.core.shelf import Shelf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

TOLERANCE = 1e-11  # atomic additions of embedding gradients change the last bits from run to run
SHAPE = [(1025, [33, 17, 65]), (511, [20, 9])]


@pytest.fixture(autouse=True)
def nan_in_uninitialised_memory():
    host_pages.cache_clear()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    host_pages.cache_clear()


@pytest.fixture
def counts(monkeypatch) -> Counter:
    """Transfers of all runners of the test."""
    total = Counter()
    monkeypatch.setattr(meter, "Counter", lambda: total)
    return total


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=127, hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, initializer_range=0.05, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).double().cuda().train()


def measure(model, seed: int = 0, **options) -> torch.Tensor:
    """Log-probs and all gradients of one phased run, as one vector."""
    model.zero_grad()
    rollouts = random_rollouts(SHAPE, 127, seed=seed)
    rollouts = type(rollouts)(*([x.cuda() for x in column] for column in vars(rollouts).values()))
    log_probs = run_shared(model, rollouts, "phased", wave_tokens=40, kernel="reference", **options)
    return torch.cat([*log_probs, *(p.grad.flatten() for p in model.parameters())])


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative, and infinite for NaN."""
    return ((ours - truth).norm() / truth.norm()).nan_to_num(nan=float("inf")).item()


def slow_copies(monkeypatch) -> None:
    """Every copy starts some 10 ms late: what runs ahead of it, or takes its memory, shows."""
    copy = HostCopies._copy

    def late(self, into, source):
        with torch.cuda.stream(self._host.stream):
            torch.cuda._sleep(20_000_000)
        copy(self, into, source)

    monkeypatch.setattr(HostCopies, "_copy", late)


@pytest.mark.parametrize("ahead", [1.0, offload.AHEAD], ids=["", "few_ahead"])
@pytest.mark.parametrize("slow", [False, True], ids=["", "slow_copies"])
@pytest.mark.parametrize("room", [2**40, 30 << 20, 0], ids=["prefetched", "some_prefetched", "on_demand"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpointed"])
def test_asynchronous_copies_change_no_result(monkeypatch, model, counts, checkpoint, room, slow, ahead):
    truth = [measure(model, seed) for seed in range(2)]
    monkeypatch.setattr(offload, "device_room", lambda device: room)
    monkeypatch.setattr(offload, "AHEAD", ahead)
    monkeypatch.setattr(host_memory, "LEAVING_BYTES", 1 << 20)
    if slow:
        slow_copies(monkeypatch)
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        for seed in (0, 1, 0):
            assert error(measure(model, seed, offload=True), truth[seed]) < TOLERANCE
    finally:
        model.gradient_checkpointing_disable()
    assert counts["offloaded_bytes"] and bool(counts["prefetched_bytes"]) == bool(room)
    if ahead == 1.0:
        assert room == 0 or counts["prefetched_bytes"] > counts["offloaded_bytes"] // 2
        assert bool(counts["demand_loads"]) if room == 0 else room < 2**40 or not counts["demand_loads"]


def test_backward_that_does_not_wait_for_its_copy_is_far_off(monkeypatch, model):
    copy_in = OffloadedPrefixCache._copy_in

    def no_event(self, dormant):
        copy_in(self, dormant)
        dormant.ready = None

    truth = measure(model)
    slow_copies(monkeypatch)
    monkeypatch.setattr(OffloadedPrefixCache, "_copy_in", no_event)
    assert error(measure(model, offload=True), truth) > 100 * TOLERANCE


def test_a_wave_that_does_not_wait_for_its_keys_and_values_is_far_off(monkeypatch, model):
    truth = measure(model)
    slow_copies(monkeypatch)
    monkeypatch.setattr(Shelf, "_wait", lambda self, shelved: shelved.ready.clear())
    assert error(measure(model, offload=True), truth) > 100 * TOLERANCE


def test_little_waits_for_slow_copies_in_phase_a(monkeypatch, model, counts):
    def phase_a_peak(leaving: int) -> int:
        monkeypatch.setattr(host_memory, "LEAVING_BYTES", leaving)
        peaks = []

        @contextmanager
        def watch(last):
            if not peaks:  # the first wave: phase A is over
                peaks.append(torch.cuda.max_memory_allocated())
            yield

        torch.cuda.reset_peak_memory_stats()
        measure(model, offload=True, gradient_sync=watch)
        return peaks[0]

    measure(model)  # gradients, cuBLAS workspaces
    slow_copies(monkeypatch)
    without = phase_a_peak(1 << 40)
    counts.clear()
    assert without - phase_a_peak(1 << 20) > 0.5 * counts["offloaded_bytes"]


def test_an_idle_device_has_room_to_prefetch_everything(monkeypatch, model, counts):
    monkeypatch.setattr(offload, "AHEAD", 1.0)
    measure(model, offload=True)
    assert counts["prefetched_bytes"] == counts["offloaded_bytes"] and not counts["demand_loads"]


def test_a_full_device_is_left_alone(monkeypatch, model, counts):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, torch.cuda.max_memory_reserved() * 8))
    measure(model, offload=True)
    assert counts["demand_loads"] and counts["prefetched_bytes"] < counts["offloaded_bytes"]


def test_pages_are_pinned_and_used_again(model):
    pages = host_pages(next(model.parameters()).device)
    measure(model, offload=True)
    num_pages = pages.num_pages
    assert num_pages and all(page.is_pinned() for page in pages.free)
    for seed in range(5):
        measure(model, seed, offload=True)
    assert pages.num_pages == len(pages.free) == num_pages


def test_phase_b_peaks_lower_by_what_was_offloaded(model, counts):
    def phase_b_peak(**options) -> int:
        peaks = []

        @contextmanager
        def watch(last):
            if not peaks:  # the first wave: phase A is over
                torch.cuda.reset_peak_memory_stats()
            peaks.append(torch.cuda.max_memory_allocated())  # in the end: as phase C begins
            yield

        measure(model, gradient_sync=watch, **options)
        return peaks[-1]

    measure(model)  # gradients, cuBLAS workspaces
    without, with_offload = phase_b_peak(), phase_b_peak(offload=True)
    assert counts["offloaded_bytes"] > 50 << 20
    assert without - with_offload > 0.9 * counts["offloaded_bytes"]


def test_an_exception_during_copies_frees_pages_and_device_memory(monkeypatch, model):
    slow_copies(monkeypatch)
    measure(model, offload=True)
    truth, pages = measure(model), host_pages(next(model.parameters()).device)
    before = torch.cuda.memory_allocated()

    @contextmanager
    def broken(last):
        if last:
            raise KeyError("on purpose")
        yield

    with pytest.raises(KeyError):
        measure(model, offload=True, gradient_sync=broken)
    gc.collect()  # the traceback, whose frames hold the prefix graph
    assert len(pages.free) == pages.num_pages
    assert torch.cuda.memory_allocated() <= before + (8 << 20)
    assert error(measure(model, offload=True), truth) < TOLERANCE
