"""A save that fails: a rank that is killed anywhere in it, a full disk, a folder that cannot be made."""

import functools
import multiprocessing
import os
import shutil
import signal
import warnings

import pytest
import stock_models
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from stock_trainer import Trainer, train_and_save

from longstraw_megatron.mcore.checkpoint import save_checkpoint
from longstraw_megatron.mcore.checkpoint_folder import find_checkpoint
from longstraw_megatron.testing import RankError, run_ranks
from longstraw_megatron.testing.megatron import init_megatron
from longstraw_megatron.testing.shards import assemble, local_pieces


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of step 2 in TP2: (folder, whole weights)."""
    folder = tmp_path_factory.mktemp("dense")
    return folder, assemble(run_ranks(2, train_and_save, folder, "dense", {"tp": 2}, {}))


def _die_at(rank, call):
    """Make this rank kill itself at a call: (owner, name, how many calls pass before, rank)."""
    owner, name, passes, dying = call
    real = getattr(owner, name)
    left = [passes]

    @functools.wraps(real)  # Megatron looks at the signature
    def wrapper(*args, **kwargs):
        if rank == dying:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        return real(*args, **kwargs)

    setattr(owner, name, staticmethod(wrapper) if isinstance(owner, type) else wrapper)


def _save_and_die(rank, world_size, folder, step, call):
    trainer = Trainer("dense", init_megatron(tp=2))
    trainer.load(folder)
    trainer.step()
    _die_at(rank, call)
    trainer.save(folder, step, keep=1)


def _resume_and_save(rank, world_size, folder, step):
    trainer = Trainer("dense", init_megatron(tp=2))
    found = trainer.load(folder)
    trainer.save(folder, step, keep=1)
    return found.checkpoint.step, local_pieces([trainer.model])


WRITER = filesystem_async.FileSystemWriterAsync
DEATHS = {  # what a rank is at when it is killed -> steps that may be found then
    "writing tensors, rank 1": ((filesystem_async, "_write_item", 3, 1), {2}),
    "writing tensors, rank 0": ((filesystem_async, "_write_item", 7, 0), {2}),
    "writing metadata": ((WRITER, "finish", 0, 0), {2}),
    "moving the pointer": ((os, "replace", 0, 0), {2, 3}),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_kill_in_a_save_costs_no_checkpoint(saved, tmp_path, death):
    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder)
    call, steps = DEATHS[death]
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(2, _save_and_die, folder, 3, call)
    assert find_checkpoint(folder).step in steps
    results = run_ranks(2, _resume_and_save, folder, 4)  # and the next save clears up
    assert {step for step, _ in results} <= steps
    if steps == {2}:
        weights = assemble([pieces for _, pieces in results])
        assert all(torch.equal(weights[key], saved[1][key]) for key in weights)
    assert sorted(os.listdir(folder)) == ["iter_0000004", "latest_checkpointed_iteration.txt"]


def _save_on_a_full_disk(rank, world_size, folder):
    trainer = Trainer("dense", init_megatron(tp=2))
    trainer.load(folder)
    real = filesystem_async._write_item

    @functools.wraps(real)
    def write_item(*args, **kwargs):
        if rank == 1:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    filesystem_async._write_item = write_item
    with pytest.raises(RuntimeError) as raised:
        trainer.save(folder, 3)
    filesystem_async._write_item = real
    trainer.save(folder, 4)
    return str(raised.value)


def test_a_rank_that_cannot_write_fails_the_save_on_every_rank(saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder)
    messages = run_ranks(2, _save_on_a_full_disk, folder)
    assert messages[0] == messages[1]
    assert "Saving step 3" in messages[0] and "rank 1" in messages[0] and "No space left" in messages[0]
    assert sorted(os.listdir(folder)) == ["iter_0000002", "iter_0000004", "latest_checkpointed_iteration.txt"]


def _save_where_there_is_a_file(rank, world_size, path):
    groups = init_megatron()
    model = stock_models.build("dense", groups)
    with pytest.raises(RuntimeError) as raised:
        save_checkpoint(path / "run", 1, [model], None, None, {}, groups=groups)
    for keep, extra in ((0, {}), (None, {"cursor": object()})):
        with pytest.raises((ValueError, TypeError)):
            save_checkpoint(path, 1, [model], None, None, extra, groups=groups, keep=keep)
    return str(raised.value)


def test_a_folder_that_cannot_be_made_is_told_on_every_rank(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    messages = run_ranks(2, _save_where_there_is_a_file, path)
    assert messages[0] == messages[1] and "NotADirectoryError" in messages[0]


def test_saving_starts_no_process_and_warns_of_nothing(tmp_path):
    def save(rank, world_size):
        trainer = Trainer("dense", init_megatron())
        trainer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.save(tmp_path, 1)
            trainer.load(tmp_path)
        return multiprocessing.active_children()

    assert run_ranks(1, save) == [[]]
