"""From a description to one list of actions per pipeline rank.

A clock is simulated: whenever a rank is free it takes, of the compute actions that are ready, the one that comes
first by `_priority`. What it took, in order, is the plan; transfers are put around it afterwards. Costs only shape the
order, so a plan stays legal and free of deadlock whatever its actions really take. There is no barrier anywhere: while
later stages prefill, the first replays branches up to its limit of live graphs, and where it would wait, it
prefills the next group.

Order on a stage, per group: PREFILL 0..N-1; FORWARD and BACKWARD 0..M-1, each ascending, where BLOCK_PREFILLs come
right before the FORWARD of their microbatch, and BLOCK_BACKWARDs in reverse before the BACKWARD of the next; then
PROMPT_BACKWARD N-1..0.

Transfers. Every ordered pair of ranks is one channel that keeps its order: PREFILL, BLOCK_PREFILL and FORWARD send an
activation to the next virtual stage, the others a gradient to the previous one, right behind the action. The peer
receives in the order of the sends, right before the first action that needs the tensor or one sent after it. The two
directions between two ranks are two channels: they must not wait for each other (on NCCL: two communicators).
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

from longstraw_megatron.schedule.actions import COMPUTE_OPS, Action, Op, Plan, incoming, outgoing
from longstraw_megatron.schedule.description import Costs, Description


class _Progress:
    """How far each stage is: units begun, by op, stage and group, and when each output is there."""

    def __init__(self, description: Description):
        self.description = description
        num_groups, num_stages = len(description.groups), description.num_stages
        self.units = {op: [description.num_units(op, group) for group in range(num_groups)] for op in COMPUTE_OPS}
        self.begun = {op: [[0] * num_groups for _ in range(num_stages)] for op in COMPUTE_OPS}
        self.total = {op: [0] * num_stages for op in COMPUTE_OPS}  # begun over all groups
        self.branches = [0] * num_stages  # microbatches begun and not walked back, by stage
        self.ends: dict[Action, float] = {}
        self.left = [[sum(self.units[op][group] for op in COMPUTE_OPS) for group in range(num_groups)]
                     for _ in range(num_stages)]  # fmt: skip
        self.live: list[list[int]] = [[] for _ in range(num_stages)]  # groups begun and not finished, by stage
        self.first_unbegun = [0] * num_stages
        for stage in range(num_stages):
            self._skip_empty(stage)

    def _skip_empty(self, stage: int) -> None:
        while self.first_unbegun[stage] < len(self.left[stage]) and not self.left[stage][self.first_unbegun[stage]]:
            self.first_unbegun[stage] += 1

    def open_groups(self, stage: int) -> list[int]:
        """Groups that the stage may work on, oldest first."""
        following = self.first_unbegun[stage]
        if following < len(self.left[stage]) and len(self.live[stage]) < self.description.max_live_prefixes:
            return [*self.live[stage], following]
        return self.live[stage]

    def begin(self, action: Action, end: float) -> None:
        op, group, stage = action.op, action.group, action.stage
        if group == self.first_unbegun[stage]:
            self.live[stage].append(group)
            self.first_unbegun[stage] += 1
            self._skip_empty(stage)
        self.begun[op][stage][group] += 1
        self.total[op][stage] += 1
        self.branches[stage] += self._opens(action) - self._closes(action)
        self.ends[action] = end
        self.left[stage][group] -= 1
        if not self.left[stage][group]:
            self.live[stage].remove(group)

    def _opens(self, action: Action) -> bool:
        """Whether the action is the first of its microbatch."""
        starts = self.description.groups[action.group].block_starts
        if action.op is Op.FORWARD:
            return starts[action.unit] == starts[action.unit + 1]
        return action.op is Op.BLOCK_PREFILL and action.unit in starts

    def _closes(self, action: Action) -> bool:
        """Whether the action is the last of its microbatch."""
        starts = self.description.groups[action.group].block_starts
        if action.op is Op.BACKWARD:
            return starts[action.unit] == starts[action.unit + 1]
        return action.op is Op.BLOCK_BACKWARD and action.unit in starts

    def _next_of(self, op: Op, group: int, stage: int) -> Action | None:
        """The stage's next action of this kind if its own earlier actions allow it."""
        done, num = self.begun[op][stage][group], self.units[op][group]
        if done == num:
            return None
        action = Action(op, group, self.description.unit_at(op, group, done), stage)
        return action if self._in_turn(action) else None

    def _in_turn(self, action: Action) -> bool:
        op, group, stage = action.op, action.group, action.stage
        begun, units, shape = self.begun, self.units, self.description.groups[group]
        microbatch = shape.block_of(action.unit)[0] if op in (Op.BLOCK_PREFILL, Op.BLOCK_BACKWARD) else action.unit

        def is_done(earlier: Op, other: int = group) -> bool:
            return begun[earlier][stage][other] == units[earlier][other]

        if op in (Op.BLOCK_PREFILL, Op.FORWARD):
            limited = not self.description.forward_only and self._opens(action)
            if limited and self.branches[stage] >= self.description.max_live_graphs(stage):
                return False
            if not is_done(Op.PREFILL) or any(
                not is_done(Op.FORWARD, older) for older in self.live[stage] if older < group
            ):
                return False
            if op is Op.BLOCK_PREFILL:
                return begun[Op.FORWARD][stage][group] == microbatch
            return begun[Op.BLOCK_PREFILL][stage][group] == shape.block_starts[microbatch + 1]
        if op is Op.BACKWARD:
            walked = begun[Op.BLOCK_BACKWARD][stage][group] == shape.block_starts[microbatch]
            return walked and microbatch < begun[Op.FORWARD][stage][group]
        if op is Op.BLOCK_BACKWARD:
            return microbatch < begun[Op.BACKWARD][stage][group]
        if op is Op.PROMPT_BACKWARD:
            return all(map(is_done, (Op.PREFILL, Op.BACKWARD, Op.BLOCK_BACKWARD)))
        return True

    def _has_input(self, action: Action, now: float) -> bool:
        source = action.stage - action.op.flow
        if not 0 <= source < self.description.num_stages:
            return True
        return self.ends.get(Action(action.op, action.group, action.unit, source), float("inf")) <= now

    def _may_send(self, action: Action) -> bool:
        target = action.stage + action.op.flow
        if not 0 <= target < self.description.num_stages:
            return True
        total = self.total[action.op]
        return total[action.stage] - total[target] < self.description.max_run_ahead

    def ready(self, stage: int, now: float) -> Iterator[Action]:
        """What the stage could begin at `now`."""
        for group in self.open_groups(stage):
            for op in COMPUTE_OPS:
                action = self._next_of(op, group, stage)
                if action is not None and self._has_input(action, now) and self._may_send(action):
                    yield action


