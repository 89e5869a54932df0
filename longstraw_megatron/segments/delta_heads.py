"""Shapes of the gated delta rule: channels to heads, sequences to a padded batch.

Letters: L tokens, C channels, H value heads, K and V head dims, B sequences. Numbers are local to the
tensor-parallel rank.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DeltaShape:
    """Heads and dims of one layer on one tensor-parallel rank; channels are [q | k | v]."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channel_splits(self) -> tuple[int, int, int]:
        key_channels = self.num_key_heads * self.key_dim
        return key_channels, key_channels, self.num_value_heads * self.value_dim

    def divided(self, parts: int) -> "DeltaShape":
        return DeltaShape(self.num_key_heads // parts, self.num_value_heads // parts, self.key_dim, self.value_dim)


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def heads_of(mixed: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """mixed [B, L, C] after the convolution -> q, k [B, L, H, K] and v [B, L, H, V].

    q and k are normalised in float32, as fla's kernel does, and repeated over the value heads that share them.
    """
    query, key, value = mixed.split(shape.channel_splits, dim=-1)
    repeat = shape.num_value_heads // shape.num_key_heads

    def normalised(x: Tensor) -> Tensor:
        heads = at_least_float32(x.unflatten(-1, (shape.num_key_heads, shape.key_dim)))
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
        return heads.to(x.dtype).repeat_interleave(repeat, dim=-2)

    return normalised(query), normalised(key), value.unflatten(-1, (shape.num_value_heads, shape.value_dim))


def pack(tokens: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """tokens [L, ...] of sequences one after the other -> [B, longest, ...], zeros behind the shorter ones."""
    if len(lengths) == 1:
        return tokens[None]
    longest = max(lengths)
    return torch.stack([F.pad(x, (0, 0) * (x.dim() - 1) + (0, longest - x.shape[0])) for x in tokens.split(lengths)])


def unpack(batch: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Inverse of `pack`."""
    if len(lengths) == 1:
        return batch[0]
    return torch.cat([row[:length] for row, length in zip(batch, lengths, strict=True)])
