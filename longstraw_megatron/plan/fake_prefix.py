"""A prefix that nobody ran: after the first segment, what all segments but the last would have left."""

import torch

from longstraw_megatron.mcore.engine import Engine
from longstraw_megatron.mcore.group_work import GroupWork
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.live import LiveMemory
from longstraw_megatron.state import PrefixState

WITHOUT_GRADIENT = ("index_key",)


def _fill_rows(state: PrefixState, num_rows: int) -> None:
    """Append up to `num_rows` rows to every table; in exact mode all pages have accumulators, as after a replay."""
    for kind, _, rows in state.tables():
        first = next(rows.pages(1))
        rows.append(*(t[:1].expand(num_rows - rows.num_rows, *t.shape[1:]) for t in first.tensors))
        if state.exact and kind not in WITHOUT_GRADIENT:
            rows.make_grads()


def fill_state(state: PrefixState, work: GroupWork, live: LiveMemory) -> None:
    """`state` holds the first segment; afterwards all but the last."""
    last = work.num_segments - 1
    _fill_rows(state, work.prefix_rows[last])
    for _, boundaries in state.boundary_tables():
        for boundary in range(2, last + 1):
            boundaries.put(boundary, *(value.clone() for value in boundaries.get(boundary - 1)))
    with live.counted_as(Item.STATE):
        for layer_number, _ in list(state.experts):
            for index in range(1, last):
                state.experts[layer_number, index] = state.experts[layer_number, 0].clone()
    if state.layouts:
        for index in range(1, last):
            state.layouts[index] = work.starts[index], work.segment_layouts[index]


def fill_stage_inputs(engine: Engine, stage: int, last: int, live: LiveMemory) -> None:
    """The stage's inputs of all segments but the last, like that of the first and where that lies."""
    first = engine.kept_inputs.get((0, 0, stage))
    if first is not None:
        with live.counted_as(Item.STAGE_INPUTS, on_host=engine.stage_inputs == "host"):
            for index in range(1, last):
                engine.kept_inputs[0, index, stage] = torch.empty_like(first)
