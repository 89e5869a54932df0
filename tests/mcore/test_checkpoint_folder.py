"""Saves that die: at every file that one touches, the checkpoint before it or the new one is there, whole."""

import os
import shutil
import signal
import sys

import pytest
import stock_models
import torch

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.checkpoint import load_checkpoint, save_checkpoint
from longstraw_megatron.mcore.checkpoint_folder import find_checkpoint, latest_checkpoint
from longstraw_megatron.testing import RankError, run_ranks
from longstraw_megatron.testing.megatron import init_megatron

FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}


def _model(groups):
    return stock_models.build("dense", groups, num_layers=1)


def _fill(model, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def _on_file_events(folder, act) -> None:
    """Call `act(number)` before each thing that this process, or one forked from it, does to a file in `folder`."""
    count = 0

    def hook(event, args):
        nonlocal count
        if event in FILE_EVENTS and any(str(folder) in str(arg) for arg in args[:2]):
            count += 1
            act(count)

    sys.addaudithook(hook)


def _save_value(rank, world_size, folder, step, value, kill_at, *, keep=1):
    """A model full of `value`; SIGKILL before file event `kill_at`. The number of events of a save that lives."""
    groups = init_megatron()
    model, pid, seen = _model(groups), os.getpid(), []
    _fill(model, value)

    def act(number):
        seen.append(number)
        if number == kill_at:
            os.kill(pid, signal.SIGKILL)

    _on_file_events(folder, act)
    save_checkpoint(folder, step, [model], None, None, {"value": value}, groups=groups, keep=keep)
    return len(seen)


def _load_value(rank, world_size, folder):
    """The value in the manifest, all values of the loaded parameters."""
    groups = init_megatron()
    model = _model(groups)
    found = load_checkpoint(folder, [model], groups=groups)
    return found.checkpoint.extra["value"], sorted({v for p in model.parameters() for v in p.unique().tolist()})


@pytest.mark.parametrize("step", [2, 1], ids=["next step", "same step again"])
def test_kill_at_any_point_of_a_save_costs_no_checkpoint(tmp_path, step):
    first = tmp_path / "first"
    run_ranks(1, _save_value, first, 1, 1.0, None)
    shutil.copytree(first, tmp_path / "probe")
    (events,) = run_ranks(1, _save_value, tmp_path / "probe", step, 2.0, None)
    assert events > 15
    found = []
    for kill_at in range(1, events + 1):
        folder = tmp_path / f"killed_{kill_at}"
        shutil.copytree(first, folder)
        with pytest.raises(RankError, match="exit code -9"):
            run_ranks(1, _save_value, folder, step, 2.0, kill_at)
        found.append(find_checkpoint(folder).extra["value"])
        # loading is the slow part: where the answer changes, and at the first and the last point
        if kill_at in (1, events) or found[-1] != found[-2]:
            ((value, weights),) = run_ranks(1, _load_value, folder)
            assert weights == [value] == [found[-1]]
    assert found == sorted(found) and set(found) == {1.0, 2.0}, "the old one up to some point, the new one from there"
    assert found.count(1.0) > events / 2

    run_ranks(1, _save_value, folder, 3, 3.0, None)  # what a kill leaves behind is cleared away by the next save
    assert sorted(os.listdir(folder)) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def test_keeps_the_newest(tmp_path):
    for step in (1, 2, 3, 4):
        run_ranks(1, _keep_two, tmp_path, step)
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["iter_0000003", "iter_0000004"]
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000004"


def _keep_two(rank, world_size, folder, step):
    return _save_value(rank, world_size, folder, step, float(step), None, keep=2)


def test_a_folder_that_a_copy_cut_short_is_no_checkpoint(tmp_path):
    for step in (1, 2):
        run_ranks(1, _keep_two, tmp_path, step)
    data = next((tmp_path / "iter_0000002").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    assert find_checkpoint(tmp_path).step == 1
    with pytest.raises(RefusedError, match="holds none"):
        find_checkpoint(tmp_path / "iter_0000002")
