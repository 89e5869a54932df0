"""Sparse attention that reads prefix state, in the place of Megatron's DSAttention.

It stays a DSAttention, the owner of the `indexer` submodule, so that parameter names are Megatron's. The selection is
kept on the pass, where layers that share it and recompute find it: recompute reaches them before its source layer.
"""

import torch
from megatron.core import parallel_state
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer, DSAttention
from torch import Tensor, nn

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.segment_pass import SegmentPass
from longstraw_megatron.segments.index_selection import select_topk
from longstraw_megatron.segments.segment import Mode
from longstraw_megatron.segments.sparse_attention import segment_sparse_attention


class SegmentDSAttention(DSAttention):
    """`core_attention` of AbsorbedMLASelfAttention; returns the latent output, to which MLA applies V's up projection.

    Without a SegmentPass it computes what Megatron's own does.
    """

    consumes_absorbed_v_up_projection = False

    def __init__(self, config, *args, **kwargs):
        if config.dsa_indexer_loss_coeff:
            raise RefusedError(
                f"dsa_indexer_loss_coeff got {config.dsa_indexer_loss_coeff}, wanted 0, since the indexer is frozen "
                "and its loss would be counted again in the prompt's backward; set it to 0."
            )
        if not config.dsa_indexer_scoring_relu:
            raise RefusedError(
                "dsa_indexer_scoring_relu got False, wanted True, as GLM-5's indexer has; set it to True."
            )
        super().__init__(config, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        position_ids: Tensor | None = None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
        up_v_weight: Tensor | None = None,
    ) -> Tensor:
        """query [T, N, C + R], key [T, 1, C + R], x [T / TP, 1, D], qr [T / TP, q rank] -> [T, 1, N * C]."""
        segment = packed_seq_params
        if not isinstance(segment, SegmentPass):
            if up_v_weight is not None:
                # the identity as V's up projection leaves the latent output, which is what the caller expects here
                latent_dim = self.config.kv_lora_rank
                identity = torch.eye(latent_dim, dtype=query.dtype, device=query.device)
                up_v_weight = identity.expand(query.shape[-2], latent_dim, latent_dim)
            return super().forward(
                query, key, value, attention_mask, x, qr, position_ids, attn_mask_type, attention_bias,
                packed_seq_params, up_v_weight,
            )  # fmt: skip
        num_rows = key.shape[0]
        out = segment_sparse_attention(
            query.reshape(num_rows, -1, query.shape[-1]),
            key.reshape(num_rows, -1),
            self._selection(x, qr, segment),
            segment=segment,
            layer_number=self.layer_number,
            cp_group=self._owners(segment),
            softmax_scale=self.softmax_scale,
            kv_lora_rank=self.config.kv_lora_rank,
        )
        return out.reshape(num_rows, 1, -1)

    def _owners(self, segment: SegmentPass):
        """The ranks that share the segment's latents and index keys; in Megatron's groups TP runs faster than CP."""
        if segment.tp_size == 1:
            return self.pg_collection.cp
        # a model that a pipeline built may have been given the groups that Megatron's own layers need only
        return getattr(self.pg_collection, "tp_cp", None) or parallel_state.get_tensor_and_context_parallel_group()

    def _selection(self, x: Tensor, qr: Tensor, segment: SegmentPass) -> Tensor:
        """Selected positions [T, k], from the pass, or made and left there."""
        if self.source_layer in segment.topk:
            return segment.topk[self.source_layer]
        if self.skip_topk:
            raise RuntimeError(
                f"Layer {self.layer_number} shares the selection of layer {self.source_layer}, which has not run in "
                f"this pass (it holds {sorted(segment.topk)}): a pipeline stage must start on a layer with an indexer."
            )
        with torch.no_grad():
            index_q, index_key, index_weights = self.indexer.forward_before_topk(x.detach(), qr.detach(), segment)
        if segment.mode is Mode.PREFILL:
            segment.topk.clear()  # no recompute comes, and layers share the selection of the last source only
        segment.topk[self.layer_number] = select_topk(
            index_q[:, 0],
            index_key[:, 0],
            index_weights[:, 0],
            segment=segment,
            layer_number=self.layer_number,
            index_topk=self.index_topk,
            cp_group=self._owners(segment),
            tp_group=self.pg_collection.tp,
        )
        return segment.topk[self.layer_number]


def freeze_indexer(model: nn.Module) -> list[str]:
    """Take the indexers' parameters out of training (selection passes no gradient); returns their names."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, DSAIndexer):
            module.requires_grad_(False)
            names += [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
    return names
