"""SiTU-GLU and SiLU-GLU (K3.md §3)."""

import numpy as np

from parity.cases.base import Drawn, FunctionCase

SCALES = {"random": (2.0, 10.0), "small": (1e-2, 1e-2), "saturated": (40.0, 400.0), "crossed": (30.0, 0.5)}
"""(gate, up) amplitudes: small inputs hide the bounds, saturated ones show both, crossed ones an exchanged pair."""


def draw_gated(regime: str, rng: np.random.Generator) -> Drawn:
    gate, up = SCALES[regime]
    return Drawn({"gate": gate * rng.standard_normal((3, 7, 32)), "up": up * rng.standard_normal((3, 7, 32))})


def draw_situ(regime: str, rng: np.random.Generator) -> Drawn:
    linear_beta = None if regime == "no-linear-bound" else 25.0
    drawn = draw_gated("random" if regime == "no-linear-bound" else regime, rng)
    return Drawn(drawn.arrays, {"beta": 4.0, "linear_beta": linear_beta})


CASES = (
    FunctionCase("activation.situ_glu", "activation", "§3", ("output",), (*SCALES, "no-linear-bound"), draw_situ),
    FunctionCase("activation.silu_glu", "activation", "§3", ("output",), tuple(SCALES), draw_gated),
)
