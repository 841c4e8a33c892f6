"""`prefix.verify`: when the self-check runs, on which rows, and what happens where it misses."""

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.config.actor import SKIPS
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.attention import AttentionPass
from verl_prefix.core.errors import WITHOUT_SHARING
from verl_prefix.core.groups import Group
from verl_prefix.core.nesting import Nesting
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import make_plan
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.out_of_memory import out_of_memory_advice
from verl_prefix.engine.outputs import FLAGS
from verl_prefix.engine.paths import Stock
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.self_check import Verdict, check
from verl_prefix.engine.together import together
from verl_prefix.models.vision import is_vision_config, num_tower_runs, shown_lens
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)

_ENOUGH_TOKENS, _MOST_ROWS = 32, 8  # of a group that is checked


class Verification:
    """The self-check of one engine, on every rank at once: of updates, or of an engine for log-probs alone, which has
    no gradients to compare, of its batches.

    Args:
        run_plan: `PrefixEngine.run_plan`.

    Attributes:
        failure: why every batch goes verl's own path, once a check missed under prefix.verify_action=fallback; or None.
    """

    def __init__(self, backend: Backend, options: PrefixConfig, run_plan: Callable[..., tuple[dict, dict]]) -> None:
        self._backend, self._options, self._run_plan = backend, options, run_plan
        self.failure: Stock | None = None
        self._num_batches = 0

    def check(
        self, rows: BatchRows, groups: Sequence[Group], budget: int, skips: Plan | None = None, loss: Loss | None = None
    ) -> dict[str, float]:
        """Checks a few rows of a group, if a check is due, and that rows which the update leaves out have no gradient;
        returns its metrics.

        Args:
            skips: a plan that leaves rows out; None: none does. loss: the update's.
            budget: tokens of one pass; no pass of the check has more, unless one row alone does. Where each rank of
                several computes whole rows on verl's own path, a row that is checked has at most a rank's budget.

        Raises:
            RuntimeError: ours is off by more than rounding, and prefix.verify_action is raise.
        """
        options = self._options
        named = {"off": 0.0, "first_step": math.inf}
        every = named[options.verify] if isinstance(options.verify, str) else options.verify
        start = time.perf_counter()
        if not every or self._num_batches % every:  # n % inf is 0 for n = 0 alone
            self._num_batches += 1
            return {}
        groups = [group for group in groups if group.num_suffix_tokens] or groups
        limits = ""
        if self._backend.stock_facts.why_not_sharded:
            most = budget // self._backend.ranks.slices
            fits = [sum(pair) <= most for pair in zip(rows.prompt_lens, rows.response_lens, strict=True)]
            groups, limits = _of_rows(groups, fits), f", with rows of at most {most} tokens (a rank's budget)"
        candidates = self._checkable(rows, groups)
        if not candidates:
            if is_vision_config(self._backend.config):
                limits += ", without tokens of images or videos in responses"
                if not self._backend.stock_facts.equal_tower_runs:
                    limits += " and with the same number of kinds of pixels (images, videos) on every rank"
            warn_once(
                logger,
                "prefix.verify waits for a batch in which every rank has a prompt%s; set "
                "actor_rollout_ref.actor.prefix.verify=off where none will come",
                limits,
            )
            return {}
        with out_of_memory_advice(None):
            verdict = self._verdict(rows, _cheapest(candidates, len(rows)), budget, loss)
        why = ""
        if skips is not None and loss is not None:
            computed = {row for one in skips.passes for group in one.groups for row in group.rows}
            left = [row for row in range(len(rows)) if row not in computed]
            with together("checking rows that are left out", 1) as agreed:
                agreed += [int(loss.has_gradient(rows, left, self._backend.ranks.data))]
            why = f"rows that are left out have a gradient; set {SKIPS}=False" if agreed[0] else ""
        if verdict.missed:
            why = f"{verdict}. The shared-prefix path is wrong for this model; set {WITHOUT_SHARING}"
        self._num_batches += 1
        if why:
            batches = "batch of ref" if self._backend.has_no_updates else "update"
            message = f"prefix.verify, {batches} {self._num_batches}: {why} and report it"
            if options.verify_action == "raise":
                raise RuntimeError(
                    f"{message}, or actor_rollout_ref.actor.prefix.verify_action=fallback to go on with the stock path"
                )
            self.failure = Stock(f"the self-check missed: {message}")
        figures = {name: getattr(verdict, name) for name in ("attention", "recurrence", "gradients")}
        if not self._backend.shape.recurrent_layers:
            del figures["recurrence"]
        figures[verdict.outputs.replace("-", "_")] = verdict.log_probs
        metrics = {f"prefix/verify_{name}": value for name, value in figures.items()}
        return metrics | {"timing_s/prefix_verify": time.perf_counter() - start}

    def _verdict(self, batch: BatchRows, group: Group, budget: int, loss: Loss | None) -> Verdict:
        """Checks a group cut to its checked rows; of top-k distillation also what that makes of their logits."""
        backend = self._backend
        # Every rank runs equally many stock passes, of one row each: the budget may have no room for logits of more.
        most, minus_fewest = backend.ranks.max_over_ranks(
            [len(group.rows), -_num_perturbed(len(batch), len(group.rows))]
        )
        repeated = group.rows[-1:] * (int(most) - len(group.rows))
        rows, rows_alone = batch.select(group.rows), batch.select([*group.rows, *repeated])
        group = group.renumbered({row: place for place, row in enumerate(group.rows)})
        lens = rows.response_lens
        flags = dict.fromkeys(FLAGS, False) | {"return_model_output": True}
        name, falling = backend.output_names(flags)[0], _falling_loss
        if batch.flag("distillation_use_topk") and loss is not None:
            flags["distillation_use_topk"] = True
            falling = functools.partial(_falling_loss, processor=loss.function)
        for chosen in (rows, rows_alone):  # repeated rows count for nothing
            tu.assign_non_tensor(chosen.data, **flags)
            weights = [float(i < len(lens)) / len(lens) for i in range(len(chosen))]
            chosen.data["verify_weight"] = torch.tensor(weights)
        tu.assign_non_tensor(rows_alone.data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)

        def responses(output: dict) -> torch.Tensor:
            if not backend.ranks.has_outputs:
                return torch.zeros(0)
            found = _checked(output["model_output"])[: len(lens)]
            return torch.cat([row[len(row) - n - 1 : len(row) - 1] for row, n in zip(found, lens, strict=True)])

        forward_only = backend.has_no_updates  # then no gradient differs from zero

        def stock() -> torch.Tensor:
            return responses(backend.stock_batch(rows_alone.data, falling, forward_only))

        def ours(path: str, pass_type: Callable[..., AttentionPass]) -> torch.Tensor:
            plan = _checked_plan(group, budget, path, nests=backend.memory(self._options).stages == 1)
            falls = Loss(falling, fields={"temperature", "verify_weight"})
            output, _ = self._run_plan(rows, [group], plan, falls, forward_only, pass_type=pass_type)
            return responses(output)

        with backend.gradients_aside():
            verdict = check(
                stock, ours, backend.rounding_noise, backend.gradients(), backend.ranks.sum_over_ranks,
                num_perturbed=int(-minus_fewest),
            )  # fmt: skip
        worst: list[Any] = [None] * torch.distributed.get_world_size()
        own = (verdict.attention, verdict.layer), (verdict.recurrence, verdict.key)
        torch.distributed.all_gather_object(worst, own)
        (attention, layer), (recurrence, key) = (max(c, key=lambda one: one[0]) for c in zip(*worst, strict=True))
        found = verdict._replace(attention=attention, layer=layer, recurrence=recurrence, key=key)
        return found._replace(outputs=name.replace("_", "-"))

    def _checkable(self, batch: BatchRows, groups: Sequence[Group]) -> Sequence[Group]:
        """Groups to choose from, of which every rank has one. Their stock passes run a vision tower equally often on
        every rank: with FSDP2 verl's path runs it once for images and once for videos. It takes every visual token for
        one of these, also one that a model samples, and ends where pixels make fewer: such rows are left out."""
        chosen, config = [groups], self._backend.config
        if is_vision_config(config):
            shown = zip(shown_lens(batch.data["input_ids"].unbind(), config), batch.prompt_lens, strict=True)
            groups = _of_rows(groups, [last <= prompt_len for last, prompt_len in shown])
            pixels, chosen = batch.pixels, [groups]
            if not self._backend.stock_facts.equal_tower_runs:
                # Rows of a tree may show other pixels each.
                runs = [{num_tower_runs(pixels[row]) for row in group.rows} for group in groups]
                chosen = [[group for group, found in zip(groups, runs, strict=True) if found == {n}] for n in (1, 2)]
        lacking = self._backend.ranks.max_over_ranks([not groups for groups in chosen])
        return next((groups for groups, lacks in zip(chosen, lacking, strict=True) if not lacks), [])


