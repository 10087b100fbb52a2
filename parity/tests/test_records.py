"""The reference's own text and picture parts have a judge that is not themselves."""

from __future__ import annotations

import pytest

from parity.checks import CHECKS, Plan
from parity.faults import fault
from parity.ports import load_port


@pytest.mark.parametrize(("id", "module"), [("F108b", "chat"), ("F106", "tokenizer"), ("F93", "image_processor")])
def test_a_fault_in_the_reference_itself_is_seen(id: str, module: str):
    """Put into the reference, it is in force for the truth and for the port alike."""
    with fault(id).applied("reference"):
        wrong = {f.module for f in CHECKS["records"](Plan(load_port("mlx"))) if f.status == "fail"}
    assert wrong == {f"reference: {module}"}


def test_nothing_else_is():
    assert {f.status for f in CHECKS["records"](Plan(load_port("mlx")))} == {"pass"}
