"""Bringing one rank's shard to where it is written, and failing together.

A shard travels in hops, one for each kind of parallelism: inside its tensor-parallel group to rank 0 of it, from there
inside the expert-parallel group, from there inside the pipeline group. One shard is on its way at a time, so that no
rank ever holds more than that beside its own.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.weights.entry import Entry

Hop = tuple[dist.ProcessGroup, int]  # a group and the rank in it that sends; rank 0 of the group receives


def is_first_replica(entry: Entry, groups: ProcessGroupCollection) -> bool:
    """Whether this rank is the one among its data- and context-parallel replicas that writes such a tensor."""
    return (groups.dp_cp if entry.expert is None else groups.expt_dp).rank() == 0


def tensor_group(entry: Entry, groups: ProcessGroupCollection) -> dist.ProcessGroup:
    """The tensor-parallel group that cuts this entry."""
    return groups.tp if entry.expert is None else groups.expt_tp


def _travel(hops: Sequence[Hop], shape: tuple[int, ...], dtype, device, load: Callable[[], Tensor]) -> Tensor | None:
    """The source's `load()` on the rank that is first in every group, None elsewhere."""
    ranks = [group.rank() for group, _ in hops]
    sources = [source for _, source in hops]
    value = load() if ranks == sources else None
    for i, (group, source) in enumerate(hops):
        on_the_way = all(rank == 0 for rank in ranks[:i]) and ranks[i + 1 :] == sources[i + 1 :]
        if source == 0 or not on_the_way:
            continue
        if ranks[i] == source:
            dist.send(value.contiguous().view(torch.uint8), group=group, group_dst=0)
            value = None
        elif ranks[i] == 0:
            value = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(value.view(torch.uint8), group=group, group_src=source)
    return value


def gather_shards(
    entry: Entry,
    hops: Sequence[Hop],
    groups: ProcessGroupCollection,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load: Callable[[], Tensor],
) -> Iterator[Tensor]:
    """The shards of all tensor-parallel ranks in rank order, one at a time, on the rank that is first everywhere.

    `hops` come after the tensor-parallel one. `load()` is this rank's shard, asked for only where it is the source.
    Every rank of the groups has to run this to its end; on the others it yields nothing.
    """
    group = tensor_group(entry, groups)
    shape = entry.shard_shape(group.size())
    for tp_rank in range(group.size() if entry.axis else 1):
        shard = _travel([(group, tp_rank), *hops], shape, dtype, device, load)
        if shard is not None:
            yield shard


def fail_together(error: Exception | None) -> None:
    """Raise on every rank what one of them hands in; the first by rank, where several do.

    Raises:
        RefusedError, RuntimeError: what happened on some rank.
    """
    mine = None if error is None else (isinstance(error, RefusedError), f"{error}" or type(error).__name__)
    errors: list = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine)
    for rank, other in enumerate(errors):
        if other is not None:
            refused, message = other
            raise RefusedError(message) if refused else RuntimeError(f"Rank {rank} failed: {message}") from error
