"""Which rows attend to which: the causal mask of a segment as a few dense blocks.

Within one sequence of a segment a query run sees the key runs before it whole, itself causally, and nothing else.
"""

from dataclasses import dataclass

from longstraw_megatron.layout.runs import Run


@dataclass(frozen=True)
class Block:
    """Query rows of one shard that attend to key rows of one shard, whole or causally (row i to rows <= i)."""

    query_rows: slice
    key_rows: slice
    causal: bool

    @property
    def num_pairs(self) -> int:
        """Attended (query, key) pairs."""
        queries = self.query_rows.stop - self.query_rows.start
        keys = self.key_rows.stop - self.key_rows.start
        return queries * (queries + 1) // 2 if self.causal else queries * keys


def attention_blocks(query_runs: tuple[Run, ...], key_runs: tuple[Run, ...]) -> list[Block]:
    """The blocks of one shard's queries over one shard's keys, in query row order, causal ones before whole ones.

    Runs must come from one `cut_sequences`: any two of a sequence are equal or disjoint. Neighbouring runs are
    joined, so a shard that sees all of another shard is one block.
    """
    blocks: list[Block] = []
    for query in query_runs:
        earlier: list[Run] = []
        for key in key_runs:
            if key.sequence != query.sequence or key.start >= query.stop:
                continue
            if key.stop <= query.start:
                earlier.append(key)
            elif (key.start, key.length) == (query.start, query.length):
                blocks.append(Block(query.rows, key.rows, causal=True))
            else:
                raise ValueError(f"attention_blocks needs equal or disjoint runs, got {query} and {key}.")
        for key_rows in _joined([key.rows for key in earlier]):
            last = blocks[-1] if blocks else None
            if last and not last.causal and last.key_rows == key_rows and last.query_rows.stop == query.offset:
                blocks[-1] = Block(slice(last.query_rows.start, query.rows.stop), key_rows, causal=False)
            else:
                blocks.append(Block(query.rows, key_rows, causal=False))
    return blocks


def _joined(rows: list[slice]) -> list[slice]:
    joined: list[slice] = []
    for piece in rows:
        if joined and joined[-1].stop == piece.start:
            joined[-1] = slice(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return joined
