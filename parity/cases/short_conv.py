"""The short convolution (K3.md §3)."""

import numpy as np

from parity.cases.base import Drawn, FunctionCase

KERNELS = {"random": 4, "kernel-1": 1, "kernel-2": 2, "kernel-7": 7, "impulse": 4, "one-token": 4}


def draw_short_conv(regime: str, rng: np.random.Generator) -> Drawn:
    kernel, tokens = KERNELS[regime], 1 if regime == "one-token" else 9
    x = rng.standard_normal((2, tokens, 24))
    state = rng.standard_normal((2, kernel - 1, 24))
    if regime == "impulse":
        x, state = np.zeros_like(x), np.zeros_like(state)
        x[:, 3] = 1.0
    return Drawn(
        {
            "x": x,
            "weight": rng.uniform(0.2, 1.0, (24, 1, kernel)) * rng.choice([-1, 1], (24, 1, kernel)),
            "state": state,
        }
    )


CASES = (
    FunctionCase(
        "short_conv.short_conv",
        "short_conv",
        "§3",
        ("output",),
        tuple(KERNELS),
        draw_short_conv,
        wide=frozenset({"weight"}),
    ),
)
