"""The recipe's clips show what their questions say, and prepare.py keeps, names or counts every row."""

import importlib.util
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "video_rlvr"


def load(name: str, module_name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# Under the names that prepare.py imports from its own folder.
reward, probe = load("reward", "reward"), load("probe", "probe")
make_clips, prepare = load("make_clips", "video_make_clips"), load("prepare", "video_prepare")
SIZE, FPS, SECONDS = 160, 8, 5


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    make_clips.make_clips(folder, clips=6, stills=2, seed=4, seconds=SECONDS, fps=FPS, size=SIZE)
    return folder


def questions(folder: Path) -> list[dict]:
    return json.loads((folder / "questions.json").read_text())


def answer(row: dict) -> str:
    return row["solution"].removeprefix("<answer>").removesuffix("</answer>")


# ---- make_clips.py: read back from the pixels, not from the simulation ----


def frames(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def centres(video: np.ndarray) -> dict[str, np.ndarray]:
    """The centre of each colour in each frame [T, 2], in sides of the picture, nan where it is hidden."""
    above = video[:, : int(SIZE * (1 - make_clips.LINE))].astype(int)
    found = {}
    for colour, rgb in make_clips.COLOURS.items():
        mask = np.abs(above - np.array(rgb)).max(axis=-1) < 45
        if mask[0].sum() < 20:
            continue
        y, x = np.mgrid[: mask.shape[1], : mask.shape[2]]
        count = mask.sum(axis=(1, 2))
        sums = np.stack([(mask * x).sum(axis=(1, 2)), (mask * y).sum(axis=(1, 2))], axis=-1)
        found[colour] = (sums / np.where(count, count, np.nan)[:, None] + 0.5) / SIZE
    return found


def colours_in(text: str) -> list[str]:
    return [word for word in text.replace(".", " ").split() if word in make_clips.COLOURS]


def test_the_pixels_agree_with_the_answers(clips):
    rows = questions(clips)
    for path in sorted({row["path"] for row in rows if row["data_type"] == "video"}):
        by_type = {row["problem_type"]: row for row in rows if row["path"] == path}
        assert set(by_type) == set(reward.PROBLEM_TYPES)
        video = frames(clips / path)
        assert video.shape == (SECONDS * FPS, SIZE, SIZE, 3)
        places = centres(video)

        regression = by_type["regression"]
        (colour,) = colours_in(regression["problem"])
        assert 100 * places[colour][-1, 0] == pytest.approx(float(answer(regression)), abs=3)

        choice = by_type["multiple choice"]
        option = next(text for text in choice["options"] if text.startswith(answer(choice)))
        first = set(colours_in(option))
        gaps = {
            frozenset((a, b)): np.hypot(*(places[a] - places[b]).T) / (2 * make_clips.RADIUS)
            for a in places
            for b in places
            if a < b
        }
        # Between two frames shapes move towards each other by 2 * 0.4 / 8 sides at most, 0.6 of their two radii.
        touching = np.flatnonzero(gaps[frozenset(first)] < 1.3)[0]
        others = [gap[: touching - 1].min() for pair, gap in gaps.items() if pair != first]
        assert min(others) > 0.95
        assert 1 <= int(answer(by_type["numerical"])) <= 6

        free = by_type["free-form"]
        asked, *touched = colours_in(answer(free))
        assert colours_in(free["problem"]) == [asked]
        step = places[asked][1] - places[asked][0]
        way = ("left", "right")[int(step[0] > 0)] if abs(step[0]) > abs(step[1]) else ("up", "down")[int(step[1] > 0)]
        assert f"moves {way} and" in answer(free) or "slantwise" in answer(free)
        if touched:
            assert gaps[frozenset((asked, *touched))].min() < 1.35

        ink = (video[:, int(SIZE * (1 - make_clips.LINE)) :] < 90).all(axis=-1)
        assert ink.any(axis=(1, 2)).all()


def test_touches_are_where_two_shapes_meet_and_part():
    """Speeds change at touches and walls only, and at each touch the two were a frame's way from touching."""
    for seed in range(20):
        scene = make_clips.make_scene(random.Random(seed), SECONDS * FPS, FPS)
        places = np.array(scene.places)  # [T, things, 2]
        changed = np.abs(np.diff(places, n=2, axis=0)).max(axis=-1) > 1e-9
        near_wall = (places < 0.2).any(axis=-1) | (places > 0.6).any(axis=-1)
        for frame, thing in zip(*np.nonzero(changed & ~near_wall[1:-1]), strict=True):
            times = [t * FPS for t, a, b in scene.touches if scene.things[thing] in (a, b)]
            assert any(frame - 1 <= time <= frame + 3 for time in times)
        for time, a, b in scene.touches:
            pair = places[:, [scene.things.index(thing) for thing in (a, b)]]
            gap = np.hypot(*(pair[:, 0] - pair[:, 1]).T) / (2 * make_clips.RADIUS)
            before = int(time * FPS)
            assert 0.9 < min(gap[before], gap[before + 1]) < 1.35


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path):
    for name, seed, hash_seed in (("a", 5, "1"), ("b", 5, "2"), ("c", 6, "3")):
        args = ["--output", tmp_path / name, "--clips", "1", "--stills", "1", "--seed", str(seed), "--size", "64"]
        command = [sys.executable, RECIPE / "make_clips.py", *args]
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)}
        subprocess.run(command, check=True, env=environment)
    names = ("questions.json", "clips/00000.mp4", "stills/00000.png")
    a, b, c = ([(tmp_path / folder / name).read_bytes() for name in names] for folder in "abc")
    assert a == b and all(one != other for one, other in zip(a, c, strict=True))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["clips", "questions.json", "stills"]


