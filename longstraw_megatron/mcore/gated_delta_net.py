"""Megatron's GatedDeltaNet with an initial and a final state.

Stock forward passes `initial_state=None` and drops the final one (gdn.py:219, :248). Parameters, their names and
their order are Megatron's own.
"""

import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor

from longstraw_megatron.mcore.segment_pass import SegmentPass
from longstraw_megatron.segments.delta_heads import DeltaShape, at_least_float32
from longstraw_megatron.segments.gated_delta import segment_gated_delta


class SegmentGatedDeltaNet(GatedDeltaNet):
    """One linear-attention layer of the Qwen hybrid on a segment. `kernel` is "torch" or "fla"."""

    kernel: str = "torch"

    def _setup_variant_attrs(self):
        # Stock sizes its splits for the all-to-all; where CP does not divide the heads the relay runs instead.
        if self.num_k_heads_local_tp % self.cp_size:
            self.cp_size = 1
        super()._setup_variant_attrs()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        inference_context=None,
        packed_seq_params=None,
        sequence_len_offset=None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [T (/ TP under sequence parallelism), 1, D] -> same shape, and the output bias."""
        if not isinstance(packed_seq_params, SegmentPass):
            return super().forward(
                hidden_states, attention_mask, inference_context, packed_seq_params, sequence_len_offset, **kwargs
            )
        projected, _ = self.in_proj(hidden_states)  # gathers the sequence under sequence parallelism
        heads = self.num_v_heads_local_tp
        qkv, gate, beta, alpha = projected[:, 0].split(
            (2 * self.qk_dim_local_tp + self.v_dim_local_tp, self.v_dim_local_tp, heads, heads), dim=-1
        )
        # exp in float32 as Hugging Face does; stock takes it in the parameter's dtype (common.py:444)
        decay = at_least_float32(self.A_log).exp()
        g = -decay * F.softplus(at_least_float32(alpha) + at_least_float32(self.dt_bias))
        out = segment_gated_delta(
            qkv,
            g,
            beta.sigmoid(),
            self.conv1d.weight.squeeze(1),
            segment=packed_seq_params,
            layer_number=self.layer_number,
            shape=DeltaShape(self.num_k_heads_local_tp, heads, self.key_head_dim, self.value_head_dim),
            cp_group=self.pg_collection.cp,
            kernel=self.kernel,
        )
        gated = self.out_norm(out) * F.silu(at_least_float32(gate.reshape(out.shape)))
        return self.out_proj(gated.to(out.dtype).reshape(out.shape[0], 1, -1))
