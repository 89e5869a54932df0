"""Seconds of one optimizer step by phase, from FLOPs and bytes against the hardware's rates.

Assumed, and not measured on any GPU:

* a rate is the device's peak times a named `efficiency` of the hardware file; a backward is two forwards of matrix
  products and two and a half of attention and the delta rule;
* on a layer, matrix products, attention, delta rule, index scores, elementwise work (its intermediates written and
  read once, twice in backward) and collectives follow one another; only a ring of queries flies beside the attention
  that it feeds, and pages in host memory beside all of the layer;
* experts get equally many tokens; every data-parallel rank has one prompt group of the workload; pipeline transfers
  take their bytes, and the bubble is that of the plan that runs, by the checker, with these costs of its actions;
* neither the start-up of kernels nor the loop over pages in Python counts, so small models on a GPU take longer.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

from longstraw_megatron.config import HardwareConfig
from longstraw_megatron.layout.transfer import TransferShape, choose_transfer, transfer_bytes
from longstraw_megatron.layout.travel import TravelShape, choose_travel, travel_bytes
from longstraw_megatron.plan import temporaries
from longstraw_megatron.plan.activations import layer_graph
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import MemoryPlan, schedule_of
from longstraw_megatron.plan.parameters import layer_parameters
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
class Pass:
    """One segment through a stage: tokens over all context-parallel ranks, rows of one of them, prefix before it."""

    tokens: int
    rows: int
    prefix: int
    sequences: tuple[int, ...]

    @property
    def pairs(self) -> float:
        """Attended (query, key) pairs."""
        return self.tokens * self.prefix + sum(length * (length + 1) / 2 for length in self.sequences)


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

    @property
    def step(self) -> float:
        return self.makespan + self.reduce + self.optimizer


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
        self.action = cache(self._action)
        self.layer = cache(self._layer)

    def _pass_of(self, action: Action) -> Pass:
        layout = self.layout
        before = layout.workload.prefix_length
        if action.op in (Op.FORWARD, Op.BACKWARD):
            lengths = layout.microbatches[action.unit]
            before += sum(layout.earlier_blocks[action.unit])
            return Pass(sum(lengths), layout.cut(lengths).rows, before, tuple(lengths))
        if action.op in (Op.BLOCK_PREFILL, Op.BLOCK_BACKWARD):
            microbatch, block = layout.group_shape.block_of(action.unit)
            lengths = layout.earlier_blocks[microbatch]
            length = lengths[block]
            return Pass(length, layout.cut([length]).rows, before + sum(lengths[:block]), (length,))
        length = layout.segments[action.unit]
        return Pass(length, layout.cut([length]).rows, sum(layout.segments[: action.unit]), (length,))

    def __call__(self, action: Action) -> float:
        return sum(self.action(action).values())

    def _action(self, action: Action) -> Counter[str]:
        segment = self._pass_of(action)
        recompute = self.layout.config.recompute == "full"
        walks = action.op in (Op.PROMPT_BACKWARD, Op.BLOCK_BACKWARD)
        forwards = 1 + recompute if walks else recompute if action.op is Op.BACKWARD else 1
        backward = walks or action.op is Op.BACKWARD
        total: Counter[str] = Counter()
        stage = self.stages[action.stage]
        selects = action.op is not Op.BACKWARD  # the selection stays on the pass: recompute does not select again
        for kind, number in Counter(self.layout.kinds[i] for i in stage.layers).items():
            for name, seconds in self.layer(kind, segment, forwards, backward, selects).items():
                total[name] += number * seconds
        if stage.output and action.op not in (Op.PREFILL, Op.PROMPT_BACKWARD):
            flops = 2 * segment.rows * self.shape.hidden * self.shape.over_tp(self.hf["vocab_size"])
            total["head"] += self.rates.compute(flops * (3 if backward else 1), "matmul")
        if self.parallel.pp > 1:
            activation = segment.rows // self.split * self.shape.hidden * self.shape.itemsize
            total["stages"] += self.rates.send(activation, self.layout.num_gpus)
        return total

    def _layer(self, kind, segment: Pass, forwards: int, backward: bool, selects: bool) -> Counter[str]:
        """Seconds of one layer by kind of work."""
        hf, shape, rates, cp = self.hf, self.shape, self.rates, self.parallel.cp
        core = forwards + (BACKWARD_CORE if backward else 0)
        passes = forwards + (BACKWARD_MATMUL if backward else 0)
        rows = segment.rows
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
            attention = rates.compute(core * per_pair * segment.pairs / cp, "attention")
            work["attention"] = max(attention, self._attention_travel(segment, forwards, backward))
        elif kind[0] == "delta":
            work["delta rule"] = rates.compute(core * rows * self._delta_flops(), "delta_rule")
        else:
            work.update(self._sparse(kind[0] == "full" and selects, segment, core, forwards, backward))
        return work

    def _delta_flops(self) -> float:
        """Of a row's forward: pairs within a chunk, the solve, and reading and writing the state."""
        hf = self.hf
        heads = self.shape.over_tp(hf["linear_num_value_heads"])
        keys, values = hf["linear_key_head_dim"], hf["linear_value_head_dim"]
        return 2.0 * heads * (2 * CHUNK * keys + CHUNK * (keys + values) + CHUNK * values + 3 * keys * values)

    def _sparse(self, selects: bool, segment: Pass, core: float, forwards: int, backward: bool) -> dict[str, float]:
        hf, shape, rates = self.hf, self.shape, self.rates
        heads, cp = shape.over_tp(hf["num_attention_heads"]), self.parallel.cp
        selected = min(hf["index_topk"], segment.prefix + max(segment.sequences))
        per_query = selected * heads * 2 * (shape.latent + hf["kv_lora_rank"])
        gathered = rates.memory(core * segment.rows * selected * shape.latent * shape.itemsize)
        seconds = rates.compute(core * segment.rows * per_query, "sparse_attention") + gathered
        prefix_rows = -(-segment.prefix // cp)
        travel = [
            temporaries.sparse_travel(shape, segment.rows, prefix_rows, exact=self.layout.exact, backward=False)
        ] * forwards
        if backward:
            travel.append(
                temporaries.sparse_travel(shape, segment.rows, prefix_rows, exact=self.layout.exact, backward=True)
            )
        found = {"sparse attention": max(seconds, sum(map(self._travel, travel)))}
        if selects:
            pairs = segment.pairs / cp / self.parallel.tp
            flops = 2 * hf["index_n_heads"] * hf["index_head_dim"] * pairs
            scores = rates.compute(flops, "index") + rates.memory(CANDIDATE_BYTES * pairs)
            moved = self._travel(temporaries.index_travel(shape, segment.rows, prefix_rows))
            found["index selection"] = max(scores, moved)
        return found

    def _travel(self, shape: TravelShape) -> float:
        if shape.cp_size == 1:
            return 0.0
        return self.rates.send(travel_bytes(choose_travel(shape), shape), shape.cp_size)

    def _attention_travel(self, segment: Pass, forwards: int, backward: bool) -> float:
        if self.parallel.cp == 1:
            return 0.0
        shape, hf = self.shape, self.hf
        call = TransferShape(
            cp_size=self.parallel.cp,
            rows=segment.rows,
            prefix_rows=-(-segment.prefix // self.parallel.cp),
            num_heads=shape.over_tp(hf["num_attention_heads"]),
            num_key_heads=shape.key_value_heads,
            head_dim=hf["head_dim"],
            itemsize=shape.itemsize,
            sum_itemsize=shape.float_itemsize,
            prefix_grad=self.layout.exact,
        )
        moved = sum(
            transfer_bytes(choose_transfer(call, backward=way), call, backward=way) * times
            for way, times in ((False, forwards), (True, int(backward)))
        )
        return self.rates.send(moved, self.parallel.tp * self.parallel.cp)


def _reduce_seconds(layout: Layout, memory: MemoryPlan) -> float:
    """Gradients to their owners and new weights back, on the stage that has most."""
    rates, p = _Rates(layout), layout.config.parallel
    ranks = layout.dp * p.cp
    stage = memory.worst
    if ranks == 1:
        return 0.0
    moved = (stage.items[Item.GRADIENTS] + stage.items[Item.WEIGHTS]) * (ranks - 1) / ranks
    return rates.send(moved, layout.num_gpus // p.pp)


def plan_time(layout: Layout, memory: MemoryPlan) -> TimePlan:
    """Seconds by phase, on the pipeline rank that is busiest."""
    costs = _Costs(layout)
    description = layout.description()
    report = check_plan(schedule_of(description), description, costs)
    busiest = max(range(len(report.busy)), key=report.busy.__getitem__)
    phases, work = Counter(), Counter()
    for span in report.timeline[busiest]:
        if span.action.op.is_compute:
            phases[PHASES[span.action.op]] += span.end - span.start
            work.update(costs.action(span.action))
    rates = _Rates(layout)
    stage = memory.worst
    # the host's AdamW is as fast as weights and gradients come and go, at best
    on_host = stage.host.get(Item.OPTIMIZER, 0)
    optimizer = rates.memory(2 * stage.items[Item.OPTIMIZER]) + rates.host(on_host)
    return TimePlan(
        phases=dict(phases),
        work=dict(work),
        bubble_fraction=report.bubble_fraction,
        makespan=report.makespan,
        reduce=_reduce_seconds(layout, memory),
        optimizer=optimizer,
        report=report,
    )
