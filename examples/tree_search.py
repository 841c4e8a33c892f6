"""A GRPO step of a tree search, without verl: turns branch, a row per leaf, and what leaves share is computed once.

    python examples/tree_search.py                                    # a random small Llama on the CPU
    python examples/tree_search.py --model Qwen/Qwen2.5-0.5B --ways 3 3 2

Every turn goes on in several ways, each of which the model samples behind the turns before it. A row is a prompt with
the turns of one leaf, its reward is the share of even tokens, and its advantage is against all leaves. A turn that
several leaves have is trained on with the advantage of each. Prints for Hugging Face's own forward row by row, for
prompts shared alone and for trees the tokens computed, the loss, the largest relative difference of a parameter's
gradient to the rows alone, and seconds.
"""

import math
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: spinning takes up to 5 times the CPU time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from verl_prefix import phased_update, response_log_probs
from verl_prefix.tools.arguments import Parser, at_least, model_to_read

COST = "About 30 seconds on two idle cores; nothing is downloaded."


def search(model: torch.nn.Module, prompt: torch.Tensor, ways: list[int], turn: int) -> list[torch.Tensor]:
    """The leaves' whole rows, [prompt + turns] each, siblings beside each other."""
    rows = prompt[None]
    for num in ways:
        rows = model.generate(
            rows, attention_mask=torch.ones_like(rows), do_sample=True, num_return_sequences=num, pad_token_id=0,
            min_new_tokens=turn, max_new_tokens=turn,
        )  # fmt: skip
    return list(rows)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0], epilog=COST)
    parser.add_argument(
        "--model", type=model_to_read, help="a causal LM's name or folder; a random small Llama if left out"
    )
    parser.add_argument(
        "--ways", type=at_least(1), nargs="+", default=[3, 3, 2], help="continuations of each level's turns"
    )
    parser.add_argument("--prompts", type=at_least(1), default=2)
    parser.add_argument("--prompt-len", type=at_least(1), default=256)
    parser.add_argument("--turn-len", type=at_least(1), default=64)
    parser.add_argument("--threads", type=at_least(1), default=2, help="of torch on a CPU")
    args = parser.parse_args(argv)
    if math.prod(args.ways) < 2:
        parser.error(f"--ways {' '.join(map(str, args.ways))}: give one level 2 or more, so that turns branch")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes = dict(vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8)
    auto = AutoModelForCausalLM
    model = auto.from_pretrained(args.model) if args.model else auto.from_config(LlamaConfig(**sizes))
    model = model.float().eval()
    vocab_size = model.get_input_embeddings().weight.shape[0]

    trees = [
        search(model, torch.randint(vocab_size, (args.prompt_len,)), args.ways, args.turn_len)
        for _ in range(args.prompts)
    ]
    leaves = [leaf for tree in trees for leaf in tree]
    prompts, responses = zip(*(leaf.tensor_split([args.prompt_len]) for leaf in leaves), strict=True)
    # Numbers of tokens behind which others go on differently: the prompt, and every turn but the last.
    forks = [[args.prompt_len + level * args.turn_len for level in range(len(args.ways))]] * len(leaves)
    rewards = torch.tensor([(x % 2 == 0).float().mean() for x in responses]).view(args.prompts, -1)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()

    def loss(rows: list[int], log_probs: list[torch.Tensor]) -> torch.Tensor:
        """These rows' share of the batch's token mean: the policy gradient."""
        objective = sum(x.sum() * advantages[row] for row, x in zip(rows, log_probs, strict=True))
        return -objective / sum(map(len, responses))

    def stock() -> float:
        total = 0.0
        for row, leaf in enumerate(leaves):
            logits = model(leaf[None], use_cache=False).logits[0, args.prompt_len - 1 : -1]
            part = loss([row], [logits.log_softmax(-1).gather(-1, responses[row][:, None])[:, 0]])
            part.backward()
            total += part.item()
        return total

    def packed(**cut: list[list[int]]) -> float:
        total = loss(list(range(len(leaves))), response_log_probs(model, prompts, responses, schedule="packed", **cut))
        total.backward()
        return total.item()

    def phased() -> float:
        total = 0.0
        with phased_update(model, prompts, responses, forks=forks) as waves:
            for wave in waves:
                part = loss(wave.rows, wave.log_probs)
                part.backward()
                total += part.item()
        return total

    counted: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, tokens, __: counted.append(tokens[0].numel()))

    def measured(run: Callable[[], float]) -> tuple[int, float, dict[str, torch.Tensor], float]:
        """Tokens, loss, gradients and seconds of one update before optimizer.step."""
        model.zero_grad()
        counted.clear()
        start = time.perf_counter()
        value = run()
        seconds = time.perf_counter() - start
        return sum(counted), value, {n: p.grad.double() for n, p in model.named_parameters()}, seconds

    print(f"{len(leaves)} leaves of {args.prompt_len} + {len(args.ways)} x {args.turn_len} tokens")
    stock(), packed(forks=forks)  # warm up
    truth, alone = dict[str, torch.Tensor](), 0.0  # of the first run
    runs = {"rows alone": stock, "one level": packed, "tree": lambda: packed(forks=forks), "tree in waves": phased}
    for name, run in runs.items():
        tokens, value, grads, seconds = measured(run)
        truth, alone = truth or grads, alone or seconds
        worst = max(((grads[n] - g).norm() / g.norm()).item() for n, g in truth.items())
        print(
            f"{name:<14} {tokens:>6} tokens, loss {value:+.6f}, gradients differ by {worst:.1e}, {seconds:.2f} s, "
            f"{alone / seconds:.1f} times as fast"
        )


if __name__ == "__main__":
    main()
