"""The mix of attention residuals (K3.md §6)."""

import numpy as np

from parity.cases.base import Drawn, FunctionCase

REGIMES = ("random", "full-bank", "no-blocks", "parallel", "tiny", "different-scales")


def draw_mix(regime: str, rng: np.random.Generator) -> Drawn:
    """Parallel sources weigh the same whatever their length; tiny ones feel the epsilon of the norm."""
    count = {"full-bank": 8, "no-blocks": 0}.get(regime, 3)
    sources = rng.standard_normal((count + 1, 2, 5, 40))
    if regime == "parallel":
        sources = sources[:1] * np.linspace(0.3, 2.0, count + 1)[:, None, None, None]
    if regime == "tiny":
        sources *= 3e-3 * np.linspace(0.2, 2.0, count + 1)[:, None, None, None]
    if regime == "different-scales":
        sources *= np.geomspace(0.05, 20.0, count + 1)[:, None, None, None]
    arrays = {"prefix_sum": sources[-1], "blocks": sources[:-1]}
    arrays["norm_weight"] = rng.uniform(0.5, 1.5, 40)
    arrays["proj_weight"] = 0.3 * rng.standard_normal((1, 40))
    return Drawn(arrays, {"eps": 1e-5})


CASES = (FunctionCase("attn_res.mix", "attn_res", "§6", ("output",), REGIMES, draw_mix),)
