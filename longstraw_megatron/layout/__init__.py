"""Token ownership as pure integer functions."""

from longstraw_megatron.layout.runs import Run, SegmentLayout, Style, cut_sequences, piece_of, split_shards

__all__ = ["Run", "SegmentLayout", "Style", "cut_sequences", "piece_of", "split_shards"]
