"""Where state rests between uses: on the device that computes, or in host memory (`ops.staging.HostStaging`)."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Residence(Protocol):
    """What a table needs of the memory in which its state rests. `stages`: reading makes copies, writing stores them.

    `gather`, `scatter` and `synchronize` are asked for only where it stages; their `rows` are on the host.
    """

    stages: bool

    def empty(self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor: ...

    def fetch(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]: ...

    def store(self, target: Tensor, source: Tensor) -> None: ...

    def gather(self, *tensors: Tensor, rows: Tensor) -> Callable[[], tuple[Tensor, ...]]: ...

    def scatter(self, tensor: Tensor, rows: Tensor, source: Tensor) -> None: ...

    def synchronize(self) -> None: ...


class OnDevice:
    """State rests where it was made."""

    stages = False

    def empty(self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return like.new_empty(shape, dtype=dtype)

    def fetch(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: tensors

    def store(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def gather(self, *tensors: Tensor, rows: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: tuple(tensor.index_select(0, rows) for tensor in tensors)

    def scatter(self, tensor: Tensor, rows: Tensor, source: Tensor) -> None:
        tensor.index_copy_(0, rows, source)

    def synchronize(self) -> None:
        return
