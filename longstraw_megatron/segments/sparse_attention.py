"""Absorbed MLA attention of one segment over the tokens that its index selection named, in the prefix and in itself.

Latents, and the gradients of the prefix's latents, stay on the rank that owns their tokens (`Segment.owner_layout`: one
that ran them, and one of the tensor-parallel ranks, which all did). Queries travel with their
selection and with what they gathered so far, (out, lse) in forward and dq in backward; each rank attends to the
selected tokens that it holds. Where that moves fewer bytes, all queries or all latents are gathered instead
(`layout.travel`); all forms give the same result.

Shapes: T rows of this rank's shard (padding last), N heads of this rank, C latent and R rotary dim, k selected tokens,
CP owners.
Partial outputs, lse and sums of gradients are float32 (float64 for float64).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Function

from longstraw_megatron.comm import all_gather, reduce_scatter
from longstraw_megatron.functional.matmul import accumulation_dtype
from longstraw_megatron.functional.softmax_merge import merge_partials
from longstraw_megatron.functional.sparse_attention import sparse_attention, sparse_attention_backward
from longstraw_megatron.layout.transfer import Transfer
from longstraw_megatron.layout.travel import TravelShape
from longstraw_megatron.segments.index_selection import record_layout, token_maps
from longstraw_megatron.segments.segment import Mode, Segment
from longstraw_megatron.segments.travel import (
    Tensors,
    choose_form,
    gather_prefix,
    gather_travel,
    nbytes,
    ring_travel,
)
from longstraw_megatron.state import PagedRows

AddGrad = Callable[[Tensor, Tensor], None]  # (index [m], grad [m, C + R])
Table = tuple[Tensor, Tensor, AddGrad | None]  # rows [S, C + R], index [n, w] into them, where their gradients go


def pack_index(index: Tensor) -> Tensor:
    """The entries of index [n, k] that are not -1, first in each row, in order: int32 [n, w], -1 behind them."""
    keep = index >= 0
    width = int(keep.sum(1).max()) if index.numel() else 0
    if width == index.shape[1]:
        return index
    slots = torch.where(keep, keep.cumsum(1) - 1, width)
    return torch.full_like(index[:, : width + 1], -1).scatter_(1, slots, index)[:, :width]


def pick_rows(index: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows that index [n, w] names, int64 [m] ascending, and the index into them, -1 where it was -1."""
    named = index >= 0
    picked = torch.unique(index[named])
    return picked.long(), torch.where(named, torch.searchsorted(picked, index, out_int32=True), -1)


def _split_positions(positions: Tensor, segment: Segment, source: int) -> tuple[Tensor, Tensor]:
    """Selected positions [valid, k] of cp rank `source`'s queries as tokens of the prefix and of the segment, -1 else.

    Tokens of the segment are in packed order: a position from `start` on lies in the query's own sequence.
    """
    layout = segment.layout
    first = torch.tensor([layout.sequence_starts[run.sequence] for run in layout.runs[source]], dtype=torch.int32)
    lengths = torch.tensor([run.length for run in layout.runs[source]], dtype=torch.int64)
    by_row = first.repeat_interleave(lengths, output_size=layout.valid(source))
    offsets = (by_row - segment.start).to(positions.device)
    in_segment = positions >= segment.start
    return positions.masked_fill(in_segment, -1), torch.where(in_segment, positions + offsets[:, None], -1)


