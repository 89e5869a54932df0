"""Where Megatron's tensors of GLM-5 lie in Hugging Face's. Every one is a plain copy: both rotate interleaved pairs,
and the indexer's rotating dims are its first."""

from collections.abc import Iterator

from longstraw_megatron.mcore.architectures.glm_dsa import indexer_types, mlp_types
from longstraw_megatron.mcore.weights.entry import Entry, whole
from longstraw_megatron.mcore.weights.qwen_hybrid import mlp_entries


def _latent_attention(hf: dict, source: str, target: str) -> Iterator[Entry]:
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    q_rank, kv_rank, rope = hf["q_lora_rank"], hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    nope, value = hf["qk_nope_head_dim"], hf["v_head_dim"]

    def entry(megatron: str, name: str, rows: int, row_shape: tuple[int, ...] = (), axis=None) -> Entry:
        return Entry(f"{target}.{megatron}.weight", (whole(f"{source}.{name}.weight", rows),), row_shape, axis)

    yield entry("linear_q_down_proj", "q_a_proj", q_rank, (hidden,))
    yield entry("q_layernorm", "q_a_layernorm", q_rank)
    yield entry("linear_q_up_proj", "q_b_proj", heads * (nope + rope), (q_rank,), "rows")
    yield entry("linear_kv_down_proj", "kv_a_proj_with_mqa", kv_rank + rope, (hidden,))
    yield entry("kv_layernorm", "kv_a_layernorm", kv_rank)
    yield entry("linear_kv_up_proj", "kv_b_proj", heads * (nope + value), (kv_rank,), "rows")
    yield entry("linear_proj", "o_proj", hidden, (heads * value,), "columns")


def _indexer(hf: dict, source: str, target: str) -> Iterator[Entry]:
    hidden, heads, dim = hf["hidden_size"], hf["index_n_heads"], hf["index_head_dim"]
    yield Entry(f"{target}.linear_wq_b.weight", (whole(f"{source}.wq_b.weight", heads * dim),), (hf["q_lora_rank"],))
    yield Entry(f"{target}.linear_wk.weight", (whole(f"{source}.wk.weight", dim),), (hidden,))
    yield Entry(f"{target}.k_norm.weight", (whole(f"{source}.k_norm.weight", dim),))
    yield Entry(f"{target}.k_norm.bias", (whole(f"{source}.k_norm.bias", dim),))
    yield Entry(f"{target}.linear_weights_proj.weight", (whole(f"{source}.weights_proj.weight", heads),), (hidden,))


def _mixture(hf: dict, source: str, target: str) -> Iterator[Entry]:
    hidden, ffn, experts = hf["hidden_size"], hf["moe_intermediate_size"], hf["n_routed_experts"]
    yield Entry(f"{target}.router.weight", (whole(f"{source}.gate.weight", experts),), (hidden,))
    yield Entry(f"{target}.router.expert_bias", (whole(f"{source}.gate.e_score_correction_bias", experts),))
    for expert in range(experts):
        yield from mlp_entries(
            f"{source}.experts.{expert}", f"{target}.experts.local_experts.{expert}", hidden, ffn, expert=expert
        )
    yield from mlp_entries(f"{source}.shared_experts", f"{target}.shared_experts", hidden, ffn * hf["n_shared_experts"])


def layer_entries(hf: dict, layer_idx: int) -> Iterator[Entry]:
    """The tensors of one layer, counted from 0."""
    hidden = hf["hidden_size"]
    source, target = f"model.layers.{layer_idx}", f"decoder.layers.{layer_idx}"
    yield Entry(f"{target}.input_layernorm.weight", (whole(f"{source}.input_layernorm.weight", hidden),))
    yield from _latent_attention(hf, f"{source}.self_attn", f"{target}.self_attention")
    if indexer_types(hf)[layer_idx] == "full":
        yield from _indexer(hf, f"{source}.self_attn.indexer", f"{target}.self_attention.core_attention.indexer")
    norm = whole(f"{source}.post_attention_layernorm.weight", hidden)
    if mlp_types(hf)[layer_idx] == "sparse":
        yield Entry(f"{target}.pre_mlp_layernorm.weight", (norm,))
        yield from _mixture(hf, f"{source}.mlp", f"{target}.mlp")
    else:
        yield Entry(f"{target}.mlp.linear_fc1.layer_norm_weight", (norm,))
        yield from mlp_entries(f"{source}.mlp", f"{target}.mlp", hidden, hf["intermediate_size"])
