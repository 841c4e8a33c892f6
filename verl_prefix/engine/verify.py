"""`prefix.verify`: when the self-check runs, on which rows, and what happens where it misses."""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.config.actor import SKIP_ZERO_ADVANTAGE
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.attention import AttentionPass
from verl_prefix.core.groups import Group
from verl_prefix.core.nesting import Nesting
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import make_plan
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.out_of_memory import out_of_memory_advice
from verl_prefix.engine.outputs import FLAGS
from verl_prefix.engine.paths import WhyStock
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.self_check import Verdict, compare
from verl_prefix.engine.together import together
from verl_prefix.models.advice import WITHOUT_SHARING
from verl_prefix.models.vision import is_vision_config, num_tower_runs, shown_lens
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)

_ENOUGH_TOKENS, _MOST_ROWS = 32, 8  # of a group that is checked
_NO_FLAGS = dict.fromkeys(FLAGS, False)


class Verification:
    """The self-check of one engine, which all ranks run at once. It checks updates. In an engine for log-probs alone it
    checks batches, which have no gradients to compare.

    Args:
        run_plan: `PrefixEngine.run_plan`.

    Attributes:
        failure: why every batch takes the stock path, after a check missed under prefix.verify_action=fallback; else
            None.
    """

    def __init__(self, backend: Backend, options: PrefixConfig, run_plan: Callable[..., tuple[dict, dict]]) -> None:
        self._backend, self._options, self._run_plan = backend, options, run_plan
        self.failure: WhyStock | None = None
        self._num_batches = 0

    @functools.cached_property
    def _compared(self) -> str:
        """The output that both paths are compared by: log_probs, or values."""
        return self._backend.output_names(_NO_FLAGS)[0]

    def check(self, rows: BatchRows, groups: Sequence[Group], budget: int, plan: Plan, loss: Loss) -> dict[str, float]:
        """Runs the check, if one is due and every rank has a group to check. A few rows of one group take both paths,
        which are compared. Then it is checked that rows which the update leaves out have no gradient. Returns metrics.

        Args:
            rows: the rows that this rank computes.
            groups, plan: of these rows.
            budget: tokens of one pass. No pass of the check has more, unless one row alone does. Where verl's sequence
                parallelism is wrong, each rank computes whole rows, and rows that are checked fit a rank's budget.

        Raises:
            RuntimeError: ours is off by more than rounding, and prefix.verify_action is raise.
        """
        start = time.perf_counter()
        if not self._is_due():
            self._num_batches += 1
            return {}
        candidates = self._candidates(rows, groups, budget)
        if not candidates:
            return {}
        with out_of_memory_advice(None):
            verdict = self._verdict(rows, _cheapest(candidates, len(rows)), budget, loss)
        misses = []
        if verdict.missed:
            misses = [f"{verdict}. The shared-prefix path is wrong for this model; set {WITHOUT_SHARING}"]
        if self._options.skip_zero_advantage and not self._backend.has_no_updates:
            misses += self._gradients_of_dead_rows(rows, plan, loss)
        self._num_batches += 1
        if misses:
            self._miss("; ".join(misses))
        figures = verdict._asdict()
        figures[self._compared] = figures.pop("outputs")
        if not self._backend.shape.recurrent_layers:
            del figures["recurrence"]
        metrics = {f"prefix/verify_{name}": figure.ratio for name, figure in figures.items()}
        return metrics | {"timing_s/prefix_verify": time.perf_counter() - start}

    def _is_due(self) -> bool:
        """Whether this batch is one that `prefix.verify` names."""
        verify = self._options.verify
        if isinstance(verify, str):
            return verify == "first_step" and self._num_batches == 0
        return verify > 0 and self._num_batches % verify == 0

    def _candidates(self, rows: BatchRows, groups: Sequence[Group], budget: int) -> Sequence[Group]:
        """Returns groups to choose from, if every rank has one. If a rank has none it says so once, and returns []."""
        groups, limits = [group for group in groups if group.num_suffix_tokens] or groups, ""
        if self._backend.stock_facts.why_not_sharded:
            most = budget // self._backend.ranks.slices
            fits = [sum(pair) <= most for pair in zip(rows.prompt_lens, rows.response_lens, strict=True)]
            groups, limits = _with_chosen(groups, fits), f", with rows of at most {most} tokens (a rank's budget)"
        choices = [groups]
        if is_vision_config(self._backend.config):
            choices = self._with_equal_tower_runs(rows, groups)
            limits += ", without tokens of images or videos in responses"
            if len(choices) > 1:
                limits += " and with the same number of kinds of pixels (images, videos) on every rank"
        lacking = self._backend.ranks.max_over_ranks([not candidates for candidates in choices])
        for candidates, lacks in zip(choices, lacking, strict=True):
            if not lacks:
                return candidates
        warn_once(
            logger,
            "prefix.verify waits for a batch in which every rank has a prompt%s; set "
            "actor_rollout_ref.actor.prefix.verify=off where none will come",
            limits,
        )
        return []

    def _with_equal_tower_runs(self, rows: BatchRows, groups: Sequence[Group]) -> list[Sequence[Group]]:
        """Returns sets of groups. In each set all stock passes run a vision tower equally often, as ranks have to: with
        FSDP2 the stock path runs it once for images and once for videos. Rows whose response has a visual token are in
        no set: a model may sample one, and the stock path would end, since there are no pixels for it."""
        shown = zip(shown_lens(rows.data["input_ids"].unbind(), self._backend.config), rows.prompt_lens, strict=True)
        groups, pixels = _with_chosen(groups, [last <= prompt_len for last, prompt_len in shown]), rows.pixels
        if self._backend.stock_facts.equal_tower_runs:
            return [groups]
        # Rows of a tree may show other pixels each.
        runs = [{num_tower_runs(pixels[row]) for row in group.rows} for group in groups]
        return [[group for group, of_rows in zip(groups, runs, strict=True) if of_rows == {n}] for n in (1, 2)]

    def _gradients_of_dead_rows(self, rows: BatchRows, plan: Plan, loss: Loss) -> list[str]:
        """Checks on all ranks that rows in no pass of the plan have no gradient: dead rows, and rows with an empty
        response. Returns [] or [what is wrong]."""
        with together("checking rows that are left out", maxima=("has_gradient",)) as agreed:
            computed = {row for each in plan.passes for group in each.groups for row in group.rows}
            left_out = [row for row in range(len(rows)) if row not in computed]
            agreed.maximum("has_gradient", loss.has_gradient(rows, left_out, self._backend.ranks.data))
        return [f"rows that are left out have a gradient; set {SKIP_ZERO_ADVANTAGE}=False"] * agreed["has_gradient"]

    def _miss(self, why: str) -> None:
        """Ends the run, or sends all batches from now on to the stock path."""
        batches = "batch of ref" if self._backend.has_no_updates else "update"
        message = f"prefix.verify, {batches} {self._num_batches}: {why}"
        if self._options.verify_action == "raise":
            fallback = "actor_rollout_ref.actor.prefix.verify_action=fallback"
            raise RuntimeError(f"{message}, or {fallback} to go on with the stock path. Please report this")
        self.failure = WhyStock(f"the self-check missed: {message}. Please report this")

    def _verdict(self, rows: BatchRows, group: Group, budget: int, loss: Loss) -> Verdict:
        """Compares both paths of a group, on all ranks. Under top-k distillation its losses are compared, too."""
        backend = self._backend
        # The stock path takes one row at a time, since the budget may have no room for logits of more. Its passes hold
        # collectives: a rank with fewer rows repeats its last one, with weight 0.
        perturbed = _num_perturbed(len(rows), len(group.rows))
        (_, most), (fewest_perturbed, _) = backend.ranks.ranges_over_ranks(len(group.rows), perturbed)
        repeated = group.rows[-1:] * (most - len(group.rows))
        of_group, for_stock = rows.select(group.rows), rows.select([*group.rows, *repeated])
        group = group.renumbered({row: place for place, row in enumerate(group.rows)})
        lens = of_group.response_lens
        flags, falling = _NO_FLAGS | {"return_model_output": True}, _falling_loss
        if rows.flag("distillation_use_topk"):
            flags["distillation_use_topk"] = True
            falling = functools.partial(_falling_loss, processor=loss.function)
        for chosen in (of_group, for_stock):  # repeated rows count for nothing
            tu.assign_non_tensor(chosen.data, **flags)
            weights = [float(i < len(lens)) / len(lens) for i in range(len(chosen))]
            chosen.data["verify_weight"] = torch.tensor(weights)
        tu.assign_non_tensor(for_stock.data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)

        def responses(output: dict) -> torch.Tensor:
            if not backend.ranks.has_outputs:
                return torch.zeros(0)
            values = _compared_outputs(output["model_output"])[: len(lens)]
            return torch.cat([_of_response(*of_row) for of_row in zip(values, lens, strict=True)])

        forward_only = backend.has_no_updates  # then no gradient differs from zero

        def stock() -> torch.Tensor:
            return responses(backend.run_stock_path(for_stock.data, falling, forward_only))

        def ours(schedule: str, pass_type: Callable[..., AttentionPass]) -> torch.Tensor:
            plan = plan_to_check(group, budget, schedule, nests=backend.memory(self._options).stages == 1)
            falling_loss = Loss(falling, fields={"temperature", "verify_weight"})
            output, _ = self._run_plan(of_group, [group], plan, falling_loss, forward_only, pass_type=pass_type)
            return responses(output)

        with backend.gradients_aside():
            verdict = compare(
                stock, ours, backend.rounding_noise, backend.gradients(), backend.ranks.sum_over_ranks,
                num_perturbed=fewest_perturbed, outputs=self._compared.replace("_", "-"),
            )  # fmt: skip
        # The other figures are of all ranks together.
        of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_ranks, (verdict.attention, verdict.recurrence))
        attention, recurrence = map(max, zip(*of_ranks, strict=True))
        return verdict._replace(attention=attention, recurrence=recurrence)