@dataclass(frozen=True, eq=False)
class SparseCall:
    """What does not change between forward and backward; `transfer` None lets the byte counts decide."""

    segment: Segment
    layer_number: int
    cp_group: object  # torch.distributed.ProcessGroup of all owners, or None for one rank
    softmax_scale: float
    kv_lora_rank: int
    transfer: Transfer | None = None

    @property
    def pages(self) -> PagedRows:
        return self.segment.state.rows("latent", self.layer_number)

    @property
    def prefix_rows(self) -> int:
        """Rows of the prefix that this rank owns."""
        return token_maps(self.segment).prefix.rows_by_rank[self.segment.owner_rank]

    @property
    def kernel(self) -> dict:
        return {"softmax_scale": self.softmax_scale, "kv_lora_rank": self.kv_lora_rank}

    def local_tables(
        self, latent: Tensor, positions: Tensor, source: int, grad_latent: Tensor | None = None
    ) -> Iterator[Table]:
        """What this rank owns of the selections [valid, k] of cp rank `source`: pages of the prefix, its own rows."""
        segment, maps = self.segment, token_maps(self.segment)
        in_prefix, in_segment = _split_positions(positions, segment, source)
        rows = pack_index(maps.prefix.local_rows(in_prefix, segment.owner_rank))
        indices: dict[int, Tensor] = {}  # by page

        def index_in(start: int, stop: int) -> Tensor:
            if stop - start == self.prefix_rows:
                return rows
            return pack_index(torch.where((rows >= start) & (rows < stop), rows - start, -1))

        def select(start: int, stop: int) -> Tensor | None:
            indices[start] = index_in(start, stop)
            if 2 * indices[start].numel() > stop - start:
                return None
            picked, indices[start] = pick_rows(indices[start])
            return picked

        with_grads = grad_latent is not None and segment.reads_with_grad
        for page in self.pages.pages(self.prefix_rows, with_grads=with_grads, select=select):
            index = indices.pop(page.start) if page.start in indices else index_in(page.start, page.stop)
            takes_grad = segment.reads_with_grad and page.page.takes_grad
            yield page.tensors[0], index, partial(self.pages.add_grad_at, page) if takes_grad else None
        own = pack_index(maps.own.local_rows(in_segment, segment.owner_rank))
        add_own = None if grad_latent is None else partial(_add_rows, grad_latent[segment.owned])
        yield latent[segment.owned], own, add_own

    def shape(self, q: Tensor, positions: Tensor, latent: Tensor, *, backward: bool) -> TravelShape:
        """Bytes that each form moves."""
        item = accumulation_dtype(q.dtype).itemsize
        prefix = max(token_maps(self.segment).prefix.rows_by_rank)
        num_queries, num_heads, dim = q.shape
        lse, out = num_queries * num_heads * item, num_queries * num_heads * self.kv_lora_rank
        own = self.segment.owner_layout.rows
        grad_rows = own + (prefix if self.segment.reads_with_grad else 0)
        static = nbytes(q, positions) + (2 * out * q.itemsize + lse if backward else 0)
        return TravelShape(
            cp_size=self.cp_group.size(),
            static=static,
            running=q.numel() * item if backward else out * item + lse,
            keys=(own + prefix) * dim * latent.itemsize,
            key_grads=grad_rows * dim * item if backward else 0,
        )

    def form(self, q: Tensor, positions: Tensor, latent: Tensor, *, backward: bool) -> Transfer:
        purpose = f"Sparse attention {'backward' if backward else 'forward'}"
        shape = self.shape(q, positions, latent, backward=backward)
        call = {"segment": self.segment, "layer_number": self.layer_number, "transfer": self.transfer}
        return choose_form(purpose, shape, **call)


def _add_rows(total: Tensor, index: Tensor, grad: Tensor) -> None:
    total.index_add_(0, index, grad)


def attend_tables(q: Tensor, tables: Iterator[Table], call: SparseCall) -> Tensors:
    """Partial (out [n, N, C], lse [n, N]) of q [n, N, C + R] over the tables."""
    merged: Tensors | None = None
    for rows, index, _ in tables:
        if index.shape[1]:
            part = sparse_attention(q, rows, index, **call.kernel)
            merged = part if merged is None else merge_partials(*merged, *part)
        del rows  # a staged page goes before another one is fetched
    if merged is None:
        dtype = accumulation_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:2], call.kv_lora_rank, dtype=dtype)
        merged = out, q.new_full(q.shape[:2], float("-inf"), dtype=dtype)
    return merged


def attend_tables_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, tables: Iterator[Table], call: SparseCall
) -> Tensor:
    """The tables' share of dq [n, N, C + R], from the merged out and lse; gradients of rows go where each belongs."""
    dq = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
    for rows, index, add_grad in tables:
        sparse_attention_backward(dout, q, rows, index, out, lse, dq, add_grad, **call.kernel)
        del rows
    return dq


