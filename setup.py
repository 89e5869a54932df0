"""Metadata of the package; settings of the tools are in pyproject.toml, exact versions in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"

setup(
    name="longstraw_megatron",
    version="0.1.0",
    description="GRPO on million-token prompts with Megatron-Core: the exact gradient, at the memory of one segment",
    long_description=README.read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.12",
    # The Hydra configs live beside the package in a checkout and inside it after an install.
    packages=[
        *find_packages(include=["longstraw_megatron", "longstraw_megatron.*"]),
        "longstraw_megatron.hydra_configs",
    ],
    package_dir={"longstraw_megatron.hydra_configs": "hydra_configs"},
    package_data={"longstraw_megatron.hydra_configs": ["*.yaml", "*/*.yaml"]},
    entry_points={"console_scripts": ["longstraw=longstraw_megatron.cli:main"]},
    install_requires=[
        "hydra-core>=1.3,<1.4",
        "matplotlib",
        "megatron-core>=0.19,<0.20",
        "numpy",
        "psutil",  # Megatron's distributed checkpoint writer imports it without declaring it
        "safetensors",
        "torch>=2.9",
        "tqdm",
        "wandb",
    ],
    extras_require={
        "gpu": ["transformer-engine[core_cu13,pytorch]", "flash-linear-attention>=0.5.2"],
        "dev": ["hypothesis", "pytest", "pytest-xdist", "ruff", "transformers"],
    },
)
