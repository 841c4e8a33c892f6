"""Measured numbers in Markdown are those of the committed reports, a ratio that its report forbids is not quoted, every
report names versions, device and a commit of the history, links lead somewhere, README begins with commands."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (".github", "examples", "recipes", "tests", "verl_prefix")
PAGES = (*ROOT.glob("*.md"), *(page for room in ROOMS for page in (ROOT / room).rglob("*.md")))
MARKDOWN = sorted(str(page.relative_to(ROOT)) for page in PAGES)
RESULTS = "examples/results/README.md"
# Files with other numbers: written by a program, and recipes, which say how theirs are computed.
NOT_HELD = (
    "examples/results/bench_cpu.md", "examples/results/coverage.md", "examples/results/placement.md",
    "examples/results/placement_turns.md",
    "examples/results/simulated_tables.md", "examples/results/simulated_turns.md",
    "examples/results/simulated_ulysses.md", "examples/results/trees.md", "examples/results/verl_scripts.md",
    "recipes/musique/", "recipes/video_rlvr/",
)  # fmt: skip
HELD = [name for name in MARKDOWN if not name.startswith(NOT_HELD)]
Load = Callable[[str], dict[str, Any]]
# Numbers that no report holds: versions and tolerances.
NOT_MEASURED = {
    "README.md": {
        "0.1.0",
        "0.9.1",
        "2.13.0",
        "5.10.4",
        "2.11.0",
        "5.9.0",
        "5.24.0",
        "5.5",
        "5.6",
        "5.24",
        "2506.05433",
        "2606.01143",
        "3.10",
        "3.11",
        "3.12",
    },
    RESULTS: {"2.13.0", "0.28.0", "1.16"},
    "verl_prefix/tools/README.md": {"5e-6", "1.3", "2.3"},
    "examples/README.md": {"1.16", "0.10"},
    # versions; simulated; what the test prints that the page names
    "recipes/README.md": {"0.9.1", "2.13.0", "5.10.4", "4.0", "2.5", "0.20", "1.9e-6"},
    ".github/CONTRIBUTING.md": {"1e-9", "5e-6", "1.3"},
    "CHANGELOG.md": {"0.1.0", "0.9.0", "0.9.1", "5.6", "5.15", "5.23", "5.24"},
}


def read(name: str) -> str:
    return (ROOT / name).read_text()


def load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "examples" / "results" / f"{name}_cpu.json").read_text())


def times(report: dict[str, Any], timing: str) -> tuple[float, float, float]:
    """Of a demo: the ratio, the least and the largest. Raises ValueError where its report says not to quote it."""
    row = report["ratios"][timing]
    if row["ratio"] is None:
        raise ValueError(f"{timing}: {report['notes']}")
    return row["ratio"], min(row["ratios"]), max(row["ratios"])


def update_seconds(arms: dict[str, Any]) -> dict[str, float]:
    return {name: median(arm["seconds"]["update"] if "update" in arm else arm["seconds"]) for name, arm in arms.items()}


def faster(report: dict[str, Any], arm: str, name: str) -> tuple[float, float, float]:
    """Of a replay: the median over steps of stock's seconds over an arm's, the least and the largest."""
    ratios = [s["arms"]["stock"]["seconds"][name] / s["arms"][arm]["seconds"][name] for s in report["steps"]]
    return report["passes"][arm][name]["speedup"], min(ratios), max(ratios)


def speedups(arms: dict[str, Any]) -> list[float]:
    """Of packed and phased over stock, then of both over stock_lean."""
    seconds = update_seconds(arms)
    return [seconds[base] / seconds[arm] for base in ("stock", "stock_lean") for arm in ("packed", "phased")]


def readme_quotes(load: Load) -> Iterator[tuple]:
    for p, s, g in ((2400, 256, 8), (8000, 256, 8), (4000, 1000, 16), (100, 600, 8)):
        yield "| {} | {} | {} | {:.1f} |", p, s, g, (g * p + g * s) / (p + g * s)
    row = "| {} | {:.1f} | {:.1f} | {:.1f} | {:.1f} |"
    bench, video, demo = load("bench"), load("video"), load("demo_smollm2")
    for measured in bench["rows"][:3:2]:
        seconds, gains = update_seconds(measured["arms"]), speedups(measured["arms"])
        yield ("| update, {} / {} / {} " + row, *(measured[name] for name in ("prefix", "suffix", "group")),
               bench["config"]["repeats"], seconds["stock"], seconds["packed"], gains[0], gains[2])  # fmt: skip
    shape = video["shapes"]["S=88"]
    seconds, gains = update_seconds(shape["arms"]), speedups(shape["arms"])
    yield ("prompt {:.0f} % of a row " + row, 100 * shape["prompt_share_of_a_row"], video["config"]["repeats"],
           seconds["stock"], seconds["packed"], gains[0], gains[2])  # fmt: skip
    step = demo["ratios"]["step"]
    yield ("S up to 32 | {} | {:.1f} | {:.1f} | {:.1f} | not measured |", len(step["ratios"]), step["stock_s"],
           step["prefix_s"], times(demo, "step")[0])  # fmt: skip


def bench_quotes(load: Load) -> Iterator[tuple]:
    whole, video = load("ab_synthetic"), load("video")
    small = load("bench")["rows"][1]["arms"]
    yield ("medians of {} steps' ratios): {:.1f} (packed; {:.1f} to {:.1f}) and {:.1f} times (phased; {:.1f} to "
           "{:.1f}) as fast as verl's fsdp2 in the update (bare models, in the table: {:.1f} and {:.1f}, over "
           "stock_lean {:.1f} and {:.1f}), {:.1f} ({:.1f} to {:.1f}) and {:.1f} times ({:.1f} to {:.1f}) in log-probs",
           len(whole["steps"]), *(x for arm in ("packed", "phased") for x in faster(whole, arm, "update")),
           *speedups(small), *(x for arm in ("packed", "phased") for x in faster(whole, arm, "log_probs")))  # fmt: skip
    turns = load("bench_turns")["rows"][0]["arms"]
    of_turns = [turns[arm][key] for key in ("speedup", "ceiling") for arm in ("one_level", "packed", "phased")]
    yield ("{} layers, turns of {} tokens, medians of {} rounds): in the update {:.1f} (whole prompts shared alone), "
           "{:.1f} (packed trees) and {:.1f} times (phased) as fast as stock, for FLOP ratios of {:.1f}, {:.1f} and "
           "{:.1f}", "two", 128, len(turns["stock"]["seconds"]["update"]), *of_turns)  # fmt: skip
    longest = load("bench_capacity")["rows"][0]["capacity"]
    yield ("stock {stock} tokens, packed {packed}, phased {phased} ({:.1f} times); stock with lm_head on responses "
           "alone, one row at a time, {stock_lean}", longest["phased"] / longest["stock"], longest)  # fmt: skip
    low, high = video["shapes"].values()
    low_share, high_share = (100 * shape["prompt_share_of_a_row"] for shape in (low, high))
    low, high = speedups(low["arms"]), speedups(high["arms"])
    yield ("medians of {} rounds) is {:.1f} (packed) and {:.1f} (phased) times as fast as stock where the prompt is "
           "{:.0f} % of a row, {:.1f} and {:.1f} times where it is {:.0f} %; {:.1f} and {:.1f}, {:.1f} and {:.1f} "
           "times as fast as stock with lm_head on responses alone",
           video["config"]["repeats"], *low[:2], low_share, *high[:2], high_share, *low[2:], *high[2:])  # fmt: skip


def demo_quotes(load: Load) -> Iterator[tuple]:
    found = load("demo_smollm2")
    pairs = [[step["data"] for step in both]
             for both in zip(*(found["arms"][name]["steps"] for name in ("stock", "prefix")), strict=True)]  # fmt: skip

    def apart(metric: str) -> list[float]:
        return [abs(a[metric] - b[metric]) / max(abs(a[metric]), abs(b[metric]), 1e-12) for a, b in pairs]

    norms, losses = apart("actor/grad_norm"), apart("actor/loss")
    yield "{:.1e} (relative) apart in the gradient norm, {:.1e} in the loss", norms[0], losses[0]
    assert max(apart("critic/rewards/mean") + apart("response_length/mean")) <= 1e-6
    yield ("mean rewards, which move by too little to be drawn, and response lengths stay equal",)
    yield ("gradient norms are {:.1e}, {:.1e}, {:.1e} and {:.1e} apart in steps 2 to 5, losses up to {:.1e} (step "
           "{})",
           *norms[1:], max(losses), 1 + losses.index(max(losses)))  # fmt: skip
    for title, timing, digits in (
        ("update_actor", "update_actor", 1), ("old log-probs", "old_log_prob", 1), ("ref log-probs", "ref", 1),
        ("whole step", "step", 0),
    ):  # fmt: skip
        seconds = [f"{step[f'timing_s/{timing}']:.{digits}f}" for pair in pairs for step in pair]
        yield "| {} |" + " {} / {} |" * len(pairs), title, *seconds
    yield ("takes {:.1f} times as long for the update (median of {} steps' ratios; {:.1f} to {:.1f}), {:.1f} times "
           "({:.1f} to {:.1f}) and {:.1f} times ({:.1f} to {:.1f}) for old and ref log-probs, {:.1f} times ({:.1f} "
           "to {:.1f}) for the step",
           times(found, "update_actor")[0], len(found["ratios"]["update_actor"]["ratios"]),
           *times(found, "update_actor")[1:], *times(found, "old_log_prob"), *times(found, "ref"),
           *times(found, "step"))  # fmt: skip
    yield "The tokens alone give {:.1f};", found["token_ratio"]

    turns = load("demo_tiny_turns")
    size, tokens, loss = turns["config"]["size"], turns["tokens"], turns["first_step"]["metrics"]["actor/loss"]
    yield "{} prompts x {} sessions x {} turns", size["prompts"], size["rollouts"], size["turns"]
    yield "step {} agrees too: {:.1e} apart in the loss", 1, loss["relative_difference"]
    fewer = [x for name in ("one level", "trees") for x in (tokens[name], tokens["stock"] / tokens[name])]
    yield ("Of its {} tokens whole prompts alone compute {}, {:.2f} times fewer, and trees {}, {:.2f} times fewer",
           tokens["stock"], *fewer)  # fmt: skip
    yield ("stock takes {:.1f} times as long for the update ({:.1f} to {:.1f}) and {:.1f} times ({:.1f} to {:.1f}) for "
           "the step, which waits {:.0f} s for the rollout; for old and ref log-probs at least {:.1f} and {:.1f} times",
           *times(turns, "update_actor"), *times(turns, "step"), turns["ratios"]["rollout"]["prefix_s"],
           *(min(turns["ratios"][name]["ratios"]) for name in ("old_log_prob", "ref")))  # fmt: skip
    yield "ranks take {:.0f} MiB, stock's {:.0f}", *(
        turns["arms"][arm]["peak_rss_mib"]["training ranks"] for arm in ("prefix", "stock"))  # fmt: skip

    def disagree(*reports: dict[str, Any]) -> float:
        steps = [step for report in reports for arm in report["arms"].values() for step in arm["steps"]]
        return max(step["data"]["training/rollout_probs_diff_max"] for step in steps)

    videos = [load("demo_qwen2_5_vl"), load("demo_qwen3_vl")]
    first = {name: max(video["first_step"]["metrics"][name]["relative_difference"] for video in videos)
             for name in ("actor/grad_norm", "actor/loss")}  # fmt: skip
    yield ("gradient norms of step 1 agree to {:.1e}, losses to {:.1e} (relative), and rollout and actor within "
           "{:.1e} on every token's probability in {} steps",
           *first.values(), disagree(*videos), len(videos[0]["arms"]["stock"]["steps"]))  # fmt: skip
    vllm = load("vllm")
    yield "probability within {:.1e} in {} steps of both arms", disagree(vllm), len(vllm["arms"]["stock"]["steps"])

    ranks2, plan = [load("demo_qwen2_5_vl_2ranks"), load("demo_qwen3_vl_2ranks")], load("plan_qwen3_vl_2ranks")
    seconds = [report["arms"][name]["steps"][1]["data"]["timing_s/update_actor"]
               for report in ranks2 for name in ("stock", "prefix")]  # fmt: skip
    yield ("takes {:.1f} and {:.1f} s (Qwen2.5-VL) or {:.1f} and {:.1f} s (Qwen3-VL), for {:.1f} times fewer "
           "tokens; `verl-prefix plan` had said {:.1f} for tokens and {:.1f} for the update",
           *seconds, fmean(report["token_ratio"] for report in ranks2), plan["tokens"]["ratio"],
           plan["speedup"]["update"])  # fmt: skip
    ours, stock = ([report["arms"][name]["peak_rss_mib"] for report in ranks2] for name in ("prefix", "stock"))
    storage = [max(mib["TransferQueue"] for mib in arm) for arm in (ours, stock)]
    ranks = [mib["training ranks"] for pair in zip(ours, stock, strict=True) for mib in pair]
    yield ("storage {} MiB instead of {}; the larger rank {} instead of {} (Qwen2.5-VL), {} instead of {} (Qwen3-VL)",
           *storage, *ranks)  # fmt: skip


def ab_quotes(load: Load) -> Iterator[tuple]:
    tiny, bf16, smollm2, plan = (load(name) for name in ("ab_tiny", "ab_bf16", "ab_smollm2", "plan_smollm2"))

    def same_weights(report: dict[str, Any], name: str, *arms: str) -> float:
        return max(step["arms"][arm]["same_weights"][name] for step in report["steps"] for arm in arms)

    def errors(report: dict[str, Any], name: str) -> tuple[float, float]:
        """Mean of the steps, of the best and the worst arm."""
        known = [step["truth_errors"] for step in report["steps"] if step["truth_errors"]]
        means = [fmean(step[arm][name] for step in known) for arm in known[0]]
        return min(means), max(means)

    def drift(report: dict[str, Any], key: str) -> list[float]:
        arms = report["steps"][-1]["arms"]
        return [arms[name]["own_weights"]["params"][key] for name in ("packed", "phased", "stock_repacked")]

    yield ("gradients differ by at most {:.1e}, log-probs by {:.1e} (relative). After step {} the weights' RMSE "
           "from stock's is {:.1e} (packed), {:.1e} (phased) and {:.1e} (stock with its micro-batches repacked), "
           "the largest difference {:.1e}, {:.1e} and {:.1e};",
           *(same_weights(tiny, name, "packed", "phased") for name in ("grads", "log_probs")), len(tiny["steps"]),
           *drift(tiny, "rmse_fp32"), *drift(tiny, "max_fp32"))  # fmt: skip
    yield "From a float64 run the weights are {:.1e} to {:.1e} in all four arms", *errors(tiny, "params")
    packed, phased, repacked = drift(bf16, "max_fp32")
    yield ("no weight differs from stock's by more than {:.1e} (packed and phased) or {:.1e} (stock repacked)",
           max(packed, phased), repacked)  # fmt: skip
    yield "gradients are off by {:.1e} to {:.1e} in all four arms", *errors(bf16, "grads")
    yield ("in the median of {} steps {:.1f} times ({:.1f} to {:.1f}) as fast as stock in the update, {:.1f} times "
           "({:.1f} to {:.1f}) in log-probs; `verl-prefix plan` had said {:.1f} for both",
           len(smollm2["steps"]), *faster(smollm2, "auto", "update"), *faster(smollm2, "auto", "log_probs"),
           plan["speedup"]["update"])  # fmt: skip
    yield ("Gradients are {:.1e} from a float64 run in stock and in ours, at most {:.1e} from each other; stock "
           "with its micro-batches repacked is up to {:.1e} from stock",
           errors(smollm2, "grads")[1], same_weights(smollm2, "grads", "auto"),
           same_weights(smollm2, "grads", "stock_repacked"))  # fmt: skip


def fuzz_quotes(load: Load) -> Iterator[tuple]:
    fuzz = load("fuzz")
    worst = {
        name: max(of.get(name, 0.0) for of in fuzz["worst"].values()) for name in ("gradients", "log_probs", "loss")
    }
    num = sum(fuzz["families"].values())
    assert num == sum(run["batches"] for run in fuzz["runs"]) and not any(run["git"]["dirty"] for run in fuzz["runs"])
    yield (
        "{:,} random batches of {} kinds of models on 1, 2 and 4 ranks: gradients are at most {:.1e} from stock's row "
        "by row, log-probs {:.1e}, a loss {:.1e}; {:.0f} % of them shared, {} ran under Ulysses",
        num, len(fuzz["families"]), *worst.values(), 100 * fuzz["shared"]["True"] / num, fuzz["options"]["ulysses"],
    )  # fmt: skip


def exact_line(load: Load) -> Iterator[tuple]:
    fuzz, seen = load("fuzz"), load("mutants_core")["summary"]["self-check"]
    num, worst = sum(fuzz["families"].values()), max(of["gradients"] for of in fuzz["worst"].values())
    yield "In {:,} random batches gradients were at most {:.1e} from", num, worst
    told = "Of {} small changes of core that made results wrong, the self-check of step 1 saw {}, and {} more ended it"
    yield told, seen["wrong"], seen["fp32"], seen["fp32 raises"]


def line_quotes(load: Load) -> Iterator[tuple]:
    rooms = load("lines")["rooms"]
    names = ("core", "engine", "models", "auto", "api", "tools")
    told = ", ".join(f"{{:.1f}} % in {name}" for name in names[:-1]) + " and {:.1f} % in " + names[-1]
    yield told, *(rooms[name]["percent"] for name in names)


def settled(report: dict) -> list[dict]:
    """Mutants that change no result of the batches: a test sees each, or the file says why none could."""
    rest = [one for one in report["mutants"] if one["shown by"] == "nothing"]
    assert all(bool(one.get("seen by test")) != bool(one.get("why")) for one in rest)
    return rest


def mutant_quotes(load: Load) -> Iterator[tuple]:
    report = load("mutants")
    by, seen = report["summary"], report["summary"]["self-check"]
    yield "{} of {:,} small changes", len(report["mutants"]), report["drawn_from"]
    yield "{} raise, {} make results wrong, and {} change no result", by["raises"], by["wrong"], by["nothing"]
    asked = settled(report)
    new = sum(one.get("test is new", False) for one in asked)
    yield "Of these {} the tests see {} (`--ask`), {} of them since", len(asked), by["tests"]["seen"], new
    yield "the other {} change nothing that a test could see", by["tests"]["equal"]
    yield "alone sees {} of the {} that are wrong in fp32 and {} in bf16", seen["fp32"], seen["wrong"], seen["bf16"]
    core = load("mutants_core")
    by, seen = core["summary"], core["summary"]["self-check"]
    yield "All {:,} changes of {} files of core", len(core["mutants"]), len(core["files"])
    yield "{} raise, {} make results wrong, and {} change no result", by["raises"], by["wrong"], by["nothing"]
    yield (
        "sees {} of the {} in fp32 and {} in bf16, and {}",
        seen["fp32"],
        seen["wrong"],
        seen["bf16"],
        seen["fp32 raises"],
    )
    yield "Of the {} the tests see {}, and the other {}", len(settled(core)), by["tests"]["seen"], by["tests"]["equal"]


def fault_quotes(load: Load) -> Iterator[tuple]:
    soak, chaos = load("soak"), load("chaos")
    assert soak["ok"] and not any(any(rank["grew"].values()) for rank in soak["ranks"])
    assert len(soak["ranks"]) == 2 and not chaos["failed"]
    assert all("objects" in rank["grew"] for rank in soak["ranks"])
    resident, in_use = (max(rank[f"{x}_mib_per_100_updates"] for rank in soak["ranks"]) for x in ("rss", "in_use"))
    yield ("{:,} updates on two ranks, of random ragged batches: objects, tensors, files, threads and processes did "
           "not grow, resident memory by at most {:.2f} MiB per 100 updates, of which {:.3f} were in use",
           soak["updates"], resident, in_use)  # fmt: skip
    yield "All {} jobs", chaos["tried"]
    took = {case["case"]: case.get("seconds_from_fault_to_end") or 0 for case in chaos["cases"]}
    yield "| {:.1f} s later, with", took.pop("one of two workers hangs in an update")
    yield "it ended within {:.1f} s", max(took.values())


def hybrid_quotes(load: Load) -> Iterator[tuple]:
    (row,) = load("bench_hybrid")["rows"]
    seconds, stock = update_seconds(row["arms"]), row["arms"]["stock"]["flops"]
    yield ("the update takes {:.1f} (packed) and {:.1f} times (phased) less than stock row by row, for {:.1f} times "
           "fewer FLOPs, and adds {:.0f} and {:.0f} MiB to model and gradients where stock adds {:.0f}",
           *(seconds["stock"] / seconds[arm] for arm in ("packed", "phased")), stock / row["ideal_flops"][""],
           *(row["arms"][arm]["added_peak_mib"] for arm in ("packed", "phased", "stock")))  # fmt: skip


def learn_quotes(load: Load) -> Iterator[tuple]:
    report = load("learn")
    size = report["config"]["size"]
    (sft_steps,) = re.findall(r"total_training_steps=(\d+)", report["config"]["sft"])
    yield (
        "{} steps of verl's SFT trainer, then {} of GRPO at a learning rate of {:.0e}",
        sft_steps,
        *(size[key] for key in ("steps", "lr")),
    )
    for name, run in report["runs"].items():
        rewards = [run["reward"][end][key] for end in ("start", "end") for key in ("mean", "deviation")]
        yield ("| {} | {:.3f} to {:.3f} | {:.3f} ({:.3f}) | {:.2f} ({:.2f}) to {:.2f} ({:.2f}) | {:.1f} |",
               name.replace("_", ", seed "), *run["exact_match"].values(), run["rise"], run["standard_error"], *rewards,
               run["minutes"])  # fmt: skip
    stock, ours = (report["runs"][name]["steps"] for name in ("stock_1", "prefix_1"))
    pairs = list(zip(stock, ours, strict=True))
    apart = [abs(a["critic/rewards/mean"] - b["critic/rewards/mean"]) for a, b in pairs]
    yield ("Stock's mean rewards of seed 1 are ours in step 1, within {:.3f} up to step 13 and within {:.2f} to the "
           "end", max(apart[:13]), max(apart))  # fmt: skip
    assert apart[0] == 0 and [a["step"] for a, _ in pairs] == [b["step"] for _, b in pairs] == list(range(1, 17))
    means = (fmean(step["critic/rewards/mean"] for step in run) for run in (stock, ours))
    yield "over all steps they are {:.3f} and {:.3f}", *means
    ratios = [a["timing_s/step"] / b["timing_s/step"] for a, b in pairs[1:]]
    yield ("A step of stock takes {:.1f} times as long ({:.1f} to {:.1f}, n {}), its update {:.1f} times",
           median(ratios), min(ratios), max(ratios), len(ratios),
           median(a["timing_s/update_actor"] / b["timing_s/update_actor"] for a, b in pairs[1:]))  # fmt: skip


def plan_quotes(load: Load) -> Iterator[tuple]:
    uid, off = load("plan_turns"), load("plan_turns_off")
    assert uid["updates"] == off["updates"] == 1
    assert uid["trees"] == off["trees"]

    def simulated(report: dict[str, Any], arm: str) -> float:
        arms = report["simulated"]["arms"]
        return arms["stock"]["update_seconds"] / arms[arm]["update_seconds"]

    millions = [uid["tokens"]["logical"], *(uid["trees"][over]["tokens"]["update"] for over in ("off", "uid", "batch"))]
    yield ("an update has {:.1f} million tokens, of which whole prompts alone (`prefix.trees=off`) leave {:.1f} to "
           "compute, `uid` {:.1f} and `batch` {:.1f}", *(n / 1e6 for n in millions))  # fmt: skip
    yield ("By `plan` it is {:.2f} times as fast as stock's with `uid`, packed, {:.2f} times phased, and {:.2f} times "
           "with `off`; by the simulator {:.2f}, {:.2f} and {:.2f} times",
           *(uid["speedup_by_schedule"][path]["update"] for path in ("packed", "phased")),
           off["speedup_by_schedule"]["packed"]["update"], simulated(uid, "packed"), simulated(uid, "phased"),
           simulated(off, "packed"))  # fmt: skip
    yield ("The largest peak of a rank is {:.1f} GiB packed and {:.1f} phased, stock's {:.1f}",
           *(uid["simulated"]["arms"][arm]["peak_gib"] for arm in ("packed", "phased", "stock")))  # fmt: skip


def trl_quotes(load: Load) -> Iterator[tuple]:
    report = load("trl_smollm2")
    assert report["same_completions"] and report["loss"] == 0 and report["trl"].startswith("1.16")
    yield ("take {:.0f} and {:.0f} CPU seconds with stock, {:.0f} and {:.0f} with ours",
           *(x for arm in ("stock", "ours") for x in report["cpu_seconds"][arm]))  # fmt: skip
    yield ("gradients differ by at most {:.1e}, weights after both steps by {:.1e} (of a parameter, relative)",
           max(report["grads"]), report["weights"])  # fmt: skip


def learn_line(load: Load) -> Iterator[tuple]:
    report = load("learn")
    assert not any(report["problems"].values())
    runs = report["runs"]
    ends = [runs[name]["exact_match"]["end"] for name in ("prefix_1", "prefix_2", "stock_1")]
    yield ("exact match on 256 held-out questions rises from {:.2f} to {:.2f} and {:.2f} with two seeds, to {:.2f} "
           "with stock's actor", runs["prefix_1"]["exact_match"]["start"], *ends)  # fmt: skip
    yield "The run takes {:.1f} minutes, stock's {:.1f}", runs["prefix_1"]["minutes"], runs["stock_1"]["minutes"]


QUOTES = {
    "README.md": [readme_quotes, exact_line, learn_line],
    RESULTS: [
        bench_quotes,
        demo_quotes,
        learn_quotes,
        plan_quotes,
        trl_quotes,
        ab_quotes,
        fuzz_quotes,
        line_quotes,
        mutant_quotes,
        fault_quotes,
    ],
    "recipes/README.md": [hybrid_quotes],
}


def problems(name: str, text: str, load: Load) -> list[str]:
    """Quotes that are not in the file's text, and its other numbers that look measured."""
    text = re.sub(r"<!-- bench -->.*<!-- /bench -->|```.*?```", "", text, flags=re.S)  # test_bench.py has the table
    text, found = " ".join(text.split()), []
    for quotes in QUOTES.get(name, ()):
        for template, *values in quotes(load):
            names = values.pop() if values and isinstance(values[-1], dict) else {}
            quote = template.format(*values, **names).replace("e-0", "e-")
            if quote not in text:
                found.append(f"{name} does not say: {quote}")
            text = text.replace(quote, "")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    numbers = re.findall(r"(?<![\w./-])(?:\d[\d.]*e-?\d+|\d+(?:\.\d+)+|\d+(?= (?:times|MiB|s)\b))", text)
    allowed = NOT_MEASURED.get(name, ())
    return found + [f"{name} says {number}: of which report?" for number in numbers if number not in allowed]


