"""Router replay: which expert routes a batch replays, or whether its passes record them."""

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.config.actor import NO_REPLAY, NO_ROUTES
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.fields import RECORDS, ROUTES


def with_routes(backend: Backend, data: TensorDict, forward_only: bool, computes_ref: bool) -> TensorDict:
    """Returns the batch with the routes that it replays. Ref and values replay none. Nor do old log-probs in mode R2,
    which replays what these recorded: their batch gets the flag `RECORDS`, by which passes record.

    Args:
        data: may get the flag.
        computes_ref: the actor computes log-probs of ref.

    Raises:
        ValueError: the batch has routes that nobody replays, or has none, or those of another model.
    """
    if backend.ignores_routes or computes_ref:
        return data.exclude(ROUTES)
    replay, has_routes = backend.replay, ROUTES in data.keys()
    if replay is None:
        if has_routes:
            raise ValueError(NO_REPLAY)
        return data
    if forward_only and replay.mode == "R2":
        data = data.exclude(ROUTES)
        tu.assign_non_tensor(data, **{RECORDS: True})
        return data
    if not has_routes:
        raise ValueError(NO_ROUTES[replay.mode])
    if not data[ROUTES].is_nested:
        raise ValueError(f"{ROUTES} is no jagged tensor of rows; it has to say where each of their tokens goes")
    layers_and_experts, wanted = [*data[ROUTES].values().shape[1:]], [replay.layers, replay.chosen]
    if layers_and_experts != wanted:
        raise ValueError(f"{ROUTES} has {layers_and_experts} layers and experts of a token, and the model {wanted}")
    return backend.aligned_routes(data)
