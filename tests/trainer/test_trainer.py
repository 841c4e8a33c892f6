"""The trainer's row order without Ray.

`PrefixPPOTrainerSync.__init__` needs a Ray cluster, so `build_trainer` skips it and gives `_balance_batch` mocks of the
two things that it asks workers for: the dispatch info of a worker group and, for padding rows, one row of the transfer
queue. Batches are real KVBatchMeta, the padding and the cutting into ranks and mini-batches are verl's own code.
"""

import inspect
import itertools
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import ray
import torch
import transfer_queue as transfer_queue_package
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import BatchMeta, KVBatchMeta
from verl.protocol import BatchData
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.core_algos import AdaptiveKLController, get_policy_loss_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.utils.tensordict_utils import list_of_dict_to_tensordict, make_iterator
from verl.workers.config import ActorConfig

from verl_prefix.engine.rows import BatchRows
from verl_prefix.trainer.mini_batches import whole_prompts
from verl_prefix.trainer.prefix_sync import (
    PrefixPPOTrainerSync,
    WholeGroups,
    _group_keys,
    _lost,
)

STOCK_METRICS = {"min", "max", "minmax_diff", "balanced_min", "balanced_max", "mean"}


def build_trainer(mini_batch_size: int, rollout_n: int, dp_rank_of_worker: list[int]) -> PrefixPPOTrainerSync:
    trainer = object.__new__(PrefixPPOTrainerSync)
    trainer.config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": mini_batch_size}, "rollout": {"n": rollout_n}},
            "trainer": {"critic_warmup": 0},
        }
    )
    trainer.use_critic, trainer.global_steps = False, 1
    trainer.tokenizer = SimpleNamespace(eos_token_id=2)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={}, _query_dispatch_info=lambda role: dp_rank_of_worker)
    return trainer


def trainer_of_prompts(prompts: int, mini_batch_size: int, dp_size: int, **actor: object) -> PrefixPPOTrainerSync:
    """With a batch of so many prompts, n=3, and `actor` options; as init leaves it."""
    trainer = build_trainer(mini_batch_size, 3, [*range(dp_size)])
    trainer._by, trainer.parameter_sync_step = "prompts", 1
    micro = {"log_prob_use_dynamic_bsz": True, "log_prob_micro_batch_size_per_gpu": None}
    more = {"rollout": micro, "ref": micro, "actor": {"use_dynamic_bsz": True, "ppo_micro_batch_size_per_gpu": None}}
    more = {"data": {"train_batch_size": prompts}, "actor_rollout_ref": more}
    trainer.config = OmegaConf.merge(trainer.config, more, {"actor_rollout_ref": {"actor": actor}})
    return trainer


def turns(sizes: list[list[int]]) -> KVBatchMeta:
    """Rows of sessions of so many turns per prompt, in the order in which sessions end."""
    ended = sorted((n, i, session) for i, prompt in enumerate(sizes) for session, n in enumerate(prompt))
    keys = [f"uid{i}_{session}_{turn}" for n, i, session in ended for turn in range(n)]
    tags = [{"prompt_len": 40, "response_len": 9, "seq_len": 49 + int(key.rsplit("_", 1)[1])} for key in keys]
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train", extra_info={"temperature": 1.0})


def steps_of(trainer: PrefixPPOTrainerSync, batch: KVBatchMeta) -> list[list[str]]:
    """Keys of each optimizer step of a training step, by what the trainer tells verl's workers."""
    dp_size = len(trainer.actor_rollout_wg._query_dispatch_info("actor"))
    balanced = trainer._balance_batch(batch, {})
    balanced.extra_info["mini_batch_size"] = trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size * 3
    told = trainer._update_by_prompts(lambda batch: batch.extra_info["mini_batch_size"], balanced)
    return mini_batches(balanced, dp_size, told)


