"""The ring's order of work: communication overlaps computation."""

import math

import torch
import torch.distributed as dist

from longstraw_megatron.layout import cut_sequences
from longstraw_megatron.segments import attention_transfer
from longstraw_megatron.segments.attention import segment_attention
from longstraw_megatron.segments.segment import Mode, Segment, positions_of
from longstraw_megatron.state import PrefixState, StateOptions
from longstraw_megatron.testing import run_ranks

HEAD_DIM, LAYER = 8, 3
SCALE = 1 / math.sqrt(HEAD_DIM)


def _order_of_hops(rank, world_size):
    """What the ring does, in order: begun and awaited transfers, and attention over this rank's keys."""
    events = []

    class WatchedRing(attention_transfer.Ring):
        def commit(self):
            events.append(f"begin {self.purpose}")
            super().commit()

        def wait(self):
            events.append(f"await {self.purpose}")
            super().wait()

    def watched(function):
        def call(*args):
            events.append("compute")
            return function(*args)

        return call

    attention_transfer.Ring = WatchedRing
    for name in ("attend_forward", "attend_backward"):
        setattr(attention_transfer, name, watched(getattr(attention_transfer, name)))
    layout = cut_sequences([12], cp_size=world_size, multiple=1, style="zigzag")
    segment = Segment(
        mode=Mode.REPLAY, index=0, start=0, prefix_rows=0, layout=layout, cp_rank=rank,
        state=PrefixState(StateOptions(exact=True)), positions=positions_of(layout, rank, 0, torch.device("cpu")),
    )  # fmt: skip
    q, k, v = (torch.randn(layout.rows, heads, HEAD_DIM, requires_grad=True) for heads in (4, 2, 2))
    out = segment_attention(
        q, k, v, segment=segment, layer_number=LAYER, cp_group=dist.group.WORLD, softmax_scale=SCALE, transfer="ring"
    )
    forward, events = list(events), events
    events.clear()
    out.sum().backward()
    return forward, list(events)


def test_the_next_hop_is_in_flight_while_this_one_computes():
    def wanted(results):
        first = ["begin queries", "compute", f"begin {results}", "await queries"]
        middle = ["begin queries", "compute", f"await {results}", f"begin {results}", "await queries"]
        return [*first, *middle, "compute", f"await {results}", f"begin {results}", f"await {results}"]

    for forward, backward in run_ranks(3, _order_of_hops):
        assert forward == wanted("partials")
        assert backward == wanted("query_grads")
