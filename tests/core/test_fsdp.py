"""Random batches on 2 FSDP2 ranks (gloo), float64: any group sizes, lengths and placements finish, agree, keep order.
The standalone functions on 2 ranks without FSDP.

Hypothesis draws in this process; two workers, started once, run each case and report. Does not exercise verl, NCCL, or
more than one node. A hang shows as a timeout of the test.
"""

import contextlib
import copy
import functools
import queue
import re
import textwrap
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dialogues import ROWS, VOCAB, one_prompt, thinking_kept, thinking_stripped, tree_search
from dialogues import rollouts as dialogue
from runners import random_rollouts, run_shared, run_stock
from whole_tensors import whole

from verl_prefix import phased_update, response_log_probs
from verl_prefix.core.offload import OffloadedPrefixCache
from verl_prefix.core.prefix_cache import PrefixCache
from verl_prefix.models import hookup

WORLD = 2
STANDALONE = [(9, [7, 5, 6, 3]), (4, [2, 8, 5, 4])]
# HF's fp32 norms set the floor: 6e-8 on gradients (feasibility: float64 model, fp32 RMSNorm).
TOLERANCE = 5e-7

SHAPES = st.lists(
    st.tuples(st.integers(1, 24), st.lists(st.integers(0, 12), min_size=1, max_size=5)), min_size=0, max_size=4
)
CASES = st.fixed_dictionaries(
    {
        "shapes": st.tuples(*[SHAPES | st.sampled_from(ROWS)] * WORLD),
        "schedule": st.sampled_from(["packed", "phased", "auto"]),
        "budget": st.integers(8, 120),
        "wave_tokens": st.one_of(st.none(), st.integers(1, 40)),
        "defer_sync": st.booleans(),
        "mesh": st.sampled_from(["shard", "shard_keep", "replicate"]),
        "checkpoint": st.booleans(),
        "offload": st.booleans(),
        "seed": st.integers(0, 10**6),
    }
)


def build():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.2, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).double().train()


def sharded(model, mesh_name: str):
    """As verl's apply_fsdp2: embeddings, layers, lm_head, the root. "replicate" is HSDP with shards of one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = ((2, 1), ("ddp", "fsdp")) if mesh_name == "replicate" else ((2,), ("fsdp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for module in (model.model.embed_tokens, *model.model.layers, model.lm_head):
        fully_shard(module, mesh=mesh, reshard_after_forward=mesh_name != "shard_keep")
    return fully_shard(model, mesh=mesh, reshard_after_forward=mesh_name != "shard_keep")


def reduce_max(counts):
    tensor = torch.tensor(counts)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


@contextmanager
def gradient_sync(model, defer: bool, last: bool):
    model.set_requires_gradient_sync(last or not defer)
    yield
    model.set_requires_gradient_sync(True)


@contextmanager
def moved_parameters(model):
    """Names of parameters, as they are while their layer runs, whose storage goes to the host."""
    pack, moved = OffloadedPrefixCache._pack, set()

    def spy(self, tensor):
        saved = pack(self, tensor)
        if not isinstance(saved, torch.Tensor):
            gathered = [(n, p) for n, p in model.named_parameters() if type(p) is torch.nn.Parameter]
            moved.update(n for n, p in gathered if p.untyped_storage()._cdata == tensor.untyped_storage()._cdata)
        return saved

    OffloadedPrefixCache._pack = spy
    yield moved
    OffloadedPrefixCache._pack = pack


def run_case(rank: int, truth_model, models: dict, case: dict) -> dict:
    model = models[case["mesh"]]
    shape, seed = case["shapes"][rank], case["seed"] + rank
    rollouts = dialogue(shape, seed) if callable(shape) else random_rollouts(shape, VOCAB, seed=seed)
    truth_model.zero_grad()
    truth = run_stock(truth_model, rollouts)
    every = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in truth_model.parameters()])
    dist.all_reduce(every)
    sizes = [p.numel() for p in truth_model.parameters()]
    for p, mean in zip(truth_model.parameters(), (every / WORLD).split(sizes), strict=True):
        p.grad = mean.view_as(p)

    model.zero_grad()
    if case["checkpoint"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    with moved_parameters(model) as moved, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = run_shared(
            model, rollouts, case["schedule"], case["budget"], case["wave_tokens"], reduce_max=reduce_max,
            gradient_sync=functools.partial(gradient_sync, model, case["defer_sync"]), offload=case["offload"],
        )  # fmt: skip
    grads = whole({name: p.grad for name, p in model.named_parameters()})
    scale = max(p.grad.norm() for p in truth_model.parameters()).clamp(min=1e-6)
    return {
        "moved_parameters": moved,
        "said": [str(warning.message) for warning in said],
        "rows": [len(row) for row in ours] == [len(row) for row in truth],
        "log_probs": max((float((a - b).abs().max()) for a, b in zip(ours, truth, strict=True) if len(a)), default=0.0),
        "grads": max(float((grads[n] - p.grad).norm() / scale) for n, p in truth_model.named_parameters()),
    }


def run_standalone(rank: int) -> dict:
    """Four calls on this rank's rows of eight: their warnings, and gradients after the lines that the warning gives."""
    model, rollouts = build(), random_rollouts(STANDALONE, VOCAB)
    mine = dict(prompts=rollouts.prompts[rank::2], responses=rollouts.responses[rank::2])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.no_grad():
            response_log_probs(model, **mine)
        without_gradients = len(said)
        torch.cat(response_log_probs(model, **mine)).sum().backward()
        for _ in range(2):
            model.zero_grad()
            with phased_update(model, **mine) as waves:
                for wave in waves:
                    (torch.cat(wave.log_probs).sum() / len(mine["prompts"])).backward()
    messages = [str(warning.message) for warning in said]
    for lines in re.findall(r"\n\n(    for parameter .*)", "".join(messages), re.DOTALL):
        exec(textwrap.dedent(lines), {"torch": torch, "model": model})
    return {
        "without_gradients": without_gradients,
        "messages": messages,
        "grads": {name: p.grad.numpy() for name, p in model.named_parameters()},
    }


