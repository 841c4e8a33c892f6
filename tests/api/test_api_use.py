"""The standalone API in use: what a block leaves behind, what misuse and bad input say, that README and examples run.

Its maths is tested in test_api.py.
"""

import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from api_rows import batch, build, float64_norm, grads, inputs  # noqa: F401
from torch.distributed.fsdp import FSDPModule

from verl_prefix import phased_update, response_hidden_states, response_log_probs
from verl_prefix.core import prefix_cache
from verl_prefix.core.forward import PackedForward

# The block's life: what is left after it, and what it says where it is misused.


@pytest.fixture
def tracked(monkeypatch):
    """Weak references to every captured K/V, every grad cache and every phase A output."""
    refs: list[weakref.ref] = []
    capture, add_grad = prefix_cache.PrefixCache.capture, prefix_cache.PrefixCache.add_grad
    prefixes = PackedForward.phase_a

    def spy_capture(self, layer, k, v):
        joined = capture(self, layer, k, v)
        refs.extend(weakref.ref(x) for x in (k, v, *joined, *self._stored.get(layer, ())))
        return joined

    def spy_add_grad(self, layer, *args):
        add_grad(self, layer, *args)
        refs.extend(weakref.ref(x) for x in self._grads[layer])

    def spy_prefixes(self, *args, **options):
        root = prefixes(self, *args, **options)
        refs.append(weakref.ref(root))
        return root

    monkeypatch.setattr(prefix_cache.PrefixCache, "capture", spy_capture)
    monkeypatch.setattr(prefix_cache.PrefixCache, "add_grad", spy_add_grad)
    monkeypatch.setattr(PackedForward, "phase_a", spy_prefixes)
    return refs


def left(refs) -> int:
    gc.collect()
    return sum(ref() is not None for ref in refs)


@pytest.mark.parametrize("where", [None, 0, 1, 4, "before the first wave"])
def test_nothing_is_left_after_the_block_or_an_exception_in_it(tracked, where):
    model, rows = build(), batch()
    raised = None
    try:
        # `waves` and `wave` stay in this frame, as they do in a user's.
        with phased_update(model, rows.prompts, rows.responses, max_tokens=60, wave_tokens=19) as waves:
            assert tracked, "phase A runs on entering"
            if isinstance(where, str):
                raise FloatingPointError(where)
            for i, wave in enumerate(waves):
                sum(x.sum() for x in wave.log_probs).backward()
                if i == where:
                    raise FloatingPointError(where)
    except FloatingPointError as exception:
        raised = exception.args[0]
    assert raised == where
    assert left(tracked) == 0 and len(tracked) > 5
    assert model.config._attn_implementation == "sdpa" and "forward" not in vars(model.lm_head)
    assert next(waves, None) is None


def test_phase_c_waits_for_the_end_of_the_block():
    model, rows = build(), batch()
    with phased_update(model, rows.prompts, rows.responses, wave_tokens=19) as waves:
        for wave in waves:
            sum(x.sum() for x in wave.log_probs).backward()
        before = model.model.embed_tokens.weight.grad.clone()
    only_in_prefixes = sorted(
        {int(x) for p in rows.prompts for x in p[:-1]}
        - {int(x) for p, r in zip(rows.prompts, rows.responses, strict=True) for x in (p[-1], *r)}
    )
    assert only_in_prefixes and not before[only_in_prefixes].any()
    assert model.model.embed_tokens.weight.grad[only_in_prefixes].any(-1).all()


def test_waves_left_out_are_an_error():
    model, rows = build(), batch()
    with pytest.raises(RuntimeError, match=r"\d of \d+ waves were not iterated"):  # noqa: SIM117
        with phased_update(model, rows.prompts, rows.responses, wave_tokens=12) as waves:
            for wave in waves:
                sum(x.sum() for x in wave.log_probs).backward()
                break
    assert model.config._attn_implementation == "sdpa"


def test_backward_after_the_block_is_an_error():
    model, rows = build(), batch()
    with phased_update(model, rows.prompts, rows.responses) as waves:
        (wave,) = waves
    with pytest.raises(RuntimeError, match="backward of a wave came after phase C"):
        sum(x.sum() for x in wave.log_probs).backward()


# Errors say what is wrong, what was seen and what to pass.

