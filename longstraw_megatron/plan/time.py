"""Seconds of one optimizer step by phase, from FLOPs and bytes against the hardware's rates.

Assumed, and not measured on any GPU:

* a rate is the device's peak times a named `efficiency` of the hardware file; a backward is two forwards of matrix
  products and two and a half of attention and the delta rule;
* on a layer, matrix products, attention, delta rule, index scores, elementwise work (its intermediates written and
  read once, twice in backward) and collectives follow one another; only a ring of queries flies beside the attention
  that it feeds, and so do copies of state that rests in host memory: pages come in one ahead of the attention (or delta
  rule, or selection) that reads them, so the longer of the two counts. Both directions take turns, as a page comes in
  behind the last one that went out. Selected rows that the host picks are counted as if they came beside it too;
* a stage's input goes to host memory and back in the order of the stage's work: nothing hides it;
* experts get equally many tokens; every data-parallel rank has one prompt group of the workload, or its share of
  `groups_per_step`; pipeline transfers take their bytes, and the bubble is that of the plan that training makes, by the
  checker, with these costs of its actions;
* the optimizer reads and writes its state once; what of it is in host memory waits for gradients to go out and new
  weights to come in, and is as fast as they are: its AdamW may be slower;
* neither the start-up of kernels nor the loop over pages in Python counts, so small models on a GPU take longer.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

from longstraw_megatron.config import HardwareConfig
from longstraw_megatron.layout.transfer import choose_transfer, transfer_bytes
from longstraw_megatron.layout.travel import TravelShape, choose_travel, travel_bytes
from longstraw_megatron.plan import temporaries
from longstraw_megatron.plan.activations import layer_graph
from longstraw_megatron.plan.host_copies import HostCopies, stage_input_bytes
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import MemoryPlan, StageMemory, main_grad_itemsize, offloaded_parameters
from longstraw_megatron.plan.parameters import Parameters, layer_parameters
from longstraw_megatron.plan.passes import Pass, pass_of
from longstraw_megatron.schedule import Action, Op, PlanReport, check_plan

BACKWARD_MATMUL, BACKWARD_CORE = 2.0, 2.5  # of a forward
CHUNK = 64  # tokens of a chunk of the delta rule
CANDIDATE_BYTES = 32  # moved for each score on its way into the running top-k
PHASES = {
    Op.PREFILL: "prefill",
    Op.BLOCK_PREFILL: "blocks scored",
    Op.BLOCK_BACKWARD: "blocks walked",
    Op.FORWARD: "replay forward",
    Op.BACKWARD: "replay backward",
    Op.PROMPT_BACKWARD: "walk",
}


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a step: `work` by kind on the busiest stage, `phases` by kind of action there, and the whole."""

    phases: dict[str, float]
    work: dict[str, float]
    bubble_fraction: float
    makespan: float  # of the schedule
    reduce: float
    optimizer: float
    report: PlanReport
    reuses: bool  # whether state is kept for later steps

    @property
    def step(self) -> float:
        return self.makespan + self.reduce + self.optimizer

    @property
    def reusing_step(self) -> float | None:
        """Of one that finds the state of an earlier step (`state.reuse_steps`): no prefill, the bubble as it was."""
        return self.step - self.phases.get(PHASES[Op.PREFILL], 0.0) if self.reuses else None


class _Rates:
    """Seconds for FLOPs and bytes."""

    def __init__(self, layout: Layout):
        self.hardware: HardwareConfig = layout.config.hardware
        self.flops = getattr(self.hardware.matmul_flops, layout.config.precision)
        self.efficiency = self.hardware.efficiency

    def compute(self, flops: float, kind: str) -> float:
        return flops / (self.flops * getattr(self.efficiency, kind))

    def memory(self, num_bytes: float) -> float:
        return num_bytes / (self.hardware.memory_bandwidth * self.efficiency.memory)

    def host(self, num_bytes: float) -> float:
        return num_bytes / (self.hardware.host_bandwidth * self.efficiency.host)

    def send(self, num_bytes: float, group_span: int) -> float:
        """`group_span`: ranks from the first to the last of the group, in Megatron's order."""
        if group_span <= self.hardware.gpus_per_node:
            return num_bytes / (self.hardware.link_bandwidth * self.efficiency.link)
        return num_bytes / (self.hardware.network_bandwidth * self.efficiency.network)


