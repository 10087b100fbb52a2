"""Machines as data, and whether and how a model fits them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from parity.budget.reads import Caches, hop_bytes, layer_caches, read_per_token, state_traffic
from parity.budget.sizes import GB, Weights, largest_keep
from reference.config import K3Config
from reference.errors import InputError

BUILT_IN = Path(__file__).with_name("machines.toml")
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Machine(BaseModel):
    """A node and how many there are; the fields are explained in ``machines.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    about: str = ""
    nodes: Annotated[int, Field(ge=1)]
    supported_nodes: Annotated[int, Field(ge=1)] | None = None
    memory_gb: Amount
    system_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    bandwidth_gb_s: Amount
    link_gb_s: Amount | None = None


def machines(extra: Path | None = None) -> dict[str, Machine]:
    """Name -> machine: those built in, and those of a user's file, which win. Raises InputError naming file and field.

    The user's file may be TOML, or JSON with the same fields under ``machine``.
    """
    known = read_machines(BUILT_IN)
    return known | (read_machines(extra) if extra else {})


def read_machines(path: Path) -> dict[str, Machine]:
    document = read_document(path)
    rows = document.get("machine") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows:
        mend = "write them as in parity/budget/machines.toml"
        raise InputError(path, "machine", "a list of machines", type(rows).__name__, mend)
    found = {}
    for number, row in enumerate(rows):
        try:
            machine = Machine.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join([f"machine {number}", *map(str, first["loc"])])
            raise InputError(path, field, first["msg"], repr(first.get("input"))[:60], "correct the field") from None
        if machine.nodes > 1 and machine.link_gb_s is None:
            mend = "give the link's bandwidth in GB/s, one way"
            raise InputError(path, f"machine {number}.link_gb_s", "the link between the nodes", "nothing", mend)
        found[machine.name] = machine
    return found


def read_document(path: Path) -> Any:
    """TOML, or what ``.json`` says it is."""
    from reference.config import read_json

    if path.suffix == ".json":
        return read_json(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(path, "file", "a file of machines", "nothing there", "check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(path, "file", "readable UTF-8 text", type(error).__name__, "check the file") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(path, "content", "TOML", error, "correct the line") from None


@dataclass(frozen=True)
class Fit:
    """One recipe on one machine: ``needed`` bytes against ``usable`` ones, and what follows.

    ``keep``: the most experts per layer that fit, all of them where the whole model does, None if not even a token's
    choice does. ``by_bytes`` and ``by_layers``: nodes that the whole model needs if its bytes were cut anywhere, and if
    no layer is cut; ``by_layers`` is None where one layer is more than a node. The two ceilings, in tokens a second for
    one sequence, are of the whole model where it fits and else of the one with ``keep`` experts.
    """

    machine: Machine
    recipe: str
    needed: int
    usable: int
    keep: int | None
    by_bytes: int
    by_layers: int | None
    one_after_another: float | None
    all_at_once: float | None

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable


def usable_bytes(machine: Machine, workspace_gb: float) -> int:
    """What weights and caches may fill of one node; never negative."""
    return max(0, int((machine.memory_gb - machine.system_gb - workspace_gb) * GB))


def fit(machine: Machine, whole: Weights, config: K3Config, held: Caches, workspace_gb: float) -> Fit:
    """Whether and how ``whole`` fits, with the caches of one sequence."""
    node = usable_bytes(machine, workspace_gb)
    usable, needed = machine.nodes * node, whole.nbytes + held.nbytes
    keep = whole.kept if needed <= usable else largest_keep(config, whole, usable - held.nbytes)
    slow, fast = (None, None) if keep is None else ceilings(machine, whole, config, held)
    by_bytes = ceil(needed / node) if node else 0
    return Fit(
        machine,
        whole.recipe.name,
        needed,
        usable,
        keep,
        by_bytes,
        nodes_by_layers(whole, config, held, node),
        slow,
        fast,
    )


def nodes_by_layers(whole: Weights, config: K3Config, held: Caches, node: int) -> int | None:
    """Nodes in a row, each with as many whole layers and their caches as it holds; None if one is too large for it."""
    layers = [a + b for a, b in zip(whole.layers, layer_caches(config, held.context), strict=True)]
    nodes, free = 0, -1
    for nbytes in [whole.top[0], *layers, whole.top[1]]:
        if nbytes > node:
            return None
        if nbytes > free:
            nodes, free = nodes + 1, node
        free -= nbytes
    return nodes


def ceilings(machine: Machine, whole: Weights, config: K3Config, held: Caches) -> tuple[float, float]:
    """Tokens a second of one sequence if nothing but memory took time: nodes one after another, each its own layers,
    with what the link passes on; and all nodes at once, each its share of every matrix, the link for nothing."""
    read = sum(read_per_token(whole, config).values()) + state_traffic(held)
    seconds = read / (machine.bandwidth_gb_s * GB)
    passed = hop_bytes(config.text_config) * (machine.nodes - 1)
    link = passed / (machine.link_gb_s * GB) if passed else 0.0
    return 1 / (seconds + link), machine.nodes / seconds
