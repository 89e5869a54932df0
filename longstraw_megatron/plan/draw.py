"""A plan as a timeline: text with one line per pipeline rank, or a PNG.

Both draw what `schedule.check_plan` found for given costs. `F0.3` is microbatch 3 of group 0 (`F3` where there is but
one group); `P` and `W` count the prompt's segments; with virtual stages, `F0.3b` runs on the rank's second model part.
Waiting is left blank.
"""

from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from longstraw_megatron.schedule import Action, Op, PlanReport, Span, StepPlan, check_plan

COLORS = {Op.PREFILL: "#4c78a8", Op.FORWARD: "#72b7b2", Op.BACKWARD: "#f2a541", Op.PROMPT_BACKWARD: "#c44e52"}
COLORS |= {Op.BLOCK_PREFILL: "#9ecae9", Op.BLOCK_BACKWARD: "#e45756"}
NAMES = {
    Op.PREFILL: "prefill",
    Op.FORWARD: "branch forward",
    Op.BACKWARD: "branch backward",
    Op.PROMPT_BACKWARD: "prompt backward",
    Op.BLOCK_PREFILL: "block of a branch",
    Op.BLOCK_BACKWARD: "block backward",
}


def _labelled(report: PlanReport) -> list[list[tuple[Span, str]]]:
    """The compute spans of each rank, with what is written on them."""
    actions = [span.action for spans in report.timeline for span in spans]
    pp_size = len(report.timeline)
    has_groups = any(action.group for action in actions)
    has_parts = any(action.stage >= pp_size for action in actions)

    def label(action: Action) -> str:
        group = f"{action.group}." if has_groups else ""
        part = ascii_lowercase[action.stage // pp_size % 26] if has_parts else ""
        return f"{action.op.value}{group}{action.unit}{part}"

    return [[(span, label(span.action)) for span in spans if span.action.op.is_compute] for spans in report.timeline]


def _cell(label: str, action: Action, width: int) -> str:
    """What fits: the label and a dash, the kind and the unit, the kind."""
    for text in (label, f"{action.op.value}{action.unit}", action.op.value):
        if len(text) < width:
            return text.ljust(width, "-")
    return action.op.value[:width]


def _kinds(report: PlanReport) -> list[Op]:
    """The kinds of actions that occur."""
    present = {span.action.op for spans in report.timeline for span in spans}
    return [op for op in COLORS if op in present]


def legend(report: PlanReport) -> str:
    """What the letters of `draw_text` stand for."""
    return "a rank of the pipeline a line; " + ", ".join(f"{op.value} {NAMES[op]}" for op in _kinds(report))


def _summary(report: PlanReport) -> str:
    return f"makespan {report.makespan:g}, bubble {100 * report.bubble_fraction:.1f} %"


def draw_text(report: PlanReport, *, columns: int | None = 160) -> str:
    """One line per rank, to scale, and a line with the makespan and the bubble fraction.

    `columns` bounds the drawing: actions lose their group, then their unit, and what is too short is left out. None
    draws every label whole, in as few columns as that takes.
    """
    rows = _labelled(report)
    cells = [(span.end - span.start, label) for row in rows for span, label in row]
    scale = max(((len(label) + 1) / length for length, label in cells if length > 0), default=1.0)
    if columns is not None and report.makespan:
        scale = min(scale, columns / report.makespan)
    lines = []
    for pp_rank, row in enumerate(rows):
        line = ""
        for span, label in row:
            begin, end = round(span.start * scale), round(span.end * scale)
            line = line.ljust(begin) + _cell(label, span.action, end - begin)
        lines.append(f"rank {pp_rank} |{line}".rstrip())
    return "\n".join([*lines, _summary(report)])


def draw_png(report: PlanReport, path: str | Path, *, title: str = "", unit: str = "") -> None:
    """A Gantt chart of the ranks, colours by kind of action; `unit` is that of the costs."""
    rows = _labelled(report)
    figure = Figure(figsize=(16, 1.6 + 0.5 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points_per_unit = 15 * 72 / report.makespan if report.makespan else 0
    for op in _kinds(report):
        color = COLORS[op]
        for pp_rank, row in enumerate(rows):
            bars = [(span.start, span.end - span.start) for span, _ in row if span.action.op is op]
            # an edge of half a point would hide a bar that is hardly wider
            thinnest = min((length for _, length in bars), default=0) * points_per_unit
            axes.broken_barh(
                bars, (pp_rank - 0.4, 0.8), color=color, edgecolor="white", linewidth=min(0.5, thinnest / 8)
            )
        axes.plot([], [], color=color, linewidth=6, label=NAMES[op])
    for pp_rank, row in enumerate(rows):
        for span, label in row:
            if (span.end - span.start) * points_per_unit > 4 * len(label):
                axes.text((span.start + span.end) / 2, pp_rank, label, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(rows)), [f"rank {pp_rank}" for pp_rank in range(len(rows))])
    axes.set_xlim(0, report.makespan or 1)
    axes.invert_yaxis()
    axes.set_xlabel(f"time [{unit}]" if unit else "time")
    axes.set_title(f"{title}: {_summary(report)}" if title else _summary(report))
    figure.legend(loc="outside lower center", ncols=len(COLORS), frameon=False)
    figure.savefig(path, dpi=120)


def draw_plan(
    step: StepPlan, costs: Callable[[Action], float], path: str | Path | None = None, *, unit: str = "s"
) -> str:
    """A step's plan as text; with a `path` as a PNG there, too.

    The order is the plan's, whatever it was made with; `costs` says what its actions take, in `unit`.
    """
    description = step.description
    report = check_plan(step.plan, description, costs)
    if path is not None:
        virtual = f" VPP{description.vpp_size}" if description.vpp_size > 1 else ""
        draw_png(report, path, title=f"PP{description.pp_size}{virtual}", unit=unit)
    return draw_text(report)
