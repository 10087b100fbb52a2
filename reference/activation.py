"""The gated activations of all MLPs and experts (K3.md §3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from reference.config import TextConfig
from reference.linear import wide


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU-GLU: ``β·tanh(g/β)·σ(g) · β_lin·tanh(u/β_lin)``, in float32, cast back to gate's dtype.

    gate, up [..., width]. ``linear_beta`` None leaves ``up`` as it is. Bounded by β·β_lin.
    """
    g, u = wide(gate), wide(up)
    bounded_gate = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    bounded_up = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (bounded_gate * bounded_up).to(gate.dtype)


def silu_glu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(g) · u``, the activation of models without SiTU; gate, up [..., width]."""
    return F.silu(gate) * up


def gated_activation(text_config: TextConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of (gate, up) that ``hidden_act`` names."""
    if text_config.hidden_act == "silu":
        return silu_glu
    return partial(situ_glu, beta=text_config.activation_situ_beta, linear_beta=text_config.activation_situ_linear_beta)