def test_rows_have_the_keys_of_video_r1(clips):
    keys = ["problem_id", "problem", "data_type", "problem_type", "options", "solution", "path"]
    rows = questions(clips)
    assert all(list(row) == keys for row in rows) and len(rows) == 6 * 5 + 2
    assert [row["problem_id"] for row in rows] == list(range(len(rows)))
    assert Counter(row["data_type"] for row in rows) == {"video": 30, "image": 2}
    assert all((clips / row["path"]).is_file() for row in rows)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--clips", "0"), ("--stills", "-1"), ("--size", "57"), ("--fps", "3"), ("--seconds", "1"), ("--seconds", "13")],
)
def test_make_clips_refuses_numbers_out_of_range_in_one_line(tmp_path, capsys, option, value):
    assert make_clips.main(["--output", str(tmp_path / "out"), option, value]) == 1
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"make_clips: {option} {value}: set a")
    assert not list(tmp_path.iterdir())


# ---- prepare.py ----


def prepared(folder: Path, output: Path, **options) -> list[dict]:
    prepare.prepare(folder / "questions.json", output, **options)
    return pq.read_table(output / "train.parquet").to_pylist()


def test_rows_hold_the_question_the_file_and_the_sampling(clips, tmp_path):
    sampling = prepare.Sampling(fps=1.0, max_frames=8, min_pixels=3136, max_pixels=6272, image_max_pixels=9408)
    rows = prepared(clips, tmp_path, sampling=sampling)
    limits = {"min_pixels": 3136, "max_pixels": 6272}
    for i, (row, question) in enumerate(zip(rows, questions(clips), strict=True)):
        path = str((clips / question["path"]).resolve())
        (message,) = row["prompt"]
        assert message["role"] == "user" and message["content"].startswith(f"<{question['data_type']}>")
        assert message["content"].count("<video>") + message["content"].count("<image>") == 1
        assert question["problem"] in message["content"]
        assert all(option in message["content"] for option in question["options"])
        if question["data_type"] == "video":
            assert row["videos"] == [{"video": path, "fps": 1.0, "max_frames": 8} | limits] and row["images"] == []
        else:
            assert row["images"] == [{"image": path} | limits | {"max_pixels": 9408}] and row["videos"] == []
        kind = question["problem_type"]
        assert row["data_source"] == f"video_rlvr/{kind.replace(' ', '_')}"
        assert row["extra_info"] == {
            "split": "train",
            "index": i,
            "id": str(question["problem_id"]),
            "problem_type": kind,
        }
        gold = row["reward_model"]["ground_truth"]
        assert gold == answer(question)
        response = f"<think>x</think><answer>{gold}</answer>"
        assert reward.compute_score(row["data_source"], response, gold, row["extra_info"])["score"] == pytest.approx(1)


