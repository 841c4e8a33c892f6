"""sdist and wheel: what `pip install verl-prefix` gives, and nothing that shadows a package of a user's."""

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
import tarfile
import threading
import zipfile
from fnmatch import fnmatch
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_prefix import versions

ROOT = Path(__file__).resolve().parents[2]
FREE = {"torch", "vllm", "transformers", "ray", "flash-attn"}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of an index: the sdist of a copy of the checkout (builds leave files there), and its wheel."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("index") / "simple" / "verl-prefix"
    out.mkdir(parents=True)
    shutil.copytree(ROOT, source, ignore=_not_ours, dirs_exist_ok=True)
    code = "import sys, setuptools.build_meta as build; build.build_{}(sys.argv[1])"
    _run([sys.executable, "-c", code.format("sdist"), out], cwd=source)
    (sdist,) = out.iterdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(source.parent, filter="data")
    _run([sys.executable, "-c", code.format("wheel"), out], cwd=source.parent / sdist.name.removesuffix(".tar.gz"))
    return out


def _not_ours(folder: str, names: list[str]) -> set[str]:
    """What git ignores, but for the byte code that lies everywhere: the sdist has to leave it out."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()} - {"__pycache__"} | {".git"}
    return {name for name in names if any(fnmatch(name, pattern) for pattern in ignored)}


def _run(command: list[str | Path], **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(index: Path) -> zipfile.ZipFile:
    (path,) = index.glob("*.whl")
    return zipfile.ZipFile(path)


def _metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (n for n in wheel.namelist() if n.count("/") == 1 and n.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def _requirements(wheel: zipfile.ZipFile) -> list[str]:
    return email.message_from_string(_metadata(wheel, "METADATA")).get_all("Requires-Dist")


@pytest.fixture(scope="module")
def site(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install verl-prefix` leaves, of an index on this machine and with no other settings of pip."""
    folder = tmp_path_factory.mktemp("site")
    handler = partial(SimpleHTTPRequestHandler, directory=index.parents[1])
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "NO_PROXY": "127.0.0.1"}
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/simple"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir"]
        _run([*pip, "--index-url", url, "--target", folder, "verl-prefix"], env=env)
        server.shutdown()
    return folder


@pytest.mark.more
def test_what_pip_installs_by_name_imports_and_runs(site: Path, index: Path, tmp_path: Path) -> None:
    code = "import verl_prefix; print(verl_prefix.__version__, verl_prefix.__file__)"
    env = os.environ | {"PYTHONPATH": str(site)}
    version, file = _run([sys.executable, "-c", code], env=env, cwd=tmp_path).split()
    assert Path(file) == site / "verl_prefix" / "__init__.py"
    assert {path.name.split("-")[1].removesuffix(".tar.gz") for path in index.iterdir()} == {version}
    command = [sys.executable, site / "bin" / "verl-prefix"]
    assert f"verl-prefix {version} (verl " in _run([*command, "--version"], env=env, cwd=tmp_path)
    assert "doctor" in _run([*command, "--help"], env=env, cwd=tmp_path)


def test_the_sdist_holds_every_file_of_the_repository(index: Path) -> None:
    """So that its tests run: `make test` in an unpacked one."""
    (path,) = index.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert {"setup.py", "Makefile", "tests/conftest.py", ".ci/run", ".github/workflows/test.yml"} < files
    assert not [name for name in files if name.endswith(".pyc")]
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False)
    if tracked.returncode or not (ROOT / ".git").exists():
        pytest.skip("no git: what belongs to the repository is not known")
    assert set(tracked.stdout.split()) - files == set()


def test_the_page_on_an_index_links_into_the_repository(wheel: zipfile.ZipFile) -> None:
    """Every relative link of README.md as an absolute one, pictures as files, code as it stands."""
    found = email.message_from_string(_metadata(wheel, "METADATA"))
    page, readme = found.get_payload(), (ROOT / "README.md").read_text()
    links = re.compile(r'(?:\]\(|(?:src|srcset|href)=")([^)"\s]+)')
    targets = links.findall(page)
    assert targets and all(re.match(r"https?://", link) for link in targets)
    root = f"https://github.com/verl-prefix/verl_prefix/(?:blob|raw)/v{re.escape(found['Version'])}/"
    paths = [re.match(root, link) and re.sub(root, "", link) for link in targets]
    assert [path for path in paths if path] == [
        f"README.md{link}" if link.startswith("#") else link for link in links.findall(readme) if "://" not in link
    ]
    for link in targets:
        assert ("/raw/" in link) == link.endswith((".png", ".svg")) or not re.match(root, link), link
    fences = re.compile(r"^```.*?^```", flags=re.M | re.S)
    assert fences.findall(page) == fences.findall(readme)


def test_an_index_shows_where_the_project_lives_and_what_runs_it(wheel: zipfile.ZipFile) -> None:
    found = email.message_from_string(_metadata(wheel, "METADATA"))
    urls = dict(line.split(", ") for line in found.get_all("Project-URL"))
    assert set(urls) >= {"Changes", "Documentation", "Issues"}
    assert all(url.startswith("https://github.com/verl-prefix/verl_prefix") for url in urls.values())
    pythons = [name for name in found.get_all("Classifier") if re.search(r":: 3\.\d+$", name)]
    assert [name.rpartition(" ")[2] for name in pythons] == ["3.10", "3.11", "3.12"]
    assert set(found.get_all("Provides-Extra")) == {"gpu", "cpu", "test", "video"}


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
    version = email.message_from_string(_metadata(wheel, "METADATA"))["Version"]
    assert report["versions"]["verl-prefix"] == version
    text = (tmp_path / "bench.md").read_text()
    assert f"; verl-prefix {version}. Model shape tiny" in text and text.count("verl-prefix") == 1


