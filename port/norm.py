"""RMSNorm (K3.md §3)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port.linear import unset, wide


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """``x · rsqrt(mean(x²) + eps)`` over the last axis in float32, cast to x's dtype, then times weight (§3).

    x [..., dim], weight [dim] -> [..., dim] in x's dtype.
    """
    exact = wide(x)
    normalized = exact * mx.rsqrt(mx.mean(mx.square(exact), axis=-1, keepdims=True) + eps)
    return (normalized.astype(x.dtype) * weight).astype(x.dtype)


class RMSNorm(nn.Module):
    """``rms_norm`` with its ``weight`` [dim]."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = unset(dim), eps

    def __call__(self, x: mx.array) -> mx.array:
        return rms_norm(x, self.weight, self.eps)