def test_no_clip_is_in_both_splits_and_the_order_of_the_input_does_not_matter(clips, tmp_path):
    rows = questions(clips)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(rows[::-1]))
    splits = []
    for source, output in ((clips / "questions.json", tmp_path / "a"), (other, tmp_path / "b")):
        prepare.prepare(source, output, media_root=clips, val_size=7)
        tables = [pq.read_table(output / f"{name}.parquet").to_pylist() for name in ("train", "val")]
        splits.append([{row["extra_info"]["id"] for row in table} for table in tables])
        train, val = ({json.dumps([row["videos"], row["images"]]) for row in table} for table in tables)
        assert not train & val and len(tables[1]) >= 7 and len(tables[0]) + len(tables[1]) == len(rows)
    assert splits[0] == splits[1]


def changed(folder: Path, tmp_path: Path, **values) -> Path:
    """The input with row 2 changed; a value of ... removes the key."""
    rows = questions(folder)
    rows[2] = {key: value for key, value in (rows[2] | values).items() if value is not ...}
    source = tmp_path / "questions.json"
    source.write_text(json.dumps(rows))
    return source


CHOICE = {"problem_type": "multiple choice", "solution": "<answer>A</answer>"}


@pytest.mark.parametrize(
    ("values", "reason", "message"),
    [
        ({"problem_type": "riddle"}, "unknown problem_type", 'problem_type: expected one of .*found "riddle"'),
        ({"problem_type": "ocr"}, "unknown problem_type", 'found "ocr"'),
        ({"data_type": "audio"}, "unknown data_type", 'data_type: expected video or image, found "audio"'),
        (CHOICE | {"options": []}, "no options", r"options: expected a list of texts, found \[\]"),
        (CHOICE | {"options": ["A. x", " "]}, "no options", "options: .*found"),
        (CHOICE | {"options": ...}, "no options", "options: .*found null"),
        (CHOICE | {"options": ["B. x", "Apple"]}, "unusable solution", '"A" is the letter of none'),
        ({"solution": "B"}, "unusable solution", 'solution: expected <answer>TEXT</answer>, found "B"'),
        ({"solution": "<answer> </answer>"}, "unusable solution", "solution: expected <answer>"),
        ({"solution": "<answer>1</answer><answer>2</answer>"}, "unusable solution", "solution: expected"),
        ({"problem_type": "numerical", "solution": "<answer>NaN</answer>"}, "unusable solution", "expected one number"),
        ({"problem_type": "regression", "solution": "<answer>a lot</answer>"}, "unusable solution", '"a lot"'),
        ({"problem": ""}, "malformed row", 'problem: expected a text, found ""'),
        ({"problem": "What is <image>?"}, "media placeholder", "holds <image>"),
        ({"problem": "\ud800"}, "malformed row", "problem: expected a text"),
        ({"solution": ...}, "malformed row", "solution: expected a text, found null"),
        ({"path": 5}, "malformed row", "path: expected a text, found 5"),
        ({"path": "./clips/gone.mp4"}, "missing file", "path: no such file: .*/clips/gone.mp4"),
        ({"path": "./clips"}, "missing file", "path: no such file: .*/clips"),
        ({"path": "./questions.json"}, "unreadable file", "path: cannot decode .*/questions.json: "),
        ({"path": "./stills/00000.png"}, "unreadable file", "path: cannot decode .*00000.png: "),
        ({"data_type": "image"}, "unreadable file", "path: cannot decode .*00000.mp4: "),
    ],
)
def test_an_unusable_row_is_named_or_counted(clips, tmp_path, capsys, values, reason, message):
    source = changed(clips, tmp_path, **values)
    arguments = ["--input", str(source), "--output", str(tmp_path / "out"), "--media-root", str(clips)]
    assert prepare.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"prepare: {source}, row 2, problem_id 2: ")
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()

    assert prepare.main([*arguments, "--bad", "skip"]) == 0
    out = capsys.readouterr().out
    assert f"skipped    1 {reason}\n           {line.removeprefix('prepare: ')}\n" in out
    ids = [row["extra_info"]["id"] for row in pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()]
    assert "2" not in ids and len(ids) == len(questions(clips)) - 1


