"""Building the model chunks of one rank: Megatron's GPTModel with segment layers, in DDP or frozen."""

from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_moe_layer_pattern
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from longstraw_megatron.mcore.architectures import architecture_of, pipeline_layout, text_config
from longstraw_megatron.mcore.gated_delta_net import SegmentGatedDeltaNet
from longstraw_megatron.mcore.moe import check_moe
from longstraw_megatron.mcore.parallel import ParallelContext
from longstraw_megatron.mcore.quiet import quiet_megatron_build
from longstraw_megatron.mcore.rotary import swap_rotary
from longstraw_megatron.mcore.sparse_attention import freeze_indexer
from longstraw_megatron.mcore.specs import get_segment_block_spec
from longstraw_megatron.mcore.weight_grads import swap_embedding
from longstraw_megatron.ops.delta_rule import default_kernel

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class BuildOptions:
    """What of a model is the run's choice and not the checkpoint's."""

    precision: str = "fp32"  # bf16 | fp32 | fp64
    recompute: str = "none"  # none | full | selective


def recompute_settings(recompute: str) -> dict:
    """Megatron's activation recompute: `full` checkpoints every layer, `selective` core attention only."""
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def transformer_config(
    hf_config: dict, options: BuildOptions, context: ParallelContext, **overrides
) -> TransformerConfig:
    """Megatron's config for a Hugging Face config.json in this run's layout and precision."""
    parallel, dtype, hf = context.parallel, PRECISIONS[options.precision], text_config(hf_config)
    config = architecture_of(hf_config).transformer_config(
        hf,
        tensor_model_parallel_size=parallel.tp,
        context_parallel_size=parallel.cp,
        pipeline_model_parallel_size=parallel.pp,
        # the number of virtual stages follows from the layout
        pipeline_model_parallel_layout=pipeline_layout(hf, pp=parallel.pp, vpp=parallel.vpp, stages=parallel.stages),
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        sequence_parallel=parallel.sp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # the objective divides by global counts itself: DDP must sum, never average
        calculate_per_token_loss=True,
        # weights are loaded or drawn by name afterwards, alike in every layout
        perform_initialization=False,
        deterministic_mode=default_kernel(context.device) == "torch",
        **recompute_settings(options.recompute),
        **overrides,
    )
    check_moe(config)
    return config


def prepare_chunk(chunk: nn.Module, device: torch.device) -> None:
    """What a GPTModel with segment layers (`segment_block_spec`) still needs, before DDP: ours, or a pipeline's own.

    Its rotaries become those of segments, its embedding adds to `main_grad`, its delta rule takes the kernel of
    `device`, its indexers are frozen.
    """
    swap_rotary(chunk)
    swap_embedding(chunk)
    for module in chunk.modules():
        if isinstance(module, SegmentGatedDeltaNet):
            module.kernel = default_kernel(device)
    freeze_indexer(chunk)


@quiet_megatron_build()
def build_model(
    hf_config: dict, options: BuildOptions, context: ParallelContext, *, freeze: bool = False, **overrides
) -> list[GPTModel]:
    """This rank's model chunks (one per virtual stage), with unset weights, in training mode.

    `freeze` makes a model that is only read (a reference): no parameter requires grad. `overrides` are fields of
    Megatron's config.
    """
    config = transformer_config(hf_config, options, context, **overrides)
    groups, vpp = context.groups, context.parallel.vpp
    pp_rank, pp_size = groups.pp.rank(), groups.pp.size()
    chunks = []
    for vp_stage in range(vpp):
        stage = vp_stage * pp_size + pp_rank
        spec = get_segment_block_spec(config, vp_stage=vp_stage if vpp > 1 else None, pp_rank=pp_rank)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            pre_process=stage == 0,
            post_process=stage == pp_size * vpp - 1,
            pg_collection=groups,
            vp_stage=vp_stage if vpp > 1 else None,
            **architecture_of(hf_config).gpt_model_kwargs(text_config(hf_config)),
        )
        prepare_chunk(chunk, context.device)
        if freeze:
            chunk.requires_grad_(False)
        chunks.append(chunk.to(context.device).train())
    return chunks


@quiet_megatron_build()
def wrap_ddp(
    chunks: list[GPTModel],
    context: ParallelContext,
    *,
    use_distributed_optimizer: bool,
    grad_reduce_in_fp32: bool = True,
    keep_weights: bool = True,
) -> list[DistributedDataParallel]:
    """Megatron DDP over the chunks: gradients are summed once per step; those of bf16 weights in float32, or in bf16.

    A distributed optimizer moves the weights into DDP's buffers, so that both exist for a moment. `keep_weights=False`
    gives the weights' memory back before: their values are lost, to be loaded or drawn afterwards.

    Overlap of reductions is off: the last backward of a step (the walk of the first segment) never touches the output
    layer, so DDP's count of ready parameters would not come out (param_and_grad_buffer.py:294).
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=grad_reduce_in_fp32 and chunks[0].config.params_dtype is torch.bfloat16,
        overlap_grad_reduce=False,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    if use_distributed_optimizer and not keep_weights:
        for chunk in chunks:
            _hollow(chunk)
    return [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=i > 0, pg_collection=context.groups)
        for i, chunk in enumerate(chunks)
    ]


def _hollow(chunk: GPTModel) -> None:
    """Leave trainable parameters their shape, and one number of storage."""
    for parameter in chunk.parameters():
        if parameter.requires_grad:
            parameter.data = torch.empty_strided(
                parameter.shape, (0,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device
            )


def moe_layer_numbers(config: TransformerConfig) -> tuple[int, ...]:
    """Layer numbers (from 1, over all stages) of the mixture-of-experts layers, in the order of `routed_experts`."""
    if config.num_moe_experts is None:
        return ()
    return tuple(i + 1 for i, is_moe in enumerate(get_moe_layer_pattern(config)) if is_moe)


def unwrap(chunk: nn.Module) -> GPTModel:
    """The GPTModel inside DDP's and Float16Module's wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk
