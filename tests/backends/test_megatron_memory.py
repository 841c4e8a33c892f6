"""What a rank of verl's own Megatron engine holds, beside what cost model and simulation say."""

import math

import megatron_engines
import pytest
from engines import _batch, _loss
from simulations import H100
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig

pytest.importorskip("megatron.core")

from verl_prefix.auto.cost import Memory  # noqa: E402
from verl_prefix.config.options import PrefixConfig  # noqa: E402
from verl_prefix.core.groups import Group  # noqa: E402
from verl_prefix.tools.simulate import depth  # noqa: E402
from verl_prefix.tools.simulate.job import Arm, Job  # noqa: E402
from verl_prefix.tools.simulate.model import whole_shape  # noqa: E402

# model, ranks, and options of `megatron_engines.engine`
CASES = {
    "one rank": ("qwen3", 1, {}),
    "TP": ("qwen3", 2, {"tp": 2, "sp": True}),
    "TP, tied": ("qwen3_tied", 2, {"tp": 2}),
    "TP, biases": ("qwen2", 2, {"tp": 2}),
    "EP": ("qwen3_moe", 2, {"ep": 2}),
    "DP": ("qwen3_moe", 2, {}),
    "DP, whole optimizer": ("qwen3_moe", 2, {"distributed_optimizer": False}),
    "TP, EP": ("qwen3_moe", 4, {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
    "TP, EP, expert TP": ("glm4_moe", 4, {"tp": 2, "sp": True, "ep": 2}),
    "CP, EP": ("qwen3_moe", 4, {"cp": 2, "ep": 4}),
    "CP, TP": ("qwen3", 4, {"cp": 2, "tp": 2, "sp": True}),
    "TP, DP, whole optimizer": ("llama", 4, {"tp": 2, "sp": True, "distributed_optimizer": False}),
}
WITHOUT_STEP = ("TP, EP, expert TP",)  # ranks gather as many rows as each got, and gloo no parts of unequal sizes


def _held(case: str, path: str) -> tuple[int, int, int, int, int]:
    """Numbers of this rank's parameters and of its gradient buffers, and how many more mcore may pad these with;
    bytes of both, and of what its optimizer keeps, after a step."""
    model, _, options = (CASES | STAGES)[case]
    if case in STAGES:
        options = options | {"pipeline_model_parallel_size": 2}
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    engine = megatron_engines.engine(MegatronEngineWithLMHead, path, model=model, dtype="bfloat16", **options)
    if case not in WITHOUT_STEP:
        with engine.train_mode(disable_auto_offload=True):
            engine.train_batch(_batch(0, engine.model_config.hf_config.vocab_size, {}), _loss({}))
    (chunk,) = engine.module
    parameters = list(chunk.parameters())
    buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
    # param_and_grad_buffer.py: a parameter begins at a multiple of 64, and a bucket ends at one of 128 and its ranks.
    padded = 0
    if options.get("distributed_optimizer", True):
        padded = sum(math.lcm(b.data_parallel_world_size, 128) for b in buffers) + 64 * len(parameters)
    kept = 0
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        main = "shard_fp32_from_float16_groups" if options.get("distributed_optimizer", True) else None
        groups = getattr(optimizer, main or "fp32_from_float16_groups")
        kept += sum(x.nbytes for group in groups for x in group)
        states = optimizer.optimizer.state.values()
        kept += sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
    gradients = sum(b.grad_data.nbytes for b in buffers)
    return sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters), gradients, padded, kept


def _memory(world: int, options: dict, stages: int = 1) -> Memory:
    keys = {
        "tensor_model_parallel_size": options.get("tp", 1), "sequence_parallel": options.get("sp", False),
        "expert_model_parallel_size": options.get("ep", 1), "expert_tensor_parallel_size": options.get("etp"),
        "use_distributed_optimizer": options.get("distributed_optimizer", True),
        "pipeline_model_parallel_size": stages,
    }  # fmt: skip
    return Memory.of_megatron(keys, world, PrefixConfig())


QUICK = ("TP, tied", "TP, biases", "DP, whole optimizer", "TP, EP, expert TP", "CP, EP")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.more) for name in CASES]
)
def test_a_rank_holds_what_is_said_of_it(ranks, tmp_path_factory, name):
    model, world, options = CASES[name]
    path = megatron_engines.write_megatron_model(tmp_path_factory.mktemp("model"), model)
    held = ranks(world)(_held, name, path)
    division = _memory(world, options).division
    job = Job(
        AutoConfig.from_pretrained(path), (Group.of_prompt((0, 1), 64, (64, 64)),), 256,
        Memory(division.tensor, division=division), division.data,
    )  # fmt: skip
    shape = whole_shape(job)
    numbers, said = division.numbers(shape), division.state(shape)
    simulated = depth._run(job, [Arm("packed")], H100, log_probs=False)[0]["optimizer"]
    for parameters, nbytes, gradients, padded, _ in held:
        assert (parameters, nbytes) == (numbers.parameters, said.parameters)
        assert said.gradients <= gradients <= said.gradients + 4 * padded
        assert gradients == pytest.approx(simulated["peak/gradients"], abs=4 * padded)
    if name in WITHOUT_STEP:
        return
    # Ranks of the same parameters share them as they lie in the buffer, padding included: evenly on average.
    kept = [optimizer for *_, optimizer in held]
    assert sum(kept) == pytest.approx(world * said.optimizer, rel=1e-12)
    most = said.optimizer + 12 * max(padded for *_, padded, _ in held)
    assert max(kept) <= most
    assert sum(kept) / world == pytest.approx(simulated["peak/optimizer"], abs=12 * held[0][3])


