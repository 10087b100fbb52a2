"""The parts of a model that the arithmetic tells apart, and their parameters (K3.md §2)."""

from __future__ import annotations

import re
from math import prod

from reference.checkpoint import tensor_rows
from reference.config import K3Config

ROUTED, EMBEDDING, VISION, PROJECTOR = "routed experts", "embedding", "vision tower", "projector"

PATTERNS = (
    (ROUTED, r"\.block_sparse_moe\.experts\."),
    ("shared experts", r"\.shared_experts\."),
    ("latent projections", r"\.routed_expert_(down|up)_proj\."),
    ("router", r"\.block_sparse_moe\.gate\."),
    ("dense MLP", r"\.mlp\.(gate|up|down)_proj\."),
    (EMBEDDING, r"\.embed_tokens\."),
    ("output head", r"\.lm_head\."),
    (VISION, r"^vision_tower\."),
    (PROJECTOR, r"^mm_projector\."),
    ("norms and attention residuals", r"(norm|_res_proj)\.weight$"),
)
"""Component -> its tensors' names; the first that matches counts, after the attention of a layer."""
ATTENTION = {True: "KDA attention", False: "MLA attention"}


def component_of(name: str, config: K3Config) -> str:
    """The component to which a tensor of the checkpoint belongs; ``name`` with ``{expert}`` for a stack."""
    if match := re.search(r"\.layers\.(\d+)\.self_attn\.", name):
        return ATTENTION[config.text_config.is_kda(int(match[1]))]
    return next(component for component, pattern in PATTERNS if re.search(pattern, name))


def parameters(config: K3Config) -> dict[str, int]:
    """Component -> weights that the checkpoint means, the largest first; they add up to ``logical_parameters``."""
    counts: dict[str, int] = {}
    for prefixes, rows in tensor_rows(config, "dense"):
        for name, shape, _ in rows:
            component = component_of(prefixes[0] + name, config)
            counts[component] = counts.get(component, 0) + len(prefixes) * prod(shape)
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
