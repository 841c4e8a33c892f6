import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
URL = "https://github.com/verl-prefix/verl_prefix"
VERSION = re.search(r'__version__ = "(.*)"', (ROOT / "verl_prefix/__init__.py").read_text())[1]


def with_absolute_links(page: str) -> str:
    """README as an index shows it: what it links by a path lies in the repository, at this version's tag."""

    def absolute(link: re.Match) -> str:
        path = f"README.md{link[2]}" if link[2].startswith("#") else link[2]
        kind = "raw" if path.endswith((".png", ".svg")) else "blob"
        return f"{link[1]}{URL}/{kind}/v{VERSION}/{path}"

    parts = re.split(r"(^```.*?^```)", page, flags=re.M | re.S)
    parts[::2] = [re.sub(r'(\]\(|(?:src|srcset|href)=")(?![a-z]+:)([^)"\s]+)', absolute, part) for part in parts[::2]]
    return "".join(parts)


class Sdist(sdist):
    """Everything that `make lint` and `make test` read."""

    def make_distribution(self) -> None:
        for folder in (".ci", ".github", "examples", "recipes", "tests", "verl_prefix"):
            self.filelist.graft(folder)
        for pattern in ("*.md", "CITATION.cff", "Makefile", ".gitignore"):
            self.filelist.include(pattern)
        self.filelist.global_exclude("*.py[co]")
        super().make_distribution()


setup(
    name="verl-prefix",
    version=VERSION,
    description="Shared-prefix GRPO for verl's actor: a group's prompt is computed once",
    long_description=with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    url=URL,
    project_urls={
        "Documentation": f"{URL}#readme",
        "Changes": f"{URL}/blob/main/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    },
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["verl", "GRPO", "reinforcement learning", "LLM", "shared prefix", "FSDP"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10,<3.13",
    # verl's wheel ships top-level packages named `tests` and `scripts`; ours must not add more.
    packages=find_packages(include=["verl_prefix", "verl_prefix.*"]),
    package_data={"verl_prefix": ["config/**/*.yaml", "py.typed"]},
    # torch, ray, transformers and vllm stay at the user's own pins: no bounds beyond verl's.
    install_requires=[
        "verl>=0.9.1,<=0.10.0.dev0",  # releases and main branch; versions.py refuses those that were not tested
        "ray",
        "torch",
        "hydra-core",
        # verl's v1 trainer imports these unconditionally, but only the extra verl[verl-core] installs them,
        # together with torchcodec, nvtx and other packages that nothing here needs.
        "TransferQueue>=0.1.10,<0.1.12",
        "cachetools",
        "fastapi",
        "msgspec",
        "packaging",
        "psutil",
        "pyzmq",
        "rich",
        "safetensors",
        "uvicorn",
        "xxhash",
    ],
    extras_require={
        # matplotlib: plots of ab and bench. Not vllm: verl has an extra for it, which pins torch and transformers too.
        "gpu": ["flash-attn", "matplotlib"],
        "cpu": ["gguf", "matplotlib"],
        # For recipes/video_rlvr; qwen-vl-utils, torchvision and decord are what verl decodes video with.
        "video": [
            "av",
            "decord ; platform_machine == 'x86_64'",
            "jiwer",
            "qwen-vl-utils",
            "rouge-score",
            "torchvision",
        ],
        "test": [
            "hypothesis",
            "mypy",
            "prefix-grouper",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "triton ; sys_platform == 'linux'",
        ],
    },
    cmdclass={"sdist": Sdist},
    entry_points={
        "verl.plugins": ["prefix = verl_prefix.plugin"],
        "console_scripts": ["verl-prefix = verl_prefix.cli:main"],
    },
)
