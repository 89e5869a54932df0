"""From the ranks' reports to ratios, JSON and tables."""

import math

from longstraw_megatron.bench.launch import Failure
from longstraw_megatron.bench.workload import DENSE_METHODS, token_forwards
from longstraw_megatron.config import Config
from longstraw_megatron.logging import format_bytes, format_table

BASE = "dense"
# How far the norm of the exact gradient may be from dense training's, relative.
NORM_TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 3e-2}
DENSE_PHASES = {"replay": "forward", "branch_backward": "backward"}


def summarize_method(method: str, ranks: list[dict]) -> dict:
    """One method over all ranks: the slowest rank of each repetition, of these the fastest; the worst peak."""
    repetitions = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    cpu = [sum(times) for times in zip(*(rank["cpu_seconds"] for rank in ranks), strict=True)]
    phases = {}
    for name in ranks[0]["phases"]:
        parts = [rank["phases"][name] for rank in ranks]
        most_units = max(part["units"] for part in parts)
        phases[DENSE_PHASES.get(name, name) if method in DENSE_METHODS else name] = {
            "seconds": max(part["seconds"] for part in parts),
            "tokens": max(part["tokens"] for part in parts),
            "units": most_units,
            "peak_bytes": max(part["peak_bytes"] for part in parts),
            "sent_bytes_per_unit": max(part["sent_bytes"] for part in parts) / max(most_units, 1),
        }
    return {
        "method": method,
        "error": None,
        "seconds": min(repetitions),
        "cpu_seconds": min(cpu),
        "repetitions": repetitions,
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "loaded_bytes": max(rank["loaded_bytes"] for rank in ranks),
        "state_bytes": max(sum(rank["state_bytes"].values()) for rank in ranks),
        "sent_bytes": max(sum(rank["sent_by_purpose"].values()) for rank in ranks),
        "loss": ranks[0]["loss"],
        "grad_norm": ranks[0]["grad_norm"],
        "phases": phases,
        "ranks": ranks,
    }


def compare(config: Config, run: dict, base: dict | None) -> dict:
    """Ratios of `run` to the dense baseline; None where there is no baseline."""
    method = run["method"]
    ceiling = token_forwards(config, BASE) / token_forwards(config, method)
    if base is None or run["error"] is not None or base["error"] is not None:
        return {"speedup": None, "cpu_speedup": None, "ceiling": ceiling, "memory": None, "grad_norm_error": None}
    return {
        "speedup": base["seconds"] / run["seconds"],
        "cpu_speedup": base["cpu_seconds"] / run["cpu_seconds"],
        "ceiling": ceiling,
        "memory": run["peak_bytes"] / base["peak_bytes"] if base["peak_bytes"] > 0 else None,
        "grad_norm_error": abs(run["grad_norm"] / base["grad_norm"] - 1) if base["grad_norm"] else math.nan,
    }


def make_report(config: Config, results: dict[str, list[dict] | Failure], *, num_ranks: int) -> dict:
    """What `format=json` prints. Bytes are bytes, times are seconds, ratios are against dense without recompute."""
    runs = [
        {"method": method, "error": result.reason} if isinstance(result, Failure) else summarize_method(method, result)
        for method, result in results.items()
    ]
    base = next((run for run in runs if run["method"] == BASE), None)
    for run in runs:
        run["ratios"] = compare(config, run, base)
    return {
        "model": config.model.name,
        "prompt_length": config.prompt_length,
        "response_length": config.response_length,
        "group_size": config.group_size,
        "segment_length": config.segment_length,
        "branches_per_microbatch": config.branches_per_microbatch,
        "recompute": config.recompute,
        "precision": config.precision,
        "device": config.device,
        "num_ranks": num_ranks,
        "repeats": config.bench.repeats,
        "runs": runs,
    }


def wrong_gradients(report: dict) -> list[str]:
    """Methods whose gradient should be dense training's and is not; its norm tells."""
    tolerance = NORM_TOLERANCE[report["precision"]]
    return [
        run["method"]
        for run in report["runs"]
        if run["method"] in ("exact", "dense_recompute")
        and (error := run["ratios"]["grad_norm_error"]) is not None
        and not error <= tolerance
    ]


def _bytes(value: float | None) -> str:
    return "-" if value is None else format_bytes(value)


def format_report(report: dict) -> str:
    """Two tables: the methods against each other, and their phases."""
    sends = report["num_ranks"] > 1
    columns = ["method", "seconds", "speedup", "of CPU time", "ceiling", "peak over model", "of dense", "prefix state"]
    columns += ["gradient norm", "off dense by"] + ["sent per rank"] * sends
    rows, phase_rows = [], []
    for run in report["runs"]:
        ratios = run["ratios"]
        if run["error"] is not None:
            rows.append((run["method"], run["error"], *[None] * (len(columns) - 2)))
            continue
        row = [run["method"], run["seconds"], ratios["speedup"], ratios["cpu_speedup"], ratios["ceiling"]]
        row += [_bytes(run["peak_bytes"]), ratios["memory"], _bytes(run["state_bytes"]), run["grad_norm"]]
        rows.append([*row, ratios["grad_norm_error"]] + [_bytes(run["sent_bytes"])] * sends)
        for name, phase in run["phases"].items():
            cells = (run["method"], name.replace("_", " "), phase["units"], phase["tokens"], phase["seconds"])
            sent = [_bytes(phase["sent_bytes_per_unit"])] * sends
            phase_rows.append([*cells, _bytes(phase["peak_bytes"]), *sent])
    phase_columns = ["method", "phase", "passes", "tokens", "seconds", "peak over model"] + ["sent per pass"] * sends
    shape = (
        f"{report['model']}, prompt {report['prompt_length']}, response {report['response_length']}, "
        f"group of {report['group_size']}, segments of {report['segment_length']}, {report['precision']} on "
        f"{report['num_ranks']} x {report['device']}, fastest of {report['repeats']}"
    )
    parts = [shape, format_table(rows, columns), format_table(phase_rows, phase_columns)]
    if sends:
        parts.append("sent: context parallelism, and per rank also between stages; not Megatron's own collectives")
    return "\n\n".join(parts)
