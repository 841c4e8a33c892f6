"""What users do with an engine of Megatron's beside one update: frozen parameters, several steps, gradients of several
batches, log-probs alone, rows with padding, and weights that wait on the host. Ours is verl's own each time.

gloo ranks, fp32, with the stand-ins of `megatron_cpu`.
"""

import functools
import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engines import TOLERANCE, _loss, _relative, _responses
from pairs import in_pairs

pytest.importorskip("megatron.core")

from megatron_engines import EVEN, batch_of, weights, write_megatron_model  # noqa: E402

SP, CP = {"tp": 2, "sp": True}, {"cp": 2}
PACKED = {"schedule": "packed", "verify": "off"}
PHASED = {"schedule": "phased", "wave_tokens": 20, "verify": "off"}
CHECKED = {"schedule": "packed"}  # with verl's own path
SCHEDULES = {
    "packed": PACKED, "phased": PHASED, "offload": PHASED | {"offload": True}, "checked": CHECKED,
    "stock": {"schedule": "stock"}, "measured": {"min_speedup": 1.05, "verify": "off"},
}  # fmt: skip
ROW_BY_ROW = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
FROZEN = {
    "embeddings": r"^embedding",
    "a layer": r"layers\.0\.",
    "embeddings and a layer": r"^embedding|layers\.0\.",
    "the last layer": r"layers\.1\.",
    "all but lm_head": r"^(?!output_layer)",
    "lm_head": r"^output_layer",
    "attention": r"self_attention",
    "routers": r"router",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_megatron_model(folder / name, name) for name in ("qwen3", "qwen3_moe", "deepseek_v3_yarn")}


# What follows runs on ranks.
@functools.cache
def _shared() -> Any:
    from megatron_shared import SharedEngines

    return SharedEngines()


def _pair(path: str, built: dict[str, Any], schedule: str) -> tuple[Any, Any]:
    """Ours and verl's own."""
    return _shared()("prefix_megatron", path, built | SCHEDULES[schedule]), _shared()("megatron", path, built)


def _rows(engine: Any, **options: Any) -> Any:
    ours = hasattr(engine, "prefix_config")
    return batch_of(engine, (engine.get_data_parallel_rank(),), options | ({} if ours else ROW_BY_ROW))


def _update(engine: Any, *batches: Any) -> dict[str, torch.Tensor]:
    """Gradients and their norm of a step over these batches."""
    from megatron_shared import left_by_update

    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        losses = [sum(engine.forward_backward_batch(data, _loss({}))["loss"]) for data in batches]
        return left_by_update(engine) | {"loss": torch.tensor(losses)}


def _log_probs(engine: Any, **options: Any) -> torch.Tensor:
    data = _rows(engine, **options)
    with engine.eval_mode(disable_auto_offload=True):
        found = engine.infer_batch(data.copy())["model_output"]["log_probs"]
    return torch.cat(_responses(found, data))


def _errors(ours: dict, stock: dict) -> dict[str, float]:
    assert ours.keys() == stock.keys()
    return {name: _relative(ours[name], x) for name, x in stock.items()}


def _frozen(models: dict, model: str, frozen: str, schedule: str, recompute: str, layout: tuple) -> tuple:
    """Errors of an update, and how many of the gradients are zero."""
    engines = _pair(models[model], dict(layout) | {"frozen": FROZEN[frozen], "recompute": recompute}, schedule)
    ours, stock = (_update(engine, _rows(engine, **EVEN)) for engine in engines)
    grads = [bool(x.any()) for name, x in stock.items() if name.startswith("gradient")]
    return _errors(ours, stock), grads.count(False), grads.count(True)


@pytest.mark.parametrize(
    ("frozen", "schedule", "recompute"),
    in_pairs(FROZEN, ["packed", "phased", "offload"], ["none", "uniform", "block", "selective"]),
)
def test_frozen_parameters_stay_and_others_get_stocks_gradients(models, ranks, frozen, schedule, recompute):
    model = "qwen3_moe" if frozen == "routers" else "qwen3"
    ((errors, zeros, others),) = ranks(1, models)(_frozen, model, frozen, schedule, recompute, ())
    assert max(errors.values()) < TOLERANCE, errors
    assert zeros and others


