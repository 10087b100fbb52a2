"""The whole budget of a configuration as one document; the command shows it, ``--json`` prints it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from parity.budget.components import ROUTED, parameters
from parity.budget.machines import Fit, Machine, fit
from parity.budget.published import Claim, claims
from parity.budget.reads import Caches, caches, hop_bytes, read_per_token, state_traffic
from parity.budget.sizes import GB, RECIPES, Recipe, Weights, bits_per_weight, weights
from parity.budget.steps import Step, steps
from parity.coverage import load_config
from reference.config import K3Config
from reference.errors import InputError


@dataclass(frozen=True)
class Settings:
    """What the user may choose. ``bandwidth_gb_s`` and ``memory_gb`` are asked about beside the machines."""

    context: int
    keep: int | None = None
    memory_gb: float = 512
    bandwidth_gb_s: float = 819
    workspace_gb: float = 4


@dataclass(frozen=True)
class Budget:
    config: K3Config
    settings: Settings
    counts: dict[str, int]
    recipes: list[Weights]
    refused: dict[str, str]
    held: Caches
    fits: list[Fit]
    nodes: dict[str, list[Step]]
    published: list[Claim]


def budget(config: K3Config, settings: Settings, chosen: list[Machine]) -> Budget:
    """Everything; raises InputError for a number of experts that cannot be kept."""
    counts, held, found, refused = parameters(config), caches(config, settings.context), [], {}
    for recipe in RECIPES:
        try:
            found.append(weights(config, recipe, settings.keep))
        except InputError as error:
            if error.where == "--keep":
                raise
            refused[recipe.name] = str(error)
    fits = [fit(machine, whole, config, held, settings.workspace_gb) for machine in chosen for whole in found]
    nodes = {}
    if not refused.get("mxfp4"):
        released = weights(config, Recipe("mxfp4"))
        kinds = {(machine.memory_gb, machine.system_gb): machine for machine in reversed(chosen)}
        for machine in reversed(kinds.values()):
            nodes[machine.name] = steps(machine, released, config, held, counts, settings.workspace_gb)
    published = claims(config, settings.workspace_gb) if config == load_config("k3") else []
    return Budget(config, settings, counts, found, refused, held, fits, nodes, published)


def assumptions(settings: Settings) -> list[str]:
    """Everything that the figures rest on and a reader might take otherwise."""
    return [
        "GB and TB are 10^9 and 10^12 bytes; memory as on data sheets, 7 % less than in 2^30",
        "weights take the same room in memory as on disk; nothing is held twice",
        "one sequence is decoded at a time, of text; an expert that several sequences share is not counted",
        f"caches: {settings.context:,} tokens; KDA states float32, convolution states bf16; MLA keeps latent"
        " and shared key in bf16, not full keys and values",
        "read per token: 'chosen / kept' of the routed experts, one row of the embedding, no vision; the rest whole",
        "moved per token besides: KDA states read and written back, the MLA cache read once",
        f"workspace: {settings.workspace_gb:g} GB per node for activations and buffers (--workspace-gb)",
        "ceilings take full memory bandwidth and no other time; real decoding is slower",
        "one after another: nodes hold whole layers and wait for each other, a hop passes the prefix sum and all block"
        " vectors in bf16; all at once: every matrix is split and the link costs nothing, which no link does",
        "an affine group of 64 has a bf16 scale and bias (b + 0.5 bits), an MXFP4 group of 32 a scale byte (4.25 bits)",
    ]


def needed_bits(result: Budget) -> dict[str, float]:
    """Bits per weight that ``memory_gb`` allows: for all weights alike, and for the experts if the rest is kept in
    8 bits or bf16. Negative: the rest alone is too large. Neither caches nor the system are taken off."""
    room, total = result.settings.memory_gb * GB, sum(result.counts.values())
    bits = {"all weights alike": bits_per_weight(room, total)}
    if routed := result.counts.get(ROUTED):
        for name, label in (("mxfp4+8bit", "8 bits"), ("mxfp4", "bf16")):
            whole = next((item for item in result.recipes if item.recipe.name == name), None)
            if whole is not None:
                bits[f"the experts, the rest in {label}"] = bits_per_weight(room - whole.rest, routed)
    return bits


def ceiling(result: Budget, whole: Weights) -> float:
    """Tokens a second at ``bandwidth_gb_s``."""
    moved = sum(read_per_token(whole, result.config).values()) + state_traffic(result.held)
    return result.settings.bandwidth_gb_s * GB / moved


def as_document(result: Budget) -> dict[str, Any]:
    total = sum(result.counts.values())
    return {
        "format": 1,
        "settings": asdict(result.settings),
        "parameters": {"total": total, "components": result.counts},
        "recipes": [recipe_document(result, whole) for whole in result.recipes],
        "refused": result.refused,
        "bits_per_weight": needed_bits(result),
        "caches": asdict(result.held) | {"total": result.held.nbytes, "moved_per_token": state_traffic(result.held)},
        "hop_bytes": hop_bytes(result.config.text_config),
        "machines": [fit_document(row) for row in result.fits],
        "nodes": {name: [step._asdict() for step in rows] for name, rows in result.nodes.items()},
        "published": [claim._asdict() for claim in result.published],
        "assumptions": assumptions(result.settings),
    }


def recipe_document(result: Budget, whole: Weights) -> dict[str, Any]:
    read = read_per_token(whole, result.config)
    return {
        "recipe": whole.recipe.name,
        "kept": whole.kept,
        "bytes": whole.nbytes,
        "routed_bytes": whole.routed,
        "rest_bytes": whole.rest,
        "components": dict(whole.parts),
        "read_per_token": read,
        "read_bytes_per_token": sum(read.values()),
        "ceiling_tokens_per_second": ceiling(result, whole),
    }


def fit_document(row: Fit) -> dict[str, Any]:
    return asdict(row) | {"machine": row.machine.model_dump(), "fits": row.fits}
