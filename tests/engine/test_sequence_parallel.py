"""Ulysses sequence parallelism: PrefixFSDPEngine on groups of 2 and 4 gloo ranks against stock verl without it, fp32.

The same rows. verl's own path under it runs with a dense stand-in for flash attention. Recurrent layers without pixels
are in test_recurrent_engine. Does not exercise CUDA or NCCL. Each case is a job on ranks that stay up.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import engines
import pytest
import torch
import vision_engines
from engines import TOLERANCE, _compare
from float64_torch import Float64Torch
from pairs import every_value
from shared_models import OURS, SharedModels
from short_chunks import short_chunks
from torch.distributed import get_rank

from verl_prefix.testing import write_tiny_model

WAVES = {"schedule": "phased", "wave_tokens": 40}
# (ranks, ranks of a group): what the cases are run on, see `_mark`.
GROUPS = {"sp2": (2, 2), "sp4": (4, 4), "dp2_sp2": (4, 2)}
CASES = {
    "packed": {"schedule": "packed"},
    "phased": WAVES,
    "phased_waves_of_one_row": {"schedule": "phased", "wave_tokens": 1},
    "packed_small_budget_cuts_groups": {"schedule": "packed", "budget": 30},
    "gradient_checkpointing": {"schedule": "packed", "gradient_checkpointing": True},
    "gradient_checkpointing_phased": WAVES | {"gradient_checkpointing": True},
    "offload": WAVES | {"offload": True},
    "logits_in_chunks": {"schedule": "packed", "logits_chunk": 7},
    "tool_tokens": {"schedule": "packed", "tool_tokens": True},
    "tool_tokens_phased": WAVES | {"tool_tokens": True, "logits_chunk": 7},
    "empty_responses": WAVES | {"empty": "ce"},
    "sync_every_pass": {"schedule": "packed", "use_no_sync": False, "budget": 45},
    "padded": {"schedule": "packed", "padded": True, "use_kl_loss": True},
    "lora_phased": WAVES | {"lora_targets": "all-linear"},
    "sliding_window_phased": WAVES | {"family": "window"},
    "tied_phased": WAVES | {"family": "tied"},
    "one_key_head": {"family": "one_key_head", "schedule": "packed"},
    "moe": {"family": "qwen3_moe", "schedule": "packed"},
    "moe_lora_phased": WAVES | {"family": "qwen3_moe", "lora_targets": "all-linear"},
    "gpt_oss": {"family": "gpt_oss", "schedule": "packed", "attn_implementation": "eager"},
    "gpt_oss_phased": WAVES | {"family": "gpt_oss", "attn_implementation": "eager"},
    "latent_attention_phased": WAVES | {"family": "deepseek_v3", "offload": True},
    # With responses inside of the next prompt, or not; in the last but one so on one of the ranks of data.
    "turns": {"turns": "kept", "schedule": "packed"},
    "turns_stripped": {"turns": "stripped", "schedule": "packed", "budget": 90},
    "turns_phased": {"turns": "kept", "schedule": "phased", "wave_tokens": 20},
    "turns_of_both_kinds_phased": {"turns": True, "schedule": "phased", "wave_tokens": 20},
    "turns_phased_in_pieces_tool_tokens": dict(
        turns="kept", schedule="phased", budget=60, tool_tokens=True, logits_chunk=7, gradient_checkpointing=True
    ),
    # Whose choice and check run verl's own path.
    "auto_verified": {"attn_implementation": "varlen_on_cpu", "verify": "first_step", "min_speedup": 1e-6},
    "verified_phased": WAVES | {"attn_implementation": "varlen_on_cpu", "verify": "first_step"},
    "gate_shut": {"attn_implementation": "varlen_on_cpu", "min_speedup": 1e6},
    # Where it would be wrong under sequence parallelism, as with sdpa, each rank computes whole rows.
    "sdpa_verified_phased": WAVES | {"verify": "first_step"},
    "sdpa_stock": {"schedule": "stock"},
    # On two ranks that have data the longest rows have 52 and 56 tokens.
    "sdpa_stock_in_small_passes": {"schedule": "stock", "budget": 50},
    "sdpa_gate_shut": {"min_speedup": 1e6},
    "hsdp": {"schedule": "packed", "fsdp_size": 2},
    "replicated_phased": WAVES | {"fsdp_size": 1},
}  # fmt: skip
VISION = {
    "packed": {"schedule": "packed"},
    "phased": {"schedule": "phased", "wave_tokens": 20},
    "checkpointed": {"schedule": "phased", "wave_tokens": 20, "gradient_checkpointing": True},
    "text_rank": {"batch": "text_rank", "schedule": "packed"},
    "scattered": {"batch": "scattered", "schedule": "packed", "exchange": "auto"},
}
VISION_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm4v_moe", "glm46v")
ALL = [*CASES, *((family, name) for family in VISION_FAMILIES for name in VISION)]
FEW = [
    "packed", "phased", "gradient_checkpointing_phased", "tool_tokens_phased", "empty_responses", "one_key_head",
    "latent_attention_phased", "auto_verified", "gate_shut", "moe", ("qwen3_vl", "phased"), ("qwen3_vl", "scattered"),
    "turns_phased", "turns_of_both_kinds_phased", ("qwen3_5", "checkpointed"), "hsdp", "sdpa_stock",
    "sdpa_stock_in_small_passes",
]  # fmt: skip

# Of FEW, where a group of four does what one of two does not: heads, experts, recurrent states and pieces of rows.
WIDE = [
    "packed", "one_key_head", "latent_attention_phased", "gate_shut", "moe", ("qwen3_vl", "phased"), "turns_phased",
    ("qwen3_5", "checkpointed"),
]  # fmt: skip
# Of FEW, where two groups of two do what one does not: ranks of data with other rows, and groups that agree on a path.
BESIDE = [
    "packed", "phased", "empty_responses", "auto_verified", "gate_shut", ("qwen3_vl", "scattered"),
    "turns_of_both_kinds_phased", "hsdp", "sdpa_stock_in_small_passes",
]  # fmt: skip
# Of FEW, left to test-more: their options are in other cases of make test, one key head in test_shards.py.
HALVES = [
    "gradient_checkpointing_phased", "tool_tokens_phased", "turns_of_both_kinds_phased", "phased", "auto_verified",
    "sdpa_stock_in_small_passes", "latent_attention_phased", ("qwen3_vl", "phased"),
    ("qwen3_5", "checkpointed"), "one_key_head", "gate_shut",
]  # fmt: skip
OF_VISION = {(family, name): {"family": family} | VISION[name] for family in VISION_FAMILIES for name in VISION}
IN_MORE = every_value(CASES | OF_VISION, FEW)


# What follows runs on ranks, which are given the models first; engines share what takes longest to build.
STOCK, SHARED = {}, SharedModels(engines._engine)
Case = str | tuple[str, str]


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    import varlen  # noqa: F401
    import verl  # noqa: F401  # first: it imports its plugin, ours
    from transformers.models.qwen3_5 import modeling_qwen3_5

    with (
        mock.patch("engines._engine", SHARED),
        short_chunks(),
        # See test_vision_engine.
        mock.patch.object(modeling_qwen3_5, "torch", Float64Torch()),
    ):
        yield


def _parts(case: Case) -> tuple[Callable[..., dict], str, dict]:
    """What measures a case, its model and its options."""
    if case in CASES:
        return engines._measure, CASES[case].get("family", "qwen3"), CASES[case]
    family, name = case
    return vision_engines._measure, family, VISION[name]


def _stock(models: dict, folder: str, case: Case) -> str:
    """A file with what the stock engine makes of a case's rows; its ranks are those that compute data in parallel."""
    measure, family, options = _parts(case)
    options = {name: x for name, x in options.items() if name not in (*OURS, "budget")}
    attention = options.get("attn_implementation")
    if attention == "varlen_on_cpu":
        del options["attn_implementation"]
    # transformers' eager gpt_oss reads across packed rows, verl's own attention of these towers' models is flash
    # attention, and Qwen3.5's state leaks into the next row.
    if attention == "eager" or family in ("qwen2_5_vl", "glm4v", "glm4v_moe", "glm46v", "qwen3_5"):
        options["use_remove_padding"] = False
    if (key := repr((family, sorted(options.items())))) not in STOCK:
        with _prepared():
            found = measure("fsdp2", models[family], get_rank(), options)
        STOCK[key] = f"{folder}{len(STOCK)}.{get_rank()}"
        torch.save(found, STOCK[key])
    return STOCK[key]


