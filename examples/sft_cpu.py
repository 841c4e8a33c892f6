"""verl's SFT trainer on one CPU rank: `VERL_PLATFORM=cpu python examples/sft_cpu.py OVERRIDES`.

`python -m verl.trainer.sft_trainer` ends there with "Duplicate device type cpu": verl 0.9.1 asks torch for the backends
`cpu:gloo,<device>:<its backend>`, and both are of the CPU. The function that asks is replaced, nothing else. (GRPO's
workers call another one, which verl_prefix.cpu.platform gets ahead of.)
"""

import os
from datetime import timedelta

import torch.distributed as dist
import verl.utils.distributed
from verl.trainer.sft_trainer import main


def one_rank(timeout_second: int = 36000) -> tuple[int, int, int]:
    """Makes the default group of this process alone; returns local rank, rank and world size, as verl's does."""
    dist.init_process_group(
        "cpu:gloo", timeout=timedelta(seconds=timeout_second), store=dist.HashStore(), rank=0, world_size=1
    )
    return 0, 0, 1


if __name__ == "__main__":
    # verl's workers read them.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    verl.utils.distributed.initialize_global_process_group = one_rank
    main()
