"""PrefixEngine: verl's engine with a `forward_backward_batch` that shares prefixes.

verl hands the engine a rank's whole mini-batch. The stock path cuts it into micro-batches of rows. Ours groups the
rows, plans passes over groups (`core.planning`), runs them (`core.runner`) and computes log-probs, entropy and loss
of each pass with verl's own functions, for those tokens alone whose output some row reads. README.md has the steps in
their order. A backend holds what differs between verl's engines.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from verl_prefix.auto.cost import Memory
from verl_prefix.config.actor import SKIP_ZERO_ADVANTAGE, role_of
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.meter import Meter
from verl_prefix.core.plan import Plan
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.checks.verify import Verification
from verl_prefix.engine.fields import RECORDS, ROUTES, TEACHER, flag
from verl_prefix.engine.grouping import TreeRule
from verl_prefix.engine.headroom import Headroom
from verl_prefix.engine.loss import Loss, LossFunction
from verl_prefix.engine.metrics.step_metrics import StepMetrics
from verl_prefix.engine.out_of_memory import Advice
from verl_prefix.engine.outputs import flags_of, is_unscaled
from verl_prefix.engine.planner import Planner, StockPath, cost_model_of
from verl_prefix.engine.routes import with_routes
from verl_prefix.engine.row_checks import check_pixels, check_positions
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.shared_passes import SharedPasses
from verl_prefix.engine.together import RankError, together
from verl_prefix.engine.travel.exchange import Exchange, open_exchange
from verl_prefix.engine.travel.pixels import receive_pixels
from verl_prefix.models.messages import end_tokens
from verl_prefix.models.replaced import replaced
from verl_prefix.trace.writer import TraceWriter, open_trace
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


class SharedBatch(NamedTuple):
    """A mini-batch that shared passes will compute.

    Attributes:
        exchange: by which its rows came.
        rows: the rows that this rank computes, with the fields that verl adds for a loss.
        plan: of this rank's passes.
        metrics: of what was done so far.
    """

    exchange: Exchange
    rows: BatchRows
    plan: Plan
    metrics: dict[str, float]


class PrefixEngine:
    """Mixin that comes before verl's engine class among the bases: an engine that computes a group's prefix once.

    The constructor of the whole class sets `prefix_config`, builds verl's engine, and then calls `set_backend`.
    """

    prefix_config: PrefixConfig
    model_config: Any  # verl's
    # From `set_backend` on:
    backend: Backend
    _role: str  # a key that `config.actor.role_of` returns
    _passes: SharedPasses
    _verification: Verification
    _step_metrics: StepMetrics
    _trace: TraceWriter | None = None
    # From `initialize` on, but with prefix.schedule=stock:
    _headroom: Headroom
    _planner: Planner | None = None
    _tree_rule: TreeRule
    # Later:
    _missed_check: StockPath | None = None  # that of every batch, after a check missed under verify_action=fallback
    _computes_ref = False  # True inside of `disable_adapter`

    def set_backend(self, backend: Backend, engine_config: Any, model_config: Any) -> None:
        """Ends the constructor, once verl's engine is made by these configs, or by copies of them. What needs the model
        follows in `initialize`."""
        self.backend = backend
        self._role = role_of(engine_config)
        self._passes = SharedPasses(backend, self.prefix_config)
        self._verification = Verification(backend, self.prefix_config, self._passes)
        self._step_metrics = StepMetrics(backend, self.prefix_config, engine_config.ppo_epochs)
        if self.prefix_config.trace_dir and backend.trains:
            ranks, options = backend.ranks, self.prefix_config
            self._trace = open_trace(options, ranks.data_rank, ranks.data_size, ranks.is_writer, self, model_config)

    def initialize(self) -> None:
        """Builds verl's engine, and what needs its model."""
        super().initialize()  # type: ignore[misc]
        shares = self.prefix_config.schedule != "stock"
        # On one stage of a pipeline alone a model may have what cannot be shared.
        with together("checking the model", same=("stock facts",)) as agreed:
            facts = self.backend.stock_facts
            agreed.tell_same("stock facts", facts)
            if shares:
                self.backend.check_model()
            if shares and self.prefix_config.skip_zero_advantage and self.backend.counts_last_tokens:
                raise ValueError(
                    f"{SKIP_ZERO_ADVANTAGE}=True leaves out rows that this model's routers learn from; set "
                    f"{SKIP_ZERO_ADVANTAGE}=False"
                )
        if not agreed.is_same("stock facts"):  # ranks would enter different collectives
            raise RankError(
                f"verl's own path computes this model otherwise on other ranks, here by {facts}; install the same "
                "packages on every node"
            )
        if shares:
            ends = frozenset(end_tokens(self.model_config.tokenizer))
            self._tree_rule = TreeRule(self.prefix_config.trees, ends, self.model_config.hf_config)
            costs = cost_model_of(self.backend, self.prefix_config)
            self._headroom = Headroom(self.backend, costs)
            self._planner = Planner(self.backend, self.prefix_config, costs, self._headroom.fits, self._role)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Computes a rank's mini-batch, as verl's method does: outputs have the order of its rows. Every rank calls it.

        Raises:
            RankError: another rank failed, or ranks do not agree.
            ValueError: rows have wrong routes, positions or pixels, or a gradient that `prefix.skip_zero_advantage`
                would lose.
            RuntimeError: the self-check missed, and prefix.verify_action is raise.
        """
        with together("reading routes"):
            data = data.copy()  # the caller's gets none of our flags
            data = with_routes(self.backend, data, forward_only, self._computes_ref)
        tu.assign_non_tensor(data, sp_size=self.backend.ranks.sequence_size)
        given, loss = BatchRows(data), Loss(loss_function)
        self._verification.count(forward_only)
        prepared = self._prepare(given, loss, forward_only)
        if isinstance(prepared, StockPath):
            output, metrics = self._run_stock_path(prepared, given, loss, forward_only)
        else:
            output, metrics = self._run_shared_path(prepared, loss, forward_only)
        reported = self._step_metrics.report(metrics, given, forward_only)
        output.setdefault("metrics", {}).update(reported)
        return output

    def _prepare(self, given: BatchRows, loss: Loss, forward_only: bool) -> StockPath | SharedBatch:
        """Brings the rows of a mini-batch together, plans and checks them. Returns what the shared path computes, or
        the decision for the stock path. Either has the metrics of what was done until then.

        All ranks leave at the same place. `only_stock_path` reads what all have alike, `plan` goes by maxima over
        ranks, and `check` by sums over them.
        """
        if self._planner is None:
            return StockPath("prefix.schedule=stock")
        if (stock_path := self._planner.only_stock_path(given, loss) or self._missed_check) is not None:
            return stock_path
        loss.warn_of_limits()
        exchange = self._open_exchange(given, loss, forward_only)
        rows, groups, metrics = exchange.computed, exchange.groups, exchange.metrics
        path = self._planner.plan(given, rows, groups, forward_only, update_follows=not self._computes_ref)
        if isinstance(path, StockPath):
            return path.after(metrics)
        with together("checking rows"):
            check_positions(given, self.backend.stock_facts.row_begins)
            check_pixels(rows, self.backend.config)
        self.backend.begin_shared_path(rows)
        rows = self._with_loss_fields(rows)
        missed, check_metrics = self._verification.check(rows, groups, path.plan, loss, forward_only)
        metrics = {**metrics, **check_metrics}
        if missed is not None:
            self._missed_check = missed
            return missed.after(metrics)
        return SharedBatch(exchange, rows, path.plan, {**metrics, **path.metrics})

    def _run_stock_path(
        self, path: StockPath, given: BatchRows, loss: Loss, forward_only: bool
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Computes a mini-batch on the stock path; returns verl's output, and metrics."""
        warn_once(logger, "prefix: stock path, %s", path.reason)
        with together("receiving pixels"):
            data = receive_pixels(given.data)
        output = self.backend.run_stock_path(data, loss.for_stock(), forward_only)
        return output, {**path.metrics, "prefix/stock_rows": given.num_real}

    def _run_shared_path(
        self, batch: SharedBatch, loss: Loss, forward_only: bool
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Computes a mini-batch by shared passes; returns verl's output of the given rows, and metrics."""
        rows, groups, plan = batch.rows, batch.exchange.groups, batch.plan
        memory, meter = self._choose_memory(plan, rows, forward_only)
        # Whole prompts may need as much padding as there are rows. Else verl pads as much, and its metrics have it.
        hides_padding = not forward_only and self.prefix_config.mini_batches == "prompts"
        counts_tokens = rows.flag("use_dynamic_bsz", True)
        advice = Advice(plan, memory, self._role, self.prefix_config, forward_only, counts_tokens)
        with advice.on_errors():
            output, pass_metrics = self._passes.run(
                rows, groups, plan, memory, loss, forward_only, meter=meter, hides_padding=hides_padding
            )
        output["model_output"], exchange_metrics = batch.exchange.give_back(output["model_output"])
        return output, {**batch.metrics, **pass_metrics, **exchange_metrics}

    def _open_exchange(self, given: BatchRows, loss: Loss, forward_only: bool) -> Exchange:
        """Brings rows to the ranks that compute them, groups and counts them."""
        if loss.function is None:  # log-probs alone, for which no teacher travels
            given = given.with_data(given.data.exclude(*TEACHER))
        skips_dead = self.prefix_config.skip_zero_advantage and not forward_only
        exchange = open_exchange(
            self.backend, given, loss, exchange_option=self.prefix_config.exchange, tree_rule=self._tree_rule,
            skips_dead=skips_dead,
        )  # fmt: skip
        counted = self._step_metrics.count_rows(exchange, self._tree_rule, forward_only)
        return replace(exchange, metrics={**exchange.metrics, **counted})

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Context of verl's, in which the actor computes ref. Routers then choose for themselves, and no update follows
        what is decided of ref's passes."""
        with super().disable_adapter(), replaced(self, "_computes_ref", True):  # type: ignore[misc]
            yield

    def _with_loss_fields(self, rows: BatchRows) -> BatchRows:
        """Returns the rows with what verl's forward_backward_batch adds to a batch for the loss."""
        data, ranks = rows.data.copy(), self.backend.ranks
        batch_num_tokens = data["loss_mask"].sum().to(get_device_id())
        torch.distributed.all_reduce(batch_num_tokens, group=ranks.data_group)
        tu.assign_non_tensor(data, batch_num_tokens=batch_num_tokens.item(), dp_size=ranks.data_size)
        return rows.with_data(data)

    def _choose_memory(self, plan: Plan, rows: BatchRows, forward_only: bool) -> tuple[Memory, Meter]:
        """Returns what passes keep, and what measures them. An update keeps what every rank's device has room for.
        Every rank calls it right before the passes.

        Args:
            rows: the rows that this rank computes.
        """
        if forward_only:
            return self._headroom.least, Meter()
        logits_once = self.backend.reads_logits_once(flags_of(rows.data)) and is_unscaled(rows.data)
        memory = self._headroom.choose_memory(plan, self.prefix_config.keep_attention, logits_once)
        return memory, self._headroom.new_meter()

    def verls_forward_backward(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool
    ) -> dict[str, Any]:
        """verl's own `forward_backward_batch`. Routers replay, where verl's engine does, if the batch has routes or
        records them: verl's worker says so of its own batches, but not of those that ref or the self-check runs."""
        data = data.copy()
        tu.assign_non_tensor(data, enable_routing_replay=ROUTES in data.keys() or flag(data, RECORDS))
        return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]

    def train_batch(self, data: TensorDict, loss_function: LossFunction) -> dict[str, Any]:
        """Runs one optimizer step, as verl's method does, after `prefix.trace_dir` recorded its batch. Under
        `mini_batches=prompts` losses that are means over rows divide by the rows of the mini-batch that are no padding.
        verl tells them another number, n for each prompt."""
        ranks = self.backend.ranks
        rows = BatchRows(data)
        if self.prefix_config.mini_batches == "prompts":
            (num_rows,) = ranks.sum_over_ranks([rows.num_real])
            data = data.copy()  # the caller's stays as it is
            tu.assign_non_tensor(data, global_batch_size=int(num_rows) // ranks.model_size)
        if self._trace is not None:
            self._trace.record(rows, loss_function, ranks.max_over_ranks)
        with self._headroom.measured_update() if self._planner else nullcontext():
            return super().train_batch(data, loss_function)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Loads as verl's method does; after that no trace is recorded."""
        super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if self._trace is not None:
            self._trace.resumed = True
