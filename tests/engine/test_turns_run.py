"""Rows of turns under real verl: the MuSiQue recipe's loop, which returns a row per call, stock and ours, on one and
two ranks. Real verl, Ray, FSDP2 on gloo and HF rollout; neither vLLM nor CUDA. The random model never calls the tool.
"""

import json
import os
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from both_arms import both_arms
from musique import RECIPE
from transformers import AutoTokenizer

from verl_prefix.core.trees import cuts_at, group_trees, mix_rows
from verl_prefix.models.messages import end_tokens, message_ends
from verl_prefix.trace import Trace, join_rows

ROWS = 4 * 4  # of 4 prompts, a session of each, 4 turns at most


def saved_by_trees(trace: Trace, num_steps: int, model: str) -> float:
    """The share of the first optimizer steps' tokens that one tree per uid saves, were all ranks one."""
    ends, tokens, computed = end_tokens(AutoTokenizer.from_pretrained(model)), 0, 0
    for step in range(num_steps):
        rows = join_rows([trace.read(step, rank) for rank in range(trace.world_size)])
        (ids, lens), prompt_lens = rows.jagged["input_ids"], rows.jagged["prompts"][1].tolist()
        real = [
            (uid, row, n)
            for uid, row, n in zip(rows.uids, ids.split(lens.tolist()), prompt_lens, strict=True)
            if not uid.startswith("pad")
        ]
        uids, whole, prompt_lens = zip(*real, strict=True)
        offsets = [0, *accumulate(map(len, whole))]
        prompts = [row[:n] for row, n in zip(whole, prompt_lens, strict=True)]
        cuts = [cuts_at(at, n) for at, n in zip(message_ends(prompts, ends), prompt_lens, strict=True)]
        mixed = mix_rows(torch.cat(whole), offsets, [hash(uid) for uid in uids])
        tokens += offsets[-1] - len(real)
        computed += sum(group.num_physical_tokens for group in group_trees(mixed, offsets, prompt_lens, cuts))
    return 1 - computed / tokens


def assert_weights(trace: Trace, weights: str, num_sessions: int) -> None:
    """GRPO's advantages of two sessions that differ are +-1/sqrt(2), in each of their rows; those of a session with k
    rows are divided by k, and multiplied by rows / sessions."""
    num_rows: dict[tuple[str, float], int] = Counter()
    num_real = 0
    for rank in range(trace.world_size):
        rows = trace.read(0, rank)
        values, lens = rows.jagged["advantages"]
        for uid, row in zip(rows.uids, values.split(lens.tolist()), strict=True):
            num_real += not uid.startswith("pad")
            if row.any():
                num_rows[uid, float(row.max()) or float(row.min())] += 1
    assert len({*num_rows.values()}) > 1, "sessions of one length"
    for (_, value), k in num_rows.items():
        weight = num_real / num_sessions / k if weights == "sessions" else 1
        assert abs(value) == pytest.approx(weight / 2**0.5, rel=1e-3)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("ranks", "n", "prompts", "weights"),
    [
        (2, 2, 4, "rows"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (2, 1, 4, "rows"), (2, 3, 4, "rows"), (2, 2, 2, "rows"), (1, 2, None, "rows"), (2, 2, 4, "sessions")
            )
        ),
    ],
    ids=["2ranks", "2ranks_n1", "2ranks_n3", "2ranks_2updates", "1rank_rows", "2ranks_sessions"],
)  # fmt: skip
def test_turns_share_and_step_1_is_stocks(
    tmp_path: Path, train, monkeypatch, ranks: int, n: int, prompts: int | None, weights: str
):
    """With mini-batches of `prompts`, or of rows; loss_weights=`weights`, of which stock has those of rows."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(RECIPE), *filter(None, [os.environ.get("PYTHONPATH")])]))
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    options = [
        f"{rollout}.agent.agent_loop_config_path={RECIPE / 'search_turns.yaml'}",
        f"{rollout}.agent.default_agent_loop=search_turns", f"{rollout}.multi_turn.max_assistant_turns=4",
        f"{rollout}.multi_turn.tool_config_path={RECIPE / 'search_tool.yaml'}",
        f"{rollout}.n={n}", f"{rollout}.calculate_log_probs=true", "data.max_response_length=24",
        "data.max_prompt_length=700",  # some histories have no room for the fourth turn, or the third
        f"trainer.n_gpus_per_node={ranks}",
    ]  # fmt: skip
    one_update = f"{actor}.ppo_mini_batch_size={ROWS}"  # which counts n rows a prompt
    stocks = ["trainer.v1.trainer_mode=sync", one_update]
    ours = [f"{actor}.prefix.trace_dir={tmp_path / 'trace'}"]
    if prompts:
        ours += ["trainer.v1.trainer_mode=prefix_sync", f"{actor}.ppo_mini_batch_size={prompts}"]
        ours += [f"{actor}.prefix.mini_batches=prompts", f"{actor}.prefix.loss_weights={weights}"]
    else:
        ours += stocks
    stock, prefix = both_arms(tmp_path, train, options, ours, stocks)
    for number, step in enumerate(prefix, start=1):
        rows = [json.loads(line) for line in (tmp_path / f"rollouts/{number}.jsonl").read_text().splitlines()]
        scores: dict[str, list[float]] = {}
        for row in rows:
            if not row["uid"].startswith("pad"):
                scores.setdefault(row["uid"].rsplit("_", 1)[0], []).append(row["score"])
        assert len(scores) == 4 * n and len({*map(len, scores.values())}) > 1, "all sessions, of different lengths"
        assert all(len({*own}) == 1 for own in scores.values()), "the last row's score"
        if prompts:
            mean = sum(own[0] for own in scores.values()) / len(scores)
            assert (step["sessions/count"], step["sessions/acc/mean"]) == (4 * n, pytest.approx(mean, rel=1e-6))
    prefix = [{name.removeprefix("actor/"): value for name, value in step.items()} for step in prefix]
    for step in prefix:
        assert step["prefix/reuse_fraction"] > 0.5 and step.get("prefix/split_groups", 0) == 0
    trace = Trace(tmp_path / "trace")
    saved = saved_by_trees(trace, trace.num_steps // 2, str(tmp_path / "model"))
    assert prefix[0]["prefix/reuse_fraction"] >= 0.9 * saved and saved > 0.5
    assert trace.num_steps == 2 * 4 // (prompts or 4), "optimizer steps of two training steps"
    if prompts == 4 and n == 2:
        assert_weights(trace, weights, 4 * n)
    for name in ("critic/score/mean", "response_length/mean"):
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
    assert stock[0]["actor/grad_norm"] > 0.01, "a step whose rewards are all equal compares nothing"
    if prompts != 2 and weights == "rows":
        for name in ("grad_norm", "pg_loss", "entropy", "kl_loss"):
            assert prefix[0][name] == pytest.approx(stock[0][f"actor/{name}"], rel=5e-6, abs=5e-6), name
