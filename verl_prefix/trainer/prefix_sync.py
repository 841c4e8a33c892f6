"""The v1 trainer that keeps groups whole: `trainer.v1.trainer_mode=prefix_sync`.

Everything but the row order is verl's synchronous trainer. verl balances by sequence length and spreads a group over DP
ranks and mini-batches; a rank can then share a prefix only among the rows that it happens to hold.
"""

import copy
from collections.abc import Callable
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, read_write
from torch.utils.data import Dataset
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import need_critic
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_prefix.trainer.placement import place
from verl_prefix.trainer.watchdog import Watchdog, stall_minutes
from verl_prefix.versions import check_verl_version

TRAINER_MODE = "prefix_sync"
MANAGER = "verl_prefix.engine.shared_pixels.SharedPixelsManager"


@register_trainer(TRAINER_MODE)
class PrefixPPOTrainerSync(PPOTrainerSync):
    """verl's `sync` trainer with whole groups on DP ranks and in mini-batches (verl/trainer/ppo/v1/trainer_sync.py).

    Raises:
        ValueError: `actor.shuffle` is on, or options are given under `trainer.v1.prefix_sync`.
        ImportError: this verl was never tested (see `versions`).
    """

    def __init__(self, config: DictConfig) -> None:
        check_verl_version()
        if config.actor_rollout_ref.actor.shuffle:
            raise ValueError(
                "actor_rollout_ref.actor.shuffle=True reorders rows after placement and splits groups over "
                "mini-batches; set actor_rollout_ref.actor.shuffle=False, or trainer.v1.trainer_mode=sync instead of "
                f"{TRAINER_MODE}"
            )
        if config.trainer.v1.get(TRAINER_MODE):
            raise ValueError(
                f"trainer.v1.{TRAINER_MODE}={config.trainer.v1[TRAINER_MODE]} would be ignored; "
                f"{TRAINER_MODE} reads the options of verl's synchronous trainer: set them under trainer.v1.sync"
            )
        # verl compares the mode with the literal "sync" (replay buffer, dataloader, checkpoints) and reads
        # `trainer.v1.<mode>`; the agent loop reads the same config object, so a copy would not do.
        with read_write(config.trainer.v1):
            config.trainer.v1.trainer_mode = "sync"
        key = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
        if OmegaConf.select(config, key) is None and _only_we_read_pixels(config):
            OmegaConf.update(config, key, MANAGER, force_add=True)
        super().__init__(config)

    def init(self) -> None:
        """verl's, under a watchdog: see `watchdog`."""
        self._watchdog = Watchdog(stall_minutes() * 60)
        self._watchdog.enter("the start of workers and rollout servers")
        super().init()

    def fit(self, agent_loop_manager: Any) -> None:
        self._watchdog.lost = _lost(getattr(agent_loop_manager, "agent_loop_workers", []))
        self._watchdog.enter("validation before training")
        super().fit(agent_loop_manager)

    def on_step_begin(self) -> None:
        self._watchdog.enter(f"the rollout of step {self.global_steps}")
        super().on_step_begin()

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

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        _refuse_overlong_prompts(self.train_dataset)

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, float],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        """Pads the batch as verl does and reorders it by whole groups.

        Adds `prefix/split_groups` and `prefix/placement_imbalance` to `metrics`; of verl's own balance metrics only
        those that describe the balanced order change.
        """
        batch = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)
        dp_size = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        keys, prefix_lens, suffix_lens = _describe_rows(batch)
        placement = place(keys, prefix_lens, suffix_lens, dp_size, self._num_mini_batches(len(batch), dp_size))

        seqlens = [tag["seq_len"] for tag in batch.tags]
        rows_per_rank = len(batch) // dp_size
        ranks = [placement.order[r * rows_per_rank : (r + 1) * rows_per_rank] for r in range(dp_size)]
        stats = log_seqlen_unbalance(seqlen_list=seqlens, partitions=ranks, prefix=logging_prefix)
        for name in (f"{logging_prefix}/balanced_min", f"{logging_prefix}/balanced_max"):
            metrics[name] = stats[name]
        metrics["prefix/split_groups"] = placement.split_groups
        metrics["prefix/placement_imbalance"] = placement.imbalance
        batch.reorder(placement.order)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """verl's update; it files the engine's metrics under `actor/`, ours go back to `prefix/` and `timing_s/`."""
        batch = super()._update_actor(batch, metrics)
        for name in [name for name in metrics if name.startswith(("actor/prefix/", "actor/timing_s/prefix_"))]:
            metrics[name.removeprefix("actor/")] = metrics.pop(name)
        return batch

    def _num_mini_batches(self, num_rows: int, dp_size: int) -> int:
        """Mini-batches per rank that `train_mini_batch` (verl/workers/engine_workers.py) makes of `num_rows` rows."""
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        mini_batch_size = actor.ppo_mini_batch_size * rollout.n
        # Only batches that update the actor are padded to whole mini-batches (trainer.critic_warmup).
        if num_rows % mini_batch_size or mini_batch_size % dp_size:
            return 1
        return num_rows // mini_batch_size


def _only_we_read_pixels(config: DictConfig) -> bool:
    """True where actor, old and ref log-probs go through our engine, and nobody else reads, dumps or drops rows."""
    return (
        config.get("model_engine") == "prefix"
        and not need_critic(config)
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
            except ray.exceptions.RayActorError as error:
                return f"agent loop worker {i} of {len(workers)} died ({error})"
            pings[i] = worker.__ray_ready__.remote()
        return None

    return lost


def _refuse_overlong_prompts(dataset: Dataset) -> None:
    """verl 0.9's v1 trainer reads neither `data.truncation` nor a prompt's length, and fails in the rollout, late.

    Raises:
        ValueError: prompts are neither filtered nor truncated, and some are longer than `data.max_prompt_length`.
    """
    if getattr(dataset, "filter_overlong_prompts", True) or dataset.truncation != "error":
        return
    probe = copy.copy(dataset)
    probe.filter_overlong_prompts = True
    num_rows = len(dataset.dataframe)
    num_overlong = num_rows - len(probe.maybe_filter_out_long_prompts(dataset.dataframe))
    if num_overlong:
        raise ValueError(
            f"{num_overlong} of {num_rows} training prompts are longer than data.max_prompt_length="
            f"{dataset.max_prompt_length} tokens; raise it, or set data.filter_overlong_prompts=True to skip them"
        )


def _describe_rows(batch: KVBatchMeta) -> tuple[list[str | None], list[int], list[int]]:
    """Group key (None for padding rows), prefix length and suffix length of each row, from keys and tags alone.

    Keys are `{uid}_{session}_{index}` (verl/trainer/ppo/v1/agent_loop_tq.py). A prompt's last token is in the suffix.

    Raises:
        RuntimeError: a row has no `prompt_len` or `response_len` tag.
    """
    keys: list[str | None] = []
    prefix_lens: list[int] = []
    suffix_lens: list[int] = []
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        if "prompt_len" not in tag or "response_len" not in tag:
            raise RuntimeError(
                f"row {key} carries the tags {sorted(tag)}, but placement needs prompt_len and response_len; let the "
                "agent loop write them as verl's AgentLoopWorkerTQ does, or set trainer.v1.trainer_mode=sync"
            )
        keys.append(None if tag.get("is_padding", False) else key.rsplit("_", 2)[0])
        prefix_lens.append(max(tag["prompt_len"] - 1, 0))
        suffix_lens.append(tag["response_len"])
    return keys, prefix_lens, suffix_lens
