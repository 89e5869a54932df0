"""How many layers each virtual pipeline stage gets.

A stage may have to begin at certain layers: with IndexShare, at one that computes its own top-k.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def split_layers(num_layers: int, num_stages: int, starts: Sequence[int]) -> list[int] | None:
    """Layers of each stage, as even as the legal `starts` (layer indices from 0, with 0 among them) allow.

    Of the splits with the smallest largest stage, the one whose earlier stages are smaller: they hold the most live
    graphs. None where there are fewer legal starts than stages.
    """
    legal = sorted(set(starts))

    @cache
    def best(begin: int, stages: int) -> tuple[int, tuple[int, ...]] | None:
        """(largest stage, sizes) of layers from `begin` on."""
        if stages == 1:
            return num_layers - begin, (num_layers - begin,)
        found = None
        for start in legal:
            if start <= begin or num_layers - start < stages - 1:
                continue
            rest = best(start, stages - 1)
            if rest is None:
                continue
            sizes = (start - begin, *rest[1])
            candidate = (max(sizes), sizes)
            if found is None or candidate < found:
                found = candidate
        return found

    result = best(0, num_stages) if 0 in legal and num_layers >= num_stages else None
    return None if result is None else list(result[1])


def stage_starts(sizes: Sequence[int]) -> list[int]:
    """The first layer of each stage, from 0."""
    return [0, *accumulate(sizes)][:-1]
