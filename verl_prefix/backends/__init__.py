"""What only one engine of verl knows, behind `engine.backend.Backend`. `verl_prefix.engine` does all else.

Reading order:

    hugging_face        what the backends of FSDP2 and VeOmni have in common
    fsdp                verl's FSDP2 engine, `model_engine=prefix`
    stock_path          what FSDP2's stock path needs to be right
    veomni              verl's VeOmni engine, `model_engine=prefix_veomni`, where verl can import its own
    megatron            verl's Megatron engine, `model_engine=prefix_megatron`, likewise
    megatron_runner     how Megatron runs a plan's passes
    pipeline            the same on the stages of a pipeline

In what they differ most:

                        FSDP2                       VeOmni                     Megatron
    gradients reduced   in every backward, or       in every backward          once, after the last backward
                        by a key in the last one
    ranks of one row    Ulysses                     Ulysses                    tensor, context, pipeline
    router replay       ours, on both paths         verl's on the stock path   verl's on the stock path
    stock path          set right for the model     verl's                     verl's
    rows' last tokens   count for nothing           count for nothing          train biases and balance of experts
    nested passes       yes                         yes                        with one stage

How a worker comes to have our engine: it makes the engine config that the YAML names as `_target_`, and so imports
what that name begins with.

    FSDP2               `verl_prefix.backends.fsdp.<Config>`: that module registers the engine
    VeOmni, Megatron    `verl_prefix.backends.<Config>`: this package registers the engines that verl can import

Both run this package, and so import megatron where it is installed.
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
            importlib.import_module(f"verl_prefix.backends.{_name}")  # which registers the engine
        except ImportError as _reason:  # as of another version, beside which FSDP2's engine runs
            logging.getLogger(__name__).warning("prefix: model_engine=prefix_%s is not there: %r", _name, _reason)
