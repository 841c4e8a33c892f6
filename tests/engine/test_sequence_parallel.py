"""Ulysses sequence parallelism: PrefixFSDPEngine on groups of 2 and 4 gloo ranks against stock verl without it, fp32.

The same rows. verl's own path under it runs with a dense stand-in for flash attention. Does not exercise CUDA or
NCCL. One set of processes per number of ranks runs every case; the tests read what came back.
"""

import functools
import os
from pathlib import Path
from unittest import mock

import engines
import pytest
import torch
import vision_engines
from engines import TOLERANCE, _compare
from shared_models import OURS, SharedModels
from whole_tensors import whole

from verl_prefix.testing import write_tiny_model

WAVES = {"schedule": "phased", "wave_tokens": 40}
# (ranks, ranks of a group): what the cases are run on; four ranks outside test-full run FEW.
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
    # Whose choice and check run verl's own path.
    "auto_verified": {"attn_implementation": "varlen_on_cpu", "verify": "first_step", "min_speedup": 1e-6},
    "verified_phased": WAVES | {"attn_implementation": "varlen_on_cpu", "verify": "first_step"},
    "gate_shut": {"attn_implementation": "varlen_on_cpu", "min_speedup": 1e6},
}  # fmt: skip
VISION = {
    "packed": {"schedule": "packed"},
    "phased": {"schedule": "phased", "wave_tokens": 20},
    "checkpointed": {"schedule": "phased", "wave_tokens": 20, "gradient_checkpointing": True},
    "text_rank": {"batch": "text_rank", "schedule": "packed"},
    "scattered": {"batch": "scattered", "schedule": "packed", "exchange": "auto"},
}
VISION_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
ALL = [*CASES, *((family, name) for family in VISION_FAMILIES for name in VISION)]
FEW = [
    "packed", "phased", "gradient_checkpointing_phased", "tool_tokens_phased", "empty_responses", "one_key_head",
    "auto_verified", "gate_shut", "moe", ("qwen3_vl", "phased"), ("qwen3_vl", "scattered"),
]  # fmt: skip


def _parts(case: str | tuple[str, str]) -> tuple:
    """The test module whose `_measure` runs a case, its model and its options."""
    if case in CASES:
        return engines, CASES[case].get("family", "qwen3"), CASES[case]
    family, name = case
    return vision_engines, family, VISION[name]


def _stock_options(family: str, options: dict) -> dict:
    options = {name: x for name, x in options.items() if name not in (*OURS, "budget")}
    attention = options.get("attn_implementation")
    if attention == "varlen_on_cpu":
        del options["attn_implementation"]
    # transformers' eager gpt_oss reads across packed rows, and verl's Qwen2.5-VL needs flash attention for them.
    if attention == "eager" or family == "qwen2_5_vl":
        options["use_remove_padding"] = False
    return options


def _key(case: str | tuple[str, str]) -> str:
    _, family, options = _parts(case)
    return repr((family, sorted(_stock_options(family, options).items())))


def _join(rank: int, world: int, rendezvous: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), VERL_PLATFORM="cpu")
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    import verl  # noqa: F401  # first: it imports its plugin, ours

    engines._engine = vision_engines._engine = SharedModels(engines._engine)


def _stock_worker(rank: int, world: int, rendezvous: str, models: dict, cases: list, out: str) -> None:
    """Every case's rows by the stock engine, whose ranks are those that compute data in parallel."""
    _join(rank, world, rendezvous)
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    BaseModelOutputWithPooling.mean = lambda output: output.pooler_output.mean()  # see test_vision_engine
    found = {}
    for case in cases:
        if (key := _key(case)) not in found:
            module, family, options = _parts(case)
            found[key] = module._measure("fsdp2", models[family], rank, _stock_options(family, options))
    torch.save(found, f"{out}.{rank}")
    torch.distributed.destroy_process_group()


