"""What every module is made of: unset parameters, linear maps without bias, and the wide dtype (K3.md §2, §3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype that the specification calls "float32": float64 stays float64, all else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def unset(*shape: int) -> nn.Parameter:
    """A parameter of NaN, without gradient: a tensor that was never loaded shows in every output it touches."""
    return nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)


class Linear(nn.Module):
    """``y = W x`` without bias; ``weight`` [out, in]. No linear map of K3 has a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = unset(out_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in x's dtype."""
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """One row of ``weight`` [vocab, dim] per token id."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.weight = unset(vocab, dim)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int [B, T] -> [B, T, dim]."""
        return F.embedding(input_ids.long(), self.weight)
