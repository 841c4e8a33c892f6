"""Data stays data: nothing of ours unpickles or evaluates what it reads. Importing opens no connection, and what runs
listens on this machine alone.
"""

import ast
import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("verl_prefix", "recipes", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
EVALUATORS = {"eval", "exec", "compile", "__import__"}
# Call -> the keyword and value that make it safe; torch.load's default differs between torch versions.
SAFE_ONLY_WITH = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
UNSAFE = {
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "pandas.read_pickle", "pd.read_pickle",
    "tempfile.mktemp", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
    "torch.hub.load",
}  # fmt: skip
STARTS = {"subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
# Asserts that do more than tell mypy a type. `python -O` drops them, so none may be of what a user gives.
INVARIANTS = {
    "backends/pipeline.py": ["plan.depth < 2"],
    "core/calls.py": [
        "len(self.q) == len(self.k)",
        "not self.q_segments or {*self.q} <= {*self.q_segments}",
        "all((b > a for a, b in pairwise(bounds)))",
    ],
    "core/states.py": [
        "start == end",
        "of == 'strands' or sum((len(found.numbers) for found in starts)) == sum((end > 0 for _, end in ends))",
    ],
    "trainer/mini_batches.py": ["len(keys) % num_mini_batches == 0"],
}


def unsafe(tree: ast.AST) -> list[str]:
    """What a source does that could run code from data, with its line."""
    found, lists = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            lists |= {ast.unparse(target) for target in node.targets}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"line {node.lineno}: import {name}" for name in names if name.split(".")[0] in UNPICKLERS]
        if not isinstance(node, ast.Call):
            continue
        name, keywords = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
        values = {key: value.value for key, value in keywords.items() if isinstance(value, ast.Constant)}
        keyword, safe = SAFE_ONLY_WITH.get(name, (None, None))
        if name in EVALUATORS | UNSAFE or (keyword and values.get(keyword) is not safe):
            found.append(f"line {node.lineno}: {name}")
        words = node.args[0] if node.args else keywords.get("args")
        if name in STARTS and not (isinstance(words, ast.List) or (words and ast.unparse(words) in lists)):
            found.append(f"line {node.lineno}: {name} of what is no list")
        if "shell" in keywords and values.get("shell") is not False:
            found.append(f"line {node.lineno}: {name}(shell=...)")
        if "trust_remote_code" in keywords and values.get("trust_remote_code") is True:
            found.append(f"line {node.lineno}: {name}(trust_remote_code=True)")
    return found


def test_no_code_of_ours_runs_data():
    found = {source: unsafe(ast.parse((ROOT / source).read_text())) for source in SOURCES}
    assert not {source: lines for source, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "eval(text)", "torch.load(path)", "os.system(text)",
        "torch.load(path, weights_only=False)", "subprocess.run(text, shell=True)", "np.load(path)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)", "subprocess.run(text)", "tempfile.mktemp()",
        "command = text.split()\nsubprocess.Popen(command)",
    ],
)  # fmt: skip
def test_the_check_above_sees(line):
    assert unsafe(ast.parse(line))


def test_no_assert_stands_between_a_user_and_the_code():
    found = {}
    for path in sorted((ROOT / "verl_prefix").rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
        if more := [
            test for node in nodes if not re.search(r"isinstance\(| is not None", test := ast.unparse(node.test))
        ]:
            found[str(path.relative_to(ROOT / "verl_prefix"))] = more
    assert found == INVARIANTS


def listen(rank, folder):
    """On a rank of `ab`: joins the others, and writes what it listens on and which interface gloo was told."""
    import os

    import psutil
    import torch

    from verl_prefix.tools.ab.command import join_ranks

    join_ranks(rank, 2, f"file://{folder}/group")
    torch.distributed.all_reduce(torch.ones(1))
    hosts = [x.laddr.ip for x in psutil.Process().net_connections("inet") if x.status == psutil.CONN_LISTEN]
    Path(folder, str(rank)).write_text(json.dumps([hosts, os.environ["GLOO_SOCKET_IFNAME"]]))
    torch.distributed.barrier()


@pytest.mark.more
def test_ranks_of_ab_listen_on_this_machine_alone(monkeypatch, tmp_path):
    """By default gloo takes the address of the host's name, which others reach on most machines."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    ranks = [multiprocessing.get_context("spawn").Process(target=listen, args=(i, str(tmp_path))) for i in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
    found = [json.loads((tmp_path / str(i)).read_text()) for i in range(2)]
    assert all(hosts and set(hosts) <= {"127.0.0.1", "::1"} and name == "lo" for hosts, name in found), found


IMPORT_ALL = """
import importlib, pkgutil, socket, sys

def hook(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        if not (args and isinstance(args[0], socket.socket) and args[0].family == socket.AF_UNIX):
            raise SystemExit(f"network: {event} {args[1:]}")

sys.addaudithook(hook)
if sys.argv[1:] == ["probe"]:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
import verl_prefix
names = [module.name for module in pkgutil.walk_packages(verl_prefix.__path__, "verl_prefix.")]
# Of vLLM, VeOmni and Megatron, which only their installations can import.
for alone in (
    "cpu.vllm_worker", "backends.veomni", "backends.megatron", "backends.megatron_check", "backends.megatron_runner",
    "backends.pipeline", "models.mcore", "models.mcore_pipeline",
):
    names.remove(f"verl_prefix.{alone}")
for name in names:
    importlib.import_module(name)
print(len(names), "modules")
"""


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(False, id="all modules", marks=pytest.mark.more),
        pytest.param(True, id="the check sees a connection"),
    ],
)
def test_importing_opens_no_connection(probe):
    command = [sys.executable, "-c", IMPORT_ALL, *(["probe"] if probe else [])]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (result.returncode == 0) != probe, result.stdout + result.stderr
    assert ("modules" in result.stdout) != probe and ("network: " in result.stderr) == probe