def _worker(rank: int, world: int, rendezvous: str, size: int, models: dict, cases: list, stock: str, out: str) -> None:
    _join(rank, world, rendezvous)
    from verl_prefix.auto import chooser
    from verl_prefix.core import sequence_parallel
    from verl_prefix.engine import exchange

    data_rank, truth = rank // size, torch.load(f"{stock}.{rank // size}", weights_only=False)

    default = {"ulysses": size, "verify": "off"}

    def compared(case, **changed) -> dict:
        module, family, options = _parts(case)
        ours = module._measure("prefix", models[family], data_rank, default | options | changed)
        return _compare(ours, truth[_key(case)])

    results = {case: compared(case) for case in cases}

    def broken(**changed) -> float:
        """The largest relative error of a parameter's gradient in the case packed."""
        options = default | CASES["packed"]
        engine = engines._engine("prefix", models["qwen3"], options)
        data = engines._batch(data_rank, engine.model_config.hf_config.vocab_size, options)
        with mock.patch.multiple(sequence_parallel.Shards, **changed), engine.train_mode(disable_auto_offload=True):
            engine.forward_backward_batch(data, engines._loss(options))
            grads = whole({n: p.grad for n, p in engine.module.named_parameters()})
        wanted = truth[_key("packed")]["grads"]
        return max(engines._relative(grads[name], grad) for name, grad in wanted.items())

    attention_of, keep = sequence_parallel.Shards.to_heads, sequence_parallel.Shards.keep

    def pads_count(self, q, k, v):  # the first token of a row is seen twice by those behind it
        found = attention_of(self, q, k, v)
        return found[0], *(torch.cat([x[:1], x[:1], x[2:]]) for x in found[1:])

    results["a pad that counts"] = broken(to_heads=pads_count)
    results["keys of the wrong heads"] = broken(
        to_heads=lambda self, q, k, v: attention_of(self, q, k.flip(1), v.flip(1))
    )
    results["a slice shifted by one"] = broken(
        keep=lambda self, tokens: (lambda mine, places: (mine, places.roll(1)))(*keep(self, tokens))
    )
    results["gradients not times n"] = broken(
        gather=lambda self, outputs, places: sequence_parallel._Gather.apply(
            outputs / self.size + (outputs - outputs / self.size).detach(), self.group
        ).index_select(0, places)
    )
    # Every rank but the first finds verl's own path nine times as dear as ours, the first finds it half as dear.
    priced = {0: [1.0, 2.0, 2.0]}.get(rank, [9.0, 1.0, 1.0])
    with mock.patch.object(chooser, "price", lambda *_: priced):
        results["ranks that price differently"] = compared("auto_verified", min_speedup=1.05, verify="off")
    results["trace"] = _recorded(models["qwen3"], data_rank, size, f"{out}.trace")
    if world > size:
        describe = exchange.describe
        with mock.patch.object(exchange, "describe", None if rank == world - 1 else describe):
            try:
                compared("packed", exchange="auto")
            except Exception as error:
                results["a rank that fails"] = f"{type(error).__name__}: {error}"
    torch.save(results, f"{out}.{rank}")
    torch.distributed.destroy_process_group()


def _recorded(path: str, data_rank: int, size: int, folder: str) -> list[str]:
    """Rows of one optimizer step of every rank, in one trace; its files."""
    options = {"ulysses": size, "verify": "off", "schedule": "packed", "trace_dir": folder}
    engine = engines._engine("prefix", path, options)
    data = engines._batch(data_rank, engine.model_config.hf_config.vocab_size, options)
    with engine.train_mode(disable_auto_offload=True):
        engine.train_batch(data, engines._loss(options))
    torch.distributed.barrier()
    return sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*.safetensors"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("models")
    families = ("qwen3", "qwen3_moe", "gpt_oss", *VISION_FAMILIES)
    found = {family: write_tiny_model(tmp / family, family=family) for family in families}
    found["one_key_head"] = write_tiny_model(tmp / "one_key_head", family="llama", num_key_value_heads=1)
    window = dict(use_sliding_window=True, sliding_window=25, max_window_layers=1)
    found["window"] = write_tiny_model(tmp / "window", **window)
    found["tied"] = write_tiny_model(tmp / "tied", tie_word_embeddings=True)
    return found


@pytest.fixture(scope="module")
def stock(models, tmp_path_factory, spawn):
    """(ranks that compute data in parallel, cases) -> files of their results, by verl's engine on so many ranks."""
    tmp = tmp_path_factory.mktemp("stock")

    @functools.cache
    def run(world: int, cases: tuple) -> str:
        out = f"{tmp}/{world}_{len(cases)}"
        spawn(_stock_worker, args=(world, f"{out}.rendezvous", models, list(cases), out), nprocs=world)
        return out

    return run


FULL = [pytest.param((name, tuple(ALL)), id=f"{name}-all", marks=pytest.mark.full) for name in ("sp4", "dp2_sp2")]
PARTS = [pytest.param((name, tuple(ALL if name == "sp2" else FEW)), id=name) for name in GROUPS]


