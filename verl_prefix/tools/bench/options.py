"""Options of `verl-prefix bench`: arms, model shapes, sizes of grid rows, and the command line.

torch and transformers are imported where they are used: what is wrong with the command line is said before.
"""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

STOCK = ("stock", "stock_lean")
ARMS = (
    *STOCK, "prefix_grouper", "one_level", "packed", "phased", "auto", "phased+offload", "stock+checkpoint",
    "phased+checkpoint",
)  # fmt: skip
RECOMPILE_LIMIT = 128  # every arm has its own attention, gradient mode and shapes; beyond it, eager code runs unseen
LLAMA = dict(rms_norm_eps=1e-5)
# As published in each model's config.json; `small` is this project's CPU bench, `small-hybrid` the same with three
# recurrent layers of four, `tiny` is for its tests.
# model_type; hidden, intermediate, layers, heads, kv heads, head dim, vocabulary; other fields
SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "smollm2-135m": ("llama", (576, 1536, 30, 9, 3, 64, 49152), LLAMA | dict(tie_word_embeddings=True)),
    "qwen3-0.6b": ("qwen3", (1024, 3072, 28, 16, 8, 128, 151936), dict(tie_word_embeddings=True)),
    "qwen3-4b": ("qwen3", (2560, 9728, 36, 32, 8, 128, 151936), dict(tie_word_embeddings=True)),
    "qwen3-8b": ("qwen3", (4096, 12288, 36, 32, 8, 128, 151936), {}),
    "llama3-8b": ("llama", (4096, 14336, 32, 32, 8, 128, 128256), LLAMA),
    "small": ("llama", (512, 1376, 8, 8, 2, 64, 32000), {}),
    "small-hybrid": (
        "qwen3_5_text",
        (512, 1376, 8, 8, 2, 64, 32000),
        dict(linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8),
    ),
    "tiny": ("llama", (64, 192, 2, 4, 2, 16, 997), {}),
}
_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
           "head_dim", "vocab_size")  # fmt: skip


def full_depth(shape: str) -> int:
    """Layers of the published model."""
    return SHAPES[shape][1][2]


def build_model(shape: str, layers: int, device: str, dtype: "torch.dtype", positions: int = 4096) -> "PreTrainedModel":
    """A model of this shape with random weights and `layers` layers, with gradients of zero."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes, others = SHAPES[shape]
    fields = dict(zip(_FIELDS, sizes, strict=True)) | dict(tie_word_embeddings=False) | others
    config = AutoConfig.for_model(kind, **fields | dict(num_hidden_layers=layers, max_position_embeddings=positions))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


class Size(NamedTuple):
    """One grid row: P prefix tokens and one more prompt token, S response tokens per row, G rows of one prompt.

    With several `turns` G is the number of sessions, each with a row per turn. A turn's prompt has the turns before it
    without the first `thinking` tokens of their responses, and `tool` tokens behind each."""

    prefix: int
    suffix: int
    group: int
    turns: int = 1
    thinking: int = 0
    tool: int = 0

    def with_turns(self, turns: int, thinking: int | None, tool: int | None) -> "Size":
        if turns == 1 and (thinking or tool):
            raise ValueError("--thinking and --tool are of sessions of several turns; add --turns 6, or another number")
        thinking, tool = (
            (3 * self.suffix // 4 if thinking is None else thinking),
            (self.suffix if tool is None else tool),
        )
        if thinking > self.suffix:
            raise ValueError(f"--thinking {thinking}: a response has {self.suffix} tokens (S); give at most that")
        return self._replace(turns=turns, thinking=thinking, tool=tool) if turns > 1 else self

    @property
    def row(self) -> int:
        """Tokens of the longest row."""
        return self.prefix + 1 + self.suffix + (self.turns - 1) * (self.suffix - self.thinking + self.tool)

    def __str__(self) -> str:
        return "/".join(map(str, self[:3])) + f" x {self.turns} turns" * (self.turns > 1)


def unavailable(arm: str, shape: str, turns: int = 1) -> str | None:
    """The reason why this arm cannot run here, or None."""
    from verl_prefix.models.recurrent import is_recurrent

    if arm == "one_level" and turns == 1:
        return "rows of one turn have one level, as packed computes it (--turns gives more)"
    if arm != "prefix_grouper":
        return None
    if turns > 1:
        return "it has one layout for all groups, whose rows have one length"
    if is_recurrent(SHAPES[shape][0]):
        return f"it shares attention alone, and most layers of {shape} are recurrent"
    if not importlib.util.find_spec("prefix_grouper"):
        return "the package prefix-grouper is not installed (pip install prefix-grouper==0.0.1.post1)"
    return None


@dataclass
class Options:
    """The command line; 0 and "" are chosen by what there is. Raises ValueError where a value cannot be run."""

    sizes: tuple[Size, ...]
    shape: str = "small"
    arms: tuple[str, ...] = ARMS
    layers: int = 0
    repeats: int = 3
    truth: str = "float64"
    device: str = ""
    threads: int = 0
    memory: bool = True
    compile: bool = False
    capacity: float = 0.0

    def __post_init__(self) -> None:
        if self.capacity and any(size.turns > 1 for size in self.sizes):
            raise ValueError("--capacity is of rows of one turn; remove it, or --turns")
        import torch

        from verl_prefix.tools.memory import RESET_PEAK

        self.sizes = tuple(dict.fromkeys(self.sizes))
        if not self.sizes:
            raise ValueError("nothing to measure: give --grid cpu, another grid, or --rows P/S/G")
        if self.layers > (full := full_depth(self.shape)):
            raise ValueError(f"--layers {self.layers}: {self.shape} has {full}; give at most that, or another --shape")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch.cuda.is_available() is False; use --device cpu")
        self.layers = self.layers or full
        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = "bfloat16" if self.device == "cuda" else "float32"
        self.threads = self.threads or torch.get_num_threads()
        if not self.running:
            reason = unavailable(self.arms[0], self.shape, self.turns)
            raise ValueError(f"none of --arms {','.join(self.arms)} can run: {reason}")
        if (self.memory or self.capacity) and self.device == "cpu" and not RESET_PEAK.exists():
            raise ValueError(f"peak memory on a CPU is read from {RESET_PEAK}, which is not there: add --no-memory")

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return getattr(torch, self.dtype)

    @property
    def turns(self) -> int:
        return max(size.turns for size in self.sizes)

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(arm for arm in self.arms if not unavailable(arm, self.shape, self.turns))

    def budget_of(self, size: Size) -> int:
        return max(2 * size.row, 16384 if self.device == "cuda" else 0)

    def model(self) -> "PreTrainedModel":
        import torch

        longest = max(4096, *(size.row for size in self.sizes))
        model = build_model(self.shape, self.layers, device=self.device, dtype=self.torch_dtype, positions=longest)
        if self.compile:
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
            for layer in model.base_model.layers:
                layer.compile(dynamic=True)
        return model

    def asdict(self) -> dict[str, Any]:
        """As JSON has it. Rows may differ between runs that go into one file."""
        return {name: value for name, value in vars(self).items() if name != "sizes"} | {"arms": list(self.arms)}
