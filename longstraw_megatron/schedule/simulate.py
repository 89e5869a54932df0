"""Executing a plan on a clock: who waits for whom, and where nobody can go on.

Each ordered pair of ranks is a channel that keeps its order. A receive blocks until its message is there, which is
`latency` after its send. A send blocks only while `max_pending` messages before it, in its channel, are not received;
with 0 it blocks until its own is (a rendezvous). Such programs are deterministic: whether they deadlock depends
neither on costs nor on latency, and never on more pending sends if fewer are enough.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from longstraw_megatron.schedule.actions import Action, Plan


@dataclass(frozen=True)
class Span:
    """When a rank did an action: transfers are what the rank waited for them, compute actions what they cost."""

    action: Action
    start: float
    end: float


Timeline = list[list[Span]]  # timeline[pp_rank], in the order of the plan


@dataclass
class _Channel:
    """Times of the sends and receives of one ordered pair of ranks, as far as known."""

    sent: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """A timeline, and what each rank stands at where it could not end: `stuck[pp_rank]`, empty if all ended."""

    timeline: Timeline
    stuck: dict[int, Action]
    peak_pending: int  # messages sent and not received, most in any channel at any time


def _peak_pending(channel: _Channel) -> int:
    """Most messages that were sent and not yet received; at equal times the sends count first."""
    peak = received = 0
    for index, time in enumerate(channel.sent):
        while received < len(channel.received) and channel.received[received] < time:
            received += 1
        peak = max(peak, index + 1 - received)
    return peak


def simulate(
    plan: Plan, costs: Callable[[Action], float], *, latency: float = 0.0, max_pending: int | None = None
) -> Run:
    """Run a plan with what each compute action costs; `max_pending=None` is sends that never block."""
    pp_size = len(plan)
    channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
    timeline: Timeline = [[] for _ in plan]
    # a send that has been posted and blocks: when it was posted
    posted: list[float | None] = [None] * pp_size

    def advance(pp_rank: int) -> bool:
        """Do the rank's next action, if it can end; whether it could."""
        spans = timeline[pp_rank]
        action = plan[pp_rank][len(spans)]
        now = spans[-1].end if spans else 0.0
        if action.op.is_compute:
            end = now + costs(action)
        elif action.op.is_receive:
            channel = channels[action.peer_stage % pp_size, pp_rank]
            index = len(channel.received)
            if index == len(channel.sent):
                return False
            end = max(now, channel.sent[index] + latency)
            channel.received.append(end)
        else:
            target = action.peer_stage % pp_size
            channel = channels[pp_rank, target]
            if posted[pp_rank] is None:
                channel.sent.append(now)
                posted[pp_rank] = now
            end = now
            # between two stages of one rank a tensor is put aside, which cannot block
            if max_pending is not None and target != pp_rank:
                index = len(channel.sent) - 1 - max_pending
                if index >= len(channel.received):
                    return False
                if index >= 0:
                    end = max(now, channel.received[index])
            posted[pp_rank] = None
        spans.append(Span(action, now, end))
        return True

    moved = True
    while moved:
        moved = False
        for pp_rank, actions in enumerate(plan):
            while len(timeline[pp_rank]) < len(actions) and advance(pp_rank):
                moved = True
    stuck = {
        pp_rank: actions[len(timeline[pp_rank])]
        for pp_rank, actions in enumerate(plan)
        if len(timeline[pp_rank]) < len(actions)
    }
    return Run(timeline, stuck, max(map(_peak_pending, channels.values()), default=0))
