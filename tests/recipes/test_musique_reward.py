"""The MuSiQue reward against values worked out by hand and against a second implementation of SQuAD's rules."""

import importlib.util
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

SPEC = importlib.util.spec_from_file_location(
    "musique_reward", Path(__file__).resolve().parents[2] / "recipes" / "musique" / "reward.py"
)
reward = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reward)

WORDS = st.lists(st.sampled_from(["the", "A", "Red", "red", "lake", "42", "-", "lake.", "é", "an"]), max_size=6).map(
    " ".join
)
RESPONSES = st.lists(st.sampled_from(["<answer>", "</answer>", "<", "answer>", "Red", " ", "\n", "é", "\x00"])).map(
    "".join
)


def scored(response: object, *accepted: str) -> dict[str, float]:
    return reward.compute_score("musique", response, list(accepted))


def reference_tokens(text: str) -> list[str]:
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return [word for word in text.split() if word not in ("a", "an", "the")]


def reference_f1(answer: str, gold: str) -> float:
    answer_words, gold_words = reference_tokens(answer), reference_tokens(gold)
    if answer_words == [] or gold_words == []:
        return 0.0
    left, same = list(gold_words), 0
    for word in answer_words:
        if word in left:
            left.remove(word)
            same += 1
    if same == 0:
        return 0.0
    precision, recall = same / len(answer_words), same / len(gold_words)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("answer", "accepted", "em", "f1"),
    [
        ("Lake Simosan", ["Lake Simosan"], 1, 1),
        ("the LAKE,  Simosan!", ["Lake Simosan"], 1, 1),
        ("Simosan", ["Lake Simosan"], 0, 2 / 3),  # precision 1, recall 1/2
        ("Simosan", ["Lake Simosan", "Simosan"], 1, 1),
        ("big lake Simosan", ["Lake Simosan"], 0, 4 / 5),  # precision 2/3, recall 1
        ("lake lake", ["lake Simosan"], 0, 1 / 2),  # a word counts as often as both have it
        ("Simosan Lake", ["Lake Simosan"], 0, 1),  # F1 knows no order
        ("U.S.", ["US"], 1, 1),
        ("twenty-one", ["twenty one"], 0, 0),  # punctuation is removed, not replaced by a space
        ("1,024", ["1024"], 1, 1),
        ("Theatre", ["atre"], 0, 0),  # articles are whole words
        ("Simosan", ["the"], 0, 0),
        ("ÉMILE", ["émile"], 1, 1),
        ("Emile", ["émile"], 0, 0),
        ("“Lake”", ["lake"], 0, 0),  # only ASCII punctuation is removed
        ("lake\u00a0Simosan", ["lake simosan"], 1, 1),
        ("北京", ["北京"], 1, 1),
    ],
)
def test_em_and_f1_are_those_worked_out_by_hand(answer, accepted, em, f1):
    result = scored(f"Because of this.\n<answer>{answer}</answer>", *accepted)
    assert result == {"score": pytest.approx(0.9 * f1 + 0.1), "acc": em, "f1": pytest.approx(f1), "format": 1.0}
    assert all(type(value) is float for value in result.values())


@pytest.mark.parametrize(
    ("response", "f1", "well_formed"),
    [
        ("<answer>Rome</answer>", 1, 1),
        ("x <answer>\n Rome \n</answer> y", 1, 1),
        ("<answer>Oslo</answer> no: <answer>Rome</answer>", 1, 0),  # the last one counts
        ("<answer>Rome</answer> no: <answer>Oslo</answer>", 0, 0),
        ("<answer><answer>Rome</answer></answer>", 1, 0),
        ("<answer>Oslo <answer>Rome</answer>", 1, 0),
        ("<answer>Rome</answer></answer>", 1, 0),
        ("<answer>Rome</answer> <answer>Oslo", 1, 0),  # the last complete one counts
        ("<answer></answer>", 0, 0),
        ("<answer> \n</answer>", 0, 0),
        ("<answer>...</answer>", 0, 0),
    ],
)
def test_the_last_complete_block_is_read_and_one_block_is_the_format(response, f1, well_formed):
    result = scored(response, "Rome")
    assert (result["f1"], result["acc"], result["format"]) == (f1, f1, well_formed)
    assert result["score"] == pytest.approx(0.9 * f1 + 0.1 * well_formed)


NOTHING = ["", " \n", "-", "...", "A", "the", "An, the - a!"]  # as the metric normalises them


