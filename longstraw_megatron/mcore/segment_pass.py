"""The pass as an argument: a `Segment` that Megatron carries as `packed_seq_params`.

Only `qkv_format="sbhd"` is set of Megatron's own fields: any other makes some module treat the segment as a packed
batch of its own making (attention.py, absorbed_mla.py and gpt_model.py of megatron-core 0.19).
"""

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams

from longstraw_megatron.segments.segment import Segment


@dataclass(eq=False, kw_only=True)
class SegmentPass(Segment, PackedSeqParams):
    """One segment on its way through GPTModel, block, layer, attention and activation recompute.

    MoE layers get it in the place of `padding_mask` (mcore/moe.py); Megatron transposes and casts that argument on
    the way, hence the two identities below.
    """

    qkv_format: str = "sbhd"

    def transpose(self, *_dims: int) -> "SegmentPass":
        return self

    def bool(self) -> "SegmentPass":
        return self
