"""`model_engine=prefix` alone under verl's own trainers, on two ranks, beside the stock engine: real verl, Ray, FSDP2
on gloo and HF rollout. The trainers deal a prompt's rows to both ranks; the engine brings them together.

Shows neither vLLM nor CUDA. Of trainers whose rollout has devices of its own: tests/trainer/test_async_run.py.
"""

from pathlib import Path

import pytest
from both_arms import both_arms

# verl's own trainers; the last is the legacy one, whose batches are padded.
TRAINERS = {
    "sync": ["trainer.v1.trainer_mode=sync"],
    # Without a batch ahead, so that both engines see the same prompts at step 1.
    "colocate_async": ["trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0"],
    "legacy": ["trainer.use_v1=false"],
}


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_key_shares_all_and_step_1_is_stocks(tmp_path: Path, trainer: str, train) -> None:
    stock, prefix = both_arms(tmp_path, train, TRAINERS[trainer])
    for step in prefix:
        step = {name.removeprefix("actor/"): value for name, value in step.items()}
        assert step["prefix/reuse_fraction"] > 0.5 and step["prefix/split_groups"] == 0
        assert step["prefix/exchanged_rows"] > 0
        assert step["prefix/stock_rows"] == 0
        assert trainer == "legacy" or step["training/rollout_probs_diff_max"] < 1e-5
    for name in ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/kl_loss"):
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
    assert stock[0]["actor/grad_norm"] > 0.01, "a step whose rewards are all equal compares nothing"
    for name in ("actor/grad_norm", "actor/pg_loss"):
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
