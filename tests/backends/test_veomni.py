"""`model_engine=prefix_veomni` against verl's own VeOmni engine, and against verl's FSDP2 engine on the same rows: a
factor that is wrong in VeOmni would hide in both of its arms.

fp32, gloo, tiny models. `veomni_cpu` has what VeOmni lacks here: its Triton kernels and flash attention. Does not
exercise CUDA, NCCL, or VeOmni's fused kernels.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import broken_states
import engines
import pytest
import torch
from engines import TOLERANCE, _compare, _half_errors, _measure, rows_of
from safetensors.torch import load_file, save_file
from teachers import ONLY
from torch.distributed import get_rank, get_world_size
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("veomni")

from veomni_engines import KEYS, veomni_engines  # noqa: E402

from verl_prefix.auto.cost import Memory  # noqa: E402
from verl_prefix.auto.shape import ModelShape, model_shape  # noqa: E402
from verl_prefix.backends.veomni import VeOmniBackend  # noqa: E402
from verl_prefix.config.options import PrefixConfig  # noqa: E402
from verl_prefix.models.hookup import HookedModel  # noqa: E402
from verl_prefix.testing import write_tiny_model  # noqa: E402
from verl_prefix.versions import package_versions  # noqa: E402

PHASED = {"schedule": "phased", "wave_tokens": 20}
FUSED = {"moe_implementation": "fused_triton"}
EP = {"family": "qwen3_moe", "expert_parallel_size": 2} | FUSED
SP = {"ulysses_parallel_size": 2, "attn_implementation": "flash_attention_2"}
DENSE = {
    "packed": {"schedule": "packed"},
    "phased": PHASED,
    "phased_checkpointed": PHASED | {"gradient_checkpointing": True},
    "phased_offloaded": PHASED | {"offload": True},
    "small_budget": {"budget": 90},
    "turns": {"turns": True},
    "turns_phased": PHASED | {"turns": True},
    "auto": {"schedule": "auto"},
    "exchange": {"exchange": "auto"},
    "exchange_turns": PHASED | {"exchange": "auto", "turns": True},
    "flash": PHASED | {"attn_implementation": "flash_attention_2"},
    "kl_loss_temperature": {"use_kl_loss": True, "temperature": 0.7},
    "rank_of_empty_responses": {"empty": ("e", f"pad{7:032x}", "f")},
    "params_on_the_host": PHASED | {"param_offload": True},
    "distilled": {"schedule": "packed", "logits_chunk": 7, "distillation": {}},
    "distilled_only": PHASED | {"distillation": ONLY},
    "dead": {"schedule": "packed", "dead": 2, "skip_zero_advantage": True, "entropy_coeff": 0.0},
    "llama_tied": PHASED | {"family": "tied"},
}
FUSED_HEAD = {"use_fused_kernels": True, "cross_entropy_loss_implementation": "chunk_loss"}
# Keys of verl's engine that build the model, or run it, otherwise.
BUILT = {
    "fused_head": FUSED_HEAD,
    "fused_head_phased": PHASED | FUSED_HEAD,
    "sp2_fused_head": FUSED_HEAD | SP,
    "more_shards": PHASED | {"basic_modules": ["Qwen3Attention", "Qwen3MLP", "Linear"]},
    "shards_on_the_host": PHASED | {"enable_fsdp_offload": True},
    "ep2_shards_on_the_host": PHASED | EP | {"enable_fsdp_offload": True},
}
CASES = {
    1: {"packed": {}, "phased": PHASED, "moe": {"family": "qwen3_moe"}, "moe_phased": PHASED | {"family": "qwen3_moe"}},
    2: DENSE
    | {"sp2_distilled_only": DENSE["distilled_only"] | SP}
    | BUILT
    | {f"moe_{name}": DENSE[name] | {"family": "qwen3_moe"} for name in ("packed", "phased")}
    | {f"ep2_{name}": DENSE[name] | EP for name in DENSE if name not in ("flash", "llama_tied", "distilled")}
    | {f"sp2_{name}": DENSE[name] | SP for name in ("packed", "phased", "phased_checkpointed", "turns_phased", "dead")}
    | {f"sp2_ep2_{name}": DENSE[name] | SP | EP for name in ("packed", "phased", "turns_phased")}
    | {f"ep2_{family}": EP | PHASED | {"family": family} for family in ("idle_experts", "deepseek_v3")},
    4: {
        "ep2_fsdp2": EP,
        "ep2_exchange": EP | {"exchange": "auto"},
        "ep2_fsdp2_phased": EP | PHASED,
        "ep4_phased": EP | PHASED | {"expert_parallel_size": 4},
        "sp2_ep4_phased": EP | SP | PHASED | {"expert_parallel_size": 4},
        "hsdp_phased": PHASED | {"fsdp_size": 2},
        "hsdp_ep2_phased": EP | PHASED | {"fsdp_size": 2},
    },
}


# Left to make test-full: others have these options without experts on ranks, and those with them.
IN_PARTS = [
    f"ep2_{name}" for name in ("turns", "phased_checkpointed", "auto", "kl_loss_temperature", "small_budget",
                               "exchange_turns", "phased_offloaded", "params_on_the_host", "turns_phased")
] + ["distilled", "sp2_turns_phased", "sp2_phased_checkpointed", "hsdp_phased"]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = {
        family: write_tiny_model(folder / family, family=family) for family in ("qwen3", "qwen3_moe", "deepseek_v3")
    }
    paths["tied"] = write_tiny_model(folder / "tied", family="llama", tie_word_embeddings=True)
    paths["idle_experts"] = _all_tokens_to_the_first_experts(paths["qwen3_moe"], folder / "idle_experts")
    return paths


def _all_tokens_to_the_first_experts(path: str, folder: Path) -> str:
    """A router without weights has no favourites, and takes the first."""
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    for name, x in weights.items():
        if name.endswith("mlp.gate.weight"):
            x.zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


# What follows runs on ranks.
TRUTHS: dict[str, dict] = {}


def _data_rank(options: dict) -> int:
    return get_rank() // options.get("ulysses_parallel_size", 1)


def _stock(backend: str, path: str, rank: int, options: dict) -> dict:
    ours = ("schedule", "wave_tokens", "offload", "exchange", "verify", "logits_chunk", "trees", "skip_zero_advantage")
    rows_by = options.get("ulysses_parallel_size", 1)  # the same on all ranks, as what is found must be
    of_veomni = (*KEYS, "use_fused_kernels") if backend == "fsdp2" else ()
    options = {k: v for k, v in options.items() if k not in (*ours, *of_veomni)}
    if (key := repr((backend, path, rows_by, sorted(options.items())))) not in TRUTHS:
        TRUTHS[key] = _measure(backend, path, rank, options)
    return TRUTHS[key]


def _case(models: dict, name: str, more: tuple = ()) -> dict[str, dict[str, float]]:
    """Errors of ours against VeOmni's own path, and against FSDP2's, which shards as many rows otherwise."""
    options = {"verify": "off"} | CASES[get_world_size()][name] | dict(more)
    path, rank = models[options.get("family", "qwen3")], _data_rank(options)
    options = rows_of(rank, options)
    with veomni_engines():
        ours = _measure("prefix_veomni", path, rank, options)
        stock = _stock("veomni", path, rank, options)
    assert "distillation" not in options or ours["metrics"]["prefix/tokens_saved"][0] > 0
    assert "dead" not in options or ours["metrics"]["prefix/zero_advantage_rows"][0] > 0
    other = _stock("fsdp2", path, rank, options)
    return {"veomni": _compare(ours, stock)["errors"], "fsdp2": _compare(ours, other)["errors"]}


@pytest.fixture(scope="module")
def table():
    """Rows of the table of errors; written as Markdown to the file that VERL_PREFIX_VEOMNI names."""
    found = []
    yield found
    if out := os.environ.get("VERL_PREFIX_VEOMNI"):
        titles = "ranks", "case", "log-probs, VeOmni", "gradients, VeOmni", "log-probs, FSDP2", "gradients, FSDP2"
        cells = [[f"{x:.1e}" if isinstance(x, float) else str(x) for x in row] for row in found]
        lines = [" | ".join(row) for row in (titles, ["---"] * len(titles), *cells)]
        versions = package_versions(("verl", "veomni", "torch", "transformers"))
        Path(out).write_text(
            "# `model_engine=prefix_veomni` against verl's own VeOmni engine, and against its FSDP2 engine\n\n"
            "Written by `make -C examples/results veomni` (tests/backends/test_veomni.py), in fp32 on gloo ranks of a\n"
            "CPU, with tiny models and stand-ins of VeOmni's Triton kernels and of flash attention: the larger\n"
            "relative error of any rank, of log-probs and of the gradient of any parameter. The tolerance is 5e-6.\n"
            "epN: a layer's experts lie on N ranks. spN: a row lies on N ranks. hsdp: two copies of the parameters.\n\n"
            f"{', '.join(f'{name} {version}' for name, version in versions.items())}.\n\n"
            + "".join(f"| {line} |\n" for line in lines)
        )


def _verls_own(models: dict, *options: tuple) -> str:
    """What verl's own VeOmni engine fails with."""
    with veomni_engines(), pytest.raises(AttributeError) as raised:
        _measure("veomni", models["qwen3"], get_rank(), dict(options))
    return str(raised.value)


