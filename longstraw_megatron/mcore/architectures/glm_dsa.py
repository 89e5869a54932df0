"""GLM-5, 5.1 and 5.2 (multi-latent attention with a sparse-attention indexer, mixture of experts) as a GPTModel.

`hf` is a config.json, a plain dict with `architectures`. Two things to know:

* Hugging Face builds the norms of the latents (`q_a_layernorm`, `kv_a_layernorm`) with eps 1e-6 whatever
  `rms_norm_eps` says; Megatron, vLLM, SGLang and slime take the config's (1e-5 for the released models), and so do we.
  Logits then differ by some 1e-5; with `rms_norm_eps` 1e-6 both are the same model.
* The indexer gets no gradient (its loss has coefficient 0), the router's correction bias is never updated, and there
  is no auxiliary loss: the gradient is that of the objective alone.
"""

from megatron.core.extensions.transformer_engine import HAVE_TE, TEColumnParallelGroupedLinear
from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn.functional import silu

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.architectures.fields import (
    need_int,
    need_list,
    need_number,
    refuse_common,
    refuse_tp,
    refuse_unless,
    rope_of,
)

INDEX_K_NORM_EPS = 1e-6  # Hugging Face and Megatron-Bridge hard-code it
_SIZES = (
    *("moe_intermediate_size", "n_shared_experts", "n_routed_experts", "num_experts_per_tok"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("index_topk", "index_head_dim", "index_n_heads"),
)


def mlp_types(hf: dict) -> list[str]:
    """`dense` or `sparse` for each layer."""
    if hf.get("mlp_layer_types") is not None:
        return need_list(hf, "mlp_layer_types", {"dense", "sparse"})
    num_layers, dense = need_int(hf, "num_hidden_layers"), hf.get("first_k_dense_replace", 3)
    return ["dense" if i < dense else "sparse" for i in range(num_layers)]


def indexer_types(hf: dict) -> list[str]:
    """`full` for each layer that selects keys, `shared` for those that take an earlier layer's selection."""
    if hf.get("indexer_types") is not None:
        return need_list(hf, "indexer_types", {"full", "shared"})
    num_layers, pattern = need_int(hf, "num_hidden_layers"), hf.get("index_topk_pattern")
    if pattern is not None:
        letters = {"F": "full", "S": "shared"}
        words = [letters.get(letter, letter) for letter in pattern]
        return need_list({**hf, "index_topk_pattern": words}, "index_topk_pattern", {"full", "shared"})
    freq, offset = max(hf.get("index_topk_freq", 1), 1), hf.get("index_skip_topk_offset", 2)
    return ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers)]


def _megatron_types(num_layers: int, freq: int, offset: int) -> list[str]:
    shared = (is_dsa_skip_topk_layer(i + 1, offset, freq) for i in range(num_layers))
    return ["shared" if layer_is_shared else "full" for layer_is_shared in shared]


def index_schedule(hf: dict) -> tuple[int, int]:
    """Megatron's (frequency, offset) of the layers that run their indexer.

    Raises:
        RefusedError: no such pair gives the config's layers.
    """
    types = indexer_types(hf)
    candidates = [(1, 0), (max(hf.get("index_topk_freq", 1), 1), hf.get("index_skip_topk_offset", 2))]
    candidates += [(freq, offset) for freq in range(2, len(types) + 1) for offset in range(1, len(types) + 1)]
    for freq, offset in candidates:
        if _megatron_types(len(types), freq, offset) == types:
            return freq, offset
    full = [i for i, kind in enumerate(types) if kind == "full"]
    raise RefusedError(
        f"config.json: the layers that run their indexer got {full}, wanted a leading run and then every n-th layer, "
        "which is what Megatron can build; such a model is not supported."
    )


