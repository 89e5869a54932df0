"""What a block of `single_rank` leaves in this process must not reach the ranks that are forked after it."""

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from longstraw_megatron.testing import run_ranks
from longstraw_megatron.testing.megatron import init_megatron, single_rank


def _rotaries(groups, count: int) -> int:
    """Run more rotaries than Megatron caches results of (32 on the class, each with its process group)."""
    return sum(RotaryEmbedding(8, 1.0, cp_group=groups.cp)(i + 1, cp_group=groups.cp).shape[0] for i in range(count))


def _rank(rank, world_size):
    return _rotaries(init_megatron(), 40)


def test_ranks_forked_after_it_inherit_no_process_group():
    with single_rank() as groups:
        _rotaries(groups, 40)
    assert run_ranks(1, _rank) == [820]
