"""`longstraw doctor`: what this machine has, what is missing, and what to do about it.

Nothing heavy is imported: packages are looked up by their metadata and files.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
from packaging.requirements import Requirement

from longstraw_megatron.compose import load_config
from longstraw_megatron.logging import format_bytes, format_table

Status = Literal["ok", "missing", "wrong"]

# What a run imports: distribution and wanted versions, as in setup.py.
REQUIRED = (
    *("hydra-core>=1.3,<1.4", "matplotlib", "megatron-core>=0.19,<0.20", "numpy", "psutil", "safetensors"),
    *("torch>=2.9", "tqdm", "wandb"),
)
APEX_SOURCE_BUILD = "build NVIDIA/apex from source with its C++ and CUDA extensions (the package index's is another)"
APEX_EXTENSION = "fused_weight_gradient_mlp_cuda"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    version: str | None
    status: Status
    required: bool
    note: str = ""  # what it is for, or what to do


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_required() -> list[Finding]:
    """Python and the packages without which no run starts."""
    python = platform.python_version()
    findings = [Finding("python", python, "ok" if sys.version_info >= (3, 12) else "wrong", True, "3.12 or newer")]
    for text in REQUIRED:
        requirement = Requirement(text)
        version = _version(requirement.name)
        if version is None:
            findings.append(Finding(requirement.name, None, "missing", True, f"pip install '{text}'"))
        else:
            fits = requirement.specifier.contains(version, prereleases=True)
            note = "" if fits else f"wanted {requirement.specifier}: pip install '{text}'"
            findings.append(Finding(requirement.name, version, "ok" if fits else "wrong", True, note))
    return findings


def check_apex(search_path: Sequence[str] | None = None, *, has_gpu: bool = True) -> Finding:
    """NVIDIA's apex, or the unrelated package of that name in the package index, or none.

    Found by its folders, not by import: the other one may fail on import or do anything. `search_path` is sys.path.
    """
    paths = sys.path if search_path is None else search_path
    folder = next((Path(p or ".") / "apex" for p in paths if (Path(p or ".") / "apex" / "__init__.py").is_file()), None)
    version = _version("apex") if search_path is None else None
    if folder is None:
        remedy = APEX_SOURCE_BUILD if has_gpu else "not used without a GPU"
        return Finding("apex", None, "missing", False, f"fused gradient accumulation: {remedy}")
    if not (folder / "optimizers").is_dir():
        note = f"{folder} is not NVIDIA's apex (no apex.optimizers): pip uninstall apex, then {APEX_SOURCE_BUILD}"
        return Finding("apex", version, "wrong", False, note)
    if search_path is None and importlib.util.find_spec(APEX_EXTENSION) is None:
        note = f"built without {APEX_EXTENSION}, so no fused gradient accumulation: {APEX_SOURCE_BUILD}"
        return Finding("apex", version, "wrong", False, note)
    return Finding("apex", version, "ok", False, "fused gradient accumulation")


def check_optional(*, has_gpu: bool) -> list[Finding]:
    """Faster kernels. All are for GPUs; every operation has a PyTorch form that runs without them."""
    packages = (
        ("transformer-engine", "transformer_engine", "fused linear layers and norms", "pip install -e '.[gpu]'"),
        ("flash-linear-attention", "fla", "delta rule and convolution kernels", "pip install -e '.[gpu]'"),
        ("tokenizers", "tokenizers", "rollouts.tokenizer=PATH", "pip install tokenizers"),
    )
    findings = []
    for distribution, module, purpose, remedy in packages:
        if importlib.util.find_spec(module) is not None:
            findings.append(Finding(distribution, _version(distribution), "ok", False, purpose))
            continue
        gpu_only = remedy.endswith("[gpu]'")
        note = f"{purpose}: not used without a GPU" if gpu_only and not has_gpu else f"{purpose}: {remedy}"
        findings.append(Finding(distribution, None, "missing", False, note))
    return [*findings, check_apex(has_gpu=has_gpu)]


def describe_devices() -> list[tuple[str, str]]:
    """(device, description) of this machine."""
    memory = format_bytes(psutil.virtual_memory().total)
    rows = [("cpu", f"{os.cpu_count()} cores, {memory}, {torch.get_num_threads()} torch threads")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{gpu.name}, {format_bytes(gpu.total_memory)}, sm_{gpu.major}{gpu.minor}"))
    if len(rows) == 1:
        cuda = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        rows.append(("cuda", f"no GPU that torch can see ({cuda}); runs use the CPU and gloo"))
    else:
        rows.append(("nccl", ".".join(map(str, torch.cuda.nccl.version()))))
    return rows


def main(overrides: Sequence[str]) -> int:
    """Print the report; 0 where training can run, 1 where something that it needs is missing or wrong."""
    config = load_config(overrides)
    findings = [*check_required(), *check_optional(has_gpu=torch.cuda.is_available())]
    devices = describe_devices()
    broken = [finding.name for finding in findings if finding.required and finding.status != "ok"]
    if config.format == "json":
        print(json.dumps({"findings": [asdict(f) for f in findings], "devices": dict(devices), "broken": broken}))
        return 1 if broken else 0
    rows = [(f.name, f.version, f.status, "yes" if f.required else "no", f.note) for f in findings]
    print(format_table(rows, ("package", "version", "status", "needed", "note")))
    print("\n" + format_table(devices, ("device", "what")))
    print(f"\n{'Not ready: ' + ', '.join(broken) + '.' if broken else 'Ready to train.'}")
    return 1 if broken else 0