def _padded(x: Tensor, num_rows: int, fill: float = 0.0) -> Tensor:
    """x [n, ...] with rows of `fill` behind, up to `num_rows`."""
    if x.shape[0] == num_rows:
        return x
    padding = x.new_full((num_rows - x.shape[0], *x.shape[1:]), fill)
    return torch.cat([x, padding])


def _gathered_table(latent: Tensor, positions: Tensor, call: SparseCall) -> tuple[Tensor, Tensor, int]:
    """All ranks' latents as one table [CP * (prefix + T), C + R], the selections in it, prefix rows of each rank."""
    segment, maps, cp_group = call.segment, token_maps(call.segment), call.cp_group
    most, own_rows = max(maps.prefix.rows_by_rank), segment.owner_layout.rows
    collective = {"segment": segment, "cp_group": cp_group, "purpose": "latents"}
    owned = _padded(latent[segment.owned], own_rows)
    tables = [all_gather(owned, cp_group, purpose="latents", traffic=segment.traffic)]
    if most:
        tables.insert(0, gather_prefix(call.pages, call.prefix_rows, most, latent, **collective))
    in_prefix, in_segment = _split_positions(positions, segment, segment.cp_rank)
    own = maps.own.flat_rows(in_segment, own_rows)
    index = torch.where(own >= 0, own + cp_group.size() * most, maps.prefix.flat_rows(in_prefix, most))
    return torch.cat([table.flatten(0, 1) for table in tables]), index, most


def segment_sparse_attention_forward(q: Tensor, latent: Tensor, positions: Tensor, call: SparseCall) -> Tensors:
    """(out [T, N, C], lse [T, N]); zeros and -inf in padding rows."""
    segment = call.segment

    def local(owner: int, q: Tensor, positions: Tensor) -> Tensors:
        source = owner // segment.tp_size
        valid = segment.layout.valid(source)
        tables = call.local_tables(latent, positions[:valid], source) if valid else iter(())
        out, lse = attend_tables(q[:valid], tables, call)
        return _padded(out, q.shape[0]), _padded(lse, q.shape[0], float("-inf"))

    if segment.layout.num_tokens == 0:
        return attend_tables(torch.zeros_like(q), iter(()), call)
    if segment.owner_layout.cp_size == 1:
        return local(0, q, positions)
    form = call.form(q, positions, latent, backward=False)
    if form == "gather_keys":
        valid = segment.valid
        table, index, _ = _gathered_table(latent, positions[:valid], call)
        out, lse = attend_tables(q[:valid], iter([(table, index, None)]), call)
        return _padded(out, q.shape[0]), _padded(lse, q.shape[0], float("-inf"))
    travel = ring_travel if form == "ring" else gather_travel
    return travel(
        (q, positions),
        local,
        lambda a, b: merge_partials(*a, *b),
        segment=segment,
        cp_group=call.cp_group,
        purpose="sparse",
    )


def _gather_keys_backward(
    dout: Tensor, q: Tensor, latent: Tensor, positions: Tensor, out: Tensor, lse: Tensor, call: SparseCall
) -> tuple[Tensor, Tensor]:
    """(dq [T, N, C + R], grad_latent [T, C + R]); gradients of the prefix go home to its accumulators."""
    segment, valid, size = call.segment, call.segment.valid, call.cp_group.size()
    own_rows, owned = segment.owner_layout.rows, segment.owned
    table, index, most = _gathered_table(latent, positions[:valid], call)
    grads = torch.zeros_like(table, dtype=accumulation_dtype(q.dtype))
    tables = iter([(table, index, partial(_add_rows, grads))])
    dq = attend_tables_backward(*(x[:valid] for x in (dout, q, out, lse)), tables, call)
    home = partial(reduce_scatter, process_group=call.cp_group, purpose="latent_grads", traffic=segment.traffic)
    prefix_grads, own_grads = grads.split([size * most, size * own_rows])
    if segment.reads_with_grad and most:
        mine = home(prefix_grads.unflatten(0, (size, most)))
        for page in call.pages.pages(call.prefix_rows, values=False, with_grads=True):
            if page.page.takes_grad:
                call.pages.add_grad(page, mine[page.start : page.stop])
    grad_latent = torch.zeros_like(latent, dtype=grads.dtype)
    grad_latent[owned] = home(own_grads.unflatten(0, (size, -1)))[: owned.stop - owned.start]
    return _padded(dq, q.shape[0]), grad_latent


