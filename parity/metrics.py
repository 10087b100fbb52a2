"""How far two arrays are apart. Everything in numpy float64: MLX's whole-array sums lose precision."""

from __future__ import annotations

import numpy as np


def relative_rms(found: np.ndarray, truth: np.ndarray) -> float:
    """RMS of the difference over the RMS of ``truth``, in float64.

    Infinities that both sides have in the same places (masked scores) count as equal and are left out of the scale.
    A truth that is zero everywhere has no scale: then the error is 0 where ``found`` is zero too, else infinite. A NaN
    or infinity that the truth does not have makes the error infinite. Raises ValueError if the shapes differ.
    """
    difference, finite = _difference(found, truth), np.isfinite(truth)
    if not np.isfinite(difference).all():
        return float("inf")
    if not finite.any():
        return 0.0
    error = np.sqrt(np.mean(np.square(difference[finite])))
    scale = np.sqrt(np.mean(np.square(truth[finite].astype(np.float64))))
    if scale == 0:
        return 0.0 if error == 0 else float("inf")
    return float(error / scale)


def cosine(found: np.ndarray, truth: np.ndarray) -> float:
    """Cosine of the two flattened arrays; reported only, since it is blind to scale. NaN where it has no meaning."""
    found, truth = found.astype(np.float64), truth.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.linalg.norm(found) * np.linalg.norm(truth)
        return float(np.vdot(found, truth) / norms) if np.isfinite(norms) and norms > 0 else float("nan")


def worst_element(found: np.ndarray, truth: np.ndarray) -> tuple[tuple[int, ...], float, float]:
    """(index, found, truth) of the element that is furthest off; a NaN is further off than any number."""
    difference = np.abs(_difference(found, truth))
    flat = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
    index = tuple(int(i) for i in np.unravel_index(flat, found.shape))
    return index, float(found[index]), float(truth[index])


def _difference(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    if found.shape != truth.shape:
        raise ValueError(f"shape {list(found.shape)} against {list(truth.shape)}")
    with np.errstate(invalid="ignore"):
        found, truth = found.astype(np.float64), truth.astype(np.float64)
        return np.where(found == truth, 0.0, found - truth)
