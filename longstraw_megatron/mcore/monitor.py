"""Time and peak memory of each phase of a step."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import torch


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # Linux: "5" resets the peak resident size of this process (man 5 proc, clear_refs)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes(device: torch.device) -> int:
    """Peak since `reset_peak`: the allocator's on CUDA, the resident size of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


def free_host_memory() -> int:
    """Bytes of host memory that a new process can take without swapping."""
    return psutil.virtual_memory().available


def device_memory(device: torch.device, local_ranks: int) -> int:
    """Bytes of a rank's device: all of a GPU's; of a CPU's free memory an equal share for each rank of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return free_host_memory() // local_ranks


@dataclass
class PhaseStats:
    seconds: float = 0.0
    peak_bytes: int = 0
    tokens: int = 0
    count: int = 0


@dataclass
class Monitor:
    """Sums seconds and tokens, and keeps the peak, by phase name. `timeline` holds (label, start, stop) in seconds."""

    device: torch.device
    phases: dict[str, PhaseStats] = field(default_factory=dict)
    timeline: list[tuple[str, float, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def phase(self, name: str, *, tokens: int = 0, label: str = "") -> Iterator[None]:
        stats = self.phases.setdefault(name, PhaseStats())
        self._synchronize()
        reset_peak(self.device)
        start = time.perf_counter()
        yield
        self._synchronize()
        stop = time.perf_counter()
        stats.seconds += stop - start
        stats.peak_bytes = max(stats.peak_bytes, peak_bytes(self.device))
        stats.tokens += tokens
        stats.count += 1
        self.timeline.append((label or name, start, stop))

    def take(self) -> dict[str, PhaseStats]:
        """The phases since the last call; starts anew."""
        phases, self.phases, self.timeline = self.phases, {}, []
        return phases

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
