"""Mixture of experts that routes a token the same way each time it is computed.

Experts of prompt tokens are recorded in prefill on the prefix state and used again in the walk; those of a branch are
kept on its pass from the first forward to the end of backward, unless the rollouts brought them along. Gates are always
computed from the present scores, so router gradients stay.

Megatron gives an MoE layer no packed_seq_params: our layer hands it the pass in the place of `padding_mask`, which
Megatron carries to the router. (Its own RouterReplay is a process-wide first-in-first-out list.)
"""

import dataclasses

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.segment_pass import SegmentPass
from longstraw_megatron.segments.segment import Mode

_TWICE = "it would be counted in the prompt's backward again"
_DROPS = "tokens must not be dropped, nor routed by their neighbours"
_NO_PASS = "it loses the pass on the way to the router"
_OTHER = "prefill and the prompt's backward must route alike"
# field -> (value it must have, why); a false value (0, None, False) stands for all false values
_WANTED = {
    "moe_aux_loss_coeff": (0, _TWICE),
    "moe_z_loss_coeff": (0, _TWICE),
    "moe_expert_capacity_factor": (None, _DROPS),
    "moe_pad_expert_input_to_capacity": (False, _DROPS),
    "moe_input_jitter_eps": (None, _OTHER),
    "moe_router_force_load_balancing": (False, _OTHER),
    "moe_router_force_biased": (None, _OTHER),
    "moe_enable_routing_replay": (False, "Megatron's replay is a process-wide list, and passes carry their own"),
    "moe_router_fusion": (False, "the fused router takes no recorded experts"),
    "overlap_moe_expert_parallel_comm": (False, _NO_PASS),
    "mlp_chunks_for_training": (1, _NO_PASS),
}


def check_moe(config: TransformerConfig) -> None:
    """Refuse settings of a mixture of experts under which exact gradients would be wrong.

    Raises:
        RefusedError: one sentence with the field, what it got and what was wanted.
    """
    if config.num_moe_experts is None:
        return
    for name, (wanted, reason) in _WANTED.items():
        got = getattr(config, name, wanted)
        got_any = any(got) if isinstance(got, (list, tuple)) else got
        if got_any != wanted and (got_any or wanted):
            raise RefusedError(f"{name} got {got}, wanted {wanted}, since {reason}; set it to {wanted}.")
    if config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate:
        raise RefusedError(
            f"moe_router_bias_update_rate got {config.moe_router_bias_update_rate}, wanted 0, since the bias would "
            "change inside a step; set it to 0."
        )
    routing_type = config.moe_router_load_balancing_type
    unlike = {"sinkhorn", "quantile_balancing"} & set([routing_type] if isinstance(routing_type, str) else routing_type)
    if unlike:
        raise RefusedError(
            f"moe_router_load_balancing_type got {sorted(unlike)[0]}, wanted none, since {_DROPS}; set it to none."
        )
    if config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ()):
        raise RefusedError(
            f"recompute_modules got {config.recompute_modules}, wanted a list without moe, since {_NO_PASS}; recompute "
            "full layers instead."
        )


class SegmentRouter(TopKRouter):
    """Megatron's top-k router, told by a pass which experts to take, or asked to leave them there."""

    def routing(self, logits: Tensor, padding_mask=None) -> tuple[Tensor, Tensor]:
        """logits [T / TP, 1, experts] -> gates and map, both [T / TP, experts]."""
        if not isinstance(padding_mask, SegmentPass):
            return super().routing(logits, padding_mask)
        segment: SegmentPass = padding_mask
        logits = logits.flatten(0, -2)
        recorded = self._recorded(segment, logits.shape[0])
        gates, experts = topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            num_groups=self.config.moe_router_num_groups,
            group_topk=self.config.moe_router_group_topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            dense_output=True,
            precomputed_indices=None if recorded is None else recorded.to(logits.device, torch.int64),
        )
        self._record(segment, experts)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(logits).scatter(1, experts, gates), routing_map

    def _recorded(self, segment: SegmentPass, num_rows: int) -> Tensor | None:
        """Experts [T / TP, top-k] that this pass must take, None where it is free."""
        if segment.mode is Mode.WALK:
            return segment.state.experts[self.layer_number, segment.index]
        if self.layer_number in segment.experts:
            return segment.experts[self.layer_number]
        if segment.routed_experts is None:
            return None
        # under sequence parallelism this rank routes its part of the rows
        first_row = self.tp_group.rank() * num_rows if num_rows < segment.rows else 0
        given = segment.routed_experts[self.layer_number][first_row : first_row + num_rows]
        is_padding = torch.arange(first_row, first_row + num_rows, device=given.device) >= segment.valid
        anyone = torch.arange(self.topk, dtype=given.dtype, device=given.device)  # distinct: dispatchers count on it
        return torch.where(is_padding[:, None], anyone, given)

    def _record(self, segment: SegmentPass, experts: Tensor) -> None:
        if segment.mode is Mode.WALK:
            return
        compact = experts.to(torch.uint8 if self.config.num_moe_experts <= 256 else torch.int16)
        if segment.mode is Mode.REPLAY:
            segment.experts[self.layer_number] = compact
        elif segment.state.walked:
            segment.state.experts[self.layer_number, segment.index] = compact


class SegmentMoELayer(MoELayer):
    """Megatron's MoE layer with our router in it."""

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules, *args, **kwargs):
        check_moe(config)
        if submodules.router is not TopKRouter:
            raise RefusedError(
                f"The MoE spec's router got {submodules.router.__name__}, wanted Megatron's TopKRouter, in whose place "
                "ours records and replays routes; leave the spec's router alone."
            )
        super().__init__(config, dataclasses.replace(submodules, router=SegmentRouter), *args, **kwargs)

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        # The dispatcher keeps tensors of its last call; through their graph they would keep a prompt's state alive.
        for holder in (self.token_dispatcher, getattr(self.token_dispatcher, "_comm_manager", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(holder, name, None)
        return out


class SegmentTransformerLayer(TransformerLayer):
    """Hands the pass on to an MoE layer, as `padding_mask`."""

    def _forward_mlp(self, hidden_states, inference_context=None, padding_mask=None, packed_seq_params=None):
        if self.is_moe_layer and isinstance(packed_seq_params, SegmentPass):
            padding_mask = packed_seq_params
        return super()._forward_mlp(hidden_states, inference_context, padding_mask, packed_seq_params)
