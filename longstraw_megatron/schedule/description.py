"""What a plan is made from: the pipeline's shape, the groups of one optimizer step, and what may live at once.

Virtual stage v of `pp_size * vpp_size` lives on pipeline rank `v % pp_size`, as that rank's model part
`v // pp_size`, as in Megatron.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from longstraw_megatron.schedule.actions import Action, Op


@dataclass(frozen=True)
class GroupShape:
    """How much work a prompt group is. Fillers are counted in, and are always the last ones.

    A filler is run on tokens that are not valid, backward included, at zero weight: see `equalize`.
    """

    num_segments: int  # of the prompt without its last token; 0 for a prompt of one token
    num_microbatches: int  # of branches
    num_filler_segments: int = 0
    num_filler_microbatches: int = 0

    def __post_init__(self):
        for num, fillers in (
            (self.num_segments, self.num_filler_segments),
            (self.num_microbatches, self.num_filler_microbatches),
        ):
            if not 0 <= fillers <= num:
                raise ValueError(f"A group has counts >= 0 and no more fillers than units, got {self}.")

    def is_filler(self, action: Action) -> bool:
        """Whether a compute action of this group has no valid token."""
        if action.op in (Op.FORWARD, Op.BACKWARD):
            return action.unit >= self.num_microbatches - self.num_filler_microbatches
        return action.unit >= self.num_segments - self.num_filler_segments


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


def equalize(groups_per_rank: Sequence[Sequence[GroupShape]]) -> list[tuple[GroupShape, ...]]:
    """Pad every rank's groups so that all ranks run the same list of actions.

    `groups_per_rank[dp_rank]` are the groups of data-parallel ranks that share an expert group. The i-th groups of
    all ranks get the largest counts among them, and ranks with fewer groups get groups of fillers alone. The caller
    orders each rank's groups (by size, say) so that few fillers are needed.
    """
    empty = GroupShape(0, 0)
    padded: list[list[GroupShape]] = [[] for _ in groups_per_rank]
    for row in zip_longest(*groups_per_rank, fillvalue=empty):
        segments = max(shape.num_segments for shape in row)
        microbatches = max(shape.num_microbatches for shape in row)
        for groups, shape in zip(padded, row, strict=True):
            groups.append(
                replace(
                    shape,
                    num_segments=segments,
                    num_microbatches=microbatches,
                    num_filler_segments=shape.num_filler_segments + segments - shape.num_segments,
                    num_filler_microbatches=shape.num_filler_microbatches + microbatches - shape.num_microbatches,
                )
            )
    return [tuple(groups) for groups in padded]
