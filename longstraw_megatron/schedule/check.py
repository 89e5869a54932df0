"""The proof of a plan: replayed, not trusted.

What is proven: every action of the description is there once, on its rank, in a legal order; every tensor is received
in the order of its channel and before it is needed; nothing deadlocks, with receives that block and sends that are
buffered, and how few pending sends are enough (0: even with sends that block until they are received); memory stays
within the description's limits. What is measured: memory peaks, and time for given costs.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from longstraw_megatron.schedule.actions import COMPUTE_OPS, Action, Op, Plan, incoming, outgoing
from longstraw_megatron.schedule.description import Costs, Description
from longstraw_megatron.schedule.simulate import Run, Timeline, simulate


class PlanError(ValueError):
    """A plan that must not be run; the message is one sentence with the reason."""


@dataclass(frozen=True)
class PlanReport:
    """What a proven plan takes. Tuples go by pipeline rank; a rank's counts are sums over its virtual stages."""

    makespan: float  # in the unit of the costs
    busy: tuple[float, ...]  # time in compute actions
    bubble_fraction: float  # of all ranks' time, the part that is not busy
    peak_live_graphs: tuple[int, ...]  # branch graphs, each of one virtual stage's layers
    peak_kept_inputs: tuple[int, ...]  # inputs kept for the walk; those of stage 0 are tokens, not activations
    peak_kept_blocks: tuple[int, ...]  # inputs of blocks of responses, likewise
    peak_live_branches: tuple[int, ...]  # microbatches begun and not walked back
    peak_held_inputs: tuple[int, ...]  # tensors received and not used yet
    peak_live_prefixes: tuple[int, ...]  # groups begun and not finished, the most on any of the rank's stages
    peak_pending_sends: int  # most in any channel, if sends never block
    min_pending_sends: int  # the fewest that a channel has to allow so that nothing deadlocks
    timeline: Timeline


def _expected(description: Description, pp_rank: int) -> Iterable[Action]:
    """Everything that a rank has to do, in any order."""
    for stage in description.stages_of(pp_rank):
        for group in range(len(description.groups)):
            for op in COMPUTE_OPS:
                for unit in range(description.num_units(op, group)):
                    compute = Action(op, group, unit, stage)
                    transfers = (incoming(compute, description.num_stages), outgoing(compute, description.num_stages))
                    yield from (compute, *(transfer for transfer in transfers if transfer is not None))


def _check_once(plan: Plan, description: Description) -> None:
    if len(plan) != description.pp_size:
        raise PlanError(f"A plan has one list for each of {description.pp_size} pipeline ranks, got {len(plan)}.")
    for pp_rank, actions in enumerate(plan):
        counts, wanted = Counter(actions), set(_expected(description, pp_rank))
        for action in wanted:
            if counts[action] != 1:
                raise PlanError(f"Rank {pp_rank} does {action} {counts[action]} times, wanted once.")
        for action in actions:
            if action not in wanted:
                raise PlanError(f"Rank {pp_rank} does {action}, which is none of its actions.")


