"""How the attention of a segment crosses the context-parallel ranks: the forms of `layout.transfer` and their mirrors.

`ring`: queries travel with what they gathered so far, (out, lse) in forward and dq in backward, while the next ones are
in flight. `gather_queries`: all queries come here, partials go home. `gather_keys`: all keys come here, their gradients
go home. In the first two, gradients of keys never move.

Shapes: T rows of this rank's shard (padding last), N query heads, G key heads, H head dim, CP ranks. Partial outputs,
lse and sums of gradients are float32 (float64 for float64).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longstraw_megatron.comm import Ring, all_gather, all_to_all, reduce_scatter
from longstraw_megatron.functional.softmax_merge import merge_partials
from longstraw_megatron.layout.transfer import Transfer, TransferShape, choose_transfer, transfer_bytes
from longstraw_megatron.segments.key_shard import (
    KeyShard,
    PackedOrder,
    PrefixPart,
    attend_backward,
    attend_forward,
    sum_dtype,
)
from longstraw_megatron.segments.segment import Segment
from longstraw_megatron.state import PagedRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What does not change between forward and backward; `transfer` None lets the byte counts decide."""

    segment: Segment
    layer_number: int
    cp_group: object  # torch.distributed.ProcessGroup, or None for one rank
    softmax_scale: float
    transfer: Transfer | None = None

    @property
    def pages(self) -> PagedRows:
        return self.segment.state.rows("kv", self.layer_number)

    def local_prefix(self, with_grads: bool) -> Iterator[PrefixPart]:
        """This rank's pages of the prefix; `with_grads` in backward."""
        for page in self.pages.pages(self.segment.prefix_rows, with_grads=with_grads):
            takes_grad = self.segment.reads_with_grad and page.page.takes_grad
            yield PrefixPart(*page.tensors, partial(self.pages.add_grad, page) if takes_grad else None)

    def local_keys(self, k: Tensor, v: Tensor, *, backward: bool) -> KeyShard:
        return KeyShard(partial(self.local_prefix, backward and self.segment.reads_with_grad), k, v, self.segment.runs)

    def collective(self, purpose: str) -> dict:
        return {"process_group": self.cp_group, "purpose": purpose, "traffic": self.segment.traffic}


def prefix_rows_by_rank(segment: Segment, cp_group, device: torch.device) -> tuple[int, ...]:
    """The prefix rows that each rank holds: given with the segment, or asked for once and kept on it."""
    if segment.prefix_rows_by_rank is None:
        mine = torch.tensor(segment.prefix_rows, dtype=torch.int64, device=device)
        rows = all_gather(mine, cp_group, purpose="prefix_rows", traffic=segment.traffic)
        segment.prefix_rows_by_rank = tuple(rows.tolist())
    return segment.prefix_rows_by_rank


def transfer_of(q: Tensor, k: Tensor, call: AttentionCall, *, backward: bool) -> Transfer:
    """The form this call takes; the same on every rank. Said in the log the first time that it comes."""
    if call.transfer is not None:
        return call.transfer
    segment = call.segment
    shape = TransferShape(
        cp_size=call.cp_group.size(),
        rows=segment.rows,
        prefix_rows=max(prefix_rows_by_rank(segment, call.cp_group, q.device)),
        num_heads=q.shape[1],
        num_key_heads=k.shape[1],
        head_dim=q.shape[2],
        itemsize=q.dtype.itemsize,
        sum_itemsize=sum_dtype(q.dtype).itemsize,
        prefix_grad=segment.reads_with_grad,
    )
    transfer = choose_transfer(shape, backward=backward)
    if segment.cp_rank == 0:
        way, sent = "backward" if backward else "forward", transfer_bytes(transfer, shape, backward=backward)
        segment.traffic.say_once(
            logger,
            key=f"attention {segment.mode.value} {way} {transfer}",
            message=f"Attention {way} of a {segment.mode.value} segment of {segment.rows} rows on each of "
            f"{shape.cp_size} context-parallel ranks, {shape.prefix_rows} prefix rows: {transfer}, {sent} bytes sent "
            f"per rank and layer.",
        )
    return transfer


