"""A stock model with Megatron's optimizer and schedule, saved and resumed by the package's checkpoints."""

import stock_models
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from longstraw_megatron.mcore.checkpoint import load_checkpoint, save_checkpoint
from longstraw_megatron.testing.megatron import init_megatron
from longstraw_megatron.testing.shards import local_pieces

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


def train_and_save(rank, world_size, folder, name, layout, options):
    trainer = Trainer(name, init_megatron(**layout), **options)
    trainer.step(2)
    trainer.save(folder, 2)
    return local_pieces([trainer.model])
