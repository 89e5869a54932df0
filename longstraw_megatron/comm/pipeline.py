"""Activations and gradients between pipeline stages.

Forward tensors go to the next pipeline rank, backward ones to the previous one (in a ring, since the first rank has the
virtual stage behind the last rank's). Sends are posted and not waited for; both sides know every shape, so nothing but
the tensors themselves travels, whatever their length.

Every ordered pair of ranks is a channel: what one sends, the other must receive in that order, which
`schedule.check_plan` proves. Over gloo all channels may share one process group. NCCL puts a group's transfers with a
peer (with all peers, where it was initialised eagerly) on one stream, where a send to a busy peer would hold up what
that peer waits for: there, give every channel a group of its own, from `make_channels`.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from longstraw_megatron.comm.counters import Traffic
from longstraw_megatron.comm.failure import transfer_named

Channels = Mapping[tuple[int, int], dist.ProcessGroup]  # (sending, receiving) rank in the pipeline


def ring_channels(pp_size: int) -> list[tuple[int, int]]:
    """All (sending, receiving) neighbours in a pipeline of `pp_size` ranks, the same order on all ranks."""
    neighbours = {(i, (i + 1) % pp_size) for i in range(pp_size)} if pp_size > 1 else set()
    return sorted(neighbours | {(b, a) for a, b in neighbours})


def make_channels(pipelines: Sequence[Sequence[int]]) -> Channels:
    """One process group for each channel that this rank is an end of.

    `pipelines` are the global ranks of all pipelines of the job, in pipeline order. Every rank of the job calls this,
    with the same argument.
    """
    own: dict[tuple[int, int], dist.ProcessGroup] = {}
    for pipeline in pipelines:
        for sender, receiver in ring_channels(len(pipeline)):
            group = dist.new_group([pipeline[sender], pipeline[receiver]])
            if dist.get_rank() in (pipeline[sender], pipeline[receiver]):
                own[sender, receiver] = group
    return own


@dataclass(frozen=True)
class _Expected:
    """A posted receive; without `work` the tensor is there."""

    forward: bool
    tensor: Tensor
    work: dist.Work | None


class StageLink:
    """One pipeline rank's ends of its channels. Verbs: `send`, `receive`, `wait`; `expect` posts a receive early.

    To be made by all ranks of the pipeline together: each channel is opened with one small tensor, so that no backend
    connects in the middle of a plan, where connecting would wait for a peer that is elsewhere.

    Args:
        pp_group: the ranks of the pipeline, in order.
        channels: a process group for each channel; `pp_group` for all of them when None.
        timeout: seconds for which a transfer is waited for on a CPU; the group's own when None. On CUDA nothing here
            blocks, and the backend's watchdog ends a process whose transfer hangs.
        max_pending_sends: sent tensors are kept until the peer has them. With a number, a send that makes more than
            this pending in its channel waits for the oldest; it must be at least the plan's
            `PlanReport.min_pending_sends`, and may be set anew before each plan. None never waits, but gloo cannot
            tell that a send is done without waiting for it, so everything sent is kept until `wait`.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        *,
        channels: Channels | None = None,
        device: torch.device | str = "cpu",
        traffic: Traffic | None = None,
        timeout: float | None = None,
        max_pending_sends: int | None = None,
    ):
        self.pp_group = pp_group
        self.pp_rank = pp_group.rank()
        self.pp_size = pp_group.size()
        self.device = torch.device(device)
        self.traffic = traffic if traffic is not None else Traffic()
        self.timeout = timeout
        self.max_pending_sends = max_pending_sends
        self._channels = channels if channels is not None else dict.fromkeys(ring_channels(self.pp_size), pp_group)
        # a sent tensor must not be freed or overwritten before its work is done
        self._sends: dict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)  # by receiving pp_rank
        self._expected: dict[int, deque[_Expected]] = defaultdict(deque)  # by sending pp_rank
        self._loop: deque[Tensor] = deque()  # between virtual stages of a pipeline of one rank
        self._open()

    def send(self, tensor: Tensor, *, forward: bool) -> None:
        """Post `tensor` for the next rank (forward) or the previous one; it must not be written to until `wait`."""
        peer = self._neighbour(forward)
        tensor = tensor.detach()
        if peer == self.pp_rank:
            self._loop.append(tensor)
        elif tensor.numel():
            self.traffic.add("pipeline_forward" if forward else "pipeline_backward", tensor)
            self._post_send(tensor.contiguous(), peer)

    def expect(self, shape: Sequence[int], dtype: torch.dtype, *, forward: bool) -> None:
        """Post a receive ahead of its `receive`, so that the transfer overlaps with what is computed meanwhile."""
        peer = self._neighbour(not forward)
        if peer != self.pp_rank:
            self._expected[peer].append(self._post_receive(tuple(shape), dtype, peer, forward))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, *, forward: bool) -> Tensor:
        """The next tensor from the previous rank (forward) or the next one.

        On CUDA: work queued from now on finds it filled. A receive that was posted by `expect` is taken first.

        Raises:
            PeerError: the peer died, or was silent past the timeout.
        """
        peer = self._neighbour(not forward)
        if peer == self.pp_rank:
            return self._loop.popleft()
        if not self._expected[peer]:
            self.expect(shape, dtype, forward=forward)
        expected = self._expected[peer].popleft()
        wanted = (forward, tuple(shape), dtype)
        posted = (expected.forward, tuple(expected.tensor.shape), expected.tensor.dtype)
        if wanted != posted:
            raise RuntimeError(f"The next receive from pipeline rank {peer} was posted as {posted}, taken as {wanted}.")
        if expected.work is not None:
            self._wait_for(expected.work, f"Receiving from {self._name(peer)}", peer, self.pp_rank)
        return expected.tensor

    def wait(self) -> None:
        """Return when the peers have all that was sent (on CUDA: when later work may overwrite it)."""
        for peer in self._sends:
            self._drain(peer)
        untaken = {peer: len(expected) for peer, expected in self._expected.items() if expected}
        if untaken or self._loop:
            raise RuntimeError(f"Tensors were never received: {untaken} by peer, {len(self._loop)} from this rank.")

    def _neighbour(self, forward: bool) -> int:
        return (self.pp_rank + (1 if forward else -1)) % self.pp_size

    def _name(self, peer: int) -> str:
        return f"pipeline rank {peer} (global rank {dist.get_global_rank(self.pp_group, peer)})"

    def _post_send(self, tensor: Tensor, peer: int) -> None:
        group, target = self._channels[self.pp_rank, peer], dist.get_global_rank(self.pp_group, peer)
        with transfer_named(f"Sending to {self._name(peer)}", group):
            work = dist.isend(tensor, target, group=group)
        pending = self._sends[peer]
        pending.append((work, tensor))
        while pending and pending[0][0].is_completed():
            pending.popleft()
        while self.max_pending_sends is not None and len(pending) > self.max_pending_sends:
            self._wait_oldest_send(peer)

    def _post_receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, forward: bool) -> _Expected:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if not tensor.numel():
            return _Expected(forward, tensor, None)
        group, source = self._channels[peer, self.pp_rank], dist.get_global_rank(self.pp_group, peer)
        with transfer_named(f"Receiving from {self._name(peer)}", group):
            return _Expected(forward, tensor, dist.irecv(tensor, source, group=group))

    def _wait_oldest_send(self, peer: int) -> None:
        work, _ = self._sends[peer].popleft()
        self._wait_for(work, f"Sending to {self._name(peer)}", self.pp_rank, peer)

    def _wait_for(self, work: dist.Work, name: str, sender: int, receiver: int) -> None:
        with transfer_named(name, self._channels[sender, receiver]):
            if self.timeout is None or self.device.type != "cpu":
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))

    def _open(self) -> None:
        for sender, receiver in ring_channels(self.pp_size):
            greeting = torch.zeros(1, device=self.device)
            if self.pp_rank == sender:
                self._post_send(greeting, receiver)
                self._drain(receiver)
            elif self.pp_rank == receiver:
                expected = self._post_receive((1,), greeting.dtype, sender, True)
                self._wait_for(expected.work, f"Receiving from {self._name(sender)}", sender, receiver)

    def _drain(self, peer: int) -> None:
        while self._sends[peer]:
            self._wait_oldest_send(peer)
