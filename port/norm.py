"""RMSNorm (K3.md §3)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port.linear import row_sum, unset, wide


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """``x · rsqrt(mean(x²) + eps)`` over the last axis, cast to x's dtype, then times ``weight``.

    x [..., dim], weight [dim] -> [..., dim] in x's dtype. The mean square is taken in float32.
    """
    # Not mx.fast.rms_norm: it rounds a bfloat16 result once, after the weight, where the definition rounds twice.
    x_wide = wide(x)
    mean_square = row_sum(mx.square(x_wide))[..., None] / x.shape[-1]
    return (x_wide * mx.rsqrt(mean_square + eps)).astype(x.dtype) * weight


class RMSNorm(nn.Module):
    """``rms_norm`` with its ``weight`` [dim]; every use names its ``eps``, since K3 has two of them."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = unset(dim)
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return rms_norm(x, self.weight, self.eps)
