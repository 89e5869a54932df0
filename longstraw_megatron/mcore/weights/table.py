"""The table of a whole model: every Megatron tensor with its `Entry`, for either architecture."""

from longstraw_megatron.mcore.architectures import architecture_of
from longstraw_megatron.mcore.architectures import glm_dsa as glm_architecture
from longstraw_megatron.mcore.weights import glm_dsa, qwen_hybrid
from longstraw_megatron.mcore.weights.entry import Entry, whole

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
ROUTER_BIAS = ".mlp.router.expert_bias"  # a buffer; every other entry is a parameter


def is_tied(hf: dict) -> bool:
    """Whether the output layer is the embedding."""
    return bool(hf.get("tie_word_embeddings", False))


def entries_of(hf: dict) -> dict[str, Entry]:
    """Megatron's name in the unsharded model -> its entry, in the order of the model.

    Names are those of the layer specs that Transformer Engine and our CPU runtime build: norms that come before a
    projection belong to it. `hf` is a text config that `architectures` has checked.
    """
    layers = glm_dsa if architecture_of(hf) is glm_architecture else qwen_hybrid
    vocab, hidden = hf["vocab_size"], hf["hidden_size"]
    entries = [Entry("embedding.word_embeddings.weight", (whole(EMBEDDING, vocab),), (hidden,), "rows")]
    for layer_idx in range(hf["num_hidden_layers"]):
        entries += layers.layer_entries(hf, layer_idx)
    entries.append(Entry("decoder.final_layernorm.weight", (whole("model.norm.weight", hidden),)))
    head = EMBEDDING if is_tied(hf) else LM_HEAD
    entries.append(Entry("output_layer.weight", (whole(head, vocab),), (hidden,), "rows", duplicate=is_tied(hf)))
    return {entry.megatron: entry for entry in entries}


def carried_over(hf: dict) -> tuple[str, ...]:
    """Prefixes of the tensors that a checkpoint has besides the trained model: multi-token prediction and vision."""
    if architecture_of(hf) is not glm_architecture:
        return qwen_hybrid.CARRIED_OVER
    num_layers = hf["num_hidden_layers"]
    return tuple(f"model.layers.{num_layers + i}." for i in range(hf.get("num_nextn_predict_layers") or 1))


def is_zero_centred(hf: dict) -> bool:
    """Whether the layer norms of the Hugging Face model multiply by 1 + weight."""
    return architecture_of(hf) is not glm_architecture
