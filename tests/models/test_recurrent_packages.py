"""How models/recurrent.py calls flash-linear-attention, causal_conv1d and mamba_ssm: every call binds to the arguments
that their functions have (recurrent_signatures.json), in tensors as they ask for them, and whole models come out as
Hugging Face's rows. MOCK: stand-ins with these arguments compute on the CPU, token by token; the kernels need a GPU.
"""

import contextlib
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from runners import random_rollouts, run_shared, run_stock
from transformers.integrations import hub_kernels

from verl_prefix.models.recurrent import Mamba2
from verl_prefix.testing import write_tiny_model

RECORDED = json.loads(Path(__file__).with_name("recurrent_signatures.json").read_text())["interfaces"]
NAMES = {name: next(key for key in found if key not in ("file", "decorators")) for name, found in RECORDED.items()}
# Prefixes of 70, 0 and 5 tokens.
BATCH = [(71, [9, 3]), (1, [5]), (6, [2, 8, 1])]
# Since 5.15 transformers chooses between packages and its own functions where a model's module is imported; before,
# each mixer does.
CHOOSE = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
SCHEDULES = {"packed": dict(schedule="packed"), "phased": dict(schedule="phased", wave_tokens=12)}


def stand_in(recorded, compute):
    """`compute` behind the recorded arguments, of the recorded module, in a decorator that is really there."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = []
    for argument in RECORDED[recorded][NAMES[recorded]]:
        name, default = argument if isinstance(argument, list) else (argument, empty)
        if name.startswith("**"):
            parameters.append(inspect.Parameter(name.removeprefix("**"), inspect.Parameter.VAR_KEYWORD))
        else:
            parameters.append(inspect.Parameter(name, kind, default=default))
    signature = inspect.Signature(parameters)

    def run(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        assert not bound.arguments.get("kwargs"), "an argument that this version swallows without a word"
        return compute(**bound.arguments)

    run.__signature__ = signature  # by which transformers leaves arguments out
    run.__module__ = RECORDED[recorded]["file"].removesuffix(".py").replace("/", ".")
    return torch.compiler.disable(run) if "torch.compiler.disable" in RECORDED[recorded]["decorators"] else run


def delta_rule(
    q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, **others
):
    """Of one row of packed sequences, as chunk_gated_delta_rule checks it."""
    switches = (
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "head_first",
        "state_v_first",
        "transpose_state_layout",
    )
    assert not any(others.get(name) for name in switches) and scale is None and output_final_state
    if CHOOSE:  # transformers repeats them no more
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    (_, _, heads, keys), values = q.shape, v.shape[-1]
    assert q.shape[0] == 1 and q.dtype == k.dtype == v.dtype and q.shape == k.shape and v.shape[2] == heads
    assert g.shape == beta.shape == q.shape[:3] and not cu_seqlens.is_floating_point()
    bounds = cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == q.shape[1]
    if initial_state is not None:
        assert initial_state.shape == (len(bounds) - 1, heads, keys, values) and initial_state.dtype == torch.float32
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    outputs, states = [], []
    for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = q.new_zeros(heads, keys, values) if initial_state is None else initial_state[i]
        for t in range(start, end):
            state = state * g[0, t].exp()[:, None, None]
            delta = (v[0, t] - torch.einsum("hkv,hk->hv", state, k[0, t])) * beta[0, t, :, None]
            state = state + torch.einsum("hk,hv->hkv", k[0, t], delta)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[0, t]) * keys**-0.5)
        states.append(state)
    return torch.stack(outputs).unsqueeze(0), torch.stack(states)


def convolution(x, weight, bias, activation, **others):
    """Of one row, as causal_conv1d.cpp checks it."""
    assert not any(value is not None and value is not False for value in others.values())
    _, dim, width = *x.shape[:2], weight.shape[-1]
    assert (
        x.shape[0] == 1 and weight.shape == (dim, width) and 2 <= width <= 4 and activation in (None, "silu", "swish")
    )
    assert x.stride(1) == 1 or x.stride(2) == 1
    if x.stride(1) == 1 and x.stride(2) > 1:
        assert dim % 8 == 0 and x.stride(0) % 8 == 0 and x.stride(2) % 8 == 0
    assert bias is None or (bias.dtype == weight.dtype and bias.shape == (dim,))
    found = F.conv1d(F.pad(x, (width - 1, 0)), weight.unsqueeze(1), bias, groups=dim)
    return F.silu(found) if activation else found


def state_space(
    x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit,
    return_final_states, return_varlen_states,
):  # fmt: skip
    """Of rows, as mamba_chunk_scan_combined checks them."""
    assert z is seq_idx is cu_seqlens is None and dt_softplus and return_final_states and not return_varlen_states
    rows, length, heads, size = x.shape
    groups, state_size = B.shape[2:]
    assert dt.shape == x.shape[:3] and B.shape == C.shape == (rows, length, groups, state_size)
    assert (
        A.shape == D.shape == dt_bias.shape == (heads,) and chunk_size == 32 and tuple(dt_limit) == (0.0, float("inf"))
    )
    state = x.new_zeros(rows, heads, size, state_size)
    if initial_states is not None:
        assert initial_states.shape == state.shape and initial_states.dtype == torch.float32
        state = initial_states
    B, C = (y.repeat_interleave(heads // groups, 2) for y in (B, C))
    step, outputs = F.softplus(dt + dt_bias), []
    for t in range(length):
        state = state * (step[:, t] * A).exp()[..., None, None]
        state = state + torch.einsum("nh,nhp,nhs->nhps", step[:, t], x[:, t], B[:, t])
        outputs.append(torch.einsum("nhps,nhs->nhp", state, C[:, t]) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1), state


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    def build(family):
        path = write_tiny_model(tmp_path_factory.mktemp(family), family=family)
        config = transformers.AutoConfig.from_pretrained(path)
        config._experts_implementation = "eager"
        return transformers.AutoModelForCausalLM.from_pretrained(path, config=config, attn_implementation="sdpa")

    return build


def chosen(space, names, package, run):
    """transformers' function of its module `space`, as it is where the package is installed and has `run`; the first of
    `names` is the package's."""
    *_, own = (name for name in names if hasattr(space, name))
    found = run
    for name in reversed([*hub_kernels._KERNELS_INTERNAL_PATH_MAPPINGS.get(names[0], "").split("."), names[0]]):
        found = SimpleNamespace(**{name: found}) if name else found
    with mock.patch.dict(sys.modules, {package: found}):
        function = CHOOSE(names[0], package)(inspect.unwrap(getattr(space, own)))
    assert inspect.getclosurevars(function).nonlocals["implementation"] is run
    return mock.patch.object(space, own, function)