@pytest.fixture(scope="module", params=[*PARTS, *FULL])
def results(request, models, stock, tmp_path_factory, spawn):
    name, cases = request.param
    tmp, (world, size) = tmp_path_factory.mktemp("ulysses"), GROUPS[name]
    truth = stock(world // size, tuple(ALL) if world == size else cases)  # of one rank, the same for sp2 and sp4
    spawn(_worker, args=(world, f"{tmp}/rendezvous", size, models, list(cases), truth, f"{tmp}/out"), nprocs=world)
    return [torch.load(f"{tmp / 'out'}.{rank}") for rank in range(world)]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_ranks_of_a_group_compute_what_the_stock_engine_computes_on_one(results, case):
    if case not in results[0]:
        pytest.skip("in test-full")
    for rank, result in enumerate(results):
        worst = {name: error for name, error in result[case]["errors"].items() if not error <= TOLERANCE}
        assert not worst, f"rank {rank}: relative errors over {TOLERANCE}: {worst}"


@pytest.mark.parametrize(
    "case", ["a pad that counts", "keys of the wrong heads", "a slice shifted by one", "gradients not times n"]
)
def test_what_is_broken_on_purpose_is_far_off(results, case):
    for result in results:
        assert result[case] > 100 * TOLERANCE


def test_a_case_shares_or_takes_verls_path_as_it_should(results):
    for result in results:
        assert result["phased"]["metrics"]["prefix/reuse_fraction"][0] > 0.3
        assert result["phased"]["metrics"]["prefix/waves"][0] >= 1
        assert result["gate_shut"]["metrics"]["prefix/reuse_fraction"] == [0.0]
        assert 0 < result["auto_verified"]["metrics"]["prefix/verify_attention"][0] <= 2
        assert 0 < result["auto_verified"]["metrics"]["prefix/verify_log_probs"][0] <= 3
        assert result["qwen3_vl", "scattered"]["metrics"]["prefix/groups"][0] > 1


def test_experts_loads_are_those_of_every_row_by_itself(results, models):
    """verl computes a row's last token as well, which no loss reads; ours are of all others."""
    from transformers import AutoModelForCausalLM

    model, chosen = AutoModelForCausalLM.from_pretrained(models["qwen3_moe"]), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2].flatten()))
    for rank in range(2 if "a rank that fails" in results[0] else 1):
        for row in engines._batch(rank, model.config.vocab_size, {})["input_ids"].unbind():
            with torch.no_grad():
                model(input_ids=row[:-1].unsqueeze(0), use_cache=False)
    loads = torch.stack([torch.cat(chosen[layer :: len(model.model.layers)]).bincount(minlength=4) for layer in (0, 1)])
    excess = loads * 4 / loads.sum(1, keepdim=True) - 1
    for result in results:
        metrics = {name: x for name, (x,) in result["moe"]["metrics"].items() if name.startswith("prefix/moe/")}
        assert metrics == {
            "prefix/moe/max_vio/max": pytest.approx(excess.max().item()),
            "prefix/moe/max_vio/avg": pytest.approx(excess.amax(1).mean().item()),
            "prefix/moe/avg_vio/max": pytest.approx(excess.abs().mean(1).max().item()),
            "prefix/moe/avg_vio/avg": pytest.approx(excess.abs().mean().item()),
        }
        assert not any(name.startswith("prefix/moe/") for name in result["packed"]["metrics"])


def test_ranks_that_price_differently_take_the_same_path(results):
    """If the data-parallel ranks alone agreed, those of a group would wait for each other."""
    for result in results:
        found = result["ranks that price differently"]
        assert max(found["errors"].values()) <= TOLERANCE
        assert found["metrics"]["prefix/predicted_speedup"] == [9.0 / 2.0]


def test_a_trace_has_every_row_once(results):
    data_ranks = 2 if "a rank that fails" in results[0] else 1
    for result in results:
        assert len(result["trace"]) == data_ranks, result["trace"]


def test_an_exchange_that_fails_on_one_rank_fails_on_all(results):
    if "a rank that fails" not in results[0]:
        pytest.skip("one rank computes data in parallel")
    told = [result["a rank that fails"] for result in results]
    assert told[-1].startswith("TypeError") and all("rank 3 failed while describing rows" in x for x in told[:-1])
