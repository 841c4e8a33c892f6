"""The steps that `verl-prefix ab` replays: a trace's, or made-up ones."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig

from verl_prefix.config.model import dense_attention, read_hf_config
from verl_prefix.tools.ab.arm import check_manifest, precision
from verl_prefix.tools.ab.options import MADE_UP_STEPS, Options
from verl_prefix.tools.ab.other_engines import of_fsdp2
from verl_prefix.trace import (
    MANIFEST,
    StepRows,
    Trace,
    check_model_is_whole,
    join_rows,
    model_fingerprint,
    plain,
    reading,
)

# Modules that a trace may name as optimizer_impl: verl imports what stands there.
OPTIMIZERS = ("torch.optim", "torchao.optim", "bitsandbytes.optim")


class Source:
    """The steps to replay, the same for every arm: of a trace, or of random rows. Where fewer ranks run here than were
    recorded, each has the rows of several.

    Attributes:
        manifest: what `build_engine` reads, with the command line's model and dtype. num_steps, ranks: ints.

    Raises:
        ValueError: trace, model and options do not go together; TraceError where a file of the trace is at fault.
    """

    def __init__(self, options: Options) -> None:
        self.synthetic, self.trace, model = options.synthetic, None, options.model
        if self.synthetic:
            self.num_steps, self.ranks = options.steps or MADE_UP_STEPS, options.ranks or 1
            if model_fingerprint(model) is None:
                raise ValueError(f"--model {model} has no config.json; give a model's folder")
        else:
            self.trace = Trace(options.trace)
            self.manifest, recorded = self.trace.manifest, self.trace.world_size
            self.num_steps, self.ranks = options.steps or self.trace.num_steps, options.ranks or recorded
            if self.num_steps > self.trace.num_steps:
                raise ValueError(f"--steps {options.steps}: {options.trace} holds {self.trace.num_steps}; leave it out")
            if recorded % self.ranks:
                raise ValueError(f"--ranks {self.ranks} does not divide the trace's {recorded} ranks")
            with reading(self.trace.folder / MANIFEST):
                model = str(model or self.manifest["model"]["local_path"] or self.manifest["model"]["path"])
                check_model_is_whole(self.manifest["model"])
                self.manifest = of_fsdp2(self.manifest)
            check_manifest(self.manifest)
            self.trace.check_model(model)
            module = self.manifest["optimizer"].get("optimizer_impl") or "torch.optim"
            if module not in OPTIMIZERS:
                raise ValueError(f"optimizer_impl={module!r} in the trace: verl would import it; known: {OPTIMIZERS}")
            self.trace.check()
        if 0 < (gpus := torch.cuda.device_count()) < self.ranks:
            fits = next(n for n in range(gpus, 0, -1) if self.ranks % n == 0)
            raise ValueError(f"{self.ranks} ranks need a GPU each, and this machine has {gpus}: write --ranks {fits}")
        try:
            hf_config = read_hf_config({"path": str(model)})
        except ValueError as error:  # a type, or a value, that transformers does not know
            raise ValueError(f"--model {model}: {str(error).partition(chr(10))[0]}") from error
        if hf_config is None:
            raise ValueError(f"--model {model}: its config.json cannot be read here; give another model's folder")
        if (folder := Path(model)).is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            raise ValueError(f"--model {model} has no weights; give a folder with them")
        if self.synthetic:
            self.manifest = synthetic_manifest(self.synthetic, dense_attention(hf_config))
        self.manifest["model"]["path"] = str(model)
        if options.dtype:
            self.manifest["engine"]["mixed_precision"] = _mixed_precision(options.dtype)
        dtype = precision(self.manifest)
        if dtype == "fp16":
            raise ValueError(
                "the trace is of fp16, whose loss scale moves from step to step; give --dtype bf16 or --dtype fp32"
            )
        if dtype != "fp32" and not options.truth_steps:
            raise ValueError(f"--truth-steps 0: {dtype} is judged against a truth; give 1 or more")

    def rows(self, step: int, rank: int, vocab_size: int) -> StepRows:
        """The rows that `rank` of this replay trains on in `step`."""
        if self.synthetic:
            return synthetic_rows(self.synthetic, vocab_size, seed=1000 * step + rank, ranks=self.ranks)
        assert self.trace is not None
        joined = self.trace.world_size // self.ranks
        return join_rows([self.trace.read(step, rank * joined + i) for i in range(joined)])


def _mixed_precision(dtype: str) -> dict[str, str]:
    return dict(param_dtype=dtype, reduce_dtype="fp32", buffer_dtype="fp32")


def synthetic_rows(shape: tuple[int, int, int, int], vocab_size: int, seed: int, ranks: int = 1) -> StepRows:
    """Rows of this shape, (P, S, G, groups), of random tokens; group-relative advantages; `old_log_probs` left to
    stock."""
    prompt, response, group, count = shape
    generator = torch.Generator().manual_seed(seed)
    num_rows = count * group
    prompts = torch.randint(vocab_size, (count, prompt), generator=generator).repeat_interleave(group, 0)
    responses = torch.randint(vocab_size, (num_rows, response), generator=generator)
    rewards = torch.randn(count, group, generator=generator)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).nan_to_num()
    whole = torch.cat([prompts, responses], 1)
    fields = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": whole,
        "position_ids": torch.arange(prompt + response).expand_as(whole),
        "loss_mask": torch.ones_like(responses),
        "response_mask": torch.ones_like(responses),
        "advantages": advantages.flatten().unsqueeze(1).expand(num_rows, response),
    }
    jagged = {name: (x.flatten().contiguous(), torch.full((num_rows,), x.shape[1])) for name, x in fields.items()}
    flags = {
        "use_dynamic_bsz": True, "max_token_len_per_gpu": synthetic_budget(shape),
        "micro_batch_size_per_gpu": 1, "use_remove_padding": True, "temperature": 1.0, "calculate_entropy": False,
        "global_batch_size": num_rows * ranks,
    }  # fmt: skip
    return StepRows(jagged, {}, [f"{seed}-{i // group}" for i in range(num_rows)], flags)


def synthetic_budget(shape: tuple[int, int, int, int]) -> int:
    """Tokens of a micro-batch of made-up rows, (P, S, G, ...): two rows, on a GPU at least 16384, as in `bench`."""
    return max(2 * (shape[0] + shape[1]), 16384 if torch.cuda.is_available() else 0)


def synthetic_manifest(shape: tuple[int, int, int, int], dense: str = "sdpa") -> dict[str, Any]:
    """A trace's manifest for made-up rows, (P, S, G, ...): lr 1e-6, no KL, waves of an eighth of the budget; fp32 on a
    CPU, verl's defaults on a GPU; without flash-attn `dense` attention, with which stock takes one row at a time."""
    cpu = not torch.cuda.is_available()
    is_dense = cpu or importlib.util.find_spec("flash_attn") is None
    mixed = _mixed_precision("fp32" if cpu else "bf16")
    loss = ActorConfig(strategy="fsdp2", rollout_n=shape[2], ppo_micro_batch_size_per_gpu=1)
    engine = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=not cpu, mixed_precision=mixed)
    return {
        "seed": 0,
        "model": {"enable_gradient_checkpointing": False, "load_tokenizer": False}
        | ({"override_config": {"attn_implementation": dense}} if is_dense else {}),
        "engine": plain(engine) | {"prefix": {"wave_tokens": max(1, synthetic_budget(shape) // 8)}},
        "optimizer": plain(FSDPOptimizerConfig(lr=1e-6)),
        "loss": {k: v for k, v in plain(loss).items() if k not in ("engine", "model_config", "checkpoint", "optim")},
        "stock_row_by_row": is_dense,  # packed rows would have a dense mask; see `bench.arms.stock_attention`
    }
