"""Loops over equal pieces, cut short in a dry run: a few of many take time, and as much memory as all."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from longstraw_megatron.comm.ring import Ring
from longstraw_megatron.functional import sparse_attention as functional_sparse
from longstraw_megatron.mcore.patching import Patch
from longstraw_megatron.segments import index_selection, travel
from longstraw_megatron.segments import sparse_attention as segment_sparse
from longstraw_megatron.state import PagedRows

FEW = 3  # one that computes, one in flight, and one that waits to be added


def few_pages() -> list[Patch]:
    """Attention walks pages one after the other: three of many take as much memory as all."""
    pages = PagedRows.pages

    def ends(self, stop: int, **how) -> Iterator:
        rows = copy.copy(self)
        rows._pages = [page for page in self._pages if page.start < stop]
        if len(rows._pages) > FEW:
            rows._pages = [*rows._pages[:2], rows._pages[-1]]
        yield from pages(rows, stop, **how)

    return [Patch(PagedRows, "pages", ends, "the same page again and again")]


@dataclass(frozen=True)
class _FewRanks:
    """A group as a ring sees it, of `FEW` ranks."""

    group: ProcessGroup

    def size(self) -> int:
        return min(FEW, self.group.size())

    def rank(self) -> int:
        return self.group.rank() % self.size()


def few_hops() -> list[Patch]:
    """Queries visit three of many ranks."""
    ring_travel = travel.ring_travel

    def short(*args, cp_group, **how):
        return ring_travel(*args, cp_group=_FewRanks(cp_group), **how)

    def arrive(self) -> None:
        self._works, self._sends, self._receives = None, [], []

    reason = "the same hop again and again"
    return [
        Patch(index_selection, "ring_travel", short, reason),
        Patch(segment_sparse, "ring_travel", short, reason),
        Patch(Ring, "commit", lambda self: setattr(self, "_works", []), "nothing travels"),
        Patch(Ring, "wait", arrive, "nothing travels"),
    ]


def short_loops() -> list[Patch]:
    """Loops over equal blocks, cut to the first block: more of them take time and no memory."""
    query_blocks, merge_scores = functional_sparse._query_blocks, index_selection._merge_scores

    def first_queries(q, index, max_elements):
        return list(query_blocks(q, index, max_elements))[:1]

    def first_keys(best, index_q, index_weights, keys, first_query):
        index_key, positions = keys
        num_keys = min(len(index_key), index_selection.KEY_BLOCK)
        num_queries = max(1, index_selection.MAX_SCORES // (index_q.shape[1] * num_keys))
        few = best[:num_queries], index_q[:num_queries], index_weights[:num_queries]
        merge_scores(*few, (index_key[:num_keys], positions[:num_keys]), first_query)

    reason = "the same block again and again"
    return [
        Patch(functional_sparse, "_query_blocks", first_queries, reason),
        Patch(index_selection, "_merge_scores", first_keys, reason),
    ]
