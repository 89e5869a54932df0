"""What a plan is made from: the pipeline's shape, the groups of one optimizer step, and what may live at once.

Virtual stage v of `pp_size * vpp_size` lives on pipeline rank `v % pp_size`, as that rank's model part
`v // pp_size`, as in Megatron.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from longstraw_megatron.schedule.actions import Action, Op


@dataclass(frozen=True)
class GroupShape:
    """How much work a prompt group is, what a rank only runs to keep step with others included."""

    num_segments: int  # of the prompt without its last token; 0 for a prompt of one token
    num_microbatches: int  # of branches
    blocks: tuple[int, ...] = ()  # of each microbatch, before its last one; (): none have any

    def __post_init__(self):
        if min(self.num_segments, self.num_microbatches, *self.blocks) < 0:
            raise ValueError(f"A group has counts of at least 0, got {self}.")
        if self.blocks and len(self.blocks) != self.num_microbatches:
            raise ValueError(f"A group has a number of blocks for each microbatch, or for none, got {self}.")

    @cached_property
    def block_starts(self) -> tuple[int, ...]:
        """[num_microbatches + 1]: the first block of each microbatch, counted over the group, and their number."""
        return (0, *accumulate(self.blocks or (0,) * self.num_microbatches))

    def block_of(self, unit: int) -> tuple[int, int]:
        """(microbatch, its block) of a block counted over the group."""
        microbatch = bisect_right(self.block_starts, unit) - 1
        return microbatch, unit - self.block_starts[microbatch]

    @cached_property
    def walk_order(self) -> tuple[int, ...]:
        """Blocks in the order in which they are walked: each microbatch's in reverse."""
        spans = zip(self.block_starts, self.block_starts[1:], strict=False)
        return tuple(unit for start, stop in spans for unit in reversed(range(start, stop)))


@dataclass(frozen=True, kw_only=True)
class Description:
    """One optimizer step on one pipeline.

    `max_live_prefixes`: groups that a stage may have begun and not finished; more of them fill more bubbles.
    `max_run_ahead`: outputs of one kind that a stage may have made before its neighbour begins with the first.
    """

    groups: tuple[GroupShape, ...]
    pp_size: int = 1
    vpp_size: int = 1
    exact: bool = True  # with the walk; False is the detached gradient
    forward_only: bool = False  # PREFILL and FORWARD alone
    max_live_prefixes: int = 1
    max_run_ahead: int = 4

    def __post_init__(self):
        for name in ("pp_size", "vpp_size", "max_live_prefixes", "max_run_ahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}.")

    @property
    def num_stages(self) -> int:
        return self.pp_size * self.vpp_size

    @property
    def last_stage(self) -> int:
        return self.num_stages - 1

    def stages_of(self, pp_rank: int) -> range:
        """The virtual stages of a pipeline rank; the i-th is its model part i."""
        return range(pp_rank, self.num_stages, self.pp_size)

    def num_units(self, op: Op, group: int) -> int:
        """How often each stage does `op` for a group."""
        shape = self.groups[group]
        if self.forward_only and op.flow == -1:
            return 0
        return {
            Op.PREFILL: shape.num_segments,
            Op.BLOCK_PREFILL: shape.block_starts[-1],
            Op.FORWARD: shape.num_microbatches,
            Op.BACKWARD: shape.num_microbatches,
            Op.BLOCK_BACKWARD: shape.block_starts[-1],
            Op.PROMPT_BACKWARD: shape.num_segments if self.exact else 0,
        }[op]

    def unit_at(self, op: Op, group: int, done: int) -> int:
        """The unit that comes after `done` others of its kind."""
        if op is Op.PROMPT_BACKWARD:
            return self.groups[group].num_segments - 1 - done
        return self.groups[group].walk_order[done] if op is Op.BLOCK_BACKWARD else done

    def max_live_graphs(self, stage: int) -> int:
        """Branch graphs that a virtual stage may hold, each of its own layers only.

        So many microbatches may be begun and not walked back, where they have blocks.

        With n stages from this one to the last: n without virtual stages, which is 1F1B; else 2 n / vpp_size, rounded
        up, and one more, and at most 2 n - 1. The one more is measured, not derived: without it three virtual stages on
        8 ranks take up to 4 % longer, and without any limit up to 4 % less. A rank's sum is at most
        (vpp_size + 1) pp_size + 2 vpp_size - 1; Megatron's interleaved schedule holds (vpp_size + 1) pp_size - 1. Each
        is the graph of 1 / vpp_size of the rank's layers.
        """
        ahead = self.num_stages - stage
        if self.vpp_size == 1:
            return ahead
        return min(2 * ahead - 1, -(-2 * ahead // self.vpp_size) + 1)


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of each compute action; called with one, so any other callable can stand in.

    A walk is a forward with graph and a backward; one more forward where activations are recomputed.
    """

    prefill: float = 1.0
    forward: float = 1.0
    backward: float = 2.0
    prompt_backward: float = 3.0
    block_prefill: float = 1.0
    block_backward: float = 3.0
    stages: tuple[float, ...] | None = None  # factor of each virtual stage, for uneven stages

    def __call__(self, action: Action) -> float:
        cost = {
            Op.PREFILL: self.prefill,
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward,
            Op.PROMPT_BACKWARD: self.prompt_backward,
            Op.BLOCK_PREFILL: self.block_prefill,
            Op.BLOCK_BACKWARD: self.block_backward,
        }[action.op]
        return cost if self.stages is None else cost * self.stages[action.stage]


@dataclass(frozen=True)
class RowCosts:
    """`per_row` times the rows that an action runs: `segment_rows[group][unit]`, and likewise those of microbatches (of
    their last blocks) and of earlier blocks."""

    per_row: Costs
    segment_rows: tuple[tuple[int, ...], ...]
    microbatch_rows: tuple[tuple[int, ...], ...]
    block_rows: tuple[tuple[int, ...], ...] = ()

    def __call__(self, action: Action) -> float:
        rows = self.microbatch_rows
        if action.op in (Op.PREFILL, Op.PROMPT_BACKWARD):
            rows = self.segment_rows
        elif action.op in (Op.BLOCK_PREFILL, Op.BLOCK_BACKWARD):
            rows = self.block_rows
        return self.per_row(action) * rows[action.group][action.unit]
