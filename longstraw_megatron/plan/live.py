"""Live bytes by item, of every storage that operations make: real tensors or meta tensors, which have none.

A peak keeps the split by item that it had. Storages are counted once, from the operation that makes them to the moment
when nobody holds them; views count nothing. What a kernel allocates inside and frees again is not seen.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longstraw_megatron.plan.items import Item

_READ, _NONZERO = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default


class LiveMemory(TorchDispatchMode):
    """Counts storages made inside the block under the current item (`counted_as`, `recount`).

    What is counted `on_host` takes no part in `total` and `peak`. Nobody knows a meta tensor's value: where one is
    read, a truth value is True and a number is 0, and `nonzero` names every place. Collectives on meta tensors are done
    when they begin.

    Args:
        host_is_device: a CPU's: what rests on the host is in the memory that is counted.
    """

    def __init__(self, *, host_is_device: bool = False):
        super().__init__()
        self.host_is_device = host_is_device
        self.items: Counter[Item] = Counter()  # live bytes on the device
        self.host: Counter[Item] = Counter()
        self.total = 0
        self.peak = 0
        self.num_ops = 0
        self._peak_items: Counter[Item] = Counter()
        self._is_rising = False  # whether the present state is the peak and not copied yet
        self._item, self._on_host = Item.GRAPH, False
        self._sizes: dict[int, tuple[int, Item, bool]] = {}  # storage -> (bytes, item, on host)

    @property
    def peak_items(self) -> dict[Item, int]:
        """Live bytes on the device by item at the peak."""
        items = self.items if self._is_rising else self._peak_items
        return {item: size for item, size in items.items() if size}

    def reset_peak(self) -> None:
        """Start a new phase: the peak is what lives now."""
        self.peak, self._is_rising = self.total, True

    @contextlib.contextmanager
    def counted_as(self, item: Item | None, *, on_host: bool = False) -> Iterator[None]:
        """Count what is made inside the block under `item` (None: as it would be)."""
        before = self._item, self._on_host
        self._item, self._on_host = item or self._item, on_host
        try:
            yield
        finally:
            self._item, self._on_host = before

    def recount(self, tensors: Iterable[Tensor], item: Item, *, on_host: bool | None = None) -> None:
        """Count tensors that live already under `item`, where they lie or where they would on a GPU."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._sizes:
                size, old, was_on_host = self._sizes[key]
                stays = on_host is None or self.host_is_device or on_host is was_on_host
                if stays:  # no total changes: a present peak stays the peak
                    self._sizes[key] = size, item, was_on_host
                    table = self.host if was_on_host else self.items
                    table[old] -= size
                    table[item] += size
                else:
                    self._forget(key)
                    self._enter(key, size, item, on_host)

    def item_of(self, tensor: Tensor) -> Item:
        """What a tensor that lives is counted as."""
        return self._sizes[tensor.untyped_storage()._cdata][1]

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._sizes:
            self._enter(key, size, self._item, self._on_host)
            weakref.finalize(storage, self._forget, key).atexit = False

    def _enter(self, key: int, size: int, item: Item, on_host: bool) -> None:
        on_host = on_host and not self.host_is_device
        self._sizes[key] = size, item, on_host
        if on_host:
            self.host[item] += size
            return
        self.items[item] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self._is_rising = self.total, True

    def _forget(self, key: int) -> tuple[int, Item, bool]:
        size, item, on_host = self._sizes.pop(key)
        if on_host:
            self.host[item] -= size
        else:
            if self._is_rising:
                self._peak_items, self._is_rising = self.items.copy(), False
            self.items[item] -= size
            self.total -= size
        return size, item, on_host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_ops += 1
        if func.namespace == "c10d":
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        if func is _READ and args[0].is_meta:
            return args[0].dtype is torch.bool or 0
        if func is _NONZERO and args[0].is_meta:
            out = args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        else:
            out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._add(out)
        elif out is not None:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._add(leaf)
        return out
