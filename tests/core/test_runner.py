"""Packed and phased against the repeated-prefix model (HF's own forward, row by row): an identity, so tested as one.

float64 and 1e-9 relative on log-probs, every gradient and the weights after an AdamW step. HF's RMSNorm computes in
fp32 whatever its input is, which alone sets a floor of about 6e-8 on gradients: the models here use a float64 norm.
Kernels: torch's CPU flash attention and the dense reference. Does not exercise FSDP (tests/core/test_fsdp.py).
"""

import dataclasses
import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from runners import random_rollouts, run_shared, run_stock
from schedules import errors, measure
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from verl_prefix.core import forward, groups, packed_row, planning, prefix_cache
from verl_prefix.core import runner as core_runner
from verl_prefix.core.forward import PackedForward
from verl_prefix.core.kernels import cpu
from verl_prefix.core.kernels import merge as merging
from verl_prefix.core.runner import PlanRunner
from verl_prefix.models.hookup import HookedModel
from verl_prefix.testing.rollouts import flatten

TOLERANCE = 1e-9
FIELDS = dict(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16, initializer_range=0.1, attn_implementation="sdpa",
)  # fmt: skip
MODELS = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
# Ragged groups, a group of one, 1-token prompts, a 1-token response, a 2-token prompt (prefix of one).
SHAPE = [(23, [9, 17, 5]), (1, [6, 4]), (41, [3, 1, 11, 7, 2]), (7, [13]), (2, [8, 3])]
SCHEDULES = {
    "packed": dict(schedule="packed"),
    "packed_in_pieces": dict(schedule="packed", budget=50),
    "phased": dict(schedule="phased"),
    "phased_row_by_row": dict(schedule="phased", wave_tokens=1),
    "phased_some_rows": dict(schedule="phased", wave_tokens=19),
    "phased_many_phase_a": dict(schedule="phased", budget=30, wave_tokens=19),
    "auto": dict(schedule="auto", budget=60),
}


@pytest.fixture(autouse=True)
def float64_norms(monkeypatch):
    def forward(self, hidden_states):
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden_states * scale

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", forward)


def build(family: str = "llama", **overrides):
    torch.manual_seed(0)
    model_class, config_class = MODELS[family]
    return model_class(config_class(**FIELDS | overrides)).double()


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        ("llama", "cpu"),
        ("qwen3", "reference"),
        *(pytest.param(*one, marks=pytest.mark.more) for one in (("llama", "reference"), ("qwen3", "cpu"))),
    ],
)
def test_schedule_equals_repeated_prefix(family, kernel, options):
    model, rollouts = build(family), random_rollouts(SHAPE, 97)
    truth = measure(model, lambda: run_stock(model, rollouts))
    ours = measure(model, lambda: run_shared(model, rollouts, kernel=kernel, **options))
    assert max(errors(ours, truth).values()) < TOLERANCE


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=["mha", "mqa"])
def test_head_layouts_equal_repeated_prefix(heads):
    model = build(num_attention_heads=heads[0], num_key_value_heads=heads[1], hidden_size=64)
    rollouts = random_rollouts(SHAPE, 97)
    truth = measure(model, lambda: run_stock(model, rollouts))
    for schedule in ("packed", "phased"):
        ours = measure(model, lambda schedule=schedule: run_shared(model, rollouts, schedule))
        assert max(errors(ours, truth).values()) < TOLERANCE


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_gradient_checkpointing_changes_nothing(options, reentrant):
    model, rollouts = build(), random_rollouts(SHAPE, 97)
    truth = measure(model, lambda: run_stock(model, rollouts))
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ours = measure(model, lambda: run_shared(model, rollouts, **options))
    assert max(errors(ours, truth).values()) < TOLERANCE


def rows_stand_alone(model) -> bool:
    """Whether this CPU's matrix products give a row the same bits beside 4 rows or more of any number."""
    weights = {p.shape: p for p in model.parameters() if p.dim() == 2}.values()
    inputs = [(w, torch.randn(97, w.shape[1], generator=torch.Generator().manual_seed(0))) for w in weights]
    return all(torch.equal((x @ w.T)[:n], x[:n] @ w.T) for w, x in inputs for n in range(4, len(x)))


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_log_probs_are_the_same_bits_in_every_schedule_and_pass(options):
    """To the bit where the CPU's matrix products allow it (MKL's for AVX2 and AVX-512 do, its SSE2 ones do not)."""
    shape = [(prompt_len, [n + 3 for n in lens]) for prompt_len, lens in SHAPE if prompt_len > 4]
    model, rollouts = build().float(), random_rollouts(shape, 97)
    packed = torch.cat(run_shared(model, rollouts, "packed", kernel="cpu", train=False))
    tolerance = 0.0 if rows_stand_alone(model) else 1e-6
    for train in (True, False):
        found = torch.cat(run_shared(model, rollouts, kernel="cpu", train=train, **options))
        assert (found - packed).norm() <= tolerance * packed.norm()


