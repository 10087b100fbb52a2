"""The truth is not its own judge: a fault in the reference itself is found by the authors' results."""

from __future__ import annotations

import pytest

import reference.vision
from parity.checks import CHECKS, Plan
from parity.faults import Fault, fault
from parity.findings import Report
from parity.ports import load_port


def blamed(check: str, port: str) -> set[str]:
    findings = tuple(CHECKS[check](Plan(load_port(port), dtypes=("float32",))))
    return {finding.module for finding in Report(port=port, header={}, findings=findings, seconds=0.0).sources} & {
        finding.module for finding in findings if finding.status == "fail"
    }


def wrong_eps(original, package):
    return lambda x, weight, eps: original(x, weight, 2.0**-7)


@pytest.mark.parametrize(
    "wrong, module",
    [
        (fault("F02"), "kda"),
        (fault("F44"), "attn_res.output"),
        (Fault("F99", "vision", "eps is bfloat16's", "", {"vision.norm_rounded_once": wrong_eps}), "vision.block"),
    ],
    ids=["gate", "output-mix", "vision-eps"],
)
def test_a_wrong_reference_is_named(wrong: Fault, module: str):
    """Everything the harness computes is wrong alike, the float64 truth too; only the golden trace is not."""
    with wrong.applied("reference"):
        assert f"reference: {module}" in blamed("anchor", "mlx")
        assert module in blamed("golden", "reference")
    assert not blamed("anchor", "mlx")
    assert reference.vision.VISION_NORM_EPS < 2e-7
