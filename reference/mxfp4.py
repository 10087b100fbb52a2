"""MXFP4: 4-bit floats, two per byte, with one power-of-two scale per 32 inputs (K3.md §8). numpy only."""

from __future__ import annotations

import numpy as np

GROUP = 32
SCALE_BIAS = 127
NAN_SCALE = 255

CODE_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Code -> value, float64; code 8 is minus zero."""


def unpack_codes(packed: np.ndarray) -> np.ndarray:
    """uint8 ``[..., n/2]`` -> codes uint8 ``[..., n]``; the low nibble is the even input index."""
    codes = np.stack([packed & 0x0F, packed >> 4], axis=-1)
    return codes.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Codes uint8 ``[..., n]`` -> bytes uint8 ``[..., n/2]``, the inverse of ``unpack_codes``."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def scale_values(scale: np.ndarray) -> np.ndarray:
    """E8M0 bytes -> ``2^(byte − 127)`` float64; raises ValueError at byte 255, which is NaN."""
    if (scale == NAN_SCALE).any():
        where = tuple(int(i) for i in np.argwhere(scale == NAN_SCALE)[0])
        raise ValueError(f"scale byte 255 (NaN) at {where}")
    return np.ldexp(1.0, scale.astype(np.int32) - SCALE_BIAS)


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Weights float64 ``[out, n]`` from ``weight_packed`` [out, n/2] and ``weight_scale`` [out, n/32]."""
    return CODE_VALUES[unpack_codes(packed)] * np.repeat(scale_values(scale), GROUP, axis=-1)


def nearest_codes(values: np.ndarray) -> np.ndarray:
    """Codes uint8 of the nearest 4-bit floats; halfway cases go to the even code, beyond ±6 saturates."""
    magnitude, steps = np.abs(values), CODE_VALUES[:8]
    midpoints = (steps[1:] + steps[:-1]) / 2
    code = np.searchsorted(midpoints, magnitude, side="left")
    halfway = np.isin(magnitude, midpoints) & (code % 2 == 1)
    code = np.where(halfway, code + 1, code)
    return (code + 8 * np.signbit(values)).astype(np.uint8)


def pack(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize float ``[out, n]`` -> (``weight_packed`` [out, n/2], ``weight_scale`` [out, n/32]), both uint8.

    A group's scale is the power of two that brings its largest magnitude into [4, 8), the top binade of the code
    (OCP Microscaling). An all-zero group has scale 2^0. Raises ValueError if n is not a multiple of 32.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"{weight.shape[-1]} inputs do not fill groups of {GROUP}")
    groups = weight.astype(np.float64).reshape(*weight.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 3, 0)
    byte = np.clip(exponent + SCALE_BIAS, 0, NAN_SCALE - 1)
    codes = nearest_codes(groups / np.ldexp(1.0, byte - SCALE_BIAS)[..., None])
    return pack_codes(codes.reshape(weight.shape)), byte.astype(np.uint8)
