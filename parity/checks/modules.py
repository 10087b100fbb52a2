"""Every small function of the mathematics, in the regimes that it can feel."""

from __future__ import annotations

from collections.abc import Iterator

from parity.checks.plan import Plan
from parity.findings import Finding
from parity.functions import all_function_findings


def run(plan: Plan) -> Iterator[Finding]:
    yield from all_function_findings(plan.port, plan.dtypes, plan.seed)
