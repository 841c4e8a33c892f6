"""The wheel holds what a user needs and nothing that shadows a package of theirs."""

import ast
import configparser
import email
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FREE = {"torch", "vllm", "transformers", "ray", "flash-attn"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of a copy of the checkout: pip builds in the source tree and would leave build/ behind."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("verl_prefix", "recipes", "examples", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(out), str(source)],
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def _metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (n for n in wheel.namelist() if n.count("/") == 1 and n.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def _requirements(wheel: zipfile.ZipFile) -> list[str]:
    return email.message_from_string(_metadata(wheel, "METADATA")).get_all("Requires-Dist")


@pytest.fixture(scope="module")
def site(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip installs it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder]
    subprocess.run([*command, wheel.filename], env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}, check=True)
    return folder


def _git(folder: Path, *words: str) -> str:
    names = ["-c", "user.name=user", "-c", "user.email=user@example.org"]
    return subprocess.run(["git", "-C", folder, *names, *words], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("place", ["outside git", "a user's repository"])
def test_an_installed_package_reports_its_version_and_no_ones_commit(
    wheel: zipfile.ZipFile, site: Path, place: str, python: str, tmp_path: Path
) -> None:
    """In a user's repository the environment often lies in it, beside files of theirs."""
    shutil.copytree(site, tmp_path / "env")
    if place != "outside git":
        shutil.copy(ROOT / "LICENSE", tmp_path / "setup.py")
        _git(tmp_path, "init", "--quiet")
        _git(tmp_path, "add", "setup.py")
        _git(tmp_path, "commit", "--quiet", "--message", "theirs")
    words = "bench --shape tiny --rows 9/4/2 --arms stock,packed --repeats 1 --truth none --device cpu --no-memory"
    done = subprocess.run(
        [python, "-m", "verl_prefix.cli", *words.split(), "--out", "bench.json"], cwd=tmp_path, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "env")}, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["git"] == {"commit": None, "dirty": False}
    assert report["versions"]["verl-prefix"] == email.message_from_string(_metadata(wheel, "METADATA"))["Version"]
    assert "; installed. Model shape tiny" in (tmp_path / "bench.md").read_text()


@pytest.mark.parametrize("ours", [True, False])
def test_a_checkouts_commit_is_its_own(site: Path, ours: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a user's repository that holds a copy of the package beside a setup.py of theirs it is not known."""
    from verl_prefix import versions

    monkeypatch.delenv(versions.COMMIT, raising=False)
    shutil.copytree(site / "verl_prefix", tmp_path / "verl_prefix")
    shutil.copy(ROOT / ("setup.py" if ours else "LICENSE"), tmp_path / "setup.py")
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", "--all")
    _git(tmp_path, "commit", "--quiet", "--message", "first")
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "verl_prefix" / "versions.py"))
    commit = _git(tmp_path, "rev-parse", "HEAD").strip()
    assert versions.git_state() == ({"commit": commit, "dirty": False} if ours else {"commit": None, "dirty": True})


def test_wheel_ships_every_module_and_every_yaml_file(wheel: zipfile.ZipFile) -> None:
    shipped = {n for n in wheel.namelist() if n.startswith("verl_prefix/")}
    kinds = ("*.py", "*.yaml", "py.typed")
    sources = {str(p.relative_to(ROOT)) for kind in kinds for p in (ROOT / "verl_prefix").rglob(kind)}
    assert any(name.endswith(".yaml") for name in sources)
    assert shipped == sources


def test_wheel_holds_the_license(wheel: zipfile.ZipFile) -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "APPENDIX: How to apply" in text
    (shipped,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
    assert wheel.read(shipped).decode() == text
    metadata = email.message_from_string(_metadata(wheel, "METADATA"))
    assert (metadata["License"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")


def test_wheel_has_no_other_top_level_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"verl_prefix"}


def test_verl_finds_the_plugin_and_the_shell_finds_the_command(wheel: zipfile.ZipFile) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(_metadata(wheel, "entry_points.txt"))
    assert dict(entry_points["verl.plugins"]) == {"prefix": "verl_prefix.plugin"}
    assert dict(entry_points["console_scripts"]) == {"verl-prefix": "verl_prefix.cli:main"}


def test_import_verl_loads_of_us_the_platform_alone() -> None:
    """Whatever the config will say: engine, trainers, and what of verl and transformers they import, come when a config
    asks for them."""

    def loaded(policy: str) -> set[str]:
        code = "import sys, verl; print('LOADED', *sys.modules)"
        env = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
        env |= {"VERL_USE_EXTERNAL_PLUGINS": policy}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return set(done.stdout.rpartition("LOADED ")[2].split())

    ours = {"verl_prefix", "verl_prefix.plugin", "verl_prefix.cpu", "verl_prefix.cpu.platform"}
    added = loaded("prefix") - loaded("none")
    assert {name for name in added if name.split(".")[0] not in ("hydra", *sys.stdlib_module_names)} == ours


def test_no_requirement_moves_the_users_torch_vllm_transformers_or_ray(wheel: zipfile.ZipFile) -> None:
    for requirement in _requirements(wheel):
        text = requirement.split(";")[0].strip()
        name = re.match(r"[A-Za-z0-9._-]+", text)[0]
        # verl's own extras pin all of them.
        assert not text.startswith("verl["), requirement
        assert name.lower() not in FREE or text == name, requirement


def test_what_verls_trainer_imports_comes_with_the_package(wheel: zipfile.ZipFile) -> None:
    required = {re.match(r"[A-Za-z0-9._-]+", r)[0].lower() for r in _requirements(wheel) if "extra ==" not in r}
    assert {"verl", "transferqueue", "pyzmq", "msgspec", "fastapi", "uvicorn", "cachetools"} <= required


def _names(requirements: list[str]) -> set[str]:
    found = [re.match(r"[A-Za-z0-9._-]+", line)[0] for line in requirements if "extra ==" not in line]
    return {re.sub(r"[-_.]+", "-", name).lower() for name in found}


def test_what_our_modules_import_comes_with_the_package(wheel: zipfile.ZipFile) -> None:
    """Imports at the head of a module: declared by us, or by verl, transformers or hydra, which we require."""
    declared = _names(_requirements(wheel))
    for package in ("verl", "transformers", "hydra-core"):
        declared |= {package} | _names(importlib.metadata.requires(package))
    distributions = importlib.metadata.packages_distributions()
    for path in (ROOT / "verl_prefix").rglob("*.py"):
        if path.name in ("vllm_worker.py", "fused_merge.py"):  # vLLM imports it; we do where triton is
            continue
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"verl_prefix"}:
                assert _names(distributions[top]) & declared, f"{path} imports {top}, which setup.py does not declare"


def test_constraints_pin_torch_and_verl_to_one_release_without_a_local_version() -> None:
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pins and any(pin.startswith("verl==0.9.") for pin in pins)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; python_version >= \"3\.11\")?", pin) for pin in pins)
