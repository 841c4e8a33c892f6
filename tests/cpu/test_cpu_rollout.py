"""The HF rollout samples what the model says, once per prefix, reproducibly; all tests but one run it without Ray."""

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from whole_tensors import check_put_together

from verl_prefix.testing import write_tiny_model

pytest.importorskip("verl")

from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig  # noqa: E402
from verl.workers.rollout.replica import RolloutMode, TokenOutput  # noqa: E402

from verl_prefix.cpu import rollout  # noqa: E402
from verl_prefix.cpu.prompts import Prompt  # noqa: E402
from verl_prefix.cpu.rollout import HFReplica, HFServerAdapter  # noqa: E402
from verl_prefix.cpu.server import HFServer, Request, Sampler, Sampling  # noqa: E402

MakeServer = Callable[..., HFServer]
# 1 token has an empty prefix; 40 is longer than the sliding window below.
PROMPTS = [list(range(5, 5 + length)) for length in (17, 1, 3, 40)]
GREEDY = {"temperature": 0.0, "logprobs": True}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(model_path: str) -> MakeServer:
    """Return a function from rollout fields and a model path to a server whose logits are peaked, not uniform."""

    def make_server(path: str = model_path, **fields: Any) -> HFServer:
        fields = {"prompt_length": 64, "response_length": 11, "max_num_seqs": 32, "dtype": "float32"} | fields
        config = RolloutConfig(name="hf", tensor_model_parallel_size=1, **fields)
        built = HFServer(config, HFModelConfig(path=path, override_config={"attn_implementation": "sdpa"}))
        with torch.no_grad():
            built.model.lm_head.weight.mul_(4.0)
        return built

    return make_server


def ask(built: HFServer, prompts: list[list[int]], **params: Any) -> list[TokenOutput]:
    """Send all prompts at once and return their outputs in order."""
    params = {"logprobs": True} | params

    async def gather() -> list[TokenOutput]:
        return await asyncio.gather(*(built.generate(prompt, params, request_id="") for prompt in prompts))

    return asyncio.run(gather())


def tokens_of(outputs: list[TokenOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def full_logits(built: HFServer, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """Return the logits [S, V] that predict ``token_ids`` after ``prompt``, from one forward without a cache."""
    with torch.no_grad():
        return built.model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]


SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}


RECURRENT = [(family, {}) for family in ("qwen3_5_text", "olmo_hybrid", "lfm2", "granitemoehybrid", "bamba")]


@pytest.mark.parametrize(("family", "overrides"), [("qwen3", {}), ("qwen3", SLIDING), ("llama", {}), *RECURRENT])
def test_greedy_batch_equals_generate_of_each_prompt_alone(
    make: MakeServer, tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    built = make(write_tiny_model(tmp_path, family=family, **overrides))
    for prompt, output in zip(PROMPTS, ask(built, PROMPTS, **GREEDY), strict=True):
        ids = torch.tensor([prompt])
        expected = built.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=11, pad_token_id=0,
            eos_token_id=list(built.eos_ids),
        )  # fmt: skip
        assert output.token_ids == expected[0, len(prompt) :].tolist()
        assert output.stop_reason == "completed"


def test_a_running_server_listens_on_no_port(make: MakeServer) -> None:
    """Requests come through Ray alone."""
    process = psutil.Process()
    before = [x for x in process.net_connections("inet") if x.status == psutil.CONN_LISTEN]
    built, during = make(), []

    async def serve() -> None:
        request = asyncio.create_task(built.generate(PROMPTS[0], {}, request_id=""))
        await asyncio.sleep(0)
        during.extend(x for x in process.net_connections("inet") if x.status == psutil.CONN_LISTEN)
        assert not request.done()
        await request

    asyncio.run(serve())
    assert not set(during) - set(before)


def test_left_padding_changes_neither_samples_nor_log_probs(make: MakeServer) -> None:
    built = make()
    together = ask(built, PROMPTS)
    built.seen.clear()
    alone = [ask(built, [prompt])[0] for prompt in PROMPTS]
    assert tokens_of(together) == tokens_of(alone)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=5e-6)


