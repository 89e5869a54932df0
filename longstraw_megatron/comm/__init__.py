"""Communication over process groups that are passed in: objects and functions that count what they send."""

from longstraw_megatron.comm.collectives import (
    all_gather,
    all_gather_rows,
    all_to_all,
    gather_affine,
    heads_to_seq,
    reduce_scatter,
    seq_to_heads,
)
from longstraw_megatron.comm.counters import Traffic
from longstraw_megatron.comm.failure import PeerError
from longstraw_megatron.comm.ring import Ring

__all__ = [
    "PeerError",
    "Ring",
    "Traffic",
    "all_gather",
    "all_gather_rows",
    "all_to_all",
    "gather_affine",
    "heads_to_seq",
    "reduce_scatter",
    "seq_to_heads",
]
