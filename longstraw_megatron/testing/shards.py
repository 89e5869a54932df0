"""Whole tensors from the shards of any layout, by Megatron's own sharded state dict.

A rank tells its pieces (`local_pieces`); `assemble` puts those of all ranks together and demands that replicas agree;
`load_whole` cuts whole tensors into another layout's weights. Names are those of Megatron's distributed checkpoints.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

Cut = tuple[int | slice, ...]


@dataclass(frozen=True)
class Piece:
    """One shard of the whole tensor `name` of `shape`: what lies at `whole[cut]`."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    tensor: Tensor


def gradient_of(parameter: Tensor) -> Tensor | None:
    """What the optimizer will use: Megatron's `main_grad`, else `grad`."""
    return getattr(parameter, "main_grad", None) if hasattr(parameter, "main_grad") else parameter.grad


def value_of(tensor: Tensor) -> Tensor:
    """The weight or buffer itself, sharing its memory."""
    return tensor.detach()


def local_pieces(chunks: Sequence[nn.Module], take: Callable[[Tensor], Tensor | None] = value_of) -> list[Piece]:
    """This rank's pieces of `take(parameter)`; parameters of which `take` gives None are left out."""
    pieces = []
    for chunk in chunks:
        chunk = getattr(chunk, "module", chunk)
        for entry in nested_values(chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})):
            if isinstance(entry, ShardedObject):
                continue
            value = take(entry.data)
            if value is not None:
                pieces += [
                    Piece(shard.key, tuple(shard.global_shape), shard.global_slice(), shard.data)
                    for shard in _shards(entry, value)
                ]
    return pieces


def _shards(entry: ShardedTensor | ShardedTensorFactory, value: Tensor) -> Iterable[ShardedTensor]:
    """The shards of `value` in the place of `entry.data`; a fused weight has several."""
    if isinstance(entry, ShardedTensorFactory):
        return nested_values(replace(entry, data=value).build())
    return [replace(entry, data=value, dtype=value.dtype)]


def assemble(pieces_of_ranks: Iterable[Sequence[Piece]], *, replica_error: float = 0.0) -> dict[str, Tensor]:
    """Whole tensors by name, float64, from the pieces of all ranks.

    Raises:
        AssertionError: replicas differ by more than `replica_error` (relative L2), or a tensor is not covered.
    """
    whole: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    for rank, pieces in enumerate(pieces_of_ranks):
        for piece in pieces:
            if piece.name not in whole:
                whole[piece.name] = torch.zeros(piece.shape, dtype=torch.float64)
                covered[piece.name] = torch.zeros(piece.shape, dtype=torch.bool)
            new, old = piece.tensor.double(), whole[piece.name][piece.cut]
            seen = covered[piece.name][piece.cut]
            distance = torch.linalg.vector_norm((new - old)[seen])
            if not distance <= replica_error * torch.linalg.vector_norm(old[seen]):
                raise AssertionError(
                    f"{piece.name}: rank {rank} differs from another rank's replica by {distance:.2e}."
                )
            whole[piece.name][piece.cut] = torch.where(seen, old, new)
            covered[piece.name][piece.cut] = True
    holes = [name for name, mask in covered.items() if not mask.all()]
    if holes:
        raise AssertionError(f"No rank has a part of {holes}.")
    return whole


@torch.no_grad()
def load_whole(chunks: Sequence[nn.Module], whole: Mapping[str, Tensor]) -> None:
    """Copy this rank's shards of whole weights and buffers into the model."""
    for piece in local_pieces(chunks):
        piece.tensor.copy_(whole[piece.name][piece.cut])
