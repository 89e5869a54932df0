"""From config.json to Megatron's config: literal values, the older spelling, and what is refused."""

import json

import pytest
import torch
from hf_models import GLM, QWEN
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import GlmMoeDsaConfig, Qwen3_5Config, Qwen3_5TextConfig

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.hf_config import read_hf_config
from longstraw_megatron.mcore.architectures import architecture_of, glm_dsa, qwen_hybrid, text_config

QWEN_HF = {
    **Qwen3_5TextConfig(**QWEN).to_dict(),
    "architectures": ["Qwen3_5ForCausalLM"],
}
GLM_HF = {**GlmMoeDsaConfig(**GLM).to_dict(), "architectures": ["GlmMoeDsaForCausalLM"]}


def without(hf: dict, *keys: str, **changes) -> dict:
    return {key: value for key, value in hf.items() if key not in keys} | changes


def test_qwen_config_fields():
    hf = without(QWEN_HF, layer_types=["linear_attention"] * 3 + ["full_attention"])
    config = qwen_hybrid.transformer_config(hf, params_dtype=torch.bfloat16, tensor_model_parallel_size=1)
    assert type(config) is TransformerConfig
    want = {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "kv_channels": 16,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "layernorm_zero_centered_gamma": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [1, 1, 1, 0],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "params_dtype": torch.bfloat16,
        "mtp_num_layers": None,
    }
    assert {key: getattr(config, key) for key in want} == want
    assert qwen_hybrid.gpt_model_kwargs(hf) == {
        "vocab_size": 96,
        "max_sequence_length": 512,
        "position_embedding_type": "rope",
        "rotary_base": 1e7,
        "rotary_percent": 0.25,
        "share_embeddings_and_output_weights": False,
    }


def test_glm_config_fields():
    config = glm_dsa.transformer_config(GLM_HF, context_parallel_size=2, moe_token_dispatcher_type="allgather")
    assert type(config) is MLATransformerConfig
    want = {
        "num_layers": 4,
        "layernorm_epsilon": 1e-6,
        "layernorm_zero_centered_gamma": False,
        "kv_channels": 12,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 12,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 20,
        "rope_type": "rope",
        "rotary_base": 8e6,
        "mscale_all_dim": 0.0,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 32,
        "dsa_indexer_head_dim": 8,
        "dsa_indexer_topk": 8,
        "dsa_indexer_topk_freq": 2,
        "dsa_indexer_skip_topk_offset": 1,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_loss_coeff": 0.0,
        "cp_comm_type": "allgather",
        "num_moe_experts": 4,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,  # there is no Transformer Engine here
    }
    assert {key: getattr(config, key) for key in want} == want
    assert glm_dsa.transformer_config(GLM_HF).moe_token_dispatcher_type == "alltoall"
    assert glm_dsa.gpt_model_kwargs(without(GLM_HF, tie_word_embeddings=True))["share_embeddings_and_output_weights"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_scaling": None},
        {"rope_theta": 1e7},
        {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 0]}, "rope_theta": 1e7},
        {"rope_theta": 5, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "mrope_interleaved": True}},
    ],
)
def test_older_spellings_of_the_rotary_embedding(changes):
    kwargs = qwen_hybrid.gpt_model_kwargs(without(QWEN_HF, "rope_parameters", **changes))
    assert (kwargs["rotary_base"], kwargs["rotary_percent"]) == (1e7, 0.25)


def test_layer_types_and_interval():
    assert qwen_hybrid.layer_types({"num_hidden_layers": 5}) == [*["linear_attention"] * 3, "full_attention"] + [
        "linear_attention"
    ]
    interval = qwen_hybrid.layer_types({"num_hidden_layers": 4, "full_attention_interval": 2})
    assert interval == ["linear_attention", "full_attention"] * 2


