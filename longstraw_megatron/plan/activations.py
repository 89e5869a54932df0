"""What a layer's forward leaves to its backward, and what lives beside it while an operation runs.

Counted from the code, tensor by tensor, in elements of each row; tests hold the counts to what real layers keep. Two
sets of kernels: "torch" (a CPU: norms and activations keep their intermediates) and "fused" (a GPU). Everything is
counted as if it trained: what frozen weights let go of (their inputs) makes a plan an upper bound.
"""

from dataclasses import dataclass

from longstraw_megatron.config import ParallelConfig

FLOAT32 = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of one rank's share of the model, from a text config and the layout."""

    hf: dict
    parallel: ParallelConfig
    itemsize: int  # bytes of an activation
    fused: bool

    @property
    def hidden(self) -> int:
        return self.hf["hidden_size"]

    @property
    def float_itemsize(self) -> int:
        return max(self.itemsize, FLOAT32)

    def over_tp(self, size: int) -> int:
        return size // self.parallel.tp

    @property
    def key_value_heads(self) -> int:
        return max(1, self.hf["num_key_value_heads"] // self.parallel.tp)

    @property
    def delta_channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        hf = self.hf
        keys = hf["linear_num_key_heads"] * hf["linear_key_head_dim"]
        return self.over_tp(2 * keys + hf["linear_num_value_heads"] * hf["linear_value_head_dim"])

    @property
    def relays(self) -> bool:
        """Whether tokens stay and the state travels: context parallelism does not divide the delta rule's heads."""
        return self.parallel.cp > 1 and self.over_tp(self.hf["linear_num_key_heads"]) % self.parallel.cp != 0

    @property
    def latent(self) -> int:
        return self.hf["kv_lora_rank"] + self.hf["qk_rope_head_dim"]


@dataclass(frozen=True)
class Elements:
    """Elements of a row: `low` in the activations' dtype, `high` in float32 at least; `split` ones belong to the rows
    that sequence parallelism cuts."""

    low: int = 0
    high: int = 0
    split: int = 0
    split_high: int = 0

    def nbytes(self, shape: Shape, rows: int) -> int:
        parts = shape.parallel.tp if shape.parallel.sp else 1
        whole = self.low * shape.itemsize + self.high * shape.float_itemsize
        cut = self.split * shape.itemsize + self.split_high * shape.float_itemsize
        return rows * whole + rows * cut // parts


def _norm(shape: Shape, size: int) -> int:
    return size if shape.fused else 2 * size


def _mlp(shape: Shape, size: int) -> Elements:
    """Gate and up, the activated gate, their product; the norm before and the sum behind."""
    return Elements(low=4 * size, split=_norm(shape, shape.hidden) + shape.hidden)


def _delta(shape: Shape) -> Elements:
    hf, channels = shape.hf, shape.delta_channels
    heads = shape.over_tp(hf["linear_num_value_heads"])
    keys, values = heads * hf["linear_key_head_dim"], heads * hf["linear_value_head_dim"]
    own_keys = shape.over_tp(hf["linear_num_key_heads"]) * hf["linear_key_head_dim"]
    low = channels + values + 2 * heads  # the projection
    low += 3 * channels + 2 * keys + values  # behind the tail, convolved, activated; q and k for every head; out
    low += _norm(shape, values) + values  # the norm of out, and the gated product
    high = 4 * heads + values  # gates, the activated output gate
    if shape.itemsize < FLOAT32:
        high += 2 * own_keys + values  # float32 copies of q, k and of the output gate
    if shape.fused:
        low += 64 * heads  # FLA's A [T, heads, 64]
    return Elements(low, high, _norm(shape, shape.hidden) + shape.hidden)


def _softmax(shape: Shape) -> Elements:
    hf = shape.hf
    queries = shape.over_tp(hf["num_attention_heads"]) * hf["head_dim"]
    keys = shape.key_value_heads * hf["head_dim"]
    low = 2 * queries + 2 * keys  # the projection
    low += _norm(shape, queries + keys) + queries + keys  # norms of q and k, rotated
    low += keys + 2 * queries  # v, out, out times the gate
    return Elements(low, queries + shape.over_tp(hf["num_attention_heads"]), _norm(shape, shape.hidden) + shape.hidden)


def _latent(shape: Shape, attention: str) -> Elements:
    hf, heads = shape.hf, shape.over_tp(shape.hf["num_attention_heads"])
    split = _norm(shape, shape.hidden) + hf["q_lora_rank"] + _norm(shape, hf["q_lora_rank"]) + shape.hidden
    low = heads * (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])  # q
    low += shape.latent + _norm(shape, hf["kv_lora_rank"]) + shape.latent  # latents, and the key made of them
    low += heads * (hf["kv_lora_rank"] + shape.latent + hf["qk_rope_head_dim"])  # absorbed, rotated, joined
    low += heads * hf["v_head_dim"]
    selection = hf["index_topk"] if attention == "full" else 0  # int32
    high = heads * (hf["kv_lora_rank"] + 1)  # out and lse
    return Elements(low + selection * 4 // shape.itemsize, high, split)


def _mixture(shape: Shape) -> Elements:
    """The router's scores, routed rows as an expert takes and makes them, and the shared expert."""
    hf = shape.hf
    size = hf["moe_intermediate_size"] // shape.parallel.etp
    shared = shape.over_tp(hf["moe_intermediate_size"] * hf["n_shared_experts"])
    routed = hf["num_experts_per_tok"] * (shape.hidden + 4 * size)
    split = _norm(shape, shape.hidden) + shape.hidden + routed
    return Elements(low=4 * shared, split=split, split_high=8 * hf["n_routed_experts"])


def layer_graph(shape: Shape, kind: tuple[str, str]) -> tuple[Elements, Elements]:
    """What attention and MLP of a layer (`parameters.layer_kinds`) keep for backward."""
    attention = {"delta": _delta, "softmax": _softmax}.get(kind[0])
    first = attention(shape) if attention is not None else _latent(shape, kind[0])
    if kind[1] == "sparse":
        return first, _mixture(shape)
    return first, _mlp(shape, shape.over_tp(shape.hf["intermediate_size"]))
