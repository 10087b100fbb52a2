"""What requantizing an MXFP4 expert costs, per tier, on experts that look like released ones (K3.md §15)."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fixtures.values import normal, words
from parity.dequantized import affine_weights
from parity.metrics import relative_rms
from reference.mxfp4 import pack, unpack

ROWS, INPUTS = 96, 3584
DEVIATION, SPREAD = 0.02, 0.3
"""Weights are Gaussian; rows of trained matrices differ in size: SPREAD is the deviation of the logarithm of it."""

BANDS = {"3bit": (0.17, 0.22), "mixed2": (0.37, 0.45), "2bit": (0.37, 0.45)}
"""Lossy tier -> the least and the largest relative error of its experts: RMS of the difference over RMS of the weights.
Four or eight levels between the least and the largest weight of a group of 64."""
AFFINE4_BAND = (0.09, 0.105)
"""Affine 4-bit in groups of 64: a tenth of every expert lost, at 4.5 bits a weight where MXFP4 has 4.25. No tier."""


def released_looking(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """An expert's matrix in MXFP4: Gaussian rows of different size, packed. uint8 [96, 1792] and [96, 112]."""
    size = np.exp(normal(words(seed, "released-looking.rows", 0, ROWS), SPREAD))
    weights = normal(words(seed, "released-looking.weights", 0, ROWS * INPUTS), DEVIATION)
    return pack(size[:, None] * weights.reshape(ROWS, INPUTS))


def affine_error(packed: np.ndarray, scale: np.ndarray, bits: int) -> float:
    """Relative error of an expert's matrix in affine groups of 64, as the converter writes them."""
    from port.requantize_mxfp4 import requantize
    from port.tiers import Format

    codes, *halves = requantize(packed, scale, Format("affine", bits, 64))
    scales, biases = (half.view(ml_dtypes.bfloat16) for half in halves)
    return relative_rms(affine_weights(codes, scales, biases), unpack(packed, scale))


def expert_error(tier: str, seed: int = 0) -> float:
    """Relative error of a lossy tier on a released-looking expert."""
    from port.tiers import TIERS

    return affine_error(*released_looking(seed), TIERS[tier].experts.bits)
