"""Which tokens each query of a segment attends to: the indexer's top-k over the prefix and the segment itself.

The selection is global over the ranks that own tokens (`Segment.owner_layout`) and stable: best score first, ties by
lowest position, whatever the segments, pages and ranks. Scores are made in blocks with a running top-k and pass no
gradient (the indexer is frozen). A selected token is named by its position; a position from the segment's start on is a
token of the query's own sequence, of which other branches in the microbatch see nothing.

Tensor-parallel ranks, which all have the same queries, share them out as they share the keys, and then tell each other.

Shapes: T rows of this rank's shard (padding last), N index heads, D index head dim, k selected tokens, CP owners; in a
rank's piece of its shard T is the piece's.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longstraw_megatron.comm import all_gather
from longstraw_megatron.functional.topk import empty_topk, index_scores, make_candidates, merge_topk, topk_positions
from longstraw_megatron.layout import Run, piece_of
from longstraw_megatron.layout.transfer import Transfer
from longstraw_megatron.layout.travel import TravelShape
from longstraw_megatron.segments.segment import Mode, Segment
from longstraw_megatron.segments.token_map import TokenMaps, make_token_maps
from longstraw_megatron.segments.travel import choose_form, gather_prefix, gather_travel, nbytes, ring_travel

MAX_SCORES = 1 << 25  # float32 numbers of one block of [queries, heads, keys]: 128 MiB
KEY_BLOCK = 8192  # keys between two merges of the running top-k

Keys = tuple[Tensor, Tensor]  # index keys [m, D] and their positions int32 [m]
OwnKeys = tuple[Tensor, tuple[Run, ...]]  # index keys of a shard [>= valid, D] and the shard's runs


def record_layout(segment: Segment) -> None:
    """In prefill: let later segments know where this one's tokens lie. Every layer may say it again."""
    segment.state.layouts[segment.index] = (segment.start, segment.owner_layout)


def token_maps(segment: Segment) -> TokenMaps:
    """The maps of a pass, made at its first use."""
    if segment.token_maps is None:
        earlier = segment.state.layouts_before(segment.index)
        segment.token_maps = make_token_maps(earlier, segment.owner_layout, segment.positions.device)
        known, first = segment.token_maps.prefix, segment.cp_rank * segment.tp_size
        held = sum(known.rows_by_rank[first : first + segment.tp_size])
        if known.num_tokens != segment.start or held != segment.prefix_rows:
            raise ValueError(
                f"The state knows where {known.num_tokens} prefix tokens lie, {known.rows_by_rank} rows by rank, and "
                f"the segment starts at position {segment.start} behind {segment.prefix_rows} rows of rank "
                f"{segment.cp_rank}: prefill the segments before it with the same state first."
            )
    return segment.token_maps


