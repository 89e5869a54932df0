"""Bytes of each rank by item, from the model's shape, the layout, the workload and the run's keys.

No process group, no tensor. What is counted is what tensors take; a hardware's `reserved` and `fragmentation` are
added for what no tensor says. Ranks of one pipeline stage hold equal amounts, so a stage stands for its ranks. The
items are those of the moment that takes most: prefill, replay or walk of the prompt's end, where the prefix is whole.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longstraw_megatron.config import Config
from longstraw_megatron.plan import temporaries
from longstraw_megatron.plan.activations import FLOAT32, layer_graph
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.kept_state import kept_state
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.parameters import Parameters, count_parameters
from longstraw_megatron.schedule import PlanReport
from longstraw_megatron.segments.logprobs import WEIGHT_ROWS

MOMENTS = 2  # of AdamW, float32 at least
VALUES = (Item.STATE, Item.BOUNDARIES)  # of a prefix state, without its gradients


@dataclass(frozen=True)
class StageMemory:
    """A pipeline rank's bytes: `phases` has each moment's items on the device, `host` what lies in host memory."""

    pp_rank: int
    first_rank: int  # of the ranks of this stage, which hold equal amounts
    num_ranks: int
    parameters: Parameters
    phases: dict[str, dict[Item, int]]
    host: dict[Item, int]

    @property
    def phase(self) -> str:
        """The moment that takes most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def items(self) -> dict[Item, int]:
        return self.phases[self.phase]

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def tensors(self) -> int:
        """Without the allowance: what a dry run or an allocator counts."""
        return self.total - self.items[Item.FRAGMENTATION]

    @property
    def host_total(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Every pipeline rank's bytes."""

    stages: tuple[StageMemory, ...]

    @property
    def worst(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def host_total(self) -> int:
        """Bytes of host memory of the rank that takes most."""
        return max(stage.host_total for stage in self.stages)

    def host_total_of_node(self, gpus_per_node: int) -> int:
        """Bytes of host memory of the node that takes most, its ranks numbered one after another."""
        ranks = [stage.host_total for stage in self.stages for _ in range(stage.num_ranks)]
        return max(sum(ranks[i : i + gpus_per_node]) for i in range(0, len(ranks), gpus_per_node))


class Moment(NamedTuple):
    """What a pass takes when a layer of this kind of attention is computed, over state and what lives always."""

    attention: str
    graph: int
    buffers: int


def _graph(layout: Layout, layers: range, rows: int) -> int:
    """What a stage's layers keep for the backward of a pass of `rows`, recompute considered, without temporaries."""
    shape = layout.shape
    if layout.config.recompute == "full":
        return len(layers) * (rows // layout.split) * shape.hidden * shape.itemsize
    return sum(part.nbytes(shape, rows) for i in layers for part in layer_graph(shape, layout.kinds[i]))


def _beside(layout: Layout, kind: tuple[str, str], rows: int, prefix_rows: int) -> tuple[int, int]:
    """(graph, buffers) at the worst moment of one layer's backward, over what the other layers keep."""
    shape, exact = layout.shape, layout.exact
    attention, mlp = layer_graph(shape, kind)
    mlp_graph = mlp.nbytes(shape, rows)
    buffers = 0
    if kind[0] == "softmax":
        page = max(min(layout.config.state.page_length, prefix_rows), rows)
        moment = temporaries.softmax_backward(shape, rows, page)
        buffers = temporaries.attention_buffers(shape, rows, prefix_rows, exact=exact, backward=True)
    elif kind[0] == "delta":
        moment = temporaries.delta_backward(shape, rows)
    else:
        moment = temporaries.sparse_gather(shape, rows, prefix_rows, backward=True)
        travel = temporaries.sparse_travel(shape, rows, prefix_rows, exact=exact, backward=True)
        buffers = temporaries.travel_buffer(travel)
    moment -= mlp_graph  # the MLP's graph is gone when attention's backward begins
    graph = max(moment + buffers, temporaries.mlp_backward(shape, kind[1], rows)) - buffers
    if layout.config.recompute == "full":
        graph += attention.nbytes(shape, rows) + mlp_graph
    return graph, buffers


def _forward_moments(layout: Layout, layers: range, rows: int, prefix_rows: int) -> Iterator[Moment]:
    """The worst of each kind of layer in a forward: index scores, gathered rows, or one layer's intermediates."""
    shape, exact = layout.shape, layout.exact
    for kind in {layout.kinds[i] for i in layers}:
        moment = sum(part.nbytes(shape, rows) for part in layer_graph(shape, kind)) * 3 // 4
        buffers = 0
        if kind[0] == "softmax":
            buffers = temporaries.attention_buffers(shape, rows, prefix_rows, exact=exact, backward=False)
        elif kind[0] != "delta":
            attention = layer_graph(shape, kind)[0].nbytes(shape, rows) // 2
            gather = temporaries.sparse_gather(shape, rows, prefix_rows, backward=False)
            travel = temporaries.sparse_travel(shape, rows, prefix_rows, exact=exact, backward=False)
            buffers = temporaries.travel_buffer(travel)
            moment = max(moment, attention + gather)
            if kind[0] == "full":
                scores = temporaries.index_scores(shape, rows, prefix_rows)
                scores += temporaries.travel_buffer(temporaries.index_travel(shape, rows, prefix_rows))
                moment = max(moment, attention + scores - buffers)
        yield Moment(kind[0], moment, buffers)


def _backward_moments(layout: Layout, layers: range, rows: int, prefix_rows: int) -> Iterator[Moment]:
    """Those of a pass with a graph: in backward, or in forward behind most layers."""
    whole = _graph(layout, layers, rows)
    for kind in {layout.kinds[i] for i in layers}:
        graph, buffers = _beside(layout, kind, rows, prefix_rows)
        yield Moment(kind[0], whole + graph, buffers)
    last_full = max((i for i in layers if layout.kinds[i][0] == "full"), default=None)
    if last_full is not None:
        before = _graph(layout, range(layers.start, last_full), rows)
        for moment in _forward_moments(layout, range(last_full, last_full + 1), rows, prefix_rows):
            yield moment._replace(graph=before + moment.graph)


def _head(layout: Layout, rows: int) -> int:
    """The head at its worst moment: a block of logits in both dtypes, and rows of its weight's gradient."""
    shape, config = layout.shape, layout.config
    vocab = shape.over_tp(layout.hf["vocab_size"])
    block = min(config.logprob_block, rows) * vocab
    if shape.itemsize == shape.float_itemsize:
        return block * shape.itemsize
    pieces = min(vocab, WEIGHT_ROWS) * shape.hidden * FLOAT32 if shape.fused else 0
    return block * (shape.itemsize + shape.float_itemsize) + pieces


def main_grad_itemsize(layout: Layout) -> int:
    """Bytes of an element of the main gradients."""
    shape = layout.shape
    return shape.float_itemsize if layout.config.optimizer.grad_reduce_in_fp32 else shape.itemsize


def updated_parameters(layout: Layout, parameters: Parameters) -> int:
    """Trained parameters that a rank updates, of those that it holds."""
    dense = -(-parameters.trained_dense // (layout.dp * layout.config.parallel.cp))
    return dense + -(-parameters.trained_expert // layout.expert_dp)


def offloaded_parameters(layout: Layout, parameters: Parameters) -> int:
    """Those of them whose optimizer is in host memory."""
    options = layout.config.optimizer
    fraction = options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0
    return int(updated_parameters(layout, parameters) * fraction)


class _StagePlanner:
    """The moments of one pipeline rank."""

    def __init__(self, layout: Layout, report: PlanReport, pp_rank: int, kept_prefixes: int):
        self.layout, self.report, self.pp_rank = layout, report, pp_rank
        self.stages = layout.stages(pp_rank)
        self.parameters = count_parameters(
            layout.config.model.hf_config, layout.config.parallel, pp_rank, trains=layout.trains
        )
        self.state, self.host = Counter(), Counter()
        self.staged: dict[str, Counter[Item]] = {}
        for stage in self.stages:
            kept = kept_state(layout, stage)
            self.state.update(kept.device)
            self.host.update(kept.host)
            self.staged |= kept.staged  # equal for layers of one kind
        live = report.peak_live_prefixes[pp_rank]
        where_values_are = self.host if layout.config.state.location == "host" else self.state
        for table in (self.state, self.host):
            for item in table:
                keeps = table is where_values_are and item in VALUES
                table[item] *= max(live, kept_prefixes) if keeps else live
        if layout.config.state.stage_inputs == "host":
            self.host[Item.STAGE_INPUTS] = self._kept_inputs()
        self.fixed = self._fixed()
        if layout.config.device == "cpu":
            # host memory is the device's own
            self.fixed[Item.OPTIMIZER] += self.host.pop(Item.OPTIMIZER, 0)
            self.state.update(self.host)
            self.host.clear()

    def _fixed(self) -> dict[Item, int]:
        """Weights, gradients and optimizer on the device; `host` gets the part of the optimizer that is there."""
        layout, parameters, size = self.layout, self.parameters, self.layout.shape.itemsize
        grad_size, floats = main_grad_itemsize(layout), layout.shape.float_itemsize
        per_element = MOMENTS * floats + (FLOAT32 if size < FLOAT32 else 0)
        offloaded = offloaded_parameters(layout, parameters)
        if offloaded:
            # weights and gradients go to and fro in copies of the device's dtypes
            self.host[Item.OPTIMIZER] += offloaded * (per_element + size + grad_size)
        return {
            Item.WEIGHTS: parameters.total * size + parameters.buffers * FLOAT32,
            Item.GRADIENTS: parameters.trained * grad_size,
            Item.OPTIMIZER: (updated_parameters(layout, parameters) - offloaded) * per_element,
        }

    def _stage_inputs(self, rows: int, number: int) -> int:
        layout = self.layout
        return number * (rows // layout.split) * layout.shape.hidden * layout.shape.itemsize

    def _kept_inputs(self) -> int:
        """Inputs kept for the walk; those of the first stage are tokens."""
        number = self.report.peak_kept_inputs[self.pp_rank]
        if self.stages[0].embedding:
            number = number * (len(self.stages) - 1) // len(self.stages)
        return self._stage_inputs(self.layout.segment_rows, number)

    def _worst(
        self, moments: Callable, state: tuple[Item, ...], rows: int, prefix_rows: int
    ) -> tuple[Moment, Counter[Item]]:
        """The moment that takes most with what is staged then of the items of `state`."""
        layout = self.layout
        found = (moment for s in self.stages for moment in moments(layout, s.layers, rows, prefix_rows))
        staged = {kind: Counter({i: n for i, n in table.items() if i in state}) for kind, table in self.staged.items()}
        pairs = ((moment, staged.get(moment.attention, Counter())) for moment in found)
        moment, staged = max(pairs, key=lambda pair: pair[0].graph + pair[0].buffers + pair[1].total())
        return moment._replace(buffers=moment.buffers + self._sequence_buffer(rows)), staged

    def _moment(
        self,
        state: tuple[Item, ...],
        moment: Moment | None = None,
        staged: Counter[Item] | None = None,
        *,
        logits: int = 0,
        held: int = 0,
    ) -> dict[Item, int]:
        _, graph, buffers = moment or (None, 0, 0)
        passing = {item: self.state[item] + (staged or {}).get(item, 0) for item in state}
        on_device = self.layout.config.state.stage_inputs == "device"
        passing[Item.STAGE_INPUTS] = held + (self._kept_inputs() if on_device else self.state[Item.STAGE_INPUTS])
        passing |= {Item.GRAPH: max(graph, 0), Item.COMMUNICATION: buffers, Item.LOGITS: logits}
        hardware = self.layout.config.hardware
        allowance = int(hardware.reserved_bytes + hardware.fragmentation * sum(passing.values()))
        return self.fixed | passing | {Item.FRAGMENTATION: allowance}

    def _sequence_buffer(self, rows: int) -> int:
        """Megatron's buffer of an all-gather of a sequence-parallel shard."""
        return rows * self.layout.shape.hidden * self.layout.shape.itemsize if self.layout.config.parallel.sp else 0

    def phases(self) -> dict[str, dict[Item, int]]:
        layout = self.layout
        every = (*VALUES, Item.STATE_GRADIENTS, Item.BOUNDARY_GRADIENTS)
        rows, prefix_rows = layout.segment_rows, layout.prefix_rows
        earlier_rows = max(prefix_rows - rows, 0)  # of the last segment's prefix
        has_output = any(stage.output for stage in self.stages)
        held = self.report.peak_held_inputs[self.pp_rank]

        found = {}
        if rows:
            worst = self._worst(_forward_moments, VALUES, rows, earlier_rows)
            found["prefill"] = self._moment(VALUES, *worst, held=self._stage_inputs(rows, held))
        branch_rows = layout.microbatch_rows
        moment, staged = self._worst(_backward_moments, every, branch_rows, prefix_rows)
        per_graph = max(_graph(layout, s.layers, branch_rows) for s in self.stages)
        live = self.report.peak_live_graphs[self.pp_rank]
        moment = moment._replace(graph=moment.graph + (live - 1) * per_graph)
        logits = _head(layout, branch_rows) if has_output else 0
        if has_output and live * per_graph + logits > moment.graph + staged.total():
            # the head's moment comes before any layer's backward: what it takes replaces their temporaries
            moment, staged = moment._replace(graph=live * per_graph), None
        else:
            logits = 0
        branch_held = self._stage_inputs(branch_rows, held)
        found["replay"] = self._moment(every, moment, staged, logits=logits, held=branch_held)
        if layout.exact and rows:
            worst = self._worst(_backward_moments, every, rows, earlier_rows)
            found["walk"] = self._moment(every, *worst, held=self._stage_inputs(rows, held))
        found["update"] = self._update(VALUES if layout.config.state.reuse_steps else ())
        return found

    def _update(self, kept: tuple[Item, ...]) -> dict[Item, int]:
        """The optimizer's step: the prefix is gone, unless used again; the device copies low gradients to float32."""
        config = self.layout.config
        is_low = not config.optimizer.grad_reduce_in_fp32 and self.layout.shape.itemsize < FLOAT32
        what = self.layout, self.parameters
        on_device = updated_parameters(*what) - offloaded_parameters(*what)
        copies = on_device * FLOAT32 if is_low else 0
        items = self._moment(kept) | {Item.STAGE_INPUTS: 0}
        return items | {Item.GRADIENTS: items[Item.GRADIENTS] + copies}


def kept_prefixes(config: Config, dp_size: int, steps: Sequence[int] | None = None) -> int:
    """Prefix states that a rank keeps over optimizer steps (`state.reuse_steps`), at the most.

    `steps` has the groups of each step of one pass over the rollouts; None: of `groups_per_step`, or one, at every step
    others.
    """
    if not config.state.reuse_steps:
        return 0
    kept = config.state.reuse_steps + 1
    if steps is None:
        steps = [1 if config.groups_per_step == "all" else config.groups_per_step] * kept
    per_rank = sorted((-(-num_groups // dp_size) for num_groups in steps), reverse=True)
    # besides: the fresh capture that drift is measured with
    return sum(per_rank[:kept]) + (config.state.reuse_check_every is not None)


def plan_memory(layout: Layout, *, num_groups: int | None = None, steps: Sequence[int] | None = None) -> MemoryPlan:
    """Bytes by item of every pipeline rank.

    Args:
        num_groups: groups of a step that share a rank's schedule; None: the layout's own. Those beyond the prefixes
            that live at once find a rank as it was, and are not planned.
        steps: as `kept_prefixes` takes them.

    Raises:
        RefusedError: a layout that does not cut the model or the GPUs.
    """
    p = layout.config.parallel
    num_groups = num_groups or layout.num_groups
    report = layout.step_plan(min(num_groups, layout.config.schedule.max_live_prefixes)).report
    per_stage = layout.num_gpus // p.pp
    stages = []
    for pp_rank in range(p.pp):
        planner = _StagePlanner(layout, report, pp_rank, kept_prefixes(layout.config, layout.dp, steps))
        stages.append(
            StageMemory(
                pp_rank, pp_rank * per_stage, per_stage, planner.parameters, planner.phases(), dict(planner.host)
            )
        )
    return MemoryPlan(tuple(stages))
