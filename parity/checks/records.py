"""The reference's chat encoding, tokenizer and image processor against what is recorded of them (K3.md §12–14).

It takes part whatever port is under test: what has no float64 to be measured by must not be its own judge.
"""

from __future__ import annotations

from collections.abc import Iterator

from parity import records
from parity.checks.plan import Plan
from parity.compare import Place
from parity.findings import Finding
from parity.quantities import Quantity
from parity.sides import reference_port

SECTIONS = {"chat": "§14", "tokenizer": "§13", "image_processor": "§12"}


def run(plan: Plan) -> Iterator[Finding]:
    known = records.stored()
    prefix = "" if plan.port.name == reference_port().name else "reference: "
    for module, name, found in records.computed():
        place = Place("records", "recorded", "any", name, plan.seed)
        what = Quantity(prefix + module, SECTIONS[module])
        right = known.get(module, {}).get(name)
        if right is not None and records.agree(found, right):
            yield place.finding(what, "record", "pass", error=0.0, allowed=0.0, inputs_agree=True)
            continue
        note = f"gives {found} where {right} is recorded" if right else f"{name} is not in {records.FILE.name}"
        yield place.finding(
            what, "record", "fail", error=float("inf"), allowed=0.0, inputs_agree=True, note=note[:400]
        )  # fmt: skip