def segment_sparse_attention_backward(
    dout: Tensor, q: Tensor, latent: Tensor, positions: Tensor, out: Tensor, lse: Tensor, call: SparseCall
) -> tuple[Tensor, Tensor]:
    """(dq, grad_latent); in a walk grad_latent includes what later segments accumulated for the segment's own rows.

    Over tensor-parallel ranks grad_latent is a partial sum, as Megatron takes it: here that over all heads, in the rows
    that this rank owns, and zero in the others.
    """
    segment, owned = call.segment, call.segment.owned
    if segment.layout.num_tokens == 0:
        return torch.zeros_like(q), torch.zeros_like(latent)
    grad_latent = torch.zeros_like(latent, dtype=accumulation_dtype(q.dtype))

    def local(owner: int, dout: Tensor, q: Tensor, positions: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor]:
        source = owner // segment.tp_size
        valid = segment.layout.valid(source)
        tables = call.local_tables(latent, positions[:valid], source, grad_latent) if valid else iter(())
        dq = attend_tables_backward(*(x[:valid] for x in (dout, q, out, lse)), tables, call)
        return (_padded(dq, q.shape[0]),)

    static = (dout, q, positions, out, lse)
    form = "here" if segment.owner_layout.cp_size == 1 else call.form(q, positions, latent, backward=True)
    if form == "here":
        (dq,) = local(0, *static)
    elif form == "gather_keys":
        dq, grad_latent = _gather_keys_backward(dout, q, latent, positions, out, lse, call)
    else:
        travel = ring_travel if form == "ring" else gather_travel
        (dq,) = travel(
            static,
            local,
            lambda a, b: (a[0] + b[0],),
            segment=segment,
            cp_group=call.cp_group,
            purpose="sparse",
        )
    if segment.mode is Mode.WALK:
        grads = call.pages.grad(call.prefix_rows, call.prefix_rows + owned.stop - owned.start)
        if grads is not None:
            grad_latent[owned] += grads[0]
    return dq.to(q.dtype), grad_latent.to(latent.dtype)


class SegmentSparseAttention(Function):
    """Saves q, latent, positions, out, lse; the prefix is read again from its pages in backward, never saved."""

    @staticmethod
    def forward(ctx, q, latent, positions, call):
        out, lse = segment_sparse_attention_forward(q, latent, positions, call)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, latent, positions, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, dout):
        return *segment_sparse_attention_backward(dout, *ctx.saved_tensors, ctx.call), None, None


def segment_sparse_attention(
    q: Tensor,
    latent: Tensor,
    topk_positions: Tensor,
    *,
    segment: Segment,
    layer_number: int,
    cp_group=None,
    softmax_scale: float,
    kv_lora_rank: int,
    transfer: Transfer | None = None,
) -> Tensor:
    """Attention of q [T, N, C + R] over selected tokens' rows [latent C | roped key R]: latent output [T, N, C].

    `latent` [T, C + R] are the segment's own rows, `topk_positions` [T, k] int32 what `select_topk` gave. Prefill
    appends the rows of latent that this rank owns to the state. Backward of replay and walk adds to the accumulators of
    the prefix where the state is exact; a walk's grad_latent includes the gradient accumulated for the segment's own
    rows. Padding rows come out as zeros and get zero gradients. Forward has no side effect outside prefill. `cp_group`
    is the group of all owners, for which the segment's layout was cut; `transfer` overrides the choice by byte counts.
    """
    cp_size = 1 if cp_group is None else cp_group.size()
    if cp_size != segment.owner_layout.cp_size:
        raise ValueError(
            f"The segment was cut for {segment.owner_layout.cp_size} context-parallel ranks, and the group has "
            f"{cp_size}."
        )
    if segment.mode is Mode.PREFILL:
        record_layout(segment)
        pages = segment.state.rows("latent", layer_number)
        pages.mark(segment.index)
        pages.append(latent[segment.owned])
    call = SparseCall(segment, layer_number, cp_group, softmax_scale, kv_lora_rank, transfer)
    return SegmentSparseAttention.apply(q, latent, topk_positions, call)
