"""Models as VeOmni builds them, packed and phased, against VeOmni's own forward of every whole row on one process."""

import pytest

pytest.importorskip("veomni")

from families import float64_inside  # noqa: E402, F401
from schedules import errors, measure  # noqa: E402
from veomni_models import VeomniCase  # noqa: E402
from vision_cases import paths  # noqa: E402, F401

SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
SCHEDULES = {
    "packed": dict(schedule="packed"),
    "phased": dict(schedule="phased", budget=60, wave_tokens=19),
}


@pytest.mark.parametrize("family", SEEING)
def test_equals_the_models_own_forward(family, paths, float64_inside):  # noqa: F811
    case = VeomniCase(paths[family])
    float64_inside(case.model)
    truth = measure(case.model, case.truth)
    for name, options in SCHEDULES.items():
        ours = measure(case.model, lambda options=options: case.ours(**options))
        found = errors(ours, truth)
        print(family, name, found)
        assert max(found.values()) < 1e-9, name
