"""A Hugging Face checkpoint folder: what it has, known from headers alone, and slices of it."""

import contextlib
import json
import logging
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.architectures import architecture_of, text_config
from longstraw_megatron.mcore.weights.names import Location, Naming
from longstraw_megatron.mcore.weights.safetensors_file import DTYPES, StoredTensor, read_headers
from longstraw_megatron.mcore.weights.table import LM_HEAD, carried_over, entries_of, is_tied

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

logger = logging.getLogger(__name__)


def safetensors_files(folder: Path) -> list[Path]:
    """The files of the folder's index, or its one file, or whatever safetensors files it has.

    Raises:
        RefusedError: there is none, or the index names one that is not there.
    """
    if (folder / INDEX_FILE).is_file():
        try:
            index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
            files = [folder / name for name in sorted(set(index["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RefusedError(
                f"{folder / INDEX_FILE} got no weight_map ({error}), wanted the index of the folder's files; "
                "fetch it again."
            ) from error
    elif (folder / SINGLE_FILE).is_file():
        files = [folder / SINGLE_FILE]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RefusedError(
            f"model.hf_path got {str(folder)!r} without a safetensors file in it, wanted a Hugging Face checkpoint "
            "folder with its weights; download them, or convert them to safetensors."
        )
    for file in files:
        if not file.is_file():
            raise RefusedError(
                f"model.hf_path got {str(folder)!r} whose {INDEX_FILE} names {file.name}, wanted that file in it; "
                "download it."
            )
    return files


class HfFolder:
    """An open checkpoint folder. Files are mapped when first read, and stay so until `close`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.tensors: dict[str, StoredTensor] = read_headers(safetensors_files(self.path))
        self.naming = Naming.of(self.tensors)
        self._files: dict[Path, object] = {}
        self._stack = contextlib.ExitStack()

    def read(self, place: Location, rows: slice, columns: slice | None) -> Tensor:
        """Some rows (and columns) of what lies at `place`, and no more of the file than that. [rows, columns, ...]"""
        file = self.tensors[place.name].file
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        index = [] if place.index is None else [place.index]
        index.append(slice(place.start + rows.start, place.start + rows.stop))
        index += [] if columns is None else [columns]
        return self._files[file].get_slice(place.name)[tuple(index)]

    def close(self) -> None:
        self._files.clear()
        self._stack.close()

    def __enter__(self) -> "HfFolder":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def unused_tensors(folder: HfFolder, hf_config: dict) -> tuple[list[str], list[str]]:
    """The tensors that the trained model does not have: those known to be besides it, and the others.

    The head of a tied model counts as known: it is the embedding again.
    """
    hf = text_config(hf_config)
    used = folder.naming.shapes(entries_of(hf).values())
    prefixes = tuple({*carried_over(hf), *(folder.naming.name(prefix) for prefix in carried_over(hf))})
    unused = [name for name in folder.tensors if name not in used]
    known = [name for name in unused if name.startswith(prefixes) or (is_tied(hf) and name == LM_HEAD)]
    return known, sorted(set(unused) - set(known))


def refuse_unfit(folder: HfFolder, hf_config: dict) -> None:
    """Refuse a folder that lacks a tensor of the model, or has it in another shape or in no floating-point dtype."""
    wanted = folder.naming.shapes(entries_of(text_config(hf_config)).values())
    missing = [name for name in wanted if name not in folder.tensors]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RefusedError(
            f"{folder.path} got no tensor {missing[0]}{others} among its {len(folder.tensors)}, wanted all "
            f"{len(wanted)} of the model in its config.json; complete the folder."
        )
    for name, shape in wanted.items():
        tensor = folder.tensors[name]
        if tensor.shape != shape:
            raise RefusedError(
                f"{folder.path}: tensor {name} got shape {list(tensor.shape)}, wanted {list(shape)} by its "
                "config.json; the two do not belong together."
            )
        if tensor.dtype not in DTYPES.values():
            raise RefusedError(
                f"{folder.path}: tensor {name} got dtype {tensor.dtype}, wanted one of {', '.join(DTYPES.values())}; "
                "use the checkpoint that is not quantized."
            )


def check_hf_folder(hf_path: str | Path, hf_config: dict) -> list[str]:
    """Whether the folder has every tensor of the model in the right shape, from its headers, before any weight is made.

    Returns the names of tensors that it has besides, and logs those that nothing is known about.

    Raises:
        RefusedError: an unsupported configuration; a missing or broken file; a missing tensor, or one of a wrong shape.
    """
    architecture_of(hf_config).check(text_config(hf_config))
    with HfFolder(hf_path) as folder:
        refuse_unfit(folder, hf_config)
        known, unknown = unused_tensors(folder, hf_config)
    log_unused(folder, unknown)
    return known + unknown


def log_unused(folder: HfFolder, unknown: list[str]) -> None:
    """Say on one rank what of the folder is not used."""
    lone = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if unknown and lone:
        shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        logger.warning("%s: %d tensors are not the model's and are not used: %s", folder.path, len(unknown), shown)
