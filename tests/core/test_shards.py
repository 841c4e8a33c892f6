"""A packed row on 2, 4 and 8 gloo ranks in float64, against HF row by row on one; what travels and what a cache holds.

Does not exercise FSDP (tests/engine/test_sequence_parallel.py does), NCCL or more than one node.
"""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dialogues import VOCAB, rollouts, thinking_kept, thinking_stripped
from families import build, compute_in_float64
from runners import random_rollouts, run_shared, run_stock
from short_chunks import short_chunks

from verl_prefix.core.groups import Group
from verl_prefix.core.packed_row import pack_groups
from verl_prefix.core.planning import make_waves
from verl_prefix.core.prefix_cache import PrefixCache
from verl_prefix.core.sequence_parallel import Shards

HEADS, HEAD_DIM = 8, 8
# HF's fp32 norms set the floor of gradients, see test_fsdp.py.
LOG_PROBS, GRADIENTS = 1e-9, 5e-7
SHAPE = [(23, [7, 5, 6, 3]), (1, [4, 2]), (9, [2, 8, 0, 4]), (14, [5])]
CASES = {
    "packed": dict(schedule="packed"),
    "phased": dict(schedule="phased", wave_tokens=9),
    "phased_row_by_row": dict(schedule="phased", wave_tokens=1),
    "small_budget": dict(schedule="auto", budget=40),
    "offload": dict(schedule="phased", wave_tokens=9, offload=True),
    "logits_in_chunks": dict(schedule="packed", logits_chunk=3),
    "turns": dict(schedule="packed"),
    "turns_phased": dict(schedule="phased", wave_tokens=9),
    "turns_in_pieces": dict(schedule="phased", budget=60, offload=True),
    "turns_stripped": dict(schedule="phased", wave_tokens=9),
}
TURNS = {"turns": thinking_kept, "turns_phased": thinking_kept, "turns_in_pieces": thinking_kept,
         "turns_stripped": thinking_stripped}  # fmt: skip
FEW = ("packed", "phased")  # on more ranks, and checkpointed
# Recurrent layers; on four ranks the two key heads or groups of some are on two ranks each.
STATES = ("qwen3.5", "olmo-hybrid", "lfm2", "granite4-h")


def _build(kv_heads: int, **fields):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=kv_heads, head_dim=HEAD_DIM, initializer_range=0.2, attn_implementation="sdpa", **fields,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).double().train()


WINDOW = dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)
MODELS = {"2 key heads": (2, {}), "1 key head": (1, {}), "window": (4, WINDOW)}


def _errors(model, truth, batch, wanted, options: dict, size: int) -> dict[str, float]:
    model.zero_grad()
    found = run_shared(model, batch, sequence_group=dist.group.WORLD, **options)
    grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(grads)  # as FSDP: the mean over ranks, which all have the whole loss
    grads = (grads / size).split([parameter.numel() for parameter in model.parameters()])
    pairs = list(zip(grads, truth.parameters(), strict=True))
    return {
        "log_probs": max(((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True) if len(b))),
        "grads": max(((a - b.grad.flatten()).norm() / b.grad.norm()).item() for a, b in pairs),
    }


def _batch(case: str):
    return rollouts(TURNS[case]) if case in TURNS else random_rollouts(SHAPE, VOCAB)


def _states(family: str, case: str, checkpointed: bool) -> dict:
    """Errors against HF of a model with recurrent layers, and shapes of the states that a cache holds."""
    held, capture, batch = set(), PrefixCache.capture, _batch(case)

    def looked_at(cache, key, *left, other_outputs=()):
        held.update([tuple(left[0].shape[1:])] if other_outputs else ())
        return capture(cache, key, *left, other_outputs=other_outputs)

    truth = build(family).double()
    with pytest.MonkeyPatch.context() as patch, short_chunks():
        compute_in_float64(truth, patch)
        ours, wanted = copy.deepcopy(truth), run_stock(truth, batch)
        if checkpointed:
            ours.gradient_checkpointing_enable({"use_reentrant": False})
        patch.setattr(PrefixCache, "capture", looked_at)
        return _errors(ours, truth, batch, wanted, CASES[case], dist.get_world_size()) | {"held": held}


