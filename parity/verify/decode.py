"""Codes to float32 by table, a block of rows at a time (K3.md §8).

Everything is divided by one power of two, so that squares stay within float32; sums are undone in float64.
Values of MXFP4 and bfloat16 are exact in float32, and so is that division.
"""

from __future__ import annotations

import threading
from math import prod
from typing import Any, NamedTuple

import numpy as np

from reference.mxfp4 import CODE_VALUES, SCALE_BIAS

MXFP4_GROUP = 32
GROUP = 64
"""Weights that share a scale and a bias in affine mode."""
EXPONENTS = 256


def table(bits: int, count: int) -> np.ndarray:
    """Number -> the ``count`` codes of ``bits`` bits in it, the lowest first, float32 [2^(bits·count), count]."""
    numbers = np.arange(1 << bits * count)
    return np.stack([numbers >> bits * place & (1 << bits) - 1 for place in range(count)], -1).astype(np.float32)


PAIRS = CODE_VALUES.astype(np.float32)[table(4, 2).astype(int)].view(np.uint64).ravel()
"""Byte -> its two MXFP4 weights, low nibble first, as one 64-bit entry."""
QUADS_2, QUADS_3 = (table(bits, 4).view(np.complex128).ravel() for bits in (2, 3))
PAIRS_4 = table(4, 2).view(np.uint64).ravel()


RANKED = np.concatenate([-CODE_VALUES[7::-1], CODE_VALUES[:8]]).astype(np.float32)
"""The values of MXFP4 in rising order; zero stands twice."""


class Block(NamedTuple):
    """Rows of a matrix, divided by ``2^(shift − 127)``: ``weights`` float32 [rows, in], and of every group of 64 the
    largest and the least, ``high`` and ``low`` [rows, in/64]."""

    weights: np.ndarray
    high: np.ndarray
    low: np.ndarray
    shift: int


class Scratch(threading.local):
    """Memory of a thread that is used again: fresh pages for every block would cost more than the arithmetic."""

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}

    def array(self, use: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array for this ``use``, its values whatever they were; it holds until the next call for the same."""
        size = prod(shape) * np.dtype(dtype).itemsize
        if use not in self._memory or len(self._memory[use]) < size:
            self._memory[use] = np.empty(size, np.uint8)
        return self._memory[use][:size].view(dtype).reshape(shape)


scratch = Scratch()


def mxfp4(packed: np.ndarray, scale: np.ndarray) -> Block:
    """uint8 [rows, in/2] and [rows, in/32], in a multiple of 64; its weights hold until the next block."""
    shift = int(scale.max())
    factors = powers(shift)[scale]
    high, low = mxfp4_extremes(packed, factors)
    return Block(mxfp4_weights(packed, factors, "source"), high, low, shift)


def bf16(bits: np.ndarray) -> Block:
    """bfloat16 as uint16 [rows, in], in a multiple of 64."""
    shift = exponent(bits)
    weights = bf16_block(bits, shift)
    groups = weights.reshape(-1, GROUP)
    high, low = (extreme(groups, which).reshape(len(bits), -1) for which in (np.maximum, np.minimum))
    return Block(weights, high, low, shift)


def powers(shift: int) -> np.ndarray:
    """Scale byte -> ``2^(byte − shift)``, float32 [256]; below the smallest float it is 0."""
    with np.errstate(over="ignore"):
        return np.ldexp(np.float32(1), np.arange(EXPONENTS) - shift)


def mxfp4_block(packed: np.ndarray, scale: np.ndarray, shift: int) -> np.ndarray:
    """uint8 [rows, in/2] and [rows, in/32] -> float32 [rows, in], divided by ``2^(shift − 127)``."""
    return mxfp4_weights(packed, powers(shift)[scale], "").copy()


def mxfp4_weights(packed: np.ndarray, factors: np.ndarray, use: str) -> np.ndarray:
    """uint8 [rows, in/2] and float32 [rows, in/32] -> float32 [rows, in], in the scratch array of that use."""
    weights = looked_up(PAIRS, packed, use).reshape(*factors.shape, MXFP4_GROUP)
    weights *= factors[..., None]
    return weights.reshape(len(packed), -1)


def mxfp4_extremes(packed: np.ndarray, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest and the least weight of every group of 64, float32 [rows, in/64]; ``factors`` those of groups of 32.

    Both nibbles of a byte are replaced by their ranks, from −6 to 6, by bit operations: ``x ^ 8`` of a positive code,
    ``x ^ 15`` of a negative one. Then bytes are compared for their high nibbles, and low nibbles for themselves.
    """
    negative = packed >> 3 & 0x11
    ranks = (packed ^ negative * np.uint8(7) ^ 0x88).reshape(-1, MXFP4_GROUP // 2).T.copy()
    low_nibbles = ranks & 15
    largest = np.maximum(ranks.max(axis=0) >> 4, low_nibbles.max(axis=0))
    least = np.minimum(ranks.min(axis=0) >> 4, low_nibbles.min(axis=0))
    high, low = (np.take(RANKED, rank).reshape(factors.shape) * factors for rank in (largest, least))
    return np.maximum(high[:, 0::2], high[:, 1::2]), np.minimum(low[:, 0::2], low[:, 1::2])


def bf16_block(bits: np.ndarray, shift: int) -> np.ndarray:
    """bfloat16 as uint16 [rows, in] -> float32 [rows, in], divided by ``2^(shift − 127)``."""
    weights = (bits.astype(np.uint32) << 16).view(np.float32)
    weights *= np.ldexp(np.float32(1), SCALE_BIAS - shift)
    return weights


def exponent(bits: np.ndarray) -> int:
    """The largest biased exponent among bfloat16 numbers, uint16; 255 means that one is not finite."""
    return int(((bits >> 7) & 0xFF).max(initial=0))


def extreme(groups: np.ndarray, which: np.ufunc) -> np.ndarray:
    """float32 [n, 64] -> [n], by halves: numpy's own reduction of short rows is several times slower."""
    for half in (32, 16, 8):
        groups = which(groups[:, :half], groups[:, half:])
    return which.reduce(groups.T.copy(), axis=0)


def halves(bits: np.ndarray, shift: int) -> np.ndarray:
    """Scales or biases, bfloat16 as uint16, as float32 divided by ``2^(shift − 127)``."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ldexp((bits.astype(np.uint32) << 16).view(np.float32), SCALE_BIAS - shift)


def codes_block(words: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [rows, in·bits/32] -> codes as float32 [rows, in]: one stream of bits, least significant first.

    They hold until the next call.
    """
    stream = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        codes = scratch.array("codes", stream.shape, np.float32)
        codes[:] = stream
        return codes
    if bits == 3:
        return looked_up(QUADS_3, twelves(stream), "codes")
    return looked_up(QUADS_2 if bits == 2 else PAIRS_4, stream, "codes")


def looked_up(entries: np.ndarray, numbers: np.ndarray, use: str) -> np.ndarray:
    found = scratch.array(use, numbers.shape, entries.dtype)
    np.take(entries, numbers, out=found, mode="clip")
    return found.view(np.float32)


def twelves(stream: np.ndarray) -> np.ndarray:
    """uint8 [rows, 3·n] -> uint16 [rows, 2·n]: numbers of 12 bits, least significant bits first."""
    first, middle, last = (stream[:, place::3].astype(np.uint16) for place in range(3))
    numbers = np.empty((len(stream), 2 * first.shape[1]), np.uint16)
    numbers[:, 0::2] = first | (middle & 15) << 8
    numbers[:, 1::2] = middle >> 4 | last << 4
    return numbers