@pytest.mark.parametrize("row", [[], "text", None, {}, {"problem_id": True}, {"problem_id": 1.5}, {"problem_id": " "}])
def test_a_row_without_an_id_is_named_by_its_place(clips, tmp_path, row):
    source = tmp_path / "questions.json"
    source.write_text(json.dumps([*questions(clips), row]))
    with pytest.raises(prepare.RowError, match=f"questions.json, row {len(questions(clips))}: .*expected"):
        prepare.prepare(source, tmp_path / "out", clips)


def test_an_id_that_two_rows_have_is_kept_twice(clips, tmp_path):
    """problem_id is unique within a source of Video-R1 alone."""
    source = changed(clips, tmp_path, problem_id=1)
    prepare.prepare(source, tmp_path / "out", clips)
    ids = [row["extra_info"]["id"] for row in pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()]
    assert ids[:4] == ["0", "1", "1", "3"] and len(ids) == len(questions(clips))


@pytest.mark.parametrize("tag", ["<video>", "<image>\n", " <video> "])
def test_a_leading_tag_is_stripped(clips, tmp_path, tag):
    text = "How many are there?"
    prepare.prepare(changed(clips, tmp_path, problem=tag + text), tmp_path / "out", clips)
    row = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()[2]
    assert row["prompt"][0]["content"].startswith(f"<video>{text}\n")
    with pytest.raises(prepare.RowError, match="problem: expected a text, found"):
        prepare.prepare(changed(clips, tmp_path, problem=tag), tmp_path / "b", clips)


def test_the_first_rows_of_each_reason_are_named(clips, tmp_path):
    rows = questions(clips)
    for i, row in enumerate(rows[:7]):
        row["path" if i < 5 else "problem_type"] = "gone"
    source = tmp_path / "questions.json"
    source.write_text(json.dumps(rows))
    lines = prepare.prepare(source, tmp_path / "out", clips, bad="skip").splitlines()
    assert "skipped    5 missing file, 2 unknown problem_type" in lines
    named = [line.split(", problem_id")[0].strip() for line in lines if line.startswith("   ")]
    assert named == [f"{source}, row {i}" for i in (0, 1, 2, 5, 6)]


def test_long_work_says_how_far_it_is(capsys):
    assert list(prepare.progress("abc", 1234, seconds=0)) == list("abc")
    assert capsys.readouterr().err.splitlines() == [f"prepare: {i} of 1,234 files opened" for i in (1, 2, 3)]
    assert list(prepare.progress("abc", 1234, seconds=3600)) == list("abc") and not capsys.readouterr().err


