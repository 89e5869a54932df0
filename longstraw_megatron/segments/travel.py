"""Queries that visit every rank that owns tokens and bring home what they found.

`cp_group` is the context-parallel group, or with it the tensor-parallel ranks that share each shard's tokens out.

A layer gives `local`, what this rank adds for the queries of one rank, and `combine`, which joins two such results.
The forms are those of `layout.travel`.
"""

import logging
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from longstraw_megatron.comm import Ring, all_gather, all_to_all
from longstraw_megatron.layout.transfer import Transfer
from longstraw_megatron.layout.travel import TravelShape, choose_travel, travel_bytes
from longstraw_megatron.segments.segment import Segment

logger = logging.getLogger(__name__)

Tensors = tuple[Tensor, ...]
Local = Callable[..., Tensors]  # (source rank, *static of that rank) -> partial result for its rows
Combine = Callable[[Tensors, Tensors], Tensors]


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def choose_form(
    purpose: str, shape: TravelShape, *, segment: Segment, layer_number: int, transfer: Transfer | None
) -> Transfer:
    """The form of `purpose`, the same on every rank; said in the log the first time that it comes."""
    if transfer is not None:
        return transfer
    form = choose_travel(shape)
    if segment.owner_rank == 0:
        segment.traffic.say_once(
            logger,
            key=f"{purpose} {segment.mode.value} {form}",
            message=f"{purpose} of a {segment.mode.value} segment of {segment.rows} rows on each of {shape.cp_size} "
            f"context-parallel ranks: {form}, {travel_bytes(form, shape)} bytes sent per rank in layer {layer_number}.",
        )
    return form


def ring_travel(
    static: Tensors, local: Local, combine: Combine, *, segment: Segment, cp_group, purpose: str
) -> Tensors:
    """Statics go round with their running result behind them; the next hop flies while this one computes."""
    size, rank = cp_group.size(), segment.owner_rank
    queries = Ring(cp_group, purpose=f"{purpose}_queries", traffic=segment.traffic)
    partials = Ring(cp_group, purpose=f"{purpose}_partials", traffic=segment.traffic, tag=1)
    running: Tensors = ()
    for ring_step in range(size):
        if ring_step + 1 < size:
            static_next = queries.send_recv(*static)
            queries.commit()
        part = local((rank - ring_step) % size, *static)
        if ring_step > 0:
            partials.wait()
            part = combine(running, part)
        running = partials.send_recv(*part)
        partials.commit()
        if ring_step + 1 < size:
            queries.wait()
            static = static_next
    partials.wait()
    return running


def gather_travel(
    static: Tensors, local: Local, combine: Combine, *, segment: Segment, cp_group, purpose: str
) -> Tensors:
    """All statics come here, their partial results go home and are combined in rank order."""
    size = cp_group.size()
    call = {"process_group": cp_group, "traffic": segment.traffic}
    every = [all_gather(x, purpose=f"{purpose}_queries", **call) for x in static]
    parts = [local(source, *(x[source] for x in every)) for source in range(size)]
    home = [all_to_all(torch.stack(part), purpose=f"{purpose}_partials", **call) for part in zip(*parts, strict=True)]
    return reduce(combine, zip(*home, strict=True))


def gather_prefix(pages, num_rows: int, most: int, like: Tensor, *, segment: Segment, cp_group, purpose: str) -> Tensor:
    """Every rank's first rows of a table, [CP, most, D], zeros behind what a rank holds."""
    held = like.new_zeros(most, *like.shape[1:])
    for page in pages.pages(num_rows):
        held[page.start : page.stop] = page.tensors[0]
    return all_gather(held, cp_group, purpose=purpose, traffic=segment.traffic)
