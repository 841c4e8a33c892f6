"""How kernels/flash_attn.py calls the flash-attn packages: every call binds to the arguments that their functions
really have (flash_attn_signatures.json). MOCK: no machine of ours has a GPU with them, so functions with these
arguments stand in on the CPU, which compute by the dense reference. What the real kernels return is not tested here.
"""

import inspect
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from verl_prefix.core import kernels
from verl_prefix.core.calls import Call, Spans
from verl_prefix.core.errors import NoFastKernel
from verl_prefix.core.kernels import aten, choose_kernel, flash_attn, reference
from verl_prefix.core.kernels.package_advice import missing_package
from verl_prefix.models.advice import advising
from verl_prefix.tools import doctor

RECORDED = json.loads(Path(__file__).with_name("flash_attn_signatures.json").read_text())["interfaces"]
CAPABILITY = {"FA2": (8, 0), "FA3": (9, 0), "FA4": (10, 0)}
CALLED = [
    "FA2 v2.7.4",
    "FA2 v2.8.3",
    "FA2 main",
    "FA3 v2.7.4",
    "FA3 v2.8.0",
    "FA3 v2.8.3.post1",
    "FA3 main",
    "FA4 main",
]


def stand_in(arguments):
    """A function with these arguments that does what flash attention does with them."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    named = [x if isinstance(x, list) else (x, empty) for x in arguments]
    signature = inspect.Signature([inspect.Parameter(name, kind, default=default) for name, default in named])

    def run(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        x = bound.arguments
        spans = Spans(*(tuple(x[f"cu_seqlens_{side}"].tolist()) for side in "qk"))
        for side in "qk":
            assert x[f"max_seqlen_{side}"] == x[f"cu_seqlens_{side}"].diff().max()
        assert not x.get("dropout_p") and x.get("return_lse", True)
        causal = x["is_causal"] if "is_causal" in x else x["causal"]
        none = None if "lse" in x or "return_lse" in x else -1  # FA4's
        sides = ("window_size_left", "window_size_right")
        left, right = x["window_size"] if "window_size" in x else (x[side] for side in sides)
        assert right == (none if left == none else 0) and (causal or left == none)
        window = None if left == none else left + 1
        call = Call(spans, causal, x["softmax_scale"], window, x["softcap"] or None)
        if "dout" not in x:
            return *reference.forward(x["q"], x["k"], x["v"], call), None, None
        lse = x["lse"] if "lse" in x else x["softmax_lse"]
        grads = reference.backward(x["dout"], (x["q"], x["k"], x["v"], x["out"], lse), call)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            x[name].copy_(grad)

    run.__signature__ = signature
    return run


def package(recorded, **changed):
    """Fills a module with an interface's functions."""

    def fill(module):
        functions = {name: args for name, args in RECORDED[recorded].items() if name != "file"} | changed
        module.__dict__.update({name: stand_in(args) for name, args in functions.items()})

    return fill


fa2, fa3, fa4 = (package(f"{name} main") for name in ("FA2", "FA3", "FA4"))


@pytest.fixture
def install(monkeypatch):
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)

    def installed(capability, **modules):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
        for name in (flash_attn.FA2, flash_attn.FA3, flash_attn.FA4, "flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, None)  # None: importing it fails
        for name, fill in modules.items():
            module = types.ModuleType(name)
            fill(module)
            monkeypatch.setitem(sys.modules, getattr(flash_attn, name), module)

    for cached in (flash_attn._installed, kernels._chosen):
        cached.cache_clear()
    yield installed
    for cached in (flash_attn._installed, kernels._chosen):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "remedy"),
    [
        ((8, 0), torch.bfloat16, 128, "flash-attn"), ((8, 0), torch.float32, 128, "16 bits"),
        ((8, 0), torch.bfloat16, 512, None), ((7, 5), torch.bfloat16, 128, None), ((7, 5), torch.float32, 128, None),
    ],
)  # fmt: skip
def test_no_remedy_is_named_where_no_package_runs(monkeypatch, install, capability, dtype, head_dim, remedy):
    install(capability)
    monkeypatch.setattr(aten, "unavailable", lambda: "not here")
    with pytest.raises(NoFastKernel) as raised:
        choose_kernel("auto", "cuda", dtype, head_dim)
    assert raised.value.remedy == remedy


