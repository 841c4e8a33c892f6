"""Reward of the MuSiQue recipe: exact match and F1 of the last `<answer>...</answer>`, as MuSiQue evaluates answers.

Exact match and F1 follow `metrics/answer.py` of StonyBrookNLP/musique (SQuAD's): lower case, no ASCII punctuation, no
articles, single spaces; the best value over the accepted answers counts. A text of which that leaves nothing ("A", "-")
is no answer here, and scores nothing; there two such texts agree.

    score = 0.9 * f1 + 0.1 * format          with a block
    score = 0.1 * F1 of the whole response   without one

F1 and not exact match, so that a partly right answer ranks above a wrong one within a group. A small model that writes
no block yet still gets unequal scores in a group, and any well-formed block ranks at least as high as none.
"""

import re
import string
from collections import Counter

import numpy as np

FORMAT_SHARE = 0.1
# What search_turns.py counts of a session: 1 where its history left no room for a turn; turns but the last with neither
# a call nor an answer; 1 where the server wrote nothing.
COUNTED = ("overlong", "astray", "empty")
OPEN, CLOSE = "<answer>", "</answer>"
BLOCK = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(
    data_source: str,
    solution_str: str | None,
    ground_truth: str | list[str] | tuple[str, ...] | np.ndarray,
    extra_info: dict[str, object] | None = None,
    **kwargs: object,
) -> dict[str, float]:
    """Return `score`, `acc` (exact match), `f1` and `format`, floats in [0, 1], of one response.

    verl trains on `score`, and validates by `acc` (val-core). The answer is the innermost text of the last complete
    block; tags are case-sensitive. Without a block acc and f1 are 0. `format` is 1 where the response has one opening
    tag, one closing tag after it, and between them words that `normalize` keeps. Of `extra_info`, where
    search_turns.py made the rows, also `COUNTED`.

    Raises:
        ValueError: the ground truth is not a text or a non-empty sequence of texts. No response raises.
    """
    accepted = _accepted(ground_truth)
    counted = {name: float(extra_info[name]) for name in COUNTED if name in (extra_info or {})}
    response = solution_str if isinstance(solution_str, str) else ""
    blocks = BLOCK.findall(response)
    if not blocks:
        return {
            "score": FORMAT_SHARE * max(f1(response, gold) for gold in accepted),
            "acc": 0.0,
            "f1": 0.0,
            "format": 0.0,
            **counted,
        }
    answer = blocks[-1]
    well_formed = float(response.count(OPEN) == response.count(CLOSE) == 1 and bool(normalize(answer)))
    best_f1 = max(f1(answer, gold) for gold in accepted)
    exact = max(float(normalize(answer) == normalize(gold) != "") for gold in accepted)
    score = (1 - FORMAT_SHARE) * best_f1 + FORMAT_SHARE * well_formed
    return {"score": score, "acc": exact, "f1": best_f1, "format": well_formed, **counted}


def normalize(text: str) -> str:
    """Return the text in lower case without ASCII punctuation, articles and repeated whitespace, in this order."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def f1(answer: str, gold: str) -> float:
    """Return the F1 of the words that both texts have, as often as both have them; 0.0 where one has none."""
    words, gold_words = normalize(answer).split(), normalize(gold).split()
    if not words or not gold_words:
        return 0.0
    common = (Counter(words) & Counter(gold_words)).total()
    return 2 * common / (len(words) + len(gold_words))


def _accepted(ground_truth: object) -> list[str]:
    """Return the accepted answers; parquet columns come back as lists from datasets and as ndarrays from pandas."""
    answers = ground_truth.tolist() if isinstance(ground_truth, np.ndarray) else ground_truth
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list | tuple) or not answers or not all(isinstance(text, str) for text in answers):
        raise ValueError(
            f"ground_truth={ground_truth!r}: expected a text or a non-empty list of texts; "
            "write the parquet with recipes/musique/prepare.py"
        )
    return list(answers)
