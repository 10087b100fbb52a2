"""Bytes of the model in every recipe, whole and pruned (K3.md §15)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from parity.budget.components import ROUTED, component_of
from port.tiers import outputs, tier_named
from reference.checkpoint import ExpertFormat
from reference.config import K3Config
from reference.errors import InputError

GB, TB = 10**9, 10**12


@dataclass(frozen=True)
class Recipe:
    """A tier, and whether what it leaves in bf16 is put into 8 bits."""

    tier: str
    nonexpert_bits: int | None = None

    @property
    def name(self) -> str:
        return f"{self.tier}+8bit" if self.nonexpert_bits else self.tier


RECIPES = (
    Recipe("mxfp4"),
    Recipe("mxfp4", 8),
    Recipe("3bit"),
    Recipe("mixed2"),
    Recipe("mixed2", 8),
    Recipe("2bit"),
)


@dataclass(frozen=True)
class Weights:
    """Bytes on disk and in memory alike. ``parts`` component -> bytes; ``layers`` bytes of each layer; ``top`` what
    stands before the first layer (embedding, vision) and after the last (head, last norm); ``kept`` experts a layer."""

    recipe: Recipe
    kept: int
    parts: Mapping[str, int]
    layers: tuple[int, ...]
    top: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())

    @property
    def routed(self) -> int:
        return self.parts.get(ROUTED, 0)

    @property
    def rest(self) -> int:
        return self.nbytes - self.routed


@lru_cache(maxsize=256)
def weights(
    config: K3Config, recipe: Recipe, kept: int | None = None, expert_format: ExpertFormat = "mxfp4"
) -> Weights:
    """The sizes of a recipe with ``kept`` experts in every MoE layer, else all.

    Raises InputError where the recipe cannot hold the experts, or for a number that no plan may have.
    """
    text = config.text_config
    kept = text.num_experts if kept is None else kept
    if not text.num_experts_per_token <= kept <= text.num_experts:
        expected = f"{text.num_experts_per_token} to {text.num_experts} experts, from a token's choice to all"
        raise InputError("--keep", "experts", expected, kept, "choose another number")
    plan = {layer: range(kept) for layer in range(text.num_hidden_layers) if text.is_moe(layer)}
    parts, layers, top = Counter(), [0] * text.num_hidden_layers, [0, 0]
    for output in outputs(config, expert_format, tier_named(recipe.tier, recipe.nonexpert_bits), plan):
        parts[component_of(output.source, config)] += output.nbytes
        if match := re.search(r"\.layers\.(\d+)\.", output.source):
            layers[int(match[1])] += output.nbytes
        else:
            first = output.source.startswith(("vision", "mm_")) or "embed_tokens" in output.source
            top[0 if first else 1] += output.nbytes
    return Weights(recipe, kept, dict(parts), tuple(layers), tuple(top))


def expert_bytes(whole: Weights, config: K3Config) -> int:
    """Bytes of one routed expert."""
    text = config.text_config
    layers = sum(text.is_moe(layer) for layer in range(text.num_hidden_layers))
    return whole.routed // max(layers * whole.kept, 1)


def largest_keep(config: K3Config, whole: Weights, room: int, expert_format: ExpertFormat = "mxfp4") -> int | None:
    """The most experts per layer with which weights fit into ``room`` bytes; None if not even a token's choice does."""
    text = config.text_config
    layers = sum(text.is_moe(layer) for layer in range(text.num_hidden_layers))
    # Router rows and biases go with the experts: they too grow with the number kept.
    fewest = weights(config, whole.recipe, text.num_experts_per_token, expert_format).nbytes
    step = (whole.nbytes - fewest) / max(whole.kept - text.num_experts_per_token, 1)
    if not layers or room < fewest:
        return None
    return min(text.num_experts, text.num_experts_per_token + int((room - fewest) // step)) if step else whole.kept


def bits_per_weight(nbytes: float, weights: int) -> float:
    return 8 * nbytes / weights