TWO = dict(prompts=[[1, 2], [1, 2]], responses=[[3], [4, 5]])
IDS, ONES = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (dict(responses=[[3]]), ValueError, "2 prompts and 1 responses: pass one prompt per response, or groups"),
        (dict(prompts=[[1, 2], []]), ValueError, r"prompts\[1\] is empty.*begin it with a BOS token"),
        (dict(responses=[[3], [-100]]), ValueError, "token -100 is not in the model's vocabulary of 97"),
        (dict(responses=[[3], [97]]), ValueError, "token 97 is not in the model's vocabulary of 97"),
        (dict(responses=[[3.5], [4]]), TypeError, r"responses\[0\] is torch.float32 of shape \[1\]; pass token ids"),
        (dict(groups=[0]), ValueError, r"groups=\[0\] for 2 prompts and 2 responses: pass one index"),
        (dict(groups=[0, 2]), ValueError, "groups=.*pass one index into prompts per response"),
        (dict(prompts=IDS), ValueError, r"prompts is a tensor \[2, 3\] without prompt_mask; pass the mask"),
        (dict(prompt_mask=ONES), TypeError, "prompt_mask is for a padded tensor, and prompts is a list; leave it out"),
        (dict(prompts=IDS, prompt_mask=[1]), TypeError, r"prompt_mask is a list; pass a tensor \[2, 3\]"),
        (
            dict(responses=IDS, response_mask=ONES[:1]),
            ValueError,
            r"responses \[2, 3\] and response_mask \[1, 3\]: pass",
        ),
        (
            dict(responses=IDS, response_mask=torch.tensor([[1, 1, 1], [1, 0, 1]])),
            ValueError,
            "response_mask has a hole in row 1.*leave out of your loss",
        ),
        (dict(temperature=0), ValueError, "temperature=0: pass a number above 0"),
        (dict(max_tokens=0), ValueError, "max_tokens=0: pass a number of tokens >= 1"),
        (dict(logits_chunk=None), ValueError, "logits_chunk=None: pass a number of tokens >= 1"),
        (dict(logits_chunk=2.5), ValueError, "logits_chunk=2.5: pass a number of tokens >= 1"),
        (dict(attention="flashy"), ValueError, "'flashy' is unknown; .*pass attention='auto'"),
    ],
)
def test_bad_input_says_what_to_pass(change, kind, message):
    model = build()
    with pytest.raises(kind, match=message):
        response_log_probs(model, **TWO | change)
    with pytest.raises(kind, match=message), phased_update(model, **TWO | change):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_numbers_of_numpy_are_numbers():
    model, rows, options = build(), batch(), dict(max_tokens=60, wave_tokens=19, logits_chunk=7)
    args = model, rows.prompts, rows.responses
    found = [
        torch.cat(response_log_probs(*args, schedule="phased", **{name: kind(n) for name, n in options.items()}))
        for kind in (int, np.int64)
    ]
    assert torch.equal(*found)


def test_bounds_that_cannot_be_kept_say_what_to_pass():
    model = build()
    with pytest.raises(ValueError, match="4 tokens are more than max_tokens=3.*use phased_update"):
        response_log_probs(model, **TWO, max_tokens=3, schedule="packed")
    with pytest.raises(ValueError, match="wave_tokens=9 leaves nothing of max_tokens=9"):  # noqa: SIM117
        with phased_update(model, **TWO, max_tokens=9, wave_tokens=9):
            pass


def test_models_that_cannot_be_computed_say_what_to_do():
    model = build()
    with pytest.raises(TypeError, match="model is a Wrapped, not a Hugging Face causal LM; pass the model itself"):
        response_log_probs(type("Wrapped", (torch.nn.Module,), {})(), **TWO)
    heads = {"get_output_embeddings": model.get_output_embeddings, "config": {"train_batch_size": 2}}  # as DeepSpeed's
    with pytest.raises(TypeError, match="model is a Engine, not a Hugging Face causal LM; pass the model itself"):
        response_log_probs(type("Engine", (torch.nn.Module,), heads)(), **TWO)
    for part in (lambda sharded: sharded, lambda sharded: sharded.model.layers[0]):
        sharded = build()
        part(sharded).__class__ = type("Sharded", (FSDPModule, type(part(sharded))), {})  # as fully_shard does
        with pytest.raises(TypeError, match=f"{type(sharded).__name__} is sharded by FSDP.*or the verl plugin"):
            response_log_probs(sharded, **TWO)
    sharded = build()
    for i, parameter in enumerate(sharded.parameters()):  # as deepspeed.zero.Init leaves them
        parameter.data, parameter.ds_id = torch.empty(0), i
    with pytest.raises(TypeError, match="LlamaForCausalLM is sharded by DeepSpeed ZeRO-3, whose.*or the verl plugin"):
        response_log_probs(sharded, **TWO)
    model.config.attention_dropout = 0.1
    response_log_probs(model.eval(), **TWO)
    with pytest.raises(ValueError, match=r"attention_dropout=0.1. Call model.eval\(\), or call the model on whole"):
        response_log_probs(model.train(), **TWO)
    model.config.attention_dropout = 0.0
    model.model.layers[1].mlp.act_fn = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match="drops out with p=0.1"):
        response_log_probs(model.train(), **TWO)
    response_log_probs(model.eval(), **TWO)


