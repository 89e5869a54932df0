"""The patches against megatron-core 0.19.2: each applies alone, to the letter, and makes right what was wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

ROOT = Path(__file__).parents[1]
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
PACKAGE = Path(megatron.core.__path__[0])  # .../megatron/core
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


def _apply(patch: str, root: Path) -> list[str]:
    """Apply a unified diff below `root`, context and line numbers to the letter; the files it changed."""
    changed = []
    for part in re.split(r"^diff --git .*\n", patch, flags=re.MULTILINE)[1:]:
        name = re.search(r"^\+\+\+ b/(.*)$", part, re.MULTILINE)[1]
        new = "\n--- /dev/null" in f"\n{part}"
        old = [] if new else (root / name).read_text().splitlines()
        result, position = [], 0
        lines = part.splitlines()
        starts = [i for i, line in enumerate(lines) if _HUNK.match(line)]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            body = [line for line in lines[start + 1 : end] if line[:1] in (" ", "+", "-")]
            first = 0 if new else int(_HUNK.match(lines[start])[1]) - 1
            before = [line[1:] for line in body if line[0] != "+"]
            assert old[first : first + len(before)] == before, f"{name}: a hunk does not fit at line {first + 1}"
            result += old[position:first] + [line[1:] for line in body if line[0] != "-"]
            position = first + len(before)
        (root / name).write_text("\n".join(result + old[position:]) + "\n")
        changed.append(name)
    return changed


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the installed megatron/core, to be patched."""
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, root / "megatron" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def _measure(*folders: Path) -> dict:
    """`upstream_bugs.measure()` in a fresh process that sees `folders` first."""
    path = os.pathsep.join(str(folder) for folder in (*folders, ROOT))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(ROOT / "tests" / "upstream_bugs.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def before():
    """The bugs in Megatron as it is installed.

    A process of its own, as for the patched copy: what other tests leave in this one (Megatron's caches hold process
    groups, W&B has threads) has crashed ranks that were forked from it.
    """
    return _measure()


@pytest.fixture(scope="module")
def after(copy):
    """The same with all patches in the copy."""
    for patch in PATCHES:
        _apply(patch.read_text(), copy)
    found = _measure(copy)
    assert found["megatron"].startswith(str(copy))
    return found


def test_there_are_three_with_their_reasons():
    assert [patch.name[:4] for patch in PATCHES] == ["0001", "0002", "0003"]
    readme = (ROOT / "patches" / "README.md").read_text()
    for patch in PATCHES:
        header = patch.read_text().split("\n---\n")[0]
        assert re.search(r"^Subject: \[PATCH\] \w+", header, re.MULTILINE) and len(header.splitlines()) > 15
        assert f"`{patch.name}`" in readme


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_each_applies_alone_and_changes_little(patch, tmp_path):
    text = patch.read_text()
    for name in re.findall(r"^--- a/(.*)$", text, re.MULTILINE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE.parents[1] / name, tmp_path / name)
    for name in _apply(text, tmp_path):
        compile((tmp_path / name).read_text(), name, "exec")
    with pytest.raises(AssertionError, match="does not fit"):
        _apply(text, tmp_path)
    added = [line for line in text.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert len(added) < 60


def test_out_norm_gradient(before, after):
    """Each rank has its own heads' half; 2e-6 is what float32 sums in another order differ by."""
    assert before["out_norm"] > 0.1
    assert after["out_norm"] < 1e-5


def test_index_share_under_recompute(before, after):
    """Recompute repeats the same float32 operations: not one bit differs when it has its own microbatch's top-k."""
    assert before["index_share"] > 1e-3
    assert after["index_share"] == 0


def test_resume_with_torch_adamw(before, after):
    """A resumed step is the step that would have come, to the last bit, by the patch and by the plugin's repair."""
    nothing, state_dict_only, without_own_steps, all_mended = before["resume"]
    assert nothing.startswith("AssertionError") and state_dict_only == "KeyError 'step'"
    assert without_own_steps > 1e-3 and all_mended == 0
    assert after["resume"] == [0, 0, 0, 0]
