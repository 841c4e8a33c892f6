"""Gated delta rules in chunks of 16 tokens instead of 64, which transformers' code for a CPU pads every row to: the
same maths in a quarter of its steps, and in rows of the tests' lengths more chunks."""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def short_chunks() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"):
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            rule = inspect.unwrap(module.torch_chunk_gated_delta_rule)  # since 5.15 behind one that looks for packages
            size, *others = rule.__defaults__
            assert size == 64, (family, size)
            stack.enter_context(mock.patch.object(rule, "__defaults__", (16, *others)))
        yield
