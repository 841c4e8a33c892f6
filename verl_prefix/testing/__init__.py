"""What tests, benchmarks and the demo share: tiny models, random rollouts, a reward."""

from typing import Any

from verl_prefix.testing.rollouts import Rollouts
from verl_prefix.testing.tiny_models import visual_prompt, write_tiny_model, write_tiny_vlm

__all__ = ["Rollouts", "letter_share", "visual_prompt", "write_tiny_model", "write_tiny_vlm"]


def letter_share(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any) -> float:
    """The share of letters in a response: a reward for verl that differs within a group, even of a random model."""
    return sum(char.isalpha() for char in solution_str) / max(len(solution_str), 1)