def test_model_keeps_its_attention_implementation():
    model, rollouts = build(), random_rollouts(SHAPE, 97)
    run_shared(model, rollouts, "packed")
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(IndexError):
        run_shared(model, dataclasses.replace(rollouts, prompts=[p + 97 for p in rollouts.prompts]), "packed")
    assert model.config._attn_implementation == "sdpa"


# Wrong on purpose: each must miss by 100 tolerances at least, or the tests above prove nothing.


def broken(monkeypatch, name: str) -> dict:
    """Breaks the maths and returns the `run_shared` options under which it shows."""
    if name == "positions_restarted":

        def edit(tokens, plan):
            positions = tokens.position_ids.clone()
            for planned in plan.passes:
                for group in planned.groups:
                    for row in group.rows:
                        start, end = tokens.offsets[row] + group.num_own_strand_tokens, tokens.offsets[row + 1]
                        positions[start:end] -= group.num_own_strand_tokens
            return dataclasses.replace(tokens, position_ids=positions)

        return dict(schedule="packed", edit=edit)
    if name == "prefix_detached":
        monkeypatch.setattr(prefix_cache.PrefixCache, "add_grad", lambda *args: None)
        return dict(schedule="phased")
    if name == "grad_cache_counted_twice":
        add_grad = prefix_cache.PrefixCache.add_grad

        def twice(self, *args):
            add_grad(self, *args)
            add_grad(self, *args)

        monkeypatch.setattr(prefix_cache.PrefixCache, "add_grad", twice)
        return dict(schedule="phased")
    if name == "suffixes_see_each_other":
        make = packed_row.pack_groups

        def one_block(*args, **options):
            right = make(*args, **options)
            prefixes = [segment for segment in right.segments if not segment.path]
            suffixes = [segment for segment in right.segments if segment.path]
            blocks = [list(rows) for _, rows in itertools.groupby(suffixes, key=lambda segment: segment[1:])]
            one = [rows[0]._replace(length=sum(segment.length for segment in rows)) for rows in blocks]
            return dataclasses.replace(right, segments=(*prefixes, *one))

        monkeypatch.setattr("verl_prefix.core.runner.pack_groups", one_block)
        return dict(schedule="packed")
    if name == "last_prefix_token_hidden":
        make = packed_row.pack_groups

        def shorter(*args, **options):
            right = make(*args, **options)
            segments = tuple(s._replace(path=tuple((a, n - 1) for a, n in s.path if n > 1)) for s in right.segments)
            return dataclasses.replace(right, segments=segments)

        monkeypatch.setattr("verl_prefix.core.runner.pack_groups", shorter)
        return dict(schedule="packed")
    if name == "suffix_share_of_prefix_gradient_lost":
        backward = cpu.backward

        def lossy(dout, saved, call):
            dq, dk, dv = backward(dout, saved, call)
            return (dq, dk, dv) if call.causal else (dq, dk * 0, dv * 0)

        monkeypatch.setattr(cpu, "backward", lossy)
        return dict(schedule="packed")
    if name == "partial_lse_in_backward":
        monkeypatch.setattr(merging, "merge", lambda out, lse, *rest: (merge(out, lse, *rest)[0], lse))
        return dict(schedule="packed")
    raise AssertionError(name)


merge = merging.merge
BROKEN = [
    "positions_restarted", "prefix_detached", "grad_cache_counted_twice", "suffixes_see_each_other",
    "last_prefix_token_hidden", "suffix_share_of_prefix_gradient_lost", "partial_lse_in_backward",
]  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_maths_is_far_off(monkeypatch, name):
    model, rollouts = build(), random_rollouts(SHAPE, 97)
    truth = measure(model, lambda: run_stock(model, rollouts))
    options = broken(monkeypatch, name)
    ours = measure(model, lambda: run_shared(model, rollouts, kernel="cpu", **options))
    assert max(errors(ours, truth).values()) > 100 * 5e-6, "a broken schedule passes even the fp32 tolerance"


def weighted_log_probs(tokens, weights, log_probs):
    """`of_logits` and `step` whose loss is a weighted sum of log-probs, which `log_probs` gets."""

    def of_logits(places, logits):
        return logits.log_softmax(-1).gather(-1, tokens.input_ids[places + 1].unsqueeze(-1))

    def step(packed_row, outputs):
        log_probs[packed_row.output_places + 1] = outputs[:, 0].detach()
        return (outputs[:, 0] * weights[packed_row.output_places + 1]).sum()

    return of_logits, step


