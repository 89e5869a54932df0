"""State in host memory: what a segment takes of the device does not grow with its prefix."""

import pytest
import torch

from longstraw_megatron.layout import cut_sequences
from longstraw_megatron.ops.staging import HostStaging
from longstraw_megatron.segments.attention import segment_attention
from longstraw_megatron.segments.index_selection import select_topk
from longstraw_megatron.segments.segment import Mode, Segment, positions_of
from longstraw_megatron.segments.sparse_attention import segment_sparse_attention
from longstraw_megatron.state import PrefixState, StateOptions
from longstraw_megatron.testing.memory import peak_memory

PAGE, LAYER = 512, 1
FEW, MANY = 4, 64  # rows of a segment that select few rows of a page, which are picked, and more than half


def _segment(state, mode, index, start, length):
    layout = cut_sequences([length])
    return Segment(
        mode=mode,
        index=index,
        start=start,
        prefix_rows=start,
        layout=layout,
        cp_rank=0,
        state=state,
        positions=positions_of(layout, 0, start),
    )


def _attend(segment, length):
    q, k, v = (torch.randn(length, 2, 16, requires_grad=True) for _ in range(3))
    return segment_attention(q, k, v, segment=segment, layer_number=LAYER, softmax_scale=0.25)


def _attend_sparsely(segment, length):
    index = (torch.randn(length, 2, 8), torch.randn(length, 8), torch.randn(length, 2))
    topk = select_topk(*index, segment=segment, layer_number=LAYER, index_topk=64)
    q, latent = torch.randn(length, 2, 24, requires_grad=True), torch.randn(length, 24, requires_grad=True)
    return segment_sparse_attention(
        q, latent, topk, segment=segment, layer_number=LAYER, softmax_scale=0.25, kv_lora_rank=16
    )


class _Counted(HostStaging):
    num_gathers = 0

    def gather(self, *tensors, rows):
        self.num_gathers += 1
        return super().gather(*tensors, rows=rows)


def _state(num_rows):
    """As `GroupWork` makes it: the number of rows is known."""
    options = StateOptions(exact=True, page_length=PAGE, residence=_Counted(torch.device("cpu")))
    return PrefixState(options, num_rows=num_rows, num_owned_rows=num_rows)


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("layer, kinds", [(_attend, ("kv",)), (_attend_sparsely, ("latent", "index_key"))])
def test_two_pages_of_a_prefix_of_any_length(layer, kinds, rows):
    peaks = []
    for num_pages in (4, 8):
        torch.manual_seed(0)
        state = _state(num_pages * PAGE)
        for index in range(num_pages):
            with torch.no_grad():
                layer(_segment(state, Mode.PREFILL, index, index * PAGE, PAGE), PAGE)
        for kind in kinds:
            state.rows(kind, LAYER).make_grads()
            assert len(list(state.rows(kind, LAYER).pages(num_pages * PAGE))) == num_pages
        segment = _segment(state, Mode.REPLAY, num_pages, num_pages * PAGE, rows)
        with peak_memory() as recorder:
            layer(segment, rows).sum().backward()
        # no more than half of every page is named by few rows alone
        assert (state.options.residence.num_gathers > 0) == (layer is _attend_sparsely and rows == FEW)
        peaks.append(recorder.peak)
    page = max(sum(t.nbytes for view in state.rows(kind, LAYER).pages(1) for t in view.page.tensors) for kind in kinds)
    # positions of tokens, 4 bytes for each row of the prefix, are all that may grow
    assert peaks[1] - peaks[0] <= 4 * 4 * PAGE * 2
    if rows == FEW:  # else a block of gathered rows is more than pages
        assert peaks[1] < 6 * page