@pytest.mark.parametrize("name", HELD)
def test_measured_numbers_are_those_of_the_reports(name: str) -> None:
    assert "\n".join(problems(name, read(name), load)) == ""


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("README.md", "| 4.9 | 3.5 |", "| 4.9 | 3.6 |"),
        ("README.md", "| 121.0 | 31.9 |", "| 121.0 | 30.9 |"),
        ("README.md", "no GPU run yet", "no GPU run yet; one step is 4.9 times as fast"),
        ("README.md", "no GPU run yet", "no GPU run yet; one step is 2 times as fast"),
        (RESULTS, "62.0 / 11.0", "62.0 / 10.0"),
        (RESULTS, "# What was measured", "# What was measured: losses differ by 4e-7"),
        ("recipes/README.md", "on one CPU core", "on one CPU core, 4.4 times as fast,"),
        ("CHANGELOG.md", "- Recipes", "- 4.9 times as fast. Recipes"),
    ],
)
def test_another_number_is_found(name: str, old: str, new: str) -> None:
    assert old in read(name)
    assert problems(name, read(name).replace(old, new, 1), load)


@pytest.mark.parametrize("name", ["README.md", RESULTS])
def test_a_ratio_that_its_report_forbids_cannot_be_quoted(name: str) -> None:
    def uneven(report_name: str) -> dict[str, Any]:
        report = load(report_name)
        if report_name == "demo_smollm2":
            report["ratios"]["step"]["ratio"] = None
        return report

    with pytest.raises(ValueError, match="step: .*steps after the first"):
        problems(name, read(name), uneven)


