"""The kernels of a GPU on shapes that they have not met elsewhere."""

import statistics
import time

import torch

from smoke.checks import Checks
from verl_prefix.core.calls import Call, Spans
from verl_prefix.core.kernels import Kernel, aten, cpu, flash_attn, reference

_COMPARED = 128  # the last queries; a dense truth of 64k would not fit


def kernels(checks: Checks) -> None:
    """Each kernel by the noise floor of the dense reference in bf16, against it in float64."""
    device, heads, dim, long = ("cpu", (4, 2), 32, 2048) if checks.dry_run else ("cuda", (32, 8), 128, 65536)
    modules = [cpu] if checks.dry_run else [kernel for kernel in (flash_attn, aten) if not kernel.unavailable()]
    assert modules, f"no kernel runs here: {aten.unavailable()}; {flash_attn.unavailable()}"
    reads, beside = (0, 700, 1500, 1900), (0, 1, 2, 131, 132)
    # What a kernel computes, and what of it is compared.
    cases = {
        "suffixes of one token read prefixes (max_q 1)": (
            Spans((0, 1, 2, 3), reads),
            Spans((0, 1, 2, 3), reads),
            False,
        ),
        "suffixes of one token beside longer ones": (Spans(beside, beside), Spans(beside, beside), True),
        f"a prefix of {long} tokens": (Spans((0, long), (0, long)), Spans((0, _COMPARED), (0, long)), True),
    }
    for kernel in modules:
        for case, (spans, compared, causal) in cases.items():
            torch.manual_seed(0)
            q = torch.randn(spans.q[-1], heads[0], dim, device=device, dtype=torch.bfloat16)
            k, v = (torch.randn(spans.k[-1], heads[1], dim, device=device, dtype=torch.bfloat16) for _ in range(2))
            dout, last = torch.randn_like(q), slice(len(q) - compared.q[-1], None)
            dout[: last.start] = 0
            out, *grads = _run(kernel, dout, q, k, v, spans, causal)
            found = out[last], grads[0][last], *grads[1:]
            truth, rounded = (
                _run(reference, *(x.to(dtype) for x in (dout[last], q[last], k, v)), compared, causal)
                for dtype in (torch.float64, torch.bfloat16)
            )
            for name, true, low, ours in zip(("out", "dq", "dk", "dv"), truth, rounded, found, strict=True):
                error, noise = (((x.double() - true).norm() / true.norm()).item() for x in (ours, low))
                # As tests/gpu: the dense reference rounds once, a flash kernel its probabilities as well.
                checks.that(f"{kernel.__name__}, {case}: error of {name}", error, most=2 * noise + 2**-9)
        ratio = _of_two_calls(kernel, 128 if checks.dry_run else 8192, heads, dim, device)
        checks.on_gpu(f"{kernel.__name__}, a prefix and 64 short suffixes: seconds of one causal call over two", ratio)


def _of_two_calls(kernel: Kernel, prefix: int, heads: tuple[int, int], dim: int, device: str) -> float:
    """Seconds, forward and backward, of a causal call whose grid is that of its longest segment, over those of a call
    for the prefix and one for suffixes."""
    bounds = (0, *range(prefix, prefix + 65 * 128, 128))
    suffixes = tuple(bound - prefix for bound in bounds[1:])
    q = torch.randn(bounds[-1], heads[0], dim, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(bounds[-1], heads[1], dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    parts = ((slice(prefix), Spans((0, prefix), (0, prefix))), (slice(prefix, None), Spans(suffixes, suffixes)))
    ways = {1: ((slice(None), Spans(bounds, bounds)),), 2: parts}
    seconds: dict[int, list[float]] = {calls: [] for calls in ways}
    for _ in range(7):
        for calls, way in ways.items():
            torch.cuda.synchronize() if device == "cuda" else None
            start = time.perf_counter()
            for part, spans in way:
                _run(kernel, q[part], q[part], k[part], v[part], spans, causal=True)
            torch.cuda.synchronize() if device == "cuda" else None
            seconds[calls].append(time.perf_counter() - start)
    return statistics.median(seconds[1]) / statistics.median(seconds[2])


def _run(
    kernel: Kernel, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, causal: bool
) -> tuple[torch.Tensor, ...]:
    """Output, and gradients of q, k and v."""
    call = Call(spans, causal, q.shape[-1] ** -0.5)
    out, lse = kernel.forward(q, k, v, call)
    return out, *kernel.backward(dout, (q, k, v, out, lse), call)
