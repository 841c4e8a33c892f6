"""Measured numbers in Markdown are those of the committed reports, a ratio that its report forbids is not quoted, every
report names versions, device and a commit of the history, links lead somewhere, README begins with commands.

`readme_numbers.txt` is the table of what pages quote of which report."""

import copy
import json
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from readme_numbers import HOLDS, NOT_MEASURED, OF_PART, OTHERS, Report, times

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "results"
ROOMS = (".github", "examples", "recipes", "tests", "verl_prefix")
PAGES = (*ROOT.glob("*.md"), *(page for room in ROOMS for page in (ROOT / room).rglob("*.md")))
MARKDOWN = sorted(str(page.relative_to(ROOT)) for page in PAGES)
# Pages with other numbers: written by a program, and recipes, which say how theirs are computed.
BY_PROGRAMS = (
    "coverage", "megatron", "placement", "placement_turns", "simulated_tables", "simulated_turns", "simulated_ulysses",
    "simulated_megatron", "simulated_veomni", "trees", "veomni", "verl_scripts",
)  # fmt: skip
WRITTEN = [f"examples/results/{name}.md" for name in BY_PROGRAMS]
HELD = [name for name in MARKDOWN if not name.startswith((*WRITTEN, "recipes/musique/", "recipes/video_rlvr/"))]
REPORTS = {
    path.stem.removesuffix("_cpu"): json.loads(path.read_text(), object_hook=Report) for path in RESULTS.glob("*.json")
}


def table() -> dict[str, list[tuple[str, str]]]:
    """By page: a part of the reports, and what the page says of it."""
    pages: dict[str, list[tuple[str, str]]] = {}
    for block in re.split(r"^(?=# |## |- )", Path(__file__).with_name("readme_numbers.txt").read_text(), flags=re.M)[
        1:
    ]:
        kind, text = " ".join(block.split()).split(" ", 1)
        if kind == "#":
            quotes = pages[text] = []
        elif kind == "##":
            part = text
        else:
            quotes.append((part, text))
    return pages


QUOTES = table()


def read(name: str) -> str:
    return (ROOT / name).read_text()


def value(expression: str, part: str, reports: dict[str, Any]) -> Any:
    """Of an expression about a report or a part of it, itself an expression of the reports: see readme_numbers.txt."""
    of = eval(part, dict(reports))
    return eval(expression, OTHERS | {f.__name__: partial(f, of) for f in OF_PART} | reports | of)


def filled(quote: str, part: str, reports: dict[str, Any]) -> str:
    """A quote with values in place of its expressions."""

    def shown(found: re.Match) -> str:
        return format(value(found[1], part, reports), found[2] or "").replace("e-0", "e-")

    return re.sub(r"\{(.+?)(?::([,.\d]+[ef]?))?\}", shown, quote)


def problems(name: str, text: str, reports: dict[str, Any] = REPORTS) -> list[str]:
    """Quotes that are not in the page's text, and its other numbers that look measured."""
    text = re.sub(r"<!-- bench -->.*<!-- /bench -->|```.*?```", "", text, flags=re.S)  # test_bench.py has the table
    text, found = " ".join(text.split()), []
    for quote in (filled(quote, part, reports) for part, quote in QUOTES.get(name, ())):
        if quote not in text:
            found.append(f"{name} does not say: {quote}")
        text = text.replace(quote, "")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    numbers = re.findall(r"(?<![\w./-])(?:\d[\d.]*e-?\d+|\d+(?:\.\d+)+|\d+(?= (?:times|MiB|s)\b))", text)
    allowed = NOT_MEASURED.get(name, "").split()
    return found + [f"{name} says {number}: of which report?" for number in numbers if number not in allowed]


@pytest.mark.parametrize("name", HELD)
def test_measured_numbers_are_those_of_the_reports(name: str) -> None:
    assert "\n".join(problems(name, read(name))) == ""