def run_phase_c(truth_model) -> dict:
    """How phase C gathers parameters, and its gradients, as they are and where nothing tells FSDP2 what comes next."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    rollouts, results = random_rollouts(STANDALONE, VOCAB), {}
    for told in (True, False):
        model, gathers = sharded(copy.deepcopy(truth_model), "shard"), Counter()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        backward, unshard, ahead = PrefixCache.backward, FSDPParamGroup.unshard, FSDPParamGroup._prefetch_unshard
        state = {"phase C": False, "prefetching": False}

        def within(name, function, state=state):
            def called(*args):
                state[name] = True
                function(*args)
                state[name] = False

            return called

        def count(group, *args, state=state, gathers=gathers, unshard=unshard):
            if state["phase C"] and not group.is_unsharded and group._all_gather_result is None:
                gathers["prefetched" if state["prefetching"] else "on demand"] += 1
            unshard(group, *args)

        with ExitStack() as patched:
            patched.enter_context(mock.patch.object(PrefixCache, "backward", within("phase C", backward)))
            patched.enter_context(mock.patch.object(FSDPParamGroup, "unshard", count))
            prefetching = staticmethod(within("prefetching", ahead))
            patched.enter_context(mock.patch.object(FSDPParamGroup, "_prefetch_unshard", prefetching))
            if not told:
                patched.enter_context(mock.patch.object(hookup, "_prefetched_in_backward", lambda model: nullcontext()))
            run_shared(model, rollouts, "phased", wave_tokens=6)
        grads = {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}
        states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
        left = sum(len(state._states_to_backward_prefetch) for state in states)
        results[told] = {"gathers": dict(gathers), "grads": grads, "left": left}
    own = [*reversed(model.model.layers)]
    model.set_modules_to_backward_prefetch(own)
    with hookup.HookedModel(model).grouped_attention():
        results["own"] = model._get_fsdp_state()._states_to_backward_prefetch == [x._get_fsdp_state() for x in own]
    return results


def worker(rank: int, rendezvous: str, inbox, outbox) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    truth_model = build()
    models = {name: sharded(copy.deepcopy(truth_model), name) for name in ("shard", "shard_keep", "replicate")}
    while (case := inbox.get()) is not None:
        special = {"standalone": lambda: run_standalone(rank), "phase C": lambda: run_phase_c(truth_model)}
        outbox.put(special[case]() if isinstance(case, str) else run_case(rank, truth_model, models, case))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, warm):
    context = mp.get_context("forkserver")
    inboxes, outboxes = ([context.Queue() for _ in range(WORLD)] for _ in range(2))
    rendezvous = str(tmp_path_factory.mktemp("fsdp") / "rendezvous")
    processes = [
        context.Process(target=worker, args=(rank, rendezvous, inboxes[rank], outboxes[rank]), daemon=True)
        for rank in range(WORLD)
    ]
    with warm():
        for process in processes:
            process.start()

    def run(case: dict | str) -> list[dict]:
        for inbox in inboxes:
            inbox.put(case)
        return [answer(outbox) for outbox in outboxes]

    def answer(outbox) -> dict:
        while True:
            with contextlib.suppress(queue.Empty):
                return outbox.get(timeout=1)
            assert all(process.is_alive() for process in processes), "a rank failed"

    yield run
    for inbox in inboxes:
        inbox.put(None)
    for process in processes:
        process.join(timeout=30)
        process.kill()


# 110: from this number of tens on, every two of schedule, mesh and switches meet with every value.
@pytest.mark.parametrize("draws", [pytest.param(2, marks=pytest.mark.more), pytest.param(110, marks=pytest.mark.full)])
def test_random_batches_finish_agree_with_stock_and_keep_their_rows(ranks, draws):
    # One rank has no group at all, waves of one row on the other; both empty; a group of many rows against one of one.
    @hypothesis.example(
        dict(shapes=([], [(9, [3, 4, 5])]), schedule="phased", budget=50, wave_tokens=1, defer_sync=True, mesh="shard",
             checkpoint=True, offload=True, seed=0)
    )  # fmt: skip
    @hypothesis.example(
        dict(shapes=([], []), schedule="auto", budget=50, wave_tokens=None, defer_sync=False, mesh="replicate",
             checkpoint=False, offload=True, seed=0)
    )  # fmt: skip
    # Rows that read outputs of strands against rows that do not, against none, and in other numbers of passes.
    @hypothesis.example(
        dict(shapes=(thinking_kept, thinking_stripped), schedule="phased", budget=200, wave_tokens=12, defer_sync=True,
             mesh="shard", checkpoint=False, offload=False, seed=0)
    )  # fmt: skip
    @hypothesis.example(
        dict(shapes=([], tree_search), schedule="phased", budget=60, wave_tokens=12, defer_sync=False, mesh="shard",
             checkpoint=True, offload=True, seed=0)
    )  # fmt: skip
    @hypothesis.example(
        dict(shapes=(thinking_kept, one_prompt), schedule="phased", budget=50, wave_tokens=9, defer_sync=True,
             mesh="replicate", checkpoint=True, offload=False, seed=0)
    )  # fmt: skip
    @hypothesis.given(CASES)
    @hypothesis.settings(max_examples=draws, suppress_health_check=list(hypothesis.HealthCheck))
    def run(case: dict) -> None:
        for rank, result in enumerate(ranks(case)):
            assert result["rows"], f"rank {rank} lost rows"
            assert not result["moved_parameters"], f"rank {rank}"
            assert not any("returned a view" in said for said in result["said"]), f"rank {rank}"
            assert result["log_probs"] < TOLERANCE and result["grads"] < TOLERANCE, f"rank {rank}: {result}"

    run()


def test_phase_c_gathers_layers_ahead_with_the_same_gradients(ranks):
    for result in ranks("phase C"):
        assert result[True]["left"] == 0 and result["own"], "lists of the user, or none, are what is left"
        assert result[True]["gathers"] == {"on demand": 3, "prefetched": 2}, "root, lm_head and embeddings; layers"
        assert result[False]["gathers"] == {"on demand": 5}
        for name, grad in result[True]["grads"].items():
            assert (grad == result[False]["grads"][name]).all(), name


def test_ranks_are_told_once_that_gradients_are_not_averaged_and_how_to(ranks):
    model, rollouts = build(), random_rollouts(STANDALONE, VOCAB)
    (
        torch.cat(response_log_probs(model, rollouts.prompts, rollouts.responses)).sum() / len(rollouts.prompts)
    ).backward()
    for result in ranks("standalone"):
        assert result["without_gradients"] == 0
        assert len(result["messages"]) == 1 and "2 ranks" in result["messages"][0]
        for name, p in model.named_parameters():
            assert (torch.from_numpy(result["grads"][name]) - p.grad).norm() / p.grad.norm() < TOLERANCE, name


@pytest.fixture
def mesh(tmp_path):
    """Of this process alone, on the CPU: else it were an accelerator's, and the simulator's tests make one."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_hooks_of_fsdp2_on_lm_head_leave_logits_in_chunks(mesh):
    from torch.distributed.fsdp import fully_shard

    sizes = []
    rollouts = random_rollouts([(9, [20, 15])], VOCAB)
    truth_model = build()
    truth = run_stock(truth_model, rollouts)
    for group in (False, True):  # verl's way, and lm_head together with the last norm
        model = build()
        head, forward = model.lm_head, model.lm_head.forward
        fully_shard([model.model.norm, head] if group else head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        head.forward = lambda hidden, forward=forward: (sizes.append(hidden.shape[0]), forward(hidden))[1]
        ours = run_shared(model, rollouts, "packed", logits_chunk=8)
        assert torch.allclose(torch.cat(ours), torch.cat(truth), atol=TOLERANCE)
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        assert all(torch.allclose(grads[n], p.grad, atol=TOLERANCE) for n, p in truth_model.named_parameters())
    assert sizes and max(sizes) == 8


@pytest.mark.parametrize("schedule", ["packed", "phased"])
def test_log_probs_that_fsdp2_would_round_are_refused(mesh, schedule):
    """accelerate gives FSDP2 such a policy by default under mixed_precision=bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = fully_shard(build(), mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="cast from torch.float64 to torch.bfloat16, .* with output_dtype=None"):
        run_shared(model, random_rollouts([(9, [20, 15])], VOCAB), schedule)
