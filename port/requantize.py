"""Weights into affine groups: MXFP4 or bfloat16 bytes to the codes, scales and biases of ``mx.quantize`` (K3.md §8).

The weights are float32 throughout: MXFP4 and bfloat16 are both exact in it. Codes are bit for bit those of
``mx.quantize`` on the CPU; its float32 scales and biases are rounded once, to bfloat16. A block of rows at a time is
enough, since a group never crosses a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from port.tiers import Format
from reference.mxfp4 import CODE_VALUES, GROUP, NAN_SCALE, SCALE_BIAS

BLOCK_WEIGHTS = 1 << 16
"""Weights converted at once: their float32 values, 256 KB, stay in a core's own cache. Eight times as many
were measured a quarter slower, half as many an eighth."""
LARGEST_SCALE = 252
"""Scale bytes up to this one keep ±6 finite in float32; only above it must the products be looked at."""
BF16_EXPONENT, F32_EXPONENT = 0x7F80, 0x7F800000

_VALUES = CODE_VALUES.astype(np.float32)
_BYTE_VALUES = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1).view(np.uint64).reshape(-1)
"""Byte -> its two weights, low nibble first, as one 64-bit entry: one look-up for two weights."""


def dequantize_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """uint8 [rows, in/2] and uint8 [rows, in/32] -> float32 [rows, in], exact.

    Raises ValueError for a scale byte of 255, which is NaN, and for a weight beyond float32's range.
    """
    largest = scale.max(initial=0)
    if largest == NAN_SCALE:
        raise ValueError("a scale byte of 255, which is NaN")
    weights = np.take(_BYTE_VALUES, packed).view(np.float32).reshape(len(packed), -1, GROUP)
    with np.errstate(over="ignore"):
        weights *= np.ldexp(np.float32(1), scale.astype(np.int32) - SCALE_BIAS)[..., None]
    if largest > LARGEST_SCALE and not np.isfinite(weights).all():
        raise ValueError("a weight that overflows float32")
    return weights.reshape(len(packed), -1)


def widen(data: np.ndarray) -> np.ndarray:
    """The bytes of bfloat16 weights, uint8 [2·n] -> float32 [n], exact; ValueError if one is not finite."""
    bits = data.view("<u2")
    check_finite(bits)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def check_finite(bits: np.ndarray) -> None:
    """Raise ValueError if a float among these is NaN or infinite; uint16 bits of bfloat16, uint32 of float32."""
    exponent = bits.dtype.type(BF16_EXPONENT if bits.dtype.itemsize == 2 else F32_EXPONENT)
    if ((bits & exponent) == exponent).any():
        raise ValueError("a value that is NaN or infinite")


def quantize(weights: np.ndarray, format: Format) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 [rows, in] -> codes uint32 [rows, in·bits/32]; scales and biases [rows, in/group], bfloat16 in uint16."""
    codes, scales, biases = mx.quantize(
        mx.array(weights), group_size=format.group_size, bits=format.bits, mode=format.mode, stream=mx.cpu
    )
    halves = [mx.view(x.astype(mx.bfloat16, stream=mx.cpu), mx.uint16, stream=mx.cpu) for x in (scales, biases)]
    mx.eval(codes, *halves)
    return np.array(codes, copy=False), *(np.array(half, copy=False) for half in halves)


def row_blocks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """(first, end) of consecutive blocks of rows, each of about BLOCK_WEIGHTS weights."""
    step = max(1, BLOCK_WEIGHTS // width)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)
