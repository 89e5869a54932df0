"""Bytes that one rank copies between device and host memory in a pass, both directions together.

Of one layer where prefix state rests in host memory (`state.location=host`), as `segments` reads it from its pages,
and of a stage's inputs (`state.stage_inputs=host`). Tokens are counted as if they were spread evenly over the ranks
that own them, and a selection as if it were over the prefix.
"""

from longstraw_megatron.layout.transfer import choose_transfer
from longstraw_megatron.layout.travel import TravelShape, choose_travel
from longstraw_megatron.plan import temporaries
from longstraw_megatron.plan.kept_state import boundary_bytes, grad_itemsize
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.passes import PREFILLS, WALKS, Pass
from longstraw_megatron.schedule import Op


def stage_input_bytes(layout: Layout, segment: Pass) -> int:
    """A stage's input on its way out, or back where it is walked; the first stage has none."""
    if layout.config.state.stage_inputs != "host" or segment.op not in (*PREFILLS, *WALKS):
        return 0
    if segment.op is Op.PREFILL and not layout.exact:
        return 0
    return segment.rows // layout.split * layout.shape.hidden * layout.shape.itemsize


class HostCopies:
    """Bytes of one layer's state in a pass; 0 where the state rests on the device."""

    def __init__(self, layout: Layout):
        self.layout, self.shape, self.parallel = layout, layout.shape, layout.config.parallel
        self.on_host = layout.config.state.location == "host"
        self.grad_size = grad_itemsize(layout)
        self.owners = self.parallel.cp * self.parallel.tp  # of rows that belong to no head

    def keys_and_values(self, segment: Pass) -> float:
        """Of softmax attention."""
        cp, visits = self.parallel.cp, (1, 1)
        if cp > 1:
            rows = -(-segment.prefix // cp)
            call = temporaries.attention_call(self.shape, segment.rows, rows, exact=self.layout.exact)
            # queries that go round find the pages of a rank one after the other; gathered ones find them together
            visits = tuple(cp if choose_transfer(call, backward=way) == "ring" else 1 for way in (False, True))
        width = 2 * self.shape.key_value_heads * self.layout.hf["head_dim"]
        return self._table(segment, width, tuple(n * segment.prefix / cp for n in visits), segment.rows)

    def latents(self, segment: Pass, forward: TravelShape, backward: TravelShape) -> float:
        """Of sparse attention, which travels in these shapes: selected rows, or pages of which it needs many."""
        selected = min(self.layout.hf["index_topk"], segment.prefix)
        held, named = segment.prefix / self.owners, segment.rows * selected / self.owners
        some = held if 2 * named > held else named
        read = tuple(held if _gathers(travel) else travel.cp_size * some for travel in (forward, backward))
        return self._table(segment, self.shape.latent, read, segment.rows / self.parallel.tp)

    def index_keys(self, segment: Pass, travel: TravelShape) -> float:
        """Of an index selection."""
        rows = (1 if _gathers(travel) else travel.cp_size) * segment.prefix / self.owners
        if segment.op in PREFILLS:
            rows += segment.rows / self.parallel.tp
        return self.on_host * rows * self.layout.hf["index_head_dim"] * self.shape.itemsize

    def boundary(self, segment: Pass) -> float:
        """Of the delta rule: what the segment starts from, and in prefill what it leaves."""
        copies = segment.forwards * (segment.prefix > 0) + (segment.op in PREFILLS)
        return self.on_host * copies * boundary_bytes(self.layout)

    def _table(self, segment: Pass, width: int, read: tuple[float, float], own: float) -> float:
        """Rows of `width` elements: `read` of the prefix in a forward and in backward, where sums of gradients come in
        and go out besides, and the segment's `own`, which prefill stores and a walk reads the gradients of."""
        value, grad = width * self.shape.itemsize, width * self.grad_size
        moved = segment.forwards * read[False] * value
        if segment.backward and segment.prefix:
            summed = segment.prefix if self.layout.exact else segment.path
            moved += read[True] * (value + 2 * grad * summed / segment.prefix)
        if segment.op in PREFILLS:
            moved += own * value
        if segment.op in WALKS:
            moved += own * grad
        return self.on_host * moved


def _gathers(travel: TravelShape) -> bool:
    """Whether all keys are gathered: a rank then reads its pages once and whole, else for each owner's queries."""
    return travel.cp_size > 1 and choose_travel(travel) == "gather_keys"
