"""Prefix state in host memory: copied in before it is read, and out after it was made, beside the computation.

On CUDA host memory is pinned, and copies run on two streams of their own, one for each direction. On a CPU the same
copies are made at the same moments, at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Take = Callable[[], tuple[Tensor, ...]]


class HostStaging:
    """The `Residence` of state that rests in host memory and is computed with on `device`."""

    stages = True

    def __init__(self, device: torch.device):
        self.device = device
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            self._incoming, self._outgoing = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._last_store: torch.cuda.Event | None = None

    def empty(self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or like.dtype, pin_memory=self._on_cuda)

    def fetch(self, *tensors: Tensor) -> Take:
        """Begin to copy resting tensors in; the result waits, and gives copies that the caller may change."""
        if not self._on_cuda:
            copies = tuple(tensor.clone() for tensor in tensors)
            return lambda: copies
        if self._last_store is not None:
            self._incoming.wait_event(self._last_store)
        with torch.cuda.stream(self._incoming):
            copies = tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)
        here = torch.cuda.Event()
        here.record(self._incoming)

        def take() -> tuple[Tensor, ...]:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(here)
            for copy in copies:
                copy.record_stream(current)
            return copies

        return take

    def store(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy `source` out into the resting `target`; later fetches see it."""
        if not self._on_cuda:
            target.copy_(source)
            return
        self._outgoing.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outgoing):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._outgoing)
        self._last_store = torch.cuda.Event()
        self._last_store.record(self._outgoing)

    def gather(self, *tensors: Tensor, rows: Tensor) -> Take:
        """As `fetch`, rows [m] (int64, on the host) of resting tensors alone, which the host picks at once."""
        self.synchronize()
        picked = tuple(self.empty(tensor, (rows.numel(), *tensor.shape[1:])) for tensor in tensors)
        for tensor, out in zip(tensors, picked, strict=True):
            torch.index_select(tensor, 0, rows, out=out)
        return self.fetch(*picked) if self._on_cuda else lambda: picked

    def scatter(self, tensor: Tensor, rows: Tensor, source: Tensor) -> None:
        """Put `source` [m, ...] into distinct rows [m] (int64, on the host) of a resting tensor; waits for `source`."""
        if self._on_cuda:
            arrived = self.empty(source, tuple(source.shape))
            self.store(arrived, source)
            source = arrived
        self.synchronize()
        tensor.index_copy_(0, rows, source)

    def synchronize(self) -> None:
        """Wait until the host may read and write what rests."""
        if self._on_cuda and self._last_store is not None:
            self._last_store.synchronize()