def test_the_prefix_of_equal_prompts_goes_through_the_model_once(make: MakeServer) -> None:
    built = make()
    shapes: list[tuple[int, ...]] = []
    built.model.register_forward_pre_hook(
        lambda _module, args, kwargs: shapes.append(tuple((args[0] if args else kwargs["input_ids"]).shape)),
        with_kwargs=True,
    )
    ask(built, [PROMPTS[0]] * 5, max_tokens=3, ignore_eos=True)
    assert shapes == [(1, 16), (5, 1), (5, 1), (5, 1)]


def test_log_probs_are_those_of_a_full_forward_at_the_sampling_temperature(make: MakeServer) -> None:
    built = make()
    for prompt, output in zip(PROMPTS, ask(built, PROMPTS, temperature=0.7), strict=True):
        log_probs = (full_logits(built, prompt, output.token_ids) / 0.7).log_softmax(-1)
        expected = log_probs.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=5e-6)
        assert expected.std() > 0.1


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.6, "temperature": 1.7}])
def test_top_k_and_top_p_bound_the_choice_and_renormalise_its_log_prob(
    make: MakeServer, params: dict[str, float]
) -> None:
    built = make()
    prompt, outside = PROMPTS[0], 0
    for output in ask(built, [prompt] * 6, **params):
        logits = full_logits(built, prompt, output.token_ids).double() / params.get("temperature", 1.0)
        for row, token, log_prob in zip(logits, output.token_ids, output.log_probs, strict=True):
            probs, order = row.softmax(-1).sort(descending=True)
            probs = probs[: params.get("top_k", len(probs))]
            probs = probs / probs.sum()
            kept = probs[probs.cumsum(0) - probs < params.get("top_p", 1.0)]
            rank = order.tolist().index(token)
            assert rank < len(kept)
            assert log_prob == pytest.approx((kept[rank] / kept.sum()).log().item(), abs=1e-5)
            outside += rank > 0
    assert outside > 0, "always the most likely token: this shows nothing"


def test_sampler_draws_each_token_as_often_as_its_probability() -> None:
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, stop_ids=())
    requests = [Request(Prompt((1,)), 1, sampling, seed, future=None) for seed in range(4000)]
    sampler = Sampler(requests, input_len=1)
    probs = torch.tensor([0.05, 0.6, 0.0, 0.35])
    chosen = sampler.choose(torch.ones(4000, 1, dtype=torch.long), probs.log().expand(4000, 4)).argmax(-1)
    frequency = torch.bincount(chosen, minlength=4) / 4000
    torch.testing.assert_close(frequency, probs, rtol=0, atol=4 * (0.25 / 4000) ** 0.5)
    assert frequency[2] == 0
    first_is_impossible = torch.tensor([0.0, 0.5, 0.0, 0.5]).log().expand(4000, 4)
    assert (sampler.choose(torch.ones(4000, 1, dtype=torch.long), first_is_impossible).argmax(-1) % 2 == 1).all()


def test_rounding_of_logits_changes_no_token() -> None:
    """As another batch's shapes round them, at a large vocabulary. Inverting the CDF changes 16 of these tokens."""
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, stop_ids=())
    requests = [Request(Prompt((1,)), 1, sampling, seed, future=None) for seed in range(1000)]
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(1000, 20000, generator=generator)
    noise = 1e-4 * torch.randn(1000, 20000, generator=generator)
    ids = torch.ones(1000, 1, dtype=torch.long)
    plain, disturbed = (Sampler(requests, input_len=1).choose(ids, x).argmax(-1) for x in (scores, scores + noise))
    assert (plain == disturbed).all()
    assert len(plain.unique()) > 800


