"""Clients of verl's engine besides its trainers, asked of ours and of the stock engine alike: the Tinker-like worker,
and what verl's own tests (tests/models/test_engine.py, tests/workers) ask of an engine with FSDP2. Two gloo ranks."""

import functools
import os

import pytest
import torch
from engines import TOLERANCE, _batch, _configs, _engine, _loss, _relative, _responses, depends_on_rates
from torch.distributed import get_rank
from whole_tensors import whole

from verl_prefix.testing import write_tiny_model

OPTIM_STEP = {"lr": 2e-5, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.02}
FAMILIES = ("qwen3", "qwen3_moe")


def _tinker_worker(backend: str, model_path: str) -> dict:
    """Two batches, whose gradients add up, and a step by parameters of its own, as a Tinker client asks for them."""
    import verl  # noqa: F401
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker

    torch.manual_seed(0)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    # Ours checks itself in either batch, and measures in the second.
    configs = _configs(backend, model_path, {"verify": 1, "min_speedup": 1e-6})
    worker = TinkerTrainingWorker(TrainingWorkerConfig(model_type="language_model", **configs))
    worker.reset()
    worker.set_loss_fn(_loss({}))
    worker.optimizer_zero_grad()
    before = whole(dict(worker.engine.module.named_parameters()))
    found: dict = {"metrics": [], "grads": []}
    for number, options in enumerate(({"padded": True}, depends_on_rates(get_rank()))):
        data = _batch(get_rank(), worker.model_config.hf_config.vocab_size, options)
        tu.assign_non_tensor(data, global_token_num=data["input_ids"].offsets().diff().tolist())
        output = worker.forward_backward(data.copy())
        found["metrics"].append(tu.get(output, "metrics"))
        found[f"log_probs {number}"] = torch.cat(_responses(output["log_probs"], data))
        found["grads"].append(whole({n: p.grad for n, p in worker.engine.module.named_parameters()}))
    now = whole(dict(worker.engine.module.named_parameters()))
    assert all(torch.equal(now[name], x) for name, x in before.items()), "nothing steps before it is told to"
    found["step"] = worker.optimizer_step(OPTIM_STEP)["grad_norm"]
    (group,) = worker.engine.optimizer.param_groups
    assert {name: group[name] for name in OPTIM_STEP} == OPTIM_STEP
    assert all(p.grad is None for p in worker.engine.module.parameters())
    found["params"] = torch.cat([x.flatten() for x in whole(dict(worker.engine.module.named_parameters())).values()])
    return found


def _compare_tinker(models: dict[str, str]) -> dict[str, float]:
    ours, stock = (_tinker_worker(backend, models["qwen3"]) for backend in ("prefix", "fsdp2"))
    errors = {name: _relative(ours[name], stock[name]) for name in ("log_probs 0", "log_probs 1", "params")}
    errors["grad_norm"] = abs(ours["step"] - stock["step"]) / stock["step"]
    for i, (found, wanted) in enumerate(zip(ours["metrics"], stock["metrics"], strict=True)):
        errors[f"loss {i}"] = abs(found["loss"] - wanted["loss"]) / abs(wanted["loss"])
        errors[f"grads {i}"] = max(_relative(ours["grads"][i][n], x) for n, x in stock["grads"][i].items())
        errors[f"unchecked {i}"] = float("prefix/verify_gradients" not in found)
        errors[f"nothing shared {i}"] = float(torch.tensor(found["prefix/reuse_fraction"]).min() < 0.3)
        errors[f"metric names {i}"] = float(bool(set(wanted) - set(found)))
    errors["unmeasured"] = float("prefix/predicted_speedup" not in ours["metrics"][1])
    return errors


def _asked(backend: str, model_path: str) -> dict:
    """What verl's tests ask of an engine: names and values of what a rollout is sent, rows with a loss and without one
    by an actor, without one by a ref."""
    found: dict = {}
    actor, ref = (_engine(backend, model_path, {}, forward_only=is_ref) for is_ref in (False, True))
    sent = actor.get_per_tensor_param()[0]
    found["sent"] = {name: weight.clone() for name, weight in sent}
    data = _batch(get_rank(), actor.model_config.hf_config.vocab_size, {})
    for name, engine, loss in (("with", actor, _loss({})), ("without", actor, None), ("ref", ref, None)):
        with engine.eval_mode(disable_auto_offload=True):
            output = engine.infer_batch(data.copy(), loss_function=loss)
        found[name] = torch.cat(_responses(output["model_output"]["log_probs"], data))
        found[f"{name} loss"] = sum(output["loss"]) if loss else 0.0
        assert all(parameter.grad is None for parameter in engine.module.parameters())
    for dtype in ("bf16", "fp16"):
        found[dtype] = _engine(backend, model_path, {"param_dtype": dtype})._autocast_dtype
    return found


def _compare_asked(models: dict[str, str], family: str) -> dict[str, float]:
    ours, stock = (_asked(backend, models[family]) for backend in ("prefix", "fsdp2"))
    errors = {name: _relative(ours[name], stock[name]) for name in ("with", "without", "ref")}
    errors["loss"] = abs(ours["with loss"] - stock["with loss"]) / abs(stock["with loss"])
    errors["sent"] = float(list(ours["sent"]) != list(stock["sent"])) + sum(
        not torch.equal(ours["sent"][name], weight) for name, weight in stock["sent"].items()
    )
    errors["autocast"] = float(any(ours[dtype] != stock[dtype] for dtype in ("bf16", "fp16")))
    return errors


def _compare_prompt_loss(models: dict[str, str]) -> tuple[float, list[float]]:
    """The largest relative error of a gradient by verl's sft_loss of all tokens; the rows on its own path."""
    from verl.workers.utils.losses import sft_loss

    grads, metrics = {}, {}
    for backend in ("prefix", "fsdp2"):
        engine = _engine(backend, models["qwen3"], {"verify": "off"})
        data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, {})
        data["loss_mask"] = torch.ones_like(data["input_ids"])
        with engine.train_mode(disable_auto_offload=True):
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, functools.partial(sft_loss, config=None))
            metrics = metrics or output["metrics"]
            grads[backend] = whole({n: p.grad for n, p in engine.module.named_parameters()})
    return max(_relative(grads["prefix"][n], x) for n, x in grads["fsdp2"].items()), metrics["prefix/stock_rows"]


@pytest.fixture(scope="module")
def results(ranks, tmp_path_factory):
    models = {name: write_tiny_model(tmp_path_factory.mktemp(name), family=name) for name in FAMILIES}
    return ranks(2, models)


@pytest.mark.more
def test_a_tinker_client_gets_stocks_losses_log_probs_gradients_and_step(results):
    for errors in results(_compare_tinker):
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.more
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_what_verls_tests_ask_of_an_engine_is_answered_as_by_stocks(results, family):
    for errors in results(_compare_asked, family):
        assert max(errors.values()) <= TOLERANCE, errors


def test_a_loss_whose_mask_holds_prompts_goes_verls_own_path(results):
    for error, stock_rows in results(_compare_prompt_loss):
        assert error <= TOLERANCE and stock_rows[0] > 0
