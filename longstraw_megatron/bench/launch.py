"""Starting a method's ranks, each a process of its own, and collecting what they report."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from longstraw_megatron.errors import RefusedError

WORKER = "longstraw_megatron.bench.worker"

# For the resident size of a process to be what it uses: one arena for all threads, and freed memory goes back at once
# (by default glibc keeps it, more of it as it goes). Page faults then slow everything down, dense training by a third,
# so the worker goes back to usual settings before it takes the time. Bytes.
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 10),
    "MALLOC_TOP_PAD_": "0",
}
ERROR_LINES = 12  # of a failed worker's output


@dataclass(frozen=True)
class Failure:
    """Why a method has no numbers."""

    reason: str


def worker_environment(num_ranks: int) -> dict[str, str]:
    """This process's environment, with the allocator's settings and a share of the processors where none are set."""
    threads = max(1, (os.cpu_count() or 1) // (2 * num_ranks))
    return {**MALLOC, "OMP_NUM_THREADS": str(threads), **os.environ}


def worker_command(method: str, folder: str, overrides: list[str], num_ranks: int) -> list[str]:
    module = ["-m", WORKER, method, folder, *overrides]
    if num_ranks == 1:
        return [sys.executable, *module]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *ranks, *module]


def run_method(method: str, overrides: list[str], *, num_ranks: int) -> list[dict] | Failure:
    """The ranks' reports (`worker.RankReport` as dicts) in rank order.

    Raises RefusedError where a rank refused the keys; anything else that went wrong is a `Failure`.
    """
    with tempfile.TemporaryDirectory(prefix="longstraw_bench_") as folder:
        done = subprocess.run(
            worker_command(method, folder, overrides, num_ranks),
            env=worker_environment(num_ranks),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        outcomes = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    for outcome in outcomes:
        if outcome["is_refusal"]:
            raise RefusedError(outcome["error"])
    reports = [outcome["report"] for outcome in outcomes if outcome["report"] is not None]
    if len(reports) == num_ranks:
        return sorted(reports, key=lambda report: report["rank"])
    # Every other word that a worker said is worth reading only now.
    print("\n".join(done.stdout.splitlines()[-ERROR_LINES:]), file=sys.stderr, flush=True)
    errors = [outcome["error"] for outcome in outcomes if outcome["error"] is not None]
    if errors:
        return Failure(errors[0])
    if done.returncode < 0 or done.returncode == 128 + 9:
        return Failure(f"killed by signal {abs(done.returncode) % 128}, which is how a machine out of memory ends it")
    return Failure(f"{num_ranks - len(reports)} of {num_ranks} ranks ended without a report, exit {done.returncode}")
