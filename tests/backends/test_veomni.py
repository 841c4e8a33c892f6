"""`model_engine=prefix_veomni` against verl's own VeOmni engine, and against verl's FSDP2 engine on the same rows: a
factor that is wrong in VeOmni would hide in both of its arms.

fp32, gloo, tiny models. `veomni_cpu` has what VeOmni lacks here: its Triton kernels and flash attention. Does not
exercise CUDA, NCCL, or VeOmni's fused kernels.
"""

import pytest
from engines import TOLERANCE, _compare, _lens, _measure
from torch.distributed import get_rank, get_world_size

pytest.importorskip("veomni")

from veomni_engines import KEYS, veomni_engines  # noqa: E402

from verl_prefix.testing import write_tiny_model  # noqa: E402

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
    "flash": PHASED | {"attn_implementation": "flash_attention_2"},
    "kl_loss_temperature": {"use_kl_loss": True, "temperature": 0.7},
    "rank_of_empty_responses": {"empty": ("e", f"pad{7:032x}", "f")},
    "params_on_the_host": PHASED | {"param_offload": True},
    "llama_tied": PHASED | {"family": "tied"},
    "qwen2": PHASED | {"family": "qwen2"},
}
CASES = {
    1: {"packed": {}, "phased": PHASED, "moe": {"family": "qwen3_moe"}, "moe_phased": PHASED | {"family": "qwen3_moe"}},
    2: DENSE
    | {f"moe_{name}": DENSE[name] | {"family": "qwen3_moe"} for name in ("packed", "phased")}
    | {f"ep2_{name}": DENSE[name] | EP for name in DENSE if name not in ("flash", "llama_tied", "qwen2")}
    | {f"sp2_{name}": DENSE[name] | SP for name in ("packed", "phased", "phased_checkpointed", "turns_phased")}
    | {f"sp2_ep2_{name}": DENSE[name] | SP | EP for name in ("packed", "phased", "turns_phased")},
    4: {
        "ep2_fsdp2": EP,
        "ep2_fsdp2_phased": EP | PHASED,
        "ep4_phased": EP | PHASED | {"expert_parallel_size": 4},
        "sp2_ep4_phased": EP | SP | PHASED | {"expert_parallel_size": 4},
        "hsdp_phased": PHASED | {"fsdp_size": 2},
        "hsdp_ep2_phased": EP | PHASED | {"fsdp_size": 2},
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = {family: write_tiny_model(folder / family, family=family) for family in ("qwen3", "qwen3_moe")}
    paths["tied"] = write_tiny_model(folder / "tied", family="llama", tie_word_embeddings=True)
    paths["qwen2"] = paths["qwen3"]
    return paths


# What follows runs on ranks.
TRUTHS: dict[str, dict] = {}


def _data_rank(options: dict) -> int:
    return get_rank() // options.get("ulysses_parallel_size", 1)


def _rows(options: dict) -> dict:
    """Options with rows for more than two ranks that have different ones."""
    rank = _data_rank(options)
    if rank < 2:
        return options
    groups = [(f"{uid}x", n + rank, lens[:-1] or lens, kind) for uid, n, lens, kind in _lens(rank - 2, ())]
    return options | {"groups": groups}


def _stock(backend: str, path: str, rank: int, options: dict) -> dict:
    ours = ("schedule", "wave_tokens", "offload", "exchange", "verify", "logits_chunk", "trees")
    rows_by = options.get("ulysses_parallel_size", 1)  # the same on all ranks, as what is found must be
    options = {k: v for k, v in options.items() if k not in (*ours, *(KEYS if backend == "fsdp2" else ()))}
    if (key := repr((backend, path, rows_by, sorted(options.items())))) not in TRUTHS:
        TRUTHS[key] = _measure(backend, path, rank, options)
    return TRUTHS[key]


def _case(models: dict, name: str, more: tuple = ()) -> dict[str, dict[str, float]]:
    """Errors of ours against VeOmni's own path, and against FSDP2's, which shards as many rows otherwise."""
    options = {"verify": "off"} | CASES[get_world_size()][name] | dict(more)
    path, options = models[options.get("family", "qwen3")], _rows(options)
    rank = _data_rank(options)
    with veomni_engines():
        ours = _measure("prefix_veomni", path, rank, options)
        stock = _stock("veomni", path, rank, options)
    other = _stock("fsdp2", path, rank, options)
    return {"veomni": _compare(ours, stock)["errors"], "fsdp2": _compare(ours, other)["errors"]}


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in CASES.items() for name in cases])
def test_ours_is_veomnis_and_fsdp2s(models, ranks, world, name):
    for found in ranks(world, models)(_case, name):
        for arm in ("veomni", "fsdp2"):
            assert max(found[arm].values()) < TOLERANCE, (arm, found[arm])
