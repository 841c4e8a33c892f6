"""What expressions in readme_numbers.txt are made of, and what pages say beside quoted numbers: for test_readme.py."""

from statistics import fmean, median
from typing import Any


class Report(dict):
    """An object of a report: `arms.packed` is `arms["packed"]`, and `update` a key before it is a method of dict."""

    def __getattribute__(self, name: str) -> Any:
        return self[name] if name in self else super().__getattribute__(name)


# Of benches.
def took(of: Report, arm: str) -> float:
    """Median seconds of an update."""
    seconds = of.arms[arm].seconds
    return median(seconds.update if isinstance(seconds, dict) else seconds)


def gain(of: Report, arm: str, over: str = "stock") -> float:
    return took(of, over) / took(of, arm)


def gains(of: Report, over: str = "stock") -> str:
    return f"{gain(of, 'packed', over):.1f} and {gain(of, 'phased', over):.1f}"


# Of replays.
def sped(of: Report, arm: str, name: str) -> tuple[float, str]:
    """The median over steps of stock's seconds over an arm's, and the least and the largest."""
    ratios = [step.arms.stock.seconds[name] / step.arms[arm].seconds[name] for step in of.steps]
    return of.passes[arm][name].speedup, f"{min(ratios):.1f} to {max(ratios):.1f}"


def worst(of: Report, arm: str, name: str) -> float:
    """The largest difference from stock's from the same weights."""
    return max(step.arms[arm].same_weights[name] for step in of.steps)


def held(of: Report, name: str) -> float:
    """The same, of all arms that are judged."""
    return max(row.value for row in of.tolerances if row.name == f"same weights: {name}")


def drift(of: Report, key: str, arm: str) -> float:
    return of.weights_after_the_last[arm][key]


def errors(of: Report, name: str) -> str:
    """Mean errors against the truth, of the best and the worst arm."""
    means = [arm[name] for arm in of.mean_truth_errors.values()]
    return f"{min(means):.1e} to {max(means):.1e}"


# Of demos.
def times(of: Report, timing: str) -> tuple[float, str]:
    """The median ratio, and the least and the largest. Raises ValueError where the report says not to quote it."""
    if (row := of.ratios[timing]).ratio is None:
        raise ValueError(f"{timing}: {of.notes}")
    return row.ratio, f"{min(row.ratios):.1f} to {max(row.ratios):.1f}"


def both(of: Report, metric: str) -> list[tuple[float, float]]:
    """A metric of stock and ours in every step."""
    arms = (of.arms[name].steps for name in ("stock", "prefix"))
    return [(a.data[metric], b.data[metric]) for a, b in zip(*arms, strict=True)]


def apart(of: Report, metric: str) -> list[float]:
    return [abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in both(of, metric)]


def cells(of: Report, timing: str, digits: int = 1) -> str:
    return " | ".join(f"{a:.{digits}f} / {b:.{digits}f}" for a, b in both(of, f"timing_s/{timing}"))


def disagree(*reports: Report) -> float:
    """The largest difference of a token's probability between rollout and actor."""
    steps = [step for of in reports for arm in of.arms.values() for step in arm.steps]
    return max(step.data["training/rollout_probs_diff_max"] for step in steps)


def mib(of: Report, arm: str) -> int:
    return of.arms[arm].peak_rss_mib["training ranks"]


# Of `make learn`.
def learned(of: Report, metric: str) -> list[tuple[float, float]]:
    """A metric of stock and ours, of seed 1, in every step."""
    return [(a[metric], b[metric]) for a, b in zip(of.runs.stock_1.steps, of.runs.prefix_1.steps, strict=True)]


def rewards(of: Report) -> list[tuple[float, float]]:
    return learned(of, "critic/rewards/mean")


def slower(of: Report, metric: str) -> list[float]:
    return sorted(stock / ours for stock, ours in learned(of, metric)[1:])


# Of others.
def faster(of: Report, arm: str) -> float:
    return of.simulated.arms.stock.update_seconds / of.simulated.arms[arm].update_seconds


def to_end(of: Report, hung: bool, stages: bool = False) -> float:
    """Seconds that a fault took to end a job at most, where a worker hangs or elsewhere; on two stages or FSDP2."""
    of_kind = [case for case in of.cases if ("hangs" in case.case, case.arm == "stages") == (hung, stages)]
    return max(case.get("seconds_from_fault_to_end") or 0 for case in of_kind)


def error(of: Report, name: str) -> float:
    return max(worst.get(name, 0.0) for worst in of.worst.values())


OF_PART = (took, gain, gains, sped, worst, held, drift, errors, times, both, apart, cells, mib, rewards, slower, faster,
           to_end, error)  # fmt: skip
OTHERS = {"disagree": disagree, "fmean": fmean, "median": median}

# What sentences of these pages say without a number.
HOLDS = {
    "demo_smollm2": [
        "max(apart('critic/rewards/mean') + apart('response_length/mean')) <= 1e-6",
        "apart('actor/loss').index(max(apart('actor/loss'))) == 5 - 1",
    ],
    "fuzz": ["sum(families.values()) == sum(run.batches for run in runs) and not any(run.git.dirty for run in runs)"],
    "mutants.summary": ["tests.seen + tests.equal == nothing"],
    "mutants_core.summary": ["tests.seen + tests.equal == nothing"],
    "soak": ["ok and len(ranks) == 2", "all('objects' in x.grew and max(x.grew.values()) <= 0 for x in ranks)"],
    "chaos": ["not failed"],
    "learn": [
        "rewards()[0][0] == rewards()[0][1] and not any(problems.values())",
        "all([step.step for step in run.steps] == [*range(1, 17)] for run in runs.values())",
        "'total_training_steps=4 ' in config.sft",
    ],
    "plan_turns": ["updates == plan_turns_off.updates == 1 and trees == plan_turns_off.trees"],
    "trl_smollm2": ["same_completions and loss == 0 and trl.startswith('1.16')"],
    "versions_pinned": ["tests > 300 and not failures and not errors and versions.verl == '0.9.1'"],
    "versions_main": ["tests > 300 and not failures and not errors and versions.verl.startswith('0.10.0.dev')"],
}

# Numbers that no report holds: versions, tolerances, what another test holds, and of recurrent models what was
# simulated or what the named test prints.
NOT_MEASURED = {
    "README.md": "0.1.0 0.9.1 5.6 5.24 2506.05433 2606.01143 3.10 3.12 1.01 1.32",
    "examples/results/README.md": "0.1.12 0.16.1 0.9.1 2.13.0 5.10.4 2.11.0 5.9.0 5.24.0 5.5 5.6 5.24 0.28.0 1.16 "
    "4.0 2.5 0.20 1.9e-6",
    "verl_prefix/tools/README.md": "5e-6 1.3 1.5 2.3",
    "examples/README.md": "1.16 0.10",
    "verl_prefix/config/engines.md": "0.1.12 0.16.1 0.18.0 2.16.1 0.5.2",
    "verl_prefix/config/algorithms.md": "1e-6 0.1 0.3 0.7 0.11",
    "recipes/README.md": "0.9.1",
    ".github/CONTRIBUTING.md": "1e-9 5e-6 1.3",
    ".github/FOR_VERL.md": "0.9.1",
    "CHANGELOG.md": "0.1.0 0.1.12 0.16.1 0.9.0 0.9.1 5.6 5.15 5.23 5.24",
}