class _Costs:
    """What each action takes, by kind of work."""

    def __init__(self, layout: Layout):
        self.layout, self.shape, self.rates = layout, layout.shape, _Rates(layout)
        self.parallel, self.hf = layout.config.parallel, layout.hf
        self.split = self.parallel.tp if self.parallel.sp else 1
        self.stages = [stage for r in range(self.parallel.pp) for stage in layout.stages(r)]
        self.stages.sort(key=lambda stage: stage.first)
        kinds = {kind: i for i, kind in enumerate(layout.kinds)}
        self.dense = {kind: layer_parameters(self.hf, i, self.parallel).dense for kind, i in kinds.items()}
        self.graph = {kind: layer_graph(self.shape, kind) for kind in kinds}
        self.copies = HostCopies(layout)
        self.action = cache(self._action)
        self.layer = cache(self._layer)

    def __call__(self, action: Action) -> float:
        return sum(self.action(action).values())

    def _action(self, action: Action) -> Counter[str]:
        segment = pass_of(self.layout, action)
        total: Counter[str] = Counter()
        stage = self.stages[action.stage]
        for kind, number in Counter(self.layout.kinds[i] for i in stage.layers).items():
            for name, seconds in self.layer(kind, segment).items():
                total[name] += number * seconds
        if stage.output and action.op not in (Op.PREFILL, Op.PROMPT_BACKWARD):
            flops = 2 * segment.rows * self.shape.hidden * self.shape.over_tp(self.hf["vocab_size"])
            total["head"] += self.rates.compute(flops * (3 if segment.backward else 1), "matmul")
        if self.parallel.pp > 1:
            activation = segment.rows // self.split * self.shape.hidden * self.shape.itemsize
            total["stages"] += self.rates.send(activation, self.layout.num_gpus)
        if not stage.embedding and (kept := stage_input_bytes(self.layout, segment)):
            total["stage inputs"] += self.rates.host(kept)
        return total

    def _layer(self, kind: tuple[str, str], segment: Pass) -> Counter[str]:
        """Seconds of one layer by kind of work."""
        hf, shape, rates = self.hf, self.shape, self.rates
        forwards, backward, rows = segment.forwards, segment.backward, segment.rows
        core = forwards + (BACKWARD_CORE if backward else 0)
        passes = forwards + (BACKWARD_MATMUL if backward else 0)
        flops = 2 * rows * self.dense[kind]
        work: Counter[str] = Counter()
        if kind[1] == "sparse":
            routed = rows // self.split * hf["num_experts_per_tok"]
            flops += 2 * routed * 3 * shape.hidden * hf["moe_intermediate_size"]
            share = (self.parallel.ep - 1) / self.parallel.ep
            moved = 2 * routed * shape.hidden * shape.itemsize * share
            span = self.parallel.ep * self.parallel.etp
            work["experts' exchange"] = (forwards + backward) * rates.send(moved, span)
        work["matmul"] = passes * rates.compute(flops, "matmul")
        if self.parallel.tp > 1:
            moved = 4 * rows * shape.hidden * shape.itemsize * (self.parallel.tp - 1) / self.parallel.tp
            work["tensor parallel"] = (forwards + 1.5 * backward) * rates.send(moved, self.parallel.tp)
        graph = sum(part.nbytes(shape, rows) for part in self.graph[kind])
        work["elementwise"] = rates.memory(2 * graph * (forwards + 2 * backward))
        if kind[0] == "softmax":
            per_pair = 4 * shape.over_tp(hf["num_attention_heads"]) * hf["head_dim"]
            attention = rates.compute(core * per_pair * segment.pairs / self.parallel.cp, "attention")
            copies = rates.host(self.copies.keys_and_values(segment))
            work["attention"] = max(attention, self._attention_travel(segment), copies)
        elif kind[0] == "delta":
            delta = rates.compute(core * rows * self._delta_flops(), "delta_rule")
            work["delta rule"] = max(delta, rates.host(self.copies.boundary(segment)))
        else:
            work.update(self._sparse(kind[0] == "full" and segment.selects, segment, core))
        return work

    def _delta_flops(self) -> float:
        """Of a row's forward: pairs within a chunk, the solve, and reading and writing the state."""
        hf = self.hf
        heads = self.shape.over_tp(hf["linear_num_value_heads"])
        keys, values = hf["linear_key_head_dim"], hf["linear_value_head_dim"]
        return 2.0 * heads * (2 * CHUNK * keys + CHUNK * (keys + values) + CHUNK * values + 3 * keys * values)

    def _sparse(self, selects: bool, segment: Pass, core: float) -> dict[str, float]:
        hf, shape, rates = self.hf, self.shape, self.rates
        heads, cp = shape.over_tp(hf["num_attention_heads"]), self.parallel.cp
        selected = min(hf["index_topk"], segment.prefix + max(segment.sequences))
        per_query = selected * heads * 2 * (shape.latent + hf["kv_lora_rank"])
        gathered = rates.memory(core * segment.rows * selected * shape.latent * shape.itemsize)
        seconds = rates.compute(core * segment.rows * per_query, "sparse_attention") + gathered
        prefix_rows = -(-segment.prefix // cp)
        forward, backward = (
            temporaries.sparse_travel(shape, segment.rows, prefix_rows, exact=self.layout.exact, backward=way)
            for way in (False, True)
        )
        travel = segment.forwards * self._travel(forward) + segment.backward * self._travel(backward)
        copies = rates.host(self.copies.latents(segment, forward, backward))
        found = {"sparse attention": max(seconds, travel, copies)}
        if selects:
            pairs = segment.pairs / cp / self.parallel.tp
            flops = 2 * hf["index_n_heads"] * hf["index_head_dim"] * pairs
            scores = rates.compute(flops, "index") + rates.memory(CANDIDATE_BYTES * pairs)
            travel = temporaries.index_travel(shape, segment.rows, prefix_rows)
            copies = rates.host(self.copies.index_keys(segment, travel))
            found["index selection"] = max(scores, self._travel(travel), copies)
        return found

    def _travel(self, shape: TravelShape) -> float:
        if shape.cp_size == 1:
            return 0.0
        return self.rates.send(travel_bytes(choose_travel(shape), shape), shape.cp_size)

    def _attention_travel(self, segment: Pass) -> float:
        if self.parallel.cp == 1:
            return 0.0
        prefix_rows = -(-segment.prefix // self.parallel.cp)
        call = temporaries.attention_call(self.shape, segment.rows, prefix_rows, exact=self.layout.exact)
        moved = sum(
            transfer_bytes(choose_transfer(call, backward=way), call, backward=way) * times
            for way, times in ((False, segment.forwards), (True, int(segment.backward)))
        )
        return self.rates.send(moved, self.parallel.tp * self.parallel.cp)


def _reduce_seconds(layout: Layout, parameters: Parameters) -> float:
    """A stage's gradients to their owners and new weights back: experts have owners of their own, fewer or none."""
    p = layout.config.parallel
    size = main_grad_itemsize(layout) + layout.shape.itemsize
    moved = sum(
        number * size * (ranks - 1) / ranks
        for number, ranks in (
            (parameters.trained_dense, layout.dp * p.cp),
            (parameters.trained_expert, layout.expert_dp),
        )
    )
    return _Rates(layout).send(moved, layout.num_gpus // p.pp)


def _optimizer_seconds(layout: Layout, stage: StageMemory) -> float:
    """A stage's optimizer: on the device its state read and written, on the host gradients out and weights in."""
    rates = _Rates(layout)
    copied = 0
    if layout.config.device != "cpu":  # host memory is a CPU's own, its optimizer state among the stage's items
        copied = offloaded_parameters(layout, stage.parameters)
    moved = copied * (layout.shape.itemsize + main_grad_itemsize(layout))
    return rates.memory(2 * stage.items[Item.OPTIMIZER]) + rates.host(moved)


def plan_time(layout: Layout, memory: MemoryPlan) -> TimePlan:
    """Seconds by phase, on the pipeline rank that is busiest."""
    costs = _Costs(layout)
    number = layout.num_groups
    report = check_plan(layout.step_plan(number).plan, layout.description(number), costs)
    busiest = max(range(len(report.busy)), key=report.busy.__getitem__)
    phases, work = Counter(), Counter()
    for span in report.timeline[busiest]:
        if span.action.op.is_compute:
            phases[PHASES[span.action.op]] += span.end - span.start
            work.update(costs.action(span.action))
    return TimePlan(
        phases=dict(phases),
        work=dict(work),
        bubble_fraction=report.bubble_fraction,
        makespan=report.makespan,
        reduce=max(_reduce_seconds(layout, stage.parameters) for stage in memory.stages),
        optimizer=max(_optimizer_seconds(layout, stage) for stage in memory.stages),
        report=report,
        reuses=layout.config.state.reuse_steps > 0,
    )
