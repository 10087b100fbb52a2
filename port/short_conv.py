"""The short convolution of q, k and v (K3.md §3)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port.linear import unset, wide


def short_conv(x: mx.array, weight: mx.array, state: mx.array) -> mx.array:
    """Depthwise causal convolution over time, then SiLU (§3).

    x [B, T, C]; weight [C, 1, K], whose last tap multiplies the current token; state [B, K-1, C], the inputs before x.
    Returns [B, T, C] in x's dtype; the sum and SiLU are in float32.
    """
    tokens, kernel = x.shape[1], weight.shape[-1]
    inputs, taps = wide(mx.concatenate([state, x], axis=1)), wide(weight)[:, 0]
    # A sum of K shifted products: mx.conv1d's own summation differs from device to device.
    y = sum(inputs[:, tap : tap + tokens] * taps[:, tap] for tap in range(kernel))
    return (y * mx.sigmoid(y)).astype(x.dtype)


def next_conv_state(x: mx.array, state: mx.array, lengths: mx.array) -> mx.array:
    """The last K-1 real inputs of every row, [B, K-1, C]: what the next call needs as ``state``.

    x [B, T, C] with real tokens first, ``lengths`` [B] of them real; rows shorter than the window keep part of state.
    """
    window = state.shape[1]
    if window == 0:
        return state
    # Gathering copies, so that the state does not keep the whole prompt alive.
    last = lengths[:, None] + mx.arange(window)
    return mx.take_along_axis(mx.concatenate([state, x], axis=1), last[:, :, None], axis=1)


class ShortConv(nn.Module):
    """``short_conv`` with its ``weight`` [channels, 1, kernel], stored in float32 (§2)."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = unset(channels, 1, kernel)

    def __call__(self, x: mx.array, state: mx.array) -> mx.array:
        return short_conv(x, self.weight, state)