def test_the_usage_of_the_readme_equals_repeated_prefix():
    """The lines of Python in verl_prefix/core/README.md."""
    lines = (Path(core_runner.__file__).parent / "README.md").read_text().split("```python\n")[1].split("```")[0]
    model, rollouts = build(), random_rollouts(SHAPE, 97)
    tokens, weights, _ = flatten(rollouts, torch.device("cpu"))
    log_probs = torch.zeros(len(weights), dtype=torch.float64)

    of_logits, step = weighted_log_probs(tokens, weights, log_probs)

    def ours():
        given = dict(
            keys=[tuple(prompt.tolist()) for prompt in rollouts.prompts], prompt_lens=[*map(len, rollouts.prompts)],
            response_lens=[*map(len, rollouts.responses)], budget=60, reduce_max=lambda counts: counts, torch=torch,
            model=HookedModel(model), of_logits=of_logits, step=step, input_ids=tokens.input_ids,
            position_ids=tokens.position_ids, offsets=tokens.offsets,
        )  # fmt: skip
        exec(lines, vars(planning) | vars(forward) | vars(groups) | vars(core_runner) | given)
        ends = zip(rollouts.prompts, tokens.offsets, tokens.offsets[1:], strict=False)
        return [log_probs[start + len(prompt) : end] for prompt, start, end in ends]

    truth = measure(model, lambda: run_stock(model, rollouts))
    assert max(errors(measure(model, ours), truth).values()) < TOLERANCE


@pytest.mark.parametrize("schedule", ["packed", "phased"])
def test_the_model_of_the_readme_equals_rows_alone(schedule):
    """The class in verl_prefix/core/README.md, by a plan, and row by row with torch's own causal attention."""
    lines = (Path(core_runner.__file__).parent / "README.md").read_text().split("```python\n")[2].split("```")[0]
    names: dict[str, object] = {}
    exec(lines, names)
    model, rollouts = names["OneLayer"](97, 4, 16).double(), random_rollouts(SHAPE, 97)
    tokens, weights, made = flatten(rollouts, torch.device("cpu"))
    log_probs = torch.zeros(len(weights), dtype=torch.float64)

    class Alone(NamedTuple):
        head_tokens: torch.Tensor

        def attend(self, layer, q, k, v, sinks, params):
            heads_first = (x.transpose(0, 1) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=params.scale)
            return out.transpose(0, 1)

    def row_by_row():
        found = []
        for prompt, response, weight in zip(rollouts.prompts, rollouts.responses, rollouts.weights, strict=True):
            ids, read = torch.cat([prompt, response]), torch.arange(len(response)) + len(prompt) - 1
            logits = model.token_outputs(ids, None, Alone(read), lambda which, logits: logits, 0, {})
            row = logits.log_softmax(-1).gather(-1, response.unsqueeze(-1)).squeeze(-1)
            (row * weight).sum().backward()
            found.append(row.detach())
        return found

    of_logits, step = weighted_log_probs(tokens, weights, log_probs)

    def ours():
        runner = PlanRunner(PackedForward(model, of_logits), step, torch.Tensor.backward)
        runner.run(tokens, planning.make_plan(made, 10**6, schedule, wave_tokens=12))
        ends = zip(rollouts.prompts, tokens.offsets, tokens.offsets[1:], strict=False)
        return [log_probs[start + len(prompt) : end] for prompt, start, end in ends]

    truth = measure(model, row_by_row)
    assert max(errors(measure(model, ours), truth).values()) < TOLERANCE


def test_a_runner_keeps_and_offloads_nothing_unasked():
    plain = PlanRunner(PackedForward(model=None, of_logits=None))
    assert not plain.forward.keep_attention and not plain.offload


@pytest.mark.parametrize("planned", [0, -1], ids=["packed", "waves"])
def test_a_caller_who_leaves_forwards_out_is_told_before_any_phase_c(planned):
    model, (tokens, _, batch) = build(), flatten(random_rollouts(SHAPE, 97), torch.device("cpu"))
    one = planning.make_plan(batch, 60, "auto", wave_tokens=19).passes[planned]
    runner = PlanRunner(PackedForward(HookedModel(model), lambda places, logits: logits[:, :1]))
    told = "the forwards of a pass were left before their end"
    with runner.forward.model.grouped_attention(), pytest.raises(RuntimeError, match=told):  # noqa: SIM117
        with runner.forwards(tokens, one) as forwards:
            for _, outputs in forwards:
                outputs.sum().backward()
                break
    assert "phase_c" not in runner.meter.seconds


@pytest.mark.parametrize(
    ("phase", "where"), [("packed", "packed, rank 0: "), ("phase_a", "phase_a, rank 0: "), ("wave", "wave 1 of ")]
)
def test_an_error_of_packing_says_in_which_pass_it_was_raised(monkeypatch, phase, where):
    """MOCK: packing fails."""
    pack = core_runner.pack_groups

    def fail(groups, offsets, of_phase, outer):
        if of_phase == phase:
            raise KeyError("injected")
        return pack(groups, offsets, of_phase, outer)

    monkeypatch.setattr(core_runner, "pack_groups", fail)
    with pytest.raises(KeyError, match="injected") as raised:
        run_shared(build(), random_rollouts(SHAPE, 97), "packed" if phase == "packed" else "phased", wave_tokens=12)
    (note,) = raised.value.__notes__
    assert note.startswith(f"verl_prefix was in {where}") and raised.value.prefix_phase == phase