def build_batch(sizes: list[int]) -> KVBatchMeta:
    """Groups in the order in which rollouts finish: session by session, not group by group."""
    keys, tags = [], []
    for session in range(max(sizes)):
        for group, size in enumerate(sizes):
            if session < size:
                prompt_len, response_len = 40 + 17 * group % 300, 1 + 31 * (session + group) % 200
                keys.append(f"uid{group}_{session}_0")
                tags.append(
                    {"prompt_len": prompt_len, "response_len": response_len, "seq_len": prompt_len + response_len}
                )
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train", extra_info={"temperature": 1.0})


def uid(key: str) -> str:
    return key.split("_")[0]


def rows_per_rank(batch: KVBatchMeta, dp_size: int) -> list[list[int]]:
    """Row indices per rank as verl's dispatch function cuts them."""
    rows = BatchMeta(global_indexes=range(len(batch)), partition_ids=["train"] * len(batch))
    return [chunk.global_indexes for chunk in BatchData(rows).chunk(dp_size)]


def mini_batches(batch: KVBatchMeta, dp_size: int, mini_batch_size: int) -> list[list[str]]:
    """Keys of each optimizer step, over all ranks, as verl's dispatch function and `train_mini_batch` cut them."""
    cut = []
    for rows in rows_per_rank(batch, dp_size):
        data = TensorDict({"row": torch.tensor(rows)}, batch_size=len(rows))
        steps = make_iterator(data, mini_batch_size // dp_size, epochs=1, dataloader_kwargs={"shuffle": False})
        cut.append([[batch.keys[row] for row in step["row"].tolist()] for step in steps])
    return [[key for keys in step for key in keys] for step in zip(*cut, strict=True)]


@pytest.fixture
def transfer_queue(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A mock of the two queue calls that padding makes; returns the keys of the padding rows."""
    put = []
    row = {"prompts": torch.tensor([5, 6]), "responses": torch.tensor([7]), "uid": "uid0", "session_id": 0}
    monkeypatch.setattr(padding_utils.tq, "kv_batch_get", lambda keys, partition_id: [row])
    monkeypatch.setattr(padding_utils.tq, "kv_batch_put", lambda keys, **_: put.extend(keys))
    return put


def whole(cut: list[list[str]], size: int) -> bool:
    return all(sum(uid(key) == group for key in rows) == size for rows in cut for group in {uid(key) for key in rows})


def test_every_mini_batch_holds_whole_groups_in_the_order_in_which_they_came():
    trainer, batch = build_trainer(4, 5, [0, 1]), build_batch([5] * 12)
    keys = list(batch.keys)
    tag_of = dict(zip(batch.keys, batch.tags, strict=True))
    balanced = trainer._balance_batch(batch, {})
    cut = mini_batches(balanced, dp_size=2, mini_batch_size=20)
    assert [len(rows) for rows in cut] == [20] * 3 and whole(cut, 5)
    assert [sorted({uid(key) for key in rows}) for rows in cut] == [
        sorted(f"uid{i}" for i in range(k, k + 4)) for k in (0, 4, 8)
    ]
    assert sorted(balanced.keys) == sorted(keys)
    assert [tag_of[key] for key in balanced.keys] == balanced.tags


def test_verls_own_trainer_splits_the_same_groups():
    trainer, batch = build_trainer(4, 5, [0, 1]), build_batch([5] * 12)
    PPOTrainerSync._balance_batch(trainer, batch, {})
    assert not whole(mini_batches(batch, dp_size=2, mini_batch_size=20), 5)


def test_ranks_of_a_mini_batch_are_balanced_as_by_verl_and_workers_of_one_dp_rank_count_once():
    trainer, batch = build_trainer(4, 4, [0, 0, 1, 1]), build_batch([4] * 12)
    balanced = trainer._balance_batch(batch, {})
    seqlen = dict(zip(balanced.keys, (tag["seq_len"] for tag in balanced.tags), strict=True))
    first, second = rows_per_rank(balanced, 2)
    for k in range(3):
        step = slice(8 * k, 8 * k + 8)
        sums = [sum(seqlen[balanced.keys[row]] for row in rows[step]) for rows in (first, second)]
        assert abs(sums[0] - sums[1]) < 0.05 * sum(sums)


def test_sessions_are_counted_and_what_their_last_rows_reward_returned_is_a_metric(monkeypatch):
    """verl's own metrics and the queue are mocks. Of three sessions one has three turns; a padding row is none."""
    trainer, asked = build_trainer(4, 2, [0, 1]), []
    keys = ["a_0_1", "a_0_0", "a_1_0", "pad0_0_0", "a_0_2", "b_0_0"]
    infos = {"a_0_2": {"overlong": 1.0, "text": "x"}, "a_1_0": {"overlong": 0, "text": "y"}, "b_0_0": {"astray": 3}}

    def get(keys, partition_id, select_fields):
        asked.append((keys, partition_id, select_fields))
        rows = [{"global_steps": 1, "reward_extra_info": infos[key]} for key in keys]
        return TensorDict({"extra_fields": NonTensorStack(*rows)}, batch_size=len(keys))

    monkeypatch.setattr("verl_prefix.trainer.prefix_sync.tq.kv_batch_get", get)
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda self, batch, metrics, *_: metrics.update(theirs=1))
    tags = [{"is_padding": key.startswith("pad")} for key in keys]
    trainer._compute_metrics(KVBatchMeta(keys=keys, tags=tags, partition_id="train"), metrics := {}, {}, 1, 0)
    assert asked == [(["a_0_2", "a_1_0", "b_0_0"], "train", ["extra_fields"])]
    assert metrics == {"theirs": 1, "sessions/count": 3, "sessions/overlong/mean": 0.5, "sessions/astray/mean": 3.0}


def test_sessions_without_extra_fields_are_counted(monkeypatch):
    """As a user's own agent loop manager may put them; TransferQueue answers with no field."""
    trainer = build_trainer(4, 2, [0, 1])
    monkeypatch.setattr("verl_prefix.trainer.prefix_sync.tq.kv_batch_get", lambda **_: TensorDict({}, batch_size=0))
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda *_: None)
    batch = KVBatchMeta(keys=["a_0_0", "a_1_0"], tags=[{}, {}], partition_id="train")
    trainer._compute_metrics(batch, metrics := {}, {}, 1, 0)
    assert metrics == {"sessions/count": 2}


