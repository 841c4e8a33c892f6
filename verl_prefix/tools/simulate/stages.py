"""A mini-batch on the stages of a Megatron pipeline: passes that ran on all layers, in the order in which stages run
them (`auto.pipeline`).

What passes of a kind take, forward and backward, is shared out among them by their FLOPs. Hidden states and their
gradients take the time that a rank's part of them needs on the wire, in which the stage that sends does nothing else.
Not modelled: a receiver that is not there yet when a stage wants to send.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from verl_prefix.auto.cost import peak_bytes
from verl_prefix.auto.cost_model import CostModel
from verl_prefix.auto.pipeline import Round, Work, timeline
from verl_prefix.tools.simulate.hardware import Hardware
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.passes import BACKWARD, memory_of, plan_of
from verl_prefix.tools.simulate.tracker import Phase

_MICRO_BATCHES = ("micro_batch", "packed", "wave")


def on_stages(job: Job, arm: Arm, whole: dict[str, Phase], hardware: Hardware) -> dict[str, Phase]:
    """Phases "pipeline", "log_probs/pipeline" and "optimizer" of an average rank.

    Args:
        whole: phases of one stage with all layers. Its seconds have "layer_seconds".
    """
    memory = memory_of(job, arm)
    assert memory.division is not None and job.shape is not None
    shape, division = job.shape, memory.division
    costs = CostModel(shape, False, job.wave_tokens, min_speedup=0, memory=memory)
    rate = hardware.network if division.world <= hardware.per_node else hardware.nodes
    sent = division.part_of(shape).boundary / memory.slices / rate
    one_stage = replace(division, world=division.world // division.stages, stages=1)
    part = division.numbers(shape).parameters / one_stage.numbers(shape).parameters
    found = {"optimizer": _summed([whole["optimizer"]], part)}
    resident = sum(division.state(shape, job.dtype.itemsize))
    for kind, prefix, budget in (
        ("update", "", job.budget), ("forward", "log_probs/", job.log_prob_budget or job.budget)
    ):  # fmt: skip
        ran = {name.removeprefix(prefix): phase for name, phase in whole.items() if name.startswith(prefix)}
        ran = {name: phase for name, phase in ran.items() if name in (*_MICRO_BATCHES, "phase_a", "phase_c", BACKWARD)}
        if not ran:
            continue
        forward_only = kind == "forward"
        plan, stock = None, []
        if arm.path.startswith("stock"):
            stock = shape.stock_passes(job.groups, budget, dense_mask=False, one_row=arm.rows == 1)
        else:
            plan = plan_of(job, shape, arm, budget, forward_only)
        time = timeline(
            _timed(costs.rounds(plan or stock, kind, costs.flops(), sent), ran), division.stages, forward_only
        )
        summed = found[prefix + "pipeline"] = _summed(ran.values(), 1 / division.stages)
        summed["peak"] = resident + peak_bytes(shape, plan, stock, memory, forward_only)
        summed["seconds"], summed["bubble"] = time.seconds, time.bubble
    return found


def _summed(phases: Iterable[Phase], part: float) -> Phase:
    """This part of all amounts but peaks."""
    summed = Phase()
    for phase in phases:
        for name, x in phase.items():
            if not name.startswith(("peak", "host_peak")):
                summed[name] += x * part
    return summed


def _timed(rounds: Sequence[Round], ran: dict[str, Phase]) -> list[Round]:
    """Rounds of works in any unit -> in seconds of the phases that ran."""

    def took(*names: str) -> tuple[float, float]:
        phases = [ran[name] for name in names if name in ran]
        layers = sum(phase["layer_seconds"] for phase in phases)
        return layers, sum(phase["seconds"] for phase in phases) - layers

    backward, passes = took(BACKWARD), took(*_MICRO_BATCHES)
    forward = passes[0] - backward[0], passes[1] - backward[1]
    prefixes = _shared_out([one for each in rounds for one in each.prefixes], took("phase_a"), took("phase_c"))
    others = _shared_out([one for each in rounds for one in each.micro_batches], forward, backward)
    return [
        Round([next(prefixes) for _ in each.prefixes], [next(others) for _ in each.micro_batches]) for each in rounds
    ]


def _shared_out(works: Sequence[Work], forward: tuple[float, float], backward: tuple[float, float]) -> Iterator[Work]:
    """Seconds of all works, in layers and beside them, on each by its part of the forward."""
    layers, heads = sum(one.forward for one in works), sum(one.head_forward for one in works)
    for one in works:
        part = one.forward / layers
        of_head = one.head_forward / heads if heads else part
        yield Work(part * forward[0], part * backward[0], of_head * forward[1], of_head * backward[1], one.sent)
