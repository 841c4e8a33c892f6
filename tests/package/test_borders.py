"""The rooms and who may import whom: `core` knows torch alone, `models` adds transformers, nothing imports `tools`."""

import ast
import sys
from pathlib import Path

import pytest

import verl_prefix

PACKAGE = Path(verl_prefix.__file__).parent
# Room -> the rooms that it may import, and packages beside torch; a package of a longer path's own stands there.
ROOMS = {
    "core": ("", ""),
    "models": ("core versions", "transformers xxhash"),
    "auto": ("core models files", "transformers"),
    "config": ("core models versions", "verl transformers omegaconf huggingface_hub"),
    "backends": ("core models auto config cpu engine versions", "verl tensordict"),
    "engine": ("core models auto config trace versions", "verl tensordict transfer_queue safetensors numpy"),
    "trace": ("config files versions", "verl tensordict huggingface_hub safetensors"),
    "trainer": ("core models config versions", "verl ray omegaconf transfer_queue"),
    "cpu": ("models", "verl ray psutil omegaconf transformers fastapi uvicorn"),
    "testing": ("core models", "transformers tokenizers"),
    "tools": ("core models auto config engine backends trace trainer files versions testing plugin "
              "search_path", "verl transformers numpy pyarrow "
              "hydra omegaconf tensordict rich tqdm packaging tensorboard huggingface_hub yaml"),
    "files": ("", ""),
    "versions": ("", ""),
    "api": ("core models versions", ""),
    "plugin": ("cpu trainer config search_path", "verl omegaconf"),
    "search_path": ("", "hydra"),
    "cli": ("tools trace versions", ""),
    "__init__": ("api", ""),
}  # fmt: skip
# A package that few files know.
FILES = {
    "config/model.py": "peft",
    "core/kernels/flash_attn.py": "flash_attn flash_attn_interface flash_attn_3 flash_attn_4 packaging",
    "core/kernels/fused_merge.py": "triton",
    "cpu/vllm_worker.py": "vllm",
    "models/mcore.py": "megatron",
    "models/mcore_pipeline.py": "megatron",
    "models/veomni.py": "safetensors",
    "tools/plots.py": "matplotlib",
    "tools/bench/arms.py": "prefix_grouper",
    "tools/bench/measure.py": "tqdm",
    "tools/doctor.py": "trl",
    "tools/simulate/model.py": "peft",
}
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def names(module: str | Path, top_only: bool = False) -> set[str]:
    """Dotted names that a file imports anywhere, or outside of functions: when it is imported itself, and for types."""
    tree = ast.parse((PACKAGE / module).read_text())
    found = set()
    guarded = [node for test in tree.body if isinstance(test, ast.If) for node in test.body]
    for node in [*tree.body, *guarded] if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(module: str) -> str:
    return "verl_prefix." + module.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def room(module: str) -> str:
    return module.partition("/")[0].removesuffix(".py")


def crossings(module: str, imported: set[str]) -> list[str]:
    """Imports of a file that leave its room where they may not."""
    rooms, packages = (words.split() for words in ROOMS[room(module)])
    packages += ["torch", *sys.stdlib_module_names, *FILES.get(module, "").split()]
    found = []
    for name in imported:
        package, _, rest = name.partition(".")
        if package == "verl_prefix":
            inside = rest.partition(".")[0]
            if inside not in (*rooms, room(module)):
                found.append(name)
        elif package not in packages:
            found.append(name)
    return sorted(found)


def test_imports_stay_inside_the_borders():
    found = {module: crossings(module, names(module)) for module in MODULES}
    assert not {module: imported for module, imported in found.items() if imported}


@pytest.mark.parametrize(
    "module, imported",
    [
        ("core/runner.py", "verl_prefix.models.hookup.HookedModel"),
        ("core/packed_row.py", "transformers.AutoConfig"),
        ("core/kernels/cpu.py", "flash_attn.flash_attn_func"),
        ("models/vision.py", "verl.utils"),
        ("engine/prefix_engine.py", "verl_prefix.tools.ab.replay"),
        ("trainer/prefix_sync.py", "verl_prefix.engine.pass_results"),
        ("tools/doctor.py", "matplotlib.pyplot"),
    ],
)
def test_a_wrong_import_is_named(module, imported):
    assert crossings(module, names(module) | {imported}) == [imported]


def test_no_circle():
    """Of imports outside of functions."""
    modules = {dotted(module): module for module in MODULES}
    graph = {}
    for name, module in modules.items():
        candidates = {found for x in names(module, top_only=True) for found in (x, x.rpartition(".")[0])}
        graph[name] = candidates & set(modules) - {name}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_test_file_is_imported_by_another():
    """What several need stands in tests/helpers."""
    files = {path.stem: path for path in Path(__file__).resolve().parents[1].rglob("*.py")}
    tests = {name for name in files if name.startswith("test_")}
    found = {name: tests & {x.split(".")[0] for x in names(path)} for name, path in files.items()}
    assert len(tests) > 60 and not {name: imported for name, imported in found.items() if imported}
