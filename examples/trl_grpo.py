"""TRL's GRPOTrainer with log-probs that compute a shared prompt once; its loss, rewards and options stay TRL's.

    .venv-trl/bin/python examples/trl_grpo.py      (made by `make setup-trl`)

trains a small random model on CPU for two steps with stock and with ours, and prints what differs and how long the
log-probs and their backward take. `SharedPrefixGRPOTrainer` is all that a training script needs; README.md beside this
file says which options of TRL keep groups whole.
"""

import importlib.util
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: spinning takes up to 5 times the CPU time

import torch

if __name__ == "__main__" and importlib.util.find_spec("trl") is None:
    sys.exit("trl_grpo.py needs trl: make setup-trl; .venv-trl/bin/python examples/trl_grpo.py")

import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from verl_prefix import response_log_probs
from verl_prefix.testing import write_tiny_model
from verl_prefix.tools.arguments import Parser, at_least
from verl_prefix.tools.report import provenance


class SharedPrefixGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` whose log-probs, with and without gradients, are those of `verl_prefix.response_log_probs`.

    Args:
        max_tokens: of one pass on this device, each prompt counted once. Batches within it are packed; larger ones, and
            all under `gradient_checkpointing`, go in waves, whose log-probs take one more forward. None: no bound.
        Others as of `GRPOTrainer`.

    Raises:
        ValueError: what shared prefixes do not do here, by the name of its option: an auxiliary loss, FSDP, DeepSpeed.
            In the first step, images.
    """

    def __init__(self, *args: Any, max_tokens: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_tokens = max_tokens
        if self.aux_loss_enabled:
            raise ValueError(
                f"router_aux_loss_coef={self.router_aux_loss_coef}: shared prefixes return no auxiliary loss; set "
                "GRPOConfig(router_aux_loss_coef=0.0)"
            )
        for name, enabled in (("FSDP", self.is_fsdp_enabled), ("DeepSpeed", self.is_deepspeed_enabled)):
            if enabled:
                raise ValueError(
                    f"{name} shards parameters, and ranks would not run the same passes; launch with DDP, or train "
                    "with the verl plugin"
                )

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False,
        compute_aux_loss=False, **pixels,
    ):  # fmt: skip
        if given := sorted(name for name, value in pixels.items() if value is not None):
            raise ValueError(f"{', '.join(given)}: this trainer takes text alone; use GRPOTrainer, or the verl plugin")
        model = self.accelerator.unwrap_model(model)
        split = [-logits_to_keep]
        (prompts, completions), (prompt_mask, completion_mask) = (
            x.tensor_split(split, dim=1) for x in (input_ids, attention_mask)
        )
        with self.accelerator.autocast():
            log_probs, entropy = response_log_probs(
                model, prompts, completions, prompt_mask=prompt_mask, response_mask=completion_mask,
                temperature=self.temperature, return_entropy=True, max_tokens=self.max_tokens,
            )  # fmt: skip
        if torch.is_grad_enabled() and not log_probs.requires_grad:  # all completions are masked: a gradient of zero
            log_probs = log_probs + 0.0 * sum(p.sum() for p in model.parameters() if p.requires_grad)
        return log_probs, entropy if compute_entropy else None, None

    def training_step(self, model, inputs, num_items_in_batch):
        """TRL's, and behind the last backward of a step what DDP would have done: the mean of gradients over ranks."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed has .* ranks")  # which are averaged here
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.num_processes > 1 and self.accelerator.sync_gradients:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = self.accelerator.reduce(grad, reduction="mean")
        return loss


def letters(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within the group of a random model: the share of letters."""
    return [sum(char.isalpha() for char in text) / max(len(text), 1) for text in completions]


def clocks() -> torch.Tensor:
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def observed(kind: type[GRPOTrainer]) -> type[GRPOTrainer]:
    """`kind` that keeps in `seen`, for every step: its loss, completions, gradients before clipping, and seconds,
    of the clock and of the CPU, without those of generation and rewards."""

    class Observed(kind):
        def _generate_and_score_completions(self, inputs):
            start = clocks()
            self.generated = super()._generate_and_score_completions(inputs)
            self.others = clocks() - start
            return self.generated

        def training_step(self, model, inputs, num_items_in_batch):
            self.__dict__.setdefault("seen", [])
            self.others = torch.zeros(2)
            start = clocks()
            loss = super().training_step(model, inputs, num_items_in_batch)
            seconds, cpu_seconds = (clocks() - start - self.others).tolist()
            grads = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
            self.seen.append(
                dict(
                    loss=float(loss), completions=self.generated["completion_ids"], grads=grads,
                    seconds=seconds, cpu_seconds=cpu_seconds,
                )
            )  # fmt: skip
            return loss

    return Observed


def train(kind: type[GRPOTrainer], model: str, prompts: list[str], options: dict[str, Any], **more: Any) -> GRPOTrainer:
    """Trains a model folder's weights in fp32 on CPU, from the same start and with the same random numbers."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(folder, report_to=[], save_strategy="no", use_cpu=True, bf16=False, seed=1, **options)
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        data = Dataset.from_dict({"prompt": prompts})
        trainer = observed(kind)(policy, letters, config, data, processing_class=tokenizer, **more)
        trainer.train()
    return trainer


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor of both."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max(((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-30)).item() for name in b)


def compare(ours: GRPOTrainer, stock: GRPOTrainer) -> dict[str, Any]:
    """What two arms differ in, and their seconds."""
    pairs = list(zip(ours.seen, stock.seen, strict=True))
    return {
        "same_completions": all(torch.equal(a["completions"], b["completions"]) for a, b in pairs),
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
        "grads": [relative(a["grads"], b["grads"]) for a, b in pairs],
        "weights": relative(*(dict(t.model.named_parameters()) for t in (ours, stock))),
    } | {
        clock: {name: [x[clock] for x in t.seen] for name, t in (("stock", stock), ("ours", ours))}
        for clock in ("seconds", "cpu_seconds")
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="a causal LM's folder, smollm2 (as `make demo` has it); small and random if out"
    )
    parser.add_argument("--max-tokens", type=at_least(1), help="of one pass; larger batches go in waves")
    parser.add_argument("--options", type=json.loads, default={}, help="json of GRPOConfig")
    for name, default in {"prompts": 1, "group": 8, "prompt-words": 400, "response-len": 24, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=at_least(1), default=default)
    parser.add_argument("--threads", type=at_least(1), default=2, help="of torch on a CPU")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    prompts = [
        " ".join(f"The {i + j * 37 % 101}. river meets the {j}. town." for j in range(args.prompt_words // 6))
        for i in range(8 * args.prompts * args.steps)
    ]
    with tempfile.TemporaryDirectory() as folder:
        if args.model == "smollm2":
            from demo import ROOT
            from smollm2 import smollm2

            model = smollm2(ROOT / "outputs" / "models" / "smollm2-135m")
        else:
            model = args.model or write_tiny_model(Path(folder) / "model", texts=prompts)
        options = dict(
            per_device_train_batch_size=args.prompts * args.group, gradient_accumulation_steps=1,
            num_generations=args.group, max_completion_length=args.response_len, max_steps=args.steps,
            gradient_checkpointing=False, optim="sgd", learning_rate=0.1,
        )  # fmt: skip
        options |= args.options
        stock = train(GRPOTrainer, model, prompts, options)
        ours = train(SharedPrefixGRPOTrainer, model, prompts, options, max_tokens=args.max_tokens)
    if ours.accelerator.is_main_process:
        report = (
            provenance("trl-1", "cpu") | {"trl": trl.__version__, "config": vars(args) | options} | compare(ours, stock)
        )
        print(json.dumps(report))


if __name__ == "__main__":
    main()