@pytest.mark.parametrize(
    ("causal", "options"),
    [(True, {}), (False, {}), (True, {"window": 3}), (True, {"softcap": 0.5}), (False, {"softcap": 0.5})],
    ids=str,
)
@pytest.mark.parametrize("recorded", CALLED)
def test_each_interface_is_called_with_its_own_arguments(install, recorded, causal, options):
    module = f"{recorded[:3]}"
    install(CAPABILITY[module], **{module: package(recorded)})
    torch.manual_seed(0)
    call = Call(Spans((0, 5, 6, 23), (0, 9, 12, 30)), causal, 0.3, **options)
    q, dout = (torch.randn(23, 4, 8) for _ in range(2))
    k, v = (torch.randn(30, 2, 8) for _ in range(2))
    out, lse = flash_attn.forward(q, k, v, call)
    torch.testing.assert_close((out, lse), reference.forward(q, k, v, call))
    saved = q, k, v, out, lse
    torch.testing.assert_close(flash_attn.backward(dout, saved, call), reference.backward(dout, saved, call))


@pytest.mark.parametrize("recorded", CALLED)
def test_tensors_in_another_order_are_seen(install, recorded, monkeypatch):
    module = f"{recorded[:3]}"
    install(CAPABILITY[module], **{module: package(recorded)})
    right = flash_attn._call
    monkeypatch.setattr(flash_attn, "_call", lambda run, a, b, *more, **options: right(run, b, a, *more, **options))
    torch.manual_seed(0)
    call = Call(Spans((0, 5, 30), (0, 5, 30)), True, 0.3)
    q, k, v, dout = (torch.randn(30, 2, 8) for _ in range(4))
    out, lse = reference.forward(q, k, v, call)
    wrong, _ = flash_attn.forward(q, k, v, call)
    assert (wrong - out).abs().max() > 0.1
    grads, true = (kernel.backward(dout, (q, k, v, out, lse), call) for kernel in (flash_attn, reference))
    assert max((x - y).abs().max() for x, y in zip(grads, true, strict=True)) > 0.1


@pytest.mark.parametrize(
    ("capability", "modules", "chosen"),
    [
        ((9, 0), {"FA2": fa2, "FA3": fa3, "FA4": fa4}, "FA3"),
        ((9, 0), {"FA2": fa2}, "FA2"),
        ((9, 0), {"FA2": fa2, "FA3": package("FA3 v2.8.3.post1")}, "FA3"),
        ((9, 0), {"FA2": fa2, "FA3": package("FA3 main", _flash_attn_forward=["q", "k", "v", "cache"])}, "FA2"),
        ((9, 0), {"FA2": fa2, "FA3": package("FA3 v2.8.0", _flash_attn_backward=["dout", "block_mask"])}, "FA2"),
        ((10, 0), {"FA2": fa2, "FA4": fa4}, "FA4"),
        ((10, 3), {"FA2": fa2, "FA4": fa4}, "FA4"),
        ((10, 0), {"FA2": fa2, "FA4": package("FA4 v2.8.3")}, "FA2"),
        ((8, 6), {"FA2": fa2, "FA3": fa3}, "FA2"),
        ((12, 0), {"FA2": fa2, "FA3": fa3, "FA4": fa4}, "FA2"),
        ((9, 0), {}, None),
    ],
)
def test_the_newest_interface_that_the_gpu_runs_is_chosen(install, capability, modules, chosen):
    install(capability, **modules)
    found = flash_attn._choose(64, softcap=False)
    assert (found and found.module) == (chosen and getattr(flash_attn, chosen))
    assert (flash_attn.unavailable() is None) == (chosen is not None)
    best = {8: "FA2", 9: "FA3", 10: "FA4", 12: "FA2"}[capability[0]]
    missing = missing_package(64, softcap=False)
    if best in (chosen, "FA2"):  # aten's kernel is FA2 as well
        assert missing is None
    else:
        assert missing[0].startswith(f"{getattr(flash_attn, best)}, the fastest")


