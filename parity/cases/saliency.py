"""The pieces of saliency (K3.md §15). Weights are float32 in any model; what the experts give has the model's dtype."""

import numpy as np

from parity.cases.base import Drawn, FunctionCase

TOKENS, TOP_K, EXPERTS, LATENT = 23, 3, 8, 48


def draw_outputs(regime: str, rng: np.random.Generator) -> Drawn:
    """Experts differ in size by powers of two, and some give nothing at all."""
    scale = {"random": 1.0, "tiny": 1e-6, "large": 1e4}[regime]
    outputs = scale * rng.standard_normal((TOKENS, TOP_K, LATENT)) * 2.0 ** rng.integers(-4, 5, (TOKENS, TOP_K, 1))
    outputs[:2] = 0
    return Drawn({"outputs": outputs})


def choice(regime: str, rng: np.random.Generator) -> np.ndarray:
    """The first and the last expert are never chosen, or one is always: then its sum has every token in it."""
    indices = 1 + np.argsort(rng.uniform(size=(TOKENS, EXPERTS - 2)), axis=-1)[:, :TOP_K]
    if regime == "crowded":
        indices[:, 0] = EXPERTS - 1
    return np.sort(indices, axis=-1)


def draw_sums(regime: str, rng: np.random.Generator) -> Drawn:
    weights = rng.uniform(0.01, 1, (TOKENS, TOP_K))
    norms = rng.uniform(0.01, 1, weights.shape) * 2.0 ** rng.integers(-8, 9, weights.shape)
    return Drawn({"indices": choice(regime, rng), "weights": weights, "norms": norms}, {"experts": EXPERTS})


def draw_counts(regime: str, rng: np.random.Generator) -> Drawn:
    return Drawn({"indices": choice(regime, rng)}, {"experts": EXPERTS})


CASES = (
    FunctionCase("saliency.output_norms", "saliency", "§15", ("norms",), ("random", "tiny", "large"), draw_outputs),
    FunctionCase(
        "saliency.expert_sums",
        "saliency",
        "§15",
        ("sums",),
        ("spread", "crowded"),
        draw_sums,
        wide=frozenset({"weights", "norms"}),
    ),
    FunctionCase(
        "saliency.expert_counts", "saliency", "§15", ("counts",), ("spread", "crowded"), draw_counts, exact=True
    ),
)