def test_index_schedule_of_the_released_models():
    glm_5_2 = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    full = [i for i, kind in enumerate(glm_dsa.indexer_types(glm_5_2)) if kind == "full"]
    assert full == [0, 1, *range(2, 75, 4)] and len(full) == 21
    assert glm_dsa.index_schedule(glm_5_2) == (4, 3)
    assert glm_dsa.index_schedule({"num_hidden_layers": 78}) == (1, 0)
    # a list without the keys that it came from, and with keys of another schedule
    types = glm_dsa.indexer_types(glm_5_2)
    assert glm_dsa.index_schedule({"num_hidden_layers": 78, "indexer_types": types}) == (4, 3)
    wrong_keys = {"num_hidden_layers": 78, "indexer_types": types, "index_topk_freq": 2}
    assert glm_dsa.index_schedule(wrong_keys) == (4, 3)
    assert glm_dsa.index_schedule({"num_hidden_layers": 5, "index_topk_pattern": "FFSFS"}) == (2, 2)
    config = GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3)
    assert config.indexer_types == types
    assert glm_dsa.mlp_types({"num_hidden_layers": 5}) == ["dense"] * 3 + ["sparse"] * 2


REFUSED_BY_BOTH = [
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}}, "got type 'yarn' with factor 4.0"),
    ({"rope_parameters": None, "rope_theta": 1e7, "rope_scaling": {"type": "linear", "factor": 2}}, "type 'linear'"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "factor": 4.0}}, "with factor 4.0"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e7}}}, "one set for each of"),
    ({"rope_parameters": None}, "rope_theta got None"),
    ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.5}}, "partial_rotary_factor got 1.5"),
    ({"hidden_act": "gelu"}, "hidden_act got 'gelu', wanted 'silu'"),
    ({"attention_bias": True}, "attention_bias got True"),
    ({"attention_dropout": 0.1}, "attention_dropout got 0.1"),
    ({"mlp_bias": True}, "mlp_bias got True"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config got method 'fp8'"),
    ({"vocab_size": None}, "vocab_size got None, wanted a positive integer"),
    ({"hidden_size": "big"}, "hidden_size got 'big'"),
    ({"num_hidden_layers": True}, "num_hidden_layers got True"),
    ({"rms_norm_eps": 0}, "rms_norm_eps got 0"),
]
REFUSED_QWEN = [
    ({"layer_types": ["full_attention"] * 3}, "layer_types got .* wanted 4 words"),
    ({"layer_types": ["sliding_attention"] * 4}, "out of \\['full_attention', 'linear_attention'\\]"),
    ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval got 0"),
    ({"attn_output_gate": False}, "attn_output_gate got False"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type got 'sigmoid'"),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype got 'bfloat16'"),
    ({"num_experts": 8}, "num_experts got 8"),
    ({"num_key_value_heads": 3}, "num_attention_heads=8 got num_key_value_heads=3, wanted a divisor"),
    ({"linear_num_key_heads": 3}, "linear_num_value_heads=8 got linear_num_key_heads=3"),
    ({"head_dim": 12}, "got 3 rotating dims, wanted an even number"),
    ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim got None"),
    ({"use_sliding_window": True}, "use_sliding_window got True"),
]
REFUSED_GLM = [
    ({"n_group": 8}, "n_group got 8"),
    ({"topk_group": 4}, "topk_group got 4"),
    ({"norm_topk_prob": False}, "norm_topk_prob got False"),
    ({"scoring_func": "softmax"}, "scoring_func got 'softmax'"),
    ({"num_key_value_heads": 2}, "num_key_value_heads got 2, wanted 4"),
    ({"indexer_types": ["shared", "full", "full", "full"]}, "run their indexer got \\[1, 2, 3\\]"),
    ({"indexer_types": ["full", "shared", "full", "full"]}, "run their indexer got \\[0, 2, 3\\]"),
    ({"indexer_types": None, "index_topk_pattern": "FSXF"}, "index_topk_pattern got"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types got \\['dense'\\]"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave got False"),
    ({"q_lora_rank": None}, "q_lora_rank got None"),
    ({"n_shared_experts": 0}, "n_shared_experts got 0"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 got n_routed_experts=4"),
    ({"qk_rope_head_dim": 16}, "qk_rope_head_dim got 16, wanted an even number of at most index_head_dim=8"),
    ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5}}, "partial_rotary_factor got 0.5"),
    ({"routed_scaling_factor": None}, "routed_scaling_factor got None"),
]


@pytest.mark.parametrize("changes, match", REFUSED_BY_BOTH + REFUSED_QWEN)
def test_qwen_refuses(changes, match):
    qwen_hybrid.check(QWEN_HF)
    with pytest.raises(RefusedError, match=match):
        qwen_hybrid.check(without(QWEN_HF, **changes))


