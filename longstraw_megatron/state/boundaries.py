"""Recurrent state of one layer at segment boundaries: what the segment from boundary i starts with.

Boundary 0 is the start of the prompt, where the state is zero and nothing is stored. From host memory a boundary is
copied when its layer asks for it, and waited for (3.2 MB of Qwen3.6-27B, over tensor and context parallelism).
"""

import torch
from torch import Tensor

from longstraw_megatron.state.residence import OnDevice, Residence


class BoundaryStates:
    """(conv_tail [W-1, C], recurrent_state [H, K, V] float32) at each boundary, with gradient accumulators.

    `keep_all=False` (a detached prompt) keeps the last boundary only, and no gradient comes to it. Accumulators, which
    only the boundary has that the walk stands on, stay on the device wherever the values rest.
    """

    def __init__(self, *, keep_all: bool, parent: "BoundaryStates | None" = None, residence: Residence | None = None):
        self.keep_all = keep_all
        self.residence = residence or OnDevice()
        self.parent = parent
        self._values: dict[int, tuple[Tensor, ...]] = {}
        self._grads: dict[int, tuple[Tensor, ...]] = {}

    def put(self, boundary: int, *values: Tensor) -> None:
        if not self.keep_all:
            self._values.clear()
        resting = tuple(value.detach() for value in values)
        if self.residence.stages:
            resting = tuple(self.residence.empty(value, tuple(value.shape)) for value in values)
            for target, value in zip(resting, values, strict=True):
                self.residence.store(target, value.detach())
        self._values[boundary] = resting

    def get(self, boundary: int) -> tuple[Tensor, ...]:
        return self.residence.fetch(*self._owner(boundary)._values[boundary])()

    def takes_grad(self, boundary: int) -> bool:
        """Whether the state at `boundary` is walked back from."""
        return self._owner(boundary).keep_all

    def add_grad(self, boundary: int, *grads: Tensor) -> None:
        """Add to the gradient of the state at `boundary`, in float32 at least: every branch adds to the last one."""
        owner = self._owner(boundary)
        if boundary not in owner._grads:
            values = owner._values[boundary]
            owner._grads[boundary] = tuple(
                torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32), device=grad.device)
                for value, grad in zip(values, grads, strict=True)
            )
        for accumulator, grad in zip(owner._grads[boundary], grads, strict=True):
            accumulator += grad

    def grad(self, boundary: int) -> tuple[Tensor, ...] | None:
        """The gradient accumulated for the state at `boundary`, or None where none ever came."""
        return self._owner(boundary)._grads.get(boundary)

    def truncate(self, boundary: int) -> None:
        """Forget the states behind `boundary`."""
        for table in (self._values, self._grads):
            for later in [key for key in table if key > boundary]:
                del table[later]

    def value_bytes(self) -> int:
        return sum(value.nbytes for values in self._values.values() for value in values)

    def grad_bytes(self) -> int:
        return sum(grad.nbytes for grads in self._grads.values() for grad in grads)

    def _owner(self, boundary: int) -> "BoundaryStates":
        if boundary in self._values or self.parent is None:
            return self
        return self.parent._owner(boundary)
