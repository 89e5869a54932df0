"""Random weights drawn tensor by tensor from (seed, Hugging Face name), so that they are alike in every layout."""

import hashlib
import math
from collections.abc import Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from longstraw_megatron.mcore.architectures import text_config
from longstraw_megatron.mcore.weights.names import named_weights, tp_of
from longstraw_megatron.mcore.weights.table import entries_of, is_zero_centred


def draw(name: str, shape: tuple[int, ...], *, seed: int, std: float, zero_centred: bool) -> Tensor:
    """One Hugging Face tensor at its usual initialisation, float32 on the CPU.

    Matrices are normal with `std`; norm weights are 1 (0 where the model adds 1); biases 0; the delta rule's A_log is
    log U(1, 16), its dt_bias 1 and its convolution U(-1/sqrt(W), 1/sqrt(W)), as in transformers' Qwen3.5.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(1, 16, generator=generator).log_()
    if name.endswith("dt_bias"):
        return torch.ones(shape)
    if name.endswith("conv1d.weight"):
        bound = 1 / math.sqrt(shape[-1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        is_gated_norm = name.endswith("linear_attn.norm.weight")
        return torch.zeros(shape) if zero_centred and not is_gated_norm else torch.ones(shape)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@torch.no_grad()
def init_random_weights(
    model_chunks: Sequence[nn.Module], hf_config: dict, *, seed: int, groups: ProcessGroupCollection
) -> None:
    """Fill every parameter of this rank. A rank draws one whole tensor at a time and keeps its own part."""
    hf = text_config(hf_config)
    std, zero_centred = float(hf.get("initializer_range", 0.02)), is_zero_centred(hf)
    entries = entries_of(hf)
    for weight in named_weights(model_chunks, entries, groups):
        tp_rank, tp_size = tp_of(weight.entry, groups)
        shapes = weight.entry.source_shapes()
        drawn: dict[str, Tensor] = {}

        def read(source: str, rows: slice, columns: slice | None, shapes=shapes, drawn=drawn) -> Tensor:
            if source not in drawn:
                drawn.clear()
                drawn[source] = draw(source, shapes[source], seed=seed, std=std, zero_centred=zero_centred)
            part = drawn[source][rows]
            return part if columns is None else part[:, columns]

        weight.entry.fill(weight.tensor.data, read, tp_rank=tp_rank, tp_size=tp_size)
