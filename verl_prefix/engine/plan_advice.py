"""What the log says once of a plan: rows that are too long for it, keys that it does not heed, stages that wait."""

import logging

import torch

from verl_prefix.config.actor import pass_size_key
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.planning import leaves_room
from verl_prefix.engine.rows import BatchRows
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


def tell_of_long_rows(rows: BatchRows, budget: int, role: str, forward_only: bool) -> None:
    """Says once that a row alone is over the budget of a pass.

    Args:
        role: the engine's, a key that `config.actor.role_of` returns.
    """
    if any(a + b > budget for a, b in zip(rows.prompt_lens, rows.response_lens, strict=True)):
        warn_once(
            logger,
            "prefix: a row alone is over the %d tokens of a pass (of all ranks that share it), where verl's own path "
            "would stop; raise %s",
            budget,
            pass_size_key(role, forward_only),
        )


def tell_of_wave_tokens(options: PrefixConfig, budget: int, role: str) -> None:
    """Says once that passes of this budget do not heed `prefix.wave_tokens`.

    Args:
        role: as in `tell_of_long_rows`.
    """
    waves, offload = options.wave_tokens, options.offload
    if waves is None or leaves_room(waves, budget, offload):
        return
    why = "is over the %d tokens of a pass" if offload else "leaves nothing for prefixes of the %d tokens of a pass"
    text = f"prefix: prefix.wave_tokens=%d {why}, and is ignored there; set a smaller number, or null"
    warn_once(logger, text, waves, budget, key=role)


def tell_of_bubble(bubble: float, role: str) -> None:
    """Says once how long the stages of a pipeline are expected to wait, as a share of an update.

    Args:
        role: as in `tell_of_long_rows`.
    """
    if torch.distributed.get_rank() == 0:
        text = "prefix: stages of the pipeline are expected to wait %.0f%% of an update"
        warn_once(logger, text, 100 * bubble, key=role)
