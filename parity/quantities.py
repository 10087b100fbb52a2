"""What each tap is: the module it belongs to, its paragraph of K3.md, and its place in that module's computation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from reference.config import TextConfig

LAYER = re.compile(r"^language_model\.model\.layers\.(\d+)\.(.+)$")
TEXT_MODEL = "language_model.model."


class Quantity(NamedTuple):
    """``order`` sorts the taps of one layer part by when they are computed; ``needs`` are the taps it is computed from,
    within that part: a wrong tap whose needs are right is the source."""

    module: str
    section: str
    order: int = 0
    needs: tuple[str, ...] = ()


CONVOLVED = ("self_attn.q", "self_attn.k", "self_attn.v")
GATES = ("self_attn.log_decay", "self_attn.beta")

KDA = {
    "self_attn.q": Quantity("short_conv", "§3", 0),
    "self_attn.k": Quantity("short_conv", "§3", 1),
    "self_attn.v": Quantity("short_conv", "§3", 2),
    "self_attn.log_decay": Quantity("kda.gate", "§4.4", 3),
    "self_attn.beta": Quantity("kda.gate", "§4.3", 4),
    "self_attn.core": Quantity("kda.recurrence", "§4.5", 5, CONVOLVED + GATES),
    "self_attn.state": Quantity("kda.recurrence", "§4.5", 6, CONVOLVED[1:] + GATES),
    "self_attn.output": Quantity("kda.output", "§4.6", 7, ("self_attn.core",)),
}
MLA = {
    "self_attn.query": Quantity("mla.query", "§5", 0),
    "self_attn.latent": Quantity("mla.latent", "§5", 1),
    "self_attn.key_rope": Quantity("mla.latent", "§5", 2),
    "self_attn.attention": Quantity(
        "mla.attention", "§5", 3, ("self_attn.query", "self_attn.latent", "self_attn.key_rope")
    ),
    "self_attn.output": Quantity("mla.output", "§5", 4, ("self_attn.attention",)),
}
MOE = {
    "router.scores": Quantity("router", "§7", 0),
    "router.indices": Quantity("router", "§7", 1, ("router.scores",)),
    "router.margin": Quantity("router", "§7", 2, ("router.scores",)),
    "router.weights": Quantity("router", "§7", 3, ("router.scores",)),
    "moe.latent": Quantity("latent_moe", "§7", 4),
    "moe.routed": Quantity("experts", "§7", 5, ("moe.latent", "router.weights")),
    "mlp.output": Quantity("latent_moe", "§7", 6, ("moe.routed",)),
}
DENSE = {"mlp.output": Quantity("mlp", "§3", 0)}
LAYER_TAPS = {
    "self_attn.input": Quantity("attn_res", "§6", 0),
    "mlp.input": Quantity("attn_res", "§6", 0),
    "output": Quantity("attn_res", "§6", 1),
}
TOP_TAPS = {
    "language_model.model.embed_tokens.output": Quantity("embed_tokens", "§2", 0),
    "language_model.model.norm.output": Quantity("attn_res.output", "§6", 0),
    "logits": Quantity("lm_head", "§6", 0),
}

VISION_TAPS = {
    "patch_embed.output": Quantity("vision.patch_embed", "§9"),
    "encoder.blocks.attention": Quantity("vision.attention", "§9", 0),
    "encoder.blocks.output": Quantity("vision.block", "§9", 1, ("encoder.blocks.attention",)),
    "tower.output": Quantity("vision.merge", "§9"),
    "projector.output": Quantity("projector", "§9"),
    "merged_embeds": Quantity("merge", "§10"),
    "attention_mask": Quantity("merge", "§10"),
    "position_ids": Quantity("merge", "§10"),
}
BLOCK = re.compile(r"^encoder\.blocks\.(\d+)\.(.+)$")


def vision_tap(tap: str) -> tuple[int, str] | None:
    """(block or 0, key of VISION_TAPS), or None for a tap of the text tower."""
    match = BLOCK.match(tap)
    block, key = (int(match[1]), f"encoder.blocks.{match[2]}") if match else (0, tap)
    return (block, key) if key in VISION_TAPS else None


def shows(declared: frozenset[str] | None, tap: str) -> bool:
    """Whether a port that declares these taps (None: all of them) has to show ``tap``, whatever its layer or block."""
    if declared is None or tap in declared:
        return True
    vision = vision_tap(tap)
    return (vision[1] if vision else layer_of(tap)[1]) in declared


def layer_of(tap: str) -> tuple[int | None, str]:
    """(layer, the tap's name within it), or (None, tap) for a tap outside the layers; ``tap`` without its run."""
    match = LAYER.match(tap)
    return (int(match[1]), match[2]) if match else (None, tap)


def layer_quantities(text: TextConfig, layer: int) -> dict[str, Quantity]:
    """Every tap of the 0-based ``layer``, by its name within the layer."""
    attention = KDA if text.is_kda(layer) else MLA
    return LAYER_TAPS | attention | (MOE if text.is_moe(layer) else DENSE)


def quantity(text: TextConfig, tap: str) -> Quantity:
    """What ``tap`` (without its run) is in a model of this configuration; KeyError for an unknown tap."""
    if vision := vision_tap(tap):
        return VISION_TAPS[vision[1]]
    layer, name = layer_of(tap)
    return TOP_TAPS[tap] if layer is None else layer_quantities(text, layer)[name]


def computed_order(text: TextConfig, tap: str) -> tuple[int, int, int]:
    """Sorts taps by when a forward pass computes them, pictures first."""
    if vision := vision_tap(tap):
        return -2, list(VISION_TAPS).index("encoder.blocks.output" if "blocks" in vision[1] else vision[1]), vision[0]
    layer, name = layer_of(tap)
    if layer is None:
        place = list(TOP_TAPS).index(tap)
        return (-1 if place == 0 else text.num_hidden_layers, place, 0)
    attention = KDA if text.is_kda(layer) else MLA
    if name == "self_attn.input":
        return layer, 0, 0
    if name in attention:
        return layer, 1, attention[name].order
    if name == "mlp.input":
        return layer, 2, 0
    if name == "output":
        return layer, 4, 0
    return layer, 3, quantity(text, tap).order


def inputs_agree(text: TextConfig, tap: str, wrong: Iterable[str]) -> bool:
    """Whether nothing that ``tap`` is computed from, in the same part of its layer, is among the ``wrong`` taps."""
    layer, name = layer_of(tap)
    if layer is None:
        block = tap.rpartition(".")[0]
        return not (tap.endswith(".output") and f"{block}.attention" in wrong)
    quantities, needed, pending = layer_quantities(text, layer), set(), [name]
    while pending:
        needs = quantities[pending.pop()].needs
        needed.update(needs)
        pending += needs
    return not any(layer_of(other) == (layer, need) for other in wrong for need in needed)
