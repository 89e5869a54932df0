"""The floor plan as data: a module imports only what stands below it, and a few things live in one place only.

Every import statement counts, those inside functions and under TYPE_CHECKING too. Nothing is imported to find out.
"""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "longstraw_megatron"
MAX_LINES = 400

NOUNS = ("errors", "config_tree", "hf_config", "config", "batch")
PURE = ("functional", "layout", "schedule")
ROOMS = (*NOUNS, *PURE, "state", "ops", "comm", "segments", "rollouts")
HOUSE = (*ROOMS, "mcore")
EVERYTHING = (*HOUSE, "checks", "config_effect", "plan", "integrations", "logging", "compose")

# floor -> (what of our own it may import besides itself, which other packages besides torch, numpy and Python's own).
FLOORS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "": (HOUSE, ()),  # the package's own __init__
    "errors": ((), ()),
    "config_tree": (("errors",), ()),
    "hf_config": (("errors",), ()),
    "config": (("errors", "config_tree", "hf_config", "functional.objective_config"), ()),
    "config_effect": (("config", "batch"), ()),
    "checks": (("errors", "config"), ()),
    "batch": (("errors",), ()),
    "functional": (("errors",), ()),
    "layout": (("errors",), ()),
    "schedule": (("errors",), ()),
    "state": ((*NOUNS, "layout"), ()),
    "ops": (("errors", "functional"), ("flash_attn", "fla", "transformer_engine")),
    "comm": (("errors",), ("torch.distributed",)),
    "segments": ((*NOUNS, *PURE, "state", "ops", "comm"), ()),
    "rollouts": (NOUNS, ("tokenizers",)),
    "mcore": (ROOMS, ("torch.distributed", "megatron", "transformer_engine", "safetensors", "psutil")),
    "plan": (HOUSE, ("torch.distributed", "megatron", "matplotlib")),
    "integrations": (HOUSE, ("torch.distributed", "megatron")),
    "logging": ((*NOUNS, "checks", "schedule"), ("wandb", "tqdm", "matplotlib")),
    "testing": (HOUSE, ("torch.distributed", "megatron", "pytest", "psutil")),
    # The doors; of them, only compose knows Hydra.
    "compose": (NOUNS, ("hydra", "omegaconf")),
    "train": (EVERYTHING, ("torch.distributed",)),
    "cli": (EVERYTHING, ()),
    "doctor": (EVERYTHING, ("packaging", "psutil")),
    "planner": (EVERYTHING, ()),
    "bench": (EVERYTHING, ("torch.distributed", "megatron", "psutil")),
}
# Who may read environment variables, as dotted names below the package.
ENVIRONMENT = ("train", "cli", "doctor", "bench.launch", "mcore.cpu", "mcore.parallel", "plan.dry_run_worker")


@cache
def modules() -> dict[str, Path]:
    """Dotted name below the package ("" for its __init__) -> file."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def floor_of(module: str) -> str:
    return module.split(".")[0]


@cache
def syntax(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def imported_names(tree: ast.AST) -> list[str]:
    """Dotted names of every import; of `from a import b` both a.b and, through it, a. Relative imports are refused."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def dotted(node: ast.AST) -> str | None:
    """`torch.distributed.x` of nested attributes, or None where it doesn't start at a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)) is not None:
        return f"{base}.{node.attr}"
    return None


def is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def own_imports(module: str) -> set[str]:
    """The modules of ours that `module` imports, as names below the package."""
    found = set()
    for name in imported_names(syntax(module)):
        if not is_below(name, PACKAGE):
            continue
        parts = name.split(".")[1:]
        # The last part may be something inside the module, and the package itself may be meant.
        while parts and ".".join(parts) not in modules():
            parts.pop()
        found.add(".".join(parts))
    return found


def outside_imports(module: str) -> set[str]:
    """Foreign names that count: other packages, and torch.distributed however it is reached."""
    tree = syntax(module)
    attributes = {name for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (name := dotted(node))}
    found = {name for name in attributes if is_below(name, "torch.distributed")}
    for name in imported_names(tree):
        top = name.split(".")[0]
        foreign = top not in (PACKAGE, "torch", "numpy") and top not in sys.stdlib_module_names
        if foreign or is_below(name, "torch.distributed"):
            found.add(name)
    return found


def violations(module: str) -> list[str]:
    own, outside = FLOORS[floor_of(module)]
    allowed = (floor_of(module), *own)
    # The package's own name imported for its __init__ is an import of the house's roof.
    wrong = [n for n in own_imports(module) if not any(n and is_below(n, below) for below in allowed if below)]
    return wrong + [n for n in outside_imports(module) if not any(is_below(n, package) for package in outside)]


def test_every_module_has_a_floor():
    strange = [name for name in modules() if floor_of(name) not in FLOORS]
    assert not strange, f"{strange} stand on no floor; add them to FLOORS, where they belong."


@pytest.mark.parametrize("floor", FLOORS)
def test_floor_imports_only_what_stands_below(floor):
    wrong = {name: bad for name in modules() if floor_of(name) == floor and (bad := sorted(violations(name)))}
    assert not wrong, f"{floor or PACKAGE} may not import: {wrong}"


def test_no_import_cycle():
    graph = {name: own_imports(name) for name in modules()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name in done:
            return
        for target in sorted(graph[name] - {name}):
            visit(target, (*path, name))
        done.add(name)

    for name in graph:
        visit(name, ())
    assert done == set(graph)


def test_environment_is_read_at_the_doors_only():
    readers = set()
    for module in modules():
        tree = syntax(module)
        used = {name for node in ast.walk(tree) if (name := dotted(node)) is not None} | set(imported_names(tree))
        if any(is_below(name, "os.environ") or is_below(name, "os.getenv") for name in used):
            readers.add(module)
    wrong = sorted(name for name in readers if name not in ENVIRONMENT and floor_of(name) != "testing")
    assert not wrong, f"{wrong} read environment variables; take a value as an argument instead."


def test_no_file_is_longer_than_a_reader_bears():
    files = [path for folder in (PACKAGE, "tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(lengths) > 20
    long = {str(path): length for path, length in lengths.items() if length > MAX_LINES}
    assert not long, f"longer than {MAX_LINES} lines: {long}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.distributed as dist", {"torch.distributed"}),
        ("from torch import distributed", {"torch.distributed"}),
        ("import torch\ntorch.distributed.barrier()", {"torch.distributed", "torch.distributed.barrier"}),
        ("def f():\n    from megatron.core import x", {"megatron.core.x"}),
        ("import os, numpy as np\nfrom torch import nn", set()),
    ],
)
def test_the_judge_sees_every_way_to_import(source, found, monkeypatch):
    monkeypatch.setitem(globals(), "syntax", lambda module: ast.parse(source))
    assert outside_imports("any") == found


def test_the_judge_refuses_a_floor_above(monkeypatch):
    source = (
        f"from {PACKAGE}.mcore.cpu import cpu_runtime\nfrom {PACKAGE} import segments\nimport {PACKAGE}.layout.runs"
    )
    monkeypatch.setitem(globals(), "syntax", lambda module: ast.parse(source))
    assert sorted(violations("layout.runs")) == ["mcore.cpu", "segments"]
