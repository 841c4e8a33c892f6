"""What the fork server of `spawn` imports once, so that no rank does."""

import gc

import pytest  # noqa: F401
import torch.distributed.checkpoint.state_dict  # noqa: F401
import torch.nested._internal.ops  # noqa: F401
import verl.workers.engine_workers  # noqa: F401
from transformers import AutoModelForImageTextToText
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

import verl_prefix.tools.ab.replay  # noqa: F401
from verl_prefix.core import host_memory

host_memory.host_room = lambda: 2**40  # whatever this machine has free
AutoModelForImageTextToText._model_mapping.keys()  # verl looks a model up among all, whose modules this imports

# Ranks share what is imported here: collections of garbage that walk through it would copy it page by page.
gc.collect()
gc.freeze()
gc.set_threshold(20_000)
