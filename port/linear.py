"""What every module is made of: unset parameters, linear maps without bias, and the wide dtype (K3.md §2, §3)."""

from __future__ import annotations

from math import gcd

import mlx.core as mx
import mlx.nn as nn

SUM_BLOCK = 256
"""Terms that are added up one after the other."""


def wide(x: mx.array) -> mx.array:
    """``x`` in float32, the dtype in which the specification asks for sums, gates and states."""
    return x.astype(mx.float32)


def row_sum(x: mx.array) -> mx.array:
    """Sum over the last axis, which goes: [..., n] -> [...].

    On the CPU ``mx.sum`` adds a row up term by term: over the 7168 channels of K3 that is 1.3e-6 off, where blocks of
    256 and then the blocks' sums are 7e-8 off.
    """
    block = gcd(x.shape[-1], SUM_BLOCK)
    return mx.sum(mx.sum(x.reshape(*x.shape[:-1], -1, block), axis=-1), axis=-1)


def unset(*shape: int) -> mx.array:
    """A parameter of NaN: a tensor that was never loaded shows in every output it touches."""
    return mx.full(shape, mx.nan)


class Linear(nn.Module):
    """``y = W x`` without bias; ``weight`` [out, in]. No linear map of K3 has a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = unset(out_features, in_features)

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] -> [..., out], in x's dtype; MLX sums a bfloat16 product in float32 and rounds once."""
        return x @ self.weight.T


class StackedLinear(nn.Module):
    """``y = W x``, each row with the matrix of its own expert; ``weight`` [E, out, in]."""

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = unset(experts, out_features, in_features)

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x [N, 1 or k, in], chosen [N, k] < E -> [N, k, out], in x's dtype."""
        # MLX's CPU has gather_mm in float32 only; its sums are the ones that a bfloat16 product should have anyway.
        matrices = wide(self.weight).swapaxes(-1, -2)
        y = mx.gather_mm(wide(x)[..., None, :], matrices, rhs_indices=chosen.astype(mx.uint32))
        return y[..., 0, :].astype(x.dtype)


class Embedding(nn.Module):
    """One row of ``weight`` [vocab, dim] per token id."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.weight = unset(vocab, dim)

    def __call__(self, input_ids: mx.array) -> mx.array:
        """int [B, T] -> [B, T, dim]; the ids must have been checked: MLX reads past the table without a word."""
        return self.weight[input_ids]
