"""`verl_prefix.response_log_probs` and `phased_update` against HF's own forward of every whole row, without verl.

float64 1e-9 (HF's fp32 norm is replaced, as in test_runner) and fp32 5e-6, relative, on log-probs, entropy and every
gradient. Also against the prefix-grouper package on the same padded inputs. The loss weighs log-probs and entropies.
"""

import dataclasses
import functools
import types
import warnings

import pytest
import torch
from api_rows import (
    BOUNDS,
    TEMPERATURE,
    TOLERANCE,
    VOCAB,
    batch,
    build,
    by_hf,
    error,
    float64_norm,  # noqa: F401
    grads,
    inputs,
    lora,
    no_phase_c,
    padded,
    peak_bytes,
    pre_hook,
    prefix_detached,
    run_phased,
    suffix_share_of_prefix_gradient_lost,
    unpadded,
    weighted,
)
from runners import random_rollouts
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from verl_prefix import phased_update, response_log_probs
from verl_prefix.api.rows import Batch, LogProbs
from verl_prefix.core.forward import PackedForward
from verl_prefix.models import logits
from verl_prefix.models.advice import WHOLE_ROWS
from verl_prefix.models.hookup import HookedModel

FORMS = ["tensors", "ints", "padded", "groups"]


def run_packed(model, rows, form="tensors", **options):
    options = dict(schedule="packed") | options | dict(temperature=TEMPERATURE, return_entropy=True)
    found = response_log_probs(model, **inputs(form, rows), **options)
    log_probs, entropy = (unpadded(x, rows.responses) for x in found)
    weighted(log_probs, entropy, rows.weights).backward()
    return [x.detach() for x in log_probs], [x.detach() for x in entropy], grads(model)


RUNS = {"packed": run_packed, "phased": run_phased}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_equals_hf_in_every_form(run, form, dtype):
    rows = batch()
    truth = by_hf(build(), rows)
    ours = run(build(dtype), rows, form, **(dict(wave_tokens=12) if run is run_phased else {}))
    assert ours[0][0].dtype == dtype
    assert error(ours, truth) < TOLERANCE[dtype]


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_memory_bounds_change_nothing(bounds):
    model, rows = build(), batch()
    assert error(run_phased(model, rows, "padded", **bounds), by_hf(model, rows)) < 1e-9


def test_logits_in_chunks_change_nothing():
    model, rows = build(), batch()
    assert error(run_packed(model, rows, logits_chunk=7), by_hf(model, rows)) < 1e-9


def test_gradient_checkpointing_changes_nothing_in_waves_and_is_refused_in_one_graph():
    model, rows = build().train(), batch()
    truth = by_hf(model, rows)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert error(run_phased(model, rows, wave_tokens=12), truth) < 1e-9
    with pytest.raises(ValueError, match="use phased_update, or call model.gradient_checkpointing_disable"):
        run_packed(model, rows)
    with torch.no_grad():
        assert torch.equal(response_log_probs(model, rows.prompts, rows.responses)[0], model_log_probs(model, rows)[0])
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert error(run_phased(model, rows, wave_tokens=12), truth) < 1e-9


def by_torch(layer):
    return checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.REENTRANT)


def by_hand(layer):
    """No module shows it."""
    forward = layer.forward
    layer.forward = lambda hidden, *args, **options: checkpoint(
        functools.partial(forward, **options), hidden, *args, use_reentrant=True
    )
    return layer


def test_layers_of_another_name_that_others_checkpoint():
    sizes, off = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2), ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    config = GPT2Config(**sizes, **dict.fromkeys(off, 0.0))
    model, rows = GPT2LMHeadModel(config).double().train(), batch()
    truth = by_hf(model, rows)
    for layer in model.transformer.h:
        by_hand(layer)
    assert error(run_packed(model, rows, schedule="phased", wave_tokens=12), truth) < 1e-9
    with pytest.raises(ValueError, match="pass schedule='phased'"):
        run_packed(model, rows)
    model.requires_grad_(False)
    model.transformer.ln_f.requires_grad_(True)  # behind all layers
    found = run_packed(model, rows)
    assert error(found, (*truth[:2], {name: truth[2][name] for name in found[2]})) < 1e-9 and len(found[2]) == 2