STAGES = {
    "PP": ("qwen3", 2, {}),
    "PP, tied": ("qwen3_tied", 2, {}),
    "PP, TP": ("qwen2", 4, {"tp": 2, "sp": True}),
    "PP, EP": ("qwen3_moe", 4, {"ep": 2}),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_fullest_stage_holds_what_is_said_of_it(ranks, tmp_path_factory, name):
    """But for vectors: which stage has the last norm is left out."""
    model, world, options = STAGES[name]
    path = megatron_engines.write_megatron_model(tmp_path_factory.mktemp("model"), model)
    held = ranks(world)(_held, name, path)
    memory = _memory(world, options, stages=2)
    assert memory.stages == 2 and memory.division.data == world // 2 // options.get("tp", 1)
    job = Job(AutoConfig.from_pretrained(path), (Group.of_prompt((0, 1), 64, (64, 64)),), 256, memory)
    said = memory.division.state(whole_shape(job))
    parameters, gradients, kept = (max(of) for of in zip(*((x[1], x[2], x[4]) for x in held), strict=True))
    assert parameters == pytest.approx(said.parameters, rel=0.01)
    padded = 4 * max(x[3] for x in held)
    assert gradients == pytest.approx(said.gradients, rel=0.01, abs=padded)
    assert kept == pytest.approx(said.optimizer, rel=0.01, abs=3 * padded)


def _waiting(path: str, offload: bool) -> tuple[int, list[int], list[int]]:
    """Of an update on two stages whose prefixes may wait in host memory: how many there are, how many hidden states are
    on the device and of how many prefixes keys, values or their gradients, before each pass."""
    from verl_prefix.backends.megatron import PrefixMegatronEngine
    from verl_prefix.backends.pipeline import PipelineRunner
    from verl_prefix.core.forward import PackedForward
    from verl_prefix.models.mcore_pipeline import Neighbours

    prefix = {"schedule": "phased", "wave_tokens": 20, "offload": offload, "verify": "off"}
    engine = megatron_engines.engine(PrefixMegatronEngine, path, prefix=prefix, pipeline_model_parallel_size=2)
    groups = [(uid, 41, [9, 10, 8], "") for uid in "abcdef"]
    hidden, caches, of_hidden, of_caches = list[StorageWeakRef](), [], list[int](), list[int]()

    def spied(owner: type, name: str, spy) -> None:
        own = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: spy(own, *args, **kwargs))

    def received(own, *args):
        if (found := own(*args)) is not None:
            hidden.append(StorageWeakRef(found.untyped_storage()))
        return found

    def sent(own, neighbours, output):
        if output.dim() == 3:  # not the last stage's, of lm_head
            hidden.append(StorageWeakRef(output.untyped_storage()))
        own(neighbours, output)

    def begun(own, *args):
        found = own(*args)
        caches.extend(found.phase_a.caches)
        return found

    def ran(own, *args, **kwargs):
        of_hidden.append(sum(not ref.expired() for ref in hidden))
        if offload:
            shelved = ([*cache._stored._shelved.values(), *cache._grads._shelved.values()] for cache in caches)
            of_caches.append(sum(any(one.on_device is not None for one in each) for each in shelved))
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, engine.train_mode(disable_auto_offload=True):
        spied(Neighbours, "receive_hidden", received)
        spied(Neighbours, "send_hidden", sent)
        spied(PipelineRunner, "_begin", begun)
        spied(PackedForward, "packed", ran)
        spied(PipelineRunner, "_phase_c", ran)
        vocab = engine.model_config.hf_config.vocab_size
        engine.forward_backward_batch(_batch(0, vocab, {"groups": groups, "budget": 60}), _loss({}))
    return len(caches), of_hidden, of_caches


def test_prefixes_that_wait_on_the_host_have_nothing_on_the_device(ranks, tmp_path):
    """But for those of the waves that are in the pipeline."""
    path = megatron_engines.write_megatron_model(tmp_path, "qwen3")
    for prefixes, of_hidden, of_caches in ranks(2)(_waiting, path, True):
        assert prefixes == 6 and max(of_hidden) == 0
        assert of_caches[0] == 0 and 1 <= max(of_caches) <= 2


def test_hidden_states_go_with_their_phase_c(ranks, tmp_path):
    """Of the last round, which has two phased passes."""
    path = megatron_engines.write_megatron_model(tmp_path, "qwen3")
    for _, of_hidden, _ in ranks(2)(_waiting, path, False):
        assert of_hidden[-2:] == [2, 1]
