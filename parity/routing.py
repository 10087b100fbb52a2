"""Comparing what the router chose: equal away from ties, and tied where rounding alone decides (K3.md §7).

Two programs that are both right may choose different experts where the k-th and the next biased score are closer than
rounding. Such a token is a tie: both choices are right, the truth's is imposed on every side, and the comparison goes
on. Everywhere else another choice is a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from parity.protocol import Taps
from parity.tolerance import TIE_FLOOR

INDICES, SCORES, MARGIN = "router.indices", "router.scores", "router.margin"
SCORE_NOISE_FACTOR = 4.0
"""A flip needs the errors of two scores to add up; two more for another program's own rounding."""


class Choice(NamedTuple):
    """``wrong`` and ``tied`` are the flat token numbers whose experts differ from the truth's; ``forgiven`` [N] says
    at which tokens they may."""

    wrong: np.ndarray
    tied: np.ndarray
    margin: np.ndarray
    threshold: float
    forgiven: np.ndarray


def router_taps(taps: Mapping[str, np.ndarray]) -> list[str]:
    """The full names of the router.indices taps, in layer order as recorded."""
    return [name for name in taps if name.endswith(INDICES)]


def same_choices(left: Taps, right: Taps) -> bool:
    """Whether every router chose the same experts on both sides."""
    return all(np.array_equal(left[name], right[name]) for name in router_taps(left) if name in right)


def score_noise(noise: np.ndarray, truth: np.ndarray) -> float:
    """The largest difference of two sides' scores, where neither is masked by −inf."""
    compared = np.isfinite(noise) & np.isfinite(truth)
    return float(np.abs(noise[compared].astype(np.float64) - truth[compared]).max(initial=0.0))


def own_choice(scores: np.ndarray, top_k: int) -> np.ndarray:
    """What a router would choose by its biased ``scores`` [N, E], whatever was imposed: [N, k] ascending."""
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[:, :top_k], axis=-1)


def compare_choice(found: np.ndarray, truth: Taps, noise: Taps, name: str, excused: np.ndarray | None = None) -> Choice:
    """Judge one router's ``found`` [..., k] by the truth's margin and the measured noise of the scores.

    ``excused`` flat tokens follow an earlier tie, so their own input differs; they count as tied.
    """
    indices, prefix = truth[name], name.removesuffix(INDICES)
    threshold = max(TIE_FLOOR, SCORE_NOISE_FACTOR * score_noise(noise[prefix + SCORES], truth[prefix + SCORES]))
    margin = truth[prefix + MARGIN].reshape(-1)
    top_k = indices.shape[-1]
    differs = (np.sort(found.reshape(-1, top_k)) != np.sort(indices.reshape(-1, top_k))).any(axis=-1)
    forgiven = margin <= threshold
    if excused is not None:
        forgiven = forgiven | excused
    wrong, tied = np.flatnonzero(differs & ~forgiven), np.flatnonzero(differs & forgiven)
    return Choice(wrong, tied, margin, threshold, forgiven)


def scores_at_ties(scores: np.ndarray, truth: np.ndarray, forgiven: np.ndarray) -> np.ndarray:
    """``scores`` [N, E] with the truth's value where, at a forgiven token, only one of the two is masked by −inf: a tie
    between two expert groups shows in the mask, and either mask is right."""
    other_mask = (np.isfinite(scores) != np.isfinite(truth)) & forgiven[:, None]
    return np.where(other_mask, truth.astype(scores.dtype), scores)
