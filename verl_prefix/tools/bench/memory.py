"""Memory of an arm: what one update adds at its peak, and the longest rows that train within a limit."""

import gc
import logging
import multiprocessing
import os
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedModel

from verl_prefix.core.plan import Plan
from verl_prefix.tools.bench.arms import Case, arm_plan, build_batch, run_arm
from verl_prefix.tools.bench.options import Options, Size
from verl_prefix.tools.memory import memory_mib, reset_peak_mib

TINY = Size(8, 4, 2)
CAPACITY_STEP, CAPACITY_MOST = 512, 1 << 19


def warm_up(options: Options, arm: str, model: PreTrainedModel) -> None:
    tiny = build_batch(TINY, model.config.vocab_size, options.device)
    case = Case(model, tiny, options.budget_of(TINY), auto=arm_plan(tiny, "phased", TINY.row))
    run_arm(case, arm)
    run_arm(case, arm, train=False)


def added_peak(
    options: Options, arm: str, size: Size, auto: Plan | None = None, model: PreTrainedModel | None = None
) -> dict[str, float]:
    """MiB that one update adds at its peak to model, gradients, inputs and what a tiny update leaves behind.

    Args:
        model: None: one of its own, for a fresh process on a CPU: memory that an earlier run freed and the process
            still holds would hide a part.
    """
    torch.set_num_threads(options.threads)
    model = model or options.model()
    case = Case(model, build_batch(size, model.config.vocab_size, options.device), options.budget_of(size), auto=auto)
    warm_up(options, arm, model)
    before = reset_peak_mib(options.device)
    run_arm(case, arm)
    return {"added_peak_mib": memory_mib(options.device)[1] - before}


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function` in a new process, where nothing has run yet; a server keeps imported modules ready."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # glibc there gives freed memory back at once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as fresh:
        return fresh.submit(_quietly, function, *args).result()


def _quietly(function: Callable[..., Any], *args: Any) -> Any:
    logging.getLogger("verl_prefix").setLevel(logging.ERROR)  # which kernel is taken was said before
    return function(*args)


def longest_total(trains: Callable[[int], bool], step: int = CAPACITY_STEP, most: int = CAPACITY_MOST) -> int:
    """The largest multiple of `step` for which `trains(total)` holds (0: none): doubling up to `most`, bisecting."""
    good, bad = 0, step
    while trains(bad):
        good, bad = bad, 2 * bad
        if bad > most:
            return good
    between = range(good + step, bad, step)
    return good + step * bisect_left(between, True, key=lambda total: not trains(total))


def capacity(options: Options, arm: str, size: Size, model: PreTrainedModel) -> int:
    """Prompt and response tokens, in the proportion of `size`, of the longest row that trains within the limit.

    The limit holds model, gradients and all that an update adds: on CUDA as the allocator's limit, on a CPU measured.
    """

    def sized(total: int) -> Size:
        suffix = max(1, round(total * size.suffix / size.row))
        return Size(total - 1 - suffix, suffix, size.group)

    if options.device == "cpu":
        resident = sum(2 * p.numel() * p.element_size() for p in model.parameters()) / 2**20

        def fits(total: int) -> bool:
            added = in_fresh_process(added_peak, options, arm, sized(total))["added_peak_mib"]
            return resident + added <= options.capacity * 1024

        return longest_total(fits)

    def trains(total: int) -> bool:
        batch = build_batch(sized(total), model.config.vocab_size, "cuda")
        try:
            run_arm(Case(model, batch, options.budget_of(batch.size)), arm)
        except torch.OutOfMemoryError:
            return False
        finally:
            free_memory()
        return True

    free_memory()
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.capacity * 2**30 / torch.cuda.mem_get_info()[1]))
    try:
        return longest_total(trains)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def free_memory() -> None:
    """Gives what nobody holds back to the CUDA device, also what waits in cycles of a broken-off update."""
    gc.collect()
    torch.cuda.empty_cache()
