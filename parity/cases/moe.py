"""The router's pieces (K3.md §7). Choices are exact: every side is given the same float32 scores."""

import numpy as np

from parity.cases.base import Drawn, FunctionCase

TOKENS, EXPERTS = 11, 24


def _logits(rng: np.random.Generator) -> np.ndarray:
    return 2.0 * rng.standard_normal((TOKENS, EXPERTS))


def draw_scores(regime: str, rng: np.random.Generator) -> Drawn:
    scale = {"sigmoid": 1.0, "softmax": 1.0, "sigmoid-large": 20.0, "softmax-large": 20.0}[regime]
    return Drawn({"logits": scale * _logits(rng)}, {"activation": regime.partition("-")[0]})


def draw_groups(regime: str, rng: np.random.Generator) -> Drawn:
    """With negative biased scores a group masked by 0 instead of −inf would win."""
    biased = rng.uniform(0, 1, (TOKENS, EXPERTS)) + {"positive": 0.0, "negative": -3.0}[regime]
    return Drawn({"biased_scores": biased}, {"groups": 4, "chosen_groups": 2})


def draw_select(regime: str, rng: np.random.Generator) -> Drawn:
    if regime == "last-of-600":
        biased = rng.uniform(0, 1, (TOKENS, 600))
        biased[:, 599] += 2.0
        return Drawn({"biased_scores": biased}, {"top_k": 3})
    biased = rng.uniform(0, 1, (TOKENS, EXPERTS))
    if regime == "below-bfloat16":
        biased = 7.0 + 2.0**-14 * rng.permuted(np.tile(np.arange(EXPERTS), (TOKENS, 1)), axis=1)
    if regime == "negative":
        biased -= 3.0
    return Drawn({"biased_scores": biased}, {"top_k": EXPERTS if regime == "all" else 5})


def draw_weights(regime: str, rng: np.random.Generator) -> Drawn:
    """Scores so small that their sum is near the epsilon show which epsilon is added."""
    scale = 1e-9 if regime == "tiny" else 1.0
    scores = scale * rng.uniform(0.01, 1, (TOKENS, EXPERTS))
    top_k = 1 if regime == "one" else 5
    indices = np.sort(np.argsort(rng.uniform(0, 1, scores.shape), axis=-1)[:, :top_k], axis=-1)
    settings = {"renormalize": regime != "plain", "scaling_factor": 2.5 if regime == "scaled" else 1.0}
    return Drawn({"scores": scores, "indices": indices}, settings)


CASES = (
    FunctionCase(
        "moe.routing_scores",
        "router",
        "§7",
        ("scores",),
        ("sigmoid", "softmax", "sigmoid-large", "softmax-large"),
        draw_scores,
        wide=frozenset({"logits"}),
    ),
    FunctionCase(
        "moe.limit_to_groups",
        "router",
        "§7",
        ("biased_scores",),
        ("positive", "negative"),
        draw_groups,
        wide=frozenset({"biased_scores"}),
    ),
    FunctionCase(
        "moe.select_experts",
        "router",
        "§7",
        ("indices",),
        ("random", "below-bfloat16", "negative", "all", "last-of-600"),
        draw_select,
        wide=frozenset({"biased_scores"}),
        exact=True,
    ),
    FunctionCase(
        "moe.routing_weights",
        "router",
        "§7",
        ("weights",),
        ("random", "plain", "scaled", "one", "tiny"),
        draw_weights,
        wide=frozenset({"scores"}),
    ),
)
