"""What a module of transformers takes for torch where it shall compute in float64 what it says in fp32."""

from typing import Any

import torch


class Float64Torch:
    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
