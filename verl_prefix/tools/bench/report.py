"""Grids by name; speed-ups, Markdown, PNG and a page's table from a report's JSON."""

import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from verl_prefix.files import parse_json, write_whole
from verl_prefix.tools.bench.options import ARMS, STOCK
from verl_prefix.tools.plots import Bars, save
from verl_prefix.tools.report import Table, code_of, markdown

# (P prefix tokens, S response tokens per row, G rows of the prompt); verl's prompt is one token longer than P.
GRIDS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "verl4368": ((3072, 1024, 4), (7168, 1024, 4)),  # verl PR 4368: contexts of 4k and 8k, n=4; S is ours
    "musique": tuple((2400, s, 8) for s in (64, 128, 256, 512)),
    "video": ((8192, 256, 8),),
    "gsm8k": ((100, 600, 8),),
    "cpu": ((2048, 256, 8), (512, 256, 4), (100, 300, 2), (64, 64, 2)),
    "tiny": ((37, 11, 3), (20, 30, 2)),
}
# Dense bf16 tensor-core FLOP/s, from NVIDIA's data sheets, by a part of the device's name.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
MARKS = "<!-- bench -->", "<!-- /bench -->"
# The promise of auto: with it no row is slower than stock by more than noise.
LEAST_OF_STOCK = 0.97


def grid(names: list[str]) -> list[tuple[int, int, int]]:
    """The rows of these grids, each once."""
    return list(dict.fromkeys(row for name in names for row in GRIDS[name]))


def compare(report: dict[str, Any]) -> None:
    """Adds the figures that follow from a report's rows: p20, p50 and p80 of seconds, and ratios."""
    for row in report["rows"]:
        for arm in row["arms"].values():
            for name, seconds in arm.get("seconds", {}).items():
                if seconds:
                    fifths = quantiles(seconds, n=5, method="inclusive") if len(seconds) > 1 else seconds * 4
                    arm[name] = {"p20": fifths[0], "p50": median(seconds), "p80": fifths[3]}
    peak = None
    if report["config"]["device"] == "cuda" and report["config"]["dtype"] in ("bfloat16", "float16"):
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in report["device"]), None)
    for row in report["rows"]:
        _ratios(row, peak)


def _ratios(row: dict[str, Any], peak: float | None) -> None:
    """Speed-ups over stock with the same checkpointing; of sharing arms, the FLOP ratio (`ceiling`) and the speed-up's
    share of it."""
    for name, arm in row["arms"].items():
        added = "+checkpoint" if "+checkpoint" in name else ""
        if peak and "update" in arm:
            arm["mfu"] = arm["flops"] / arm["update"]["p50"] / peak
        stock = row["arms"].get(f"stock{added}", {})
        if "update" not in arm or "update" not in stock:
            continue
        arm["speedup"] = stock["update"]["p50"] / arm["update"]["p50"]
        if "log_probs" in arm and "log_probs" in stock:
            arm["log_probs_speedup"] = stock["log_probs"]["p50"] / arm["log_probs"]["p50"]
        if name.partition("+")[0] not in STOCK:
            ideal = row["ideal_flops"]
            arm["ceiling"] = stock["flops"] / ideal.get(name, ideal[added])
            arm["of_ceiling"] = arm["speedup"] / arm["ceiling"]


def blocks(report: dict[str, Any]) -> list[str | Table]:
    """Conditions, the table, and what the table does not show."""
    config, versions, rows = report["config"], report["versions"], report["rows"]
    installed = ", ".join(f"{name} {value}" for name, value in versions.items() if value and name != "verl-prefix")
    truth = "not measured" if config["truth"] == "none" else f"the largest of a parameter, against {config['truth']}"
    attention = _ATTENTION[report["stock_attention"]]
    compiled = ", decoder layers compiled" if config["compile"] else ""
    conditions = (
        f"{report['device']}, {config['dtype']}, {installed}; {code_of(report)}. "
        f"Model shape {config['shape']} with random weights, {rows[0]['layers']} of {report['full_depth']} layers"
        f"{compiled}. "
        "Seconds are p50 (p20 to p80) of rounds of all arms in turn; speed-ups are over stock with the same "
        f"checkpointing (attention: {attention}). n is the number of rounds; stock_lean runs lm_head on "
        "responses alone. The FLOP ratio is stock's FLOPs over those of computing every token once, lm_head on "
        "responses alone. MiB are what one update adds to model and gradients at its peak. Gradient error: "
        f"{truth}." + _TURNS * any(row.get("turns", 1) > 1 for row in rows)
    )
    head = ["P/S/G", "arm", "n", "update s", "speed-up", "over stock_lean", "of the FLOP ratio", "forward s",
            "log-probs s", "speed-up", "added MiB", "gradient error", "FLOP ratio", "tokens", "MFU"]  # fmt: skip
    optional = {"MFU": "mfu", "FLOP ratio": "tokens", "tokens": "tokens"}
    known = {key for row in rows for arm in row["arms"].values() for key in arm}
    columns = [i for i, name in enumerate(head) if name not in optional or optional[name] in known]
    cells = []
    for row in rows:
        for i, (name, arm) in enumerate(row["arms"].items()):
            cells.append([_size(row) if i == 0 else "", *_cells(row, name, arm)])
    table = Table([head[i] for i in columns], [[line[i] for i in columns] for line in cells])
    return [conditions, table, *filter(None, ["\n".join(_notes(report))])]


_TURNS = (
    " G of several turns are sessions with a row per turn, whose prompt has the turns before it without thoughts; "
    "one_level shares whole prompts alone, and has a FLOP ratio of its own. Tokens are those that an arm computes."
)
_ATTENTION = {
    "sdpa": "sdpa row by row",
    "flash_attention_2": "flash-attn varlen",
    "verl_prefix": "torch's flash varlen",
}