def _merge_scores(best: Tensor, index_q: Tensor, index_weights: Tensor, keys: Keys, first_query: int | None) -> None:
    """Merge keys into best int64 [n, k], in place. Query i sees positions up to `first_query + i`; None: all."""
    index_key, positions = keys
    num_heads = index_q.shape[1]
    for key_start in range(0, index_key.shape[0], KEY_BLOCK):
        block = slice(key_start, min(key_start + KEY_BLOCK, index_key.shape[0]))
        step = max(1, MAX_SCORES // (num_heads * (block.stop - block.start)))
        for start in range(0, index_q.shape[0], step):
            rows = slice(start, min(start + step, index_q.shape[0]))
            visible = None
            if first_query is not None:
                query_positions = torch.arange(
                    first_query + rows.start, first_query + rows.stop, device=positions.device
                )
                visible = positions[block] <= query_positions[:, None]
            scores = index_scores(index_q[rows], index_weights[rows], index_key[block])
            best[rows] = merge_topk(best[rows], make_candidates(scores, positions[block], visible))


def local_candidates(
    index_q: Tensor,
    index_weights: Tensor,
    query_runs: tuple[Run, ...],
    prefix: Iterator[Keys],
    own: list[OwnKeys],
    *,
    start: int,
    index_topk: int,
) -> Tensor:
    """The best candidates, int64 [T, k], of queries [T, N, D] among the keys at hand; none for padding rows."""
    best = empty_topk(index_q.shape[0], index_topk, index_q.device)
    valid = sum(run.length for run in query_runs)
    if valid == 0:
        return best
    for keys in prefix:
        _merge_scores(best[:valid], index_q[:valid], index_weights[:valid], keys, None)
        del keys  # a staged page goes before another one is fetched
    for index_key, key_runs in own:
        for query in query_runs:
            for key in key_runs:
                if key.sequence != query.sequence or key.start >= query.stop:
                    continue
                positions = torch.arange(start + key.start, start + key.stop, dtype=torch.int32, device=index_q.device)
                first_query = start + query.start if key.stop > query.start + 1 else None
                keys = (index_key[key.rows], positions)
                _merge_scores(best[query.rows], index_q[query.rows], index_weights[query.rows], keys, first_query)
    return best


def _gathered_topk(
    index_q: Tensor, index_key: Tensor, index_weights: Tensor, pages, *, segment: Segment, index_topk: int, cp_group
) -> Tensor:
    """All index keys come here."""
    maps, layout, purpose = token_maps(segment), segment.owner_layout, "index_keys"
    counts = maps.prefix.rows_by_rank
    prefix: list[Keys] = []
    if max(counts):
        held = gather_prefix(
            pages,
            counts[segment.owner_rank],
            max(counts),
            index_key,
            segment=segment,
            cp_group=cp_group,
            purpose=purpose,
        )
        prefix = [(held[r, :count], maps.prefix.tokens_of(r)) for r, count in enumerate(counts) if count]
    every = all_gather(index_key, cp_group, purpose=purpose, traffic=segment.traffic)
    own = [(every[r], runs) for r, runs in enumerate(layout.runs)]
    runs = layout.runs[segment.owner_rank]
    return local_candidates(index_q, index_weights, runs, iter(prefix), own, start=segment.start, index_topk=index_topk)


@torch.no_grad()
def select_topk(
    index_q: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    *,
    segment: Segment,
    layer_number: int,
    index_topk: int,
    cp_group=None,
    tp_group=None,
    transfer: Transfer | None = None,
) -> Tensor:
    """Positions of the selected tokens, int32 [T, k], best first; -1 behind them and in padding rows.

    index_q [T, N, D], index_key [T, D] and index_weights [T, N] (scaling included) are what Megatron's
    `DSAIndexer.forward_before_topk` makes of the segment. Prefill appends the rows of index_key that this rank owns to
    the state. `cp_group` is the group of all owners, `tp_group` that of the ranks with this rank's shard.
    """
    pages, num_rows = segment.state.rows("index_key", layer_number), index_q.shape[0]
    if segment.mode is Mode.PREFILL:
        record_layout(segment)
        pages.mark(segment.index)
        pages.append(index_key[segment.owned])
    if segment.layout.num_tokens == 0:
        return torch.full((num_rows, index_topk), -1, dtype=torch.int32, device=index_q.device)
    maps, layout, rank = token_maps(segment), segment.owner_layout, segment.owner_rank
    index_q, index_key, index_weights = (segment.owned_rows(x) for x in (index_q, index_key, index_weights))

    def prefix_keys() -> Iterator[Keys]:
        positions = maps.prefix.tokens_of(rank)
        for page in pages.pages(maps.prefix.rows_by_rank[rank]):
            yield page.tensors[0], positions[page.start : page.stop]

    def local(source: int, index_q: Tensor, index_weights: Tensor) -> tuple[Tensor]:
        runs, own = layout.runs[source], [(index_key, layout.runs[rank])]
        args = (index_q, index_weights, runs, prefix_keys(), own)
        return (local_candidates(*args, start=segment.start, index_topk=index_topk),)

    if layout.cp_size == 1:
        return topk_positions(local(0, index_q, index_weights)[0])
    shape = TravelShape(
        cp_size=cp_group.size(),
        static=nbytes(index_q, index_weights),
        running=index_q.shape[0] * index_topk * 8,
        keys=(index_q.shape[0] + max(maps.prefix.rows_by_rank)) * index_key.shape[1] * index_key.itemsize,
    )
    form = choose_form("Index selection", shape, segment=segment, layer_number=layer_number, transfer=transfer)
    if form == "gather_keys":
        best = _gathered_topk(
            index_q, index_key, index_weights, pages, segment=segment, index_topk=index_topk, cp_group=cp_group
        )
    else:
        travel = ring_travel if form == "ring" else gather_travel
        (best,) = travel(
            (index_q, index_weights),
            local,
            lambda a, b: (merge_topk(a[0], b[0]),),
            segment=segment,
            cp_group=cp_group,
            purpose="index",
        )
    mine = topk_positions(best)
    if segment.tp_size == 1:
        return mine
    every = all_gather(mine, tp_group, purpose="selection", traffic=segment.traffic)
    positions = mine.new_full((num_rows, index_topk), -1)
    for part, theirs in enumerate(every):
        rows = piece_of(segment.valid, part, segment.tp_size)
        positions[rows] = theirs[: rows.stop - rows.start]
    return positions
