"""A dry run: one rank of the real model in the real layout, on fake tensors, with its memory counted by item.

The product's own model, DDP, optimizer, engine, layers and state run at the end of the prompt, where the prefix is
longest. Nothing is computed, no memory of that size is taken and no GPU is touched.

A dry run has a process of its own (`dry_run` starts it): Megatron caches tensors and process groups for the life of a
process, and those of a dry run are fake.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from longstraw_megatron.config import Config
from longstraw_megatron.errors import DryRunError, RefusedError
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.workload import Workload

WORKER = "longstraw_megatron.plan.dry_run_worker"
TIMEOUT_S = 3600.0  # of a worker: many times what the largest of the released models takes
LOG = "plan_dry_run.log"  # in run_dir: what a worker said that failed


@dataclass(frozen=True)
class Phase:
    """What lived at the peak of one phase, bytes by item (plan/items.py), on the device and in host memory."""

    name: str
    peak: int  # bytes on the device
    items: dict[Item, int]  # they sum to the peak; all ACTIVATIONS but the logits are under GRAPH
    host: dict[Item, int]
    left: int  # bytes of the phase's activations that live on after it
    seconds: float  # of the dry run itself
    num_ops: int


@dataclass(frozen=True)
class DryRunResult:
    """The phases of one rank, in order. Bytes are those of tensors: no allocator, no CUDA context, no NCCL."""

    rank: int
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak)


def _log(config: Config, said: str) -> Path:
    path = Path(config.run_dir) / LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(said, encoding="utf-8")
    return path


def _run_worker(job: str, timeout_s: float) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of the process; None for the code where it takes longer."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", WORKER, str(os.getpid())]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace") as process:
        try:
            stdout, stderr = process.communicate(job, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None, "", ""
        finally:
            # gone and waited for when this call ends, by Ctrl-C too
            process.kill()
            process.wait()
    return process.returncode, stdout, stderr


def dry_run(
    config: Config, workload: Workload, *, rank: int, world_size: int, timeout_s: float = TIMEOUT_S
) -> DryRunResult:
    """Rank `rank` of `world_size` on one prompt group, in a process of its own.

    The model, the layout and everything else are `config`'s; `device=auto` stands for CUDA, `precision=auto` for what
    the device takes. The process does not outlive this call, whatever ends it.

    Args:
        timeout_s: seconds after which the process is ended.

    Raises:
        RefusedError: what the process refuses, in its words.
        DryRunError: the process failed, or took longer.
    """
    job = {
        "config": asdict(config),
        "rank": rank,
        "world_size": world_size,
        "prompt_length": workload.prompt_length,
        "response_lengths": workload.response_lengths,
    }
    which = f"The dry run of rank {rank} of {world_size}"
    code, stdout, stderr = _run_worker(json.dumps(job), timeout_s)
    if code is None:
        raise DryRunError(
            f"{which} had no result after {timeout_s:g} s, and was ended; leave dry_run=true out, or try it on a "
            "machine that is less busy."
        )
    if code or not stdout.strip():
        said = stderr.strip() or "nothing"
        raise DryRunError(
            f"{which} ended with exit {code}, and said {said.splitlines()[-1]!r}; {_log(config, said)} has all that it "
            "said, and the plan needs no dry_run=true."
        )
    result = json.loads(stdout.splitlines()[-1])
    if "refused" in result:
        raise RefusedError(result["refused"])
    return DryRunResult(result["rank"], tuple(_phase(phase) for phase in result["phases"]))


def _phase(phase: dict) -> Phase:
    return Phase(
        **phase | {kind: {Item(name): size for name, size in phase[kind].items()} for kind in ("items", "host")}
    )
