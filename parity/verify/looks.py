"""What a matrix that is not the one it should be looks like: candidates, and which of them it is near to.

All functions take float32 arrays and a ``limit``: the relative error up to which a candidate counts as recognised.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.verify.decode import GROUP, MXFP4_GROUP
from parity.verify.matrices import Coded
from parity.verify.measure import plain

EXACT_FACTOR = 0.02
SOME_ROWS = 0.02


def apart(found: np.ndarray, candidate: np.ndarray) -> float:
    """Relative error of ``found``, were ``candidate`` what it should be."""
    with np.errstate(all="ignore"):
        measure = plain(flat(candidate), flat(found))
        return measure.error if measure.found or measure.source else 0.0


def flat(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(1, -1)


def nothing(found: np.ndarray) -> str:
    """Of what needs no source to be recognised."""
    if not np.isfinite(found).all():
        return "NaN or infinity"
    return "zero throughout" if not found.any() else ""


def scaled(found: np.ndarray, right: np.ndarray, limit: float) -> str:
    """The right one times a factor: a power of two is an exponent that is off."""
    factor = factor_of(found, right)
    closest = np.copysign(2.0 ** np.rint(np.log2(abs(factor))), factor) if 0 < abs(factor) < np.inf else 0
    factor = closest if closest and abs(factor / closest - 1) < EXACT_FACTOR else factor
    if not np.isfinite(factor) or factor == 0 or abs(factor - 1) < 0.02 or apart(found / factor, right) > limit:
        return ""
    if factor == -1:
        return "its negative"
    told = f"{factor:.3g} times its size"
    power = np.log2(factor) if factor > 0 else np.nan
    return f"{told}, scale exponents off by {int(power):+d}" if power == np.rint(power) else told


def factor_of(found: np.ndarray, right: np.ndarray) -> float:
    """By what ``found`` is too large: the usual ratio of the largest weights of a group, which is coded exactly."""
    with np.errstate(all="ignore"):
        sign = np.sign(np.vdot(found.astype(np.float64), right))
        size = GROUP if found.size % GROUP == 0 else found.size
        largest = [np.abs(array).reshape(-1, size).max(axis=1) for array in (found, right)]
        return float(sign * np.nanmedian(largest[0] / largest[1]))


def pairs_swapped(found: Coded, right: np.ndarray, limit: float) -> str:
    """Nibbles exchanged in the source's bytes or, where they were requantized, in the folder's."""
    weights, pairs = found.weights(), right.reshape(len(right), -1, 2)
    if apart(weights, pairs[..., ::-1]) <= limit:
        return "nibbles swapped"
    if apart(weights, pairs.reshape(len(right), -1, MXFP4_GROUP // 2, 2).swapaxes(2, 3)) <= limit:
        return "nibbles taken for the halves of a group"
    undone = found.with_words(found.words << 4 | found.words >> 4)
    return "nibbles swapped" if apart(undone.weights(), right) <= limit else ""


def transposed(found: Coded, right: np.ndarray, limit: float) -> str:
    """Rows and columns exchanged: of the weights before they were coded, of codes, of bytes or of words."""
    weights = found.weights()
    if apart(weights, right.T.reshape(right.shape)) <= limit:
        return "transposed"
    return "transposed" if any(apart(undone.weights(), right) <= limit for undone in turned_back(found)) else ""


def turned_back(found: Coded) -> Iterator[Coded]:
    """``found`` with its codes, bytes or words transposed back, and scales and biases too or not."""
    rows = len(found.words)

    def back(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.reshape(-1, rows).T)

    other = Coded(found.words, back(found.scales), None if found.biases is None else back(found.biases), found.bits)
    for coded in (found, other):
        yield coded.with_words(back(found.words))
        yield coded.with_words(back(found.words.view("<u4")).view(np.uint8))
        yield coded.with_words(packed(back(unpacked(found.words, found.bits)), found.bits))


def unpacked(data: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [rows, bytes] -> codes uint8 [rows, in]: one stream of bits, least significant first."""
    stream = np.unpackbits(data, axis=-1, bitorder="little").reshape(len(data), -1, bits)
    return (stream << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of ``unpacked``."""
    stream = codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    return np.packbits(stream.reshape(len(codes), -1), axis=-1, bitorder="little")


def moved(found: np.ndarray, right: np.ndarray, limit: float) -> str:
    """The right rows in another order that has a name, or the right entries of each row backwards."""
    if found.shape != right.shape or found.ndim == 0:
        return ""
    if apart(found, right[..., ::-1]) <= limit:
        return "each row backwards" if found.ndim > 1 else "backwards"
    if len(right) > 1 and apart(found, right[::-1]) <= limit:
        return "rows in reverse order"
    flat_rows = right.reshape(len(right), -1)
    shift = nearest(found.reshape(flat_rows.shape)[:1], flat_rows[:, None])
    if shift and apart(found, np.roll(right, -shift, axis=0)) <= limit:
        steps = shift if shift <= len(right) // 2 else shift - len(right)
        return f"rows rolled by {-steps}" if right.ndim > 1 else f"entries rolled by {-steps}"
    return ""


def nearest(found: np.ndarray, candidates: np.ndarray) -> int:
    """Which of ``candidates`` [n, …] is nearest to ``found`` […]."""
    rows = candidates.reshape(len(candidates), -1).astype(np.float64)
    wanted = found.reshape(-1).astype(np.float64)
    with np.errstate(all="ignore"):
        distance = (rows * rows).sum(1) - 2 * rows @ wanted
    return int(np.argmin(distance))


def partly(found: np.ndarray, right: np.ndarray, limit: float) -> str:
    """Some rows are right and the others are not: how far the right ones reach, and what follows."""
    with np.errstate(all="ignore"):
        distance = np.linalg.norm(found - right, axis=1)
        good = distance <= 1.5 * limit * np.linalg.norm(right, axis=1) + np.finfo(np.float32).tiny
    if not SOME_ROWS <= good.mean() < 1:
        return ""
    bad = np.flatnonzero(~good)
    rest = found[bad]
    what = "zero" if not rest.any() else "something else"
    if bad[-1] - bad[0] + 1 == len(bad):
        return f"copied in part: rows {bad[0]} to {bad[-1]} of {len(found)} are {what}"
    return f"copied in part: {len(bad)} of {len(found)} rows, the first of them {bad[0]}, are {what}"


def single_scales(found: Coded, right: Coded) -> str:
    """MXFP4: the packed bytes are right and some scale bytes are not."""
    if not np.array_equal(found.words, right.words):
        return ""
    steps = found.scales.astype(int) - right.scales
    row, group = (int(axis) for axis in np.unravel_index(int(np.argmax(steps != 0)), steps.shape))
    wrong = int(np.count_nonzero(steps))
    if not found.scales.any():
        return "scales zeroed"
    off = "off by one" if set(np.unique(steps[steps != 0])) <= {-1, 1} else "wrong"
    scales = "scale" if wrong == 1 else "scales"
    return f"the right codes, {wrong} {scales} {off}, first in row {row}, group {group}"