@pytest.mark.parametrize("ours", [True, False])
def test_a_checkouts_commit_is_its_own(site: Path, ours: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a user's repository that holds a copy of the package beside a setup.py of theirs it is not known."""
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
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")


def test_wheel_has_no_other_top_level_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"verl_prefix"}


def test_verl_finds_the_plugin_and_the_shell_finds_the_command(wheel: zipfile.ZipFile) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(_metadata(wheel, "entry_points.txt"))
    assert dict(entry_points["verl.plugins"]) == {"prefix": "verl_prefix.plugin"}
    assert dict(entry_points["console_scripts"]) == {"verl-prefix": "verl_prefix.cli:main"}


@pytest.mark.parametrize("platform", [{}, {"VERL_PLATFORM": "cpu"}], ids=["any", "cpu"])
@pytest.mark.parametrize("is_new", [False, pytest.param(True, marks=pytest.mark.more)])
def test_import_verl_loads_of_us_the_search_path_and_the_platform_alone(
    python: str, is_new: bool, platform: dict[str, str]
) -> None:
    """Whatever the config will say: engine, trainers, and what of verl and transformers they import, come when a config
    asks for them. In test-more in a new process: what `python` starts with, nobody can be seen to load."""

    def loaded(policy: str) -> set[str]:
        code = "import sys, verl; print('LOADED', *sys.modules)"
        env = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
        env |= {"VERL_USE_EXTERNAL_PLUGINS": policy} | (platform if policy == "prefix" else {})
        executable = sys.executable if is_new else python
        done = subprocess.run([executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return set(done.stdout.rpartition("LOADED ")[2].split())

    ours = {f"verl_prefix{name}" for name in ("", ".plugin", ".search_path", ".cpu", ".cpu.platform")}
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
    distributions = importlib.metadata.packages_distributions()  # Python 3.10 lists those with a top_level.txt alone
    for path in (ROOT / "verl_prefix").rglob("*.py"):
        if path.name in (
            "vllm_worker.py",
            "fused_merge.py",
            "mcore.py",
            "mcore_pipeline.py",
        ):  # of vLLM; where triton or Megatron is
            continue
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"verl_prefix"}:
                found = _names(distributions.get(top, [top]))
                assert found & declared, f"{path} imports {top}, which setup.py does not declare"


def test_the_workflow_lints_and_tests_every_python_that_setup_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads `on` so
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make setup", "make lint", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{command.removeprefix('make ')}:", makefile, flags=re.M) for command in commands)
    setup = (ROOT / "setup.py").read_text()
    assert job["strategy"]["matrix"]["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', setup)


def test_the_dockerfile_adds_a_tested_verl_and_this_package_to_verls_image() -> None:
    text = (ROOT / "examples" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    image, start, verl, copy, install = lines
    assert image.startswith("ARG IMAGE=verlai/verl:") and start == "FROM ${IMAGE}"
    assert verl.rpartition("verl==")[2] in versions.TESTED_VERL
    assert (copy, install.split()[-1]) == ("COPY . /opt/verl_prefix", "/opt/verl_prefix")


def test_the_citation_names_this_project_and_both_papers() -> None:
    """The keys that Citation File Format 1.2.0 requires, and each paper under its number."""
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0" and found["message"] and "version" not in found
    assert found["repository-code"] == "https://github.com/verl-prefix/verl_prefix"
    papers = found["references"]
    for work in (found, *papers):
        assert work["title"] and all(
            "name" in who or {"given-names", "family-names"} == set(who) for who in work["authors"]
        )
    assert [paper["type"] for paper in papers] == ["article", "article"]
    numbers = [paper["identifiers"][0]["value"].removeprefix("arXiv:") for paper in papers]
    assert numbers == [paper["url"].removeprefix("https://arxiv.org/abs/") for paper in papers]
    readme = (ROOT / "README.md").read_text()
    assert len(set(numbers)) == 2 and all(f"arxiv.org/abs/{number}" in readme for number in numbers)


def _pins() -> list[str]:
    lines = (ROOT / ".ci" / "requirements-cpu.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_constraints_pin_torch_and_verl_to_one_release_without_a_local_version() -> None:
    pins = _pins()
    assert "torch==2.13.0" in pins and any(pin.startswith("verl==0.9.") for pin in pins)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; python_version >= \"3\.11\")?", pin) for pin in pins)


def test_requirements_have_ranges_where_internals_are_used_and_pins_where_tests_pass(wheel: zipfile.ZipFile) -> None:
    """verl and TransferQueue have ranges. Another bound would move what a user's environment has: `make setup` pins."""
    requirements = [Requirement(line) for line in _requirements(wheel)]
    bounded = {str(x.name): str(x.specifier) for x in requirements if x.specifier}
    assert bounded.keys() == {"verl", "TransferQueue"}
    assert all(re.search("<", bounds) and re.search(">=", bounds) for bounds in bounded.values())
    pins = {canonicalize_name(pin.name): pin.specifier for pin in map(Requirement, _pins())}
    for requirement in requirements:
        if "gpu" not in str(requirement.marker):
            (pin,) = pins[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pin.version, prereleases=True), requirement
