"""From findings to a test's verdict."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from parity.baseline import judged
from parity.checks import CHECKS, Plan
from parity.findings import Finding, Report
from parity.report import failure_text
from parity.runner import repeat_command

DTYPES = ("float32", "bfloat16")


def judge(plan: Plan, check: str) -> None:
    """Run one check; fail with its sources, or skip with the reason where the port offers none of it."""
    findings = [
        finding.model_copy(update={"command": repeat_command(plan, finding)})
        for finding in judged(plan.port, CHECKS[check](plan))
    ]
    verdict(plan.port.name, findings)


def verdict(port: str, findings: Iterable[Finding]) -> None:
    report = Report(port=port, header={}, findings=tuple(findings), seconds=0.0)
    if report.failures:
        pytest.fail("\n".join(failure_text(port, finding) for finding in report.sources[:6]), pytrace=False)
    if not report.counts["pass"]:
        reasons = {finding.note for finding in report.findings if finding.status == "unsupported"}
        if not reasons:
            pytest.fail("nothing was compared", pytrace=False)
        pytest.skip("unsupported by this port: " + "; ".join(sorted(reasons)))
