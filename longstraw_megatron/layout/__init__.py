"""Token ownership as pure integer functions."""

from longstraw_megatron.layout.runs import Run, SegmentLayout, Style, cut_sequences

__all__ = ["Run", "SegmentLayout", "Style", "cut_sequences"]