_AFTER_FORWARD = {Op.BACKWARD: 0, Op.BLOCK_BACKWARD: 0, Op.PROMPT_BACKWARD: 1, Op.PREFILL: 2}
_AFTER_FORWARD |= {Op.FORWARD: 3, Op.BLOCK_PREFILL: 3}
_AFTER_BACKWARD = {Op.BLOCK_BACKWARD: 0, Op.FORWARD: 1, Op.BLOCK_PREFILL: 1, Op.BACKWARD: 2}
_AFTER_BACKWARD |= {Op.PROMPT_BACKWARD: 3, Op.PREFILL: 4}


def _priority(action: Action, op_order: dict[Op, int], pp_size: int) -> tuple[int, ...]:
    """Least first: the older group; the kind of action; between virtual stages, turns of `pp_size` units.

    One forward and one backward alternate, or later stages would starve. Within a turn each flow begins at its
    own end, but prefills and walks, which keep no graph, finish first what is furthest along.
    """
    turn = action.unit // pp_size
    if action.op in (Op.BLOCK_BACKWARD, Op.PROMPT_BACKWARD):
        turn = -action.unit // pp_size if action.op is Op.PROMPT_BACKWARD else 0
    stage = action.stage if action.op in (Op.FORWARD, Op.BLOCK_BACKWARD, Op.PROMPT_BACKWARD) else -action.stage
    return action.group, op_order[action.op], turn, stage