@pytest.mark.parametrize("modules", [{"FA2": fa2}, {}, {"FA2": fa2, "FA3": fa3}], ids=["FA2", "none", "FA3"])
def test_the_first_log_line_says_what_a_missing_fa3_costs_and_how_to_install_it(install, modules, caplog, monkeypatch):
    """By `auto` or flash_attn, on a GPU that could run it; without any package `auto` chooses aten's kernel."""
    install((9, 0), **modules)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(aten, "unavailable", lambda: None)
    chosen = choose_kernel("auto", "cuda", torch.bfloat16, 128).__name__.rpartition(".")[2]
    assert chosen == ("flash_attn" if modules else "aten")
    (line,) = caplog.messages
    caplog.clear()
    if modules:
        choose_kernel("flash_attn", "cuda", torch.bfloat16, 128)
        assert caplog.messages == [line.replace("kernel auto", "kernel flash_attn")]
    told = (
        "flash_attn_interface, the fastest attention for this GPU, is not installed or has unknown arguments: updates "
        "take longer (about 13 % of an update of an 8B model, estimated for prompts of 8k tokens, 8 responses of 1k "
        "each): pip install --no-deps flash-attn-3 --index-url https://download.pytorch.org/whl/cu128"
    )
    end = "" if "FA3" in modules else f"; {told}"
    package = f" ({getattr(flash_attn, [*modules][-1])})" if modules else ""
    assert line == f"prefix: attention kernel auto: verl_prefix.core.kernels.{chosen}{package}{end}"
    monkeypatch.setattr(
        doctor, "_platform", lambda: types.SimpleNamespace(device_name="cuda", is_available=lambda: True)
    )
    advised = [f"{found.line}: {found.advice}" for found in doctor._check_kernels() if found.advice]
    assert advised == ([] if "FA3" in modules else [told])


@pytest.mark.parametrize(
    ("capability", "newest", "head_dim", "softcap", "deterministic", "runs"),
    [
        ((10, 0), "FA4", 128, True, True, True),
        ((10, 0), "FA4", 192, False, False, False),
        ((10, 0), "FA4", 160, False, False, False),
        ((10, 0), "FA4", 256, False, False, True),
        ((10, 0), "FA4", 256, True, False, False),
        ((9, 0), "FA3", 256, True, False, True),
        ((9, 0), "FA3", 192, False, True, True),
        ((9, 0), "FA3", 256, False, True, False),
    ],
)
def test_inputs_that_the_newest_interface_refuses_take_the_next_one(
    install, monkeypatch, capability, newest, head_dim, softcap, deterministic, runs
):
    """By the checks of their own code (`flash_attn._refusal`)."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    newer = {newest: fa4 if newest == "FA4" else fa3}
    install(capability, FA2=fa2, **newer)
    assert flash_attn._choose(head_dim, softcap).module == getattr(flash_attn, newest if runs else "FA2")
    flash_attn._installed.cache_clear()
    install(capability, **newer)
    reason = flash_attn.unsupported("cuda", torch.bfloat16, head_dim, softcap)
    assert reason is None if runs else reason.startswith(f"{getattr(flash_attn, newest)}: ")


VARIABLES = {"FLASH_ATTENTION_DETERMINISTIC": ("0", "1"), "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("1", "0")}


@pytest.mark.parametrize("by", ["torch's mode", *VARIABLES])
def test_a_kernel_is_chosen_anew_once_algorithms_must_be_deterministic(install, monkeypatch, by):
    install((9, 0), FA3=fa3)
    monkeypatch.setattr(aten, "unavailable", lambda: None)
    chosen = []
    for deterministic in (False, True, False):
        if by in VARIABLES:
            monkeypatch.setenv(by, VARIABLES[by][deterministic])
        else:
            monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda value=deterministic: value)
        with aten._deterministic_as_asked():
            assert torch.get_deterministic_debug_mode() == (2 if deterministic else 0)
        chosen.append(choose_kernel("auto", "cuda", torch.bfloat16, 256))
    assert chosen == [flash_attn, aten, flash_attn]


def test_on_a_gpu_nothing_falls_back_to_the_dense_reference_unasked(install):
    install((9, 0), FA2=fa2)
    told = r"kernel for cuda, torch.float32.*; on FSDP2 set \+\S+=bf16 .*autocast\), or set .*reference"
    with pytest.raises(ValueError, match=told), advising():
        choose_kernel("auto", "cuda", torch.float32, 64)
    with (
        pytest.raises(ValueError, match=r"bfloat16, head dim 512 .*up to 256\); set .*attention=reference"),
        advising(),
    ):
        choose_kernel("auto", "cuda", torch.bfloat16, 512)
    assert choose_kernel("auto", "cuda", torch.bfloat16, 64, softcap=True) is flash_attn