class _Replay:
    """One rank's list, walked once: legality of each action in its turn, and counts of what lives."""

    def __init__(self, description: Description, pp_rank: int):
        self.description = description
        self.pp_rank = pp_rank
        self.done: dict[tuple[Op, int, int], int] = defaultdict(int)  # (op, group, stage) -> units
        self.finished: set[Action] = set()
        self.received: set[Action] = set()
        self.used = 0  # receives whose tensor a compute action took
        self.graphs: dict[int, int] = defaultdict(int)  # by stage
        self.branches: dict[int, int] = defaultdict(int)  # by stage: microbatches begun and not walked back
        self.kept = self.kept_blocks = 0
        self.live: dict[int, set[int]] = defaultdict(set)  # groups by stage
        self.peak = dict.fromkeys(("graphs", "branches", "kept", "kept_blocks", "held", "prefixes"), 0)

    def _refuse(self, action: Action, reason: str) -> None:
        raise PlanError(f"Rank {self.pp_rank} does {action} {reason}.")

    def _is_complete(self, op: Op, action: Action) -> bool:
        return self.done[op, action.group, action.stage] == self.description.num_units(op, action.group)

    def _check_turn(self, action: Action) -> None:
        """The order of one group on one stage."""
        op, group, stage = action.op, action.group, action.stage
        unit = self.description.unit_at(op, group, self.done[op, group, stage])
        if action.unit != unit:
            self._refuse(action, f"where unit {unit} is next")
        if op not in (Op.PREFILL, Op.BACKWARD, Op.BLOCK_BACKWARD) and not self._is_complete(Op.PREFILL, action):
            self._refuse(action, "before the last PREFILL of its group")
        microbatch, starts = self._microbatch(action), self.description.groups[group].block_starts
        done = {other: self.done[other, group, stage] for other in COMPUTE_OPS}
        if op is Op.BLOCK_PREFILL and microbatch != done[Op.FORWARD]:
            self._refuse(action, "before the FORWARD of the microbatch before its own")
        if op is Op.FORWARD and done[Op.BLOCK_PREFILL] != starts[microbatch + 1]:
            self._refuse(action, "before the last BLOCK_PREFILL of its microbatch")
        if op is Op.BACKWARD and unit >= done[Op.FORWARD]:
            self._refuse(action, "before its FORWARD")
        if op is Op.BACKWARD and done[Op.BLOCK_BACKWARD] != starts[microbatch]:
            self._refuse(action, "before the last BLOCK_BACKWARD of the microbatch before its own")
        if op is Op.BLOCK_BACKWARD and microbatch >= done[Op.BACKWARD]:
            self._refuse(action, "before the BACKWARD of its microbatch")
        if op is Op.PROMPT_BACKWARD and not self._is_complete(Op.BACKWARD, action):
            self._refuse(action, "before the last BACKWARD of its group")
        if op is Op.PROMPT_BACKWARD and not self._is_complete(Op.BLOCK_BACKWARD, action):
            self._refuse(action, "before the last BLOCK_BACKWARD of its group")

    def _microbatch(self, action: Action) -> int:
        of_block = action.op in (Op.BLOCK_PREFILL, Op.BLOCK_BACKWARD)
        return self.description.groups[action.group].block_of(action.unit)[0] if of_block else action.unit

    def _is_end(self, action: Action, of_block: Op, of_microbatch: Op) -> bool:
        """Whether the action is its microbatch's outermost one: that of its first block, or its only one."""
        starts = self.description.groups[action.group].block_starts
        if action.op is of_microbatch:
            return starts[action.unit] == starts[action.unit + 1]
        return action.op is of_block and action.unit in starts

    def _compute(self, action: Action) -> None:
        self._check_turn(action)
        receive = incoming(action, self.description.num_stages)
        if receive is not None:
            if receive not in self.received:
                self._refuse(action, f"before {receive}")
            self.used += 1
        op, stage = action.op, action.stage
        self.done[op, action.group, stage] += 1
        self.finished.add(action)
        self._count_memory(action)

    def _count_memory(self, action: Action) -> None:
        description, op, stage = self.description, action.op, action.stage
        self.live[stage].add(action.group)
        if len(self.live[stage]) > description.max_live_prefixes:
            self._refuse(action, f"while {description.max_live_prefixes} groups live on its stage, which is the limit")
        trains = not description.forward_only
        if trains and self._is_end(action, Op.BLOCK_PREFILL, Op.FORWARD):
            self.branches[stage] += 1
            if self.branches[stage] > description.max_live_graphs(stage):
                self._refuse(action, f"while {self.branches[stage] - 1} branch graphs live, which is the limit")
        if op is Op.FORWARD and trains:
            self.graphs[stage] += 1
        elif op is Op.BLOCK_PREFILL and trains:
            self.kept_blocks += 1
        elif op is Op.PREFILL and description.num_units(Op.PROMPT_BACKWARD, action.group):
            self.kept += 1
        now = {
            "graphs": sum(self.graphs.values()),
            "branches": sum(self.branches.values()),
            "kept": self.kept,
            "kept_blocks": self.kept_blocks,
            "held": 0,
            "prefixes": len(self.live[stage]),
        }
        self.peak = {name: max(peak, now[name]) for name, peak in self.peak.items()}
        self.graphs[stage] -= op is Op.BACKWARD
        self.kept -= op is Op.PROMPT_BACKWARD
        self.kept_blocks -= op is Op.BLOCK_BACKWARD
        self.branches[stage] -= self._is_end(action, Op.BLOCK_BACKWARD, Op.BACKWARD)
        if all(self._is_complete(other, action) for other in COMPUTE_OPS):
            self.live[stage].remove(action.group)

    def step(self, action: Action) -> None:
        if action.op.is_compute:
            self._compute(action)
        elif action.op.is_receive:
            self.received.add(action)
            self.peak["held"] = max(self.peak["held"], len(self.received) - self.used)
        elif Action(action.of, action.group, action.unit, action.stage) not in self.finished:
            self._refuse(action, "before the action that makes the tensor")


