"""How saliency is spread, and what every size of a pruned model keeps (K3.md §15)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parity.budget.sizes import GB, Recipe, largest_keep, weights
from parity.reap.plans import kept_mask, kept_share, uniform_plan
from reference.errors import InputError
from reference.saliency_result import Saliency

SHARES = (0.5, 0.8, 0.9, 0.99)
POINTS = 16


@dataclass(frozen=True)
class LayerSpread:
    """One layer: ``holders`` share of mass -> the fewest experts that hold it; ``gini`` 0 if all experts are alike,
    near 1 if one holds all; ``never_routed`` experts; ``largest`` the most salient one's share."""

    layer: int
    holders: dict[float, int]
    gini: float
    largest: float
    never_routed: int


@dataclass(frozen=True)
class Point:
    """``kept`` experts per layer, what they hold of the saliency, and the bytes of the model; ``memory_gb`` where this
    is the most that fits into so much."""

    kept: int
    mass: float
    nbytes: int
    memory_gb: float | None = None


def holders(saliency: np.ndarray, share: float) -> int:
    """The fewest experts of a layer that hold ``share`` of its saliency [E]; 0 if there is none."""
    cumulated = np.cumsum(np.sort(saliency)[::-1])
    if cumulated[-1] == 0:
        return 0
    return min(int(np.searchsorted(cumulated, share * cumulated[-1] * (1 - 1e-12))) + 1, len(saliency))


def gini(saliency: np.ndarray) -> float:
    """Gini coefficient of a layer's saliency [E]: ``Σ_i Σ_j |S_i − S_j| / (2 E Σ S)``."""
    rising, experts = np.sort(saliency), len(saliency)
    total = rising.sum()
    if total == 0:
        return 0.0
    return float((2 * np.arange(1, experts + 1) - experts - 1) @ rising / (experts * total))


def spread(measured: Saliency) -> list[LayerSpread]:
    """Layer by layer, all domains together."""
    rows = []
    for layer, row, counts in zip(measured.layers, measured.saliency(), measured.counts.sum(0), strict=True):
        held = {share: holders(row, share) for share in SHARES}
        largest = float(row.max() / row.sum()) if row.sum() else 0.0
        rows.append(LayerSpread(int(layer), held, gini(row), largest, int((counts == 0).sum())))
    return rows


def retention_curve(measured: Saliency, recipe: Recipe, memories: list[float]) -> list[Point]:
    """From a token's choice to all experts, the same number in every layer, and the points where ``memories`` (GB for
    the weights alone) are reached. Raises InputError where the recipe cannot hold the experts."""
    config, text = measured.config, measured.config.text_config
    groups, fewest = text.expert_groups, text.num_experts_per_token
    counts = {groups * round(count / groups) for count in np.linspace(fewest, text.num_experts, POINTS)}
    marks: dict[int, float] = {}
    whole = weights(config, recipe, None, measured.expert_format)
    for memory in sorted(memories, reverse=True):
        keep = largest_keep(config, whole, int(memory * GB), measured.expert_format)
        if keep is None:
            mend = f"the smallest needs {weights(config, recipe, fewest, measured.expert_format).nbytes / GB:.3g} GB"
            raise InputError("--memory", "GB", "room for a token's choice of experts in every layer", memory, mend)
        marks[keep - keep % groups] = memory
    saliency, points = measured.saliency(), []
    for count in sorted(counts | marks.keys()):
        plan = uniform_plan(saliency, measured.layers, count, groups)
        mass = float(kept_share(saliency, kept_mask(plan, measured)).mean())
        nbytes = weights(config, recipe, count, measured.expert_format).nbytes
        points.append(Point(count, mass, nbytes, marks.get(count)))
    return points