# As Video-R1-260k.json has them: the fields, an `./` path, and text of each type (made up here, like the media).
PUBLISHED = [
    {"problem_id": 2, "problem": "What appears on the screen?", "data_type": "image", "problem_type": "multiple choice",
     "options": ["A. It cools", "B. It heats"], "process": "", "solution": "<answer>A</answer>", "path": "./a/0.png",
     "data_source": "a"},
    {"problem_id": 2, "problem": "<video>\nHow many collisions?", "data_type": "video", "problem_type": "numerical",
     "options": [], "process": "", "solution": "<answer>3</answer>", "path": "./CLEVRER/0.mp4",
     "data_source": "CLEVRER"},
]  # fmt: skip


def test_published_rows_are_kept(clips, tmp_path):
    for row, medium in zip(PUBLISHED, ("stills/00000.png", "clips/00000.mp4"), strict=True):
        (tmp_path / row["path"]).parent.mkdir(exist_ok=True)
        (tmp_path / row["path"]).write_bytes((clips / medium).read_bytes())
    source = tmp_path / "Video-R1-260k.json"
    source.write_text(json.dumps(PUBLISHED))
    assert "skipped    0" in prepare.prepare(source, tmp_path / "out")
    image, video = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert image["images"][0]["max_pixels"] == 256 * 28 * 28 and video["videos"][0]["max_pixels"] == 128 * 28 * 28
    assert video["prompt"][0]["content"].startswith("<video>How many collisions?\n")


def cut(source: Path, target: Path, share: float, faststart: bool) -> None:
    """Write the first `share` of a video's bytes; with `faststart` its header comes first and survives."""
    if faststart:
        remuxed = target.with_name("remuxed.mp4")
        with av.open(str(source)) as old, av.open(str(remuxed), "w", options={"movflags": "faststart"}) as new:
            stream = new.add_stream_from_template(old.streams.video[0])
            for packet in old.demux(video=0):
                if packet.dts is not None:
                    packet.stream = stream
                    new.mux(packet)
        source = remuxed
    content = source.read_bytes()
    target.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize(("share", "faststart"), [(0, False), (0.6, False), (0.6, True), (0.85, True)])
def test_a_truncated_video_is_named(clips, tmp_path, share, faststart):
    cut(clips / "clips" / "00000.mp4", tmp_path / "cut.mp4", share, faststart)
    source = changed(clips, tmp_path, path=str(tmp_path / "cut.mp4"))
    with pytest.raises(prepare.RowError, match="row 2, problem_id 2: path: cannot decode .*cut.mp4") as error:
        prepare.prepare(source, tmp_path / "out", clips)
    assert error.value.reason == "unreadable file"