@pytest.mark.parametrize("gold", [["A"], ["-"], ["", "the"], ["...", "An"], ["Rome", "-"], ["Rome"]])
@pytest.mark.parametrize("answer", NOTHING)
def test_an_answer_of_which_nothing_is_left_scores_nothing_whatever_is_accepted(answer, gold):
    for response in (f"<answer>{answer}</answer>", f"So: <answer>{answer}</answer>", answer):
        assert not any(scored(response, *gold).values()), response


def test_an_accepted_answer_of_which_nothing_is_left_gives_no_points_to_others():
    for gold in NOTHING:
        assert scored("<answer>Rome</answer>", gold)["f1"] == scored("Rome", gold)["score"] == 0
        assert scored("<answer>Rome</answer>", gold, "Rome")["score"] == 1


@pytest.mark.parametrize(
    "response", ["", None, 7, "<answer>Rome", "Rome</answer>", "</answer>Rome<answer>", "<ANSWER>"]
)
def test_without_a_block_nothing_is_right_and_the_score_stays_below_any_block(response):
    result = scored(response, "Rome")
    assert (result["acc"], result["f1"], result["format"]) == (0, 0, 0)
    assert result["score"] < 0.1


def test_a_model_without_blocks_gets_unequal_scores_and_a_wrong_block_beats_a_sentence():
    silent, sentence, wrong, right = (
        scored(response, "Fukojer River")["score"]
        for response in (
            "I do not know.",
            "It lies on the Fukojer River.",
            "<answer>Oslo</answer>",
            "<answer>Fukojer River</answer>",
        )
    )
    assert 0 == silent < sentence < wrong < right == 1


@pytest.mark.parametrize(
    "ground_truth",
    ["Rome", ["Rome"], ("Rome",), np.array(["Rome", "Roma"]), np.array(["Rome"], dtype=object), np.array("Rome")],
)
def test_every_form_that_parquet_readers_return_is_accepted(ground_truth):
    assert reward.compute_score("musique", "<answer>rome</answer>", ground_truth, {"index": 0}, extra=1)["acc"] == 1


@pytest.mark.parametrize("ground_truth", [[], (), np.array([]), None, 7, {"a": 1}, [1], ["Rome", None], [["Rome"]]])
def test_broken_ground_truth_is_named(ground_truth):
    with pytest.raises(ValueError, match="ground_truth=.*expected a text") as error:
        reward.compute_score("musique", "<answer>Rome</answer>", ground_truth)
    assert repr(ground_truth) in str(error.value)


@given(answer=WORDS, accepted=st.lists(WORDS, min_size=1, max_size=3))
@example(answer="the", accepted=["Red", "a"])
def test_em_and_f1_equal_a_second_implementation(answer, accepted):
    result = scored(f"<answer>{answer}</answer>", *accepted)
    assert result["f1"] == pytest.approx(max(reference_f1(answer, gold) for gold in accepted))
    words = reference_tokens(answer)
    assert result["acc"] == (words != [] and words in map(reference_tokens, accepted))


@given(response=st.one_of(RESPONSES, st.text()), accepted=st.lists(st.text(), min_size=1, max_size=3))
def test_any_response_is_scored_within_bounds(response, accepted):
    result = scored(response, *accepted)
    assert list(result) == ["score", "acc", "f1", "format"]
    assert all(0 <= value <= 1 for value in result.values())
    assert result["acc"] <= result["f1"] and result["acc"] in (0, 1) and result["format"] in (0, 1)
    assert (result["score"] == pytest.approx(1)) == (result["f1"] == 1 and result["format"] == 1)
    assert result == scored(response, *reversed(accepted))


@pytest.mark.timeout(600)  # linear time is half a second, quadratic time hours
def test_a_long_broken_response_costs_linear_time():
    scored("<answer>" * 200_000, "Rome")
    scored("<answer>" + "x" * 2_000_000, "Rome")


def test_validation_reads_acc_as_core_metric():
    """The mean over rows of `acc`, which the trainer reports as val-core."""
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    responses = ["<answer>Rome</answer>", "<answer>Paris</answer>", "<answer>Rome</answer>", "Rome"]
    rows = [reward.compute_score("musique", response, ["Rome"]) for response in responses]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    found = process_validation_metrics(["musique"] * 4, ["a", "a", "b", "b"], columns)["musique"]
    assert found["acc"]["mean@2"] == 0.5
