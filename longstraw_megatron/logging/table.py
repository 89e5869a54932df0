"""Plain-text tables."""

from collections.abc import Sequence
from typing import Any


def format_bytes(num_bytes: float) -> str:
    """123.4 MiB: a size in the largest binary unit in which it is at least 1."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def format_table(rows: Sequence[Sequence[Any]], columns: Sequence[str] | None = None) -> str:
    """Rows in aligned columns under their names: numbers to the right, the rest to the left, None as `-`."""
    cells = [[_format_cell(value) for value in row] for row in rows]
    lines = [list(columns), *cells] if columns is not None else cells
    if not lines:
        return ""
    if len({len(line) for line in lines}) != 1:
        raise ValueError(f"format_table needs rows of equal length, got {sorted({len(line) for line in lines})}.")
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    right = [
        all(row[i] is None or (isinstance(row[i], int | float) and not isinstance(row[i], bool)) for row in rows)
        for i in range(len(widths))
    ]

    def join(line: list[str]) -> str:
        aligned = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)]
        return "  ".join(aligned).rstrip()

    text = [join(line) for line in lines]
    if columns is not None:
        text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)