@pytest.mark.parametrize("wrapped", [by_torch, by_hand])
def test_layers_that_others_checkpoint(wrapped):
    rows = batch()
    truth = by_hf(build(), rows)
    model = build().train()
    model.model.layers = torch.nn.ModuleList(map(wrapped, model.model.layers))

    def phased(model, rows):
        return run_packed(model, rows, schedule="phased", wave_tokens=12)

    for run in (run_phased, phased):
        log_probs, entropy, gradients = run(model, rows)
        gradients = {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in gradients.items()}
        assert error((log_probs, entropy, gradients), truth) < 1e-9
    with pytest.raises(ValueError, match="pass schedule='phased'"):
        run_packed(model, rows)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_lora_equals_hf(run):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, rows = peft.get_peft_model(build(), config).double().train(), batch()
    truth = by_hf(model, rows)
    assert truth[2] and all("lora" in name for name in truth[2])
    assert error(run(model, rows), truth) < 1e-9


def replaced(model):
    """As scaling adapters and casts to fp32 do it: a forward on the instance."""
    head = model.lm_head
    head.forward = lambda hidden: torch.nn.functional.linear(0.5 * hidden, head.weight)
    return model


def hook(model):
    model.lm_head.register_forward_hook(lambda module, args, logits: 0.5 * logits)
    return model


def accelerate_hook(model):
    hooks = pytest.importorskip("accelerate.hooks")

    class Scaling(hooks.ModelHook):
        def post_forward(self, module, output):
            return 0.5 * output

    hooks.add_hook_to_module(model.lm_head, Scaling())
    return model


@pytest.mark.parametrize(
    ("logits_chunk", "checkpointed"),
    [(4096, False), (7, True), *(pytest.param(*one, marks=pytest.mark.more) for one in ((4096, True), (7, False)))],
)
@pytest.mark.parametrize("changed", [replaced, pre_hook, hook, accelerate_hook, lora])
def test_an_lm_head_that_others_changed_runs_as_they_changed_it(changed, logits_chunk, checkpointed):
    model, rows = changed(build()).train(), batch()
    head = model.get_output_embeddings()
    before = dict(vars(head))
    truth = by_hf(model, rows)
    plain = by_hf(build(), rows)
    assert error((truth[0], truth[1], {}), (plain[0], plain[1], {})) > 1e-3
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    run = run_phased if checkpointed else run_packed
    assert error(run(model, rows, logits_chunk=logits_chunk), truth) < 1e-9
    assert vars(head).get("forward") is before.get("forward")


def halved(output):
    output.logits = output.logits * 0.5
    return output


def model_hook(model):
    model.register_forward_hook(lambda module, args, output: halved(output))
    return model


def hook_of_every_module(model):
    """It changes what this model returns; `undone` removes it."""
    torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: halved(output) if module is model else output
    )
    return model


def model_forward(model):
    forward = model.forward
    model.forward = lambda *args, **options: halved(forward(*args, **options))
    return model


def model_forward_in_its_name(model):
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda *args, **options: halved(forward(*args, **options)))
    return model


def subclass(model):
    class Halved(LlamaForCausalLM):
        def forward(self, *args, **options):
            return halved(super().forward(*args, **options))

    model.__class__ = Halved
    return model


def masked_vocabulary(model):
    """In place."""

    def mask(module, args, output):
        output.logits[..., 5:9] = -30.0

    model.register_forward_hook(mask)
    return model


def hook_within_peft(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model_hook(model), config).double()


@pytest.fixture
def undone():
    hooks = torch.nn.modules.module._global_forward_hooks
    yield
    hooks.clear()


