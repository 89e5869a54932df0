"""A plan's memory as stacked bars: one for each pipeline rank, a line where the device ends."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from longstraw_megatron.plan.items import Item

COLORS = dict(
    zip(
        Item,
        ("#4c78a8", "#9ecae9", "#54a24b", "#f58518", "#ffbf79", "#b279a2", "#d6a5c9", "#88d27a", "#e45756", "#ff9d98")
        + ("#79706e", "#bab0ac"),
        strict=True,
    )
)


def draw_bars(
    bars: Sequence[tuple[str, dict[Item, int]]], path: str | Path, *, title: str, limit: float | None = None
) -> None:
    """`bars` are (label, bytes by item) from top to bottom; `limit` is the device's memory in bytes."""
    figure = Figure(figsize=(11, 1.8 + 0.5 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    left = [0.0] * len(bars)
    for item in Item:
        sizes = [items.get(item, 0) / 1e9 for _, items in bars]
        if any(sizes):
            axes.barh(range(len(bars)), sizes, left=left, color=COLORS[item], label=item.value)
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    if limit is not None:
        axes.axvline(limit / 1e9, color="black", linestyle="--", linewidth=1, label="device")
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(*left, (limit or 0) / 1e9))
    axes.set_xlabel("GB = 1e9 bytes")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
