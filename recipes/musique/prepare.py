"""MuSiQue-Ans v1.0 (or what make_questions.py writes) as verl parquet: all paragraphs and the question in one prompt.

The prompt is a single user message: some chat templates refuse a system role, and the instruction belongs to the prefix
that a group shares either way. The format is that of Trivedi et al., TACL 2022: one JSON object a line.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from reward import normalize

INSTRUCTION = (
    "Answer the question from the paragraphs below. It takes facts from several of them: find these facts first, in a "
    "few sentences. Then write the answer alone, in as few words as possible, between <answer> and </answer>."
)
SEARCH_INSTRUCTION = (
    "Answer the question with the search tool, which finds paragraphs. It takes facts from several of them: search for "
    "one after the other. Then write the answer alone, in as few words as possible, between <answer> and </answer>."
)
TEXTS = pa.list_(pa.string())
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": TEXTS}),
        "extra_info": pa.struct(
            {
                "split": pa.string(),
                "index": pa.int64(),
                "id": pa.string(),
                "hops": pa.int64(),
                "paragraphs": pa.int64(),
                "question": pa.string(),
            }
        ),
    }
)
# What agents read beside it (verl/experimental/agent_loop/tool_agent_loop.py).
TOOLS = pa.struct({"search": pa.struct({"create_kwargs": pa.struct({"paragraphs": TEXTS})})})
SEARCH_SCHEMA = SCHEMA.set(
    SCHEMA.get_field_index("extra_info"),
    pa.field("extra_info", pa.struct([*SCHEMA.field("extra_info").type, pa.field("tools_kwargs", TOOLS)])),
)
SURROGATE = re.compile("[\ud800-\udfff]")
UNSCORED = "without an answer that scores (the reward drops articles and punctuation)"
TYPE_NAMES = {str: "text", list: "a list", dict: "an object", int: "an integer", bool: "true or false"}


@dataclass(frozen=True)
class Paragraph:
    """One paragraph of the context; `supporting` where a hop of the question is answered by it."""

    title: str
    text: str
    supporting: bool


@dataclass(frozen=True)
class Question:
    """One answerable question: the accepted answers, the answer itself first, and the paragraphs in their order.

    An answer of which the reward's `normalize` leaves nothing ("A", "-") is not among them, and they may be none."""

    id: str
    text: str
    hops: int
    answers: list[str]
    paragraphs: list[Paragraph]


