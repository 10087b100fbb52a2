"""MXFP4 experts into affine groups of 64, bit for bit as ``mx.quantize`` would, in about half the time (K3.md §8, §15).

Two things make it so. A group's least and largest weight are found among the 4-bit codes, eight times smaller than the
weights. And weights stand in one small buffer that is used again and again: fresh memory costs more than arithmetic.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from port.requantize import LARGEST_SCALE, row_blocks
from port.tiers import WORD_BITS, Format
from reference.mxfp4 import CODE_VALUES, GROUP, NAN_SCALE, SCALE_BIAS

EPSILON = np.float32(1e-7)
"""MLX's least step between two codes."""
CODES = 8
"""Codes that are packed at once: one byte each in a 64-bit word, then as many bytes as a code has bits."""

_VALUES = CODE_VALUES.astype(np.float32)
_BYTES = np.arange(256, dtype=np.uint8)
_PAIRS = np.stack([_VALUES[_BYTES & 0xF], _VALUES[_BYTES >> 4]], axis=-1).view(np.uint64).reshape(-1)
"""Byte -> its two weights, low nibble first, as one 64-bit entry: one look-up for two weights."""
_IN_ORDER = np.concatenate([_VALUES[:7:-1], _VALUES[:8]])
"""The sixteen values from −6 to 6, −0 before 0."""
ROWS_AT_ONCE = 128


def requantize(packed: np.ndarray, scale: np.ndarray, format: Format) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """uint8 [rows, in/2] and uint8 [rows, in/32] -> codes uint32 [rows, in·bits/32]; scales and biases
    [rows, in/group], bfloat16 in uint16.

    Raises ValueError for a scale byte of 255, which is NaN, and for a weight beyond float32's range.
    """
    rows, width = packed.shape[0], 2 * packed.shape[1]
    largest_scale = scale.max(initial=0)
    if largest_scale == NAN_SCALE:
        raise ValueError("a scale byte of 255, which is NaN")
    with np.errstate(over="ignore", invalid="ignore"):
        factors = np.ldexp(np.float32(1), scale.astype(np.int32) - SCALE_BIAS)
        low, high = extremes(packed, factors, format.group_size)
    steps, edges = steps_and_edges(low, high, format.bits)
    if largest_scale >= LARGEST_SCALE and not all(np.isfinite(ends).all() for ends in (low, high, steps)):
        raise ValueError("a weight, or a group's width, that overflows float32")
    codes = np.empty((rows, width // CODES, format.bits), np.uint8)
    blocks = list(row_blocks(rows, width))
    pairs = np.empty((blocks[0][1], width // 2), np.uint64)
    small = np.empty((blocks[0][1], width), np.uint8)
    for first, end in blocks:
        weights, part = pairs[: end - first], small[: end - first]
        np.take(_PAIRS, packed[first:end], out=weights, mode="clip")
        weights = weights.view(np.float32)
        by_scale = weights.reshape(end - first, -1, GROUP)
        by_scale *= factors[first:end, :, None]
        to_codes(weights.reshape(end - first, -1, format.group_size), steps[first:end], edges[first:end], format.bits)
        np.copyto(part, weights, casting="unsafe")
        pack(part, format.bits, codes[first:end])
    words = codes.reshape(rows, -1).view("<u4")
    assert words.shape[1] == width * format.bits // WORD_BITS
    return words, *(array.astype(ml_dtypes.bfloat16).view(np.uint16) for array in (steps, edges))


def extremes(packed: np.ndarray, factors: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest weight of each group, float32 [rows, in/group] each; factors float32 [rows, in/32]."""
    ends = [np.empty((len(packed), 2 * packed.shape[1] // group_size), np.float32) for _ in range(2)]
    for first in range(0, len(packed), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        # Rows last, so that whole rows of bytes are compared at once.
        places = in_order(np.ascontiguousarray(packed[rows].T)).reshape(-1, GROUP // 2, len(packed[rows]))
        low_nibble, high_nibble = places & 0xF, places >> 4
        for extreme, end in zip(ends, (np.minimum, np.maximum), strict=True):
            place = end.reduce(end(low_nibble, high_nibble), axis=1)
            weights = _IN_ORDER[place] * factors[rows].T
            extreme[rows] = end.reduce(weights.reshape(-1, group_size // GROUP, weights.shape[1]), axis=1).T
    return ends[0], ends[1]


def in_order(packed: np.ndarray) -> np.ndarray:
    """Two codes in every byte -> their two places in ``_IN_ORDER``: with a sign, all other bits turn over."""
    negative = packed >> 3
    negative &= 0x11
    negative *= 7
    negative ^= packed
    negative ^= 0x88
    return negative


def steps_and_edges(low: np.ndarray, high: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """MLX's scale and bias of each group, float32.

    The end that is further from zero is code 0, and zero lies on a code, for which the step is stretched. Where the
    upper end is the further one the step is negative.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        step = np.maximum((high - low) / np.float32(2**bits - 1), EPSILON)
    lower_is_further = np.abs(low) > np.abs(high)
    step = np.where(lower_is_further, step, -step)
    edge = np.where(lower_is_further, low, high)
    zero = np.rint(edge / step)
    on_a_code = zero != 0
    step = np.where(on_a_code, edge / np.where(on_a_code, zero, 1), step).astype(np.float32)
    return step, np.where(on_a_code, edge, np.float32(0))


def to_codes(weights: np.ndarray, steps: np.ndarray, edges: np.ndarray, bits: int) -> None:
    """Replace weights [rows, groups, group] by their codes, whole floats of 0 … 2^bits − 1."""
    weights -= edges[..., None]
    weights /= steps[..., None]
    np.rint(weights, out=weights)
    np.clip(weights, 0, 2**bits - 1, out=weights)


def pack(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Codes uint8 [rows, in] -> ``out`` uint8 [rows, in/8, bits]: one stream of bits, least significant first.

    Eight codes stand in eight bytes; neighbours are moved together, then pairs, then fours.
    """
    eight = codes.view("<u8")
    for merged in (2, 4, 8):
        half, kept = merged // 2, (1 << merged * bits) - 1
        mask = sum(kept << place for place in range(0, 64, 8 * merged))
        eight = (eight | eight >> np.uint64(half * (8 - bits))) & np.uint64(mask)
    if bits == 3:
        out[...] = eight.view(np.uint8).reshape(*eight.shape, CODES)[..., :bits]
    else:
        np.copyto(out.view(f"<u{bits}")[..., 0], eight, casting="unsafe")
