"""What a plan is made from: the pipeline's shape, the groups of one optimizer step, and what may live at once.

Virtual stage v of `pp_size * vpp_size` lives on pipeline rank `v % pp_size`, as that rank's model part
`v // pp_size`, as in Megatron.
"""

from dataclasses import dataclass

from longstraw_megatron.schedule.actions import Action, Op


@dataclass(frozen=True)
class GroupShape:
    """How much work a prompt group is, what a rank only runs to keep step with others included."""

    num_segments: int  # of the prompt without its last token; 0 for a prompt of one token
    num_microbatches: int  # of branches

    def __post_init__(self):
        if self.num_segments < 0 or self.num_microbatches < 0:
            raise ValueError(f"A group has counts of at least 0, got {self}.")


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
        if op is Op.PREFILL:
            return shape.num_segments
        if op is Op.FORWARD:
            return shape.num_microbatches
        if op is Op.BACKWARD:
            return 0 if self.forward_only else shape.num_microbatches
        return shape.num_segments if self.exact and not self.forward_only else 0

    def max_live_graphs(self, stage: int) -> int:
        """Branch graphs that a virtual stage may hold, each of its own layers only.

        With n stages from this one to the last: n without virtual stages, which is 1F1B; else 2 n / vpp_size, rounded
        up, and one more, so that a microbatch is back before the stage has to wait for it (2 n - 1 are always
        enough). A rank's sum is at most (vpp_size + 1) pp_size + 2 vpp_size - 1; Megatron's interleaved schedule holds
        (vpp_size + 1) pp_size - 1. Each is the graph of 1 / vpp_size of the rank's layers.
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
    stages: tuple[float, ...] | None = None  # factor of each virtual stage, for uneven stages

    def __call__(self, action: Action) -> float:
        cost = {
            Op.PREFILL: self.prefill,
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward,
            Op.PROMPT_BACKWARD: self.prompt_backward,
        }[action.op]
        return cost if self.stages is None else cost * self.stages[action.stage]


@dataclass(frozen=True)
class RowCosts:
    """`per_row` times the rows that an action runs: `segment_rows[group][unit]` and `microbatch_rows[group][unit]`."""

    per_row: Costs
    segment_rows: tuple[tuple[int, ...], ...]
    microbatch_rows: tuple[tuple[int, ...], ...]

    def __call__(self, action: Action) -> float:
        is_branch = action.op in (Op.FORWARD, Op.BACKWARD)
        rows = (self.microbatch_rows if is_branch else self.segment_rows)[action.group][action.unit]
        return self.per_row(action) * rows