class Line:
    """One JSON object of the input, or an object inside it; its errors name file, line, key and the value seen."""

    def __init__(self, where: str, value: object, key: str = "") -> None:
        self.where, self.key = where, key
        self.value = self._typed(value, dict, key or "the line")

    def error(self, path: str, message: str) -> ValueError:
        return ValueError(f"{self.where}: {path}: {message}")

    def path(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else key

    def get(self, key: str, kind: type) -> object:
        """Return the value of `key`, of exactly this type."""
        if key not in self.value:
            raise self.error(self.path(key), f"missing; the object has {_shown(list(self.value))}")
        return self._typed(self.value[key], kind, self.path(key))

    def text(self, key: str) -> str:
        """Return the text at `key`, which is not blank."""
        text = self.get(key, str)
        if not text.strip():
            raise self.error(self.path(key), f"expected a text, found the empty {_shown(text)}")
        return text

    def items(self, key: str, kind: type) -> list:
        """Return the list at `key`, whose items are of this type; objects come back as `Line`."""
        items = [(value, f"{self.path(key)}[{i}]") for i, value in enumerate(self.get(key, list))]
        if kind is dict:
            return [Line(self.where, value, path) for value, path in items]
        return [self._typed(value, kind, path) for value, path in items]

    def _typed(self, value: object, kind: type, path: str) -> object:
        if type(value) is not kind:  # isinstance would take true for an integer
            raise self.error(path, f"expected {TYPE_NAMES[kind]}, found {_shown(value)}")
        if kind is str and SURROGATE.search(value):
            raise self.error(path, f"half of a surrogate pair in {_shown(value)}")
        return value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_questions(path: Path) -> Iterator[Question | None]:
    """Yield each line's question, None for an unanswerable one; blank lines are passed over.

    Raises:
        ValueError: naming file, line, key and value: no such file, no question in it, or a malformed line.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such file; give --input the jsonl of MuSiQue-Ans v1.0 or of make_questions.py")
    seen: dict[str, int] = {}
    number = 0
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            where = f"{path}, line {number}"
            try:
                line = Line(where, json.loads(raw.decode()))
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON: {error}; it starts with {raw[:60]!r}") from error
            question = parse(line) if line.get("answerable", bool) else None
            if question and seen.setdefault(question.id, number) != number:
                raise line.error("id", f"{_shown(question.id)} is on line {seen[question.id]} too")
            yield question
    if not seen:
        raise ValueError(f"{path}: no answerable question in {number} lines")


def parse(line: Line) -> Question:
    """Return the question of one line; ValueError where the line is not in the format."""
    paragraphs = line.items("paragraphs", dict)
    number_of: dict[int, int] = {}
    for number, paragraph in enumerate(paragraphs):
        idx = paragraph.get("idx", int)
        if number_of.setdefault(idx, number) != number:
            raise line.error(paragraph.path("idx"), f"{idx} is the idx of another paragraph too")
    hops = line.items("question_decomposition", dict)
    if not hops:
        raise line.error("question_decomposition", "expected at least one hop, found []")
    supporting = set()
    for hop in hops:
        idx = hop.get("paragraph_support_idx", int)
        if idx not in number_of:
            raise line.error(
                hop.path("paragraph_support_idx"), f"{idx} is out of range; paragraphs has {_shown(list(number_of))}"
            )
        supporting.add(number_of[idx])
    answers = dict.fromkeys([line.text("answer"), *line.items("answer_aliases", str)])
    return Question(
        id=line.text("id"),
        text=line.text("question"),
        hops=len(hops),
        answers=[answer for answer in answers if normalize(answer)],
        paragraphs=[
            Paragraph(
                p.get("title", str), p.get("paragraph_text", str), p.get("is_supporting", bool) or i in supporting
            )
            for i, p in enumerate(paragraphs)
        ],
    )


def limit(paragraphs: list[Paragraph], most: int | None) -> list[Paragraph]:
    """Return all supporting paragraphs and as many of the first others as `most` allows, in their order."""
    if most is None:
        return paragraphs
    spare = most - sum(paragraph.supporting for paragraph in paragraphs)
    kept = []
    for paragraph in paragraphs:
        if paragraph.supporting or spare > 0:
            kept.append(paragraph)
            spare -= not paragraph.supporting
    return kept


def row(question: Question, paragraphs: list[Paragraph], split: str, index: int) -> dict[str, object]:
    """Return one row of verl's parquet (verl/utils/dataset/rl_dataset.py)."""
    context = "\n\n".join(f"[{i}] {p.title}\n{p.text}" for i, p in enumerate(paragraphs, start=1))
    content = f"{INSTRUCTION}\n\n{context}\n\nQuestion: {question.text}"
    return {
        "data_source": "musique",
        "prompt": [{"role": "user", "content": content}],
        "ability": "multihop_qa",
        "reward_model": {"style": "rule", "ground_truth": question.answers},
        "extra_info": {
            "split": split,
            "index": index,
            "id": question.id,
            "hops": question.hops,
            "paragraphs": len(paragraphs),
            "question": question.text,
        },
    }


def search_row(question: Question, paragraphs: list[Paragraph], split: str, index: int) -> dict[str, object]:
    """Return one row for an agent: the question alone in its prompt, and the paragraphs for search_tool.py."""
    found = row(question, paragraphs, split, index)
    content = f"{SEARCH_INSTRUCTION}\n\nQuestion: {question.text}"
    texts = [f"{paragraph.title}\n{paragraph.text}" for paragraph in paragraphs]
    return found | {
        "prompt": [{"role": "user", "content": content}],
        "extra_info": found["extra_info"] | {"tools_kwargs": {"search": {"create_kwargs": {"paragraphs": texts}}}},
    }


def prepare(
    source: Path, output: Path, max_paragraphs: int | None = None, val_size: int = 0, search: bool = False
) -> str:
    """Write `train.parquet`, and `val.parquet` where `val_size` > 0, into `output`; return a summary.

    The validation rows are those whose id has the smallest SHA-256: the same rows for any order of the input. Both
    files appear whole or not at all.

    Raises:
        ValueError: a bad option, or anything that `read_questions` refuses.
    """
    if max_paragraphs is not None and max_paragraphs < 1:
        raise ValueError(f"--max-paragraphs {max_paragraphs}: set at least 1, or leave it out to keep all")
    if val_size < 0:
        raise ValueError(f"--val-size {val_size}: set 0 or more")
    read = list(read_questions(source))
    answerable = [question for question in read if question]
    questions = [question for question in answerable if question.answers]
    if not questions:
        raise ValueError(f"{source}: all {len(answerable)} answerable questions are {UNSCORED}")
    if val_size >= len(questions):
        raise ValueError(f"--val-size {val_size}: set fewer than the {len(questions)} answerable questions of {source}")
    held_out = {q.id for q in sorted(questions, key=lambda q: hashlib.sha256(q.id.encode()).digest())[:val_size]}
    splits = {"train": [q for q in questions if q.id not in held_out]}
    if val_size:
        splits["val"] = [q for q in questions if q.id in held_out]
    elif (stale := output / "val.parquet").exists():
        raise ValueError(f"{stale}: from an earlier run and not apart from this one's training rows; delete it")

    kept = {q.id: limit(q.paragraphs, max_paragraphs) for q in questions}
    make, schema = (search_row, SEARCH_SCHEMA) if search else (row, SCHEMA)
    rows = {split: [make(q, kept[q.id], split, i) for i, q in enumerate(chosen)] for split, chosen in splits.items()}
    write(output, {f"{split}.parquet": pa.Table.from_pylist(rows[split], schema) for split in rows})
    lines = [*summary(rows), f"skipped    {len(read) - len(answerable)} unanswerable"]
    if unscored := len(answerable) - len(questions):
        lines.append(f"skipped    {unscored} {UNSCORED}")
    if max_paragraphs is not None:
        over = sum(len(paragraphs) > max_paragraphs for paragraphs in kept.values())
        lines.append(f"over limit {over} with more than {max_paragraphs} supporting paragraphs, all of which are kept")
    return "\n".join(lines)


def write(output: Path, tables: dict[str, pa.Table]) -> None:
    """Write all tables beside their places, then move them there."""
    output.mkdir(parents=True, exist_ok=True)
    partials = {output / name: output / f".{name}.{os.getpid()}.partial" for name in tables}
    try:
        for table, partial in zip(tables.values(), partials.values(), strict=True):
            pq.write_table(table, partial)
        for path, partial in partials.items():
            os.replace(partial, path)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)