def test_failed_rollouts_are_padded_and_groups_stay_whole(transfer_queue):
    sizes = [6, 6, 5, 6, 4, 6, 6, 1]
    trainer, batch = build_trainer(4, 6, [0, 1]), build_batch(sizes)
    keys = list(batch.keys)
    balanced = trainer._balance_batch(batch, {})
    assert len(transfer_queue) == 8
    assert sorted(balanced.keys) == sorted(keys + transfer_queue)
    cut = mini_batches(balanced, dp_size=2, mini_batch_size=24)
    for group, size in enumerate(sizes):
        assert sorted(sum(uid(key) == f"uid{group}" for key in rows) for rows in cut)[-1] == size


def test_mini_batches_tear_no_more_groups_apart_than_they_must(transfer_queue):
    # Mini-batches of eight rows, and groups of six: two of them fit whole, the third lies in both.
    balanced = build_trainer(2, 4, [0, 1])._balance_batch(build_batch([6] * 2 + [4]), {})
    first, second = ({uid(key) for key in rows} for rows in mini_batches(balanced, 2, 8))
    assert len(first & second) == 1


def test_sessions_with_several_rows_and_other_prompts_stay_in_one_mini_batch():
    """As agent loops put them: a row for every turn whose prompt was rewritten."""
    keys = [f"uid{i}_{session}_{row}" for session in range(2) for i in range(6) for row in range(2)]
    tags = [{"prompt_len": 9 + row, "response_len": 5, "seq_len": 14 + row} for row in range(2)] * 12
    batch = KVBatchMeta(keys=keys, tags=tags, partition_id="train", extra_info={})
    balanced = build_trainer(2, 4, [0, 1])._balance_batch(batch, {})
    assert whole(mini_batches(balanced, dp_size=2, mini_batch_size=8), 4)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_mini_batches_of_prompts_are_as_many_as_without_turns_and_hold_whole_prompts(transfer_queue, dp_size):
    sizes = [[1, 4, 2], [3, 3, 3], [5, 1, 1], [2, 2], [4, 4, 4], [1], [2, 3, 5], [3, 1, 4]]  # 58 rows
    batch = turns(sizes)
    keys = list(batch.keys)
    cut = steps_of(trainer_of_prompts(8, 4, dp_size), batch)
    assert len(cut) == 2 and len({len(rows) for rows in cut}) == 1
    assert sorted(key for rows in cut for key in rows) == sorted(keys + transfer_queue)
    for rows in cut:
        for prompt in {uid(key) for key in rows if key not in transfer_queue}:
            assert sum(uid(key) == prompt for key in rows) == sum(sizes[int(prompt.removeprefix("uid"))])
    assert len(transfer_queue) <= 2 * dp_size, "rows are balanced"
    trainer = trainer_of_prompts(8, 4, dp_size)
    trainer.parameter_sync_step = 2  # batches of an async step, of half its prompts
    assert len(steps_of(trainer, turns(sizes[:4]))) == 1
    # By rows they are 5, and some prompts lie in several.
    trainer = build_trainer(4, 3, [*range(dp_size)])
    cut = mini_batches(trainer._balance_batch(turns(sizes), {}), dp_size, mini_batch_size=12)
    assert len(cut) == 5 and sum(len({uid(key) for key in rows}) for rows in cut) > len(sizes) + 1  # and padding


