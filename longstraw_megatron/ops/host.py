"""Tensors that wait in host memory: pinned on an accelerator, so that both copies run beside its work, in its order."""

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """`tensor` in host memory: a pinned copy of an accelerator's tensor, and a CPU's tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """What `to_host` gave, back on `device`; a tensor that is there already as it is."""
    return tensor.to(device, non_blocking=True)
