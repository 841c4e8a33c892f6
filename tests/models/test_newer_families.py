"""Families that transformers has had since verl's pin, by its API's users: against HF's own forward of whole rows,
float64 and 1e-9."""

import pytest
import torch
from families import COMMON, GLM4_MOE, MLA, MOE, QWEN3_MOE, float64_inside  # noqa: F401
from runners import random_rollouts, run_shared, run_stock
from schedules import errors, measure
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from verl_prefix.models.support import check_supported

SHAPE = [(23, [9, 17, 5]), (41, [3, 1, 11]), (7, [13, 4]), (1, [6, 30])]
WINDOW = dict(sliding_window=9)  # shorter than prefixes
SHARED_EXPERT = QWEN3_MOE | dict(n_group=1, topk_group=1, shared_expert_intermediate_size=32) | WINDOW
ROUTED = GLM4_MOE | dict(n_group=1, topk_group=1)
LATENT = {name: size for name, size in MLA.items() if name.endswith(("rank", "dim", "heads"))} | dict(q_lora_rank=24)
# model type -> what it adds
FAMILIES = {
    "apertus1p5_text": {}, "axk1": MLA | dict(q_lora_rank=24), "beam": SHARED_EXPERT, "exaone": {},
    "flint": SHARED_EXPERT, "granite_swa": WINDOW, "granitemoe_swa": MOE | WINDOW, "internlm3": {}, "iquestcoder": {},
    "kolibri1": SHARED_EXPERT, "mimo_v2_flash": ROUTED | WINDOW | dict(v_head_dim=12), "minicpm3": LATENT,
    "sarvam_moe": ROUTED, "sarvam_mla": MLA,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_newer_family_equals_hf(family, float64_inside):  # noqa: F811
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}; make test-newest installs one that has")
    torch.manual_seed(0)
    kind = CONFIG_MAPPING[family]
    known = {*vars(kind()), *kind.attribute_map}
    config = kind(**{name: value for name, value in (COMMON | FAMILIES[family]).items() if name in known})
    check_supported(config)
    config._experts_implementation = "eager"  # grouped_mm has no float64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).double().train()
    float64_inside(model)
    for name, parameter in model.named_parameters():
        if "sink" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    batch = random_rollouts(SHAPE, 128)
    truth = measure(model, lambda: run_stock(model, batch))
    for options in (dict(schedule="packed"), dict(schedule="phased", wave_tokens=19)):
        ours = measure(model, lambda options=options: run_shared(model, batch, **options))
        assert max(errors(ours, truth).values()) < 1e-9
