"""A converter with a known fault writes what verify finds, under its name; a right one does not (K3.md §8, §15)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from fixtures.build import cached
from fixtures.catalogue import entry
from fixtures.widened import widened
from parity.fault_catalogue.conversion import FAULTS, ConversionFault
from parity.tests.test_prune import plan_of
from parity.verify.findings import Verdict
from parity.verify.run import verify
from port.convert import convert


def verdict(case: str, tier: str, pruned: bool, folder: Path, force=None) -> Verdict:
    """The fault stays in force while verify looks: nothing that it relies on may come from the converter."""
    item = widened(entry(case))
    plan = plan_of(item.parsed, 1) if pruned else None
    with force or nullcontext():
        convert(cached(item), folder, tier, plan=plan, sync=False)
        return verify(folder, cached(item))


@pytest.mark.parametrize("item", FAULTS, ids=lambda item: item.fault.id)
def test_a_faulty_converter_is_caught_by_verify(item: ConversionFault, tmp_path: Path):
    found = verdict(item.fault.case, item.tier, item.pruned, tmp_path / "out", item.in_force())
    problems = [problem for problem in found.problems if problem.kind == item.kind]
    assert found.exit_code == 1 and problems, [problem.line() for problem in found.problems[:3]]
    assert any(item.looks_like in problem.looks_like for problem in problems), problems[0].line()
    if item.kind == "expert":
        assert all(None not in (problem.layer, problem.expert, problem.projection) for problem in problems)


@pytest.mark.parametrize(
    ("case", "tier", "pruned"), sorted({(item.fault.case, item.tier, item.pruned) for item in FAULTS})
)
def test_a_right_converter_is_not(case: str, tier: str, pruned: bool, tmp_path: Path):
    assert verdict(case, tier, pruned, tmp_path / "out").exit_code == 0


def test_faults_are_told_apart():
    assert len({item.fault.id for item in FAULTS}) == len({item.fault.claim for item in FAULTS}) == len(FAULTS)
    assert all(bool(item.fault.patches) != bool(item.number) for item in FAULTS)
