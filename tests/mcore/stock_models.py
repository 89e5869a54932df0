"""Stock Megatron models of test size, built by Megatron's own spec functions, and one optimizer-free training step."""

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

VOCAB, LENGTH = 96, 32
COMMON = {
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "pipeline_dtype": torch.float32,
}
DENSE = {"num_layers": 2, "num_query_groups": 2, "qk_layernorm": True}
QWEN = {
    "num_layers": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
GLM = {
    "num_layers": 4,
    "kv_channels": 12,
    "qk_layernorm": True,
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 16,
    "rope_type": "rope",
    "experimental_attention_variant": "dsa",
    "cp_comm_type": "allgather",
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 8,
    "dsa_indexer_topk_freq": 2,
    "dsa_indexer_skip_topk_offset": 1,
    "dsa_indexer_rotate_activation": False,
    "dsa_indexer_loss_coeff": 0.0,
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_ffn_hidden_size": 16,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_shared_expert_intermediate_size": 16,
    "moe_token_dispatcher_type": "alltoall",
}


def build(name: str, groups, **overrides) -> GPTModel:
    """This rank's part of the stock model `dense`, `qwen` or `glm`, in the layout of `groups`."""
    layout = {
        "tensor_model_parallel_size": groups.tp.size(),
        "pipeline_model_parallel_size": groups.pp.size(),
        "context_parallel_size": groups.cp.size(),
        "expert_model_parallel_size": groups.ep.size(),
        "expert_tensor_parallel_size": groups.expt_tp.size(),
    }
    shape = {"dense": DENSE, "qwen": QWEN, "glm": GLM}[name]
    config_class = MLATransformerConfig if name == "glm" else TransformerConfig
    config = config_class(**{**COMMON, **shape, **layout, **overrides})
    if name == "dense":
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    else:
        spec = get_transformer_block_with_experimental_attention_variant_spec(config)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        position_embedding_type="rope",
        rotary_percent=0.25 if name == "qwen" else 1.0,
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
    )


def seed_weights(model: GPTModel) -> None:
    """Weights that make every part matter; for a model that is not sharded."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "A_log" in name:
                parameter.copy_(noise.abs())
            elif parameter.dim() >= 2:
                parameter.copy_(noise * 0.1)
            else:
                parameter.add_(noise * 0.1)


def samples(count: int) -> torch.Tensor:
    """Token ids [count, LENGTH + 1]."""
    return torch.randint(0, VOCAB, (count, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def _zigzag(ids: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """This rank's tokens [.., t/CP] in Megatron's zigzag cut."""
    pieces = ids.chunk(2 * cp_size, dim=-1)
    return torch.cat([pieces[cp_rank], pieces[2 * cp_size - 1 - cp_rank]], dim=-1)


def _loss(losses: torch.Tensor, cp_size: int):
    """Mean over this rank's tokens; Megatron's schedule multiplies a 2-tuple's loss by the CP size."""
    return losses.mean() / cp_size, {"loss": losses.detach().mean()}


def wrap(model: GPTModel, groups, **overrides) -> DistributedDataParallel:
    return DistributedDataParallel(
        model.config, DistributedDataParallelConfig(**overrides), model, pg_collection=groups
    )


def backward(model: DistributedDataParallel, groups, *, batch: int = 2) -> list[float]:
    """Gradient of the mean loss over `batch` samples into `main_grad`, by Megatron's schedule; the losses seen here."""
    model.zero_grad_buffer()
    mine = samples(batch).chunk(groups.dp.size())[groups.dp.rank()]
    rank, size = groups.cp.rank(), groups.cp.size()

    def forward_step(iterator, chunk):
        ids = next(iterator)[None]
        tokens, labels = _zigzag(ids[:, :-1], size, rank), _zigzag(ids[:, 1:], size, rank)
        positions = _zigzag(torch.arange(LENGTH)[None], size, rank)
        return chunk(tokens, positions, None, labels=labels), lambda losses: _loss(losses, size)

    model.config.finalize_model_grads_func = None
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(mine),
        model=[model],
        num_microbatches=len(mine),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    finalize_model_grads([model], pg_collection=groups)
    return [output["loss"].item() for output in outputs]
