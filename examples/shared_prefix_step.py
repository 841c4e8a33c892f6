"""One GRPO step of a Hugging Face model both ways, without verl: every row by itself, and with shared prompts.

    python examples/shared_prefix_step.py                           # a random small Llama on the CPU
    python examples/shared_prefix_step.py --model Qwen/Qwen2.5-0.5B --device cuda  # in bf16

Random prompts and responses, the reward is the share of even tokens. Prints for one packed graph and for waves the
largest relative difference of a parameter's gradient to HF's own forward row by row, and the ratio of times.
"""

import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: spinning takes up to 5 times the CPU time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from verl_prefix import phased_update, response_log_probs
from verl_prefix.tools.arguments import Parser, at_least, model_to_read

COST = "About 20 seconds on two idle cores; nothing is downloaded."


def step(model: torch.nn.Module, run: Callable[[], None], device: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Seconds of one update before optimizer.step, and the gradients that it leaves."""
    model.zero_grad()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0], epilog=COST)
    parser.add_argument(
        "--model", type=model_to_read, help="a causal LM's name or folder; a random small Llama if left out"
    )
    for name, default in {"prompts": 2, "group": 8, "prompt-len": 1024, "response-len": 64, "wave-tokens": 128}.items():
        parser.add_argument(f"--{name}", type=at_least(2 if name == "group" else 1), default=default)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=at_least(1), default=2, help="of torch on a CPU")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch.cuda.is_available() is False; use --device cpu")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes = dict(vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8)
    auto, dtype = AutoModelForCausalLM, torch.float32 if args.device == "cpu" else torch.bfloat16
    model = auto.from_pretrained(args.model) if args.model else auto.from_config(LlamaConfig(**sizes))
    model = model.to(args.device, dtype).eval()
    vocab_size = model.get_input_embeddings().weight.shape[0]
    prompts = torch.randint(vocab_size, (args.prompts, args.prompt_len)).repeat_interleave(args.group, 0).unbind()
    responses = [torch.randint(vocab_size, (args.response_len - i % 3,)) for i in range(len(prompts))]
    rewards = torch.tensor([(x % 2 == 0).float().mean() for x in responses]).view(args.prompts, args.group)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()

    def loss(rows: list[int], log_probs: list[torch.Tensor]) -> torch.Tensor:
        """These rows' share of the batch's token mean. GRPO on-policy: the ratio is 1, its gradient is not 0."""
        ratios = [(x - x.detach()).exp() for x in log_probs]
        objective = sum(ratio.sum() * advantages[row] for row, ratio in zip(rows, ratios, strict=True))
        return -objective / sum(len(x) for x in responses)

    def stock() -> None:
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            ids = torch.cat([prompt, response])[None].to(args.device)
            logits = model(ids, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1].float()
            loss([row], [logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]]).backward()

    def packed() -> None:
        loss(list(range(len(prompts))), response_log_probs(model, prompts, responses)).backward()

    def phased() -> None:
        with phased_update(model, prompts, responses, wave_tokens=args.wave_tokens) as waves:
            for wave in waves:
                loss(wave.rows, wave.log_probs).backward()

    step(model, stock, args.device), step(model, packed, args.device)  # warm up
    seconds, truth = step(model, stock, args.device)
    print(f"{len(prompts)} rows of {args.prompt_len} + {args.response_len} tokens, stock: {seconds:.2f} s")
    for run in (packed, phased):
        own, grads = step(model, run, args.device)
        worst = max(((grads[name] - g).norm() / g.norm()).item() for name, g in truth.items())
        print(f"{run.__name__}: largest gradient difference {worst:.1e}, {seconds / own:.2f} times as fast")


if __name__ == "__main__":
    main()
