"""A run's keys, a workload and a number of GPUs, with the integers that follow: rows, segments, blocks, stages."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

from longstraw_megatron.batch import PromptGroup, split_microbatches
from longstraw_megatron.config import Config, check_world_size
from longstraw_megatron.layout import SegmentLayout, cut_sequences
from longstraw_megatron.mcore.architectures import text_config
from longstraw_megatron.mcore.group_work import earlier_blocks, segment_lengths
from longstraw_megatron.mcore.trainable import trainable_names
from longstraw_megatron.plan.activations import Shape
from longstraw_megatron.plan.parameters import Stage, layer_kinds, stages_of
from longstraw_megatron.plan.workload import Workload
from longstraw_megatron.schedule import Description, GroupShape, RowCosts, StepPlan, prove_step, step_costs

ITEMSIZES = {"bf16": 2, "fp32": 4, "fp64": 8}


@lru_cache(maxsize=4)
def _group_of(workload: Workload) -> PromptGroup:
    return workload.group()


@dataclass(frozen=True)
class Layout:
    """A run's keys, a workload and a number of GPUs, with what follows from them. `config` has no `auto` left."""

    config: Config
    workload: Workload
    num_gpus: int

    @cached_property
    def hf(self) -> dict:
        return text_config(self.config.model.hf_config)

    @cached_property
    def dp(self) -> int:
        return check_world_size(self.config, self.num_gpus)

    @property
    def expert_dp(self) -> int:
        p = self.config.parallel
        return self.num_gpus // (p.ep * p.etp * p.pp)

    @property
    def num_groups(self) -> int:
        """Prompt groups of a step on the rank that has most: of `groups_per_step`, or one where that is all."""
        number = self.config.groups_per_step
        return 1 if number == "all" else -(-number // self.dp)

    @property
    def exact(self) -> bool:
        return self.config.gradient == "exact"

    @property
    def split(self) -> int:
        """Parts into which sequence parallelism cuts rows."""
        return self.config.parallel.tp if self.config.parallel.sp else 1

    @cached_property
    def trains(self) -> Callable[[str], bool] | None:
        """Whether a parameter trains, by its name in the unsharded model; None: all do."""
        if self.config.trainable == "all":
            return None
        return trainable_names(self.config.trainable, self.config.model.hf_config).__contains__

    @cached_property
    def shape(self) -> Shape:
        config = self.config
        return Shape(self.hf, config.parallel, ITEMSIZES[config.precision], fused=config.device == "cuda")

    @cached_property
    def kinds(self) -> list[tuple[str, str]]:
        return layer_kinds(self.hf)

    def stages(self, pp_rank: int) -> list[Stage]:
        return stages_of(self.hf, self.config.parallel)[pp_rank :: self.config.parallel.pp]

    def cut(self, lengths: list[int]) -> SegmentLayout:
        """The shards of a segment of so many tokens, or of a microbatch of such responses."""
        p = self.config.parallel
        return cut_sequences(lengths, cp_size=p.cp, multiple=p.tp if p.sp else 1, style="zigzag", min_rows=1)

    @cached_property
    def segments(self) -> list[int]:
        """Lengths of the prompt's segments."""
        return segment_lengths(self.workload.prefix_length, self.config.segment_length)

    @cached_property
    def segment_rows(self) -> int:
        """Rows of a shard of the longest segment, 0 without one."""
        return self.cut([self.segments[0]]).rows if self.segments else 0

    @cached_property
    def prefix_rows(self) -> int:
        """The most rows of the prefix that a context-parallel rank holds."""
        counts = Counter(self.segments)
        cuts = {length: self.cut([length]) for length in counts}
        ranks = range(self.config.parallel.cp)
        return max(sum(cuts[length].valid(r) * n for length, n in counts.items()) for r in ranks)

    @property
    def group(self) -> PromptGroup:
        return _group_of(self.workload)

    @cached_property
    def microbatches(self) -> list[list[int]]:
        """Lengths of each microbatch's responses; of one in blocks, that of its last block."""
        return [
            [len(self.group.branches[i]) - sum(earlier) for i in microbatch]
            for microbatch, earlier in zip(self._branches, self.earlier_blocks, strict=True)
        ]

    @cached_property
    def _branches(self) -> list[list[int]]:
        return split_microbatches(self.group, self.config.branches_per_microbatch, self.config.response_block)

    @cached_property
    def earlier_blocks(self) -> list[list[int]]:
        """Lengths of each microbatch's blocks before its last one."""
        return [earlier_blocks(self.group, branches, self.config.response_block) for branches in self._branches]

    @cached_property
    def microbatch_rows(self) -> int:
        """The most rows of a shard of a microbatch, or of a block."""
        units = [*self.microbatches, *([length] for blocks in self.earlier_blocks for length in set(blocks))]
        return max(self.cut(lengths).rows for lengths in units)

    @cached_property
    def path_rows(self) -> int:
        """The most rows that a branch in blocks appends behind the prompt."""
        return max(sum(self.cut([length]).rows for length in blocks) for blocks in self.earlier_blocks)

    @cached_property
    def path_blocks(self) -> int:
        return max(map(len, self.earlier_blocks))

    @cached_property
    def group_shape(self) -> GroupShape:
        blocks = tuple(map(len, self.earlier_blocks))
        return GroupShape(len(self.segments), len(self.microbatches), blocks if any(blocks) else ())

    def description(self, num_groups: int) -> Description:
        """The schedule of one optimizer step of a data-parallel rank with so many groups."""
        p = self.config.parallel
        return Description(
            groups=(self.group_shape,) * num_groups,
            pp_size=p.pp,
            vpp_size=p.vpp,
            exact=self.exact,
            max_live_prefixes=self.config.schedule.max_live_prefixes,
        )

    def _step_costs(self, num_groups: int) -> RowCosts:
        p = self.config.parallel
        stages = stages_of(self.hf, p)
        rows = cache(lambda *lengths: self.cut(list(lengths)).rows)
        segments = [rows(length) for length in self.segments]
        microbatches = [rows(*lengths) for lengths in self.microbatches]
        blocks = [rows(length) for lengths in self.earlier_blocks for length in lengths]
        return step_costs(
            [segments] * num_groups,
            [microbatches] * num_groups,
            [blocks] * num_groups,
            stage_layers=[len(stage.layers) for stage in stages] if len(stages) > 1 else None,
            recompute=self.config.recompute == "full",
        )

    def step_plan(self, num_groups: int) -> StepPlan:
        """The plan of that step, as training makes it from a batch of such groups.

        Raises:
            PlanError: the plan would deadlock or hold more than its limits.
        """
        return prove_step(self.description(num_groups), self._step_costs(num_groups))