def _case(models: dict, size: int, truth: tuple[str, ...], case: Case, **changed: object) -> dict:
    measure, family, options = _parts(case)
    data_rank = get_rank() // size
    with _prepared():
        ours = measure("prefix", models[family], data_rank, {"ulysses": size, "verify": "off"} | options | changed)
    return _compare(ours, torch.load(truth[data_rank], weights_only=False))


def _pads_count(sequence_parallel) -> dict:
    to_heads = sequence_parallel.Shards.to_heads

    def pads_count(self, *qkv):  # the first token of a row is seen twice by those behind it
        found = to_heads(self, *qkv)
        return found[0], *(torch.cat([x[:1], x[:1], x[2:]]) for x in found[1:])

    return {"to_heads": pads_count}


def _keys_of_the_wrong_heads(sequence_parallel) -> dict:
    to_heads = sequence_parallel.Shards.to_heads
    return {"to_heads": lambda self, q, k, v: to_heads(self, q, k.flip(1), v.flip(1))}


def _a_slice_shifted_by_one(sequence_parallel) -> dict:
    made = sequence_parallel.Shards.spread_head
    return {"spread_head": lambda self, tokens: (lambda mine, places: (mine, places.roll(1)))(*made(self, tokens))}


def _gradients_not_times_n(sequence_parallel) -> dict:
    def gather(self, outputs, gathered_at):
        whole_or_not = outputs / self.size + (outputs - outputs / self.size).detach()
        return sequence_parallel._Gather.apply(whole_or_not, self.group).index_select(0, gathered_at)

    return {"gather": gather}


