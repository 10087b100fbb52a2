"""The harness has teeth: known faults are caught at their module, in either twin; the twins themselves are not."""

from __future__ import annotations

import pytest

from parity.checks import CHECKS, Plan
from parity.checks.plan import case_named
from parity.fault_catalogue import FAULTS
from parity.faults import Fault, FaultyPort, fault
from parity.findings import Finding, Report
from parity.ports import load_port

CASES = {"router": "groups"}
"""The case that can feel a module's faults, where it is not ``mini``."""
CHECKED = ("coverage", "modules", "layers", "end_to_end", "padding")
PACKAGES = {"reference": "reference", "mlx": "port"}


def report(port, module: str, dtype: str) -> Report:
    """The checks that need no golden case; the first that fails says enough."""
    plan = Plan(port, (case_named(CASES.get(module, "mini")),), (dtype,))
    findings: list[Finding] = []
    for name in CHECKED:
        findings += CHECKS[name](plan)
        if any(finding.status == "fail" for finding in findings):
            break
    return Report(port=port.name, header={}, findings=tuple(findings), seconds=0.0)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("item", FAULTS, ids=lambda item: item.id)
def test_fault_is_caught_at_its_module(item: Fault, name: str):
    result = report(FaultyPort(load_port(name), PACKAGES[name], [item]), item.module, "float32")
    assert result.exit_code == 1
    assert item.module in {finding.module for finding in result.sources}


@pytest.mark.parametrize("name", PACKAGES)
def test_no_fault_no_alarm(name: str):
    faultless = FaultyPort(load_port(name), PACKAGES[name], [])
    for module in ("kda.gate", "router"):
        assert report(faultless, module, "float32").exit_code == 0


def test_faults_leave_nothing_behind():
    import reference.kda

    before = dict(vars(reference.kda))
    with fault("F01").applied("reference"):
        assert reference.kda.log_decay is not before["log_decay"]
    assert dict(vars(reference.kda)) == before


def test_fault_is_in_force_for_the_port_only():
    """The truth comes from the same package: a fault that leaked into it would be invisible."""
    port = FaultyPort(load_port("reference"), "reference", [fault("F02")])
    result = report(port, "kda.gate", "float32")
    assert {finding.module for finding in result.sources} == {"kda.gate"}
    assert report(load_port("reference"), "kda.gate", "float32").exit_code == 0
