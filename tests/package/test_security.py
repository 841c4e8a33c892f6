"""Data stays data: nothing of ours unpickles or evaluates what it reads, and importing opens no connection."""

import ast
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
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
    "pandas.read_pickle",
    "pd.read_pickle",
}


def unsafe(tree: ast.AST) -> list[str]:
    """What a source does that could run code from data, with its line."""
    found = []
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
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_the_check_above_sees(line):
    assert unsafe(ast.parse(line))


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
names.remove("verl_prefix.cpu.vllm_worker")  # vLLM's own process imports it, and only vLLM's installation can
for name in names:
    importlib.import_module(name)
print(len(names), "modules")
"""


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(False, id="all modules", marks=pytest.mark.full),
        pytest.param(True, id="the check sees a connection"),
    ],
)
def test_importing_opens_no_connection(probe):
    command = [sys.executable, "-c", IMPORT_ALL, *(["probe"] if probe else [])]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (result.returncode == 0) != probe, result.stdout + result.stderr
    assert ("modules" in result.stdout) != probe and ("network: " in result.stderr) == probe
