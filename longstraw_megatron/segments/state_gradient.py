"""The two autograd Functions that carry the gradient across segment boundaries (DESIGN section 4).

Under activation recompute the states that a segment makes are no outputs of the checkpointed graph, so their
accumulated gradient cannot be given as a root: it is injected inside the layer.
"""

from collections.abc import Callable

from torch import Tensor
from torch.autograd import Function


class _ReadState(Function):
    @staticmethod
    def forward(ctx, sink, *states):
        ctx.sink = sink
        return tuple(state.view_as(state) for state in states)

    @staticmethod
    def backward(ctx, *grads):
        ctx.sink(*grads)
        return (None,) * (len(grads) + 1)


class _InjectGrad(Function):
    @staticmethod
    def forward(ctx, out, take, *states):
        ctx.take, ctx.num_states = take, len(states)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad_out):
        grads = ctx.take()
        return grad_out, None, *(grads if grads is not None else (None,) * ctx.num_states)


class _KeepInGraph(Function):
    @staticmethod
    def forward(ctx, out, *tensors):
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out, *(grad_out.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)


def keep_in_graph(out: Tensor, *tensors: Tensor) -> Tensor:
    """`out` unchanged; backward reaches `tensors` too, with zeros.

    What a collective gathered must have a gradient on every rank, needed there or not: its backward is a collective.
    """
    return _KeepInGraph.apply(out, *tensors)


def read_state(sink: Callable[..., None], *states: Tensor) -> tuple[Tensor, ...]:
    """Hand out stored states; backward calls `sink` with their gradients."""
    return _ReadState.apply(sink, *(state.detach().requires_grad_() for state in states))


def inject_grad(out: Tensor, take: Callable[[], tuple[Tensor, ...] | None], *states: Tensor) -> Tensor:
    """`out` unchanged; backward also gives `states`, made in this graph, the gradients that `take()` returns."""
    return _InjectGrad.apply(out, take, *states)
