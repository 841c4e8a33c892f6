"""Pixels that one row carries for its group: verl's own agent loop and TransferQueue, with an answer made by hand.

The rollout server is a stub that says the same every time (tests/cpu/test_cpu_rollout_video.py has the real
one); tests/recipes/test_video_run.py trains on rows that came this way.
"""

import asyncio
import itertools
import os
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("torchvision")


import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from ray._private import node
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1 import AgentLoopWorkerTQ
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.replica import TokenOutput

from verl_prefix.engine.travel.pixels import with_carried_pixels
from verl_prefix.models.vision import CARRIED_BY, CARRIES, PIXEL_NAMES
from verl_prefix.testing import write_tiny_vlm
from verl_prefix.tools.plan.compose import compose_config
from verl_prefix.trainer.prefix_sync import MANAGER, PrefixPPOTrainerSync
from verl_prefix.trainer.shared_pixels import SharedPixelsManager, SharedPixelsWorker

pytestmark = pytest.mark.more
G = 4
StockWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class Client:
    async def generate(self, **_: object) -> TokenOutput:
        return TokenOutput(token_ids=[90, 91], log_probs=[-1.0, -1.0], num_preempted=0, extra_fields={})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, python: str) -> Iterator[DictConfig]:
    model = write_tiny_vlm(tmp_path_factory.mktemp("model"), family="qwen3_vl")
    composed = compose_config(
        "ppo_trainer",
        ["model_engine=prefix", "+platform=cpu", f"actor_rollout_ref.model.path={model}", "data.image_patch_size=4",
         f"actor_rollout_ref.rollout.n={G}", "trainer.v1.trainer_mode=prefix_sync", "algorithm.adv_estimator=grpo"]
    )  # fmt: skip
    OmegaConf.resolve(composed)
    runtime_env = {"py_executable": python}
    clock = SimpleNamespace(**vars(node.time) | {"monotonic": lambda: 0.0})
    with mock.patch.object(node, "time", clock):  # Ray gives a node 30 seconds to start, whatever else runs
        ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env=runtime_env)
    composed.transfer_queue.enable = True
    tq.init(composed.transfer_queue)
    yield composed
    tq.close()
    ray.shutdown()


