"""Megatron's optimizer on the host (HybridDeviceOptimizer), and what makes it run where the device is a CPU.

Main weights and both moments live in host memory, and AdamW runs there; the device keeps the weights and their main
gradients. It goes with the distributed optimizer and decoupled gradients ("precision-aware"), where Megatron makes no
float32 copy of weights or gradients on the device. Gradients in bf16 are then clipped in bf16.

It takes bf16 weights only: Megatron hands it views of float32 ones, which torch's optimizers refuse as no leaves
(optimizer/distrib_optimizer.py:779).
"""

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from longstraw_megatron.mcore.patching import Patch

FILE = "optimizer/cpu_offloading/hybrid_optimizer.py"
# what a parameter group says about where it is updated: of this run, never of the checkpoint
LOCAL_KEYS = (
    *("offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32"),
    *("pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d", "fused", "foreach"),
)


def _get_sub_optimizer_param_groups(self: HybridDeviceOptimizer, offload_fraction: float) -> tuple:
    """As Megatron's, with every parameter one of the device; `param.is_cuda` says so there."""
    numel = sum(param.numel() for group in self.param_groups for param in group["params"])
    host_groups, device_groups, host_of, device_of, fp32_of = [], [], {}, {}, {}
    offloaded = 0
    for group in self.param_groups:
        here, there = {**group, "params": []}, {**group, "params": []}
        for param in group["params"]:
            inner, goes = param, offloaded < numel * offload_fraction
            if goes:
                inner = param.detach().clone()
                offloaded += param.numel()
            if self.param_update_in_fp32 and param.dtype != torch.float32:
                inner = fp32_of[param] = param.detach().clone().float()
            if goes:
                host_of[param], device_of[inner] = inner, param
            (there if goes else here)["params"].append(inner)
        host_groups += [there] if there["params"] else []
        device_groups += [here] if here["params"] else []
    return host_groups, device_groups, host_of, device_of, fp32_of


def cpu_host_optimizer_patches() -> list[Patch]:
    """What the optimizer needs where the device is a CPU."""
    return [
        Patch(
            HybridDeviceOptimizer,
            "_get_sub_optimizer_param_groups",
            _get_sub_optimizer_param_groups,
            f"offloads CUDA parameters only, and then looks up copies that it never made ({FILE}:266, 122)",
        )
    ]
