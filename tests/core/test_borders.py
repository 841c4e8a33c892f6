"""Who may import whom (design: verl, ray and hydra only at the edges, transformers only in `models`)."""

import ast
from pathlib import Path

import pytest

import verl_prefix

PACKAGE = Path(verl_prefix.__file__).parent
EDGES = ("plugin.py", "engine/", "trainer.py", "config/", "cpu/")
MAY_IMPORT = {
    "verl": EDGES,
    "ray": EDGES,
    "hydra": EDGES,
    "omegaconf": EDGES,
    "tensordict": EDGES,
    "transformers": ("models.py", "testing.py", "bench/", "config/", "cpu/"),
    "vllm": ("cpu/",),
    "matplotlib": ("plots.py",),
}
LAYERS = [
    "groups", "kernels", "layout", "prefix_cache", "offload", "attention", "waves", "faults", "cost", "vision",
    "models", "schedule", "verify", "gate", "api",
]  # fmt: skip


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_outside_packages_stay_at_the_edges(module):
    for name in imports(PACKAGE / module):
        allowed = MAY_IMPORT.get(name.split(".")[0])
        assert allowed is None or module.startswith(allowed), f"{module} imports {name}"


@pytest.mark.parametrize("layer", LAYERS)
def test_dependencies_point_one_way(layer):
    path = PACKAGE / f"{layer}.py" if (PACKAGE / f"{layer}.py").exists() else PACKAGE / layer / "__init__.py"
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("verl_prefix.")} - {layer}
    assert ours <= set(LAYERS[: LAYERS.index(layer)]), f"{layer} imports {sorted(ours)}"
