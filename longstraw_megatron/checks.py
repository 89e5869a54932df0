"""What training and the planner refuse of a command before they begin."""

import os
from pathlib import Path

from longstraw_megatron.config import Config
from longstraw_megatron.errors import RefusedError


def check_experts(config: Config) -> None:
    """Sizes that cut experts need a model that has some."""
    if config.model.hf_config.get("n_routed_experts"):
        return
    for name, size in (("ep", config.parallel.ep), ("etp", config.parallel.etp)):
        if size > 1:
            raise RefusedError(f"parallel.{name}={size} cuts experts, but the model has none; set parallel.{name}=1.")


def check_place(key: str, name: str, *, is_file: bool = False) -> None:
    """A folder, or a file, that `key` names can be made and written."""
    path = Path(name).absolute()
    if is_file and path.is_dir():
        raise RefusedError(f"{key}={name} must name a file, got a folder; add the name of a file in it.")
    folder = path.parent if is_file else path
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        got = "which can't be written to" if folder.is_dir() else "which is no folder"
        raise RefusedError(f"{key}={name} lies in {folder}, {got}; choose another place.")


def make_folder(key: str, name: str) -> Path:
    """The folder that `key` names, made where it is not there."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(f"{key}={name} can't be made: {error.strerror}; name another folder.") from error
    return path
