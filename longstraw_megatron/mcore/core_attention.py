"""Core attention that reads prefix state: the parameter-free module in the place of TEDotProductAttention."""

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from longstraw_megatron.mcore.segment_pass import SegmentPass
from longstraw_megatron.segments.attention import segment_attention


class SegmentCoreAttention(MegatronModule):
    """`core_attention` of Megatron's SelfAttention; the constructor is Megatron's CoreAttentionBuilder."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        **_unused,
    ):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused,
    ) -> Tensor:
        """query [T, 1, N, H], key and value [T, 1, G, H] -> [T, 1, N * H]."""
        if not isinstance(packed_seq_params, SegmentPass):
            raise TypeError(
                f"SegmentCoreAttention runs segments only: packed_seq_params must be a SegmentPass, got "
                f"{type(packed_seq_params).__name__}; build a stock Megatron spec for ordinary batches."
            )
        out = segment_attention(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            segment=packed_seq_params,
            layer_number=self.layer_number,
            cp_group=self.cp_group,
            softmax_scale=self.softmax_scale,
        )
        return out.reshape(out.shape[0], 1, -1)
