"""Megatron's optimizer and learning-rate schedule from the run's keys."""

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from longstraw_megatron.config import OptimizerConfig
from longstraw_megatron.mcore.model import PRECISIONS
from longstraw_megatron.mcore.parallel import ParallelContext
from longstraw_megatron.mcore.quiet import quiet_megatron_build


@quiet_megatron_build()
def build_optimizer(
    config: OptimizerConfig,
    chunks: list[nn.Module],
    context: ParallelContext,
    *,
    precision: str,
    use_distributed_optimizer: bool,
) -> MegatronOptimizer:
    """AdamW over the trainable parameters of DDP-wrapped chunks; float32 main weights under bf16.

    With `optimizer_cpu_offload` that fraction of them is updated on the host, which takes the distributed optimizer.
    """
    dtype = PRECISIONS[precision]
    megatron_config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=use_distributed_optimizer,
        optimizer_cpu_offload=config.optimizer_cpu_offload,
        optimizer_offload_fraction=config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0,
        # gradients stay in DDP's buffer and in its dtype; without it they and the main weights are copied on the device
        use_precision_aware_optimizer=config.optimizer_cpu_offload,
    )
    return get_megatron_optimizer(
        megatron_config,
        chunks,
        use_gloo_process_groups=False,
        pg_collection=context.groups,
    )


def drop_grad_copies(optimizer: MegatronOptimizer) -> None:
    """Free the float32 copies that a step made of bf16 main gradients; `main_grad` itself stays.

    Megatron leaves them to the next step's `zero_grad`, which would come behind a whole prompt's prefill.
    """
    for part in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,):
        part.zero_grad(set_to_none=True)
        inner = part.optimizer
        # its copies on the device are gradients of float32 weights that Megatron's own zero_grad does not know
        if isinstance(inner, HybridDeviceOptimizer) and inner.gpu_optimizer is not None:
            inner.gpu_optimizer.zero_grad(set_to_none=True)


def build_scheduler(
    config: OptimizerConfig, optimizer: MegatronOptimizer, *, max_steps: int
) -> OptimizerParamScheduler:
    """Megatron's learning-rate schedule, counted in optimizer steps."""
    decay_steps = config.lr_decay_steps or max_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if config.lr_warmup_steps else config.lr,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=max(decay_steps, config.lr_warmup_steps + 1),
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=max_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
