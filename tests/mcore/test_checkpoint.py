"""Checkpoints: bit-equal resume, other layouts, stock Megatron, and a kill at every point of a save."""

import random

import numpy as np
import pytest
import stock_models
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from longstraw_megatron.mcore.checkpoint import load_checkpoint, save_checkpoint
from longstraw_megatron.testing import run_ranks
from longstraw_megatron.testing.megatron import init_megatron

SP = {"sequence_parallel": True}
EXTRA = {"cursor": {"file": "rollouts.jsonl", "group": 7}, "wandb_id": "abc123"}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}


class Trainer:
    """A stock model with Megatron's optimizer and schedule."""

    def __init__(self, name, groups, *, distributed=True, **config):
        self.groups = groups
        model = stock_models.build(name, groups, **config)
        self.model = stock_models.wrap(model, groups, use_distributed_optimizer=distributed)
        bf16 = model.config.bf16
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-4,
            weight_decay=0.1,
            clip_grad=0.5,
            bf16=bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=distributed,
        )
        self.optimizer = get_megatron_optimizer(
            optimizer_config, [self.model], use_gloo_process_groups=False, pg_collection=groups
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-4,
            lr_warmup_steps=2,
            lr_decay_steps=8,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=8,
            wd_incr_style="constant",
        )

    def step(self, count=1):
        for _ in range(count):
            self.scheduler.step(increment=1)
            self.optimizer.zero_grad()
            stock_models.backward(self.model, self.groups)
            assert self.optimizer.step()[0]

    def save(self, folder, step, *, extra=EXTRA, keep=None):
        arguments = (step, [self.model], self.optimizer, self.scheduler, extra)
        return save_checkpoint(folder, *arguments, groups=self.groups, keep=keep)

    def load(self, folder):
        return load_checkpoint(folder, [self.model], self.optimizer, self.scheduler, groups=self.groups)

    def weights(self):
        model = self.model.module
        return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


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
