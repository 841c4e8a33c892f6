"""Options of a shared prefix."""

import math
from dataclasses import dataclass

from verl.base_config import BaseConfig

from verl_prefix.config.engines import SWITCHES
from verl_prefix.config.model import is_count, refuse

SCHEDULES = ("auto", "packed", "phased", "stock")
CHOICES = {
    "schedule": SCHEDULES,
    "exchange": ("auto", "off"),
    "trees": ("uid", "batch", "off"),
    "mini_batches": ("rows", "prompts"),
    "loss_weights": ("rows", "sessions"),
    "keep_attention": ("auto", "off"),
    "attention": ("auto", "cpu", "flash_attn", "aten", "reference"),
    "verify_action": ("raise", "fallback"),
}


@dataclass
class PrefixConfig(BaseConfig):
    """`actor_rollout_ref.actor.prefix.*`; the keys are documented in config/prefix/options.yaml.

    Raises:
        ValueError: a value is not one of those listed, or a key has nothing to do beside the others.
    """

    schedule: str = "auto"
    exchange: str = "auto"
    trees: str = "uid"
    mini_batches: str = "rows"
    loss_weights: str = "rows"
    wave_tokens: int | None = None
    logits_chunk: int | None = None
    offload: bool = False
    skip_zero_advantage: bool = False
    keep_attention: str = "auto"
    attention: str = "auto"
    min_speedup: float = 1.05
    verify: str | int = "first_step"
    verify_action: str = "raise"
    trace_dir: str | None = None
    trace_max_steps: int = 100
    trace_max_gib: float = 8.0

    def __post_init__(self) -> None:
        def check(wrong: object, key: str, why: str) -> None:
            refuse(wrong, f"actor_rollout_ref.actor.prefix.{key}={getattr(self, key)!r}{why}")

        for key in SWITCHES:
            if getattr(self, key) is False:
                object.__setattr__(self, key, "off")
        for key, allowed in CHOICES.items():
            check(getattr(self, key) not in allowed, key, f": set one of {', '.join(allowed)}")
        for key in ("wave_tokens", "logits_chunk"):
            tokens = getattr(self, key)
            check(tokens is not None and not is_count(tokens), key, ": set a number of tokens >= 1")
        here = f"with prefix.schedule={self.schedule!r}"
        has_waves = self.schedule in ("auto", "phased")
        if self.wave_tokens is not None:
            advice = "remove it, or set prefix.schedule to auto or phased"
            check(not has_waves, "wave_tokens", f" sets nothing {here}; {advice}")
        for key in ("offload", "skip_zero_advantage"):
            check(not isinstance(getattr(self, key), bool), key, ": set true or false")
        advice = "set prefix.schedule to auto or phased, or prefix.offload=False"
        check(self.offload and not has_waves, "offload", f" moves nothing {here}; {advice}")
        advice = "remove it, or set prefix.schedule to auto, packed or phased"
        check(self.skip_zero_advantage and self.schedule == "stock", "skip_zero_advantage", f" {here}: {advice}")
        is_known = self.verify in ("first_step", "off") or is_count(self.verify)
        check(not is_known, "verify", ": set first_step, off, or a number n >= 1 for every n updates")
        falls_back = self.verify_action == "fallback"
        check(falls_back and self.verify == "off", "verify_action", " needs prefix.verify, which is off")
        is_ratio = type(self.min_speedup) in (int, float) and 0 <= self.min_speedup < math.inf
        check(not is_ratio, "min_speedup", ": set a number >= 0 (0: always share)")
        is_asked = self.min_speedup not in (0, type(self).min_speedup) and self.schedule in ("packed", "phased")
        check(is_asked, "min_speedup", f" decides nothing {here}; remove it, or set prefix.schedule=auto")
        check(self.trace_dir == "", "trace_dir", ": name a folder, or set null for no trace")
        steps, gib = self.trace_max_steps, self.trace_max_gib
        is_bound = is_count(steps) and type(gib) in (int, float) and gib > 0
        advice = "set at least 1 step and more than 0 GiB, or trace_dir=null for no trace"
        check(not is_bound, "trace_max_steps", f", trace_max_gib={gib!r}: {advice}")
        is_default = (steps, gib) == (type(self).trace_max_steps, type(self).trace_max_gib)
        advice = "bound a trace, and trace_dir is null; remove them, or set trace_dir"
        check(self.trace_dir is None and not is_default, "trace_max_steps", f", trace_max_gib={gib} {advice}")