CHANGED_BEHIND = [
    model_hook, hook_of_every_module, model_forward, model_forward_in_its_name, subclass, masked_vocabulary,
    hook_within_peft,
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("changed", CHANGED_BEHIND)
def test_logits_that_others_change_behind_lm_head(changed, run, undone):
    plain = by_hf(build(), batch())
    model, rows = changed(build()), batch()
    truth = by_hf(model, rows)
    assert error((*truth[:2], {}), (*plain[:2], {})) > 1e-3
    assert error(run(model, rows, logits_chunk=7), truth) < 1e-9


def test_who_reads_logits_behind_lm_head_sees_all_of_them_and_their_gradients():
    seen, rows = [], batch()
    model = build()
    model.register_forward_hook(lambda module, args, output: seen.append(output.logits.shape[-1]))
    model.lm_head.register_full_backward_hook(lambda module, given, taken: seen.append(taken[0].shape[-1]))
    assert error(run_packed(model, rows, logits_chunk=7), by_hf(build(), rows)) < 1e-9
    assert seen == [VOCAB] * 2


def test_casts_of_accelerate_leave_logits_in_chunks(monkeypatch):
    utils, sizes = pytest.importorskip("accelerate.utils"), []
    model, rows = build(torch.float32), batch()
    truth = by_hf(model, rows)
    forward = torch.autocast("cpu", torch.bfloat16, enabled=False)(model.forward.__func__)  # as Accelerator does
    model.forward = types.MethodType(utils.convert_outputs_to_fp32(forward), model)
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: sizes.append(len(hidden)) or head(hidden))
    assert error(run_packed(model, rows, logits_chunk=7), truth) < 5e-6
    assert max(sizes) == 7


@pytest.mark.parametrize("scale", [None, 1.0])
def test_logits_that_change_though_nothing_shows_it_are_refused(scale, monkeypatch):
    monkeypatch.setattr(logits, "_HANDS_ON", (*logits._HANDS_ON, f"{__name__}."))
    model = subclass(build())
    model.config.logits_scaling = scale
    with pytest.raises(RuntimeError, match=f"no hook, forward or config key shows that; {WHOLE_ROWS}"):
        run_packed(model, batch())


def test_logits_times_one_are_handed_on(monkeypatch):
    monkeypatch.setattr(logits, "_HANDS_ON", (*logits._HANDS_ON, f"{__name__}."))
    model, sizes, rows = build(), [], batch()
    forward, head = model.forward, model.lm_head.forward

    def scaled(*args, **options):
        output = forward(*args, **options)
        output.logits = output.logits * 1.0
        return output

    model.forward = scaled
    truth = by_hf(model, rows)
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: sizes.append(len(hidden)) or head(hidden))
    assert error(run_packed(model, rows, logits_chunk=7), truth) < 1e-9
    assert max(sizes) == 7


@pytest.mark.parametrize("frozen", ["all", "embeddings and a layer"])
def test_what_runs_without_gradients_because_it_is_frozen_is_one_graph(frozen):
    """A reference, and lower layers, under no_grad."""
    model, rows = build(), batch()
    truth = by_hf(model, rows)
    if frozen == "all":
        model.forward = torch.no_grad()(model.forward)
        found, _ = response_log_probs(model, rows.prompts, rows.responses, return_entropy=True, temperature=TEMPERATURE)
        assert error(([x.detach() for x in found], truth[1], {}), (*truth[:2], {})) < 1e-9
        return
    for module in (model.model.embed_tokens, model.model.layers[0]):
        module.requires_grad_(False)
        module.forward = torch.no_grad()(module.forward)
    trained = {name: grad for name, grad in truth[2].items() if "embed" not in name and "layers.0." not in name}
    assert error(run_packed(model, rows), (*truth[:2], trained)) < 1e-9


def test_a_model_that_ignores_logits_to_keep_is_refused():
    model = build()
    forward = model.forward
    model.forward = lambda logits_to_keep=0, **options: forward(**options)
    with pytest.raises(RuntimeError, match=r"logits of \d+ tokens, and it returned those of \d+"):
        run_packed(model, batch())


