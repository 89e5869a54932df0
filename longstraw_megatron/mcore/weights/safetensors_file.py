"""The safetensors format, for what the library does not do: reading headers alone, and writing a piece at a time.

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> dtype, shape, data_offsets), and
the data. The header is known before the data, so a file can be filled in any order and never has to fit in memory.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from longstraw_megatron.errors import RefusedError

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_COPY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its dtype as the format spells it, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> "TensorSpec":
        return cls(DTYPES[dtype], shape, prod(shape) * dtype.itemsize)


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor of a file: `begin` is its first byte in it."""

    file: Path
    begin: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, from its header.

    Raises:
        RefusedError: not a safetensors file, or one that was cut short.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\xff"))
        try:
            header = json.loads(stream.read(length)) if length < size else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise RefusedError(f"{file} got no safetensors header, wanted a safetensors file; fetch it again.")
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        tensors[name] = StoredTensor(info["dtype"], tuple(info["shape"]), end - begin, file, 8 + length + begin)
    wanted = max((tensor.begin + tensor.nbytes for tensor in tensors.values()), default=8 + length)
    if wanted != size:
        raise RefusedError(f"{file} got {size} bytes, wanted {wanted} by its header; fetch it again.")
    return tensors


class SafetensorsWriter:
    """A safetensors file that is written tensor by tensor, or rows of a tensor at a time, in any order.

    What is never written is zero. Wider dtypes come first, so that every tensor is aligned to its own width.
    """

    def __init__(self, file: Path, specs: dict[str, TensorSpec]):
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        self._begin: dict[str, int] = {}
        total = 0
        for name, spec in sorted(specs.items(), key=lambda item: -_width(item[1])):  # a stable sort
            header[name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [total, total + spec.nbytes],
            }
            self._begin[name] = total
            total += spec.nbytes
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.specs = specs
        self._data = 8 + len(encoded)
        self._stream = file.open("wb")
        self._stream.write(struct.pack("<Q", len(encoded)) + encoded)
        self._stream.truncate(self._data + total)

    def write(self, name: str, tensor: Tensor, *, first: int = 0) -> None:
        """Put `tensor` at element `first` of the tensor `name`. It has the dtype of its spec, on any device."""
        assert DTYPES[tensor.dtype] == self.specs[name].dtype, (name, tensor.dtype)
        assert (first + tensor.numel()) * tensor.element_size() <= self.specs[name].nbytes, (name, first, tensor.shape)
        self._stream.seek(self._data + self._begin[name] + first * tensor.element_size())
        self._stream.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    def copy(self, name: str, source: StoredTensor) -> None:
        """Copy a stored tensor's bytes, whatever its dtype."""
        self._stream.seek(self._data + self._begin[name])
        with source.file.open("rb") as stream:
            stream.seek(source.begin)
            left = source.nbytes
            while left:
                piece = stream.read(min(left, _COPY_BYTES))
                self._stream.write(piece)
                left -= len(piece)

    def close(self) -> None:
        """Flush and close. The file is complete only after this."""
        self._stream.close()

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _width(spec: TensorSpec) -> int:
    return spec.nbytes // max(prod(spec.shape), 1)


def split_by_size(specs: dict[str, TensorSpec], max_bytes: int) -> list[dict[str, TensorSpec]]:
    """Cut into files of at most `max_bytes` (or of one tensor that is larger), in order."""
    files: list[dict[str, TensorSpec]] = []
    filled = max_bytes + 1
    for name, spec in specs.items():
        if filled + spec.nbytes > max_bytes:
            files.append({})
            filled = 0
        files[-1][name] = spec
        filled += spec.nbytes
    return files


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of several files.

    Raises:
        RefusedError: a broken file, or a tensor that two of them have.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise RefusedError(
                    f"{file} got tensor {name}, which {tensors[name].file.name} has too, wanted it once; remove "
                    "stale files."
                )
            tensors[name] = tensor
    return tensors
