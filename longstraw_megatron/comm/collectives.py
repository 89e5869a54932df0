"""Collectives over the context-parallel group, for gloo and NCCL, and their differentiable forms.

All are even: every rank gives the same shape (callers pad; gloo knows no other). The differentiable ones are exact
transposes of each other: all-gather and reduce-scatter, all-to-all and its inverse. Gradients are summed over ranks in
float32 (float64 for float64).

Shapes: T rows of a shard, C channels, CP the size of the group.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from longstraw_megatron.comm.counters import Traffic
from longstraw_megatron.comm.failure import transfer_named


def all_gather(x: Tensor, process_group: dist.ProcessGroup, *, purpose: str, traffic: Traffic | None = None) -> Tensor:
    """[...] -> [CP, ...], the ranks' tensors in rank order."""
    size = process_group.size()
    if size == 1:
        return x[None]
    x = x.contiguous()
    gathered = x.new_empty(size, *x.shape)
    if traffic is not None:
        traffic.add(purpose, x, copies=size - 1)
    with transfer_named(f"All-gather '{purpose}'", process_group):
        dist.all_gather_into_tensor(gathered.view(-1), x.view(-1), group=process_group)
    return gathered


def all_reduce(x: Tensor, process_group: ProcessGroup, *, maximum: bool = False, purpose: str) -> None:
    """Sum (or maximum) over ranks, in place."""
    if process_group.size() > 1:
        with transfer_named(f"All-reduce '{purpose}'", process_group):
            dist.all_reduce(x, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=process_group)


def reduce_scatter(
    x: Tensor, process_group: dist.ProcessGroup, *, purpose: str, traffic: Traffic | None = None
) -> Tensor:
    """[CP, ...] -> [...]: the sum over ranks of what each gave for this one."""
    size = process_group.size()
    if size == 1:
        return x[0]
    x = x.contiguous()
    reduced = torch.empty_like(x[0])
    if traffic is not None:
        traffic.add(purpose, x[0], copies=size - 1)
    with transfer_named(f"Reduce-scatter '{purpose}'", process_group):
        dist.reduce_scatter_tensor(reduced.view(-1), x.view(-1), group=process_group)
    return reduced


def all_to_all(x: Tensor, process_group: dist.ProcessGroup, *, purpose: str, traffic: Traffic | None = None) -> Tensor:
    """[CP, ...] -> [CP, ...]: row r goes to rank r, row r of the result came from rank r."""
    size = process_group.size()
    if size == 1:
        return x
    x = x.contiguous()
    exchanged = torch.empty_like(x)
    if traffic is not None:
        traffic.add(purpose, x[0], copies=size - 1)
    with transfer_named(f"All-to-all '{purpose}'", process_group):
        dist.all_to_all_single(exchanged.view(-1), x.view(-1), group=process_group)
    return exchanged


class _AllGather(Function):
    @staticmethod
    def forward(ctx, x, process_group, purpose, traffic):
        ctx.process_group, ctx.purpose, ctx.traffic = process_group, purpose, traffic
        return all_gather(x, process_group, purpose=purpose, traffic=traffic)

    @staticmethod
    def backward(ctx, grad):
        summed = grad.to(torch.promote_types(grad.dtype, torch.float32))
        reduced = reduce_scatter(summed, ctx.process_group, purpose=ctx.purpose, traffic=ctx.traffic)
        return reduced.to(grad.dtype), None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx, x, process_group, purpose, traffic):
        ctx.process_group, ctx.purpose, ctx.traffic = process_group, purpose, traffic
        return all_to_all(x, process_group, purpose=purpose, traffic=traffic)

    @staticmethod
    def backward(ctx, grad):
        return all_to_all(grad, ctx.process_group, purpose=ctx.purpose, traffic=ctx.traffic), None, None, None


def all_gather_rows(
    x: Tensor, process_group: dist.ProcessGroup, *, purpose: str = "rows", traffic: Traffic | None = None
) -> Tensor:
    """Shards [T, ...] -> [CP * T, ...] on every rank; backward sums over ranks and gives each its shard's gradient."""
    return _AllGather.apply(x, process_group, purpose, traffic).flatten(0, 1)


def gather_affine(
    a: Tensor, b: Tensor, process_group: dist.ProcessGroup, *, purpose: str = "affine", traffic: Traffic | None = None
) -> tuple[Tensor, Tensor]:
    """Each rank's map S -> a S + b of a state, gathered in one message: (a [CP, *a.shape], b [CP, *b.shape])."""
    flat = _AllGather.apply(torch.cat([a.flatten(), b.flatten()]), process_group, purpose, traffic)
    maps_a, maps_b = flat.split([a.numel(), b.numel()], dim=1)
    return maps_a.reshape(-1, *a.shape), maps_b.reshape(-1, *b.shape)


def seq_to_heads(
    x: Tensor,
    process_group: dist.ProcessGroup,
    *,
    sections: tuple[int, ...] | None = None,
    purpose: str = "heads",
    traffic: Traffic | None = None,
) -> Tensor:
    """All rows of this rank's share of the channels: [T, C] of each rank -> [CP * T, C / CP].

    The share is the rank's equal part of each of `sections` (channel counts that sum to C; all of C when None), e.g.
    the query, key and value heads that it owns. Rows come shard after shard, padding included.
    """
    size = process_group.size()
    sections = _checked_sections(x.shape[1], sections, size)
    parts = [part.unflatten(1, (size, -1)) for part in x.split(sections, dim=1)]  # each [T, CP, C_i / CP]
    exchanged = _AllToAll.apply(torch.cat(parts, dim=2).transpose(0, 1), process_group, purpose, traffic)
    return exchanged.flatten(0, 1)


def heads_to_seq(
    x: Tensor,
    process_group: dist.ProcessGroup,
    *,
    sections: tuple[int, ...] | None = None,
    purpose: str = "heads",
    traffic: Traffic | None = None,
) -> Tensor:
    """The inverse of `seq_to_heads`: [CP * T, C / CP] -> [T, C]; `sections` are those of the whole C."""
    size = process_group.size()
    sections = _checked_sections(x.shape[1] * size, sections, size)
    exchanged = _AllToAll.apply(x.unflatten(0, (size, -1)), process_group, purpose, traffic)  # [CP, T, C / CP]
    parts = exchanged.transpose(0, 1).split([section // size for section in sections], dim=2)
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def _checked_sections(num_channels: int, sections: tuple[int, ...] | None, size: int) -> list[int]:
    checked = [num_channels] if sections is None else list(sections)
    if sum(checked) != num_channels or any(section % size for section in checked):
        raise ValueError(
            f"Channels {num_channels} in sections {checked} cannot be shared by {size} ranks: the sections must sum "
            f"to the channels and each be a multiple of {size}."
        )
    return checked
