"""Pixels on their way from rollout to actor: one row of a prompt's rollouts carries them, the others name that row.

verl's agent loop puts a copy of the pixels with every rollout into TransferQueue. Its storage, every actor worker and
all that lies between then hold G copies (verl/trainer/ppo/v1/agent_loop_tq.py). `prefix_sync` sets
`actor_rollout_ref.rollout.agent.agent_loop_manager_class` to `SharedPixelsManager` where our engine is the only reader;
`engine.travel.pixels` gives the rows their pixels back, in the engine, which loads no agent loop.

    rollout   row a_0_0: {"pixel_values": ..., CARRIES: "a_0_0"}    row a_1_0: {CARRIED_BY: "a_0_0"}
    actor     both rows: {"pixel_values": ...}, one tensor
"""

import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import ray
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_prefix.models.vision import CARRIED_BY, CARRIES, PIXEL_NAMES, share_pixels

# The order of verl's calls that this relies on (verl/experimental/agent_loop/agent_loop.py, ppo/v1/agent_loop_tq.py):
#
#     _run_prompt(prompt)                      a task for every prompt
#         _agent_loop_postprocess(output)      a task for every session
#             _compute_score()                 computes positions of its own, of no row that is put
#             _compute_position_ids(inputs)    for its rows 0, 1, ... in turn; the last to read a row's pixels
#             kv_batch_put(rows)
#
# In the asyncio task that runs a prompt: digests of pixels -> keys of the rows that carry them. In the task of a
# session within it: keys of the rows that it has yet to put.
_carriers: ContextVar[dict[bytes, str]] = ContextVar("carriers")
_keys: ContextVar[Iterator[str]] = ContextVar("keys")


class SharedPixelsWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's agent loop worker; rows of one prompt with the same pixels, bit by bit, put them once."""

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        _carriers.set({})
        await super()._run_prompt(prompt, *args, **kwargs)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        session = f"{kwargs['uid']}_{kwargs['session_id']}_"
        _keys.set(f"{session}{index}" for index in itertools.count())
        try:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
        except BaseException:
            # Its rows are not put, and verl trains on the other sessions'. Until the put begins none of these has named
            # its rows, since verl awaits nothing between their pixels and the put. If the put itself fails, one may
            # have, and `engine.travel.pixels` then ends the update.
            carriers = _carriers.get({})
            for digest in [digest for digest, key in carriers.items() if key.startswith(session)]:
                del carriers[digest]
            raise

    async def _compute_score(self, *args: Any, **kwargs: Any) -> None:
        """As verl's. It makes pixels and positions of its own, for the reward; none of them take a key."""
        keys = _keys.get(iter(()))
        _keys.set(iter(()))
        await super()._compute_score(*args, **kwargs)
        _keys.set(keys)

    def _compute_position_ids(self, input_ids: Any, attention_mask: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        """As verl's, which is the last to read a row's pixels. The row is put with what is then left in `inputs`."""
        positions = super()._compute_position_ids(input_ids, attention_mask, inputs, *rest)
        key = next(_keys.get(iter(())), None)
        if key is not None and (digest := share_pixels([inputs])[0]):
            carrier = _carriers.get({}).setdefault(digest, key)
            inputs[CARRIES if carrier == key else CARRIED_BY] = carrier
            if carrier != key:
                for name in PIXEL_NAMES:
                    inputs.pop(name, None)
        return positions


class SharedPixelsManager(AgentLoopManagerTQ):
    """verl's agent loop manager with `SharedPixelsWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SharedPixelsWorker)
