"""Run a function on several ranks: processes forked from this one, gloo between them, no ports.

Forking after the imports makes a rank cost milliseconds instead of the seconds that importing Megatron takes. The
rendezvous is a file in a temporary folder. Results come back through one pipe for each rank, as bytes of `torch.save`,
so that a tensor of any size neither hangs a queue nor leaves shared memory behind.
"""

import contextlib
import datetime
import faulthandler
import io
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

GRACE_S = 1.0  # after a first failure, how long the other ranks may still tell theirs; and to leave after a result
STACK_S = 0.5  # how long a hung rank has to write its stack


class RankError(RuntimeError):
    """A rank raised or died; `rank` is the first that did, the message has its traceback."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


class RanksHungError(RuntimeError):
    """Ranks gave no result in time: `ranks`; the message has their stacks."""

    def __init__(self, message: str, ranks: list[int]):
        super().__init__(message)
        self.ranks = ranks


@dataclass(frozen=True)
class _Report:
    rank: int
    when: float  # time.monotonic(), one clock for all processes of a machine
    result: object = None
    error: str | None = None
    died: bool = False

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self, buffer)
        return buffer.getvalue()


@dataclass(frozen=True)
class _Job:
    world_size: int
    fn: Callable
    args: tuple
    timeout: float
    init: bool
    folder: Path

    def stack_file(self, rank: int) -> Path:
        return self.folder / f"stack_{rank}"

    def stack(self, rank: int) -> str:
        """What faulthandler wrote for a rank: innermost call first, down to the function that was to run."""
        text = self.stack_file(rank).read_text() if self.stack_file(rank).exists() else ""
        return text.split(f'  File "{__file__}"')[0]

    def run(self, rank: int) -> object:
        if self.init:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self.folder / 'rendezvous'}",
                rank=rank,
                world_size=self.world_size,
                timeout=datetime.timedelta(seconds=self.timeout + 30),  # the parent is to notice a hang first
            )
        return self.fn(rank, self.world_size, *self.args)


def _share_loop_thread() -> None:
    """One gloo device for all process groups of this rank.

    Each group otherwise has a loop thread of its own that wakes up 100 times a second, and Megatron makes two dozen
    groups: with 8 ranks on 2 cores that is most of what a small test takes.
    """
    base = distributed_c10d.ProcessGroupGloo
    device = base.create_device(interface="lo")

    class OneDevice(base):
        def __init__(self, store, rank, size, timeout=datetime.timedelta(minutes=30), **_unused):
            options = base._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 2
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneDevice


def _child_main(job: _Job, rank: int, pipe: Connection) -> None:
    """The life of a rank; multiprocessing leaves with os._exit behind it."""
    os.setpgid(0, 0)  # so that what a rank spawned (Megatron's checkpoint writer does) ends with it
    torch.set_num_threads(1)
    _share_loop_thread()
    with job.stack_file(rank).open("w") as stack:
        faulthandler.enable(file=stack)
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            report = _Report(rank, time.monotonic(), result=job.run(rank)).to_bytes()
        except BaseException:
            report = _Report(rank, time.monotonic(), error=traceback.format_exc()).to_bytes()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
    pipe.send_bytes(report)
    with contextlib.suppress(EOFError):
        pipe.recv_bytes()  # a rank that left early would break the collectives of those that still work


def _fork(job: _Job, rank: int) -> tuple[BaseProcess, Connection]:
    pipe, child_pipe = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child_main, args=(job, rank, child_pipe))
    with warnings.catch_warnings():
        # Python warns that a forked process has none of its parent's threads; a rank uses none of them
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        process.start()
    child_pipe.close()  # the child's copy is now the only one: its death is the end of the pipe
    return process, pipe


def _receive(job: _Job, pipe: Connection, process: BaseProcess, rank: int) -> _Report:
    try:
        return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except EOFError:
        when = time.monotonic()
        process.join(GRACE_S)
        error = f"The process died, exit code {process.exitcode}.\n{job.stack(rank)}"
        return _Report(rank, when, error=error, died=True)


def _collect(job: _Job, processes: list[BaseProcess], pipes: list[Connection], deadline: float) -> list[_Report]:
    """Reports until every rank told its own, one failed (and a moment more), or the deadline."""
    reports: list[_Report] = []
    pending = {pipe: rank for rank, pipe in enumerate(pipes)}
    while pending and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pending), timeout=left):
            rank = pending.pop(pipe)
            reports.append(_receive(job, pipe, processes[rank], rank))
            if reports[-1].error is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return reports


def _kill(process: BaseProcess) -> None:
    for kill, pid in ((os.killpg, process.pid), (os.kill, process.pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    process.join()


def _stack(job: _Job, process: BaseProcess, rank: int) -> str:
    """Where a hung rank stands, innermost call first."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(STACK_S)
    return f"rank {rank}:\n{job.stack(rank) or 'no stack'}\n"


def _results(job: _Job, processes: list[BaseProcess], reports: list[_Report]) -> list:
    # a rank that died is why others lost their connection to it, however late its end was seen
    failed = sorted((report for report in reports if report.error is not None), key=lambda it: (not it.died, it.when))
    if failed:
        first, *others = failed
        also = f"Then also: ranks {[report.rank for report in others]}.\n" if others else ""
        raise RankError(f"Rank {first.rank} of {job.world_size} failed:\n{first.error}{also}", first.rank)
    results = {report.rank: report.result for report in reports}
    hung = [rank for rank in range(job.world_size) if rank not in results]
    if hung:
        stacks = "".join(_stack(job, processes[rank], rank) for rank in hung)
        message = f"Ranks {hung} of {job.world_size} gave no result within {job.timeout} s. They stand at:\n{stacks}"
        raise RanksHungError(message, hung)
    return [results[rank] for rank in range(job.world_size)]


def run_ranks(world_size: int, fn: Callable, *args, timeout: float = 300, init: bool = True) -> list:
    """`fn(rank, world_size, *args)` on every rank; the picklable results in rank order.

    Arguments are inherited, not pickled: closures and modules are fine. With `init` a gloo process group is there.

    Raises:
        RankError: a rank raised or died; the other ranks are killed.
        RanksHungError: ranks gave no result within `timeout` seconds; all are killed.
        RuntimeError: this process has a process group, whose threads a forked process would miss.
    """
    if dist.is_initialized():
        raise RuntimeError("run_ranks forks, and wants no process group in the parent; leave single_rank() before it.")
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        job = _Job(world_size, fn, args, timeout, init, Path(folder))
        deadline = time.monotonic() + timeout
        children = [_fork(job, rank) for rank in range(world_size)]
        processes, pipes = [process for process, _ in children], [pipe for _, pipe in children]
        try:
            results = _results(job, processes, _collect(job, processes, pipes, deadline))
            for pipe in pipes:
                pipe.send_bytes(b"leave")
            for process in processes:
                process.join(GRACE_S)
            return results
        finally:
            for process in processes:
                _kill(process)
            for pipe in pipes:
                pipe.close()