def test_the_critic_updates_in_the_actors_mini_batches_of_prompts(transfer_queue, monkeypatch, caplog):
    monkeypatch.setenv("VERL_PREFIX_STALL_MINUTES", "2.5")
    trainer = trainer_of_prompts(8, 4, 2)
    told = {"update_actor": lambda batch: batch.extra_info["mini_batch_size"]}
    trainer.actor_rollout_wg = SimpleNamespace(**vars(trainer.actor_rollout_wg), **told)
    trainer.critic_wg, trainer.use_critic = SimpleNamespace(train_mini_batch=told["update_actor"]), True
    monkeypatch.setattr("verl_prefix.trainer.prefix_sync.Watchdog", mock.Mock())
    monkeypatch.setattr(PPOTrainerSync, "init", lambda self: None)
    trainer.init()
    assert "VERL_PREFIX_STALL_MINUTES): 2.5" in caplog.text
    batch = trainer._balance_batch(turns([[3, 1, 2]] * 8), {})
    batch.extra_info["mini_batch_size"] = 4 * 3  # of the config, in rows
    updates = trainer.critic_wg.train_mini_batch, trainer.actor_rollout_wg.update_actor
    assert [update(batch) for update in updates] == [24, 24]


def test_every_rank_has_whole_micro_batches_of_a_mini_batch_of_prompts(transfer_queue):
    trainer = trainer_of_prompts(4, 2, 2, use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=6)
    cut = steps_of(trainer, turns([[3, 3, 3]] * 4))
    assert [len(rows) for rows in cut] == [24, 24]


def test_a_prompt_with_over_twice_an_even_share_is_cut_between_sessions_and_a_session_only_where_it_has_that():
    assert whole_prompts("a" * 7 + "b", "1112223" + "1", 2) == [[*range(7)], [7]], "at most twice"
    assert whole_prompts("a" * 12 + "b", "111122223333" + "1", 2) == [[*range(12)], [12]]
    for sessions in ("111122223333", "1" * 12):
        cut = whole_prompts("a" * 12 + "bc", sessions + "11", 4)  # an even share is 4
        assert sorted(map(sorted, cut)) == [[*range(8)], [8, 9, 10, 11], [12], [13]]
    assert whole_prompts("aab", "111", 4) == [[0, 1], [2]], "a mini-batch without a row has no loss"


