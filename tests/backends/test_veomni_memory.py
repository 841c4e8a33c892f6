"""What a rank of VeOmni's own engine holds and gathers of experts, beside what cost model and simulation say."""

import pytest

pytest.importorskip("veomni")

import veomni_engines  # noqa: E402
from simulations import H100  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from verl_prefix.auto.cost import Memory
from verl_prefix.config.options import PrefixConfig  # noqa: E402
from verl_prefix.core.groups import Group  # noqa: E402
from verl_prefix.testing import write_tiny_model  # noqa: E402
from verl_prefix.tools.simulate import depth  # noqa: E402
from verl_prefix.tools.simulate.job import Arm, Job  # noqa: E402
from verl_prefix.tools.simulate.model import whole_shape  # noqa: E402


def _held(folder: str, expert_ranks: int, fsdp_size: int) -> tuple[float, float, float, int, int]:
    """Bytes of this rank's shards, of experts and of all else; parameters of experts that it gathers; the cost model's
    numbers of ranks that share parameters, and experts."""
    options = {"expert_parallel_size": expert_ranks, "fsdp_size": fsdp_size, "moe_implementation": "fused_triton"}
    engine = veomni_engines._engine("prefix_veomni", folder, options)
    parameters = dict(engine.module.named_parameters())
    experts = {name: x for name, x in parameters.items() if ".experts." in name}
    held = [sum(x.to_local().nbytes for x in of.values()) for of in (experts, parameters)]
    memory = engine.backend.memory(PrefixConfig())
    gathered = sum(x.numel() for x in experts.values())
    return held[0], held[1] - held[0], gathered, memory.ranks, memory.expert_ranks


@pytest.mark.parametrize(("expert_ranks", "fsdp_size"), [(1, -1), (2, -1), (4, -1), (2, 2)])
def test_a_rank_holds_and_gathers_what_is_said_of_it(ranks, tmp_path_factory, expert_ranks, fsdp_size):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, family="qwen3_moe")
    shape = whole_shape(Job(config := AutoConfig.from_pretrained(folder), (), 1))
    job = Job(
        config, (Group.of_prompt((0, 1), 64, (64, 64)),), 256,
        Memory(4 if fsdp_size < 0 else fsdp_size, veomni=True, expert_ranks=expert_ranks), 1 if fsdp_size < 0 else 2,
    )  # fmt: skip
    simulated = depth._run(job, [Arm("packed")], H100, log_probs=False)[0]["optimizer"]["peak/parameters"]
    for experts, others, gathered, shared_by, experts_by in ranks(4)(_held, str(folder), expert_ranks, fsdp_size):
        assert (shared_by, experts_by) == (job.memory.ranks, expert_ranks)
        assert experts == 4 * shape.expert_parameters / job.memory.ranks
        assert gathered == shape.expert_parameters / expert_ranks
        assert experts + others == pytest.approx(4 * shape.parameters / job.memory.ranks, rel=0.05)
        assert experts + others == pytest.approx(simulated, rel=0.05)
