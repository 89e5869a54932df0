"""Gradient reductions: Megatron's own, and what it forgets.

Megatron's `finalize_model_grads` sums over data- and context-parallel ranks (DDP), over tensor-parallel ranks what
sequence parallelism or q/k norms replicate, and tied embeddings over pipeline ends. It leaves out GatedDeltaNet's
`out_norm.weight` under tensor parallelism without sequence parallelism: the weight is replicated, but every rank
sees its own heads only (finalize_model_grads.py:452).
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor, nn

from longstraw_megatron.comm.failure import transfer_named
from longstraw_megatron.mcore.parallel import ParallelContext


def forgotten_parameters(chunk: nn.Module) -> list[nn.Parameter]:
    """Parameters of `chunk` whose gradient is a partial sum over TP that Megatron does not reduce."""
    return [
        parameter
        for module in chunk.modules()
        if isinstance(module, GatedDeltaNet) and not module.config.sequence_parallel
        for parameter in module.out_norm.parameters()
        if parameter.requires_grad
    ]


def _reduce(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    if not grads or group.size() == 1:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


@contextlib.contextmanager
def forgotten_grads_reduced(chunks: Sequence[nn.Module], tp_group: dist.ProcessGroup) -> Iterator[None]:
    """Reduce what a block adds to the forgotten parameters' `main_grad`, and leave what was there before as it is.

    For a caller that accumulates over several schedules before it finalizes, whoever does that.
    """
    grads = [parameter.main_grad for chunk in chunks for parameter in forgotten_parameters(chunk)]
    before = [grad.clone() for grad in grads]
    for grad in grads:
        grad.zero_()
    yield
    _reduce(grads, tp_group)
    for grad, earlier in zip(grads, before, strict=True):
        grad.add_(earlier)


def finalize_grads(chunks: list[nn.Module], context: ParallelContext) -> None:
    """Complete every parameter's gradient on every rank; `chunks` are wrapped in DDP.

    With a distributed optimizer a rank gets its own shard of the gradient.
    """
    grads = [parameter.main_grad for chunk in chunks for parameter in forgotten_parameters(chunk)]
    with transfer_named("Reducing gradients", context.groups.dp_cp):
        _reduce(grads, context.groups.tp)
        finalize_model_grads(chunks, None, pg_collection=context.groups)
