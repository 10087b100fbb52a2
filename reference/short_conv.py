"""The short convolution in front of q, k and v (K3.md §3, §4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reference.linear import unset, wide


def short_conv(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """Depthwise causal convolution over time, without bias, then SiLU. The last tap multiplies the current token.

    x [B, T, C], weight [C, 1, K], state [B, K-1, C] (the inputs just before x; zeros at the start) -> [B, T, C]
    in x's dtype; convolution and SiLU in float32.
    """
    tokens, taps = x.shape[1], wide(weight[:, 0]).unbind(-1)
    inputs = wide(torch.cat([state, x], dim=1))
    convolved = sum(tap * inputs[:, first : first + tokens] for first, tap in enumerate(taps))
    return F.silu(convolved).to(x.dtype)


def next_conv_state(x: Tensor, state: Tensor, lengths: Tensor) -> Tensor:
    """The last K-1 real inputs of every row, reaching back into ``state`` where the row is short.

    x [B, T, C] with each row's real tokens first, state [B, K-1, C], lengths [B] -> [B, K-1, C]. A copy: a view would
    keep the whole prompt alive.
    """
    padded = torch.cat([state, x], dim=1)
    steps = lengths[:, None] + torch.arange(state.shape[1])
    return padded.gather(1, steps[:, :, None].expand(-1, -1, x.shape[2]))


class ShortConv(nn.Module):
    """``short_conv`` with its ``weight`` [channels, 1, kernel]."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = unset(channels, 1, kernel)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return short_conv(x, self.weight, state)