def test_metrics_are_verls_balance():
    trainer, stock_metrics, metrics = build_trainer(4, 5, [0, 1]), {}, {}
    PPOTrainerSync._balance_batch(trainer, build_batch([5] * 12), stock_metrics, "seqlen")
    balanced = trainer._balance_batch(build_batch([5] * 12), metrics, "seqlen")
    verls = {f"seqlen/{name}" for name in STOCK_METRICS}
    assert set(metrics) == verls
    seqlens = [sum(balanced.tags[row]["seq_len"] for row in rows) for rows in rows_per_rank(balanced, 2)]
    assert (metrics["seqlen/balanced_min"], metrics["seqlen/balanced_max"]) == (min(seqlens), max(seqlens))
    for name in STOCK_METRICS - {"balanced_min", "balanced_max"}:
        assert metrics[f"seqlen/{name}"] == stock_metrics[f"seqlen/{name}"]


@pytest.fixture
def rows_in_queue(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """A mock of TransferQueue: the fields of every row by its key."""
    rows: dict[str, dict] = {}

    def get(keys, partition_id, select_fields=None):
        names = set.intersection(*(set(rows[key]) for key in keys))
        names &= names if select_fields is None else {*select_fields}
        return list_of_dict_to_tensordict([{name: rows[key][name] for name in names} for key in keys])

    def put(keys, partition_id, fields, tags=None):
        for name in fields.keys():
            for key, value in zip(keys, tu.get(fields, name), strict=True):
                rows.setdefault(key, {})[name] = value
        names = set.intersection(*(set(rows[key]) for key in keys))
        return KVBatchMeta(keys=keys, tags=tags or [{}] * len(keys), partition_id=partition_id, fields=sorted(names))

    monkeypatch.setattr(transfer_queue_package, "kv_batch_get", get)
    monkeypatch.setattr(transfer_queue_package, "kv_batch_put", put)
    return rows


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"adv_estimator": "gpg"}, {"use_kl_in_reward": True}, {"rollout_correction": None}],
    ids=["grpo", "gpg", "kl_in_reward", "nothing corrected"],
)
def test_padding_of_mini_batches_of_prompts_changes_no_number_of_the_batch(rows_in_queue, algorithm):
    """verl#7771: against verl's own trainer without any, and with it. As much padding as rows."""
    correction = {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_rs": "seq_mean_k1",
                  "rollout_rs_threshold": "0.8_1.3", "bypass_mode": False}  # fmt: skip
    algorithm = {
        "adv_estimator": "grpo", "use_kl_in_reward": False, "kl_penalty": "kl", "gamma": 1.0, "lam": 1.0,
        "norm_adv_by_std_in_grpo": True, "rollout_correction": correction,
    } | algorithm  # fmt: skip

    def run(trainer_class: type, padded: bool) -> tuple[dict[str, float], dict[str, dict], KVBatchMeta]:
        rows_in_queue.clear()
        generator = torch.Generator().manual_seed(0)
        keys, fields, tags = [], [], []
        for uid, session in itertools.product("abc", range(2)):
            n = 3 + session
            rollout, change, scores = torch.randn(3, n, generator=generator)
            responses, mask = torch.arange(n), torch.ones(n, dtype=torch.int64)
            keys.append(f"{uid}_{session}_0")
            tags.append({"prompt_len": 5, "response_len": n, "seq_len": 5 + n})
            fields.append({
                "uid": uid, "session_id": session, "prompts": torch.arange(5), "responses": responses,
                "response_mask": mask, "rm_scores": scores, "rollout_log_probs": rollout - 2,
                "old_log_probs": rollout - 2 + 0.1 * change, "ref_log_prob": rollout - 2 + 0.2 * change,
            })  # fmt: skip
        put = transfer_queue_package.kv_batch_put
        batch = put(keys, "train", list_of_dict_to_tensordict(fields), tags)
        if padded:
            batch = padding_utils.upsample_batch_to_divisible_size(batch, 12, 2)
            zeros = [{name: torch.zeros(1) for name in ("old_log_probs", "ref_log_prob")}] * 6
            put(batch.keys[6:], "train", list_of_dict_to_tensordict(zeros))
            batch.reorder([i for pair in zip(range(6), range(6, 12), strict=True) for i in pair])
        trainer = object.__new__(trainer_class)
        trainer._by, trainer.kl_ctrl_in_reward = "prompts", AdaptiveKLController(0.1, 1.0, 100)
        trainer.config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}})
        done = trainer._compute_advantage(batch, metrics := {})
        assert done.keys == batch.keys
        return metrics | {"kl_coef": trainer.kl_ctrl_in_reward.value}, dict(rows_in_queue), done

    wanted, rows, _ = run(PPOTrainerSync, padded=False)
    diluted, *_ = run(PPOTrainerSync, padded=True)
    found, ours, done = run(PrefixPPOTrainerSync, padded=True)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert (diluted == pytest.approx(wanted, rel=1e-3)) is (algorithm["rollout_correction"] is None)
    for key, row in rows.items():
        for name in set(row) - {"uid"}:
            assert torch.equal(torch.as_tensor(ours[key][name]), torch.as_tensor(row[name])), (key, name)
    padding = [row for key, row in ours.items() if key not in rows]
    assert len(padding) == 6 and set(done.fields) == set(rows["a_0_0"])
    put = {"advantages", "returns", "response_mask", "rollout_is_weights", "token_level_rewards"} & set(done.fields)
    for row in padding:
        assert set(done.fields) <= set(row)
        assert all(len(row[name]) == 1 and not row[name].any() for name in put)