def _size(row: dict[str, Any]) -> str:
    turns = row.get("turns", 1)
    return f"{row['prefix']}/{row['suffix']}/{row['group']}" + f" x {turns} turns" * (turns > 1)


def _cells(row: dict[str, Any], name: str, arm: dict[str, Any]) -> list[str]:
    lean = row["arms"].get("stock_lean+checkpoint" if "+checkpoint" in name else "stock_lean", {})
    with_lean = "update" in lean and "update" in arm
    if name == "auto":
        name = f"auto: {row['auto']['choice']}"
    elif row["auto"] and row["auto"]["same_as"] == name:
        name += " (auto's choice)"
    if "failed" in arm:
        return [name, "-", arm["failed"], *["-"] * 11]

    def number(key: str, form: str) -> str:
        return format(arm[key], form) if key in arm else "-"

    def seconds(key: str) -> str:
        return "{p50:.3g} ({p20:.3g} to {p80:.3g})".format(**arm[key]) if key in arm else "-"

    return [name, str(len(arm["seconds"]["update"])) if "seconds" in arm else "-", seconds("update"),
             number("speedup", ".2f"), f"{lean['update']['p50'] / arm['update']['p50']:.2f}" if with_lean else "-",
             number("of_ceiling", ".2f"), seconds("forward"), seconds("log_probs"), number("log_probs_speedup", ".2f"),
             number("added_peak_mib", ".0f"), number("grad_error", ".1e"), number("ceiling", ".2f"),
             number("tokens", "d"), number("mfu", ".2f")]  # fmt: skip


def _notes(report: dict[str, Any]) -> list[str]:
    rows, lines, measured = report["rows"], [], []
    for row in rows:
        auto = row["auto"]
        speedup = auto and row["arms"].get(auto["same_as"] or "auto", {}).get("speedup")
        if speedup is not None:
            measured.append(speedup)
            lines.append(
                f"auto at {_size(row)}: {auto['choice']}, predicted {auto['predicted']:.2f}, measured {speedup:.2f}."
            )
    if measured:
        worst = min(measured)
        verdict = "holds" if worst >= LEAST_OF_STOCK else "does NOT hold"
        lines.append(f"Never below {LEAST_OF_STOCK} of stock with auto: {verdict} (lowest: {worst:.2f}).")
    for row in rows:
        if capacity := row.get("capacity"):
            longest = ", ".join(f"{arm} {total}" for arm, total in capacity.items())
            limit = f"{report['config']['capacity']:g} GiB"
            lines.append(f"Longest rows that train within {limit}, P:S:G as {_size(row)}: {longest} tokens.")
    # A report may be of an older commit, with arms that are no more.
    lines += [f"Not run here: {arm}: {why}." for arm, why in report["cannot_run"].items() if arm in ARMS]
    return [line + ("  " if i < len(lines) - 1 else "") for i, line in enumerate(lines)]


def write(report: dict[str, Any], out: Path) -> None:
    """Writes the JSON, and its Markdown beside it."""
    write_whole(out, json.dumps(report, indent=1) + "\n")
    write_whole(out.with_suffix(".md"), markdown(blocks(report)) + "\n")


def draw(report: dict[str, Any], path: Path) -> bool:
    """Speed-up with the FLOP ratio, and added memory, per row; False: see `plots.save`."""
    rows = report["rows"]
    arms = dict.fromkeys(name for row in rows for name in row["arms"])

    def values(key: str) -> dict[str, list[float | None]]:
        return {name: [row["arms"].get(name, {}).get(key) for row in rows] for name in arms}

    x, ticks = "P/S/G: prefix tokens / response tokens of a row / rows", [_size(row) for row in rows]
    gains = [row["arms"]["packed"]["speedup"] for row in rows if row["arms"].get("packed", {}).get("speedup")]
    best = f"packed is {min(gains):.1f} to {max(gains):.1f} times as fast as stock" if gains else "speed-up over stock"
    counts = {len(arm["seconds"]["update"]) for row in rows for arm in row["arms"].values() if arm.get("update")}
    n = " to ".join(str(count) for count in sorted({min(counts), max(counts)})) if counts else "0"
    title = f"Update: {best}, medians of n = {n} rounds"
    panels = [
        Bars(title, "times stock", x, ticks, values("speedup"), lines=("FLOP ratio", values("ceiling"))),
        Bars("Memory that an update adds at its peak", "MiB", x, ticks, values("added_peak_mib")),
    ]
    title = f"{report['device']}, {report['config']['dtype']}, model shape {report['config']['shape']}"
    return save(path, title, panels, columns=1, width=max(7, 1.5 * len(rows) + 4))


def render(source: Path, into: Path | None = None) -> int:
    """Markdown and PNG beside a report, and its Markdown between `MARKS` in another file; returns the exit code.

    Raises ValueError where `source` is not a report, `into` has no marks, or one of them is not here.
    """
    for option, file in (("--render", source), ("--into", into)):
        if file and not file.is_file():
            raise ValueError(f"{option} {file} is no file here")
    start, end = MARKS
    words = into.read_text() if into else f"{start}{end}"
    if start not in words or end not in words:
        raise ValueError(f"--into {into} has no lines {start} and {end}; add them around what is to be replaced")
    try:
        report = parse_json(source.read_text())
        compare(report)
        text = markdown(blocks(report))
        draw(report, source.with_suffix(".png"))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"--render {source} is not a report of verl-prefix bench ({type(error).__name__}: {error})"
        ) from error
    write(report, source)
    if into:
        before, after = words.split(start)[0], words.split(end)[1]
        write_whole(into, f"{before}{start}\n{text}\n{end}{after}")
    return 0