@pytest.mark.parametrize(
    ("suffix", "codec"), [("avi", "mpeg4"), ("mkv", "libx264"), ("webm", "libvpx"), ("ts", "libx264")]
)
def test_other_containers_are_read_to_their_end(tmp_path, suffix, codec):
    whole, part = tmp_path / f"whole.{suffix}", tmp_path / f"part.{suffix}"
    noise = np.random.default_rng(0)
    with av.open(str(whole), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for _ in range(100):
            pixels = noise.integers(0, 255, (64, 64, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    assert prepare.probe("video", whole) == pytest.approx(4, abs=0.1)
    part.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    if suffix == "ts":  # has no length: half of a stream is a shorter stream
        assert prepare.probe("video", part) == pytest.approx(2, abs=0.2)
    else:
        assert prepare.probe("video", part)[0] == "unreadable file"


def test_a_truncated_picture_is_named(clips, tmp_path):
    whole = (clips / "stills" / "00000.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    source = changed(clips, tmp_path, data_type="image", path=str(tmp_path / "cut.png"))
    with pytest.raises(prepare.RowError, match="row 2, problem_id 2: path: cannot decode .*cut.png"):
        prepare.prepare(source, tmp_path / "out", clips)


def test_a_clip_longer_than_max_frames_is_named_skipped_or_sampled(clips, tmp_path, capsys):
    arguments = ["--input", str(clips / "questions.json"), "--output", str(tmp_path / "out"), "--max-frames", "8"]
    assert prepare.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "row 0, problem_id 0: path: " in line
    assert "is 5.0 s long, 10 frames at 2.0 per second, and --max-frames is 8" in line
    assert prepare.main([*arguments, "--bad", "skip"]) == 1  # another option's business
    assert not (tmp_path / "out").exists()
    capsys.readouterr()
    assert prepare.main([*arguments, "--long", "skip"]) == 0
    assert "skipped    30 longer than max_frames" in capsys.readouterr().out
    assert prepare.main([*arguments, "--long", "sample"]) == 0
    assert "skipped    0" in capsys.readouterr().out
    assert prepare.main([*arguments[:-1], "10"]) == 0  # just as many as fit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-frames", "7"], "--max-frames 7: set an even number"),
        (["--fps", "0"], "--fps 0.0: set more than 0"),
        (["--fps", "nan"], "--fps nan: set more than 0"),
        (["--max-pixels", "100"], "set 0 < min <= max"),
        (["--val-size", "-1"], "set 0 or more"),
        (["--val-size", "32"], "leaves no clip"),
        (["--input", "absent.json"], "no such file"),
        (["--input", "empty.json"], r"expected a list of questions, found \[\]"),
        (["--input", "object.json"], "expected a list of questions"),
        (["--input", "broken.json"], "not JSON"),
        (["--input", "."], "Is a directory"),
        (["--media-root", "nowhere"], "row 0, problem_id 0: path: no such file"),
        (["--media-root", "nowhere", "--bad", "skip"], "no usable row; skipped {'missing file': 32}"),
    ],
)
def test_the_command_ends_with_one_line_where_it_cannot_work(clips, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text("[]")
    Path("object.json").write_text('{"a": 1}')
    Path("broken.json").write_text("[{")
    assert prepare.main(["--input", str(clips / "questions.json"), "--output", "out", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prepare: ") and re.search(message, line), line
    assert not Path("out").exists()


def test_a_jsonl_is_read_like_a_json(clips, tmp_path):
    lines = tmp_path / "questions.jsonl"
    rows = questions(clips)
    rows[0]["problem"] += " one\u2028line?"
    lines.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    lines.with_suffix(".json").write_text(json.dumps(rows))
    prepare.prepare(lines, tmp_path / "a", clips)
    prepare.prepare(lines.with_suffix(".json"), tmp_path / "b", clips)
    assert (tmp_path / "a" / "train.parquet").read_bytes() == (tmp_path / "b" / "train.parquet").read_bytes()


def test_the_scripts_work_outside_this_process(clips, tmp_path):
    command = [sys.executable, RECIPE / "prepare.py", "--output", tmp_path / "out", "--input"]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([*command, clips / "questions.json"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and "train 32" in done.stdout
    failed = subprocess.run([*command, tmp_path / "absent"], capture_output=True, text=True, env=environment)
    assert (failed.returncode, failed.stdout) == (1, "") and len(failed.stderr.splitlines()) == 1


def test_a_failing_write_keeps_the_old_files_and_leaves_no_part(clips, tmp_path, monkeypatch):
    prepare.prepare(clips / "questions.json", tmp_path, val_size=5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real = prepare.pq.write_table

    def disk_full(table, path):
        real(table, path)
        if "val" in path.name:
            raise OSError("no space left")

    monkeypatch.setattr(prepare.pq, "write_table", disk_full)
    with pytest.raises(OSError, match="no space"):
        prepare.prepare(clips / "questions.json", tmp_path, val_size=10)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_validation_rows_of_an_earlier_run_are_not_left_beside_new_training_rows(clips, tmp_path):
    prepare.prepare(clips / "questions.json", tmp_path, val_size=5)
    with pytest.raises(ValueError, match="val.parquet: from an earlier run"):
        prepare.prepare(clips / "questions.json", tmp_path)