def _check_channels(plan: Plan, description: Description) -> None:
    """The k-th receive of every channel takes what its k-th send put in."""
    pp_size = description.pp_size
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)  # the compute actions that need the tensors
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for pp_rank, actions in enumerate(plan):
        for action in actions:
            peer = action.peer_stage % pp_size
            if action.op.is_send:
                sent[pp_rank, peer].append(Action(action.of, action.group, action.unit, action.peer_stage))
            elif action.op.is_receive:
                received[peer, pp_rank].append(Action(action.of, action.group, action.unit, action.stage))
    for source, target in sent:
        for index, (out, into) in enumerate(zip(sent[source, target], received[source, target], strict=True)):
            if out != into:
                raise PlanError(
                    f"Transfer {index} from rank {source} to rank {target} is sent for {out} and received for {into}."
                )


def _check_ends(run: Run) -> None:
    if run.stuck:
        waits = ", ".join(f"rank {pp_rank} at {action}" for pp_rank, action in run.stuck.items())
        raise PlanError(f"The plan deadlocks: {waits}.")


def check_plan(
    plan: Plan,
    description: Description,
    costs: Callable[[Action], float] | None = None,
    *,
    latency: float = 0.0,
) -> PlanReport:
    """Prove a plan and measure it.

    Args:
        costs: what a compute action takes; default `Costs()`.
        latency: from a send to the moment at which its receive can end, in the unit of the costs.

    Raises:
        PlanError: the plan must not be run.
    """
    _check_once(plan, description)
    replays = [_Replay(description, pp_rank) for pp_rank in range(description.pp_size)]
    for replay, actions in zip(replays, plan, strict=True):
        for action in actions:
            replay.step(action)
    _check_channels(plan, description)
    costs = costs or Costs()
    run = simulate(plan, costs, latency=latency)
    _check_ends(run)
    min_pending = next(num for num in count() if not simulate(plan, costs, max_pending=num).stuck)
    makespan = max((spans[-1].end for spans in run.timeline if spans), default=0.0)
    busy = tuple(sum(costs(action) for action in actions if action.op.is_compute) for actions in plan)
    return PlanReport(
        makespan=makespan,
        busy=busy,
        bubble_fraction=max(0.0, 1 - sum(busy) / (len(plan) * makespan)) if makespan else 0.0,
        peak_live_graphs=tuple(replay.peak["graphs"] for replay in replays),
        peak_kept_inputs=tuple(replay.peak["kept"] for replay in replays),
        peak_kept_blocks=tuple(replay.peak["kept_blocks"] for replay in replays),
        peak_live_branches=tuple(replay.peak["branches"] for replay in replays),
        peak_held_inputs=tuple(replay.peak["held"] for replay in replays),
        peak_live_prefixes=tuple(replay.peak["prefixes"] for replay in replays),
        peak_pending_sends=run.peak_pending,
        min_pending_sends=min_pending,
        timeline=run.timeline,
    )
