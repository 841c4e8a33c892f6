"""verl's v1 trainers with a prompt's rows in one mini-batch: `trainer.v1.trainer_mode=prefix_sync`,
`prefix_colocate_async` and `prefix_separate_async`.

By default they reorder rows, add `sessions/*` and a watchdog, and let rows share pixels. Under
prefix.mini_batches=prompts and prefix.loss_weights=sessions they also decide mini-batches, padding and advantages.

verl orders rows by length, so that a prompt's rows are in several mini-batches (optimizer steps), and the engine has to
compute the prompt in each of them. Where a training step has one mini-batch, verl's own trainer does as well:
`model_engine=prefix` brings a prompt's rows together over ranks. `separate_async` always has one, so
`prefix_separate_async` matters only for rows of turns, which make several.
"""

import functools
import logging
import math
import numbers
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, read_write
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_prefix.config.driver import has_critic, has_verls_ref
from verl_prefix.trainer.mini_batches import fill_mini_batches, padded, whole_prompts
from verl_prefix.trainer.watchdog import VARIABLE, Watchdog, stall_minutes
from verl_prefix.versions import check_versions

logger = logging.getLogger(__name__)

TRAINER_MODE = "prefix_sync"
MANAGER = "verl_prefix.trainer.shared_pixels.SharedPixelsManager"
PREFIX = "actor_rollout_ref.actor.prefix"


