"""Names of a batch's fields and flags."""

from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

PIXEL_INPUTS = "multi_modal_inputs"  # verl's, of a row's pixels by the names of `models.vision.PIXEL_NAMES`
ROUTES = "routed_experts"  # verl's, of the experts that each token went to, in the rollout or in old log-probs
RECORDS = "records_routes"  # our flag of a batch whose log-probs add that field to it
TEACHER = ("teacher_ids", "teacher_logprobs")  # verl's, which its top-k losses read (verl/trainer/distillation)


def flag(data: TensorDict, name: str, default: Any = False) -> Any:
    """Reads a value that a batch has once."""
    return tu.get_non_tensor_data(data, name, default)
