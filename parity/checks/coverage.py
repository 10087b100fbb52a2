"""That a port reads exactly the tensors the checkpoint has, for every configuration.

The schema itself is anchored to the released names by the golden case's index, which this project did not write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from parity.checks.plan import GOLDEN_IN_REPO, Plan
from parity.compare import Place, crash_note
from parity.findings import Finding
from parity.protocol import Unsupported
from parity.quantities import LAYER, Quantity
from reference.checkpoint import expert_format_of, tensor_specs
from reference.config import K3Config

SCHEMA = Quantity("checkpoint", "§2", 0)


def run(plan: Plan) -> Iterator[Finding]:
    index = json.loads((GOLDEN_IN_REPO / "model.safetensors.index.json").read_text())["weight_map"]
    config = json.loads((GOLDEN_IN_REPO / "config.json").read_text())
    schema = {spec.name for spec in tensor_specs(K3Config.from_dict(config), expert_format_of(index))}
    yield _finding(Place("coverage", "golden:mini", "any"), "schema", schema, set(index))
    yield from _port_findings(plan, "golden:mini", config, expert_format_of(index), set(index))
    for case in plan.cases:
        names = {spec.name for spec in tensor_specs(case.config, case.entry.expert_format)}
        yield from _port_findings(plan, case.name, case.entry.config, case.entry.expert_format, names)


def _port_findings(plan: Plan, name: str, config: dict, expert_format: str, names: set[str]) -> Iterator[Finding]:
    place = Place("coverage", name, "any")
    try:
        found = plan.port.tensor_names(config, expert_format)
    except Unsupported as reason:
        yield place.finding(SCHEMA, "tensor_names", "unsupported", note=str(reason))
        return
    except Exception as error:
        yield place.finding(SCHEMA, "tensor_names", "error", note=crash_note(error), inputs_agree=True)
        return
    parts = tuple({name.partition(".")[0] + "." for name in found})
    yield _finding(place, "tensor_names", found, {name for name in names if name.startswith(parts)})


def _finding(place: Place, tap: str, found: set[str], truth: set[str]) -> Finding:
    missing, extra = sorted(truth - found), sorted(found - truth)
    if not missing and not extra:
        return place.finding(SCHEMA, tap, "pass", error=0.0, allowed=0.0, inputs_agree=True, note=f"{len(truth)} names")
    what = SCHEMA._replace(module=_module_of(missing + extra))
    note = f"{len(missing)} not read{_first(missing)}, {len(extra)} not in the checkpoint{_first(extra)}"
    return place.finding(what, tap, "fail", error=float("inf"), allowed=0.0, inputs_agree=True, note=note)


def _first(names: list[str]) -> str:
    return f" (first {names[0]})" if names else ""


def _module_of(names: Iterable[str]) -> str:
    """The module whose tensors are in question: attention of the wrong kind shows as self_attn names on both sides."""
    parts = {match[2].split(".")[0] if (match := LAYER.match(name)) else name.split(".")[0] for name in names}
    if parts == {"self_attn"}:
        return "layer_kinds"
    return parts.pop() if len(parts) == 1 else "checkpoint"
