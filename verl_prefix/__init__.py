"""Shared-prefix GRPO for verl's actors, and for any other loop over a Hugging Face model (`verl_prefix.api`).

Imports neither verl nor ray: Ray may unpickle our classes first. The functions below load torch when first asked for.
"""

__version__ = "0.1.0"
__all__ = ["message_ends", "phased_update", "response_hidden_states", "response_log_probs"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    from verl_prefix import api

    return getattr(api, name)
