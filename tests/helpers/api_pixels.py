"""Rows with pixels by the standalone API."""

import torch
from families import float64_inside  # noqa: F401
from vision_cases import FAMILIES, Case, paths  # noqa: F401

from verl_prefix import phased_update, response_log_probs
from verl_prefix.models import vision


def together(rows: list[dict]) -> dict[str, torch.Tensor]:
    """As a processor has them for many prompts: one after the other."""
    found = {name: [row[name] for row in rows if name in row] for name in vision.PIXEL_NAMES}
    return {name: torch.cat(pieces) for name, pieces in found.items() if pieces}


def losses(log_probs, weights) -> torch.Tensor:
    return sum((a * w).sum() for a, w in zip(log_probs, weights, strict=True))


def by_api(case: Case, **options) -> list[torch.Tensor]:
    rows = case.rollouts
    options = dict(pixels=together(case.pixels)) | options
    found = response_log_probs(case.model, rows.prompts, rows.responses, **options)
    losses(found, rows.weights).backward()
    return [x.detach() for x in found]


def by_waves(case: Case) -> list[torch.Tensor]:
    rows, found = case.rollouts, {}
    with phased_update(
        case.model, rows.prompts, rows.responses, pixels=together(case.pixels), max_tokens=60, wave_tokens=19
    ) as waves:
        for wave in waves:
            losses(wave.log_probs, [rows.weights[row] for row in wave.rows]).backward()
            found |= dict(zip(wave.rows, wave.log_probs, strict=True))
    return [found[row].detach() for row in range(len(rows.prompts))]
