"""A dry run: one rank of the real model in the real layout, on fake tensors, with its memory counted by item.

The product's own model, DDP, optimizer, engine, layers and state run at the end of the prompt, where the prefix is
longest. Nothing is computed, no memory of that size is taken and no GPU is touched.

A dry run has a process of its own (`dry_run` starts it): Megatron caches tensors and process groups for the life of a
process, and those of a dry run are fake.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from longstraw_megatron.config import Config
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.workload import Workload

WORKER = "longstraw_megatron.plan.dry_run_worker"
ERROR_LINES = 12  # of a failed worker's output


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


class DryRunError(RuntimeError):
    """A dry run that ended without a result, with the last lines that it said."""


def dry_run(config: Config, workload: Workload, *, rank: int, world_size: int) -> DryRunResult:
    """Rank `rank` of `world_size` on one prompt group, in a process of its own.

    The model, the layout and everything else are `config`'s; `device=auto` stands for CUDA, `precision=auto` for what
    the device takes. Raises DryRunError where the process fails.
    """
    job = {
        "config": asdict(config),
        "rank": rank,
        "world_size": world_size,
        "prompt_length": workload.prompt_length,
        "response_lengths": workload.response_lengths,
    }
    command = [sys.executable, "-m", WORKER]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[-ERROR_LINES:])
        raise DryRunError(f"The dry run of rank {rank} of {world_size} ended with exit {done.returncode}:\n{said}")
    result = json.loads(done.stdout.splitlines()[-1])
    return DryRunResult(result["rank"], tuple(_phase(phase) for phase in result["phases"]))


def _phase(phase: dict) -> Phase:
    return Phase(
        **phase | {kind: {Item(name): size for name, size in phase[kind].items()} for kind in ("items", "host")}
    )