def _checked_plan(group: Group, budget: int, path: str, nests: bool) -> Plan:
    """The plan by which a group is checked, "packed" or "phased": then several waves read one prefix, and their
    gradients add up; of a tree, where passes may be nested, those of several phases A.

    Args:
        nests: as of `make_plan`.
    """
    deepest = Nesting(group, budget, 1, offload=False).deepest() if nests and path == "phased" else None
    return Plan((deepest,)) if deepest else make_plan([group], budget, path, wave_tokens=1, nests=nests)


def _checked(model_output: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """What is compared, of each row: log-probs or values, and of top-k distillation the sums of these and its
    losses."""
    names = ("log_probs", "values", "distillation_losses")
    found = [model_output[name].unbind() for name in names if name in model_output]
    return [torch.stack(both).sum(0) for both in zip(*found, strict=True)]


def _falling_loss(
    data: TensorDict, model_output: Mapping[str, torch.Tensor] | None = None,
    processor: Callable[..., Any] | None = None, **others: Any,
) -> Any:  # fmt: skip
    """A loss to compare gradients by: the first tokens of a response, which read most of their prefix, count most.
    Called with logits, as verl does, it is the loss's own `processor`."""
    if model_output is None:
        assert processor is not None
        return processor(data=data, **others)
    lens, loss = BatchRows(data).response_lens, 0.0 * next(iter(model_output.values())).values().sum()
    for row, length, weight in zip(_checked(model_output), lens, data["verify_weight"], strict=True):
        falling = 1 / torch.arange(1, length + 1, device=row.device)
        loss = loss - weight * (row[len(row) - length - 1 : len(row) - 1] * falling).sum()
    return loss, {}


def _num_perturbed(num_rows: int, checked: int) -> int:
    """How many stock passes measure rounding: one to three. Together with ours and stock's own, which count as two
    passes, they take about an eighth of the time of an update of a rank's rows."""
    return min(3, max(1, num_rows // (8 * checked) - 2))


def _of_rows(groups: Sequence[Group], chosen: Sequence[bool]) -> list[Group]:
    """The groups, without rows that are not `chosen`."""
    found = []
    for group in groups:
        units = [range(*unit) for unit in group.units()]
        places = [i for unit in units if all(chosen[group.rows[j]] for j in unit) for i in unit]
        found += [group.with_rows(places)] if places else []
    return found


def _shared(group: Group, first: tuple[int, int], second: tuple[int, int]) -> int:
    """Number of tokens that the last rows of two units share."""
    forks = (group.forks[unit[1] - 1] for unit in (first, second))
    one, another = ({strand: end for strand, _, end in group.strands_before(fork)} for fork in forks)
    return max((min(end, another[strand]) for strand, end in one.items() if strand in another), default=0)


def _cheapest(groups: Sequence[Group], num_rows: int) -> Group:
    """The cheapest group whose longest rows have enough response tokens to compare, cut to those rows: two, or more
    where a rank has so many rows that three passes over them are an eighth of its update. Of a tree three at least: the
    longest, and those that share the most and the least with it, so that passes nest."""

    def longest(group: Group) -> Group:
        units = sorted(group.units(), key=lambda unit: -sum(group.suffix_lens[slice(*unit)]))
        least_rows = 3 if len(group.strands) > 1 and len(units) > 2 else 2
        if least_rows == 3:
            farthest, *between, nearest = sorted(units[1:], key=lambda unit: _shared(group, units[0], unit))
            units = [units[0], nearest, farthest, *(unit for unit in units if unit in between)]
        most_rows = max(least_rows, min(_MOST_ROWS, num_rows // 24))
        tokens = [sum(sum(group.suffix_lens[slice(*unit)]) for unit in units[:n]) for n in range(least_rows, most_rows)]
        count = next((n for n, sum_ in enumerate(tokens, start=least_rows) if sum_ >= _ENOUGH_TOKENS), most_rows)
        return group.with_rows(sorted(row for unit in units[:count] for row in range(*unit))).pruned()

    sampled = [longest(group) for group in groups]
    shared = [group for group in sampled if group.is_shared] or sampled
    return min(shared, key=lambda group: (-min(group.num_suffix_tokens, _ENOUGH_TOKENS), group.num_physical_tokens))