def test_a_response_ends_with_eos_or_a_stop_token_unless_eos_is_ignored(make: MakeServer) -> None:
    built = make()
    (free,) = tokens_of(ask(built, [PROMPTS[0]], **GREEDY, ignore_eos=True))
    end = free.index(free[3]) + 1
    assert len(free) == 11
    assert tokens_of(ask(built, [PROMPTS[0]], **GREEDY, stop_token_ids=[free[3]])) == [free[:end]]
    built.eos_ids = (free[3],)
    first, second = ask(built, [PROMPTS[0], PROMPTS[3]], **GREEDY)
    assert first.token_ids == free[:end] and len(first.log_probs) == end
    assert len(second.token_ids) > end, "the row that goes on must not be cut with the row that ends"
    assert tokens_of(ask(built, [PROMPTS[0]], **GREEDY, ignore_eos=True)) == [free]


def test_each_row_of_a_batch_has_its_own_max_tokens(make: MakeServer) -> None:
    built = make()
    params = {**GREEDY, "ignore_eos": True}

    async def both() -> list[TokenOutput]:
        calls = (built.generate(PROMPTS[0], params | {"max_tokens": n}, request_id="") for n in (2, 7))
        return await asyncio.gather(*calls)

    short, long = asyncio.run(both())
    assert (len(short.token_ids), len(short.log_probs), len(long.token_ids)) == (2, 2, 7)
    assert long.token_ids[:2] == short.token_ids


def test_the_same_requests_draw_the_same_samples_in_any_order_and_batch(make: MakeServer, model_path: str) -> None:
    prompts = PROMPTS * 3
    first = tokens_of(ask(make(), prompts))
    small = tokens_of(ask(make(max_num_seqs=2), prompts))
    backwards = tokens_of(ask(make(), PROMPTS[::-1] * 3))
    assert first == small
    assert [backwards[i : i + 4][::-1] for i in (0, 4, 8)] == [first[i : i + 4] for i in (0, 4, 8)]
    assert len({tuple(tokens) for tokens in first[::4]}) == 3, "samples of one prompt must differ"
    assert tokens_of(ask(make(seed=7), prompts)) != first
    later = make()
    later.version = 1
    assert tokens_of(ask(later, prompts)) != first


