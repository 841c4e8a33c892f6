"""Video-R1's json (or what make_clips.py writes) as verl parquet: one clip or picture and one question in a prompt.

Decoding stays with verl: a row carries the file's absolute path, the sampling rate and the pixel limits, in the keys of
qwen_vl_utils (verl/utils/dataset/rl_dataset.py). Every file is opened here first, because verl leaves rows that it
cannot decode out of training, with a traceback in the log. The format is that of Feng et al., 2025.
"""

import argparse
import hashlib
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from probe import probe
from reward import NUMERIC, PROBLEM_TYPES, number

INSTRUCTION = (
    "Think about what the question asks for and where it is to be seen, between <think> and </think>. "
    "Then write the answer alone, {form}, between <answer> and </answer>."
)
FORMS = {
    "multiple choice": "the letter of one option",
    "numerical": "a number",
    "OCR": "the text as it is written",
    "free-form": "at most one sentence",
    "regression": "a number",
}
SOLUTION = re.compile(r"\s*<answer>((?:(?!</?answer>).)*)</answer>\s*", re.DOTALL)
PLACEHOLDER = re.compile("<image>|<video>|<audio>")
LEADING = re.compile(r"\A\s*<(?:image|video)>")
Item = TypeVar("Item")
SURROGATE = re.compile("[\ud800-\udfff]")
FIRST_SKIPPED = 3  # rows of each reason that a summary names
LIMITS = [("min_pixels", pa.int64()), ("max_pixels", pa.int64())]
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "images": pa.list_(pa.struct([("image", pa.string()), *LIMITS])),
        "videos": pa.list_(
            pa.struct([("video", pa.string()), ("fps", pa.float64()), ("max_frames", pa.int64()), *LIMITS])
        ),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct(
            {"split": pa.string(), "index": pa.int64(), "id": pa.string(), "problem_type": pa.string()}
        ),
    }
)


class RowError(ValueError):
    """A row that cannot be used; `reason` is what a summary counts it under."""

    def __init__(self, where: str, reason: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.reason = reason


@dataclass(frozen=True)
class Sampling:
    """How verl samples a file: frames per second of a clip, most frames, pixels of a frame, most of a picture."""

    fps: float = 2.0
    max_frames: int = 16
    min_pixels: int = 16 * 28 * 28
    max_pixels: int = 128 * 28 * 28
    image_max_pixels: int = 256 * 28 * 28

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fps) and self.fps > 0):
            raise ValueError(f"--fps {self.fps}: set more than 0")
        if self.max_frames < 2 or self.max_frames % 2:
            raise ValueError(f"--max-frames {self.max_frames}: set an even number of at least 2; frames go in pairs")
        if not 0 < self.min_pixels <= min(self.max_pixels, self.image_max_pixels):
            raise ValueError(
                f"--min-pixels {self.min_pixels} --max-pixels {self.max_pixels} --image-max-pixels "
                f"{self.image_max_pixels}: set 0 < min <= max"
            )


@dataclass(frozen=True)
class Question:
    """One row of the input; `where` names it in errors, `path` is absolute."""

    where: str
    id: str
    text: str
    kind: str
    problem_type: str
    answer: str
    path: Path


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_rows(source: Path) -> list[object]:
    """Return the objects of a json list, or of a jsonl file.

    Raises:
        ValueError: no such file, not JSON, or not a list with something in it.
    """
    if not source.exists():
        raise ValueError(f"{source}: no such file; give --input a json of Video-R1 or questions.json of make_clips.py")
    try:
        text = source.read_text(encoding="utf-8")
        lines = [line for line in text.split("\n") if line.strip()] if source.suffix == ".jsonl" else None
        rows = json.loads(text) if lines is None else [json.loads(line) for line in lines]
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{source}: not JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{source}: expected a list of questions, found {_shown(rows)}")
    return rows


