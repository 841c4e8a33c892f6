"""The self-check waits where verl's own path gives nothing finite to compare with, and still finds what is wrong with
ours. Tiny Qwen3, 2 gloo ranks, fp32. What is broken is broken on the last rank alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest import mock

import broken_states
import pytest
import torch
from engines import _batch, _engine, _loss
from torch.distributed import get_rank, get_world_size

from verl_prefix import versions
from verl_prefix.backends.hugging_face import local_shard
from verl_prefix.core.kernels import cpu
from verl_prefix.engine.checks import verify
from verl_prefix.testing import write_tiny_model

FIGURES = {f"prefix/verify_{name}" for name in ("log_probs", "attention", "gradients")}


@pytest.fixture(scope="module")
def two_ranks(ranks, tmp_path_factory):
    return ranks(2, write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3"))


def _is_last() -> bool:
    return get_rank() == get_world_size() - 1


@contextmanager
def _overflow(module: torch.nn.Module) -> Iterator[None]:
    """Gradients below this module are infinite on either path, as under a loss scale that is too large."""

    def scale(_, args, output):
        if output.requires_grad and _is_last():
            output.register_hook(lambda grad: grad * float("inf"))

    handle = module.register_forward_hook(scale)
    yield
    handle.remove()


@contextmanager
def _overflow_above_an_eighth(module: torch.nn.Module) -> Iterator[None]:
    """Gradients below this module are infinite above an eighth of the largest one that the first check has there, as
    in a dtype that ends at this number. The limit is one for all updates, ranks and paths."""

    def scale(_, args, output):
        if output.requires_grad:
            output.register_hook(limited)

    def limited(grad):
        if module not in LIMITS:
            LIMITS[module] = grad.abs().amax() / 8
            torch.distributed.all_reduce(LIMITS[module], torch.distributed.ReduceOp.MIN)
        return torch.where(grad.abs() > LIMITS[module], float("inf"), grad)

    handle = module.register_forward_hook(scale)
    yield
    handle.remove()


LIMITS: dict[torch.nn.Module, torch.Tensor] = {}


@contextmanager
def _weights_not_finite(module: torch.nn.Module) -> Iterator[None]:
    shard = local_shard(module.layers[0].mlp.down_proj.weight).detach()
    before = shard.clone()
    if _is_last():
        shard.fill_(float("nan"))
    yield
    shard.copy_(before)


@contextmanager
def _ours_not_finite(_) -> Iterator[None]:
    forward = cpu.forward

    def spoiled(*args, **options):
        out, lse = forward(*args, **options)
        return out * (float("nan") if _is_last() else 1), lse

    with mock.patch.object(cpu, "forward", spoiled):
        yield


@contextmanager
def _ours_loses_a_gradient(_) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        broken_states.gradients_of_one_layer_dropped(patch)
        yield


BROKEN = {
    "nothing": nullcontext,
    "gradients of the first layer": lambda model: _overflow(model.layers[0]),
    "large gradients": lambda model: _overflow_above_an_eighth(model.norm),
    "all gradients": lambda model: _overflow(model.norm),
    "weights": _weights_not_finite,
    "outputs of ours": _ours_not_finite,
    "gradients of ours": _ours_loses_a_gradient,
}


def _updates(path: str, broken: Sequence[str], action: str) -> tuple[list[set[str]], list[str], str, str]:
    """What updates with something broken report of the self-check, what it logs, why later batches would take the stock
    path, and with what error the job ended."""
    versions.WARNED.clear()
    engine = _engine("prefix", path, {"schedule": "phased", "verify_action": action})
    data, found, said, error = _batch(get_rank(), engine.model_config.hf_config.vocab_size, {}), [], [], ""
    with (
        engine.train_mode(disable_auto_offload=True),
        mock.patch.object(verify.logger, "warning", lambda text, *values: said.append(text % values)),
    ):
        for name in broken:
            engine.optimizer_zero_grad()
            try:
                with BROKEN[name](engine.module.model):
                    metrics = engine.forward_backward_batch(data.copy(), _loss({}))["metrics"]
            except RuntimeError as raised:
                error = str(raised)
                break
            found.append({name for name in metrics if name.startswith("prefix/verify_")})
    failure = engine._missed_check
    return found, said, failure.reason if failure else "", error


@pytest.mark.parametrize(
    ("broken", "compared"),
    [
        ("gradients of the first layer", FIGURES), ("weights", set()),
        pytest.param("all gradients", FIGURES - {"prefix/verify_gradients"}, marks=pytest.mark.more),
    ],
)  # fmt: skip
def test_a_check_with_nothing_finite_to_compare_with_stays_due_and_blames_nobody(two_ranks, broken, compared):
    for found, said, failure, error in two_ranks(_updates, (broken, broken, "nothing", "nothing"), "fallback"):
        assert (found, failure, error) == ([compared, compared, FIGURES, set()], "", "")
        (line,) = said
        assert line.startswith("prefix.verify waits for ") and "actor.prefix.verify=off" in line
        assert ("log-probs, " in line) == (broken == "weights") and "gradients of layer 0" in line
        assert ("gradients of layer 1" in line) == (broken != "gradients of the first layer")


def test_gradients_that_overflow_in_the_check_are_compared_by_a_smaller_loss(two_ranks):
    """As in fp16, whose loss scale goes by the update's gradients and would never fall for the check's."""
    for found, said, failure, error in two_ranks(_updates, ("large gradients",) * 3, "fallback"):
        assert (found, failure, error) == ([FIGURES - {"prefix/verify_gradients"}, FIGURES, set()], "", "")
        assert len(said) == 1


def test_what_a_check_could_not_compare_is_found_wrong_once_it_can(two_ranks):
    for found, said, _, error in two_ranks(_updates, ("all gradients", "gradients of ours", "nothing"), "raise"):
        assert len(found) == len(said) == 1
        assert error.startswith("prefix.verify, update 2: gradients of ")


@pytest.mark.parametrize("action", [pytest.param("raise", marks=pytest.mark.more), "fallback"])
def test_outputs_that_are_not_finite_on_our_path_alone_are_a_miss(two_ranks, action):
    for _, said, failure, error in two_ranks(_updates, ("outputs of ours",), action):
        assert "prefix.verify, update 1: log-probs differ from the stock path's by inf" in (failure or error)
        assert bool(failure) == (action == "fallback") and not said
