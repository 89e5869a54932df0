"""How a segment's attention crosses the context-parallel ranks: three forms of one result, priced in bytes.

* `ring`: queries travel from rank to rank with their running (out, lse); the next hop flies while this one computes.
* `gather_queries`: every rank gets all queries and sends each rank its partial (out, lse): fewer bytes and messages,
  but buffers for all ranks' queries, and nothing overlaps. Right for few queries.
* `gather_keys`: every rank gets all keys, of the segment and of the prefix. Right while the prefix is short.

Backward mirrors each: (q, dout, out, lse, dq) travel, or all keys come and their gradients go home by reduce-scatter.
All numbers are bytes, and exact: the communication objects count the same.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Transfer = Literal["ring", "gather_queries", "gather_keys"]

BUFFER_LIMIT = 256 * 2**20  # bytes that a gathering form may hold at once


@dataclass(frozen=True, kw_only=True)
class TransferShape:
    """What one rank contributes; equal on all ranks, so that all choose the same."""

    cp_size: int
    rows: int  # of a shard of the segment, padding included
    prefix_rows: int  # the most that any rank holds
    num_heads: int
    num_key_heads: int
    head_dim: int
    itemsize: int  # of q, k, v
    sum_itemsize: int  # of partial outputs, lse and sums of gradients
    prefix_grad: bool  # whether backward adds to the prefix's accumulators

    @property
    def query_items(self) -> int:
        return self.rows * self.num_heads * self.head_dim

    @property
    def lse_items(self) -> int:
        return self.rows * self.num_heads

    @property
    def key_items(self) -> int:
        """Items of k and v, of the segment and of the prefix."""
        return 2 * (self.rows + self.prefix_rows) * self.num_key_heads * self.head_dim

    @property
    def key_grad_items(self) -> int:
        rows = self.rows + (self.prefix_rows if self.prefix_grad else 0)
        return 2 * rows * self.num_key_heads * self.head_dim


def transfer_bytes(transfer: Transfer, shape: TransferShape, *, backward: bool) -> int:
    """Bytes that a rank sends for one layer of one segment."""
    size, item, total = shape.cp_size, shape.itemsize, shape.sum_itemsize
    if transfer == "gather_keys":
        return (size - 1) * (shape.key_items * item + (shape.key_grad_items * total if backward else 0))
    if backward:
        static, running = 3 * shape.query_items * item + shape.lse_items * total, shape.query_items * total
    else:
        static, running = shape.query_items * item, (shape.query_items + shape.lse_items) * total
    hops_home = size if transfer == "ring" else size - 1  # a travelling sum takes one hop more, to come home
    return (size - 1) * static + hops_home * running


def buffer_bytes(transfer: Transfer, shape: TransferShape, *, backward: bool) -> int:
    """Bytes of communication buffers that a rank holds at once."""
    size, item, total = shape.cp_size, shape.itemsize, shape.sum_itemsize
    if transfer == "gather_keys":
        return size * (shape.key_items * item + (shape.key_grad_items * total if backward else 0))
    if backward:
        static, running = 3 * shape.query_items * item + shape.lse_items * total, shape.query_items * total
    else:
        static, running = shape.query_items * item, (shape.query_items + shape.lse_items) * total
    return 2 * (static + running) if transfer == "ring" else size * (static + 2 * running)


def choose_transfer(shape: TransferShape, *, backward: bool, buffer_limit: int = BUFFER_LIMIT) -> Transfer:
    """The form that sends the fewest bytes, among the ring and those whose buffers fit in `buffer_limit` bytes."""

    def fits(transfer: Transfer) -> bool:
        return transfer == "ring" or buffer_bytes(transfer, shape, backward=backward) <= buffer_limit

    candidates = [transfer for transfer in get_args(Transfer) if fits(transfer)]
    return min(candidates, key=lambda transfer: transfer_bytes(transfer, shape, backward=backward))