def _no_partial(q: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over no key at all: out zeros like q, lse -inf."""
    out = torch.zeros_like(q, dtype=sum_dtype(q.dtype), memory_format=torch.contiguous_format)
    return out, out.new_full(q.shape[:2], float("-inf"))


def ring_forward(q: Tensor, keys: KeyShard, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Queries visit every rank: (out [T, N, H], lse [T, N]), -inf and zeros in padding."""
    layout, size, rank = call.segment.layout, call.cp_group.size(), call.segment.cp_rank
    queries = Ring(call.cp_group, purpose="queries", traffic=call.segment.traffic)
    partials = Ring(call.cp_group, purpose="partials", traffic=call.segment.traffic, tag=1)
    running = _no_partial(q)
    for ring_step in range(size):
        source = (rank - ring_step) % size
        valid = layout.valid(source)
        if ring_step + 1 < size:
            (q_next,) = queries.send_recv(q)
            queries.commit()
        part = attend_forward(q[:valid], layout.runs[source], keys, call.softmax_scale)
        if ring_step > 0:
            partials.wait()
        if part is not None:
            out, lse = running
            out[:valid], lse[:valid] = merge_partials(out[:valid], lse[:valid], *part)
        running = partials.send_recv(*running)
        partials.commit()
        if ring_step + 1 < size:
            queries.wait()
            q = q_next
    partials.wait()
    return running


def ring_backward(dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, keys: KeyShard, call: AttentionCall) -> Tensor:
    """The mirror: (q, dout, out, lse) visit every rank and dq [T, N, H] comes home; dk, dv stay with `keys`."""
    layout, size, rank = call.segment.layout, call.cp_group.size(), call.segment.cp_rank
    queries = Ring(call.cp_group, purpose="queries", traffic=call.segment.traffic)
    grads = Ring(call.cp_group, purpose="query_grads", traffic=call.segment.traffic, tag=1)
    travelling = (dout, q, out, lse)
    dq = q.new_zeros(q.shape, dtype=sum_dtype(q.dtype))
    for ring_step in range(size):
        source = (rank - ring_step) % size
        valid = layout.valid(source)
        if ring_step + 1 < size:
            travelling_next = queries.send_recv(*travelling)
            queries.commit()
        shard = [tensor[:valid] for tensor in travelling]
        part = attend_backward(*shard, layout.runs[source], keys, call.softmax_scale)
        if ring_step > 0:
            grads.wait()
        if part is not None:
            dq[:valid] += part
        (dq,) = grads.send_recv(dq)
        grads.commit()
        if ring_step + 1 < size:
            queries.wait()
            travelling = travelling_next
    grads.wait()
    return dq


def gather_queries_forward(q: Tensor, keys: KeyShard, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """All queries come here, their partials go home: (out [T, N, H], lse [T, N])."""
    order = PackedOrder(call.segment.layout, q.device)
    every_q = order.pack(all_gather(q, **call.collective("queries")))
    part = attend_forward(every_q, order.runs, keys, call.softmax_scale)
    part = part if part is not None else _no_partial(every_q)
    outs = all_to_all(order.unpack(part[0], dtype=part[1].dtype), **call.collective("partials"))
    lses = all_to_all(order.unpack(part[1], fill=float("-inf")), **call.collective("partials"))
    out, lse = outs[0], lses[0]
    for cp_rank in range(1, call.cp_group.size()):
        out, lse = merge_partials(out, lse, outs[cp_rank], lses[cp_rank])
    return out, lse


def gather_queries_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, keys: KeyShard, call: AttentionCall
) -> Tensor:
    """dq [T, N, H]; dk, dv stay with `keys`."""
    order = PackedOrder(call.segment.layout, q.device)
    every = [order.pack(all_gather(x, **call.collective("queries"))) for x in (dout, q, out, lse)]
    part = attend_backward(*every, order.runs, keys, call.softmax_scale)
    dq = torch.zeros_like(every[1]) if part is None else part
    return reduce_scatter(order.unpack(dq, dtype=sum_dtype(q.dtype)), **call.collective("query_grads"))


def _gathered_keys(
    local: KeyShard, order: PackedOrder, call: AttentionCall, prefix_grads: list[Tensor] | None
) -> KeyShard:
    """Every rank's keys; gradients of the prefix are added to `prefix_grads`, dk and dv [CP, rows, G, H]."""
    k, v = local.k, local.v
    counts = prefix_rows_by_rank(call.segment, call.cp_group, k.device)
    held = []
    if max(counts):
        held = [x.new_empty(max(counts), *x.shape[1:]) for x in (k, v)]
        for page in call.pages.pages(call.segment.prefix_rows):
            for target, tensor in zip(held, page.tensors, strict=True):
                target[page.start : page.stop] = tensor
        held = [all_gather(x, **call.collective("keys")) for x in held]

    def prefix() -> Iterator[PrefixPart]:
        for cp_rank, count in enumerate(counts):
            if count == 0:
                continue
            targets = [grad[cp_rank, :count] for grad in prefix_grads] if prefix_grads is not None else None

            def add_grad(*grads: Tensor, targets=targets) -> None:
                for target, grad in zip(targets, grads, strict=True):
                    target += grad

            yield PrefixPart(*(x[cp_rank, :count] for x in held), add_grad if targets is not None else None)

    own_k, own_v = (order.pack(all_gather(x, **call.collective("keys"))) for x in (k, v))
    return KeyShard(prefix, own_k, own_v, order.runs)


def gather_keys_forward(q: Tensor, local: KeyShard, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """All keys come here: (out [T, N, H], lse [T, N])."""
    valid = call.segment.valid
    keys = _gathered_keys(local, PackedOrder(call.segment.layout, q.device), call, None)
    out, lse = _no_partial(q)
    part = attend_forward(q[:valid], call.segment.runs, keys, call.softmax_scale)
    if part is not None:
        out[:valid], lse[:valid] = part
    return out, lse


def gather_keys_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, local: KeyShard, call: AttentionCall
) -> Tensor | None:
    """dq [valid, N, H]; every rank's share of dk, dv goes home to `local` and its pages."""
    segment, dtype = call.segment, sum_dtype(q.dtype)
    order = PackedOrder(segment.layout, q.device)
    most = max(prefix_rows_by_rank(segment, call.cp_group, q.device))
    prefix_grads = None
    if segment.reads_with_grad and most:
        shape = (call.cp_group.size(), most, *local.k.shape[1:])
        prefix_grads = [q.new_zeros(shape, dtype=dtype) for _ in range(2)]
    keys = _gathered_keys(local, order, call, prefix_grads)
    valid = segment.valid
    shard = (x[:valid] for x in (dout, q, out, lse))
    dq = attend_backward(*shard, segment.runs, keys, call.softmax_scale)
    for every, own, source in ((keys.dk, local.dk, local.k), (keys.dv, local.dv, local.v)):
        total = every.total if every.total is not None else source.new_zeros(every.num_rows, *source.shape[1:])
        home = reduce_scatter(order.unpack(total, dtype=dtype), **call.collective("key_grads"))
        own.add(slice(0, valid), home[:valid])
    if prefix_grads is not None:
        home = [reduce_scatter(grad, **call.collective("key_grads")) for grad in prefix_grads]
        for page in call.pages.pages(segment.prefix_rows, values=False, with_grads=True):
            if page.page.takes_grad:
                call.pages.add_grad(page, *(grad[page.start : page.stop] for grad in home))
    return dq
