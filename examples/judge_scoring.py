"""A judge reads one long text once and scores many short answers to questions about it; forward only, without verl.

    python examples/judge_scoring.py                            # a random tiny model: random verdicts, real times
    python examples/judge_scoring.py --model Qwen/Qwen2.5-0.5B-Instruct --text report.txt

The text is the prompt of every row; a response is a question and one candidate answer, of which the answer's tokens are
scored (mean log-prob). Prints the best answers, the largest difference to HF's own forward of every whole row, and the
ratio of times. This is the multi-question judge of the Prefix Grouper paper (arXiv 2506.05433).
"""

import os
import tempfile
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: spinning takes up to 5 times the CPU time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_prefix import response_log_probs
from verl_prefix.testing import write_tiny_model
from verl_prefix.tools.arguments import Parser, at_least, file_to_read, model_to_read

COST = "About 10 seconds on two idle cores; nothing is downloaded."

RIVERS = {"Arle": "Holm", "Brane": "Tarn", "Corse": "Veldt", "Dunna": "Ost", "Esk": "Marl", "Fiora": "Quill"}
TEXT = " ".join(
    f"The {river} rises in hill {i} and flows past {10 + i} mills before it meets the sea near {town}. Most years "
    f"it floods the meadows once, and the people of {town} hold a fair when the water is gone."
    for i, (river, town) in enumerate(RIVERS.items())
)
QUESTIONS = {f"Near which town does the {river} meet the sea?": list(RIVERS.values()) for river in RIVERS}


def whole_rows(model: torch.nn.Module, text: list[int], responses: list[list[int]]) -> list[torch.Tensor]:
    """The same log-probs by HF's own forward, the text again in every row."""
    found = []
    for response in responses:
        ids = torch.tensor([[*text, *response]], device=model.device)
        logits = model(ids, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(-1, ids[0, len(text) :, None])[:, 0])
    return found


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0], epilog=COST)
    parser.add_argument(
        "--model", type=model_to_read, help="a causal LM's name or folder; a random tiny one if left out"
    )
    parser.add_argument("--text", type=file_to_read, help="a text file; a few sentences about rivers if left out")
    parser.add_argument(
        "--max-tokens", type=at_least(1), default=8192, help="tokens of one pass, the text counted once"
    )
    parser.add_argument("--threads", type=at_least(1), default=2, help="of torch on a CPU")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    with tempfile.TemporaryDirectory() as folder:
        path = args.model or write_tiny_model(folder, num_hidden_layers=4)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    text = tokenizer(args.text.read_text() if args.text else TEXT)["input_ids"]
    rows = [(question, answer) for question, answers in QUESTIONS.items() for answer in answers]
    questions = [tokenizer(f"\nQ: {question}\nA:", add_special_tokens=False)["input_ids"] for question, _ in rows]
    answers = [tokenizer(f" {answer}", add_special_tokens=False)["input_ids"] for _, answer in rows]
    responses = [question + answer for question, answer in zip(questions, answers, strict=True)]

    start = time.perf_counter()
    found = response_log_probs(model, [text], responses, groups=[0] * len(rows), max_tokens=args.max_tokens)
    shared = time.perf_counter() - start
    scores: dict[str, dict[str, float]] = {}
    for (question, answer), log_probs, tokens in zip(rows, found, answers, strict=True):
        scores.setdefault(question, {})[answer] = log_probs[-len(tokens) :].mean().item()
    for question, by_answer in scores.items():
        best = max(by_answer, key=by_answer.get)
        print(f"{question} {best} ({by_answer[best]:.3f})")

    start = time.perf_counter()
    stock = whole_rows(model, text, responses)
    seconds = time.perf_counter() - start
    worst = max((a - b).abs().max().item() for a, b in zip(found, stock, strict=True))
    print(f"{len(rows)} answers, text of {len(text)} tokens: largest log-prob difference to whole rows {worst:.1e}")
    print(f"text read once {shared:.2f} s, in every row {seconds:.2f} s: {seconds / shared:.2f} times as fast")


if __name__ == "__main__":
    main()
