"""The test kit: real processes over gloo, Megatron's groups in them, comparisons and memory recorders."""

from longstraw_megatron.testing.compare import (
    Comparison,
    assert_gradients_close,
    assert_gradients_vanish,
    compare_tensors,
    relative_error,
)
from longstraw_megatron.testing.memory import LargestTensor, PeakMemory, largest_tensor, peak_memory
from longstraw_megatron.testing.ranks import RankError, RanksHungError, run_ranks

__all__ = [
    "Comparison",
    "LargestTensor",
    "PeakMemory",
    "RankError",
    "RanksHungError",
    "assert_gradients_close",
    "assert_gradients_vanish",
    "compare_tensors",
    "largest_tensor",
    "peak_memory",
    "relative_error",
    "run_ranks",
]