@pytest.mark.parametrize("by", ["rows", "prompts"])
def test_sessions_weigh_the_same_whatever_their_rows(rows_in_queue, by):
    """Against verl's own advantages and losses: the loss is the mean over sessions of the mean over their rows."""
    algorithm = {"adv_estimator": "grpo", "use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0,
                 "norm_adv_by_std_in_grpo": True, "rollout_correction": None}  # fmt: skip
    turns = {"a_0": 1, "a_1": 5, "b_0": 2, "b_1": 3}

    def advantages(trainer_class: type, turns: dict[str, int], weights: str) -> dict[str, torch.Tensor]:
        rows_in_queue.clear()
        generator = torch.Generator().manual_seed(0)
        keys = [f"{session}_{turn}" for session, num in turns.items() for turn in range(num)]
        keys = [keys[i] for i in torch.randperm(len(keys), generator=generator)]
        fields = []
        for i, key in enumerate(keys):
            ones = torch.ones(2 + i % 5, dtype=torch.int64)
            scores = torch.randn(len(ones), generator=generator)
            row = {"uid": key[0], "session_id": int(key[2]), "prompts": torch.arange(3), "responses": ones}
            fields.append(row | {"response_mask": ones, "rm_scores": scores})
        tags = [{"prompt_len": 3, "response_len": 6, "seq_len": 9} for _ in keys]
        batch = transfer_queue_package.kv_batch_put(keys, "train", list_of_dict_to_tensordict(fields), tags)
        if by == "prompts":
            batch = padding_utils.upsample_batch_to_divisible_size(batch, len(keys) + 5, 2)
        trainer = object.__new__(trainer_class)
        trainer._by, trainer._weights = by, weights
        trainer.config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}})
        assert trainer._compute_advantage(batch, {}).keys == batch.keys
        assert all(not row["advantages"].any() for key, row in rows_in_queue.items() if key not in keys)
        assert by == "rows" or len(rows_in_queue) == len(keys) + 5
        return {key: rows_in_queue[key]["advantages"] for key in keys}

    stock, ours = advantages(PPOTrainerSync, turns, "rows"), advantages(PrefixPPOTrainerSync, turns, "sessions")
    generator = torch.Generator().manual_seed(1)
    log_ratio = {key: 0.4 * torch.randn(len(row), generator=generator) for key, row in stock.items()}

    def loss(found: dict[str, torch.Tensor], keys: list[str]) -> float:
        mask, new, adv = (
            pad_sequence([values[key] for key in keys], batch_first=True)
            for values in ({key: torch.ones_like(row) for key, row in found.items()}, log_ratio, found)
        )
        config = ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, clip_ratio=0.2)
        vanilla = get_policy_loss_fn("vanilla")
        return float(vanilla(0 * new, new, adv, mask, "seq-mean-token-mean", config)[0])

    of_sessions = [loss(stock, [key for key in stock if key.startswith(f"{session}_")]) for session in turns]
    wanted, tolerance = sum(of_sessions) / len(turns), 5e-6 * max(map(abs, of_sessions))
    assert loss(ours, [*ours]) == pytest.approx(wanted, abs=tolerance)
    assert abs(loss(stock, [*stock]) - wanted) > 100 * tolerance
    one_row = dict.fromkeys(turns, 1)
    same = [advantages(kind, one_row, "sessions") for kind in (PPOTrainerSync, PrefixPPOTrainerSync)]
    assert all(torch.equal(same[0][key], same[1][key]) for key in same[0])


