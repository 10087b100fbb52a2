"""The dense MLP and the shared experts (K3.md §3, §7)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port.activation import GatedActivation
from port.linear import Linear


class GatedMLP(nn.Module):
    """``W_down activation(W_gate x, W_up x)``; x [..., hidden] -> [..., hidden]."""

    def __init__(self, hidden: int, width: int, activation: GatedActivation) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width)
        self.up_proj = Linear(hidden, width)
        self.down_proj = Linear(width, hidden)
        self.activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))