def model_log_probs(model, rows) -> list[torch.Tensor]:
    with phased_update(model, rows.prompts, rows.responses) as waves:
        (wave,) = waves
    found = dict(zip(wave.rows, wave.log_probs, strict=True))
    return [found.get(i) for i in range(len(rows.responses))]


@pytest.mark.parametrize("max_tokens", [None, 60, 20])
def test_forward_only_is_the_same_numbers_in_bounded_passes(max_tokens, monkeypatch):
    model, rows = build(), batch()
    truth = torch.cat(by_hf(model, rows)[0])
    sizes = []
    suffixes = PackedForward.packed

    def spy(self, tokens, layout, caches):
        sizes.append(layout.num_tokens)
        return suffixes(self, tokens, layout, caches)

    monkeypatch.setattr(PackedForward, "packed", spy)
    with torch.no_grad():
        args = dict(**inputs("tensors", rows), temperature=TEMPERATURE, max_tokens=max_tokens)
        packed = torch.cat(response_log_probs(model, **args))
        with phased_update(model, **args) as waves:
            phased = {row: x for wave in waves for row, x in zip(wave.rows, wave.log_probs, strict=True)}
    # A single row may exceed the bound: 17 response tokens, of which the longest row alone makes a pass.
    assert max(sizes) <= (max_tokens or 1000)
    assert not packed.requires_grad and all(p.grad is None for p in model.parameters())
    for ours in (packed, torch.cat([phased[i] for i in sorted(phased)])):
        assert (ours - truth).norm() / truth.norm() < 1e-9


@pytest.fixture
def counted(monkeypatch):
    """Tokens of every forward."""
    sizes: list[int] = []
    forward = HookedModel.token_outputs
    monkeypatch.setattr(
        HookedModel, "token_outputs",
        lambda m, ids, *args, **kw: sizes.append(len(ids)) or forward(m, ids, *args, **kw),
    )  # fmt: skip
    return sizes


@pytest.mark.parametrize("schedule", ["auto", "packed"])
def test_forward_only_waves_are_as_short_as_asked(schedule, counted):
    model, rows = build(), batch([(41, [4] * 6)])
    with torch.no_grad():
        response_log_probs(model, rows.prompts, rows.responses, schedule=schedule, max_tokens=60, wave_tokens=9)
    assert counted == [40, 8, 8, 8]


def test_rows_of_different_groups_do_not_share(counted):
    model, rows = build(), batch([(23, [4, 5])])
    shared = response_log_probs(model, rows.prompts, rows.responses)
    apart = response_log_probs(model, rows.prompts, rows.responses, groups=[0, 1])
    assert counted == [22 + 9, 2 * 22 + 9]
    assert (torch.cat(shared) - torch.cat(apart)).abs().max() < 1e-12


def test_nothing_shared_is_said():
    model = build()
    with pytest.warns(UserWarning, match="no two of 2 rows have the same prompt") as told:
        response_log_probs(model, [[1, 2], [1, 3]], [[4], [5]])
        with phased_update(model, [[1, 2], [1, 3]], [[4], [5]]) as waves:
            list(waves)
    assert [warning.filename for warning in told] == [__file__] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        response_log_probs(model, [[1, 2], [1, 2]], [[4], [5]])


def test_no_response_token_at_all():
    model = build()
    ids, mask = torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    assert [len(x) for x in response_log_probs(model, [[1, 2]] * 2, [[], []])] == [0, 0]
    whole = response_log_probs(model, [[1, 2]] * 2, ids, response_mask=mask)
    assert whole.shape == (2, 3) and not whole.any()
    with phased_update(model, [[1, 2]] * 2, [[], []]) as waves:
        assert list(waves) == []


# Wrong on purpose: each must miss by 100 fp32 tolerances at least, or the tests above prove nothing.


