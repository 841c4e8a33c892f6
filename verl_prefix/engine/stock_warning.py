"""A warning in verl's own engine (model_engine=dp), whose packed rows of a recurrent model leak states."""

import functools
import logging

import torch
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_prefix.models.recurrent import packing_leak
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


def packs_rows(config: FSDPEngineConfig) -> bool:
    """Whether a micro-batch of update or log-probs may have several rows."""
    sizes = config.micro_batch_size_per_gpu, config.infer_micro_batch_size_per_gpu
    return config.use_dynamic_bsz or any(size is not None and size > 1 for size in sizes)


def warn_of_leaks() -> None:
    """Makes verl's engine say it, once in a process of rank 0, when it has built its model; nothing else of it changes.

    A patch, since verl tells nobody which model an engine has built.
    """
    initialize = FSDPEngineWithLMHead.initialize
    if not hasattr(initialize, "warns_of_leaks"):  # `doctor` imports the plugin again

        @functools.wraps(initialize)
        def told(self: FSDPEngineWithLMHead) -> None:
            initialize(self)
            # Ours takes one row at a time where it goes verl's own path.
            packs = self.use_remove_padding and packs_rows(self.engine_config)
            is_stock = not isinstance(self, FSDPEngineWithValueHead) and not hasattr(self, "prefix_config")
            if is_stock and packs and torch.distributed.get_rank() == 0:
                if leak := packing_leak(self.module):
                    warn_once(
                        logger,
                        "%s, so that a row's state goes on in the next row of a micro-batch, and log-probs are wrong; "
                        "set actor_rollout_ref.model.use_remove_padding=False, micro-batches of one row, or "
                        "model_engine=prefix",
                        leak,
                    )

        told.warns_of_leaks = True
        FSDPEngineWithLMHead.initialize = told


warn_of_leaks()
