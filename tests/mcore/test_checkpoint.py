"""Checkpoints: bit-equal resume, other layouts, stock Megatron."""

import random
import re

import numpy as np
import pytest
import stock_models
import torch
from megatron.core import dist_checkpointing
from stock_trainer import BF16, EXTRA, SP, Trainer, train_and_save
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.checkpoint import load_checkpoint
from longstraw_megatron.mcore.checkpoint_folder import latest_checkpoint
from longstraw_megatron.testing import run_ranks
from longstraw_megatron.testing.megatron import init_megatron
from longstraw_megatron.testing.shards import assemble, local_pieces


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of two steps in different layouts: name -> (folder, whole weights)."""
    cases = {"dense": (2, {"tp": 2}, {}), "qwen": (4, {"tp": 2, "pp": 2}, SP), "glm": (2, {"ep": 2}, {})}
    folders = {}
    for name, (world_size, layout, options) in cases.items():
        folder = tmp_path_factory.mktemp(name)
        pieces = run_ranks(world_size, train_and_save, folder, name, layout, options)
        folders[name] = (folder, assemble(pieces))
    return folders


def _draws() -> list:
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()]


def _lrs(trainer):
    return [(group["lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups]


def _train_save_resume(rank, world_size, folder, name, layout, options):
    groups = init_megatron(**layout)
    trainer = Trainer(name, groups, **options)
    trainer.step(2)
    path = trainer.save(folder, 2)
    drawn = _draws()
    trainer.step(2)

    resumed = Trainer(name, groups, **options)  # other weights: the tracker's random states have moved on
    found = resumed.load(folder)
    assert (found.checkpoint.path, found.checkpoint.step, found.checkpoint.extra) == (path, 2, EXTRA)
    assert found.same_layout and _draws() == drawn
    resumed.step(2)
    pairs = zip(trainer.weights().items(), resumed.weights().values(), strict=True)
    different = [name for (name, old), new in pairs if not torch.equal(old, new)]
    same_schedule = _lrs(trainer) == _lrs(resumed)
    before = trainer.weights()
    trainer.step()
    moved = sum(float((new - before[name]).abs().sum()) for name, new in trainer.weights().items())
    return different, moved, same_schedule


@pytest.mark.parametrize(
    ("name", "world_size", "layout", "options"),
    [
        ("dense", 1, {}, {}),
        ("dense", 1, {}, {"distributed": False}),
        ("dense", 2, {}, BF16),
        ("dense", 2, {"tp": 2}, {"distributed": False, **BF16}),
        ("dense", 4, {"tp": 2, "pp": 1}, {}),
        ("qwen", 4, {"tp": 2, "pp": 2}, SP),
        ("glm", 2, {"ep": 2}, {}),
        ("glm", 4, {"ep": 2, "pp": 2}, {}),
    ],
    ids=lambda value: "".join(str(value).split()) if isinstance(value, dict) else str(value),
)
def test_resume_is_bit_equal(tmp_path, name, world_size, layout, options):
    for different, moved, same_schedule in run_ranks(world_size, _train_save_resume, tmp_path, name, layout, options):
        assert different == [] and same_schedule
        assert moved > 0  # a step changes weights: equality says something


def _resume_elsewhere(rank, world_size, folder, again, name, layout, options):
    """Resume in another layout, and save there at once."""
    trainer = Trainer(name, init_megatron(**layout), **options)
    found = trainer.load(folder)
    trainer.save(again, 2)
    before = trainer.weights()
    trainer.step()
    moved = [name for name, weight in trainer.weights().items() if not torch.equal(weight, before[name])]
    return found.same_layout, len(moved), local_pieces([trainer.model])


def _tensors(folder) -> dict[str, torch.Tensor]:
    """Every tensor of the latest checkpoint, by torch's own reader."""
    reader = FileSystemReader(latest_checkpoint(folder))
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    torch.distributed.checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.parametrize(
    ("name", "world_size", "layout", "options"),
    [
        ("dense", 1, {}, {}),
        ("dense", 4, {"pp": 2}, {}),
        ("qwen", 1, {}, {}),
        ("qwen", 2, {"cp": 2}, {}),
        ("glm", 1, {}, {}),
        ("glm", 4, {"tp": 2, "pp": 2, "ep": 2}, SP),
    ],
    ids=lambda value: "".join(str(value).split()) if isinstance(value, dict) else str(value),
)
def test_model_and_optimizer_follow_into_other_layouts(saved, tmp_path, name, world_size, layout, options):
    """Saved again from the other layout, every tensor of model and optimizer is the same, bit for bit."""
    folder, _ = saved[name]
    results = run_ranks(world_size, _resume_elsewhere, folder, tmp_path, name, layout, options)
    assert not any(same_layout for same_layout, _, _ in results) and all(moved for _, moved, _ in results)
    there, here = _tensors(folder), _tensors(tmp_path)
    assert there.keys() == here.keys() and any("exp_avg_sq" in key for key in there)
    assert [key for key in there if not torch.equal(there[key], here[key])] == []


def _stock_load(rank, world_size, folder, name, layout, options):
    """Stock Megatron, without a line of this package's checkpoints."""
    model = stock_models.build(name, init_megatron(**layout), **options)
    state = {"model": model.sharded_state_dict()}
    model.load_state_dict(dist_checkpointing.load(state, str(folder / "iter_0000002"))["model"])
    return local_pieces([model])


@pytest.mark.parametrize(
    ("name", "world_size", "layout"), [("dense", 1, {}), ("qwen", 2, {"pp": 2}), ("glm", 2, {"pp": 2})], ids=str
)
def test_stock_megatron_loads_the_model(saved, name, world_size, layout):
    folder, weights = saved[name]
    loaded = assemble(run_ranks(world_size, _stock_load, folder, name, layout, {}))
    assert loaded.keys() == weights.keys()
    assert [key for key in weights if not torch.equal(weights[key], loaded[key])] == []
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2"


def _load_model_only(rank, world_size, folder):
    groups = init_megatron(pp=2)
    model = stock_models.build("dense", groups)
    found = load_checkpoint(folder, [model], groups=groups)
    return found.checkpoint.layout["tp"], local_pieces([model])


def test_model_alone_loads_without_an_optimizer(saved):
    folder, weights = saved["dense"]
    results = run_ranks(2, _load_model_only, folder)
    assert [tp for tp, _ in results] == [2, 2]
    loaded = assemble([pieces for _, pieces in results])
    assert all(torch.equal(loaded[key], weights[key]) for key in weights)


def _load_refused(rank, world_size, folder, name, options):
    trainer = Trainer(name, init_megatron(), **options)
    try:
        trainer.load(folder)
    except RefusedError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("dense", {"distributed": False}, "has optimizer state of DistributedOptimizer, wanted FP32Optimizer's"),
        ("dense", {"ffn_hidden_size": 64}, "does not fit the model: .*shape"),
        ("qwen", {}, "does not fit the model: .*not in state dict"),
    ],
)
def test_what_does_not_fit_is_refused(saved, name, options, text):
    (message,) = run_ranks(1, _load_refused, saved["dense"][0], name, options)
    assert re.search(text, message, re.DOTALL), message


def test_plain_optimizer_resumes_in_its_own_layout_only(tmp_path):
    run_ranks(2, train_and_save, tmp_path, "dense", {"tp": 2}, {"distributed": False})
    (message,) = run_ranks(1, _load_refused, tmp_path, "dense", {"distributed": False})
    assert "resumes in the same layout only" in message
