"""Dtypes, unset parameters and the linear map that every module uses (K3.md §2: no biases anywhere)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
"""The dtypes that a model of this port may have, by name."""


def wide(x: mx.array) -> mx.array:
    """``x`` in float32, the dtype in which the specification asks for sums, gates and states."""
    return x.astype(mx.float32)


def unset(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """A parameter that nothing has been loaded into: NaN, so that a forgotten load cannot look like a result."""
    return mx.full(shape, float("nan"), dtype=dtype)


class Linear(nn.Module):
    """``y = x Wᵀ`` with ``weight`` [out_features, in_features]; x [..., in_features] -> [..., out_features]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = unset(out_features, in_features)

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.weight.T
