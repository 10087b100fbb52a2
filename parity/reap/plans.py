"""From saliency to a plan: which experts each layer keeps, and what is kept by it (K3.md §15)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from parity.budget.sizes import RECIPES
from parity.dry_run import size
from port.prune import checked_plan
from port.tiers import Plan
from reference.config import TextConfig
from reference.errors import InputError
from reference.saliency_result import Saliency

Mode = Literal["uniform", "global"]
FLOOR = 4
"""A layer of a global plan keeps at least so many times the experts that a token chooses."""


def keep_count(keep: float, text: TextConfig) -> int:
    """Experts per layer: a share below 1 or their number. With expert groups a multiple of these.

    Raises InputError for fewer than a token needs, or more than there are.
    """
    groups = text.expert_groups
    count = groups * round(keep * text.num_experts / groups) if keep < 1 else int(keep)
    if (keep >= 1 and keep != count) or not text.num_experts_per_token <= count <= text.num_experts:
        expected = f"{text.num_experts_per_token} to {text.num_experts} experts, or a share of them below 1"
        raise InputError("--keep", "experts", expected, keep, "choose another number")
    if count % groups:
        raise InputError(
            "--keep", "experts", f"a multiple of the {groups} expert groups", count, "choose another number"
        )
    return count


def ranked(saliency: np.ndarray) -> np.ndarray:
    """The experts of a layer, the most salient first; equal ones in the order of their numbers: [E] -> int [E]."""
    return np.argsort(-saliency, kind="stable")


def best(saliency: np.ndarray, count: int, groups: int = 1) -> list[int]:
    """The ``count`` most salient experts of a layer, equally many of each group, ascending by number: from [E]."""
    size = len(saliency) // groups
    kept = [group * size + ranked(saliency[group * size :][:size])[: count // groups] for group in range(groups)]
    return sorted(int(expert) for expert in np.concatenate(kept))


def uniform_plan(saliency: np.ndarray, layers: np.ndarray, count: int, groups: int = 1) -> Plan:
    """The ``count`` best of every layer; saliency [L, E]."""
    return {int(layer): best(row, count, groups) for layer, row in zip(layers, saliency, strict=True)}


def global_plan(saliency: np.ndarray, layers: np.ndarray, total: int, floor: int) -> Plan:
    """The ``total`` best of all layers together, of which every layer gets its ``floor`` best first."""
    order = np.argsort(-saliency, axis=-1, kind="stable")
    kept = np.zeros(saliency.shape, bool)
    np.put_along_axis(kept, order[:, :floor], True, axis=-1)
    candidates = np.flatnonzero(~kept.reshape(-1))
    chosen = candidates[ranked(saliency.reshape(-1)[candidates])[: total - kept.sum()]]
    kept.reshape(-1)[chosen] = True
    return {int(layer): np.flatnonzero(row).tolist() for layer, row in zip(layers, kept, strict=True)}


def made_plan(
    measured: Saliency, keep: float, mode: Mode = "uniform", balance: bool = False, floor: int | None = None
) -> Plan:
    """The plan of a calibration result, checked; raises InputError where there is none."""
    text = measured.config.text_config
    count, saliency = keep_count(keep, text), measured.balanced() if balance else measured.saliency()
    if mode == "uniform":
        plan = uniform_plan(saliency, measured.layers, count, text.expert_groups)
    else:
        plan = global_plan(saliency, measured.layers, count * len(saliency), checked_floor(floor, count, text))
    return checked_plan(dict(plan), measured.config, "the plan")


def checked_floor(floor: int | None, count: int, text: TextConfig) -> int:
    """The fewest experts of a layer: asked for, or FLOOR times a token's choice, as far as there are so many."""
    if text.expert_groups > 1:
        mend = "use --mode uniform"
        raise InputError("--mode", "global", "no expert groups", f"{text.expert_groups} of them", mend)
    fewest = min(FLOOR * text.num_experts_per_token, text.num_experts) if floor is None else floor
    if not text.num_experts_per_token <= fewest <= count:
        expected = f"a floor from {text.num_experts_per_token}, a token's choice, to {count}, the mean of what is kept"
        raise InputError("--floor", "experts", expected, fewest, "keep more, or pass another --floor")
    return fewest


def kept_mask(plan: Plan, measured: Saliency) -> np.ndarray:
    """bool [L, E]."""
    experts = np.arange(measured.mass.shape[-1])
    return np.stack([np.isin(experts, plan[int(layer)]) for layer in measured.layers])


def kept_share(amount: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Of every layer's ``amount`` [L, E] the share that kept experts have: [L]; 1 where a layer has none at all."""
    total = amount.sum(-1)
    return np.where(total > 0, (amount * kept).sum(-1) / np.where(total > 0, total, 1), 1.0)


@dataclass(frozen=True)
class Retention:
    """What a plan keeps. ``mass``: the mean over the layers of the share of saliency kept; ``mass_of`` the same of each
    domain of the calibration, those the plan was not made for too; ``routed`` the share of routings that find their
    expert; ``never_routed`` experts that no token chose, of which ``never_routed_kept`` stay."""

    mass: float
    lowest: tuple[int, float]
    highest: tuple[int, float]
    mass_of: dict[str, float]
    routed: float
    never_routed: int
    never_routed_kept: int
    experts: int
    kept: int
    bytes: dict[str, int]


def retention(plan: Plan, measured: Saliency, every: Saliency, balance: bool = False) -> Retention:
    """``measured`` holds the domains of the plan, ``every`` all that were calibrated."""
    kept, saliency = kept_mask(plan, measured), measured.balanced() if balance else measured.saliency()
    by_layer, counts = kept_share(saliency, kept), measured.counts.sum(0)
    low, high = int(by_layer.argmin()), int(by_layer.argmax())
    return Retention(
        float(by_layer.mean()),
        (int(measured.layers[low]), float(by_layer[low])),
        (int(measured.layers[high]), float(by_layer[high])),
        {
            name: float(kept_share(row, kept).mean())
            for name, row in zip(every.domains, every.per_domain(), strict=True)
        },
        float(kept_share(counts, kept).mean()),
        int((counts == 0).sum()),
        int(((counts == 0) & kept).sum()),
        kept.size,
        int(kept.sum()),
        plan_bytes(plan, measured),
    )


def plan_bytes(plan: Plan, measured: Saliency) -> dict[str, int]:
    """Bytes of a conversion by this plan, in every recipe that can hold the experts."""
    config, found = measured.config, {}
    for recipe in RECIPES:
        try:
            written = size(config, measured.expert_format, recipe.tier, recipe.nonexpert_bits, plan, None, "config")
        except InputError:
            continue
        found[recipe.name] = written.nbytes
    return found


def plan_document(plan: Plan, domains: tuple[str, ...], mode: Mode, balance: bool, kept: Retention) -> dict[str, Any]:
    """What ``convert --plan`` reads, ``keep``, and where it comes from."""
    return {
        "format": 1,
        "mode": mode,
        "domains": list(domains),
        "balanced": balance,
        "retention": asdict(kept),
        "keep": {str(layer): list(experts) for layer, experts in plan.items()},
    }
