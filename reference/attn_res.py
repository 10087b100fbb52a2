"""Attention residuals: what takes the place of the residual stream (K3.md §6)."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.linear import wide


def mix_weights(sources: Tensor, norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """How much of each source goes into the mix: softmax over the sources of ``Σ RMSNorm(v)·w_norm·w_proj``.

    sources [S, B, T, hidden], norm_weight [hidden], proj_weight [1, hidden] -> [S, B, T], in float32.
    """
    v = wide(sources)
    normalized = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    scores = (normalized * (wide(norm_weight) * wide(proj_weight[0]))).sum(-1)
    return torch.softmax(scores, dim=0)


def mix(prefix_sum: Tensor, blocks: list[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """The weighted sum of the un-normalised sources ``[*blocks, prefix_sum]``, cast to prefix_sum's dtype.

    prefix_sum and each block [B, T, hidden] -> [B, T, hidden].
    """
    sources = torch.stack([*blocks, prefix_sum])
    weights = mix_weights(sources, norm_weight, proj_weight, eps)
    return (weights[..., None] * wide(sources)).sum(0).to(prefix_sum.dtype)


def starts_block(layer: int, block_size: int) -> bool:
    """Whether the 0-based ``layer`` appends the prefix sum to the blocks and begins a new one."""
    return layer % block_size == 0
