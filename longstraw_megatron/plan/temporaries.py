"""What lives for a moment beside the graph: blocks of scores, gathered rows, gradients on their way, buffers.

Bytes of one rank. `rows` are those of a segment's shard, `prefix_rows` those of the prefix that the rank holds.
"""

import torch

from longstraw_megatron.functional.sparse_attention import MAX_ELEMENTS
from longstraw_megatron.layout.transfer import TransferShape, buffer_bytes, choose_transfer
from longstraw_megatron.layout.travel import TravelShape, choose_travel, travel_buffers
from longstraw_megatron.ops.delta_rule import default_tiling
from longstraw_megatron.plan.activations import FLOAT32, Shape
from longstraw_megatron.segments.index_selection import KEY_BLOCK, MAX_SCORES

DELTA_ARRAYS = 7  # of a block of chunks that live at once in the delta rule's backward
FLA_ROW = 12  # of a value head, in head dims: what FLA's backward makes besides what it got


def index_scores(shape: Shape, rows: int, prefix_rows: int) -> int:
    """A block of the indexer's scores by head, their sum, and the index queries before and behind their rotation."""
    heads, dim = shape.hf["index_n_heads"], shape.hf["index_head_dim"]
    own, prefix_rows = -(-rows // shape.parallel.tp), -(-prefix_rows // shape.parallel.tp)
    keys = min(KEY_BLOCK, max(own, prefix_rows))
    queries = min(own, max(1, MAX_SCORES // (heads * keys)))
    return FLOAT32 * queries * keys * (heads + 1) + 2 * rows * heads * dim * shape.itemsize


def sparse_gather(shape: Shape, rows: int, prefix_rows: int, *, backward: bool) -> int:
    """A block of gathered latents with its scores; in backward the gradients of both."""
    hf, heads = shape.hf, shape.over_tp(shape.hf["num_attention_heads"])
    selected = min(hf["index_topk"], rows + prefix_rows)
    queries = min(rows, max(1, MAX_ELEMENTS // (selected * max(heads, shape.latent))))
    gathered, scores = queries * selected * shape.latent, queries * selected * heads
    if not backward:
        return gathered * shape.itemsize + 2 * scores * FLOAT32
    values = queries * selected * hf["kv_lora_rank"]
    return gathered * (shape.itemsize + FLOAT32) + (3 * scores + values) * FLOAT32


def softmax_backward(shape: Shape, rows: int, page_rows: int) -> int:
    """Gradients of q, and of the keys of one page; a GPU's kernel makes the latter for every query head."""
    hf = shape.hf
    queries = shape.over_tp(hf["num_attention_heads"]) * hf["head_dim"]
    keys = shape.key_value_heads * hf["head_dim"]
    page = 2 * page_rows * (keys + (queries if shape.fused and queries > keys else 0)) * shape.itemsize
    return 2 * rows * queries * shape.float_itemsize + page


def delta_backward(shape: Shape, rows: int) -> int:
    """A block of chunks, and the gradients of q, k and v."""
    hf = shape.hf
    heads = shape.over_tp(hf["linear_num_value_heads"])
    keys, values = hf["linear_key_head_dim"], hf["linear_value_head_dim"]
    if shape.fused:
        return rows * heads * FLA_ROW * max(keys, values) * shape.itemsize
    tiling = default_tiling(torch.device("cpu"), keys + values)
    block = min(rows * heads * (tiling.chunk_size + keys + values), tiling.block_elements)
    return DELTA_ARRAYS * block * shape.float_itemsize + rows * heads * (2 * keys + values) * shape.itemsize


def mlp_backward(shape: Shape, kind: str, rows: int) -> int:
    """Gradients of an MLP's intermediates, and of its largest weight."""
    hf, split = shape.hf, shape.parallel.tp if shape.parallel.sp else 1
    if kind == "dense":
        size, width = shape.over_tp(hf["intermediate_size"]), rows * shape.itemsize
        return width * (4 * size + shape.hidden) + 2 * size * shape.hidden * shape.itemsize
    size = hf["moe_intermediate_size"] // shape.parallel.etp
    routed = rows * hf["num_experts_per_tok"] // split
    copies = 4 if shape.parallel.ep > 1 or shape.fused else 2  # permuted, travelled, sorted
    return routed * (copies * shape.hidden + 4 * size) * shape.itemsize + 2 * size * shape.hidden * shape.itemsize


def attention_call(shape: Shape, rows: int, prefix_rows: int, *, exact: bool) -> TransferShape:
    """What softmax attention moves over context parallelism."""
    hf = shape.hf
    return TransferShape(
        cp_size=shape.parallel.cp,
        rows=rows,
        prefix_rows=prefix_rows,
        num_heads=shape.over_tp(hf["num_attention_heads"]),
        num_key_heads=shape.key_value_heads,
        head_dim=hf["head_dim"],
        itemsize=shape.itemsize,
        sum_itemsize=shape.float_itemsize,
        prefix_grad=exact,
    )


def attention_buffers(shape: Shape, rows: int, prefix_rows: int, *, exact: bool, backward: bool) -> int:
    """Buffers of that, in the form that the layer chooses."""
    if shape.parallel.cp == 1:
        return 0
    call = attention_call(shape, rows, prefix_rows, exact=exact)
    return buffer_bytes(choose_transfer(call, backward=backward), call, backward=backward)


def sparse_travel(shape: Shape, rows: int, prefix_rows: int, *, exact: bool, backward: bool) -> TravelShape:
    """What sparse attention moves over the owners of tokens, as `segments.sparse_attention` counts it."""
    hf, heads = shape.hf, shape.over_tp(shape.hf["num_attention_heads"])
    lse, out = rows * heads * shape.float_itemsize, rows * heads * hf["kv_lora_rank"]
    queries = rows * heads * shape.latent
    static = queries * shape.itemsize + rows * hf["index_topk"] * 4
    static += 2 * out * shape.itemsize + lse if backward else 0
    own, prefix_rows = -(-rows // shape.parallel.tp), -(-prefix_rows // shape.parallel.tp)
    grad_rows = own + (prefix_rows if exact else 0)
    return TravelShape(
        cp_size=shape.parallel.cp * shape.parallel.tp,
        static=static,
        running=queries * shape.float_itemsize if backward else out * shape.float_itemsize + lse,
        keys=(own + prefix_rows) * shape.latent * shape.itemsize,
        key_grads=grad_rows * shape.latent * shape.float_itemsize if backward else 0,
    )


def index_travel(shape: Shape, rows: int, prefix_rows: int) -> TravelShape:
    """What the index selection moves."""
    hf = shape.hf
    heads, dim = hf["index_n_heads"], hf["index_head_dim"]
    rows, prefix_rows = -(-rows // shape.parallel.tp), -(-prefix_rows // shape.parallel.tp)
    return TravelShape(
        cp_size=shape.parallel.cp * shape.parallel.tp,
        static=rows * heads * (dim + 1) * shape.itemsize,
        running=rows * hf["index_topk"] * 8,
        keys=(rows + prefix_rows) * dim * shape.itemsize,
    )


def travel_buffer(shape: TravelShape) -> int:
    return travel_buffers(choose_travel(shape), shape) if shape.cp_size > 1 else 0