def summary(rows: dict[str, list[dict[str, object]]]) -> list[str]:
    """Return lines on rows, hops, paragraphs and prompt lengths."""
    every = [row for chosen in rows.values() for row in chosen]
    prompts = [row["prompt"][0]["content"] for row in every]
    lengths = {"characters": [len(text) for text in prompts], "words": [len(text.split()) for text in prompts]}
    lines = ["rows       " + ", ".join(f"{split} {len(chosen)}" for split, chosen in rows.items())]
    for key in ("hops", "paragraphs"):
        counts = Counter(row["extra_info"][key] for row in every)
        lines.append(f"{key:<10} " + ", ".join(f"{value}: {counts[value]}" for value in sorted(counts)))
    for unit, values in lengths.items():
        p = [round(x) for x in np.percentile(values, [0, 10, 50, 90, 100])]
        lines.append(f"{unit:<10} min {p[0]}, p10 {p[1]}, p50 {p[2]}, p90 {p[3]}, max {p[4]} in a prompt")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Prepare the data; return the exit status, 1 after one line on stderr where the input cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--max-paragraphs", type=int, metavar="N", help="keep the supporting ones and fill up to N")
    parser.add_argument("--val-size", type=int, default=0, metavar="N", help="rows for val.parquet (default 0: none)")
    parser.add_argument("--search", action="store_true", help="leave the paragraphs to a tool that searches them")
    args = parser.parse_args(argv)
    try:
        print(prepare(args.input, args.output, args.max_paragraphs, args.val_size, args.search))
    except (ValueError, OSError) as error:
        print(f"prepare: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
