"""run_ranks: results in rank order, and an end with a reason whatever a rank does."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longstraw_megatron.testing import RankError, RanksHungError, run_ranks


def _all_gather(rank, world_size, offset):
    parts = [torch.zeros(2) for _ in range(world_size)]
    dist.all_gather(parts, torch.full((2,), float(rank + offset)))
    return rank, torch.stack(parts)


def _seconds(fn, world_size, **kwargs) -> tuple[BaseException, float]:
    """How run_ranks fails, and how soon."""
    start = time.monotonic()
    with pytest.raises((RankError, RanksHungError)) as raised:
        run_ranks(world_size, fn, **kwargs)
    return raised.value, time.monotonic() - start


def test_results_come_in_rank_order():
    results = run_ranks(3, _all_gather, 10)
    assert [rank for rank, _ in results] == [0, 1, 2]
    for _, gathered in results:
        assert gathered.tolist() == [[10.0, 10.0], [11.0, 11.0], [12.0, 12.0]]


def test_a_rank_that_is_done_waits_for_the_others():
    def fn(rank, world_size):
        if rank == 1:
            return "early"
        time.sleep(0.5)
        group = dist.new_group([0, 2], use_local_synchronization=True)
        total = torch.tensor(rank)
        dist.all_reduce(total, group=group)
        return total.item()

    assert run_ranks(3, fn) == [2, "early", 2]


def test_large_and_odd_results_come_home():
    big = torch.arange(8_000_000, dtype=torch.float32)  # 32 MB: far more than a pipe holds
    results = run_ranks(2, lambda rank, world_size: {"big": big + rank, "none": None, "view": big[3:5].clone()})
    assert torch.equal(results[1]["big"], big + 1) and results[0]["none"] is None
    assert results[0]["view"].tolist() == [3.0, 4.0]


def test_without_init_there_is_no_process_group_and_one_thread():
    assert run_ranks(2, lambda rank, world_size: (dist.is_initialized(), torch.get_num_threads()), init=False) == [
        (False, 1),
        (False, 1),
    ]


def test_a_rank_that_raises_ends_the_others_with_its_traceback():
    def fn(rank, world_size):
        if rank == 1:
            raise KeyError("no such layer")
        dist.barrier()  # would wait for rank 1 forever

    error, seconds = _seconds(fn, 3)
    assert error.rank == 1 and "KeyError: 'no such layer'" in str(error) and "test_ranks.py" in str(error)
    assert seconds < 10


def test_a_rank_that_is_killed_is_named():
    def fn(rank, world_size):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    error, seconds = _seconds(fn, 2)
    assert isinstance(error, RankError) and error.rank == 0 and "exit code -9" in str(error)
    assert seconds < 10


def test_a_segmentation_fault_shows_its_stack():
    def fn(rank, world_size):
        os.kill(os.getpid(), signal.SIGSEGV)

    error, _ = _seconds(fn, 1, init=False)
    assert "Segmentation fault" in str(error) and "test_ranks.py" in str(error)


def test_hung_ranks_are_named_with_their_stacks():
    def fn(rank, world_size):
        if rank == 2:
            return None
        if rank == 1:
            time.sleep(60)
        dist.barrier()

    error, seconds = _seconds(fn, 3, timeout=1.5)
    assert isinstance(error, RanksHungError) and error.ranks == [0, 1]
    assert "Ranks [0, 1] of 3 gave no result within 1.5 s" in str(error) and "in fn" in str(error)
    assert seconds < 10


def test_a_result_that_cannot_be_pickled_is_the_ranks_failure():
    error, _ = _seconds(lambda rank, world_size: lambda: None, 1, init=False)
    assert isinstance(error, RankError) and "pickle" in str(error).lower()


def test_no_process_outlives_the_call():
    def fn(rank, world_size):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        return child

    grandchildren = run_ranks(2, fn)
    time.sleep(0.2)
    for pid in grandchildren:
        status = Path(f"/proc/{pid}/stat")
        assert not status.exists() or " Z " in status.read_text()


def test_refuses_a_parent_with_a_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="wants no process group in the parent"):
            run_ranks(2, _all_gather, 0)
    finally:
        dist.destroy_process_group()
