"""`model_engine=prefix` alone under verl's own trainers, on two ranks, beside the stock engine: real verl, Ray, FSDP2
on gloo and HF rollout. The trainers deal a prompt's rows to both ranks; the engine brings them together.

Shows neither vLLM nor CUDA. Of trainers whose rollout has devices of its own: tests/trainer/test_async_run.py.
"""

from pathlib import Path

import pytest
from both_arms import both_arms

ACTOR = "actor_rollout_ref.actor"
# verl's own trainers; the last two are the legacy one, whose batches are padded.
TRAINERS = {
    "sync": ["trainer.v1.trainer_mode=sync"],
    # Without a batch ahead, so that both engines see the same prompts at step 1.
    "colocate_async": ["trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0"],
    "legacy": ["trainer.use_v1=false"],
    # Whole prompts in each of two, which stock's trainer deals by the same key. AdamW would make weights of a rounding
    # error's sign where a gradient is next to nothing, and the second update would compare those.
    "legacy_2_updates": [
        "trainer.use_v1=false", f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.use_prefix_grouper=true",
        f"{ACTOR}.optim.optimizer=SGD", f"{ACTOR}.optim.lr=0.1",
    ],
}  # fmt: skip


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_key_shares_all_and_step_1_is_stocks(tmp_path: Path, trainer: str, train) -> None:
    stock, prefix = both_arms(tmp_path, train, TRAINERS[trainer])
    for step in prefix:
        step = {name.removeprefix("actor/"): value for name, value in step.items()}
        assert step["prefix/reuse_fraction"] > 0.5 and step["prefix/split_groups"] == 0
        assert (step["prefix/exchanged_rows"] > 0) is (trainer != "legacy_2_updates")
        assert step["prefix/stock_rows"] == 0 and step["prefix/groups"] == 4
        assert "legacy" in trainer or step["training/rollout_probs_diff_max"] < 1e-5
    for name in ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/kl_loss"):
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
    assert stock[0]["actor/grad_norm"] > 0.01, "a step whose rewards are all equal compares nothing"
    for name in ("actor/grad_norm", "actor/pg_loss"):
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
