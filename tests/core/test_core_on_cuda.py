"""What runs on CUDA alone, in core and auto. MOCK: torch's calls of a device that no CPU has; all else is real.

`package/test_cuda_only.py` lists every place, and where it runs.
"""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from verl_prefix.auto import calibration, cost
from verl_prefix.auto.cost import Rates
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core import host_memory, meter
from verl_prefix.core.kernels import aten, merge
from verl_prefix.core.pass_notes import PassNote

CUDA = torch.device("cuda")


def test_the_fused_merge_is_taken_where_triton_is_installed(monkeypatch):
    pytest.importorskip("triton")
    merge._fused_merge.cache_clear()
    assert merge._fused_merge("cpu") is None
    from verl_prefix.core.kernels import fused_merge

    assert merge._fused_merge("cuda") is fused_merge.merge_into
    merge._fused_merge.cache_clear()
    monkeypatch.setitem(sys.modules, fused_merge.__name__, None)  # as where triton is missing
    monkeypatch.delattr("verl_prefix.core.kernels.fused_merge")
    assert merge._fused_merge("cuda") is None
    merge._fused_merge.cache_clear()


def test_phases_are_timed_by_events_for_which_only_the_reader_waits(monkeypatch):
    now, waited = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            waited.append(self)

        def elapsed_time(self, end: "Event") -> float:
            assert end in waited, "torch raises: the device is not there yet"
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    found = meter.Meter()
    for name, milliseconds in (("phase_a", 250.0), ("wave", 1000.0), ("phase_a", 500.0)):
        with found.phase(PassNote(name, []), CUDA):
            now[0] += milliseconds
    assert not waited
    assert found.seconds == {"phase_a": 0.75, "wave": 1.0}


def test_the_host_waits_for_the_oldest_copies_where_too_much_is_on_its_way(monkeypatch):
    """And the passes wait for what comes back, and for the last copy before memory is freed."""
    said = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device == CUDA

        def wait_stream(self, other: object) -> None:
            said.append(f"copies wait for {other}")

        def record_event(self) -> SimpleNamespace:
            number = sum(word.startswith("event") for word in said)
            said.append(f"event {number}")
            return SimpleNamespace(number=number, synchronize=lambda: said.append(f"host waits for {number}"))

    class Passes:
        def __str__(self) -> str:
            return "the passes"

        def wait_event(self, event: SimpleNamespace) -> None:
            said.append(f"passes wait for {event.number}")

        def wait_stream(self, stream: Stream) -> None:
            said.append("passes wait for copies")

    device = SimpleNamespace(
        Stream=Stream, current_stream=lambda device: Passes(), stream=lambda stream: contextlib.nullcontext()
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(host_memory, "LEAVING_BYTES", 100)
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda source, stream: kept.append((len(source), stream)))
    pages = host_memory.HostPages(CUDA)
    monkeypatch.setattr(host_memory, "host_pages", lambda _: pages)
    copies = host_memory.HostCopies(CUDA)
    sources = [torch.full([size], size, dtype=torch.uint8) for size in (60, 50, 10, 90)]
    targets = [torch.zeros_like(source) for source in sources]
    for source, target in zip(sources, targets, strict=True):
        copies.to_host([target[:7], target[7:]], source)
    assert all(map(torch.equal, sources, targets))
    assert kept == [(size, pages.stream) for size in (60, 50, 10, 90)], "the allocator may not reuse it before"
    before = "copies wait for the passes"
    first, last = [before, "event 0"], ["event 3", "host waits for 1"]
    assert said == [*first, before, "event 1", "host waits for 0", before, "event 2", before, *last]
    said.clear()
    copies.device = torch.device("cpu")  # where memory is
    back, event = copies.to_device([targets[0][:7], targets[0][7:]])
    copies.wait(event)
    copies.close()
    assert torch.equal(back, sources[0])
    assert said == [before, "event 0", "passes wait for 0", "passes wait for copies"]


@pytest.mark.parametrize(
    ("capability", "hip", "built", "why"),
    [
        ((8, 0), None, True, None),
        ((9, 0), None, True, None),
        ((7, 5), None, True, "the GPU is sm_75, older than sm_80"),
        ((9, 0), "6.4", True, "this torch was built without CUDA flash attention"),
        ((9, 0), None, False, "this torch was built without CUDA flash attention"),
    ],
)
def test_torchs_own_flash_attention_runs_from_sm_80_on(monkeypatch, capability, hip, built, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    assert aten.unavailable() == why
    monkeypatch.setattr(aten, "schema_error", lambda: "other arguments")
    assert aten.unavailable() == (why if why and "built" in why else "other arguments")


def test_a_pass_is_measured_until_the_device_has_computed_it(monkeypatch):
    """The device starts when the host waits for it: without that, every pass takes no time at all."""
    shape = ModelShape(2e6, 1e6, 500.0, (None, 8), 100.0, 10.0, 5.0, 50)
    true, clock, queue = Rates(1e-3, 3e-12, 5e-12, 2e-12), [0.0], []

    class Torch:
        cuda = SimpleNamespace(synchronize=lambda: clock.__setitem__(0, clock[0] + sum(queue)) or queue.clear())

        def __getattr__(self, name):
            return getattr(torch, name)

        def arange(self, end, device):
            return torch.arange(end)  # there is no other device

    def schedule(outputs, step, backward):
        def run(tokens, plan):
            (packed,) = plan.passes
            queue.append(true.seconds(shape, [shape.pass_of(packed.groups)]))

        return SimpleNamespace(run=run)

    monkeypatch.setattr(calibration, "torch", Torch())
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    found = calibration.measure(shape, 10**5, 10**7, CUDA, schedule, contextlib.nullcontext, forward_only=True)
    batch = [cost.PassCost(20000, 300, 4e6)]
    assert found.seconds(shape, batch) == pytest.approx(true.seconds(shape, batch), rel=0.05) and not queue
