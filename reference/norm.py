"""RMSNorm (K3.md §3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reference.linear import unset, wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x · rsqrt(mean(x²) + eps)`` over the last axis, cast to x's dtype, then times ``weight``.

    x [..., dim], weight [dim] -> [..., dim] in x's dtype. The mean square is taken in float32.
    """
    x_wide = wide(x)
    mean_square = x_wide.square().mean(-1, keepdim=True)
    return (x_wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight


class RMSNorm(nn.Module):
    """``rms_norm`` with its ``weight`` [dim]; every use names its ``eps``, since K3 has two of them."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = unset(dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
