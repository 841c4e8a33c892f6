"""Batches that users of verl and of other trainers reported, through PrefixFSDPEngine and verl's stock fsdp2 engine.

Tiny Qwen3, 1 and 2 gloo ranks, fp32. Those with pixels are in test_vision_engine.
"""

from unittest import mock

import pytest
import torch
from engines import TOLERANCE, _batch, _engine, _loss, _relative, _responses
from shared_models import SharedModels
from torch.distributed import get_rank

from verl_prefix.cpu.varlen import VARLEN_ON_CPU, register_varlen
from verl_prefix.engine import prefix_engine
from verl_prefix.testing import write_tiny_model

# What follows runs on ranks, which are given the model's path first.
SHARED = SharedModels(_engine)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("reported") / "qwen3")


NUMBERED = {
    "as verl does": lambda prompt, n: torch.arange(n),
    "from 0 three times": lambda prompt, n: (torch.arange(n) - 2).clamp(min=0),
    "with a jump behind the prompt": lambda prompt, n: torch.arange(n) + 5 * (torch.arange(n) >= prompt),
    "with a jump in the prompt": lambda prompt, n: torch.arange(n) + 5 * (torch.arange(n) >= prompt // 2),
    "with a step back behind the prompt": lambda prompt, n: torch.arange(n) - 4 * (torch.arange(n) >= prompt),
    "from 3": lambda prompt, n: torch.arange(n) + 3,
}


def _number(data, how: str, uid: str) -> None:
    """Numbers the rows of a prompt otherwise."""
    rows = list(data["position_ids"].unbind())
    for i, prompt in enumerate(data["prompts"].unbind()):
        if data["uid"][i] == uid:
            rows[i] = NUMBERED[how](len(prompt), len(rows[i]))
    data["position_ids"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _numbered(path: str, how: str, attention: str, packs: bool) -> tuple[str, float]:
    """What the engine says of such rows, and how far its log-probs are from stock's if it says nothing of any."""
    from verl_prefix.engine import rows

    register_varlen()
    options = {"schedule": "packed", "attn_implementation": attention, "use_remove_padding": packs}
    found, message = {}, ""
    for backend in ("fsdp2", "prefix"):
        engine = SHARED(backend, path, options)
        data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, options)
        _number(data, how, "b")
        with (
            engine.eval_mode(disable_auto_offload=True),
            mock.patch.object(prefix_engine, "check_rows", lambda *args: None),
        ):
            output = engine.infer_batch(data.copy())["model_output"]
            found[backend] = torch.cat(_responses(output["log_probs"], data))
        try:
            rows.check_rows(data, engine.module.config)
        except ValueError as error:
            message = str(error)
    return message, _relative(found["prefix"], found["fsdp2"])


@pytest.mark.parametrize("how", NUMBERED)
@pytest.mark.parametrize(
    ("attention", "packs"), [(VARLEN_ON_CPU, True), ("sdpa", True), ("sdpa", False)], ids=["flash", "sdpa", "padded"]
)
def test_rows_are_refused_where_verls_own_path_takes_their_positions_for_bounds(ranks, path, attention, packs, how):
    """Both kernels are those of a CPU: flash attention is a stand-in that reads bounds as transformers does."""
    ((message, error),) = ranks(1, path)(_numbered, how, attention, packs)
    assert bool(message) == (error > TOLERANCE), f"{message!r}, and log-probs differ by {error}"
    assert not message or (error > 100 * TOLERANCE and "(uid b): position_ids are " in message)


def _later(path: str, backend: str) -> str:
    """What an update says whose rows are such on the last rank, after one whose rows were not."""
    engine, last = SHARED(backend, path, {}), torch.distributed.get_world_size() - 1
    data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, {})
    with engine.train_mode(disable_auto_offload=True):
        engine.forward_backward_batch(data.copy(), _loss({}))
        if get_rank() == last:
            _number(data, "from 0 three times", "f")
        with pytest.raises((ValueError, RuntimeError)) as error:
            engine.forward_backward_batch(data.copy(), _loss({}))
    return str(error.value)


def test_positions_that_restart_after_step_1_are_named_by_their_rank_and_end_the_others(ranks, path):
    first, last = ranks(2, path)(_later, "prefix")
    assert "rank 1 failed while checking rows" in first
    assert "(uid f): position_ids are 0, 0, 0, 1" in last and "0, 1, 2, ..." in last and "verify" not in last
