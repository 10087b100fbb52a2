"""RMSNorm (K3.md §3)."""

import numpy as np

from parity.cases.base import Drawn, FunctionCase

AMPLITUDE = {"random": 1.0, "large": 3e3, "tiny": 3e-3, "tinier": 1e-4}
"""Rows of mean square 1e-5 (tiny) and 1e-8 (tinier) feel which epsilon is used and where it stands."""


def draw_rms_norm(regime: str, rng: np.random.Generator) -> Drawn:
    x = AMPLITUDE[regime] * rng.standard_normal((2, 5, 48))
    weight = rng.uniform(0.5, 1.5, 48)
    return Drawn({"x": x, "weight": weight}, {"eps": 1e-5 if rng.random() < 0.5 else 1e-6})


CASES = (FunctionCase("norm.rms_norm", "norm", "§3", ("output",), tuple(AMPLITUDE), draw_rms_norm),)
