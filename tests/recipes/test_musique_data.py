"""The recipe's data: generated questions have one answer that needs every hop; prepare.py keeps or names everything."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import datasets
import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "musique"
OFFICIAL = ROOT.parent / "shared" / "data" / "musique_ans_v1.0_train_sample.jsonl"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"musique_{name}", RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


make_questions, reward = load("make_questions"), load("reward")
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "reward", reward)  # prepare.py imports it from its own folder
    prepare = load("prepare")


def generated(num: int = 40, seed: int = 3, paragraphs: int = 7) -> list[dict]:
    return list(make_questions.make_questions(num, seed, paragraphs))


def write(path: Path, questions: list[dict]) -> Path:
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return path


@pytest.fixture(scope="module", params=["generated", "official"])
def source(request, tmp_path_factory) -> Path:
    if request.param == "generated":
        return write(tmp_path_factory.mktemp("questions") / "questions.jsonl", generated())
    if not OFFICIAL.exists():
        pytest.skip(f"{OFFICIAL.name}, a sample of the official file, is not beside the checkout")
    return OFFICIAL


# ---- make_questions.py ----


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path):
    # Another hash seed in each process: no order of a set may reach the file.
    for name, seed, hash_seed in (("a", 5, "1"), ("b", 5, "2"), ("c", 6, "3")):
        args = ["--output", tmp_path / name, "--num", "17", "--seed", str(seed), "--paragraphs", "6"]
        command = [sys.executable, RECIPE / "make_questions.py", *args]
        subprocess.run(command, check=True, env={"PYTHONHASHSEED": hash_seed})
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_questions_have_the_official_keys_and_types():
    def shape(value: object) -> object:
        if isinstance(value, dict):
            return {key: shape(inner) for key, inner in value.items()}
        return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__

    official = {
        "id": "str",
        "paragraphs": [{"idx": "int", "title": "str", "paragraph_text": "str", "is_supporting": "bool"}],
        "question": "str",
        "question_decomposition": [{"id": "int", "question": "str", "answer": "str", "paragraph_support_idx": "int"}],
        "answer": "str",
        "answer_aliases": ["str"],
        "answerable": "bool",
    }
    if OFFICIAL.exists():
        assert shape(json.loads(OFFICIAL.read_text().splitlines()[0])) == official
    questions = generated()
    assert any(shape(question) == official for question in questions)
    assert all(list(question) == list(official) for question in questions)
    assert len({question["id"] for question in questions}) == len(questions) == 40
    for question in questions:
        hops = question["question_decomposition"]
        assert re.fullmatch(rf"{len(hops)}hop__" + "_".join(str(hop["id"]) for hop in hops), question["id"])
        assert [paragraph["idx"] for paragraph in question["paragraphs"]] == list(range(7))
        assert question["answerable"] and question["answer"] == hops[-1]["answer"]
    assert {len(question["question_decomposition"]) for question in questions} == {2, 3, 4}


def told(title: str, relation: str, text: str) -> list[str]:
    """The values that a paragraph gives for a relation of the entity in its title."""
    templates = [t for kind in make_questions.RELATIONS.values() for r in kind if r.name == relation for t in r.told]
    patterns = [re.escape(t).replace(r"\{s\}", re.escape(title)).replace(r"\{o\}", r"([\w ]+?)") for t in templates]
    return [value for pattern in patterns for value in re.findall(rf"(?:^|(?<=\. )){pattern}(?= [A-Z]|$)", text)]


def test_reading_the_paragraphs_hop_by_hop_gives_the_one_answer():
    for question in generated():
        texts = {p["title"]: p["paragraph_text"] for p in question["paragraphs"]}
        assert len(texts) == 7
        answers: list[str] = []
        for hop in question["question_decomposition"]:
            subject, relation = hop["question"].split(" >> ")
            subject = answers[int(subject[1:]) - 1] if subject.startswith("#") else subject
            assert told(subject, relation, texts[subject]) == [hop["answer"]]
            support = question["paragraphs"][hop["paragraph_support_idx"]]
            assert support["title"] == subject and support["is_supporting"]
            answers.append(hop["answer"])
        assert answers[-1] == question["answer"]
        assert sum(p["is_supporting"] for p in question["paragraphs"]) == len(answers)


def test_the_question_names_its_start_only_and_other_paragraphs_answer_its_last_hop_differently():
    for question in generated():
        hops = question["question_decomposition"]
        start, relation = hops[0]["question"].split(" >> ")[0], hops[-1]["question"].split(" >> ")[1]
        assert start in question["question"]
        assert not any(hop["answer"] in question["question"] for hop in hops)
        others = [p for p in question["paragraphs"] if not p["is_supporting"]]
        assert any(told(p["title"], relation, p["paragraph_text"]) for p in others)


def test_names_share_no_word_and_paragraphs_are_as_long_as_musiques():
    questions = generated(num=64, paragraphs=20)
    paragraphs = {p["title"]: p["paragraph_text"] for question in questions for p in question["paragraphs"]}
    common = {
        "The",
        "House",
        "Clock",
        "Road",
        "Garden",
        "of",
        "Printing",
        "Tools",
        "Shipping",
        "Glass",
        "River",
        "Lake",
    }
    words = [word for title in paragraphs for word in title.split() if word not in common]
    assert len(words) == len(set(words))
    assert all(60 <= len(text.split()) <= 130 for text in paragraphs.values())


def test_short_questions_have_two_hops_and_paragraphs_of_facts_alone():
    questions = list(make_questions.make_questions(40, 3, 3, short=True))
    assert {len(question["question_decomposition"]) for question in questions} == {2}
    for question in questions:
        assert sum(not p["is_supporting"] for p in question["paragraphs"]) == 1  # what makes the first hop needed
        for p in question["paragraphs"]:
            assert p["paragraph_text"].count(". ") + 1 <= 3 and len(p["paragraph_text"].split()) <= 35


@pytest.mark.parametrize(
    ("option", "value", "more"), [("--num", "0", []), ("--paragraphs", "4", []), ("--paragraphs", "2", ["--short"])]
)
def test_make_questions_refuses_numbers_out_of_range_in_one_line(tmp_path, capsys, option, value, more):
    assert make_questions.main(["--output", str(tmp_path / "q.jsonl"), option, value, *more]) == 1
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"make_questions: {option} {value}: set at least")
    assert not list(tmp_path.iterdir())


# ---- prepare.py ----


def read(path: Path) -> list[dict]:
    return datasets.Dataset.from_parquet(str(path), cache_dir=str(path.parent / "cache")).to_list()


def test_rows_hold_every_paragraph_and_the_question_in_one_user_message(source, tmp_path):
    questions = [json.loads(line) for line in source.read_text().splitlines()]
    prepare.prepare(source, tmp_path)
    rows = read(tmp_path / "train.parquet")
    assert [row["extra_info"]["id"] for row in rows] == [question["id"] for question in questions]
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    for row, question in zip(rows, questions, strict=True):
        assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        (message,) = row["prompt"]
        assert message["role"] == "user" and "<answer>" in message["content"]
        places = [message["content"].index(p["paragraph_text"]) for p in question["paragraphs"]]
        assert places == sorted(places)
        assert question["question"] in message["content"][places[-1] :]
        accepted = row["reward_model"]["ground_truth"]
        assert accepted[0] == question["answer"] and set(accepted) == {question["answer"], *question["answer_aliases"]}
        assert len(accepted) == len(set(accepted)) and row["reward_model"]["style"] == "rule"
        assert row["extra_info"]["hops"] == int(question["id"][0])
        assert not (tmp_path / "val.parquet").exists()


def test_the_reward_takes_the_ground_truth_as_pandas_and_datasets_return_it(source, tmp_path):
    prepare.prepare(source, tmp_path)
    frame = pd.read_parquet(tmp_path / "train.parquet")
    for row in (frame.iloc[0], read(tmp_path / "train.parquet")[0]):
        for answer in row["reward_model"]["ground_truth"]:
            result = reward.compute_score(
                row["data_source"], f"<answer>{answer}</answer>", row["reward_model"]["ground_truth"], row["extra_info"]
            )
            assert result["acc"] == result["score"] == 1


@pytest.mark.parametrize("most", [1, 3, 5, 99])
def test_the_limit_keeps_supporting_paragraphs_and_fills_up_in_order(source, tmp_path, most):
    questions = {q["id"]: q for q in map(json.loads, source.read_text().splitlines())}
    summary = prepare.prepare(source, tmp_path, max_paragraphs=most)
    crowded = 0
    for row in read(tmp_path / "train.parquet"):
        paragraphs = questions[row["extra_info"]["id"]]["paragraphs"]
        spare = most - sum(p["is_supporting"] for p in paragraphs)
        crowded += spare < 0
        fillers = [p["idx"] for p in paragraphs if not p["is_supporting"]][: max(spare, 0)]
        expected = [p for p in paragraphs if p["is_supporting"] or p["idx"] in fillers]
        content = row["prompt"][0]["content"]
        assert re.findall(r"^\[\d+\] (.*)$", content, re.MULTILINE) == [p["title"] for p in expected]
        assert all(p["paragraph_text"] in content for p in expected)
        assert row["extra_info"]["paragraphs"] == len(expected)
    assert f"{crowded} with more than {most} supporting paragraphs" in summary


def test_a_paragraph_that_a_hop_names_is_supporting_even_if_it_is_not_marked(tmp_path):
    question = generated(num=1)[0]
    for paragraph in question["paragraphs"]:
        paragraph["is_supporting"] = False
    prepare.prepare(write(tmp_path / "q.jsonl", [question]), tmp_path, max_paragraphs=1)
    content = read(tmp_path / "train.parquet")[0]["prompt"][0]["content"]
    titles = [p["title"] for p in question["paragraphs"]]
    named = sorted(hop["paragraph_support_idx"] for hop in question["question_decomposition"])
    assert re.findall(r"^\[\d+\] (.*)$", content, re.MULTILINE) == [titles[idx] for idx in named]


def test_the_split_depends_on_ids_alone_and_is_complete(source, tmp_path):
    lines = source.read_text().splitlines()
    (tmp_path / "reversed.jsonl").write_text("\n".join(reversed(lines)) + "\n\n")
    ids = {}
    for name, path in (("a", source), ("b", source), ("c", tmp_path / "reversed.jsonl")):
        prepare.prepare(path, tmp_path / name, val_size=9)
        ids[name] = [
            [row["extra_info"]["id"] for row in read(tmp_path / name / f"{split}.parquet")]
            for split in ("train", "val")
        ]
    assert (tmp_path / "a" / "val.parquet").read_bytes() == (tmp_path / "b" / "val.parquet").read_bytes()
    assert [sorted(half) for half in ids["a"]] == [sorted(half) for half in ids["c"]]
    train, val = ids["a"]
    assert len(val) == 9 and set(train).isdisjoint(val) and len(train) + len(val) == len(lines)


def test_unanswerable_questions_are_counted_and_skipped(tmp_path):
    questions = generated(num=5)
    twin = {"id": questions[0]["id"], "answerable": False}  # MuSiQue-Full has such a line for each question
    summary = prepare.prepare(write(tmp_path / "full.jsonl", [twin, *questions]), tmp_path)
    assert "skipped    1 unanswerable" in summary and "rows       train 5" in summary
    with pytest.raises(ValueError, match="no answerable question in 1 lines"):
        prepare.prepare(write(tmp_path / "none.jsonl", [twin]), tmp_path)


def test_blank_aliases_and_repeated_answers_are_dropped(tmp_path):
    question = generated(num=1)[0] | {"answer": "Rome", "answer_aliases": ["", "Roma", " ", "Rome", "Roma"]}
    prepare.prepare(write(tmp_path / "q.jsonl", [question]), tmp_path)
    assert read(tmp_path / "train.parquet")[0]["reward_model"]["ground_truth"] == ["Rome", "Roma"]


def test_what_the_metric_leaves_nothing_of_is_no_answer_and_questions_without_one_are_counted(tmp_path, capsys):
    nothing = ["A", "-", "the", "...", "An -"]
    answers = [("A", ["-", "Vitamin A"]), ("Rome", nothing), *((answer, nothing) for answer in nothing)]
    questions = generated(num=len(answers))
    for question, (answer, aliases) in zip(questions, answers, strict=True):
        question |= {"answer": answer, "answer_aliases": aliases}
    summary = prepare.prepare(write(tmp_path / "q.jsonl", questions), tmp_path)
    rows = read(tmp_path / "train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == [["Vitamin A"], ["Rome"]]
    assert "rows       train 2" in summary and "skipped    5 without an answer that scores" in summary
    path = write(tmp_path / "nothing.jsonl", questions[2:])
    capsys.readouterr()  # of what reads parquet
    assert prepare.main(["--input", str(path), "--output", str(tmp_path / "out")]) == 1
    (message,) = capsys.readouterr().err.splitlines()
    assert "nothing.jsonl: all 5 answerable questions are without an answer that scores" in message


def changed(*path: object, value: object = ...) -> bytes:
    """One question as a line, with the value at `path` replaced, or removed where no value is given."""
    question = generated(num=1)[0]
    target = question
    for key in path[:-1]:
        target = target[key]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return json.dumps(question).encode()


HOP = "question_decomposition"


@pytest.mark.parametrize(
    ("line", "key", "seen"),
    [
        (b'{"id": 1', "not JSON", r'\{"id": 1'),
        (b'{"id": "\xff"}', "not JSON", r"\\xff"),
        (b"[" * 100_000, "not JSON", r"\[\[\["),
        (b'"text"', "the line", '"text"'),
        (b"[]", "the line", r"\[\]"),
        (b"null", "the line", "null"),
        (changed("answerable"), "answerable", "missing"),
        (changed("answerable", value="yes"), "answerable", '"yes"'),
        (changed("answer"), "answer", r'missing; the object has \["id"'),
        (changed("answer", value=" "), "answer", 'empty " "'),
        (changed("answer", value=7), "answer", "expected text, found 7"),
        (changed("answer", value="\ud800"), "answer", "surrogate"),
        (changed("answer_aliases", value="Rome"), "answer_aliases", '"Rome"'),
        (changed("answer_aliases", value=["Rome", None]), r"answer_aliases\[1\]", "null"),
        (changed("question", value=""), "question", 'empty ""'),
        (changed("id", value=5), "id", "5"),
        (changed("paragraphs", value={}), "paragraphs", r"\{\}"),
        (changed("paragraphs", 2, value="text"), r"paragraphs\[2\]", '"text"'),
        (changed("paragraphs", 2, "paragraph_text"), r"paragraphs\[2\].paragraph_text", "missing"),
        (changed("paragraphs", 2, "is_supporting", value=1), r"paragraphs\[2\].is_supporting", "1"),
        (changed("paragraphs", 2, "idx", value=True), r"paragraphs\[2\].idx", "true"),
        (changed("paragraphs", 2, "idx", value=1), r"paragraphs\[2\].idx", "1 is the idx of another"),
        (changed(HOP, value=[]), HOP, r"\[\]"),
        (changed(HOP, 1, "paragraph_support_idx", value=7), rf"{HOP}\[1\].paragraph_support_idx", "7 is out of range"),
        (
            changed(HOP, 1, "paragraph_support_idx", value=-1),
            rf"{HOP}\[1\].paragraph_support_idx",
            "-1 is out of range",
        ),
        (changed(HOP, 1, "paragraph_support_idx", value=None), rf"{HOP}\[1\].paragraph_support_idx", "null"),
        (changed("id", value="first"), "id", '"first" is on line 1 too'),
    ],
)
def test_a_bad_line_is_named_and_leaves_no_file(tmp_path, capsys, line, key, seen):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(changed("id", value="first") + b"\n\n" + line + b"\n")
    assert prepare.main(["--input", str(path), "--output", str(tmp_path / "out")]) == 1
    (message,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"prepare: {re.escape(str(path))}, line 3: {key}: .*{seen}", message), message
    assert len(message) < 400 + len(str(path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["absent.jsonl"], "no such file"),
        (["empty.jsonl"], "no answerable question in 0 lines"),
        (["."], "Is a directory"),
        (["good.jsonl", "--val-size", "3"], "set fewer than the 3"),
        (["good.jsonl", "--val-size", "-1"], "set 0 or more"),
        (["good.jsonl", "--max-paragraphs", "0"], "set at least 1"),
        (["good.jsonl", "--output", "good.jsonl"], "File exists"),
    ],
)
def test_the_command_ends_with_one_line_where_it_cannot_work(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    write(Path("good.jsonl"), generated(num=3))
    assert prepare.main(["--output", "out", "--input", *args]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prepare: ") and message in line
    assert not Path("out").exists()


def test_the_command_works_outside_this_process(tmp_path):
    good = write(tmp_path / "good.jsonl", generated(num=3))
    command = [sys.executable, RECIPE / "prepare.py", "--output", tmp_path / "out", "--input"]
    done = subprocess.run([*command, good], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "train 3" in done.stdout
    failed = subprocess.run([*command, tmp_path / "absent"], capture_output=True, text=True)
    assert (failed.returncode, failed.stdout) == (1, "") and len(failed.stderr.splitlines()) == 1


def test_a_failing_write_keeps_the_old_files_and_leaves_no_part(tmp_path, monkeypatch):
    source, output = write(tmp_path / "q.jsonl", generated(num=6)), tmp_path / "out"
    prepare.prepare(source, output, val_size=2)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    real = prepare.pq.write_table

    def disk_full(table, path):
        real(table, path)
        if "val" in path.name:
            raise OSError("no space left")

    monkeypatch.setattr(prepare.pq, "write_table", disk_full)
    with pytest.raises(OSError, match="no space"):
        prepare.prepare(source, output, val_size=3)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_validation_rows_of_an_earlier_run_are_not_left_beside_new_training_rows(tmp_path):
    source = write(tmp_path / "q.jsonl", generated(num=6))
    prepare.prepare(source, tmp_path, val_size=2)
    with pytest.raises(ValueError, match="val.parquet: from an earlier run"):
        prepare.prepare(source, tmp_path)