def test_a_batch_without_actor_update_is_one_mini_batch():
    trainer = build_trainer(4, 5, [0, 1])
    trainer.config.trainer.critic_warmup = 10
    assert trainer._get_required_batch_multiple(2) == 2
    assert trainer._num_mini_batches(num_rows=50, dp_size=2) == 1
    assert trainer._num_mini_batches(num_rows=60, dp_size=2) == 3


def test_rows_are_told_apart_by_keys_and_tags_alone():
    batch = KVBatchMeta(keys=["a-b_3_0", "pad1f_0_0"], tags=[{}, {"is_padding": True}], partition_id="train")
    assert _group_keys(batch) == ["a-b", None]


def config(shuffle: bool = False, **modes: object) -> object:
    created = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"shuffle": shuffle}},
            "trainer": {"v1": {"trainer_mode": "prefix_sync", "sync": {}, **modes}},
        }
    )
    OmegaConf.set_struct(created, True)
    OmegaConf.set_readonly(created, True)
    return created


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_verl_sees_its_own_mode_name(monkeypatch, mode):
    seen, verls, ours = [], get_trainer_cls(mode), get_trainer_cls(f"prefix_{mode}")
    assert issubclass(ours, verls) and ours._balance_batch is WholeGroups._balance_batch
    monkeypatch.setattr(verls, "__init__", lambda self, config: seen.append(config.trainer.v1.trainer_mode))
    frozen = config()
    ours(config=frozen)
    assert seen == [mode] and OmegaConf.is_readonly(frozen.trainer.v1) and OmegaConf.is_struct(frozen.trainer.v1)


def test_shuffle_is_refused():
    with pytest.raises(ValueError, match="set actor_rollout_ref.actor.shuffle=False"):
        PrefixPPOTrainerSync(config(shuffle=True))


def test_options_that_nobody_would_read_are_refused():
    with pytest.raises(ValueError, match="set them under trainer.v1.sync"):
        PrefixPPOTrainerSync(config(prefix_sync={"parameter_sync_step": 2}))


@pytest.mark.parametrize(
    ("symbol", "parameters"),
    [
        (PPOTrainer.__init__, ["self", "config"]),
        (PPOTrainer._balance_batch, ["self", "batch", "metrics", "logging_prefix", "keep_minibatch"]),
        (PPOTrainer._get_required_batch_multiple, ["self", "dp_size"]),
        (padding_utils.upsample_batch_to_divisible_size, ["batch", "batch_multiple", "eos_token_id"]),
        (register_trainer, ["name"]),
        (log_seqlen_unbalance, ["seqlen_list", "partitions", "prefix"]),
        (get_seqlen_balanced_partitions, ["seqlen_list", "k_partitions", "equal_size"]),
        (make_iterator, ["tensordict", "mini_batch_size", "epochs", "seed", "dataloader_kwargs"]),
    ],
)
def test_verl_still_has_the_signature_we_build_on(symbol, parameters):
    found = list(inspect.signature(symbol).parameters)
    assert found == parameters, f"{symbol.__module__}.{symbol.__qualname__} changed: {found}, we rely on {parameters}"


