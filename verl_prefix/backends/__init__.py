"""A file per engine of verl: what only that engine knows, behind `engine.backend.Backend`.

`fsdp` is verl's FSDP2 engine (`model_engine=prefix`), `stock_path` what verl's own path of a Hugging Face model needs
to be right, `veomni` verl's VeOmni engine (`model_engine=prefix_veomni`), where VeOmni is installed, `megatron` its
Megatron engine (`model_engine=prefix_megatron`), where megatron-core is. Everything else of a mini-batch is the engine
room's (`verl_prefix.engine`).
"""

from verl.workers.engine import MegatronEngineWithLMHead, VeOmniEngineWithLMHead

from verl_prefix.config.megatron import PrefixMegatronEngineConfig
from verl_prefix.config.veomni import PrefixVeOmniEngineConfig

__all__ = ["PrefixMegatronEngineConfig", "PrefixVeOmniEngineConfig"]

if VeOmniEngineWithLMHead is not None:
    import verl_prefix.backends.veomni  # noqa: F401  which registers the engine
if MegatronEngineWithLMHead is not None:
    import verl_prefix.backends.megatron  # noqa: F401  likewise
