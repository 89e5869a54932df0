"""Attention of some queries over keys that are at hand: parts of the prefix, and runs of the segment.

A key set gives a partial (out, lse); partials merge into softmax attention over the union. Backward over one key set
needs only the merged out and lse, so each part is differentiated where its keys are.

Shapes: n queries, N query heads, m keys, G key heads, H head dim. Partials, lse and sums of gradients are float32
(float64 for float64).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longstraw_megatron.functional.softmax_merge import merge_partials
from longstraw_megatron.layout import Run, SegmentLayout
from longstraw_megatron.layout.blocks import attention_blocks
from longstraw_megatron.ops.attention import attention_backward, attention_forward, default_kernel


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial outputs, lse and sums of gradients of `dtype` tensors."""
    return torch.promote_types(dtype, torch.float32)


class RowSum:
    """A sum over rows [0, num_rows) of gradients that cover some of them. No copy is made while there is only one."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.total: Tensor | None = None

    def add(self, rows: slice, grad: Tensor) -> None:
        if self.total is None:
            if grad.shape[0] == self.num_rows:
                self.total = grad
                return
            self.total = grad.new_zeros(self.num_rows, *grad.shape[1:], dtype=sum_dtype(grad.dtype))
        self.total = self.total.to(sum_dtype(grad.dtype))
        self.total[rows] += grad


class _Merged:
    """Partials over rows [0, num_rows), merged as they come. No copy is made while there is only one."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        if self.out is None:
            if out.shape[0] == self.num_rows:
                self.out, self.lse = out, lse
                return
            self.out = out.new_zeros(self.num_rows, *out.shape[1:], dtype=lse.dtype)
            self.lse = lse.new_full((self.num_rows, *lse.shape[1:]), float("-inf"))
        if out.shape[0] == self.num_rows:
            self.out, self.lse = merge_partials(self.out, self.lse, out, lse)
            return
        self.out = self.out.to(lse.dtype)
        self.out[rows], self.lse[rows] = merge_partials(self.out[rows], self.lse[rows], out, lse)


@dataclass(frozen=True, eq=False)
class PrefixPart:
    """Keys of the prefix [m, G, H]; `add_grad(dk, dv)` takes their gradients, None where they have none."""

    k: Tensor
    v: Tensor
    add_grad: Callable[[Tensor, Tensor], None] | None


@dataclass(eq=False)
class KeyShard:
    """The prefix, part by part, and k, v [m, G, H] of the segment, whose rows `runs` describes (padding may follow)."""

    prefix: Callable[[], Iterator[PrefixPart]]
    k: Tensor
    v: Tensor
    runs: tuple[Run, ...]
    dk: RowSum = field(init=False)
    dv: RowSum = field(init=False)

    def __post_init__(self):
        num_keys = sum(run.length for run in self.runs)
        self.dk, self.dv = RowSum(num_keys), RowSum(num_keys)


def attend_forward(
    q: Tensor, query_runs: tuple[Run, ...], keys: KeyShard, softmax_scale: float
) -> tuple[Tensor, Tensor] | None:
    """Partial (out [n, N, H], lse [n, N]) of q [n, N, H], the rows of `query_runs`; None without queries or keys."""
    if not query_runs:
        return None
    merged, everything = _Merged(q.shape[0]), slice(0, q.shape[0])
    how = {"softmax_scale": softmax_scale, "kernel": default_kernel(q.device, q.dtype)}
    for part in keys.prefix():
        merged.add(everything, *attention_forward(q, part.k, part.v, causal=False, **how))
        del part  # a staged page goes before another one is fetched
    for block in attention_blocks(query_runs, keys.runs):
        q_block, k_block, v_block = q[block.query_rows], keys.k[block.key_rows], keys.v[block.key_rows]
        partial = attention_forward(q_block, k_block, v_block, causal=block.causal, **how)
        merged.add(block.query_rows, *partial)
    return None if merged.out is None else (merged.out, merged.lse)


def attend_backward(
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    query_runs: tuple[Run, ...],
    keys: KeyShard,
    softmax_scale: float,
) -> Tensor | None:
    """This key set's share of dq [n, N, H], from the merged out and lse; dk, dv are added to `keys` and its parts."""
    if not query_runs:
        return None
    dq, everything = RowSum(q.shape[0]), slice(0, q.shape[0])
    how = {"softmax_scale": softmax_scale, "kernel": default_kernel(q.device, q.dtype)}
    for part in keys.prefix():
        grad_q, *grads = attention_backward(dout, q, part.k, part.v, out, lse, causal=False, **how)
        dq.add(everything, grad_q)
        if part.add_grad is not None:
            part.add_grad(*grads)
        del part, grads
    for block in attention_blocks(query_runs, keys.runs):
        rows, key_rows = block.query_rows, block.key_rows
        grad_q, grad_k, grad_v = attention_backward(
            dout[rows], q[rows], keys.k[key_rows], keys.v[key_rows], out[rows], lse[rows],
            causal=block.causal, **how,
        )  # fmt: skip
        dq.add(rows, grad_q)
        keys.dk.add(key_rows, grad_k)
        keys.dv.add(key_rows, grad_v)
    return dq.total


class PackedOrder:
    """A segment's valid rows in packed order (sequence after sequence) and back to all ranks' shards."""

    def __init__(self, layout: SegmentLayout, device: torch.device):
        self.layout = layout
        owned = [(run, cp_rank) for cp_rank, runs in enumerate(layout.runs) for run in runs]
        owned.sort(key=lambda pair: (pair[0].sequence, pair[0].start))
        starts = layout.sequence_starts
        self.runs = tuple(Run(r.sequence, r.start, r.length, starts[r.sequence] + r.start) for r, _ in owned)
        first_rows = [cp_rank * layout.rows + run.offset for run, cp_rank in owned]
        self.in_order = layout.num_tokens == layout.cp_size * layout.rows and first_rows == sorted(first_rows)
        pieces = [torch.arange(row, row + run.length) for row, run in zip(first_rows, self.runs, strict=True)]
        self.rows = None if self.in_order else torch.cat(pieces).to(device)

    def pack(self, shards: Tensor) -> Tensor:
        """[CP, T, ...] -> [tokens, ...]."""
        flat = shards.flatten(0, 1)
        return flat if self.rows is None else flat.index_select(0, self.rows)

    def unpack(self, tokens: Tensor, *, fill: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """[tokens, ...] -> [CP, T, ...] with `fill` in the padding."""
        shape = (self.layout.cp_size, self.layout.rows)
        tokens = tokens.to(dtype or tokens.dtype)
        if self.rows is None:
            return tokens.unflatten(0, shape)
        flat = tokens.new_full((shape[0] * shape[1], *tokens.shape[1:]), fill)
        return flat.index_copy_(0, self.rows, tokens).unflatten(0, shape)