def test_verl_still_asks_its_workers_for_updates_and_names_padding_as_we_read_it(transfer_queue):
    source = inspect.getsource(PPOTrainer._update_actor)
    assert '"mini_batch_size": ' in source and "self.actor_rollout_wg.update_actor(batch)" in source
    padding_utils.upsample_batch_to_divisible_size(build_batch([3]), 4, 2)
    data = tu.get_tensordict({"uid": ["padme-1", *(key.rsplit("_", 2)[0] for key in transfer_queue)]}, {})
    assert BatchRows(data).padding == {1}


def test_verl_still_pads_to_whole_mini_batches():
    trainer = build_trainer(6, 5, [0, 1, 2, 3])
    assert trainer._get_required_batch_multiple(4) == math.lcm(4, 30), (
        "verl.trainer.ppo.v1.trainer_base.PPOTrainer._get_required_batch_multiple changed"
    )


def test_engine_metrics_keep_the_names_of_the_design(monkeypatch):
    trainer = object.__new__(PrefixPPOTrainerSync)

    def update(self, batch, metrics):
        metrics.update({"actor/prefix/groups": 2.0, "actor/timing_s/prefix_phase_a": 0.1, "actor/grad_norm": 1.0})
        return batch

    monkeypatch.setattr(PPOTrainerSync, "_update_actor", update)
    trainer._update_actor(None, metrics := {})
    assert metrics == {"prefix/groups": 2.0, "timing_s/prefix_phase_a": 0.1, "actor/grad_norm": 1.0}


def test_the_watchdog_hears_of_every_phase_of_a_step(monkeypatch):
    heard = []
    trainer = object.__new__(PrefixPPOTrainerSync)
    trainer.global_steps = 4
    trainer._watchdog = SimpleNamespace(enter=heard.append, stop=lambda: heard.append("stop"))
    monkeypatch.setattr(PPOTrainerSync, "fit", lambda self, manager: heard.append("fit"))
    trainer.fit(None)
    assert heard == ["validation before training", "fit", "stop"]
    heard.clear()
    monkeypatch.setattr(PPOTrainerSync, "fit", mock.Mock(side_effect=RuntimeError("a worker died")))
    with pytest.raises(RuntimeError, match="a worker died"):  # which the watchdog must not cut off
        trainer.fit(None)
    assert heard == ["validation before training", "stop"]
    heard.clear()
    # In verl's order (PPOTrainer.fit); a hook that verl no longer calls would leave its phase out.
    fit = inspect.getsource(PPOTrainer.fit) + inspect.getsource(PPOTrainer._step_once)
    for hook in ("on_step_begin", "on_sample_begin", "on_sample_end", "_save_checkpoint", "on_step_end"):
        assert f"self.{hook}()" in fit
        monkeypatch.setattr(PPOTrainerSync, hook, lambda self, hook=hook: heard.append(hook))
        getattr(trainer, hook)()
    assert heard == [
        "the rollout of step 4", "on_step_begin",
        "the rollout of step 4", "on_sample_begin",
        "on_sample_end", "log-probs and update of step 4",
        "the checkpoint of step 4", "_save_checkpoint",
        "the weight update after step 4", "on_step_end", "validation and logging of step 4",
    ]  # fmt: skip


def test_a_dead_agent_loop_worker_is_named_and_a_busy_one_is_left_alone(monkeypatch):
    died, away = ray.exceptions.ActorDiedError(), ray.exceptions.ActorUnavailableError("no answer", None)
    states = {"first": None, "second": "busy"}
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([r for r in refs if states[r] != "busy"], []))

    def get(ref):
        if states[ref] in (died, away):
            raise states[ref]

    monkeypatch.setattr(ray, "get", get)
    ready = [SimpleNamespace(remote=lambda name=name: name) for name in states]
    lost = _lost([SimpleNamespace(__ray_ready__=remote) for remote in ready])
    assert lost() is None and lost() is None
    states["second"] = away
    assert lost() is None and lost() is None, "its network may come back"
    states["second"] = died
    assert lost().startswith("agent loop worker 1 of 2 died (")
