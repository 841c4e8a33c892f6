"""What users are told where the fastest attention package for their GPU is missing."""

import torch

from verl_prefix.core.kernels.flash_attn import FA3, FA4, missing_best

# module -> what its lack costs, where that is known; and the line that installs it. {cuda}: torch's, as in 128.
_ADVICE = {
    FA4: ("", "pip install flash-attn-4"),
    FA3: (
        " (about 13 % of an update of an 8B model, estimated for prompts of 8k tokens, 8 responses of 1k each)",
        "pip install --no-deps flash-attn-3 --index-url https://download.pytorch.org/whl/cu{cuda}",
    ),
}


def missing_package(head_dim: int, softcap: bool) -> tuple[str, str] | None:
    """On a CUDA device: what is missing for such inputs, with what that costs; and the line that installs it. None:
    nothing is."""
    best = missing_best(head_dim, softcap)
    if best is None:
        return None
    cost, line = _ADVICE[best]
    what = f"{best}, the fastest attention for this GPU, is not installed or has unknown arguments: updates take longer"
    return what + cost, line.format(cuda=(torch.version.cuda or "").replace(".", ""))