BROKEN = (_pads_count, _keys_of_the_wrong_heads, _a_slice_shifted_by_one, _gradients_not_times_n)


def _broken(models: dict, size: int, truth: tuple[str, ...], broken: Callable[..., dict]) -> float:
    """The largest relative error of a parameter's gradient in the case packed."""
    from verl_prefix.core import sequence_parallel

    with mock.patch.multiple(sequence_parallel.Shards, **broken(sequence_parallel)):
        return _case(models, size, truth, "packed")["errors"]["grads"]


def _priced_differently(models: dict, size: int, truth: tuple[str, ...]) -> dict:
    """Every rank but the first finds verl's own path nine times as dear as ours, the first finds it half as dear."""
    from verl_prefix.auto import chooser

    priced = {0: [1.0, 2.0, 2.0]}.get(get_rank(), [9.0, 1.0, 1.0])
    with mock.patch.object(chooser.Candidates, "seconds", lambda *_: priced):
        return _case(models, size, truth, "auto_verified", min_speedup=1.05, verify="off")


def _recorded(models: dict, size: int, folder: str) -> list[str]:
    """Rows of one optimizer step of every rank, in one trace; its files."""
    options = {"ulysses": size, "verify": "off", "schedule": "packed", "trace_dir": folder}
    with _prepared():
        engine = engines._engine("prefix", models["qwen3"], options)
    data = engines._batch(get_rank() // size, engine.model_config.hf_config.vocab_size, options)
    with engine.train_mode(disable_auto_offload=True):
        engine.train_batch(data, engines._loss(options))
    torch.distributed.barrier()
    return sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*.safetensors"))


def _fails_on_the_last_rank(models: dict, size: int, truth: tuple[str, ...]) -> str:
    from verl_prefix.engine.travel import moves

    last = get_rank() == torch.distributed.get_world_size() - 1
    with mock.patch.object(moves, "describe", None if last else moves.describe):
        try:
            _case(models, size, truth, "packed", exchange="auto")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("models")
    families = ("qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", *VISION_FAMILIES)
    found = {family: write_tiny_model(tmp / family, family=family) for family in families}
    found["one_key_head"] = write_tiny_model(tmp / "one_key_head", family="llama", num_key_value_heads=1)
    window = dict(use_sliding_window=True, sliding_window=25, max_window_layers=1)
    found["window"] = write_tiny_model(tmp / "window", **window)
    found["tied"] = write_tiny_model(tmp / "tied", tie_word_embeddings=True)
    return found


@pytest.fixture(scope="module")
def stock(models, ranks, tmp_path_factory):
    """(ranks that compute data in parallel, case) -> files of stock's results, one of each of them."""
    folder = str(tmp_path_factory.mktemp("stock"))

    def run(world: int, case: Case) -> tuple[str, ...]:
        return tuple(ranks(world, models)(_stock, f"{folder}/{world}_", case))

    return run


@pytest.fixture
def results(models, stock, ranks):
    """What a job is of a case on the ranks of GROUPS, which are given stock's results of that case."""

    def run(name: str, job: Callable, case: Case, *args: object) -> list:
        world, size = GROUPS[name]
        return ranks(world, models)(job, size, stock(world // size, case), *args)

    return run


SOME = ["sp2", pytest.param("sp4", marks=pytest.mark.full), pytest.param("dp2_sp2", marks=pytest.mark.more)]


def _mark(name: str, case: Case) -> tuple | pytest.MarkDecorator:
    """make test has FEW but HALVES on two ranks; test-more these, and each other option once, and on four ranks WIDE as
    one group and BESIDE as two."""
    if name == "sp2" and case in FEW:
        return pytest.mark.more if case in HALVES else ()
    return pytest.mark.more if case in {"sp2": IN_MORE, "sp4": WIDE, "dp2_sp2": BESIDE}[name] else pytest.mark.full


RUNS = [pytest.param(name, case, marks=_mark(name, case), id=f"{name}-{case}") for name in GROUPS for case in ALL]


@pytest.mark.parametrize(("name", "case"), RUNS)
def test_ranks_of_a_group_compute_what_the_stock_engine_computes_on_one(results, name, case):
    for rank, result in enumerate(results(name, _case, case, case)):
        worst = {name: error for name, error in result["errors"].items() if not error <= TOLERANCE}
        assert not worst, f"rank {rank}: relative errors over {TOLERANCE}: {worst}"


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", ["sp2", *(pytest.param(name, marks=pytest.mark.full) for name in ("sp4", "dp2_sp2"))])
def test_what_is_broken_on_purpose_is_far_off(results, name, broken):
    assert min(results(name, _broken, "packed", broken)) > 100 * TOLERANCE


@pytest.mark.parametrize("name", SOME)
def test_a_case_shares_or_takes_verls_path_as_it_should(results, name):
    def metrics(case: Case) -> list[dict]:
        return [result["metrics"] for result in results(name, _case, case, case)]

    for found in metrics("phased"):
        assert found["prefix/reuse_fraction"][0] > 0.3
        assert found["prefix/waves"][0] >= 1
    for found in metrics("turns_phased"):
        assert found["prefix/tree_depth"] == [2.0]
    for case in ("gate_shut", "sdpa_stock"):
        for found in metrics(case):
            assert found["prefix/reuse_fraction"] == [0.0]
    for found in metrics("sdpa_gate_shut"):
        assert found["prefix/reuse_fraction"][0] > 0.3
    for found in metrics("auto_verified"):
        assert 0 < found["prefix/verify_attention"][0] <= 2
        assert 0 < found["prefix/verify_log_probs"][0] <= 3
    for found in metrics(("qwen3_vl", "scattered")):
        assert found["prefix/groups"][0] > 1


@pytest.mark.parametrize("name", SOME)
def test_experts_loads_are_those_of_every_row_by_itself(results, models, name):
    """verl computes a row's last token as well, which no loss reads; ours are of all others."""
    from transformers import AutoModelForCausalLM

    model, chosen = AutoModelForCausalLM.from_pretrained(models["qwen3_moe"]), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2].flatten()))
    world, size = GROUPS[name]
    for rank in range(world // size):
        for row in engines._batch(rank, model.config.vocab_size, {})["input_ids"].unbind():
            with torch.no_grad():
                model(input_ids=row[:-1].unsqueeze(0), use_cache=False)
    loads = torch.stack([torch.cat(chosen[layer :: len(model.model.layers)]).bincount(minlength=4) for layer in (0, 1)])
    excess = loads * 4 / loads.sum(1, keepdim=True) - 1
    for result in results(name, _case, "moe", "moe"):
        metrics = {name: x for name, (x,) in result["metrics"].items() if name.startswith("prefix/moe/")}
        assert metrics == {
            "prefix/moe/max_vio/max": pytest.approx(excess.max().item()),
            "prefix/moe/max_vio/avg": pytest.approx(excess.amax(1).mean().item()),
            "prefix/moe/avg_vio/max": pytest.approx(excess.abs().mean(1).max().item()),
            "prefix/moe/avg_vio/avg": pytest.approx(excess.abs().mean().item()),
        }
    for result in results(name, _case, "packed", "packed"):
        assert not any(name.startswith("prefix/moe/") for name in result["metrics"])


@pytest.mark.parametrize("name", SOME)
def test_ranks_that_price_differently_take_the_same_path(results, name):
    """If the data-parallel ranks alone agreed, those of a group would wait for each other."""
    for found in results(name, _priced_differently, "auto_verified"):
        assert max(found["errors"].values()) <= TOLERANCE
        assert found["metrics"]["prefix/predicted_speedup"] == [9.0 / 2.0]


@pytest.mark.parametrize("name", SOME)
def test_a_trace_has_every_row_once(ranks, models, tmp_path, name):
    world, size = GROUPS[name]
    for files in ranks(world, models)(_recorded, size, str(tmp_path)):
        assert len(files) == world // size, files


def test_an_exchange_that_fails_on_one_rank_fails_on_all(results):
    """On two ranks that compute data in parallel."""
    told = results("dp2_sp2", _fails_on_the_last_rank, "packed")
    assert told[-1].startswith("TypeError") and all("rank 3 failed while describing rows" in x for x in told[:-1])