def test_verls_own_engine_runs_no_reentrant_checkpoint(models, ranks):
    """Why `enable_reentrant` is refused."""
    (told,) = ranks(1, models)(_verls_own, ("gradient_checkpointing", True), ("enable_reentrant", True))
    assert told == "'functools.partial' object has no attribute '__self__'"


def _mark(world: int, name: str) -> tuple | pytest.MarkDecorator:
    """On four ranks two run by themselves; on two all but those of `IN_PARTS`, and of experts that no rank divides."""
    if name in IN_PARTS:
        return pytest.mark.full
    quick = name in ("sp2_ep4_phased", "hsdp_ep2_phased") if world == 4 else not name.startswith("moe_")
    return () if quick else pytest.mark.more


@pytest.mark.parametrize(
    ("world", "name"),
    [pytest.param(world, name, marks=_mark(world, name)) for world, cases in CASES.items() for name in cases],
)
def test_ours_is_veomnis_and_fsdp2s(models, ranks, world, name, table):
    of_ranks = ranks(world, models)(_case, name)
    kinds = [(arm, kind) for arm in ("veomni", "fsdp2") for kind in ("log_probs", "grads")]
    table.append((world, name, *(max(found[arm][kind] for found in of_ranks) for arm, kind in kinds)))
    for found in of_ranks:
        for arm in ("veomni", "fsdp2"):
            if "exchange" in name:  # a rank's loss is that of the rows that it computed
                del found[arm]["loss"]
            assert max(found[arm].values()) < TOLERANCE, (arm, found[arm])


