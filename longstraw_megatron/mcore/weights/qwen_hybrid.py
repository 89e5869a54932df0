"""Where Megatron's tensors of a Qwen hybrid lie in Hugging Face's (names as in Qwen3_5ForCausalLM)."""

from collections.abc import Iterator
from itertools import pairwise

from longstraw_megatron.mcore.architectures.qwen_hybrid import layer_types
from longstraw_megatron.mcore.weights.entry import Entry, Span, whole

CARRIED_OVER = ("mtp.", "model.mtp.", "model.visual.")  # of the checkpoint, not of the trained model


def _delta_net(hf: dict, source: str, target: str) -> Iterator[Entry]:
    hidden = hf["hidden_size"]
    keys = hf["linear_num_key_heads"] * hf["linear_key_head_dim"]
    heads = hf["linear_num_value_heads"]
    values = heads * hf["linear_value_head_dim"]
    bounds = (0, keys, 2 * keys, 2 * keys + values)

    def q_k_v(name: str) -> tuple[tuple[Span, ...], ...]:
        return tuple((Span(name, start, stop),) for start, stop in pairwise(bounds))

    in_proj = (
        *q_k_v(f"{source}.in_proj_qkv.weight"),
        whole(f"{source}.in_proj_z.weight", values),
        whole(f"{source}.in_proj_b.weight", heads),
        whole(f"{source}.in_proj_a.weight", heads),
    )
    yield Entry(f"{target}.in_proj.weight", in_proj, (hidden,), "rows")
    yield Entry(f"{target}.conv1d.weight", q_k_v(f"{source}.conv1d.weight"), (1, hf["linear_conv_kernel_dim"]), "rows")
    yield Entry(f"{target}.A_log", (whole(f"{source}.A_log", heads),), (), "rows")
    yield Entry(f"{target}.dt_bias", (whole(f"{source}.dt_bias", heads),), (), "rows")
    # Hugging Face scales by w here, Megatron by 1 + w as in every other norm
    norm = whole(f"{source}.norm.weight", hf["linear_value_head_dim"])
    yield Entry(f"{target}.out_norm.weight", (norm,), offset=-1.0)
    yield Entry(f"{target}.out_proj.weight", (whole(f"{source}.out_proj.weight", hidden),), (values,), "columns")


def _gated_attention(hf: dict, source: str, target: str) -> Iterator[Entry]:
    """Hugging Face's q_proj has [query, gate] for each head; Megatron has, for each key-value group, its queries, its
    gates, its key and its value."""
    hidden, dim = hf["hidden_size"], hf["head_dim"]
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    qkv = []
    for group in range(groups):
        of_group = range(group * heads // groups, (group + 1) * heads // groups)
        for part in (0, 1):  # query, gate
            starts = ((2 * head + part) * dim for head in of_group)
            qkv += [Span(f"{source}.q_proj.weight", start, start + dim) for start in starts]
        qkv += [Span(f"{source}.{name}.weight", group * dim, (group + 1) * dim) for name in ("k_proj", "v_proj")]
    yield Entry(f"{target}.linear_qkv.weight", (tuple(qkv),), (hidden,), "rows")
    yield Entry(f"{target}.linear_proj.weight", (whole(f"{source}.o_proj.weight", hidden),), (heads * dim,), "columns")
    yield Entry(f"{target}.q_layernorm.weight", (whole(f"{source}.q_norm.weight", dim),))
    yield Entry(f"{target}.k_layernorm.weight", (whole(f"{source}.k_norm.weight", dim),))


def layer_entries(hf: dict, layer_idx: int) -> Iterator[Entry]:
    """The tensors of one layer, counted from 0."""
    hidden, ffn = hf["hidden_size"], hf["intermediate_size"]
    source, target = f"model.layers.{layer_idx}", f"decoder.layers.{layer_idx}"
    linear = layer_types(hf)[layer_idx] == "linear_attention"
    first = "in_proj" if linear else "linear_qkv"
    norm = whole(f"{source}.input_layernorm.weight", hidden)
    yield Entry(f"{target}.self_attention.{first}.layer_norm_weight", (norm,))
    if linear:
        yield from _delta_net(hf, f"{source}.linear_attn", f"{target}.self_attention")
    else:
        yield from _gated_attention(hf, f"{source}.self_attn", f"{target}.self_attention")
    norm = whole(f"{source}.post_attention_layernorm.weight", hidden)
    yield Entry(f"{target}.mlp.linear_fc1.layer_norm_weight", (norm,))
    yield from mlp_entries(f"{source}.mlp", f"{target}.mlp", hidden, ffn)


def mlp_entries(source: str, target: str, hidden: int, ffn: int, *, expert: int | None = None) -> Iterator[Entry]:
    """A gated MLP: gate above up, each cut over tensor parallelism by itself."""
    gate_up = (whole(f"{source}.gate_proj.weight", ffn), whole(f"{source}.up_proj.weight", ffn))
    yield Entry(f"{target}.linear_fc1.weight", gate_up, (hidden,), "rows", expert)
    yield Entry(
        f"{target}.linear_fc2.weight", (whole(f"{source}.down_proj.weight", hidden),), (ffn,), "columns", expert
    )