def parse(where: str, row: object, media_root: Path) -> Question:
    """Return the question of one row; RowError where the row is not in the format."""
    if not isinstance(row, dict):
        raise RowError(where, "malformed row", f"expected an object, found {_shown(row)}")
    identity = row.get("problem_id")
    if type(identity) not in (int, str) or not str(identity).strip():
        raise RowError(where, "malformed row", f"problem_id: expected an integer or text, found {_shown(identity)}")
    where = f"{where}, problem_id {identity}"
    values = {key: row.get(key) for key in ("problem", "data_type", "problem_type", "solution", "path")}
    for key, value in values.items():
        if not isinstance(value, str) or not value.strip() or SURROGATE.search(value):
            raise RowError(where, "malformed row", f"{key}: expected a text, found {_shown(value)}")
    if values["data_type"] not in ("video", "image"):
        raise RowError(
            where, "unknown data_type", f"data_type: expected video or image, found {_shown(row['data_type'])}"
        )
    if values["problem_type"] not in PROBLEM_TYPES:
        found = _shown(values["problem_type"])
        raise RowError(
            where, "unknown problem_type", f"problem_type: expected one of {list(PROBLEM_TYPES)}, found {found}"
        )
    answer = SOLUTION.fullmatch(values["solution"])
    if not answer or not answer[1].strip():
        raise RowError(
            where, "unusable solution", f"solution: expected <answer>TEXT</answer>, found {_shown(values['solution'])}"
        )
    answer = answer[1].strip()
    if values["problem_type"] in NUMERIC and number(answer) is None:
        raise RowError(where, "unusable solution", f"solution: expected one number, found {_shown(answer)}")
    text = LEADING.sub("", values["problem"]).strip()
    if not text:
        raise RowError(where, "malformed row", f"problem: expected a text, found {_shown(values['problem'])}")
    if values["problem_type"] == "multiple choice":
        options = row.get("options")
        if not isinstance(options, list) or not options or not all(isinstance(o, str) and o.strip() for o in options):
            raise RowError(where, "no options", f"options: expected a list of texts, found {_shown(options)}")
        if not any(re.match(rf"\W*{re.escape(answer)}\b", option) for option in options):
            raise RowError(
                where, "unusable solution", f"solution: {_shown(answer)} is the letter of none of {_shown(options)}"
            )
        text = "\n".join([text, "Options:", *options])
    if marker := PLACEHOLDER.search(text):
        raise RowError(where, "media placeholder", f"the question holds {marker[0]}, which verl would fill with media")
    path = (media_root / values["path"]).resolve()
    return Question(where, str(identity), text, values["data_type"], values["problem_type"], answer, path)


def check(question: Question, probed: float | tuple[str, str], sampling: Sampling, sample_long: bool) -> None:
    """Raise RowError where what `probe` found makes the row unusable."""
    if isinstance(probed, tuple):
        raise RowError(question.where, *probed)
    if (frames := probed * sampling.fps) > sampling.max_frames and not sample_long:
        message = (
            f"path: {question.path} is {probed:.1f} s long, {frames:.0f} frames at {sampling.fps} per second, and "
            f"--max-frames is {sampling.max_frames}; raise it, lower --fps, or set --long to skip or sample"
        )
        raise RowError(question.where, "longer than max_frames", message)


def row(question: Question, sampling: Sampling, split: str, index: int) -> dict[str, object]:
    """Return one row of verl's parquet (verl/utils/dataset/rl_dataset.py)."""
    media: dict[str, list] = {"images": [], "videos": []}
    if question.kind == "video":
        clip = {"video": str(question.path), "fps": sampling.fps, "max_frames": sampling.max_frames}
        media["videos"] = [clip | {"min_pixels": sampling.min_pixels, "max_pixels": sampling.max_pixels}]
    else:
        limits = {"min_pixels": sampling.min_pixels, "max_pixels": sampling.image_max_pixels}
        media["images"] = [{"image": str(question.path)} | limits]
    instruction = INSTRUCTION.format(form=FORMS[question.problem_type])
    return {
        "data_source": f"video_rlvr/{question.problem_type.replace(' ', '_')}",
        "prompt": [{"role": "user", "content": f"<{question.kind}>{question.text}\n\n{instruction}"}],
        **media,
        "ability": "video_qa",
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {"split": split, "index": index, "id": question.id, "problem_type": question.problem_type},
    }


def read_questions(
    source: Path, media_root: Path, sampling: Sampling, bad: str, long: str, skipped: dict[str, list[str]]
) -> Iterator[Question]:
    """Yield the usable questions; name the others in `skipped` under their reason, where an option says skip.

    Raises:
        RowError: the first row that cannot be used and is not to be skipped.
    """

    def skip(error: RowError) -> None:
        if (long if error.reason == "longer than max_frames" else bad) != "skip":
            raise error
        skipped.setdefault(error.reason, []).append(str(error))

    questions: list[Question] = []
    for i, content in enumerate(read_rows(source)):
        try:
            questions.append(parse(f"{source}, row {i}", content, media_root))
        except RowError as error:
            skip(error)
    files = list(dict.fromkeys((question.kind, question.path) for question in questions))
    with ThreadPoolExecutor() as pool:
        found = progress(pool.map(probe, *zip(*files, strict=True)), len(files)) if files else ()
        probed = dict(zip(files, found, strict=True))
    for question in questions:
        try:
            check(question, probed[question.kind, question.path], sampling, long == "sample")
            yield question
        except RowError as error:
            skip(error)


def progress(items: Iterable[Item], total: int, seconds: float = 10) -> Iterator[Item]:
    """Yield the items; say on stderr every ten seconds how many there were."""
    said = time.monotonic()
    for done, item in enumerate(items, start=1):
        if time.monotonic() - said >= seconds:
            said = time.monotonic()
            print(f"prepare: {done:,} of {total:,} files opened", file=sys.stderr, flush=True)
        yield item