def plan_to_check(group: Group, budget: int, schedule: str, nests: bool) -> Plan:
    """Returns the plan by which a group is checked, "packed" or "phased". In a phased one several waves read one
    prefix, whose gradients add up. That of a tree has nested passes, if passes may nest.

    Args:
        nests: see `make_plan`.
    """
    deepest = Nesting(group, budget, 1, offload=False).deepest() if nests and schedule == "phased" else None
    return Plan((deepest,)) if deepest else make_plan([group], budget, schedule, wave_tokens=1, nests=nests)


def _compared_outputs(model_output: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns what is compared of each row: log-probs or values. Top-k distillation adds its losses to these."""
    names = ("log_probs", "values", "distillation_losses")
    rows = [model_output[name].unbind() for name in names if name in model_output]
    return [torch.stack(of_row).sum(0) for of_row in zip(*rows, strict=True)]


def _of_response(row: torch.Tensor, length: int) -> torch.Tensor:
    """A row's outputs of its response: each stands at the token before its own."""
    return row[len(row) - length - 1 : len(row) - 1]


def _falling_loss(
    data: TensorDict, model_output: Mapping[str, torch.Tensor] | None = None,
    processor: Callable[..., Any] | None = None, **others: Any,
) -> Any:  # fmt: skip
    """The loss by which gradients are compared: the first tokens of a response, which read most of their prefix, count
    most. Called with logits, as verl does, it is the loss's own `processor`."""
    if model_output is None:
        assert processor is not None
        return processor(data=data, **others)
    lens, loss = BatchRows(data).response_lens, 0.0 * next(iter(model_output.values())).values().sum()
    for row, length, weight in zip(_compared_outputs(model_output), lens, data["verify_weight"], strict=True):
        falling = 1 / torch.arange(1, length + 1, device=row.device)
        loss = loss - weight * (_of_response(row, length) * falling).sum()
    return loss, {}


def _num_perturbed(num_rows: int, checked: int) -> int:
    """How many stock passes measure rounding: one to three, so that a check takes about an eighth of an update of this
    rank's rows. Stock, packed and phased, which are compared, cost about two of these. Where ours is off, `compare`
    runs more."""
    return min(3, max(1, num_rows // (8 * checked) - 2))


def _with_chosen(groups: Sequence[Group], chosen: Sequence[bool]) -> list[Group]:
    """The groups, each with those of its units all of whose rows are `chosen`; without any it is left out."""
    found = []
    for group in groups:
        units = [range(*unit) for unit in group.units()]
        places = [i for unit in units if all(chosen[group.rows[j]] for j in unit) for i in unit]
        found += [group.with_rows(places)] if places else []
    return found


def _num_shared_tokens(group: Group, first: tuple[int, int], second: tuple[int, int]) -> int:
    """How many strand tokens the last rows of two units share."""
    forks = (group.forks[unit[1] - 1] for unit in (first, second))
    one, another = ({strand: end for strand, _, end in group.strands_before(fork)} for fork in forks)
    return max((min(end, another[strand]) for strand, end in one.items() if strand in another), default=0)


def _cheapest(groups: Sequence[Group], num_rows: int) -> Group:
    """Picks the cheapest group whose longest rows have enough response tokens to compare, cut to those rows: two, or
    more where a rank has so many rows that three passes over them are an eighth of its update. Of a tree it keeps three
    rows at least: the longest, and the rows that share the most and the least with it, so that passes nest."""

    def longest(group: Group) -> Group:
        units = sorted(group.units(), key=lambda unit: -sum(group.suffix_lens[slice(*unit)]))
        least_rows = 3 if len(group.strands) > 1 and len(units) > 2 else 2
        if least_rows == 3:
            by_shared = sorted(units[1:], key=lambda unit: _num_shared_tokens(group, units[0], unit))
            farthest, *between, nearest = by_shared
            units = [units[0], nearest, farthest, *(unit for unit in units if unit in between)]
        most_rows = max(least_rows, min(_MOST_ROWS, num_rows // 24))
        tokens = [sum(sum(group.suffix_lens[slice(*unit)]) for unit in units[:n]) for n in range(least_rows, most_rows)]
        count = next((n for n, sum_ in enumerate(tokens, start=least_rows) if sum_ >= _ENOUGH_TOKENS), most_rows)
        return group.with_rows(sorted(row for unit in units[:count] for row in range(*unit))).pruned()

    sampled = [longest(group) for group in groups]
    shared = [group for group in sampled if group.is_shared] or sampled
    return min(shared, key=lambda group: (-min(group.num_suffix_tokens, _ENOUGH_TOKENS), group.num_physical_tokens))