def positions_restarted(monkeypatch):
    make = Batch.__init__

    def restart(self, *args, **options):
        make(self, *args, **options)
        positions = self.tokens.position_ids.clone()
        for group in self.groups:
            for row in group.rows:
                positions[self.tokens.offsets[row] + group.num_own_strand_tokens : self.tokens.offsets[row + 1]] -= (
                    group.num_own_strand_tokens
                )
        self.tokens = dataclasses.replace(self.tokens, position_ids=positions)

    monkeypatch.setattr(Batch, "__init__", restart)


def rows_swapped(monkeypatch):
    by_row = Batch.by_row

    def swapped(self, done):
        found = by_row(self, done)
        twins = [row for row in found if len(found[row]) == 3]
        return found | dict(zip(twins, [found[row] for row in reversed(twins)], strict=True))

    monkeypatch.setattr(Batch, "by_row", swapped)


def labels_one_late(monkeypatch):
    of_logits = Batch.of_logits
    monkeypatch.setattr(Batch, "of_logits", lambda self, place, logits: of_logits(self, (place - 1).clamp(0), logits))


def temperature_forgotten(monkeypatch):
    make = Batch.__init__

    def at_one(self, *args, **options):
        make(self, *args, **options)
        self.temperature = 1.0

    monkeypatch.setattr(Batch, "__init__", at_one)


@pytest.mark.parametrize(
    ("sabotage", "names"),
    [
        (prefix_detached, ["phased"]), (no_phase_c, ["phased"]), (suffix_share_of_prefix_gradient_lost, RUNS),
        (positions_restarted, RUNS), (rows_swapped, RUNS), (labels_one_late, RUNS), (temperature_forgotten, RUNS),
    ],
)  # fmt: skip
def test_broken_maths_is_far_off(sabotage, names, monkeypatch):
    model, rows = build(), batch([(23, [9, 3, 5]), (41, [3, 1, 11])])
    truth = by_hf(model, rows)
    sabotage(monkeypatch)
    for name in names:
        assert error(RUNS[name](model, rows, attention="cpu"), truth) > 100 * 5e-6


# The package of the paper's authors on the same padded inputs.


def causal_sdpa(q, k, v, mask, *, scaling, **_):
    """What prefix-grouper asks of flash attention: queries are the last keys, `mask` [rows, keys] hides padding."""
    queries, keys = q.shape[2], k.shape[2]
    allowed = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) & mask[:, None, None]
    # A padding query sees itself, so that nothing is NaN.
    allowed = allowed | torch.eye(queries, keys, dtype=torch.bool).roll(keys - queries, 1)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed, scale=scaling).transpose(1, 2)


def test_equals_the_prefix_grouper_package(monkeypatch):
    prefix_grouper = pytest.importorskip("prefix_grouper")
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module, query, key, value, attention_mask, prefix_grouper, scaling, **_):
        return prefix_grouper.forward(causal_sdpa, query, key, value, scaling=scaling), None

    AttentionInterface.register("prefix_grouper_sdpa", attention)
    try:
        shape = [(23, [9, 17, 5]), (41, [3, 1, 11, 2]), (7, [13])]
        generator = torch.Generator().manual_seed(0)

        def draw(n):
            return torch.randint(VOCAB, (n,), generator=generator)

        prompts = [draw(n) for n, _ in shape]
        responses = [draw(n) for _, lens in shape for n in lens]
        weights = [torch.randn(len(x), generator=generator, dtype=torch.float64) for x in responses]
        sizes = [len(lens) for _, lens in shape]
        (prompt_ids, prompt_mask), (ids, mask) = padded(prompts, True), padded(responses, False)

        model = build(attn_implementation="prefix_grouper_sdpa")
        grouper = prefix_grouper.PrefixGrouper.from_ungrouped_masks(prompt_mask, mask, sizes, padding_mode="right")
        positions = torch.zeros(grouper.padding_mask.shape, dtype=torch.int64)
        for row, (prompt_len, lens) in zip(positions, shape, strict=True):
            pieces = [torch.arange(prompt_len), *(torch.arange(prompt_len, prompt_len + n) for n in lens)]
            row[: prompt_len + sum(lens)] = torch.cat(pieces)
        flat = grouper.concat_input(prompt_ids, prompt_mask, ids, mask)
        logits = model(flat, position_ids=positions, prefix_grouper=grouper, use_cache=False).logits
        _, _, logits, _ = grouper.split_output(logits, include_prefix_last=1)
        theirs = [
            row[: len(x)].log_softmax(-1).gather(-1, x[:, None])[:, 0] for row, x in zip(logits, responses, strict=True)
        ]
        sum((x * w).sum() for x, w in zip(theirs, weights, strict=True)).backward()
        their_grads = grads(model)

        groups = [i for i, size in enumerate(sizes) for _ in range(size)]
        ours = response_log_probs(model, prompt_ids, ids, prompt_mask=prompt_mask, response_mask=mask, groups=groups)
        ours = unpadded(ours, responses)
        sum((x * w).sum() for x, w in zip(ours, weights, strict=True)).backward()
        our_grads = grads(model)
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["prefix_grouper_sdpa"]
    assert (torch.cat(ours) - torch.cat(theirs)).norm() / torch.cat(theirs).norm() < 1e-9
    for name, grad in their_grads.items():
        assert (our_grads[name] - grad).norm() / grad.norm() < 1e-9, name


