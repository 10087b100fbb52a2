"""The whole text tower in one pass, chained: how rounding grows, and that nothing is lost between the modules."""

from __future__ import annotations

from collections.abc import Iterator

from parity.chained import Batch, chained_findings
from parity.checks.plan import Plan
from parity.compare import Place
from parity.findings import Finding


def run(plan: Plan) -> Iterator[Finding]:
    for case, dtype in plan.each():
        ids = case.tokens()
        place = Place("end_to_end", case.name, dtype, seed=plan.seed, isolated=False)
        yield from chained_findings(place, plan.sides(case, dtype), case.text, Batch(ids, None, [ids.shape[1]]))