def test_a_committed_report_of_one_timed_step_forbids_ratios() -> None:
    with pytest.raises(ValueError, match="can be quoted"):
        times(load("demo_qwen2_5_vl_2ranks"), "update_actor")


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(name: str, text: str) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        if "://" not in link and not (path.exists() and (not anchor or anchor in anchors(path.read_text()))):
            found.append(link)
    return found


@pytest.mark.parametrize("name", MARKDOWN)
def test_relative_links_lead_somewhere(name: str) -> None:
    assert dead_links(name, read(name)) == []


def test_a_dead_link_is_found() -> None:
    text = "[a](examples) [b](no/such.md) [c](README.md#limits) [d](README.md#no-such) [e](https://example.org/x)"
    assert dead_links("README.md", text) == ["no/such.md", "README.md#no-such"]


def test_the_table_of_versions_holds_what_passed():
    for name, verl in (("pinned", "0.9.1"), ("main", "main, 2026-08-22")):
        found = load(f"versions_{name}")
        versions = found["versions"]
        row = (
            f"| {verl} | {versions['torch'].partition('+')[0]} | {versions['transformers']} | `make {found['target']}`"
        )
        assert row in read("README.md")
        assert found["tests"] > 300 and not found["failures"] and not found["errors"]
        assert versions["verl"].startswith("0.10.0.dev" if name == "main" else verl)


