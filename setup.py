from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="verl-prefix",
    version="0.1.0",
    description="Shared-prefix GRPO for verl's FSDP actor: a group's prompt is computed once",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["verl", "GRPO", "reinforcement learning", "LLM", "shared prefix", "FSDP"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
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
        # Not verl[vllm]: that extra pins torch, vllm and transformers.
        "vllm": ["vllm"],
        "flash": ["flash-attn"],
        "ab": ["matplotlib"],  # its plots, and those of bench
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
    entry_points={
        "verl.plugins": ["prefix = verl_prefix.plugin"],
        "console_scripts": ["verl-prefix = verl_prefix.cli:main"],
    },
)