def _half(models: dict, name: str, mixed: bool) -> dict[str, dict[str, float]]:
    """What VeOmni's own bf16 misses of FSDP2's fp32, and what ours does. mixed: weights and gradients are in fp32."""
    options, half = CASES[2][name], {"half": True, "mixed_precision": mixed}
    path, rank = models[options.get("family", "qwen3")], _data_rank(options)
    truth = _stock("fsdp2", path, rank, options)
    with veomni_engines():
        ours = _measure("prefix_veomni", path, rank, options | half)
        stock = _stock("veomni", path, rank, options | half)
    return {"ours": _half_errors(ours, truth), "stock": _half_errors(stock, truth)}


@pytest.mark.parametrize(
    ("name", "mixed"),
    [
        pytest.param(name, mixed, marks=pytest.mark.full if (i + mixed) % 2 else ())
        for i, name in enumerate(["packed", "phased", "ep2_packed", "ep2_phased", "sp2_phased"])
        for mixed in (True, False)
    ],
)
def test_bf16_misses_fp32_by_no_more_than_veomnis_does(models, ranks, name, mixed):
    for found in ranks(2, models)(_half, name, mixed):
        for key, error in found["ours"].items():
            assert error <= 1.3 * found["stock"][key], (key, error, found["stock"][key])


def _checked(models: dict, name: str, half: bool) -> dict[str, float]:
    options = CASES[2][name] | {"half": half}
    with veomni_engines():
        found = _measure("prefix_veomni", models[options.get("family", "qwen3")], _data_rank(options), options)
    return {key: value[0] for key, value in found["metrics"].items() if "verify" in key}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["phased", "ep2_packed", "ep2_phased", "sp2_phased", "sp2_ep2_phased"])
def test_the_self_check_compares_with_veomnis_path(models, ranks, name, half):
    for found in ranks(2, models)(_checked, name, half):
        log_probs, attention = found["prefix/verify_log_probs"], found["prefix/verify_attention"]
        # Of so few tokens in bf16 outputs can be equal to the bit; gradients of weights are not.
        assert log_probs <= 3 and attention <= 2 and (half or min(log_probs, attention) > 0)
        assert 0 < found["prefix/verify_gradients"] <= 3


# Ours alone is broken: VeOmni's own path, with which it is compared, runs the same functions.
@contextlib.contextmanager
def _divided_by(engine, factor: float):
    """Context in which FSDP2 divides the sum of experts' gradients by `factor`."""
    experts = [module for name, module in engine.module.named_modules() if name.endswith("mlp.experts")]
    for module in experts:
        module.set_gradient_divide_factor(factor)
    yield
    for module in experts:
        module.set_gradient_divide_factor(get_world_size())


def gradients_of_experts_added_twice(patch):
    half = get_world_size() / 2
    patch.setattr(VeOmniBackend, "_gradient_sync", lambda self, last: _divided_by(self._engine, half))


def in_ours_alone(patch, name, broken):
    """`broken` changes what a function of VeOmni's experts returns in passes of ours."""
    from veomni.distributed.moe import moe_layer

    real, grouped, inside = getattr(moe_layer, name), HookedModel.grouped_attention, []

    @contextlib.contextmanager
    def ours(self):
        with grouped(self):
            inside.append(self)
            try:
                yield
            finally:
                inside.pop()

    patch.setattr(HookedModel, "grouped_attention", ours)
    patch.setattr(moe_layer, name, lambda *args: broken(real(*args)) if inside else real(*args))