PROMPT_LEARNING = r"PEFT prompt learning is not supported \(default: %s\).*train LoRA, or call the model on whole rows"


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("PromptTuningConfig", dict(num_virtual_tokens=3), PROMPT_LEARNING % "PROMPT_TUNING"),
        ("PrefixTuningConfig", dict(num_virtual_tokens=3), PROMPT_LEARNING % "PREFIX_TUNING"),
        (
            "LoraConfig",
            dict(alora_invocation_tokens=[1, 2], target_modules=["k_proj", "v_proj"]),
            r"aLoRA of PEFT .* \(default: alora_invocation_tokens=\[1, 2\]\).*LoRA without them, or call the",
        ),
    ],
)
def test_adapters_of_peft_that_need_whole_rows_are_refused_by_type(kind, fields, message):
    """They would be left out: the outputs would be those of the base model."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(), getattr(peft, kind)(task_type="CAUSAL_LM", **fields))
    for use in (response_log_probs, response_hidden_states):
        with pytest.raises(ValueError, match=message):
            use(model, **TWO)
    with pytest.raises(ValueError, match=message), phased_update(model, **TWO):
        pass


WITHOUT_VERL = """
import sys
for name in ("verl", "ray", "hydra", "tensordict"):
    sys.modules[name] = None
import verl_prefix
"""


def test_importing_the_package_is_cheap():
    code = WITHOUT_VERL + 'assert "torch" not in sys.modules and "transformers" not in sys.modules'
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.more
def test_the_package_and_its_functions_come_without_verl(fresh, tmp_path):
    code = """
from verl_prefix import phased_update, response_hidden_states, response_log_probs
try:
    verl_prefix.phased_updates
except AttributeError as error:
    assert "phased_update, response_hidden_states, response_log_probs" in str(error)
else:
    raise AssertionError("no error")
"""
    done = fresh(WITHOUT_VERL + code, tmp_path, dict(os.environ))
    assert done.returncode == 0, done.stderr


# README.md of api and the examples do what they say.


def test_readme_snippet_trains_as_hf_does():
    text = Path(__file__).resolve().parents[2].joinpath("verl_prefix/api/README.md").read_text()
    (snippet,) = re.findall(r"```python\n(from verl_prefix import phased_update.*?)```", text, re.DOTALL)
    model, rows = build(), batch()
    given = inputs("padded", rows)
    advantages = torch.linspace(-1, 1, len(rows.prompts), dtype=torch.float64)
    names = dict(
        torch=torch, model=model, advantages=advantages, prompt_ids=given["prompts"], prompt_mask=given["prompt_mask"],
        completion_ids=given["responses"], completion_mask=given["response_mask"],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
    )  # fmt: skip
    exec(snippet, names)
    ours, num_tokens = grads(model), sum(len(x) for x in rows.responses)
    for prompt, response, advantage in zip(rows.prompts, rows.responses, advantages, strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        row = logits.log_softmax(-1).gather(-1, response[:, None])
        (-(row - row.detach()).exp().sum() * advantage / num_tokens).backward()
    for name, truth in grads(model).items():
        assert (ours[name] - truth).norm() / truth.norm() < 1e-9, name


@pytest.mark.more
def test_examples_run_and_agree_with_hf(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    import judge_scoring
    import shared_prefix_step
    import tree_search

    shared_prefix_step.main("--prompts 2 --group 3 --prompt-len 37 --response-len 9 --wave-tokens 18".split())
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines()] == ["6 rows of 37 + 9 tokens, stock", "packed", "phased"]
    differences = [float(x) for x in re.findall(r"gradient difference (\S+),", out)]
    assert len(differences) == 2 and 0 < max(differences) < 5e-6

    tree_search.main("--prompts 1 --prompt-len 37 --turn-len 5 --ways 2 2".split())
    head, *runs = capsys.readouterr().out.splitlines()
    assert head == "4 leaves of 37 + 2 x 5 tokens"
    # Of rows alone all; then without last tokens, which are no inputs: the prompt once, and turns once.
    tokens = [4 * 47, 36 + 4 * 10, 36 + 2 * 5 + 4 * 5]
    found = [re.match(r"(.+?) +(\d+) tokens, loss (\S+), gradients differ by (\S+),", line).groups() for line in runs]
    names = ("rows alone", "one level", "tree", "tree in waves")
    assert [row[:2] for row in found] == [*zip(names, map(str, [*tokens, tokens[-1]]), strict=True)]
    assert len({row[2] for row in found}) == 1 and all(0 < float(row[3]) < 5e-6 for row in found[1:])
    assert float(found[0][2]) != 0

    judge_scoring.main(["--max-tokens", "900"])
    out = capsys.readouterr().out
    assert float(re.search(r"largest log-prob difference to whole rows (\S+)", out)[1]) < 2e-5
    assert sum(line.startswith("Near which town") for line in out.splitlines()) == len(judge_scoring.QUESTIONS)
