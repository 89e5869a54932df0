"""Live bytes by item, of every storage that operations make: real tensors or fake ones.

A peak keeps the split by item that it had. Storages are counted once, from the operation that makes them to the moment
when nobody holds them; views count nothing. What a kernel allocates inside and frees again is not seen.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ACTIVATIONS = "activations"  # what has no other tag: graphs, temporaries, buffers


class LiveMemory(TorchDispatchMode):
    """Counts storages made inside the block under the current tag (`tag`, `retag`).

    Nobody knows a fake tensor's value: where one is read, a truth value is True and a number is 0.
    """

    def __init__(self):
        super().__init__()
        self.items: Counter[str] = Counter()  # live bytes by tag
        self.total = 0
        self.peak = 0
        self.num_ops = 0
        self._peak_items: Counter[str] = Counter()
        self._is_rising = False  # whether the present state is the peak and not copied yet
        self._tag = ACTIVATIONS
        self._sizes: dict[int, tuple[int, str]] = {}  # storage -> (bytes, tag)

    @property
    def peak_items(self) -> dict[str, int]:
        """Live bytes by tag at the peak."""
        items = self.items if self._is_rising else self._peak_items
        return {tag: size for tag, size in items.items() if size}

    def reset_peak(self) -> None:
        """Start a new phase: the peak is what lives now."""
        self.peak, self._is_rising = self.total, True

    @contextlib.contextmanager
    def tag(self, name: str) -> Iterator[None]:
        """Count what is made inside the block under `name`."""
        before, self._tag = self._tag, name
        try:
            yield
        finally:
            self._tag = before

    def retag(self, tensors: Iterable[Tensor], name: str) -> None:
        """Count tensors that live already under `name`."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._sizes:
                size, old = self._sizes[key]
                self._sizes[key] = size, name
                self.items[old] -= size
                self.items[name] += size

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size == 0 or key in self._sizes:
            return
        self._sizes[key] = size, self._tag
        self.items[self._tag] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self._is_rising = self.total, True
        weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        if self._is_rising:
            self._peak_items, self._is_rising = self.items.copy(), False
        size, tag = self._sizes.pop(key)
        self.items[tag] -= size
        self.total -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_ops += 1
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return args[0].dtype is torch.bool or 0
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out