def _order_computes(description: Description, costs: Callable[[Action], float]) -> Plan:
    """Each rank's compute actions in the order in which the simulated clock began them."""
    progress = _Progress(description)
    pp_size = description.pp_size
    order: Plan = [[] for _ in range(pp_size)]
    op_order = [_AFTER_FORWARD] * pp_size
    busy_until = [0.0] * pp_size
    missing = sum(map(sum, progress.left))
    clock = [0.0]
    now = -1.0
    while missing:
        if not clock:
            raise RuntimeError(f"The planner is stuck with {missing} actions left of {description}.")
        instant = heapq.heappop(clock)
        if instant == now:
            continue
        now = instant
        begun = True
        while begun:  # a zero-cost action makes others ready at the same instant
            begun = False
            for pp_rank in range(pp_size):
                if busy_until[pp_rank] > now:
                    continue
                ready = (action for stage in description.stages_of(pp_rank) for action in progress.ready(stage, now))
                action = min(ready, key=partial(_priority, op_order=op_order[pp_rank], pp_size=pp_size), default=None)
                if action is None:
                    continue
                if action.op in (Op.FORWARD, Op.BACKWARD):
                    op_order[pp_rank] = _AFTER_FORWARD if action.op is Op.FORWARD else _AFTER_BACKWARD
                end = now + costs(action)
                progress.begin(action, end)
                order[pp_rank].append(action)
                busy_until[pp_rank] = end
                missing -= 1
                begun = True
                if end > now:
                    heapq.heappush(clock, end)
    return order


def _add_transfers(order: Plan, description: Description) -> Plan:
    """Put the sends behind, and the receives before, the compute actions of all ranks."""
    pp_size, num_stages = description.pp_size, description.num_stages
    messages: dict[tuple[int, int], list[Action]] = defaultdict(list)  # receives, in the order of the sends
    for pp_rank, computes in enumerate(order):
        for compute in computes:
            send = outgoing(compute, num_stages)
            if send is not None:
                consumer = Action(compute.op, compute.group, compute.unit, send.peer_stage)
                messages[pp_rank, send.peer_stage % pp_size].append(incoming(consumer, num_stages))
    plan: Plan = []
    for pp_rank, computes in enumerate(order):
        unreceived = {source: iter(channel) for (source, target), channel in messages.items() if target == pp_rank}
        received: set[Action] = set()
        actions: list[Action] = []
        for compute in computes:
            receive = incoming(compute, num_stages)
            while receive is not None and receive not in received:
                earlier = next(unreceived[receive.peer_stage % pp_size])
                received.add(earlier)
                actions.append(earlier)
            actions.append(compute)
            send = outgoing(compute, num_stages)
            if send is not None:
                actions.append(send)
        plan.append(actions)
    return plan


def make_plan(description: Description, costs: Callable[[Action], float] | None = None) -> Plan:
    """The plan of one optimizer step: `plan[pp_rank]` is a list[Action], to be executed in order.

    Deterministic: every rank makes it by itself from the same arguments. `costs` gives what a compute action takes, as
    far as known; measured costs have to be the same on all ranks. Default: `Costs()`.

    How to run an action (v its stage, i its `v // pp_size`-th model part):

    * RECV_*: receive from rank `action.peer_stage % pp_size` and keep the tensor under (of, group, unit, v).
    * PREFILL: run segment `unit` without a graph; keep its input for the walk where the gradient is exact.
    * BLOCK_PREFILL: run block `unit` of a branch without a graph behind the prompt and its earlier blocks; keep its
      input where there is a backward.
    * FORWARD: run microbatch `unit` with a graph, from the received activation (stage 0: from the tokens).
    * BACKWARD: enter the graph with the received gradient (last stage: the loss's), then drop it.
    * BLOCK_BACKWARD: as PROMPT_BACKWARD, on the branch's own path (last stage: the loss's gradient).
    * PROMPT_BACKWARD: run segment `unit` again from its kept input, with a graph, and enter it with the received
      gradient (last stage: zeros); drop the input.
    * SEND_*: send what (of, group, unit, v) made, an output or the gradient of an input, to `peer_stage % pp_size`.
    """
    return _add_transfers(_order_computes(description, costs or Costs()), description)
