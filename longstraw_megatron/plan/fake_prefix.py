"""A prefix that nobody ran: what segments that are not run would have left, by the tables of those that were."""

from torch import Tensor

from longstraw_megatron.layout import split_shards
from longstraw_megatron.mcore.engine import Engine
from longstraw_megatron.mcore.group_work import GroupWork
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.live import LiveMemory
from longstraw_megatron.state import OWNED_KINDS, PrefixState

WITHOUT_GRADIENT = ("index_key",)


def _fill_rows(state: PrefixState, prefix_rows: int, owned_rows: int) -> None:
    """Append up to so many rows to every table; in exact mode all pages have accumulators, as after a replay."""
    for kind, _, rows in state.tables():
        num_rows = owned_rows if kind in OWNED_KINDS else prefix_rows
        first = [tensor[:1] for view in rows.pages(1) for tensor in view.tensors]
        rows.append(*(row.expand(num_rows - rows.num_rows, *row.shape[1:]) for row in first))
    if state.exact:
        make_grads(state)


def make_grads(state: PrefixState) -> None:
    """Make every accumulator of `state`, as when gradients have come to all of its pages."""
    for kind, _, rows in state.tables():
        if kind not in WITHOUT_GRADIENT:
            rows.make_grads()


def fill_state(state: PrefixState, work: GroupWork, segments: range, live: LiveMemory) -> None:
    """`state` holds what came before `segments`; afterwards also what they would have left."""
    _fill_rows(state, work.prefix_rows[segments.stop], work.owned_rows[segments.stop])
    for _, boundaries in state.boundary_tables():
        for boundary in range(segments.start + 1, segments.stop + 1):
            boundaries.put(boundary, *(value.clone() for value in boundaries.get(boundary - 1)))
    with live.counted_as(Item.STATE):
        for layer_number in [layer_number for layer_number, index in state.experts if index == 0]:
            first = state.experts[layer_number, 0]
            for index in segments:
                num_rows = _rows_like(first, work, index)
                state.experts[layer_number, index] = first.new_empty(num_rows, *first.shape[1:])
    if state.layouts:
        for index in segments:
            state.layouts[index] = work.starts[index], split_shards(work.segment_layouts[index], work.tp_size)


def fill_stage_inputs(engine: Engine, stage: int, work: GroupWork, segments: range, live: LiveMemory) -> None:
    """The stage's inputs of `segments`, like that of the first and where that lies."""
    first = engine.kept_inputs.get((0, 0, stage))
    if first is not None:
        with live.counted_as(Item.STAGE_INPUTS, on_host=engine.stage_inputs == "host"):
            for index in segments:
                num_rows = _rows_like(first, work, index)
                engine.kept_inputs[0, index, stage] = first.new_empty(num_rows, *first.shape[1:])


def _rows_like(first: Tensor, work: GroupWork, index: int) -> int:
    """Rows of a segment's tensor of which the first segment's is `first`."""
    return first.shape[0] * work.segment_layouts[index].rows // work.segment_layouts[0].rows