def tokens_of_an_expert_lost(patch):
    """The first three of every rank."""
    in_ours_alone(patch, "sort_chunks_by_idxs", lambda x: x * (torch.arange(len(x)) > 2).unsqueeze(1))


def rows_of_another_rank(patch):
    """What comes from the first rank and from the last has changed places."""
    in_ours_alone(patch, "all_to_all", lambda x: x.flip(0))


def gradients_of_waves_lost(patch):
    broken_states.gradients_of_keys_dropped_in_phased(patch)


BROKEN = (gradients_of_experts_added_twice, tokens_of_an_expert_lost, rows_of_another_rank, gradients_of_waves_lost)


def _broken(models: dict, sabotage: Callable) -> float:
    options = CASES[2]["ep2_phased"]
    path, rank = models["qwen3_moe"], _data_rank(options)
    with veomni_engines(), pytest.MonkeyPatch.context() as patch:
        stock = _stock("veomni", path, rank, options)
        sabotage(patch)
        with pytest.raises(RuntimeError, match="prefix.verify, update 1: "):
            _measure("prefix_veomni", path, rank, options)
        ours = _measure("prefix_veomni", path, rank, options | {"verify": "off"})
    return max(_compare(ours, stock)["errors"].values())


@pytest.mark.parametrize("sabotage", BROKEN)
def test_what_is_broken_on_purpose_is_far_off_and_stops_step_1(models, ranks, sabotage):
    assert all(error > 100 * TOLERANCE for error in ranks(2, models)(_broken, sabotage))


def _reductions(models: dict, name: str) -> tuple[int, int, set[bool]]:
    """Passes and waves of an update, how often FSDP2 reduced the gradients of a layer, and whether whole gradients were
    held behind a backward."""
    options, reduced, held = CASES[2][name], [], set()
    post_backward = FSDPParamGroup.post_backward

    def counted(self, *args):
        found = post_backward(self, *args)
        reduced.append(self)
        held.update(p.unsharded_accumulated_grad is not None for p in self.fsdp_params)
        return found

    with veomni_engines(), mock.patch.object(FSDPParamGroup, "post_backward", counted):
        metrics = _measure("prefix_veomni", models["qwen3_moe"], get_rank(), options | {"verify": "off"})["metrics"]
    groups = len(set(map(id, reduced)))
    passes = metrics["prefix/packed_passes"][0] + metrics["prefix/waves"][0]
    return int(passes), len(reduced) // groups, held


@pytest.mark.parametrize("name", ["ep2_small_budget", "ep2_phased"])
def test_every_backward_reduces_gradients_and_none_are_held_whole(models, ranks, name):
    for passes, reduced, held in ranks(2, models)(_reductions, name):  # a metric is a sum over ranks
        assert reduced >= passes / 2 > 1 and held == {False}


def _shape(models: dict, name: str) -> tuple[ModelShape, ModelShape, Memory]:
    """What the engine's model costs, what Hugging Face's does, and what an update keeps."""
    path, options = models["qwen3_moe"], CASES[2][name]
    with veomni_engines():
        backend = engines._engine("prefix_veomni", path, options).backend
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return backend.shape, model_shape(whole, torch.float32), backend.memory(PrefixConfig())


@pytest.mark.parametrize(("name", "experts_on"), [("moe_packed", 1), ("ep2_packed", 2)])
def test_what_a_model_costs_is_that_of_all_its_experts(models, ranks, name, experts_on):
    for ours, whole, memory in ranks(2, models)(_shape, name):
        assert ours == whole and whole.expert_parameters > 0
        assert (memory.ranks, memory.expert_ranks, memory.no_sync) == (2, experts_on, False)


def _prefetched(models: dict) -> tuple[dict, dict]:
    """Of each module that has a list of what to gather ahead in backward, that list by itself and in passes of ours."""
    with veomni_engines():
        options = CASES[2]["ep2_phased"] | {"forward_prefetch": True}
        model = engines._engine("prefix_veomni", models["qwen3_moe"], options).module

    def lists() -> dict[str, list[int]]:
        modules = ((name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule))
        found = {name: module._get_fsdp_state()._states_to_backward_prefetch for name, module in modules}
        return {name: [*map(id, states)] for name, states in found.items() if states}

    before = lists()
    with HookedModel(model).grouped_attention():
        inside = lists()
    return before, {name: inside[name] for name in before}


def test_veomnis_lists_of_what_to_gather_ahead_stay(models, ranks):
    """Experts are modules of their own in them."""
    for before, inside in ranks(2, models)(_prefetched):
        assert before == inside and {len(states) for states in before.values()} == {2}
