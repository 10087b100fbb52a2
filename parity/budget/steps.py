"""How many nodes of one kind the whole model needs, one consideration after the other (K3.md §15)."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from parity.budget.components import ROUTED
from parity.budget.machines import Machine, nodes_by_layers, usable_bytes
from parity.budget.reads import Caches
from parity.budget.sizes import GB, Weights
from reference.config import K3Config


class Step(NamedTuple):
    """``needed`` bytes against ``node`` bytes of one node; ``nodes`` is None where no number of them is enough."""

    what: str
    needed: int
    node: int
    nodes: int | None


def steps(
    machine: Machine, whole: Weights, config: K3Config, held: Caches, counts: Mapping[str, int], workspace_gb: float
) -> list[Step]:
    """From four bits flat to whole layers on real nodes. ``whole`` is the model as released, ``counts`` component ->
    parameters."""
    memory, node = int(machine.memory_gb * GB), usable_bytes(machine, workspace_gb)
    rest = sum(counts.values()) - counts.get(ROUTED, 0)
    caches = whole.nbytes + held.nbytes
    kept_free = f"{machine.system_gb:g} GB system and {workspace_gb:g} GB workspace kept free on each"
    rows = [
        ("every weight in 4 bits flat", sum(counts.values()) // 2, memory),
        ("the experts' block scales: 4.25 bits", whole.routed + rest // 2, memory),
        ("everything else in bf16, as released", whole.nbytes, memory),
        (f"KDA states and an MLA cache of {held.context:,} tokens", caches, memory),
        (kept_free, caches, node),
    ]
    counted = [Step(what, needed, free, ceil(needed / free) if free else None) for what, needed, free in rows]
    counted.append(Step("no layer cut between two nodes", caches, node, nodes_by_layers(whole, config, held, node)))
    return counted
