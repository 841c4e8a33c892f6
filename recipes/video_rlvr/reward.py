"""Reward of the video recipe: accuracy by problem type of the last `<answer>...</answer>`, and the think/answer format.

    score = 0.9 * acc + 0.1 * format

`acc` follows Video-R1 (Feng et al., arXiv 2503.21776, `accuracy_reward` of its grpo.py): exact choice; equal numbers;
1 - WER (jiwer) for OCR; the mean of ROUGE-1, ROUGE-2 and ROUGE-L (rouge-score) for free-form; 1 - relative error for
regression. Right answers that score below 1 there score 1 here: a number with its unit, 3.0 for 3, 0 for 0, and one
word, which has no ROUGE-2. One that scores 1 there scores 0 here: `nan`, of which their regression keeps
max(0.0, nan) = 0.0 as its error.
"""

import math
import re

import jiwer
from rouge_score.rouge_scorer import RougeScorer

PROBLEM_TYPES = ("multiple choice", "numerical", "OCR", "free-form", "regression")
NUMERIC = ("numerical", "regression")
FORMAT_SHARE = 0.1
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
BLOCK = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
FORMAT = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:,[0-9]{3})*(?:\.([0-9]+))?|\.([0-9]+))(?:[eE][-+]?[0-9]+)?")
ROUGE = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


def compute_score(
    data_source: str,
    solution_str: str | None,
    ground_truth: str,
    extra_info: dict[str, object] | None = None,
    format_share: float = FORMAT_SHARE,
    **kwargs: object,
) -> dict[str, float]:
    """Return `score`, `acc` and `format`, floats in [0, 1], of one response.

    verl trains on `score`, and validates by `acc` (val-core). The answer is the innermost text of the last complete
    block; tags are case-sensitive; without a block acc is 0. `format_share` (reward_kwargs) is the format's weight.
    `format` is 1 where the response is one think block and one answer block, neither of them blank, and nothing else.

    Raises:
        ValueError: the ground truth is not a text, or not a number where the type needs one; `extra_info` has none
            of `PROBLEM_TYPES` under `problem_type`; or `format_share` is not in [0, 1]. No response raises.
    """
    if not 0 <= format_share <= 1:
        raise ValueError(f"format_share={format_share!r}: set a share from 0 to 1, the format's part of the score")
    problem_type = (extra_info or {}).get("problem_type")
    if problem_type not in PROBLEM_TYPES:
        raise ValueError(
            f"extra_info['problem_type']={problem_type!r}: expected one of {PROBLEM_TYPES}; "
            "write the parquet with recipes/video_rlvr/prepare.py"
        )
    blank = not isinstance(ground_truth, str) or not ground_truth.strip()
    if blank or (problem_type in NUMERIC and number(ground_truth) is None):
        kind = "a number" if problem_type in NUMERIC else "a text"
        raise ValueError(
            f"ground_truth={ground_truth!r}: expected {kind} for problem_type {problem_type!r}; "
            "write the parquet with recipes/video_rlvr/prepare.py"
        )
    response = solution_str if isinstance(solution_str, str) else ""
    blocks = BLOCK.findall(response)
    right = accuracy(problem_type, blocks[-1].strip(), ground_truth.strip()) if blocks else 0.0
    whole = FORMAT.fullmatch(response) if all(response.count(tag) == 1 for tag in TAGS) else None
    well_formed = float(whole is not None and all(part.strip() for part in whole.groups()))
    return {
        "score": (1 - format_share) * right + format_share * well_formed,
        "acc": right,
        "format": well_formed,
    }


def accuracy(problem_type: str, answer: str, gold: str) -> float:
    """Return how right an answer is, in [0, 1]; an empty answer is wrong."""
    if not answer:
        return 0.0
    if problem_type == "multiple choice":
        return float(_letter(answer) == _letter(gold))
    if problem_type == "OCR":
        # jiwer splits at single spaces only
        return max(0.0, 1.0 - jiwer.wer(" ".join(gold.split()), " ".join(answer.split())))
    if problem_type == "free-form":
        return _rouge(answer, gold)
    found, expected = number(answer), number(gold)
    if found is None:
        return 0.0
    if problem_type == "numerical" or expected == 0:
        digits = max(2, _decimals(gold))
        return float(round(found, digits) == round(expected, digits))
    return max(0.0, 1.0 - abs(found - expected) / abs(expected))


def number(text: str) -> float | None:
    """Return the one number in a text: `1,200`, `-0.5`, `3e4`, `12 m/s`, `$5`, `50%` (50); None for none or several."""
    found = list(NUMBER.finditer(text.replace("\u2212", "-")))
    if len(found) != 1:
        return None
    value = float(found[0][0].replace(",", ""))
    return value if math.isfinite(value) else None


def _decimals(text: str) -> int:
    """Return how many decimals the number in a text has."""
    match = NUMBER.search(text)
    return len(match[1] or match[2] or "")


def _letter(text: str) -> str:
    return text.strip(" \t\n().:").upper()


def _rouge(answer: str, gold: str) -> float:
    """Return the mean F-measure of the ROUGE scores that the gold answer has n-grams for."""
    if answer == gold:  # also where the scorer sees no word: it reads ASCII letters and digits alone
        return 1.0
    scores = ROUGE.score(gold, answer)
    if len(gold.split()) < 2:
        del scores["rouge2"]
    return sum(score.fmeasure for score in scores.values()) / len(scores)