@pytest.mark.parametrize("frozen", ["embeddings and a layer", "all but lm_head"])
@pytest.mark.parametrize(("model", "recompute"), [("qwen3", "uniform"), ("deepseek_v3_yarn", "none")])
@pytest.mark.parametrize("layout", [SP, CP], ids=["tp2_sp", "cp2"])
def test_frozen_parameters_on_ranks_of_the_same_rows(models, ranks, model, frozen, recompute, layout):
    for errors, _, _ in ranks(2, models)(_frozen, model, frozen, "phased", recompute, tuple(layout.items())):
        assert max(errors.values()) < TOLERANCE, errors


def _accumulated(models: dict, schedule: str, built: tuple) -> dict[str, float]:
    """Errors of the gradients of two batches, the second of other rows."""
    engines = _pair(models["qwen3"], dict(built), schedule)
    more = {"groups": [("x", 30, [9, 4, 7], ""), ("y", 12, [5, 8], "")]}
    ours, stock = (_update(engine, _rows(engine), _rows(engine, **more)) for engine in engines)
    return _errors(ours, stock)


BUILT = {
    "tp2_sp": SP, "dp2": {}, "dp2_whole_optimizer": {"distributed_optimizer": False},
    "tp2_sp_recompute": SP | {"recompute": "uniform"},
    # With the distributed optimizer what a rank has left of others' shards is added again, and follows its tokens.
    "cp2_whole_optimizer": CP | {"distributed_optimizer": False},
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["packed", "phased"])
@pytest.mark.parametrize("built", BUILT)
def test_gradients_of_two_batches_add_up_as_stocks(models, ranks, schedule, built):
    for errors in ranks(2, models)(_accumulated, schedule, tuple(BUILT[built].items())):
        assert max(errors.values()) < TOLERANCE, errors


def _two_steps(models: dict, schedule: str, built: tuple) -> float:
    """How far weights are off after two steps with Adam, relative to all of them; stock's moved by far more."""
    found = []
    for engine in _pair(models["qwen3"], dict(built) | {"lr": 1e-5}, schedule):
        before = weights(engine)
        for _ in range(2):
            with engine.train_mode(disable_auto_offload=True):
                engine.train_batch(_rows(engine), _loss({}))
        after = weights(engine)
        found.append(torch.cat([x.flatten() for x in after.values()]))
        assert any((after[name] - x).abs().max() > 1e-5 for name, x in before.items())
    return _relative(*found)


@pytest.mark.parametrize("frozen", [None, *FROZEN])
def test_weights_after_two_steps_are_stocks(models, ranks, frozen):
    built = {} if frozen is None else {"frozen": FROZEN[frozen]}
    assert ranks(1, models)(_two_steps, "phased", tuple(built.items()))[0] < TOLERANCE


def _inferred(models: dict, model: str, built: tuple) -> float:
    ours, stock = _pair(models[model], dict(built), "checked")
    return _relative(_log_probs(ours), _log_probs(stock))


