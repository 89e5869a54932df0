"""Descriptions of every shape, for hypothesis."""

from hypothesis import strategies as st

from longstraw_megatron.schedule import Costs, Description, GroupShape


def shapes(most: int, most_blocks: int):
    """Groups of up to `most` segments and microbatches, half of them with blocks."""
    blocks = st.lists(st.integers(0, most_blocks), max_size=min(most, 5)).map(tuple)
    with_blocks = st.builds(lambda n, b: GroupShape(n, len(b), blocks=b), st.integers(0, most), blocks)
    return st.one_of(st.builds(GroupShape, st.integers(0, most), st.integers(0, most)), with_blocks)


SHAPES = shapes(9, 2)
DESCRIPTIONS = st.builds(
    Description,
    groups=st.lists(SHAPES, max_size=4).map(tuple),
    pp_size=st.integers(1, 8),
    vpp_size=st.integers(1, 3),
    exact=st.booleans(),
    forward_only=st.sampled_from([False, False, False, True]),
    max_live_prefixes=st.integers(1, 3),
    max_run_ahead=st.integers(1, 5),
)
SMALL_DESCRIPTIONS = st.builds(
    Description,
    groups=st.lists(shapes(3, 2), min_size=1, max_size=2).map(tuple),
    pp_size=st.integers(1, 4),
    vpp_size=st.integers(1, 2),
    exact=st.booleans(),
    forward_only=st.sampled_from([False, False, False, True]),
    max_live_prefixes=st.integers(1, 2),
)
_COST = st.sampled_from([0.0, 0.25, 1.0, 1.0, 2.0, 7.0])
COSTS = st.builds(
    Costs,
    prefill=_COST,
    forward=_COST,
    backward=_COST,
    prompt_backward=_COST,
    block_prefill=_COST,
    block_backward=_COST,
)