class WholeGroups(PPOTrainer):
    """Mixin for one of verl's v1 trainers: keeps groups whole in mini-batches, and adds a watchdog.

    Args:
        config: of the job. Its `trainer.v1.trainer_mode` becomes `mode`.

    Attributes:
        mode: the name of verl's trainer.

    Raises:
        ValueError: `actor.shuffle` is on, or options are given under this trainer's own name.
        ImportError: this verl or transformers was never tested (see `versions`).
    """

    mode: str
    # The keys prefix.mini_batches and prefix.loss_weights; None: the actor has another engine, and no such keys.
    _by: str | None = None
    _weights: str | None = None
    _of_prompts: list[list[int]]  # under mini_batches=prompts: rows of each mini-batch, numbered as verl handed them on

    def __init__(self, config: DictConfig) -> None:
        check_versions()
        ours = f"prefix_{self.mode}"
        if config.actor_rollout_ref.actor.shuffle:
            raise ValueError(
                "actor_rollout_ref.actor.shuffle=True reorders rows that were put into mini-batches by group and "
                "splits groups; set actor_rollout_ref.actor.shuffle=False, or trainer.v1.trainer_mode="
                f"{self.mode} instead of {ours}"
            )
        if config.trainer.v1.get(ours):
            raise ValueError(
                f"trainer.v1.{ours}={config.trainer.v1[ours]} would be ignored; {ours} reads the options of verl's own "
                f"trainer: set them under trainer.v1.{self.mode}"
            )
        # verl knows its own names alone: replay buffer, dataloader and checkpoints compare the mode with them, and its
        # options stand in `trainer.v1.<mode>`. The agent loop reads the same config object, so a copy would not do.
        with read_write(config.trainer.v1):
            config.trainer.v1.trainer_mode = self.mode
        key = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
        if self.mode == "sync" and OmegaConf.select(config, key) is None and _only_we_read_pixels(config):
            OmegaConf.update(config, key, MANAGER, force_add=True)
        self._by = OmegaConf.select(config, f"{PREFIX}.mini_batches")
        self._weights = OmegaConf.select(config, f"{PREFIX}.loss_weights")
        super().__init__(config)

    def init(self) -> None:
        """verl's, under a watchdog: see `watchdog`. Under mini_batches=prompts updates then take our mini-batches."""
        minutes = stall_minutes()
        # At a level that workers print: the variable may not have reached them.
        logger.warning("prefix: minutes that a part of a step may take (%s): %s", VARIABLE, minutes or "no limit")
        self._watchdog = Watchdog(minutes * 60)
        self._watchdog.enter("the start of workers and rollout servers")
        super().init()
        if self._by == "prompts":
            workers = self.actor_rollout_wg
            workers.update_actor = functools.partial(self._update_by_prompts, workers.update_actor)
            if self.use_critic:  # of as many mini-batches, and as many ranks: see `config.driver`
                workers = self.critic_wg
                workers.train_mini_batch = functools.partial(self._update_by_prompts, workers.train_mini_batch)

    def _update_by_prompts(self, update: Callable[[KVBatchMeta], Any], batch: KVBatchMeta) -> Any:
        """verl's update, in the mini-batches of `_balance_batch`. verl itself takes n rows for each prompt of one."""
        batch.extra_info["mini_batch_size"] = len(batch) // len(self._of_prompts)
        return update(batch)

    def fit(self, agent_loop_manager: Any) -> None:
        self._watchdog.lost = _lost(getattr(agent_loop_manager, "agent_loop_workers", []))
        self._watchdog.enter("validation before training")
        try:
            super().fit(agent_loop_manager)
        finally:
            self._watchdog.stop()  # trackers may take long to finish, and an error is to be told behind them

    def on_step_begin(self) -> None:
        self._watchdog.enter(f"the rollout of step {self.global_steps}")
        super().on_step_begin()

    def on_sample_begin(self) -> None:
        # Also here: a step of several parameter_sync_step waits for rows before each of its updates.
        self._watchdog.enter(f"the rollout of step {self.global_steps}")
        super().on_sample_begin()

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self._watchdog.enter(f"log-probs and update of step {self.global_steps}")

    def _save_checkpoint(self) -> None:
        self._watchdog.enter(f"the checkpoint of step {self.global_steps}")
        super()._save_checkpoint()

    def on_step_end(self) -> None:
        self._watchdog.enter(f"the weight update after step {self.global_steps}")
        super().on_step_end()
        self._watchdog.enter(f"validation and logging of step {self.global_steps}")

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, float],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        """Pads the batch by verl's method, to the multiple of `_get_required_batch_multiple`, and reorders it so that
        groups are whole in mini-batches. Inside a mini-batch verl's own balancing deals rows to ranks, as verl's own
        path needs it.

        Corrects those of verl's metrics in `metrics` that describe the order of rows.
        """
        arrived = {key: i for i, key in enumerate(batch.keys)}
        if self._by == "prompts":
            sessions = [key.rsplit("_", 1)[0] for key in batch.keys]
            self._of_prompts = whole_prompts(_group_keys(batch), sessions, self._num_updates())
        batch = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)
        dp_size = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        order = sorted(range(len(batch)), key=lambda row: arrived.get(batch.keys[row], len(batch)))
        if self._by == "prompts":
            filled = padded(self._of_prompts, len(batch))
        else:
            keys = _group_keys(batch)
            num = self._num_mini_batches(len(batch), dp_size)
            filled = fill_mini_batches([keys[row] for row in order], num)
        seqlens = [tag["seq_len"] for tag in batch.tags]
        ranks: list[list[int]] = [[] for _ in range(dp_size)]
        for mini_batch in filled:
            rows = [order[i] for i in mini_batch]
            workload = calculate_workload(torch.tensor([seqlens[row] for row in rows], dtype=torch.int64))
            parts = get_seqlen_balanced_partitions(workload, k_partitions=dp_size, equal_size=True)
            for rank, part in zip(ranks, parts, strict=True):
                rank += [rows[i] for i in part]
        stats = log_seqlen_unbalance(seqlen_list=seqlens, partitions=ranks, prefix=logging_prefix)
        for name in (f"{logging_prefix}/balanced_min", f"{logging_prefix}/balanced_max"):
            metrics[name] = stats[name]
        batch.reorder([row for rank in ranks for row in rank])
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """verl's; or, under mini_batches=prompts, the number of rows to which verl has to pad the batch. With it all
        mini-batches have equally many rows, and every rank's part of one is whole micro-batches."""
        if self._by != "prompts":
            return super()._get_required_batch_multiple(dp_size)
        num, actor = len(self._of_prompts), self.config.actor_rollout_ref
        micro_batches = (
            (actor.actor.use_dynamic_bsz, actor.actor.ppo_micro_batch_size_per_gpu),
            (actor.rollout.log_prob_use_dynamic_bsz, actor.rollout.log_prob_micro_batch_size_per_gpu),
            (actor.ref.log_prob_use_dynamic_bsz, actor.ref.log_prob_micro_batch_size_per_gpu),
        )
        of_rank = math.lcm(*(rows for is_dynamic, rows in micro_batches if rows and not is_dynamic))
        unit = dp_size * of_rank
        return num * unit * math.ceil(max(map(len, self._of_prompts)) / unit)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """verl's, times the weights of `loss_weights`."""
        batch = self._advantages_of_rows(batch, metrics)
        if self._weights == "sessions":
            self._weigh_sessions(batch)
        return batch

    def _weigh_sessions(self, batch: KVBatchMeta) -> None:
        """Divides advantages by the number of rows that their session has, and multiplies all of them by rows /
        sessions: the mean weight of a row stays 1, so that the loss is of its usual size."""
        pairs = zip(batch.keys, batch.tags, strict=True)
        keys = [key for key, tag in pairs if not tag.get("is_padding", False)]
        sessions = [key.rsplit("_", 1)[0] for key in keys]
        rows = Counter(sessions)
        mean = len(keys) / len(rows)
        found = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["advantages"])
        pairs = zip(found["advantages"].unbind(), sessions, strict=True)
        weighed = tu.nested_tensor_from_tensor_list([values * (mean / rows[session]) for values, session in pairs])
        fields = tu.get_tensordict({"advantages": weighed})
        tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)

    def _advantages_of_rows(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """verl's, on the rows that are no padding. verl takes means over padding too (of off-policy metrics and KL:
        verl#7771), and mini_batches=prompts may add as much padding as there are rows. Padding gets zeros instead."""
        padding = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding", False)]
        if self._by != "prompts" or not padding:
            return super()._compute_advantage(batch, metrics)
        rows = batch.select_keys([key for key in batch.keys if key not in set(padding)])
        done = super()._compute_advantage(rows, metrics)
        ours = tq.kv_batch_get(keys=padding, partition_id=batch.partition_id)
        put = tq.kv_batch_get(keys=rows.keys[:1], partition_id=batch.partition_id, select_fields=done.fields)
        zeros = {name: put[name][0].new_zeros(1) for name in set(put.keys()) - set(ours.keys())}
        tq.kv_batch_put(
            keys=padding, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict([zeros] * len(padding))
        )
        batch.fields = done.fields
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """verl's update. It puts `actor/` before names of the engine's metrics; ours get their own names back."""
        batch = super()._update_actor(batch, metrics)
        for name in [name for name in metrics if name.startswith(("actor/prefix/", "actor/timing_s/prefix_"))]:
            metrics[name.removeprefix("actor/")] = metrics.pop(name)
        return batch

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, float], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        """verl's metrics, which are over rows, and `sessions/*`, over agent runs. Under `prefix_sync` `sessions/count`
        shows that runs failed, of which verl says nothing there; its asynchronous trainers sample another prompt
        (`ReplayBufferAsync`), and count those. `sessions/*/mean` are values that the reward function returned beside
        its score, which verl shows in validation alone."""
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        last: dict[str, int] = {}
        for uid, key in zip(_group_keys(batch), batch.keys, strict=True):
            session, turn = key.rsplit("_", 1)
            if uid is not None:
                last[session] = max(int(turn), last.get(session, 0))
        keys = [f"{session}_{turn}" for session, turn in last.items()]
        found = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        # Rows of a user's own agent loop manager may have none.
        extra = found.pop("extra_fields").tolist() if "extra_fields" in found.keys() else []
        infos = [(fields or {}).get("reward_extra_info") or {} for fields in extra]
        metrics["sessions/count"] = len(keys)
        for name in {name: None for info in infos for name in info}:
            values = [info[name] for info in infos if isinstance(info.get(name), numbers.Real)]
            if values:
                metrics[f"sessions/{name}/mean"] = statistics.fmean(values)

    def _num_updates(self) -> int:
        """Mini-batches of `ppo_mini_batch_size` prompts in a batch that verl samples. A step has
        `parameter_sync_step` such batches."""
        prompts = self.config.data.train_batch_size // self.parameter_sync_step
        return math.ceil(prompts / self.config.actor_rollout_ref.actor.ppo_mini_batch_size)

    def _num_mini_batches(self, num_rows: int, dp_size: int) -> int:
        """Mini-batches that `train_mini_batch` (verl/workers/engine_workers.py) makes of `num_rows` rows."""
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        mini_batch_size = actor.ppo_mini_batch_size * rollout.n
        # verl pads to whole mini-batches only where the batch will update the actor (trainer.critic_warmup).
        if num_rows % mini_batch_size or mini_batch_size % dp_size:
            return 1
        return num_rows // mini_batch_size