@pytest.mark.parametrize("layout", [SP, CP], ids=["tp2_sp", "cp2"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek_v3_yarn"])
def test_an_engine_for_log_probs_alone(models, ranks, model, layout):
    for error in ranks(2, models)(_inferred, model, (*layout.items(), ("forward_only", True))):
        assert error < TOLERANCE


def _padded(models: dict, schedule: str) -> dict[str, float]:
    """Errors of ours where verl's own path pads rows, from verl's that packs them."""
    path, built = models["qwen3"], {"use_remove_padding": False}
    ours, stock = _shared()("prefix_megatron", path, built | SCHEDULES[schedule]), _shared()("megatron", path, {})
    found, truth = (_update(engine, _rows(engine)) for engine in (ours, stock))
    return _errors(found, truth) | {"log-probs": _relative(_log_probs(ours), _log_probs(stock))}


@pytest.mark.parametrize("schedule", ["checked", "phased", "stock"])
def test_rows_that_verls_own_path_pads(models, ranks, schedule):
    (errors,) = ranks(1, models)(_padded, schedule)
    assert max(errors.values()) < TOLERANCE, errors


def _returned(models: dict, schedule: str, built: tuple) -> dict[str, float]:
    """Errors of log-probs, where gradients stay on the host, and of an update, each behind a stay there."""
    from verl.utils import megatron_utils

    found = []
    for engine in _pair(models["qwen3"], dict(built), schedule):

        def stay(load_grad: bool, engine: Any = engine) -> None:
            megatron_utils.offload_megatron_model_to_cpu(engine.module)
            megatron_utils.offload_megatron_optimizer(engine.optimizer)
            assert not any(buffer.param_data.untyped_storage().size() for buffer in engine.module[0].buffers)
            megatron_utils.load_megatron_model_to_gpu(engine.module, load_grad=load_grad)
            megatron_utils.load_megatron_optimizer(engine.optimizer)

        _update(engine, _rows(engine))
        stay(load_grad=False)
        log_probs = _log_probs(engine)
        stay(load_grad=True)
        found.append(_update(engine, _rows(engine)) | {"log-probs": log_probs})
    return _errors(*found)


def _gradient_bytes(models: dict) -> tuple[list[float], int]:
    """What gradients will add while all is there, after a stay on the host without and with them; and their bytes."""
    from verl.utils import megatron_utils

    engine, _ = _pair(models["qwen3"], {}, "phased")
    found = [engine.backend.gradient_bytes()]
    for load_grad in (False, True):
        megatron_utils.offload_megatron_model_to_cpu(engine.module)
        megatron_utils.load_megatron_model_to_gpu(engine.module, load_grad=load_grad)
        found.append(engine.backend.gradient_bytes())
    return found, 4 * sum(parameter.numel() for parameter in engine.module[0].parameters())


def test_gradients_add_their_buffer_where_param_offload_has_freed_it(models, ranks):
    (((before, without, back), least),) = ranks(1, models)(_gradient_bytes)
    assert before == back == 0 and least <= without < 1.1 * least


# verl's own ends with a whole optimizer.
STAYED = [(name, of) for name in BUILT if "whole" not in name for of in SCHEDULES if of != "stock"]
QUICK = {
    ("tp2_sp", "packed"), ("tp2_sp", "phased"), ("tp2_sp", "measured"), ("dp2", "phased"), ("dp2", "checked"),
    ("tp2_sp_recompute", "offload"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("built", "schedule"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.full) for one in STAYED]
)
def test_weights_that_were_on_the_host(models, ranks, schedule, built):
    for errors in ranks(2, models)(_returned, schedule, tuple(BUILT[built].items())):
        assert max(errors.values()) < TOLERANCE, errors


def _not_finite(models: dict, schedule: str, built: tuple) -> tuple[list, list[str]]:
    """Of ours and stock's update with a NaN: the error, and whether the weights are finite; and what ours logged."""
    logged, found = [], []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("verl_prefix.engine").addHandler(handler)
    for engine in _pair(models["qwen3"], dict(built), schedule):
        data, error = _rows(engine), ""
        data["advantages"].values()[3] = float("nan")
        with engine.train_mode(disable_auto_offload=True):
            try:
                engine.train_batch(data, _loss({}))
            except RuntimeError as raised:
                error = str(raised)
        found.append((error, all(x.isfinite().all() for x in weights(engine).values())))
    return found, [line for line in logged if line.startswith("not finite in")]


@pytest.mark.parametrize("overlap", ["none", "none, and looks for NaN"])
def test_a_nan_goes_into_the_weights_or_ends_the_job_and_its_rows_are_named(models, ranks, overlap):
    """An optimizer of its own (`lr`): its moments stay."""
    ((found, logged),) = ranks(1, models)(_not_finite, "phased", (("lr", 1e-6), ("overlap", overlap)))
    for error, finite in found:
        assert ("found NaN in local grad norm" in error) == finite == (overlap != "none"), found
    (line,) = logged
    assert "advantages of rows " in line and "not finite into the weights, or ends the job under megatron.dtype" in line


def _numbered(models: dict, jump: int) -> tuple[str, float]:
    """What the engine says of rows whose positions jump behind the prompt, under `attn_implementation=null`, and how
    far ours is off where it says nothing. verl's engine reads no position ids."""
    from verl_prefix.engine import prefix_engine

    ours, stock = _pair(models["qwen3"], {}, "phased")
    ours.model_config.hf_config._attn_implementation = None
    data, check, message = _rows(ours), prefix_engine.check_positions, []
    starts = zip(data["position_ids"].unbind(), data["prompts"].unbind(), strict=True)
    rows = [x + jump * (x >= len(prompt)) for x, prompt in starts]
    data["position_ids"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def checked(*args: Any) -> None:
        try:
            check(*args)
        except ValueError as error:
            message.append(str(error))

    with mock.patch.object(prefix_engine, "check_positions", checked), ours.eval_mode(disable_auto_offload=True):
        found = ours.infer_batch(data)["model_output"]["log_probs"]
    return "".join(message), _relative(torch.cat(_responses(found, data)), _log_probs(stock))


@pytest.mark.parametrize("jump", [0, -1])
def test_rows_are_refused_whose_positions_verls_engine_does_not_read(models, ranks, jump):
    ((message, error),) = ranks(1, models)(_numbered, jump)
    assert ("position_ids are " in message) == bool(jump) == (error > 100 * TOLERANCE), (message, error)
    assert jump or error < TOLERANCE


def _numbered_from_1(models: dict) -> str:
    engine, _ = _pair(models["qwen3"], {}, "phased")
    data = _rows(engine)
    rows = [x + 1 for x in data["position_ids"].unbind()]
    data["position_ids"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    with engine.eval_mode(disable_auto_offload=True), pytest.raises(ValueError) as error:
        engine.infer_batch(data)
    return str(error.value)


def test_rows_are_refused_whose_positions_do_not_begin_at_0(models, ranks):
    (message,) = ranks(1, models)(_numbered_from_1)
    assert "position_ids are 1, 2, 3 around its token 0" in message


def _dealt(_: dict, path: str) -> str:
    with pytest.raises(ValueError) as error:
        _shared()("prefix_megatron", path, CP | SCHEDULES["packed"])
    return str(error.value)


def test_heads_that_cannot_be_dealt_are_refused_in_the_worker(models, ranks, tmp_path):
    """Where the driver does not see the model. The check comes before weights are read."""
    config = json.loads(Path(models["qwen3"], "config.json").read_text())
    path = Path(tmp_path, "qwen3")
    path.mkdir()
    for file in Path(models["qwen3"]).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 3, "num_key_value_heads": 3}))
    for message in ranks(2, models)(_dealt, str(path)):
        assert "context_parallel_size=2: of this qwen3 model 3 heads are not its multiple" in message


def _saved(models: dict, schedule: str) -> list[float]:
    engine = _shared()("prefix_megatron", models["deepseek_v3_yarn"], SCHEDULES[schedule])
    with engine.train_mode(disable_auto_offload=True):
        return engine.train_batch(_rows(engine, **EVEN), _loss({}))["metrics"]["prefix/tokens_saved"]


@pytest.mark.parametrize("schedule", ["packed", "phased"])
def test_tokens_saved_are_those_of_prefixes_where_routers_count_last_tokens_too(models, ranks, schedule):
    saved = sum((prompt - 1) * (len(responses) - 1) for _, prompt, responses, _ in EVEN["groups"])
    assert ranks(1, models)(_saved, schedule) == [[saved]]


@pytest.mark.parametrize("fused", [False, True])
def test_the_stock_path_runs_with_fused_kernels_where_its_engine_was_built_with_them(fused):
    """verl's engine, which refuses another flag than it was built with, is a mock: fused kernels need a GPU."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    from verl_prefix.backends.megatron import MegatronBackend

    backend = object.__new__(MegatronBackend)
    backend._engine = mock.Mock()
    backend._engine.engine_config.use_fused_kernels = fused
    backend.run_stock_path(TensorDict({"input_ids": torch.zeros(1)}, 1), None, forward_only=True)
    (data, *_), _ = backend._engine.verls_forward_backward.call_args
    assert tu.get_non_tensor_data(data, "use_fused_kernels", None) is fused


def _nonfinite_passes(models: dict) -> list[float]:
    """Of an update on two stages, one of whose rows has a NaN."""
    engine, _ = _pair(models["qwen3"], {"pipeline_model_parallel_size": 2, "lr": 1e-6}, "packed")
    data = _rows(engine)
    data["advantages"].values()[3] = float("nan")
    with engine.train_mode(disable_auto_offload=True):
        return engine.train_batch(data, _loss({}))["metrics"]["prefix/nonfinite_passes"]


def test_a_pass_that_is_not_finite_counts_once_however_many_stages_it_has(models, ranks):
    """An optimizer of its own (`lr`): its moments stay. The last stage alone sees losses."""
    assert ranks(2, models)(_nonfinite_passes) == [[1.0], [1.0]]