def git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


def foreign_commits(commits: set[str]) -> list[str]:
    return [commit for commit in sorted(commits) if git("merge-base", "--is-ancestor", commit, "HEAD").returncode]


def test_every_report_names_versions_device_and_a_commit_of_this_history() -> None:
    results = ROOT / "examples" / "results"
    commits = set()
    for path in results.glob("*.json"):
        report = json.loads(path.read_text())
        assert report["versions"]["torch"] and report["device"], path.name
        commits.add(report["git"]["commit"])
    for path in results.glob("*.md"):
        commits.update(re.findall(r"\b(?:commit|at) ([0-9a-f]{7,40})\b", path.read_text()))
    shallow = git("rev-parse", "--is-shallow-repository")
    if shallow.stdout.strip() != "false":
        pytest.skip("a shallow clone, or no git: the history is not here")
    assert foreign_commits(commits) == []
    assert foreign_commits({"0" * 40, git("rev-parse", "HEAD").stdout.strip()}) == ["0" * 40]


def test_readme_begins_with_commands_that_make_and_ci_know() -> None:
    commands = re.search(r"```bash\n(.*?)```", read("README.md"), flags=re.S)[1]
    assert [line.split("#")[0].strip() for line in commands.splitlines()] == ["make demo", "make test"]
    for target in ("demo", "test"):
        assert re.search(rf"^{target}: setup", read("Makefile"), flags=re.M)
    assert "\nmake test\n" in read(".ci/run")
