"""The gated activations of all MLPs and experts (K3.md §3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from port.linear import wide
from reference.config import TextConfig


def situ_glu(gate: mx.array, up: mx.array, beta: float, linear_beta: float | None) -> mx.array:
    """SiTU-GLU: ``β·tanh(g/β)·σ(g) · β_lin·tanh(u/β_lin)``, in float32, cast back to gate's dtype.

    gate, up [..., width]. ``linear_beta`` None leaves ``up`` as it is. Bounded by β·β_lin.
    """
    g, u = wide(gate), wide(up)
    bounded_gate = beta * mx.tanh(g / beta) * mx.sigmoid(g)
    bounded_up = u if linear_beta is None else linear_beta * mx.tanh(u / linear_beta)
    return (bounded_gate * bounded_up).astype(gate.dtype)


def silu_glu(gate: mx.array, up: mx.array) -> mx.array:
    """``silu(g) · u``, the activation of models without SiTU; gate, up [..., width]."""
    # In float32, rounded once: MLX's bfloat16 sigmoid is rounded more than once. The product is in the model's dtype.
    g = wide(gate)
    return (g * mx.sigmoid(g)).astype(gate.dtype) * up


def gated_activation(text_config: TextConfig) -> Callable[[mx.array, mx.array], mx.array]:
    """The function of (gate, up) that ``hidden_act`` names."""
    if text_config.hidden_act == "silu":
        return silu_glu
    return partial(situ_glu, beta=text_config.activation_situ_beta, linear_beta=text_config.activation_situ_linear_beta)
