"""The gated MLP: the dense layers' and the shared experts' (K3.md §3, §7)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from port.linear import Linear


class GatedMLP(nn.Module):
    """``W_down activation(W_gate x, W_up x)``."""

    def __init__(self, hidden: int, width: int, activation: Callable[[mx.array, mx.array], mx.array]) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width)
        self.up_proj = Linear(hidden, width)
        self.down_proj = Linear(width, hidden)
        self.activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., hidden] -> [..., hidden]."""
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))
