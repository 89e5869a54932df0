"""Rotary embeddings at the positions of a segment.

Megatron asks the rotary module for a sequence length and hands the answer back to its `forward`. Ours answers with
the pass itself, so `forward` sees the positions, and GPTModel stays as it is. The module has no spec slot: it is
swapped after the build; it has no parameters and no state-dict keys.
"""

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from longstraw_megatron.mcore.segment_pass import SegmentPass


class SegmentRotaryEmbedding(RotaryEmbedding):
    """`num_dims` = 4 gives [T, 1, 1, D] (attention, indexer); 3 gives [T, 1, D] (MLA, which squeezes the batch)."""

    num_dims: int

    @classmethod
    def adopt(cls, rotary: RotaryEmbedding, *, num_dims: int) -> "SegmentRotaryEmbedding":
        """A segment rotary with the frequencies of `rotary`."""
        if rotary.seq_len_interpolation_factor is not None:
            raise ValueError(
                "SegmentRotaryEmbedding needs plain rotary frequencies, got a seq_len_interpolation_factor."
            )
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.__dict__.update(rotary.__dict__)
        new.num_dims = num_dims
        return new

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, transformer_config, packed_seq_params=None, **kwargs
    ):
        if isinstance(packed_seq_params, SegmentPass):
            return packed_seq_params
        return super().get_rotary_seq_len(
            inference_context, transformer, transformer_input, transformer_config, packed_seq_params, **kwargs
        )

    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None) -> Tensor:
        if not isinstance(max_seq_len, SegmentPass):
            return super().forward(max_seq_len, offset, packed_seq=packed_seq, cp_group=cp_group)
        positions = max_seq_len.positions
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        # float32 holds every position up to 2^24 exactly
        freqs_TD = torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq)
        if self.rotary_interleaved:
            freqs_TD = freqs_TD.repeat_interleave(2, dim=-1)
        else:
            freqs_TD = torch.cat((freqs_TD, freqs_TD), dim=-1)
        return freqs_TD[:, None, None, :] if self.num_dims == 4 else freqs_TD[:, None, :]


def swap_rotary(model: nn.Module) -> None:
    """Put segment rotaries in the place of every rotary of a GPTModel, wherever Megatron built one."""
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    for module in list(model.modules()):
        rotary = getattr(module, "rotary_pos_emb", None)
        if not isinstance(rotary, RotaryEmbedding) or isinstance(rotary, SegmentRotaryEmbedding):
            continue
        is_mla = isinstance(module, (MultiLatentAttention, AbsorbedMLASelfAttention))
        module.rotary_pos_emb = SegmentRotaryEmbedding.adopt(rotary, num_dims=3 if is_mla else 4)
