"""Every model type of the installed transformers: equal to HF's own forward of every whole row, or refused in one line.

The types without a causal language model come first. Of the others each is refused by its default config, dropout
apart, or built tiny: then packed and phased are held to 1e-9 in float64 as supported families are (test_families.py).
"""

import pytest
import torch
import transformers
from families import (
    FAMILIES,
    float64_inside,  # noqa: F401
)
from runners import random_rollouts, run_shared, run_stock
from tiny_types import default_config, tiny_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl_prefix.models import vision
from verl_prefix.models.advice import WITHOUT_SHARING
from verl_prefix.models.support import check_supported, unsupported_reasons

SHAPE = [(23, [9, 17, 5]), (7, [5, 4])]
# Run by `make test`: what attends by windows, latent keys, soft caps and experts of its own kind, and refusals.
QUICK = ("cohere2", "gpt_neox", "laguna", "longcat_flash", "falcon", "roberta", "hrm_text")
BROKEN = ("dbrx",)  # transformers cannot build one
CAUSAL = sorted(
    name
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name in CONFIG_MAPPING_NAMES  # else it is registered by another package
    and CONFIG_MAPPING_NAMES[name] not in {config_class for config_class, *_ in FAMILIES.values()}
    and name not in (*vision.MODEL_TYPES, *BROKEN)
)


def refusal(config) -> str | None:
    """What `check_supported` says, in one line; None: the model is supported."""
    try:
        check_supported(config)
    except ValueError as error:
        assert f"shared-prefix training does not support this {config.model_type} model: " in str(error)
        assert "\n" not in str(error) and f"et {WITHOUT_SHARING}" in str(error)
        return str(error)
    return None


def test_a_type_without_a_causal_language_model_is_refused():
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *vision.MODEL_TYPES}
    configs = [config for name in CONFIG_MAPPING_NAMES if name not in known if (config := default_config(name))]
    assert len(configs) > 400
    assert all(map(refusal, configs))


@pytest.mark.parametrize("name", ["musicgen", "gemma4"])
def test_a_config_with_a_section_of_none_or_two_of_text_is_refused_or_supported(name):
    refusal(default_config(name))


def test_fields_that_a_model_does_not_have_do_not_count():
    """Old config.json files hold every field that any model had."""
    check_supported(transformers.LlamaConfig(is_decoder=False, add_cross_attention=False))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.more) for name in CAUSAL]
)
def test_a_type_with_a_causal_language_model_equals_hf_or_is_refused(name, float64_inside):  # noqa: F811
    default = default_config(name)
    told = refusal(default)
    if unsupported_reasons(default, training=False):
        assert told
        return
    config = tiny_config(name)
    check_supported(config)
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # grouped_mm has no float64
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    assert sum(p.numel() for p in model.parameters()) < 4e6
    for parameter in model.parameters():
        if not parameter.isfinite().all():  # of experts that a checkpoint fills
            torch.nn.init.normal_(parameter, std=0.1)
    model = model.double().train()
    float64_inside(model)
    batch = random_rollouts(SHAPE, 128)

    def measure(run, **options) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        log_probs = torch.cat(run(model, batch, **options))
        return log_probs, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    truth = measure(run_stock)
    for options in (dict(schedule="packed"), dict(schedule="phased", wave_tokens=19)):
        for ours, hfs in zip(measure(run_shared, **options), truth, strict=True):
            assert ((ours - hfs).norm() / hfs.norm()).item() < 1e-9