def _case(model: str, case: str, checkpointed: bool) -> dict:
    """Errors against HF, elements that a call sends, shapes that a cache holds."""
    kv_heads, fields = MODELS[model]
    size, sent, held = dist.get_world_size(), [], set()
    batch = _batch(case)
    all_to_all, capture = dist.all_to_all_single, PrefixCache.capture

    def counted(received, x, group=None):
        sent.append(x.numel() * (size - 1) // size)
        return all_to_all(received, x, group=group)

    def looked_at(cache, layer, *left):
        held.add(tuple(left[0].shape))
        return capture(cache, layer, *left)

    truth = _build(kv_heads, **fields)
    ours, wanted = copy.deepcopy(truth), run_stock(truth, batch)
    if checkpointed:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    with (
        mock.patch.object(dist, "all_to_all_single", counted),
        mock.patch.object(PrefixCache, "capture", looked_at),
    ):
        return _errors(ours, truth, batch, wanted, CASES[case], size) | {"sent": sent, "held": held}


# Every case on two ranks; two of them on more ranks, and checkpointed.
RUNS = [(2, case, False) for case in CASES] + [
    (size, case, checkpointed) for size in (2, 4, 8) for case in FEW for checkpointed in (False, True)
    if size > 2 or checkpointed
]  # fmt: skip


def _sized(size: int):
    """make test has two ranks, which both have the only key head of a model; test-more four and eight."""
    return pytest.param(size, marks=() if size == 2 else pytest.mark.more)


def _on_more(size: int, checkpointed: bool) -> tuple | pytest.MarkDecorator:
    """As `_sized`; what is checkpointed runs again on two ranks as on more, which is left to make test-full."""
    return () if size == 2 else pytest.mark.full if checkpointed else pytest.mark.more


def _of_one(model: str, case: str) -> tuple | pytest.MarkDecorator:
    """make test has every case by the model whose only key head both ranks have, and those of rows by each."""
    return () if model == "1 key head" or case in (*FEW, "turns_stripped") else pytest.mark.more


@pytest.mark.parametrize(
    ("model", "size", "case", "checkpointed"),
    [
        pytest.param(model, *run, marks=_on_more(run[0], run[2]) or _of_one(model, run[1]))
        for model in MODELS for run in RUNS
    ],
)  # fmt: skip
def test_ranks_compute_together_what_hf_computes_row_by_row(ranks, model, size, case, checkpointed):
    for result in ranks(size)(_case, model, case, checkpointed):
        assert result["log_probs"] <= LOG_PROBS
        assert result["grads"] <= GRADIENTS


def _marks(family: str, size: int, case: str, checkpointed: bool) -> tuple | pytest.MarkDecorator:
    """test-more has every case by one family; by the others those on four ranks, and of two those that hold most."""
    if (size, case, checkpointed) == (2, "turns_phased", False):
        return ()
    most = case in ("phased_row_by_row", "turns_in_pieces", "turns_stripped") or (case in FEW and checkpointed)
    return pytest.mark.more if family == "qwen3.5" or (most if size == 2 else not checkpointed) else pytest.mark.full


STATE_RUNS = [pytest.param(family, *run, marks=_marks(family, *run)) for family in STATES for run in RUNS if run[0] < 8]


@pytest.mark.parametrize(("family", "size", "case", "checkpointed"), STATE_RUNS)
def test_ranks_pass_on_states_as_hf_does_row_by_row(ranks, family, size, case, checkpointed):
    for result in ranks(size)(_states, family, case, checkpointed):
        assert result["log_probs"] <= LOG_PROBS
        assert result["grads"] <= GRADIENTS


@pytest.mark.parametrize("size", [_sized(2), _sized(4)])
def test_a_prefix_cache_holds_states_of_this_ranks_heads_and_channels(ranks, size):
    for result in ranks(size)(_states, "qwen3.5", "phased", False):
        assert result["held"] == {(4 // size, 8, 12), (3, (2 * 2 * 8 + 4 * 12) // size)}


@pytest.mark.parametrize("size", [_sized(2), _sized(4), _sized(8)])
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_sends_what_the_docstring_says_and_waves_send_their_own_tokens(ranks, model, size):
    kv_heads = MODELS[model][0]
    prefix, suffix = sum(p - 1 for p, _ in SHAPE), sum(sum(lens) for _, lens in SHAPE)
    tokens = -(-prefix // size) - (-suffix // size)  # of this rank
    by_docstring = tokens * (2 * HEADS + 2 * max(kv_heads, size)) * HEAD_DIM * (size - 1) / size
    for result in ranks(size)(_case, model, "packed", False):
        assert len(result["sent"]) == 2 * 2 * 2, "two layers, to heads and to tokens, forward and backward"
        assert sum(result["sent"]) == 2 * 2 * by_docstring


@pytest.mark.parametrize("size", [_sized(2), _sized(4), _sized(8)])
@pytest.mark.parametrize("model", MODELS)
def test_a_prefix_cache_holds_this_ranks_heads_of_whole_prefixes(ranks, model, size):
    kv_heads, prefix = MODELS[model][0], sum(p - 1 for p, _ in SHAPE)
    for result in ranks(size)(_case, model, "phased", False):
        assert result["held"] == {(prefix, max(kv_heads // size, 1), HEAD_DIM)}


@pytest.fixture
def alone():
    """What one rank of several makes of a packed row needs no other rank."""
    with mock.patch.object(dist, "get_world_size", lambda group: group[1]):
        with mock.patch.object(dist, "get_rank", lambda group: group[0]):
            yield


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_token_is_one_ranks_and_every_rank_has_its_share_of_lm_head(alone, size):
    groups, offsets = [Group.of_prompt((0, 1), 13, (4, 7)), Group.of_prompt((2,), 0, (5,))], [0, 18, 39, 45]
    packed, prefixes = pack_groups(groups, offsets), pack_groups(groups, offsets, "phase_a")
    (wave,) = make_waves(groups[:1], 99)
    wave = pack_groups(wave.groups, offsets, "wave", prefixes)
    for packed_row in (packed, wave, prefixes, pack_groups([], offsets)):
        shards = [Shards((rank, size), packed_row, torch.device("cpu")) for rank in range(size)]
        tokens = [one.local_tokens for one in shards]
        assert len({len(x) for x in tokens}) == 1
        assert set(torch.cat(tokens).tolist()) == set(range(packed_row.num_tokens))
        suffix = torch.arange(packed_row.num_strand_tokens, packed_row.num_tokens)
        for chosen in (suffix, suffix[::3], suffix[-1:], torch.tensor([packed_row.num_tokens - 1])):
            if not len(chosen):
                continue
            kept = [one.spread_head(chosen) for one in shards]
            assert len({len(own) for own, _ in kept}) == 1
            assert all(len(own.unique()) == len(own) for own, _ in kept), "what is put back twice has two gradients"
            gathered = torch.cat([x[mine] for x, (mine, _) in zip(tokens, kept, strict=True)])
            assert all(gathered[places].tolist() == chosen.tolist() for _, places in kept)
            if chosen is suffix:
                assert len(kept[0][0]) == -(-len(suffix) // size)