def picture(seed: int) -> Image.Image:
    values = torch.randint(256, (32, 32, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(values.numpy())


def roll_out(
    worker_class: type, config: DictConfig, uid: str, *media: Image.Image | None, status: str = "finished"
) -> dict[str, dict]:
    """All rows of a prompt as TransferQueue has them, by key; session n sees the n-th of `media`, or the only one."""
    worker = worker_class(config, Client())
    pictures = itertools.cycle(media)
    run_session = worker._run_agent_loop

    async def session(*args: object, **kwargs: object) -> None:
        image = next(pictures)
        content = [{"type": "text", "text": "What is it?"}]
        content += [] if image is None else [{"type": "image", "image": image}]
        await run_session(*args, **kwargs | {"raw_prompt": [{"role": "user", "content": content}]})

    worker._run_agent_loop = session
    prompt = {"uid": uid, "agent_name": "single_turn_agent", "index": 0, "global_steps": 1}
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
    asyncio.run(worker._run_prompt(prompt, {}, trajectory))
    listed = tq.kv_list("train")["train"]
    assert listed[uid]["status"] == status
    keys = [key for session in range(G) if (key := f"{uid}_{session}_0") in listed]
    found = tq.kv_batch_get(keys=keys, partition_id="train")
    return {
        key: {name: found[name][i] for name in ("position_ids", "multi_modal_inputs")} for i, key in enumerate(keys)
    }


def inputs(rows: dict[str, dict]) -> list[dict]:
    return [row["multi_modal_inputs"] for row in rows.values()]


def size(rows: dict[str, dict]) -> int:
    return sum(len(pickle.dumps({name: x.get(name) for name in PIXEL_NAMES})) for x in inputs(rows))


def check(rows: list[dict], expected: list[dict]) -> None:
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        assert all(torch.equal(row[name], other[name]) for name in row)


def test_one_row_carries_the_pixels_of_all_and_each_gets_them_back(config):
    stock = roll_out(StockWorker, config, "stock", picture(1))
    shared = roll_out(SharedPixelsWorker, config, "shared", picture(1))
    assert sum("pixel_values" in row for row in inputs(stock)) == G
    assert sum("pixel_values" in row for row in inputs(shared)) == 1
    assert size(shared) < size(stock) / G + 200 * G  # what pickle needs for nothing
    for key, other in zip(shared, stock, strict=True):
        assert torch.equal(shared[key]["position_ids"], stock[other]["position_ids"])
    for _ in range(2):  # epochs over the same rows
        rows = with_carried_pixels(inputs(shared))
        check(rows, inputs(stock))
        assert len({row["pixel_values"].data_ptr() for row in rows}) == 1


def test_sessions_that_see_something_else_carry_their_own(config):
    media = picture(1), picture(2), picture(1), picture(2)
    stock = roll_out(StockWorker, config, "stock2", *media)
    rows = inputs(roll_out(SharedPixelsWorker, config, "shared2", *media))
    assert sum("pixel_values" in row for row in rows) == 2
    rows = with_carried_pixels(rows)
    check(rows, inputs(stock))
    assert not torch.equal(rows[0]["pixel_values"], rows[1]["pixel_values"])


def test_text_stays_as_it_is(config):
    assert inputs(roll_out(SharedPixelsWorker, config, "text", None)) == inputs(
        roll_out(StockWorker, config, "t", None)
    )


def test_a_carrier_in_another_mini_batch_is_fetched(config):
    stock = inputs(roll_out(StockWorker, config, "stock3", picture(3)))
    rows = inputs(roll_out(SharedPixelsWorker, config, "shared3", picture(3)))
    (carrier,) = (row for row in rows if CARRIES in row)
    others = [row for row in rows if CARRIED_BY in row]
    *seen, empty, none = with_carried_pixels([*others, {}, None])
    check(seen, stock[1:])
    assert not empty and not none
    key = carrier[CARRIES]
    check(with_carried_pixels([carrier]), stock[:1])

    tq.kv_clear(keys=[key], partition_id="train")
    error = f"{key}.*agent_loop_manager_class=verl.trainer.ppo.v1.AgentLoopManagerTQ"
    with pytest.raises(RuntimeError, match=error):
        with_carried_pixels([{CARRIED_BY: key}])
    with pytest.raises(RuntimeError, match=error):  # one of two is gone
        with_carried_pixels([{CARRIED_BY: key}, {CARRIED_BY: "stock3_0_0"}])


def test_a_session_that_fails_carries_nothing_for_the_others(config, monkeypatch):
    """verl trains on the rows of the sessions that ended, whatever became of the first."""
    real, calls = AgentLoopOutput.as_dict, itertools.count()

    def first_fails(output: AgentLoopOutput) -> dict:
        if next(calls) == 0:
            raise IndexError("index -1 is out of bounds")
        return real(output)

    monkeypatch.setattr(AgentLoopOutput, "as_dict", first_fails)
    rows = inputs(roll_out(SharedPixelsWorker, config, "failing", picture(4), status="failure"))
    assert len(rows) == G - 1 and sum("pixel_values" in row for row in rows) == 1
    rows = with_carried_pixels(rows)
    assert all(torch.equal(row["pixel_values"], rows[0]["pixel_values"]) for row in rows)


def test_a_worker_that_starts_with_the_agent_loop_has_the_trainers(fresh, tmp_path):
    """Ray unpickles the worker's class before anything else has imported verl."""
    code = (
        "import verl_prefix.trainer.shared_pixels, sys; sys.exit('verl_prefix.trainer.prefix_sync' not in sys.modules)"
    )
    done = fresh(code, tmp_path, dict(os.environ))
    assert done.returncode == 0, done.stderr


def test_the_trainer_asks_for_it_where_our_engine_alone_reads_pixels(config, monkeypatch):
    class Stop(Exception):
        pass

    def stop(self: object, config: DictConfig) -> None:
        raise Stop

    def chosen(**changes: object) -> str | None:
        found = config.copy()
        for key, value in changes.items():
            OmegaConf.update(found, key.replace("__", "."), value, force_add=True)
        with pytest.raises(Stop):
            PrefixPPOTrainerSync(found)
        return OmegaConf.select(found, "actor_rollout_ref.rollout.agent.agent_loop_manager_class")

    monkeypatch.setattr(PrefixPPOTrainerSync.__bases__[1], "__init__", stop)  # verl's
    assert chosen() == MANAGER and load_class_from_fqn(MANAGER) is SharedPixelsManager
    assert chosen(model_engine="dp") is None
    assert chosen(critic__enable=True) is None
    of_verl = "verl.workers.config.FSDPActorConfig"
    assert chosen(actor_rollout_ref__ref___target_=of_verl) == MANAGER, "no ref is built"
    kl = "actor_rollout_ref__actor__use_kl_loss"
    assert chosen(**{kl: True}) == MANAGER
    assert chosen(**{kl: True}, actor_rollout_ref__ref___target_=of_verl) is None
    assert chosen(skip__rollout_tq__enable=True) is None
    assert chosen(trainer__v1__sampler__custom_sampler__path="sampler.py") is None
    assert chosen(actor_rollout_ref__rollout__agent__agent_loop_manager_class="my.Manager") == "my.Manager"
