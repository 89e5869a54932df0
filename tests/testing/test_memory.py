"""Memory recorders against sizes counted by hand, in forward, backward and recompute."""

import gc
import threading

import torch
from torch.utils.checkpoint import checkpoint

from longstraw_megatron.testing import largest_tensor, peak_memory

KB = 1024


def _floats(kilobytes: int) -> torch.Tensor:
    return torch.zeros(kilobytes * KB // 4)


def test_largest_tensor_sees_what_is_made_and_nothing_else():
    outside = _floats(64)
    with largest_tensor() as recorder:
        small = outside[: 2 * KB] + 1
        _ = small.double()
    assert (recorder.nbytes, recorder.shape, recorder.dtype) == (16 * KB, (2 * KB,), torch.float64)


def test_largest_tensor_sees_backward():
    weight = torch.ones(512, 4, requires_grad=True)
    inputs = torch.ones(8, 512)
    with largest_tensor() as recorder:
        out = (inputs @ weight).sum()
    forward = recorder.nbytes
    with largest_tensor() as recorder:
        out.backward()
    assert forward == 8 * 4 * 4 and recorder.nbytes == 512 * 4 * 4  # the weight's gradient


def test_peak_by_hand():
    outside = _floats(100)
    with peak_memory() as memory:
        first = _floats(10)
        view = first[3:]
        first.add_(1)
        outside.mul_(2)
        assert memory.live == 10 * KB
        second = _floats(20)
        del second
        gc.collect()
        assert (memory.live, memory.peak) == (10 * KB, 30 * KB)
        del first
        gc.collect()
        assert memory.live == 10 * KB  # the view holds it
        memory.reset_peak()
        del view
        gc.collect()
        _floats(5)
        assert (memory.live, memory.peak) == (0, 10 * KB)


def _graph(recompute: bool) -> tuple[int, int]:
    """(bytes alive after forward, peak) of eight layers whose kept activation has 40 KB each."""
    x = torch.ones(10 * KB, requires_grad=True)
    with peak_memory() as memory:
        for _ in range(8):
            x = checkpoint(lambda y: y.tanh().exp(), x, use_reentrant=True) if recompute else x.tanh().exp()
        live = memory.live
        x.sum().backward()
    return live, memory.peak


def test_recompute_halves_the_graph():
    kept, peak = _graph(recompute=False)
    few, low = _graph(recompute=True)
    assert kept == 16 * 40 * KB  # two outputs of each layer, kept for their own backward
    assert few == 8 * 40 * KB  # the layers' inputs, but for the first one, and the last output
    assert low < peak


def test_peak_counts_other_threads_frees():
    with peak_memory() as memory:
        held = [_floats(8) for _ in range(16)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        gc.collect()
    assert (memory.live, memory.peak) == (0, 16 * 8 * KB)
