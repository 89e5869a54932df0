"""Checkpoints on disk: complete or not there, whatever dies when.

    DIR/iter_0000012/                       a complete checkpoint, named as Megatron names it
    DIR/.iter_0000013.partial/              one that is being written, or was when the job died
    DIR/latest_checkpointed_iteration.txt   the pointer, Megatron's own: `12`

A checkpoint is written under its partial name, synced, renamed, and only then pointed to; older ones are removed last.
Its manifest (`checkpoint.json`) lists every file with its size, so that a folder cut short in a copy is not taken for
complete. Files and standard library only: no torch, no process group.
"""

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from longstraw_megatron.errors import RefusedError

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "checkpoint.json"
FORMAT = 1
_FOLDER = re.compile(r"iter_(\d{7,})$|\.iter_(\d{7,})\.replaced$")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: what its manifest tells."""

    path: Path
    step: int
    extra: dict  # what the caller gave: rollouts cursor, W&B id ...
    layout: dict[str, int]  # parallel sizes it was saved with
    optimizer: str | None  # class of the inner optimizers' wrapper; None: saved without optimizer
    saved_at: int  # nanoseconds, of the manifest's file


def folder_name(step: int) -> str:
    return f"iter_{step:07d}"


def partial_folder(directory: Path, step: int) -> Path:
    return directory / f".{folder_name(step)}.partial"


def start_partial(directory: Path, step: int) -> Path:
    """An empty folder to write into; what earlier saves left unfinished is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob(".iter_*.partial"):
        shutil.rmtree(stale)
    partial = partial_folder(directory, step)
    partial.mkdir()
    return partial


def publish(directory: Path, step: int, manifest: dict, *, keep: int | None) -> Path:
    """Make the written partial folder the latest checkpoint, and keep the `keep` newest (None: all)."""
    partial, final = partial_folder(directory, step), directory / folder_name(step)
    files = {
        str(path.relative_to(partial)): path.stat().st_size for path in sorted(partial.rglob("*")) if path.is_file()
    }
    (partial / MANIFEST).write_text(json.dumps({"format": FORMAT, "step": step, **manifest, "files": files}, indent=1))
    for path in partial.rglob("*"):
        _sync(path)
    _sync(partial)
    replaced = directory / f".{folder_name(step)}.replaced"
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(partial, final)
    _sync(directory)
    _write_pointer(directory, step)
    _prune(directory, final, keep)
    return final


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in a folder, or None where it is not complete."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        saved_at = (path / MANIFEST).stat().st_mtime_ns
        complete = all((path / name).stat().st_size == size for name, size in manifest["files"].items())
        fields = {name: manifest[name] for name in ("step", "extra", "layout", "optimizer")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Checkpoint(path=path, saved_at=saved_at, **fields) if complete and manifest.get("format") == FORMAT else None


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The checkpoint that the pointer names, or the newest complete one where that is gone; None if there is none."""
    directory = Path(directory)
    with contextlib.suppress(OSError, ValueError):
        pointed = directory / folder_name(int((directory / POINTER).read_text()))
        if read_checkpoint(pointed) is not None:
            return pointed
    checkpoints = _complete(directory)
    return checkpoints[-1].path if checkpoints else None


def find_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in `path`, or the latest of those in it.

    Raises:
        RefusedError: there is no complete one.
    """
    path = Path(path)
    checkpoint = read_checkpoint(path)
    if checkpoint is None and (latest := latest_checkpoint(path)) is not None:
        checkpoint = read_checkpoint(latest)
    if checkpoint is None:
        raise RefusedError(
            f"Resuming wanted a folder with a complete checkpoint, got {str(path)!r}, which holds none; "
            f"name a folder that {MANIFEST} lies in, or the one above it."
        )
    return checkpoint


def _complete(directory: Path) -> list[Checkpoint]:
    """All complete checkpoints, in the order in which they were saved."""
    names = [name for name in (os.listdir(directory) if directory.is_dir() else []) if _FOLDER.match(name)]
    found = [read_checkpoint(directory / name) for name in names]
    return sorted((checkpoint for checkpoint in found if checkpoint is not None), key=lambda found: found.saved_at)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_pointer(directory: Path, step: int) -> None:
    partial = directory / f".{POINTER}.partial"
    partial.write_text(str(step))
    _sync(partial)
    os.replace(partial, directory / POINTER)
    _sync(directory)


def _prune(directory: Path, final: Path, keep: int | None) -> None:
    for replaced in directory.glob(".iter_*.replaced"):
        shutil.rmtree(replaced)
    for removed in directory.glob(".iter_*.removed"):
        shutil.rmtree(removed)
    if keep is not None:
        others = [checkpoint.path for checkpoint in _complete(directory) if checkpoint.path != final]
        for path in others[: max(len(others) - (keep - 1), 0)]:
            # a removal that is cut short must not look like a checkpoint, and is ended by the next save
            removed = directory / f".{path.name.lstrip('.')}.removed"
            os.rename(path, removed)
            shutil.rmtree(removed)
