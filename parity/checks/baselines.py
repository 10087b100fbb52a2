"""The committed baselines themselves: none missing, none stale."""

from __future__ import annotations

from collections.abc import Iterator

from parity.baseline import Baselines
from parity.checks.plan import Plan
from parity.compare import Place
from parity.findings import Finding
from parity.quantities import Quantity


def run(plan: Plan) -> Iterator[Finding]:
    """One failure per problem, or one pass; nothing where the port has no baselines."""
    from parity.baseline_files import problems

    baselines, what = Baselines(plan.port), Quantity("baselines", "–")
    place = Place("baselines", "files", "any", seed=plan.seed)
    found = list(problems(baselines))
    for problem in found:
        yield place.finding(what, "files", "fail", note=problem, inputs_agree=True)
    if baselines.files and not found:
        yield place.finding(what, "files", "pass")