def split_rows(questions: list[Question], val_size: int) -> dict[str, list[Question]]:
    """Return `train`, and `val` with at least `val_size` rows, in the order of the input.

    Whole files are held out, those with the smallest SHA-256 of the path as the input has it under its folder: no clip
    is in both splits, and the choice is the same for any order of the rows.
    """
    paths = sorted(
        {q.path for q in questions}, key=lambda path: hashlib.sha256("/".join(path.parts[-2:]).encode()).digest()
    )
    per_path = Counter(q.path for q in questions)
    held_out: set[Path] = set()
    count = 0
    for path in paths:
        if count >= val_size:
            break
        held_out.add(path)
        count += per_path[path]
    splits = {"train": [q for q in questions if q.path not in held_out]}
    if held_out:
        splits["val"] = [q for q in questions if q.path in held_out]
    return splits


def prepare(
    source: Path,
    output: Path,
    media_root: Path | None = None,
    sampling: Sampling | None = None,
    bad: str = "stop",
    long: str = "stop",
    val_size: int = 0,
) -> str:
    """Write `train.parquet`, and `val.parquet` where `val_size` > 0, into `output`; return a summary.

    Both files appear whole or not at all.

    Args:
        media_root: folder that relative paths start from; the folder of `source` by default.
        bad: `stop` at, or `skip` and name, rows that are malformed or whose file is missing or broken.
        long: the same for clips that have more than `max_frames` frames at `fps`; `sample` keeps them, and verl spreads
            `max_frames` frames evenly over them.

    Raises:
        ValueError: a bad option, an unusable file, or (RowError) an unusable row.
    """
    sampling = sampling or Sampling()
    if val_size < 0:
        raise ValueError(f"--val-size {val_size}: set 0 or more")
    skipped: dict[str, list[str]] = {}
    questions = list(read_questions(source, media_root or source.parent, sampling, bad, long, skipped))
    if not questions:
        raise ValueError(
            f"{source}: no usable row; skipped { {reason: len(rows) for reason, rows in skipped.items()} }"
        )
    splits = split_rows(questions, val_size)
    if not splits["train"]:
        raise ValueError(f"--val-size {val_size}: leaves no clip of {source} to train on; set a smaller number")
    if not val_size and (stale := output / "val.parquet").exists():
        raise ValueError(f"{stale}: from an earlier run and not apart from this one's training rows; delete it")
    rows = {split: [row(q, sampling, split, i) for i, q in enumerate(chosen)] for split, chosen in splits.items()}
    write(output, {f"{split}.parquet": pa.Table.from_pylist(rows[split], SCHEMA) for split in rows})
    types = Counter(q.problem_type for q in questions)
    lines = [
        "rows       " + ", ".join(f"{split} {len(chosen)}" for split, chosen in splits.items()),
        "types      " + ", ".join(f"{name}: {types[name]}" for name in PROBLEM_TYPES if types[name]),
        "files      "
        + ", ".join(f"{k}: {len({q.path for q in questions if q.kind == k})}" for k in ("video", "image")),
        "skipped    " + (", ".join(f"{len(skipped[reason])} {reason}" for reason in sorted(skipped)) or "0"),
        *(f"           {message}" for reason in sorted(skipped) for message in skipped[reason][:FIRST_SKIPPED]),
    ]
    return "\n".join(lines)


def write(output: Path, tables: dict[str, pa.Table]) -> None:
    """Write all tables beside their names, then move them there."""
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


def main(argv: list[str] | None = None) -> int:
    """Prepare the data; return the exit status, 1 after one line on stderr where the input cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--input", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--media-root", type=Path, metavar="DIR", help="where paths start (default: the input's folder)"
    )
    parser.add_argument("--fps", type=float, default=Sampling.fps, help="frames per second to sample (default 2)")
    parser.add_argument(
        "--max-frames", type=int, default=Sampling.max_frames, metavar="N", help="of a clip (default 16)"
    )
    parser.add_argument(
        "--min-pixels", type=int, default=Sampling.min_pixels, metavar="N", help="of a frame or picture"
    )
    parser.add_argument(
        "--max-pixels", type=int, default=Sampling.max_pixels, metavar="N", help="of a frame (128*28*28)"
    )
    parser.add_argument(
        "--image-max-pixels", type=int, default=Sampling.image_max_pixels, metavar="N", help="of a picture (256*28*28)"
    )
    parser.add_argument("--bad", choices=["stop", "skip"], default="stop", help="rows that cannot be used")
    parser.add_argument("--long", choices=["stop", "skip", "sample"], default="stop", help="clips over --max-frames")
    parser.add_argument("--val-size", type=int, default=0, metavar="N", help="rows for val.parquet (default 0: none)")
    args = parser.parse_args(argv)
    try:
        sampling = Sampling(args.fps, args.max_frames, args.min_pixels, args.max_pixels, args.image_max_pixels)
        print(prepare(args.input, args.output, args.media_root, sampling, args.bad, args.long, args.val_size))
    except (ValueError, OSError) as error:
        print(f"prepare: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
