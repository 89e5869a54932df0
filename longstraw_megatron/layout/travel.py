"""How a layer whose queries visit the context-parallel ranks moves its tensors: three forms of one result, in bytes.

* `ring`: what a query needs (`static`) goes from rank to rank, followed by what it gathered so far (`running`), and the
  next hop flies while this one computes.
* `gather_queries`: every rank gets all statics, and sends each rank its partial result.
* `gather_keys`: every rank gets all keys; in backward their gradients go home by reduce-scatter.

The absorbed queries and partial outputs of MLA are two orders of magnitude larger than its keys, so gathering keys
moves less until the prefix is that many times as long as the segment.
"""

from dataclasses import dataclass
from typing import get_args

from longstraw_megatron.layout.transfer import BUFFER_LIMIT, Transfer


@dataclass(frozen=True, kw_only=True)
class TravelShape:
    """Bytes that one rank contributes, equal on all ranks (prefixes padded to the longest)."""

    cp_size: int
    static: int
    running: int
    keys: int
    key_grads: int = 0


def travel_bytes(transfer: Transfer, shape: TravelShape) -> int:
    """Bytes that a rank sends."""
    peers = shape.cp_size - 1
    if transfer == "gather_keys":
        return peers * (shape.keys + shape.key_grads)
    if transfer == "gather_queries":
        return peers * (shape.static + shape.running)
    return peers * shape.static + shape.cp_size * shape.running  # a travelling sum takes one hop more, to come home


def travel_buffers(transfer: Transfer, shape: TravelShape) -> int:
    """Bytes of communication buffers that a rank holds at once."""
    if transfer == "gather_keys":
        return shape.cp_size * (shape.keys + shape.key_grads)
    if transfer == "gather_queries":
        return shape.cp_size * (shape.static + 2 * shape.running)
    return 2 * (shape.static + shape.running)


def choose_travel(shape: TravelShape, *, buffer_limit: int = BUFFER_LIMIT) -> Transfer:
    """The form that sends the fewest bytes, among the ring and those whose buffers fit in `buffer_limit` bytes."""
    forms = [form for form in get_args(Transfer) if form == "ring" or travel_buffers(form, shape) <= buffer_limit]
    return min(forms, key=lambda form: travel_bytes(form, shape))
