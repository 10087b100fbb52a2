"""From findings to a test's verdict."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from parity import baseline, known
from parity.checks import CHECKS, Plan
from parity.findings import Finding, Report
from parity.report import failure_text
from parity.runner import repeat_command

DTYPES = ("float32", "bfloat16")
SHOWN = 6
reports: list[Report] = []
"""What the running test found; the plugin counts it."""


def judge(plan: Plan, check: str) -> None:
    """Run one check; fail with its sources, or skip with the reason where the port offers none of it."""
    findings = [
        finding.model_copy(update={"command": repeat_command(plan, finding)})
        for finding in baseline.judged(plan.port, CHECKS[check](plan))
    ]
    verdict(plan.port.name, findings)


def verdict(port: str, findings: Iterable[Finding]) -> None:
    """Known failures, no more and no fewer, are expected ones."""
    report = Report(port=port, header={}, findings=tuple(findings), seconds=0.0)
    reports.append(report)
    judged = known.active.verdict(report)
    if judged.new:
        pytest.fail("\n".join(failure_text(port, finding) for finding in judged.new[:SHOWN]), pytrace=False)
    if judged.gone:
        lines = (f"{key.module} no longer fails in {key.check}, {key.dtype}, {key.case}" for key in judged.gone)
        pytest.fail("\n".join([*lines, f"remove this from {known.active.source}"]), pytrace=False)
    if judged.reasons:
        pytest.xfail("; ".join(judged.reasons))
    if not report.counts["pass"]:
        reasons = {finding.note for finding in report.findings if finding.status == "unsupported"}
        if not reasons:
            pytest.fail("nothing was compared", pytrace=False)
        pytest.skip("unsupported by this port: " + "; ".join(sorted(reasons)))
