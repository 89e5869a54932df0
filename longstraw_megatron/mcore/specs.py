"""Megatron's own block spec with our layers in it.

What changes is the class behind a few fields; parameters, state-dict keys and their order stay Megatron's. Layer specs
are shared objects (one spec for many layers), so they are copied, never edited.
"""

import dataclasses
import functools

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from longstraw_megatron.mcore.core_attention import SegmentCoreAttention
from longstraw_megatron.mcore.gated_delta_net import SegmentGatedDeltaNet
from longstraw_megatron.mcore.moe import SegmentMoELayer, SegmentTransformerLayer
from longstraw_megatron.mcore.sparse_attention import SegmentDSAttention


def _segment_attention_spec(spec: ModuleSpec) -> ModuleSpec:
    if issubclass(spec.module, GatedDeltaNet):
        return dataclasses.replace(spec, module=SegmentGatedDeltaNet)
    core = spec.submodules.core_attention
    if isinstance(core, ModuleSpec) and issubclass(core.module, DSAttention):
        core = dataclasses.replace(core, module=SegmentDSAttention)
    else:
        core = SegmentCoreAttention
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, core_attention=core))


def _segment_mlp_spec(spec):
    """Megatron's MoE spec is a functools.partial of MoELayer; a dense MLP's passes as it is."""
    if isinstance(spec, functools.partial) and spec.func is MoELayer:
        return functools.partial(SegmentMoELayer, *spec.args, **spec.keywords)
    if isinstance(spec, ModuleSpec) and spec.module is MoELayer:
        return dataclasses.replace(spec, module=SegmentMoELayer)
    return spec


def segment_layer_spec(spec: ModuleSpec) -> ModuleSpec:
    """One TransformerLayer spec of Megatron's with our attention and MoE classes."""
    submodules = dataclasses.replace(
        spec.submodules,
        self_attention=_segment_attention_spec(spec.submodules.self_attention),
        mlp=_segment_mlp_spec(spec.submodules.mlp),
    )
    module = SegmentTransformerLayer if spec.module is TransformerLayer else spec.module
    return dataclasses.replace(spec, module=module, submodules=submodules)


def segment_block_spec(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """A block spec of Megatron's (or a pipeline's own) with our layer classes."""
    return dataclasses.replace(block, layer_specs=[segment_layer_spec(spec) for spec in block.layer_specs])


def get_segment_block_spec(
    config: TransformerConfig, *, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Megatron's block spec for the layers of one (virtual) pipeline stage, with our layer classes."""
    return segment_block_spec(get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage, pp_rank))
