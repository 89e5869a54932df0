"""Neighbour exchange on a ring: tensors go to the next rank while others come from the previous one.

Three verbs, in this order, any number of times: `send_recv` (name what goes, get the buffers that will be filled),
`commit` (start), `wait` (the buffers are filled, what was sent may be overwritten). Between `commit` and `wait` the
caller computes.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from longstraw_megatron.comm.counters import Traffic
from longstraw_megatron.comm.failure import transfer_named


class Ring:
    """One channel of the ring of `process_group`.

    Channels in flight at the same time need distinct `tag`s, and all ranks use their channels in the same order.
    """

    def __init__(self, process_group: dist.ProcessGroup, *, purpose: str, traffic: Traffic | None = None, tag: int = 0):
        if process_group.size() < 2:
            raise ValueError(f"Ring needs a group of at least 2 ranks, got {process_group.size()}.")
        self.process_group = process_group
        self.purpose = purpose
        self.traffic = traffic if traffic is not None else Traffic()
        self.tag = tag
        self.next_rank = (process_group.rank() + 1) % process_group.size()
        self.previous_rank = (process_group.rank() - 1) % process_group.size()
        self._sends: list[Tensor] = []
        self._receives: list[Tensor] = []
        self._works: list[dist.Work] | None = None

    def send_recv(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Name tensors for the next rank; returns buffers for those that the previous rank names, of equal shape."""
        if self._works is not None:
            raise RuntimeError(f"Ring '{self.purpose}': send_recv between commit and wait.")
        sends = [tensor.contiguous() for tensor in tensors]
        receives = [torch.empty_like(tensor) for tensor in sends]
        self._sends += sends
        self._receives += receives
        return tuple(receives)

    def commit(self) -> None:
        """Start the transfer."""
        if self._works is not None:
            raise RuntimeError(f"Ring '{self.purpose}': commit called twice.")
        if not self._sends:
            raise RuntimeError(f"Ring '{self.purpose}': commit without send_recv.")
        group, tag = self.process_group, self.tag
        operations = [dist.P2POp(dist.isend, t, group=group, tag=tag, group_peer=self.next_rank) for t in self._sends]
        operations += [
            dist.P2POp(dist.irecv, t, group=group, tag=tag, group_peer=self.previous_rank) for t in self._receives
        ]
        self.traffic.add(self.purpose, *self._sends)
        with transfer_named(f"Ring '{self.purpose}'", group):
            self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> None:
        """Return when the buffers are filled (on CUDA: when work queued from now on will find them filled)."""
        if self._works is None:
            raise RuntimeError(f"Ring '{self.purpose}': wait without commit.")
        with transfer_named(f"Ring '{self.purpose}'", self.process_group):
            for work in self._works:
                work.wait()
        self._works = None
        self._sends, self._receives = [], []
