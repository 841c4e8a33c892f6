"""What differs between verl's engines, behind `engine.backend.Backend`. `verl_prefix.engine` does all that is the same.

Reading order:

    verl_engines        what is used of verl's engines
    hugging_face        what the backends of FSDP2 and VeOmni have in common
    fsdp                verl's FSDP2 engine, `model_engine=prefix`
    stock_path          what FSDP2's stock path needs to be right
    stock_replay        router replay on FSDP2's stock path
    veomni              verl's VeOmni engine, `model_engine=prefix_veomni`, where verl can import its own
    megatron            verl's Megatron engine, `model_engine=prefix_megatron`, where verl can import its own
    megatron_runner     how Megatron runs a plan's passes
    pipeline            how the stages of a Megatron pipeline run a plan's passes
    megatron_check      the self-check on Megatron

In what the backends differ most:

                        FSDP2                       VeOmni                     Megatron
    gradients reduced   in every backward, or       in every backward          once, after the last backward
                        by a key in the last one
    ranks of one row    sequence-parallel           sequence-parallel          tensor, context, pipeline
    router replay       ours, on both paths         verl's on the stock path   verl's on the stock path
    stock path          set right for the model     verl's                     verl's
    rows' last tokens   count for nothing           count for nothing          train biases and balance of experts
    nested passes       yes                         yes                        with one stage

How a worker gets our engine: it makes the engine config that the YAML names as `_target_`, and so imports the module
in front of that name.

    FSDP2               `verl_prefix.backends.fsdp.<Config>`: that module registers the engine
    VeOmni, Megatron    `verl_prefix.backends.<Config>`: this package registers the engines that verl can import

Both import this package, and with it megatron where it is installed.
"""

import importlib
import logging

from verl.workers.engine import MegatronEngineWithLMHead, VeOmniEngineWithLMHead

from verl_prefix.config.megatron import PrefixMegatronEngineConfig
from verl_prefix.config.veomni import PrefixVeOmniEngineConfig

__all__ = ["PrefixMegatronEngineConfig", "PrefixVeOmniEngineConfig"]

for _name, _engine in {"veomni": VeOmniEngineWithLMHead, "megatron": MegatronEngineWithLMHead}.items():
    if _engine is not None:
        try:
            importlib.import_module(f"verl_prefix.backends.{_name}")  # the module registers the engine
        except ImportError as _reason:  # for example, its package has another version; FSDP2's engine runs all the same
            logging.getLogger(__name__).warning("prefix: model_engine=prefix_%s is not there: %r", _name, _reason)
