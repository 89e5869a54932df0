"""Recurrent state at segment boundaries, as the delta rule reads and leaves it."""

import torch
from torch import Tensor

from longstraw_megatron.segments.segment import Mode, Segment
from longstraw_megatron.segments.state_gradient import inject_grad, read_state


def boundary_state(segment: Segment, layer_number: int, empty: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The states that the segment starts from; `empty` at boundary 0. Backward adds to their accumulators."""
    if segment.index == 0:
        return empty
    boundaries = segment.state.boundaries(layer_number)
    states = boundaries.get(segment.index)
    if segment.reads_with_grad and boundaries.takes_grad(segment.index) and torch.is_grad_enabled():
        return read_state(lambda *grads: boundaries.add_grad(segment.index, *grads), *states)
    return states


def keep_state(out: Tensor, segment: Segment, layer_number: int, *states: Tensor) -> Tensor:
    """Store the states that a prompt segment made, or on the walk give them their accumulated gradient.

    `out` is the layer's output, returned unchanged: the gradient is injected where its backward passes.
    """
    boundaries = segment.state.boundaries(layer_number)
    if segment.mode is Mode.PREFILL:
        boundaries.put(segment.index + 1, *(state.clone() for state in states))
    elif segment.mode is Mode.WALK and torch.is_grad_enabled():
        dtypes = [state.dtype for state in states]

        def take() -> tuple[Tensor, ...] | None:
            grads = boundaries.grad(segment.index + 1)
            return grads and tuple(grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True))

        out = inject_grad(out, take, *states)
    return out