@pytest.mark.parametrize(("part", "expression"), [(name, one) for name, all_of in HOLDS.items() for one in all_of])
def test_what_pages_say_without_a_number_holds(part: str, expression: str) -> None:
    assert value(expression, part, REPORTS)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("README.md", "| 4.9 | 3.5 |", "| 4.9 | 3.6 |"),
        ("README.md", "| 121.0 | 31.9 |", "| 121.0 | 30.9 |"),
        ("README.md", "no GPU run yet", "no GPU run yet; one step is 4.9 times as fast"),
        ("README.md", "no GPU run yet", "no GPU run yet; one step is 2 times as fast"),
        ("examples/results/README.md", "62.0 / 11.0", "62.0 / 10.0"),
        ("examples/results/README.md", "# What was measured", "# What was measured: losses differ by 4e-7"),
        ("tests/studies/README.md", "All 31 jobs", "All 32 jobs"),
        ("examples/results/README.md", "on one CPU core", "on one CPU core, 4.4 times as fast,"),
        ("CHANGELOG.md", "- Recipes", "- 4.9 times as fast. Recipes"),
    ],
)
def test_another_number_is_found(name: str, old: str, new: str) -> None:
    assert old in read(name)
    assert problems(name, read(name).replace(old, new, 1))


@pytest.mark.parametrize("name", ["README.md", "examples/results/README.md"])
def test_a_ratio_that_its_report_forbids_cannot_be_quoted(name: str) -> None:
    uneven = copy.deepcopy(REPORTS["demo_smollm2"])
    uneven["ratios"]["step"]["ratio"] = None
    with pytest.raises(ValueError, match="step: .*steps after the first"):
        problems(name, read(name), REPORTS | {"demo_smollm2": uneven})


def test_readme_says_what_verls_own_scripts_gain() -> None:
    of_fsdp, readme = read("examples/results/verl_scripts.md").split("\n## ")[0], " ".join(read("README.md").split())
    gains = sorted(re.findall(r"accepted, (\d\.\d\d) \|", of_fsdp))
    assert len(gains) > 20 and f"have short prompts and gain {gains[0]} to {gains[-1]}" in readme


@pytest.mark.parametrize("engine", ["VeOmni", "Megatron"])
def test_engines_say_how_many_of_verls_own_scripts_are_accepted(engine: str) -> None:
    section = read("examples/results/verl_scripts.md").split(f"\n## {engine} ones")[1].split("\n## ")[0]
    accepted, refused = (len(re.findall(rf"^\|.*\| {word}", section, flags=re.M)) for word in ("accepted", "refused"))
    said = f"Of {accepted + refused} of verl's {engine} scripts {accepted} are accepted and {refused} refused"
    assert accepted > 3 and said in " ".join(read("verl_prefix/config/engines.md").split())


def test_a_committed_report_of_one_timed_step_forbids_ratios() -> None:
    with pytest.raises(ValueError, match="can be quoted"):
        times(REPORTS["demo_qwen2_5_vl_2ranks"], "update_actor")


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


def git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


def foreign_commits(commits: set[str]) -> list[str]:
    return [commit for commit in sorted(commits) if git("merge-base", "--is-ancestor", commit, "HEAD").returncode]


def test_every_report_names_versions_device_and_a_commit_of_this_history() -> None:
    commits = set()
    for name, report in REPORTS.items():
        assert report["versions"]["torch"] and report["device"], name
        commits.add(report["git"]["commit"])
    for path in RESULTS.glob("*.md"):
        commits.update(re.findall(r"\b(?:commit|at) ([0-9a-f]{7,40})\b", path.read_text()))
    shallow = git("rev-parse", "--is-shallow-repository")
    if shallow.stdout.strip() != "false":
        pytest.skip("a shallow clone, or no git: the history is not here")
    assert foreign_commits(commits) == []
    assert foreign_commits({"0" * 40, git("rev-parse", "HEAD").stdout.strip()}) == ["0" * 40]


def test_readme_begins_with_commands_that_make_and_ci_know() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", read("README.md"), flags=re.S)[:2]
    install, demo = ([line.split("#")[0].strip() for line in block.splitlines()] for block in blocks)
    url = re.search(r'URL = "(.+)"', read("setup.py"))[1]
    clone = f"git clone {url} && cd {url.rpartition('/')[2]}"
    assert install[:3] == [clone, "pip install .", "verl-prefix doctor"] and demo == [clone, "make demo", "make test"]
    for target in ("demo", "test"):
        assert re.search(rf"^{target}: setup", read("Makefile"), flags=re.M)
    assert "\nmake test\n" in read(".ci/run")