def test_a_large_vocabulary_costs_no_precision_where_tokens_are_nearly_certain():
    rows = random_rollouts([(5, [24, 16])], 49152, seed=3)
    model = build(vocab_size=49152, hidden_size=96, num_hidden_layers=1)
    with torch.no_grad():  # hidden states do not depend on lm_head: raise the logits of the tokens that follow
        hidden = [
            model.model(torch.cat([prompt, response])[None]).last_hidden_state[0, len(prompt) - 1 : -1]
            for prompt, response in zip(rows.prompts, rows.responses, strict=True)
        ]
        model.lm_head.weight[torch.cat(rows.responses)] += 20 * torch.linalg.pinv(torch.cat(hidden)).T

    def run(dtype):
        log_probs = torch.cat(response_log_probs(model.to(dtype), rows.prompts, rows.responses))
        log_probs.sum().backward()
        return log_probs.detach(), grads(model)

    (truth, true_grads), (ours, our_grads) = run(torch.float64), run(torch.float32)
    # 2.0e-6 and 1.5e-5 here; log_softmax gives 5.8e-5 and 6.6e-4.
    assert (ours - truth).norm() / truth.norm() < 1e-5
    assert max((our_grads[name] - x).norm() / x.norm() for name, x in true_grads.items()) < 6e-5


@pytest.mark.parametrize("return_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_log_probs_of_logits_have_the_gradients_and_no_more_memory_than_log_softmax(temperature, return_entropy):
    def by_log_softmax(logits, labels):
        every = (logits / temperature).log_softmax(-1)
        columns = [every.gather(-1, labels), -(every.exp() * every).sum(-1, keepdim=True)]
        return torch.cat(columns[: 1 + return_entropy], dim=-1)

    def ours(logits, labels):
        return LogProbs.apply(logits, labels, temperature, return_entropy)

    torch.manual_seed(0)
    logits = (3 * torch.randn(5, 31, dtype=torch.float64)).requires_grad_()
    labels, weights = torch.randint(31, (5, 1)), torch.rand(5, 1 + return_entropy, dtype=torch.float64)
    truth, found = (f(logits, labels) for f in (by_log_softmax, ours))
    assert torch.allclose(found, truth, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad((x * weights).sum(), logits)[0] for x in (found, truth)]
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12)

    logits, labels = torch.randn(64, 4096, requires_grad=True), torch.randint(4096, (64, 1))
    runs = [lambda f=f: torch.autograd.grad(f(logits, labels).sum(), logits) for f in (by_log_softmax, ours)]
    copies = [peak_bytes(run) / logits.nbytes for run in runs]
    # The gradient, p log p, and the scaled logits, which at temperature 1 are the logits; log_softmax holds 3 to 5.
    assert round(copies[1]) == 1 + return_entropy + (temperature != 1) < round(copies[0])
