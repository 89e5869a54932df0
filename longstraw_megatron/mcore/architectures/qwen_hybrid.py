"""Qwen3.5 and Qwen3.6 dense hybrids (Gated DeltaNet and gated softmax attention) as a Megatron GPTModel.

`hf` is the text part of a config.json, a plain dict with `architectures`. Every norm of the model is zero-centred
(x * (1 + w)) but the delta rule's output norm, which Megatron zero-centres too: the weight mapping takes 1 off it.
"""

from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.architectures.fields import (
    need_int,
    need_list,
    refuse_common,
    refuse_tp,
    refuse_unless,
    rope_of,
)

PARTIAL_ROTARY_FACTOR = 0.25  # of transformers' Qwen3_5TextConfig, where config.json has none
FULL_ATTENTION_INTERVAL = 4


class RelayTransformerConfig(TransformerConfig):
    """TransformerConfig without the demand that TP * CP divides the delta rule's heads.

    Where it does not, the heads stay whole and the state is relayed over the context-parallel ranks
    (`segments.delta_relay`), which Megatron's check (transformer_config.py:1374) does not know.
    """

    def __post_init__(self):
        context_parallel_size = self.context_parallel_size
        self.context_parallel_size = 1
        super().__post_init__()
        self.context_parallel_size = context_parallel_size


def layer_types(hf: dict) -> list[str]:
    """`linear_attention` or `full_attention` for each layer."""
    if hf.get("layer_types") is not None:
        return need_list(hf, "layer_types", {"linear_attention", "full_attention"})
    interval = hf.get("full_attention_interval", FULL_ATTENTION_INTERVAL)
    return [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention"
        for i in range(need_int(hf, "num_hidden_layers"))
    ]


def check(hf: dict) -> None:
    """Refuse what this mapping does not express.

    Raises:
        RefusedError: one sentence with the key, what it got and what was wanted.
    """
    refuse_common(hf)
    for key in (
        "num_key_value_heads",
        "head_dim",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ):
        need_int(hf, key)
    for heads, groups in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if need_int(hf, heads) % need_int(hf, groups):
            raise RefusedError(
                f"config.json: {heads}={hf[heads]} got {groups}={hf[groups]}, wanted a divisor of it; correct the "
                "configuration."
            )
    refuse_unless(
        hf,
        {
            "attn_output_gate": (True, None),
            "output_gate_type": ("swish", "silu", None),
            "mamba_ssm_dtype": ("float32", None),
            "num_experts": (0, None),
            "mlp_bias": (False, None),
        },
    )
    if hf.get("layer_types") is None and "full_attention_interval" in hf:
        need_int(hf, "full_attention_interval")
    layer_types(hf)
    rope = rope_of(hf, partial=PARTIAL_ROTARY_FACTOR)
    rotary_dim = hf["head_dim"] * rope.partial
    if rotary_dim % 2:
        raise RefusedError(
            f"config.json: head_dim={hf['head_dim']} with partial_rotary_factor={rope.partial} got {rotary_dim:g} "
            "rotating dims, wanted an even number; correct the configuration."
        )


def _refuse_layout(hf: dict, tp: int, ep: int) -> None:
    if ep > 1:
        raise RefusedError(f"parallel.ep={ep} cuts experts, but the model has none; set parallel.ep=1.")
    groups = hf["num_key_value_heads"]
    divided = {
        "vocab_size": hf["vocab_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "linear_num_key_heads": hf["linear_num_key_heads"],
        "linear_num_value_heads": hf["linear_num_value_heads"],
        "intermediate_size": hf["intermediate_size"],
    }
    refuse_tp(tp, divided, also=lambda size: groups % size == 0 or size % groups == 0)


def transformer_config(hf: dict, **overrides) -> TransformerConfig:
    """The TransformerConfig of `hf`; `overrides` are its other fields (parallel sizes, dtypes, recompute, kernels).

    Raises:
        RefusedError: `check`, or a tensor-parallel size that does not cut the model.
    """
    check(hf)
    tp = overrides.get("tensor_model_parallel_size", 1)
    _refuse_layout(hf, tp, overrides.get("expert_model_parallel_size", 1))
    fields = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "layernorm_zero_centered_gamma": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": silu,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": hf.get("initializer_range", 0.02),
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in layer_types(hf)],
        "linear_conv_kernel_dim": hf["linear_conv_kernel_dim"],
        "linear_key_head_dim": hf["linear_key_head_dim"],
        "linear_value_head_dim": hf["linear_value_head_dim"],
        "linear_num_key_heads": hf["linear_num_key_heads"],
        "linear_num_value_heads": hf["linear_num_value_heads"],
        # of no use here, but the default does not go with variable_seq_lengths (transformer_config.py:2644)
        "moe_token_dispatcher_type": "alltoall",
    }
    heads_divide = hf["linear_num_key_heads"] % (tp * overrides.get("context_parallel_size", 1)) == 0
    return (TransformerConfig if heads_divide else RelayTransformerConfig)(**(fields | overrides))


def gpt_model_kwargs(hf: dict) -> dict:
    """What GPTModel takes besides the config and the layer spec."""
    rope = rope_of(hf, partial=PARTIAL_ROTARY_FACTOR)
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": rope.theta,
        "rotary_percent": rope.partial,
        "share_embeddings_and_output_weights": hf.get("tie_word_embeddings", False),
    }


def legal_stage_starts(hf: dict) -> list[int]:
    """Layers (from 0) that may begin a pipeline stage: any."""
    return list(range(hf["num_hidden_layers"]))
