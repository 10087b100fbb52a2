"""Attention residuals: what stands in for the residual stream (K3.md §6)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from port.linear import row_sum, wide


def mix_weights(sources: mx.array, norm_weight: mx.array, proj_weight: mx.array, eps: float) -> mx.array:
    """Softmax over the sources of ``sum(RMSNorm(v) · w_norm · w_proj)``, all in float32 (§6).

    sources [n, ..., hidden], norm_weight [hidden], proj_weight [1, hidden] -> [n, ...] float32, summing to 1 over n.
    """
    v = wide(sources)
    normalized = v * mx.rsqrt(row_sum(mx.square(v))[..., None] / v.shape[-1] + eps)
    scores = row_sum(normalized * (wide(norm_weight) * wide(proj_weight)[0]))
    return mx.softmax(scores, axis=0)


def mix(
    prefix_sum: mx.array,
    blocks: Sequence[mx.array] | mx.array,
    norm_weight: mx.array,
    proj_weight: mx.array,
    eps: float,
) -> mx.array:
    """The weighted sum of the un-normalised sources ``[b_0 … b_n, p]``, cast to p's dtype (§6).

    prefix_sum [..., hidden], each of ``blocks`` likewise -> [..., hidden].
    """
    sources = mx.stack([*blocks, prefix_sum])
    weights = mix_weights(sources, norm_weight, proj_weight, eps)
    return mx.sum(weights[..., None] * wide(sources), axis=0).astype(prefix_sum.dtype)


def starts_block(layer: int, block_size: int) -> bool:
    """Whether the 0-based ``layer`` appends the prefix sum to the blocks and starts a new one (§6, step 2)."""
    return layer % block_size == 0