@pytest.mark.parametrize("changes, match", REFUSED_BY_BOTH + REFUSED_GLM)
def test_glm_refuses(changes, match):
    glm_dsa.check(GLM_HF)
    with pytest.raises(RefusedError, match=match):
        glm_dsa.check(without(GLM_HF, **changes))


NINES = {
    "vocab_size": 99,
    "intermediate_size": 45,
    "num_attention_heads": 9,
    "num_key_value_heads": 9,
    "linear_num_key_heads": 9,
    "linear_num_value_heads": 9,
}


@pytest.mark.parametrize(
    "changes, tp, match",
    [
        ({}, 3, "parallel.tp=3 does not divide num_attention_heads=8, .*nearest is parallel.tp=2"),
        ({"vocab_size": 98}, 4, "parallel.tp=4 does not divide vocab_size=98, wanted .* nearest is parallel.tp=2"),
        ({"num_key_value_heads": 8, "linear_num_key_heads": 8}, 5, "nearest is parallel.tp=4"),
        (NINES, 8, "nearest is parallel.tp=9"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "does not divide the key-value heads"),
    ],
)
def test_tensor_parallel_sizes_that_do_not_cut_qwen(changes, tp, match):
    with pytest.raises(RefusedError, match=match):
        qwen_hybrid.transformer_config(without(QWEN_HF, **changes), tensor_model_parallel_size=tp)


def test_expert_parallelism_of_a_model_without_experts_is_refused():
    with pytest.raises(RefusedError, match="parallel.ep=2 cuts experts, but the model has none; set parallel.ep=1"):
        qwen_hybrid.transformer_config(QWEN_HF, expert_model_parallel_size=2)


@pytest.mark.parametrize(
    "overrides, match",
    [
        ({"tensor_model_parallel_size": 2}, "parallel.tp=2 got parallel.sp=false"),
        ({"tensor_model_parallel_size": 8}, "num_attention_heads=4.*nearest is parallel.tp=4"),
        ({"expert_model_parallel_size": 3}, "parallel.ep=3 does not divide n_routed_experts=4"),
        ({"expert_tensor_parallel_size": 3}, "parallel.etp=3 does not divide moe_intermediate_size=16"),
    ],
)
def test_parallel_sizes_that_do_not_cut_glm(overrides, match):
    with pytest.raises(RefusedError, match=match):
        glm_dsa.transformer_config(GLM_HF, **overrides)


def test_context_parallel_sizes_that_do_not_divide_the_heads_use_the_relay():
    config = qwen_hybrid.transformer_config(QWEN_HF, context_parallel_size=3)
    assert isinstance(config, qwen_hybrid.RelayTransformerConfig) and config.context_parallel_size == 3
    assert type(qwen_hybrid.transformer_config(QWEN_HF, context_parallel_size=2)) is TransformerConfig


def test_architectures_and_nested_configurations(tmp_path):
    assert architecture_of(QWEN_HF) is qwen_hybrid and architecture_of(GLM_HF) is glm_dsa
    nested = Qwen3_5Config(text_config=without(QWEN_HF, "architectures")).to_dict()
    nested["architectures"] = ["Qwen3_5ForConditionalGeneration"]
    hf = text_config(nested)
    assert architecture_of(hf) is qwen_hybrid and hf["hidden_size"] == 32 and "vision_config" not in hf
    assert hf["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert text_config(hf) == hf
    qwen_hybrid.check(hf)
    tied = nested | {"tie_word_embeddings": True, "text_config": without(nested["text_config"], "tie_word_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps(tied))
    assert read_hf_config(tmp_path)["tie_word_embeddings"] is True
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert read_hf_config(tmp_path) == json.loads(json.dumps(hf))
    with pytest.raises(RefusedError, match="tie_word_embeddings got True outside and False in text_config"):
        text_config(nested | {"tie_word_embeddings": True})
    with pytest.raises(RefusedError, match="quantization_config got method 'fp8'"):
        qwen_hybrid.check(text_config(nested | {"quantization_config": {"quant_method": "fp8"}}))


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM"], ["Qwen3_5MoeForCausalLM"]])
def test_unknown_architecture(architectures):
    known = "Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, GlmMoeDsaForCausalLM"
    with pytest.raises(RefusedError, match=f"wanted one of {known}"):
        architecture_of({"architectures": architectures})