@contextlib.contextmanager
def installed(model, packages):
    """The model with these stand-ins, each where transformers puts the real function."""
    space = sys.modules[type(model).__module__]
    with contextlib.ExitStack() as stack:
        for name in packages:
            run = stand_in(name, packages[name])
            if name.startswith("flash-linear-attention"):
                assert run.__module__.startswith("fla.")
                if CHOOSE:
                    names = ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule")
                    stack.enter_context(chosen(space, names, "fla", run))
                    continue
                for module in model.modules():
                    if hasattr(module, "chunk_gated_delta_rule"):
                        stack.enter_context(mock.patch.object(module, "chunk_gated_delta_rule", run))
                        for conv in ("q_conv1d", "k_conv1d", "v_conv1d"):  # its ShortConvolution has a name for it
                            if hasattr(module, conv):
                                stack.enter_context(mock.patch.object(getattr(module, conv), "act_fn", None))
            elif name.startswith("causal-conv1d"):
                if CHOOSE:
                    stack.enter_context(chosen(space, ("causal_conv1d_fn",), "causal_conv1d", run))
                    continue
                for module in model.modules():
                    if hasattr(module, "causal_conv1d_fn"):
                        stack.enter_context(mock.patch.object(module, "causal_conv1d_fn", run))
                stack.enter_context(mock.patch.object(space, "causal_conv1d_fn", run, create=True))
            else:
                if CHOOSE:
                    names = ("mamba_chunk_scan_combined", "mamba2_chunk_scan")
                    stack.enter_context(chosen(space, names, "mamba_ssm", run))
                else:
                    stack.enter_context(mock.patch.object(space, "mamba_chunk_scan_combined", run))
                scan = Mamba2._chunk_scan

                def on_a_gpu(mixer, kernel, *args, scan=scan, **options):
                    with mock.patch.object(torch.Tensor, "is_cuda", True):
                        return scan(mixer, kernel, *args, **options)

                stack.enter_context(mock.patch.object(Mamba2, "_chunk_scan", on_a_gpu))
        yield