@register_trainer(TRAINER_MODE)
class PrefixPPOTrainerSync(WholeGroups, PPOTrainerSync):
    """verl's `sync` trainer (verl/trainer/ppo/v1/trainer_sync.py) with `WholeGroups`."""

    mode = "sync"


@register_trainer("prefix_colocate_async")
class PrefixPPOTrainerColocateAsync(WholeGroups, PPOTrainerColocateAsync):
    """verl's `colocate_async` trainer with `WholeGroups`."""

    mode = "colocate_async"


@register_trainer("prefix_separate_async")
class PrefixPPOTrainerSeparateAsync(WholeGroups, PPOTrainerSeparateAsync):
    """verl's `separate_async` trainer with `WholeGroups`."""

    mode = "separate_async"


def _only_we_read_pixels(config: DictConfig) -> bool:
    """Whether all that reads rows' pixels is our engine: no critic, no ref of verl's own, and no option of verl that
    stores or drops rows."""
    return (
        config.get("model_engine") == "prefix"
        and not has_critic(config)
        and not has_verls_ref(config)
        and not OmegaConf.select(config, "skip.rollout_tq.enable")
        and not OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path")
    )


def _lost(workers: list[ray.actor.ActorHandle]) -> Callable[[], str | None]:
    """A function that names the first of `workers` that is dead, without waiting for a busy one."""
    pings = [worker.__ray_ready__.remote() for worker in workers]

    def lost() -> str | None:
        for i, worker in enumerate(workers):
            if not ray.wait([pings[i]], timeout=0)[0]:
                continue
            try:
                ray.get(pings[i])
            except ray.exceptions.ActorDiedError as error:
                return f"agent loop worker {i} of {len(workers)} died ({error})"
            except ray.exceptions.ActorUnavailableError:  # for a while: it is asked again
                pass
            pings[i] = worker.__ray_ready__.remote()
        return None

    return lost


def _group_keys(batch: KVBatchMeta) -> list[str | None]:
    """The uid of each row, None for padding. A row's key is `{uid}_{session}_{turn}` (verl's ppo/v1/agent_loop_tq.py).

    Rows of one uid may have different prompts, as those of turns do: several groups for the engine. They stay in one
    mini-batch all the same.
    """
    return [
        None if tag.get("is_padding", False) else key.rsplit("_", 2)[0]
        for key, tag in zip(batch.keys, batch.tags, strict=True)
    ]
