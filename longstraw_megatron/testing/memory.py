"""Recorders of the tensors that operations make: the largest one, and the peak of live storages.

Both see every operation below autograd, backward and recompute included (on a CPU backward runs in the calling thread;
a device's backward thread inherits the mode). They see the outputs of operations, not what a kernel allocates inside.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _tensors(tree: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _made(out: object, inputs: object) -> Iterator[Tensor]:
    """Outputs with a storage of their own: neither views nor results in place."""
    given = {tensor.untyped_storage()._cdata for tensor in _tensors(inputs)}
    return (tensor for tensor in _tensors(out) if tensor.untyped_storage()._cdata not in given)


class LargestTensor(TorchDispatchMode):
    """`nbytes`, `shape`, `dtype` and `op` of the largest tensor made; views are not made."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0
        self.shape: tuple[int, ...] = ()
        self.dtype = None
        self.op = ""
        self._lock = threading.Lock()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for tensor in _made(out, (args, kwargs)):
            with self._lock:
                if tensor.nbytes > self.nbytes:
                    self.nbytes, self.shape, self.dtype, self.op = (
                        tensor.nbytes,
                        tuple(tensor.shape),
                        tensor.dtype,
                        str(func),
                    )
        return out

    def __str__(self) -> str:
        return f"{self.nbytes} bytes: {list(self.shape)} {self.dtype} of {self.op}"


class PeakMemory(TorchDispatchMode):
    """`live` and `peak` bytes of the storages that operations made inside the block; what was there before counts 0."""

    def __init__(self):
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()
        # a finalizer can run inside any operation of any thread, also in the middle of _add
        self._lock = threading.RLock()

    def reset_peak(self) -> None:
        """Start a new phase: the peak is what lives now."""
        with self._lock:
            self.peak = self.live

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        with self._lock:
            if nbytes == 0 or key in self._known:
                return
            self._known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, key, nbytes).atexit = False

    def _drop(self, key: int, nbytes: int) -> None:
        with self._lock:
            self._known.discard(key)
            self.live -= nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for tensor in _made(out, (args, kwargs)):
            self._add(tensor)
        return out


@contextlib.contextmanager
def largest_tensor() -> Iterator[LargestTensor]:
    """Record the largest tensor made in the block."""
    with LargestTensor() as recorder:
        yield recorder


@contextlib.contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Record the peak of live bytes made in the block."""
    with PeakMemory() as recorder:
        yield recorder