def measure(model, run):
    model.zero_grad()
    log_probs = torch.cat(run(model, random_rollouts(BATCH, 400)))
    return log_probs, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def errors(ours, truth):
    return [((x - y).norm() / y.norm()).item() for x, y in zip(ours, truth, strict=True)]


COMPUTE = {"flash-linear-attention": delta_rule, "causal-conv1d": convolution, "mamba-ssm": state_space}
NEWEST = {name.partition(" ")[0]: name for name in RECORDED}
CASES = [("qwen3_5_text", (name,)) for name in RECORDED if not name.startswith("mamba-ssm")]
CASES += [("bamba", (name,)) for name in RECORDED if name.startswith("mamba-ssm")]
CASES += [
    ("qwen3_next", (NEWEST["flash-linear-attention"], NEWEST["causal-conv1d"])),
    ("olmo_hybrid", (NEWEST["flash-linear-attention"],)),
    ("granitemoehybrid", (NEWEST["causal-conv1d"], NEWEST["mamba-ssm"])),
]


@pytest.mark.parametrize(("family", "names"), CASES)
def test_models_are_those_of_hugging_face_by_functions_with_these_arguments(model_of, family, names):
    model, calls = model_of(family), []
    truth = measure(model, run_stock)

    def counted(compute):
        return lambda **options: calls.append(compute) or compute(**options)

    packages = {name: counted(COMPUTE[name.partition(" ")[0]]) for name in names}
    for options in SCHEDULES.values():
        calls.clear()
        with installed(model, packages):
            found = measure(model, lambda *args, options=options: run_shared(*args, **options))
        assert max(errors(found, truth)) < 5e-6
        assert set(calls) == {COMPUTE[name.partition(" ")[0]] for name in names}


def from_zero(**options):
    return delta_rule(**options | {"initial_state": None})


def keys_and_values_of_the_state_swapped(**options):
    outputs, states = delta_rule(**options)
    return outputs, states.transpose(-1, -2)


def heads_in_another_order(**options):
    outputs, states = delta_rule(**options)
    return outputs, states.flip(1)


def without_gradient(**options):
    if options["initial_state"] is not None:
        options["initial_state"] = options["initial_state"].detach()
    return delta_rule(**options)


def sequences_joined(**options):
    bounds = options["cu_seqlens"]
    if len(bounds) > 2 and options["initial_state"] is None:
        outputs, states = delta_rule(**options | {"cu_seqlens": bounds[[0, -1]]})
        return outputs, states.expand(len(bounds) - 1, *states.shape[1:])
    return delta_rule(**options)


@pytest.mark.parametrize("schedule", [pytest.param("packed", marks=pytest.mark.more), "phased"])
@pytest.mark.parametrize(
    "broken",
    [from_zero, keys_and_values_of_the_state_swapped, heads_in_another_order, without_gradient, sequences_joined],
)
def test_a_function_that_means_something_else_is_seen(model_of, broken, schedule):
    model = model_of("qwen3_5_text")
    truth = measure(model, run_stock)
    with installed(model, {NEWEST["flash-linear-attention"]: broken}):
        try:
            found = measure(model, lambda *args: run_shared(*args, **SCHEDULES[schedule]))
        except AssertionError:
            assert broken is keys_and_values_of_the_state_swapped
            return
    assert max(errors(found, truth)) > 1e-3