def test_a_batch_holds_whole_groups_and_at_most_max_num_seqs(make: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    built, batches = make(max_num_seqs=3), []
    generate = built._generate
    monkeypatch.setattr(
        built, "_generate", lambda batch: batches.append([len(r.prompt) for r in batch]) or generate(batch)
    )
    a, b, c = PROMPTS[0], PROMPTS[2], PROMPTS[3]
    ask(built, [a, b, a, b, c, c, c, c])
    assert batches == [[17, 17], [3, 3], [40, 40, 40], [40]]


def test_a_request_that_does_not_fit_fails_alone_and_says_why(make: MakeServer) -> None:
    built = make(max_model_len=30)

    async def both() -> list[TokenOutput | BaseException]:
        calls = (built.generate(prompt, {}, request_id="") for prompt in (PROMPTS[3], PROMPTS[0]))
        return await asyncio.gather(*calls, return_exceptions=True)

    long, short = asyncio.run(both())
    assert isinstance(long, ValueError) and "40 tokens" in str(long) and "30 positions" in str(long)
    assert len(short.token_ids) > 0


def test_a_failing_batch_fails_its_requests_and_the_server_goes_on(
    make: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = make()
    monkeypatch.setattr(built.model, "generate", lambda *_args, **_kwargs: torch.zeros(1)[3])
    with pytest.raises(IndexError):
        ask(built, PROMPTS)
    monkeypatch.undo()
    assert len(ask(built, PROMPTS)) == 4


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"repetition_penalty": 1.2}])
def test_a_sampling_parameter_that_cannot_act_raises(make: MakeServer, params: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        ask(make(), PROMPTS, **params)


def test_weights_arrive_in_buckets_and_a_tied_head_may_come_once(make: MakeServer, tmp_path: Path) -> None:
    built = make(write_tiny_model(tmp_path / "tied", tie_word_embeddings=True))
    other = make(write_tiny_model(tmp_path / "other", tie_word_embeddings=True, seed=1))
    weights = [(name, weight) for name, weight in other.model.state_dict().items() if name != "lm_head.weight"]

    async def sync() -> None:
        await built.update_weights(weights[:5], last=False, version=None)
        await built.update_weights(weights[5:], last=True, version=3)

    def greedy_log_probs(asked: HFServer) -> list[list[float]]:
        return [output.log_probs for output in ask(asked, PROMPTS, **GREEDY)]

    before = greedy_log_probs(built)
    asyncio.run(sync())
    assert greedy_log_probs(built) == greedy_log_probs(other) != before
    first = ask(built, PROMPTS)
    assert first[0].extra_fields["global_steps"] == 3
    assert tokens_of(ask(built, PROMPTS)) != tokens_of(first)
    asyncio.run(sync())
    assert tokens_of(ask(built, PROMPTS)) == tokens_of(first), "numbering of requests starts again with each sync"


def test_an_unexpected_missing_or_misshapen_weight_raises_with_its_name(make: MakeServer) -> None:
    weights = dict(make().model.state_dict())
    with pytest.raises(RuntimeError, match="'model.extra'"):
        asyncio.run(make().update_weights([*weights.items(), ("model.extra", torch.ones(1))], True, 1))
    with pytest.raises(RuntimeError, match="norm.weight"):
        asyncio.run(make().update_weights([*weights.items(), ("model.norm.weight", torch.ones(3))], True, 1))
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match="'model.layers.1.mlp.up_proj.weight'"):
        asyncio.run(make().update_weights(list(weights.items()), True, 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_draws_all_weights_and_rank_0_sends_bounded_buckets(
    monkeypatch: pytest.MonkeyPatch, model_path: str, rank: int
) -> None:
    sent: list[tuple[int, bool, int | None]] = []

    async def remote(bucket: list[tuple[str, torch.Tensor]], last: bool, version: int | None) -> None:
        sent.append((len(bucket), last, version))

    handle = SimpleNamespace(update_weights=SimpleNamespace(remote=remote))
    monkeypatch.setattr(rollout, "actor_name", lambda: "the job's")
    monkeypatch.setattr(rollout.ray, "get_actor", {"the job's": handle}.__getitem__)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    config = RolloutConfig(
        name="hf", dtype="float32", checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=1)
    )
    adapter = HFServerAdapter(config, HFModelConfig(path=model_path), device_mesh=None)
    # 0.4 MiB each as float32: two fit into a bucket of 1 MiB
    weights = iter([(f"w{i}", torch.zeros(100 << 10, dtype=torch.bfloat16)) for i in range(5)])
    asyncio.run(adapter.update_weights(weights, global_steps=4))
    assert next(weights, None) is None
    assert sent == ([(2, False, None), (2, False, None), (1, True, 4)] if rank == 0 else [])
    with pytest.raises(ValueError, match="delta_flush"):
        asyncio.run(adapter.update_weights(iter(()), wire_format="delta_flush"))


def test_a_pause_ends_responses_with_what_they_have_and_later_ones_wait(
    make: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = make(response_length=60, prompt_length=200)
    built.eos_ids = ()
    steps, is_paused, wait = [], built._is_paused, built.running.wait

    def pauses_at_the_third(*args: torch.Tensor) -> torch.Tensor:
        steps.append(len(steps))
        if len(steps) == 3:
            built.pause()
        return is_paused(*args)

    monkeypatch.setattr(built, "_is_paused", pauses_at_the_third)

    async def paused() -> tuple[list[TokenOutput], bool, TokenOutput]:
        cut = await asyncio.gather(*(built.generate(prompt, dict(GREEDY), request_id="") for prompt in PROMPTS))
        waits = asyncio.Event()
        monkeypatch.setattr(built.running, "wait", lambda: (waits.set(), wait())[1])
        resumed = [*PROMPTS[0], *cut[0].token_ids]
        params = GREEDY | {"max_tokens": 60 - len(cut[0].token_ids)}
        second = asyncio.create_task(built.generate(resumed, params, request_id=""))
        await asyncio.wait_for(waits.wait(), 300)
        for _ in range(100):
            await asyncio.sleep(0)
        waited = not second.done() and len(steps) == 3
        built.resume()
        return cut, waited, await second

    cut, waited, rest = asyncio.run(paused())
    assert waited and all(output.stop_reason == "aborted" and len(output.token_ids) == 3 for output in cut)
    (whole,) = ask(built, PROMPTS[:1], **GREEDY)
    assert cut[0].token_ids + rest.token_ids == whole.token_ids and rest.stop_reason == "completed"


@pytest.mark.parametrize(
    ("fields", "model", "mode", "named"),
    [
        ({"tensor_model_parallel_size": 2}, {}, RolloutMode.HYBRID, "tensor_model_parallel_size=1"),
        ({"logprobs_mode": "raw_logprobs"}, {}, RolloutMode.HYBRID, "processed_logprobs"),
        ({}, {"lora_rank": 8, "lora": {"merge": False}}, RolloutMode.HYBRID, "lora.merge=True"),
        ({}, {}, RolloutMode.COLOCATED, "use a reward function"),
        ({"nnodes": 1, "n_gpus_per_node": 2}, {}, RolloutMode.STANDALONE, "n_gpus_per_node=2 .*set both to 1"),
    ],
)
def test_a_rollout_that_cannot_serve_raises_before_it_starts_an_actor(
    fields: dict[str, Any], model: dict[str, Any], mode: RolloutMode, named: str
) -> None:
    config = RolloutConfig(**{"name": "hf", "tensor_model_parallel_size": 1} | fields)
    replica = HFReplica(0, config, OmegaConf.create(model))
    replica.rollout_mode = mode
    with pytest.raises(ValueError, match=named):
        asyncio.run(replica.launch_servers())


LAUNCH = """
import asyncio, os
from omegaconf import OmegaConf
import ray
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import RolloutMode
from verl_prefix.cpu.rollout import HFReplica
options = {"runtime_env": {"py_executable": os.environ["EXE"]}, "include_dashboard": False, "log_to_driver": False}
ray.init(os.environ["CLUSTER"], namespace="shared", **options)
config = RolloutConfig(
    name="hf", tensor_model_parallel_size=1, prompt_length=64, response_length=11, max_num_seqs=32, dtype="float32"
)
model = {"_target_": "verl.workers.config.HFModelConfig", "path": os.environ["MODEL"]}
model["override_config"] = {"attn_implementation": "sdpa"}
replica = HFReplica(0, config, OmegaConf.create(model))
replica.rollout_mode = RolloutMode.HYBRID
asyncio.run(replica.launch_servers())
server = replica._server_handle
"""


@pytest.mark.more
def test_two_jobs_of_one_cluster_and_namespace_have_a_server_each(
    monkeypatch: pytest.MonkeyPatch, model_path: str, python: str, tmp_path: Path
) -> None:
    environment = {"EXE": python, "MODEL": model_path, "CLUSTER": "local"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    job: dict[str, Any] = {}
    try:
        exec(LAUNCH, job)
        address = ray.get_runtime_context().gcs_address
        code = f"{LAUNCH}\nprint(server._actor_id.hex(), replica._server_address)"
        other = subprocess.run(
            [python, "-c", code], env=os.environ | {"CLUSTER": address}, capture_output=True, text=True, timeout=300
        )
        assert other.returncode == 0, other.stderr
        mine = [job["server"]._actor_id.hex(), job["replica"]._server_address]
        assert not set(mine) & set(other.stdout.split())
        # A worker of this job finds this job's server.
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        adapter = HFServerAdapter(job["config"], HFModelConfig(path=model_path), device_mesh=None)
        weights = AutoModelForCausalLM.from_pretrained(model_path).state_dict().items()
        asyncio.run(adapter.update_weights(weights, global_steps=4))
        said = ray.get(job["server"].generate.remote(PROMPTS[0], {}, request_id=""), timeout=300)
        assert said.extra_fields == {"global_steps": 4}
    finally:
        ray.shutdown()


def test_experts_that_verl_took_apart_are_put_together(tmp_path) -> None:
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    weights = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path, family="qwen3_moe")).state_dict()
    apart = dict(unfuse_moe_params(weights.items(), "qwen3_moe"))
    check_put_together(apart, weights)
