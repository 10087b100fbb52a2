"""How far domains want the same experts, against chance (K3.md §15)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parity.reap.plans import best, kept_share
from reference.saliency_result import Saliency


@dataclass(frozen=True)
class Overlap:
    """``shared`` [D, D]: the share of one domain's ``count`` best experts of a layer that are among another's, the mean
    over the layers; ``by_layer`` [L, D, D] the same of each. ``chance`` is what two random picks share, N/E;
    ``deviation`` the standard deviation of its mean over the layers. ``kept`` [D, D]: of the column's saliency what the
    row's best experts hold. ``unrouted`` [D]: how many of a layer's ``count`` best no token of the domain chose,
    the mean over the layers; such experts are alike, and fill a set in the order of their numbers."""

    domains: tuple[str, ...]
    count: int
    experts: int
    shared: np.ndarray
    by_layer: np.ndarray
    kept: np.ndarray
    chance: float
    deviation: float
    unrouted: np.ndarray


def top_sets(saliency: np.ndarray, count: int, groups: int = 1) -> np.ndarray:
    """Which experts are among the ``count`` best of their layer: [..., E] -> bool [..., E]."""
    sets = np.zeros(saliency.shape, bool)
    for place in np.ndindex(saliency.shape[:-1]):
        sets[place][best(saliency[place], count, groups)] = True
    return sets


def shared_share(sets: np.ndarray) -> np.ndarray:
    """bool [D, L, E], each set of a layer as large as the others -> [L, D, D]: |A ∩ B| / N."""
    rows = sets.astype(np.int64).transpose(1, 0, 2)
    return (rows @ rows.transpose(0, 2, 1)) / rows[:, :1].sum(-1, keepdims=True)


def chance_share(count: int, experts: int) -> float:
    """The expected overlap of two random picks of ``count`` from ``experts``, as a share of a pick."""
    return count / experts


def chance_deviation(count: int, experts: int, layers: int) -> float:
    """The standard deviation of that share's mean over ``layers`` independent pairs (hypergeometric)."""
    if experts == 1:
        return 0.0
    p = count / experts
    variance = count * p * (1 - p) * (experts - count) / (experts - 1)
    return float(np.sqrt(variance / layers) / count)


def overlap(measured: Saliency, count: int) -> Overlap:
    """Between all domains of a calibration."""
    text = measured.config.text_config
    per_domain = measured.per_domain()
    sets = top_sets(per_domain, count, text.expert_groups)
    by_layer, experts = shared_share(sets), text.num_experts
    kept = np.array([[kept_share(row, chosen).mean() for row in per_domain] for chosen in sets])
    deviation = chance_deviation(count, experts, len(measured.layers))
    unrouted = (sets & (measured.counts == 0)).sum(-1).mean(-1)
    chance = chance_share(count, experts)
    return Overlap(measured.domains, count, experts, by_layer.mean(0), by_layer, kept, chance, deviation, unrouted)