def check(hf: dict) -> None:
    """Refuse what this mapping does not express.

    Raises:
        RefusedError: one sentence with the key, what it got and what was wanted.
    """
    refuse_common(hf)
    for key in _SIZES:
        need_int(hf, key)
    need_number(hf, "routed_scaling_factor")
    refuse_unless(
        hf,
        {
            "num_key_value_heads": (hf["num_attention_heads"], None),
            "n_group": (1, None),
            "topk_group": (1, None),
            "norm_topk_prob": (True,),
            "scoring_func": ("sigmoid", None),
            "topk_method": ("noaux_tc", None),
            "moe_router_dtype": ("float32", None),
            "moe_layer_freq": (1, None),
            "mlp_bias": (False, None),
            "output_router_logits": (False, None),
            "rope_interleave": (True, None),
            "indexer_rope_interleave": (True, None),
        },
    )
    if hf["num_experts_per_tok"] > hf["n_routed_experts"]:
        raise RefusedError(
            f"config.json: num_experts_per_tok={hf['num_experts_per_tok']} got "
            f"n_routed_experts={hf['n_routed_experts']}, wanted at least as many; correct the configuration."
        )
    if hf["qk_rope_head_dim"] % 2 or hf["qk_rope_head_dim"] > hf["index_head_dim"]:
        raise RefusedError(
            f"config.json: qk_rope_head_dim got {hf['qk_rope_head_dim']}, wanted an even number of at most "
            f"index_head_dim={hf['index_head_dim']}; correct the configuration."
        )
    mlp_types(hf)
    index_schedule(hf)
    if rope_of(hf, partial=1.0).partial != 1.0:
        raise RefusedError(
            f"config.json: partial_rotary_factor got {rope_of(hf, partial=1.0).partial}, wanted 1 or none, since "
            "qk_rope_head_dim says which dims rotate; remove it."
        )


def _refuse_layout(hf: dict, tp: int, ep: int, etp: int, sequence_parallel: bool) -> None:
    divided = {key: hf[key] for key in ("vocab_size", "num_attention_heads", "intermediate_size")}
    divided["shared experts' size"] = hf["moe_intermediate_size"] * hf["n_shared_experts"]
    refuse_tp(tp, divided)
    if tp > 1 and not sequence_parallel:  # Megatron's absorbed MLA asserts it (absorbed_mla.py:171)
        raise RefusedError(
            f"parallel.tp={tp} got parallel.sp=false, wanted sequence parallelism with it; set parallel.sp=true."
        )
    if hf["n_routed_experts"] % ep:
        raise RefusedError(
            f"parallel.ep={ep} does not divide n_routed_experts={hf['n_routed_experts']}, wanted equally many experts "
            "on every rank; choose a divisor."
        )
    if hf["moe_intermediate_size"] % etp:
        raise RefusedError(
            f"parallel.etp={etp} does not divide moe_intermediate_size={hf['moe_intermediate_size']}, wanted a divisor "
            "of it; set parallel.etp=1."
        )


def transformer_config(hf: dict, **overrides) -> MLATransformerConfig:
    """The MLATransformerConfig of `hf`; `overrides` are its other fields (parallel sizes, dtypes, recompute, kernels).

    Raises:
        RefusedError: `check`, or a parallel size that does not cut the model.
    """
    check(hf)
    _refuse_layout(
        hf,
        overrides.get("tensor_model_parallel_size", 1),
        overrides.get("expert_model_parallel_size", 1),
        overrides.get("expert_tensor_parallel_size") or 1,
        overrides.get("sequence_parallel", False),
    )
    freq, offset = index_schedule(hf)
    mlps = mlp_types(hf)
    fields = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "kv_channels": hf["qk_nope_head_dim"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": hf.get("initializer_range", 0.02),
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": rope_of(hf, partial=1.0).theta,
        "apply_rope_fusion": False,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": hf["index_n_heads"],
        "dsa_indexer_head_dim": hf["index_head_dim"],
        "dsa_indexer_topk": hf["index_topk"],
        "dsa_indexer_topk_freq": freq,
        "dsa_indexer_skip_topk_offset": offset,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": INDEX_K_NORM_EPS,
        "dsa_indexer_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }
    if overrides.get("context_parallel_size", 1) > 1:
        fields["cp_comm_type"] = "allgather"  # the only one that Megatron's check accepts with DSA
    if "sparse" in mlps:
        fields |= {
            "num_moe_experts": hf["n_routed_experts"],
            "moe_layer_freq": [int(kind == "sparse") for kind in mlps],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * hf["n_shared_experts"],
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": True,
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": HAVE_TE and TEColumnParallelGroupedLinear is not None,
        }
    return MLATransformerConfig(**(fields | overrides))


def gpt_model_kwargs(hf: dict) -> dict:
    """What GPTModel takes besides the config and the layer spec. The rotary embedding is the attention's own."""
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": rope_of(hf, partial=1.0).theta,
        "rotary_percent": 1.0,
        "share_embeddings_and_output_weights": hf.get("tie_word_embeddings", False),
    }


def legal_stage_starts(hf: dict) -> list[int]:
    """Layers (from 0) that may begin a pipeline stage: those that compute their own top-k (IndexShare)."""
    return [i for i, kind in enumerate(indexer_types(hf)) if kind == "full"]
