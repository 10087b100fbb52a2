"""Known ways to get splitting wrong are caught, at their module, and named (K3.md §6, §7)."""

from __future__ import annotations

import re

import pytest

from parity.checks import Plan
from parity.checks.plan import case_named
from parity.fault_catalogue.pipeline import FAULTS, Answer, SplitFault, answer, known_answers, looks_like
from parity.ports import load_port
from parity.protocol import Step
from parity.runner import run_checks

CASE = "mini"
IDS = [item.fault.id for item in FAULTS]


@pytest.mark.parametrize("item", FAULTS, ids=IDS)
def test_fault_is_caught_where_it_is(item: SplitFault):
    port = item.put_into(load_port(f"pipeline:{item.split}"))
    report = run_checks(Plan(port, (case_named(CASE),), ("float32",), 0), ["end_to_end"])
    assert report.exit_code != 0
    first = report.sources[0]
    if item.says:
        assert first.status == "error" and re.search(item.says, first.note)
    else:
        assert (first.status, first.module) == ("fail", item.fault.module)


def steps() -> list[Step]:
    return [Step(input_ids=case_named(CASE).tokens(batch=1))]


@pytest.fixture(scope="module")
def known() -> dict[bool, dict[str, Answer]]:
    """By whether experts are split."""
    checkpoint = case_named(CASE).checkpoint
    return {"experts" in split: known_answers(split, checkpoint, "float32", steps()) for split in ("2", "experts=2")}


@pytest.mark.parametrize("item", FAULTS, ids=IDS)
def test_fault_is_named(item: SplitFault, known):
    port = item.put_into(load_port(f"pipeline:{item.split}"))
    found = answer(port, case_named(CASE).checkpoint, "float32", steps())
    assert looks_like(found, known["experts" in item.split]) == [item.fault.id]


@pytest.mark.parametrize("split", ["2", "experts=2"])
def test_no_fault_no_name(split: str, known):
    found = answer(load_port(f"pipeline:{split}"), case_named(CASE).checkpoint, "float32", steps())
    assert looks_like(found, known["experts" in split]) == []


def test_layers_left_over_are_missed_one_by_one():
    """Layer 4 of 5 runs on neither of two ranks: each of its quantities is missed, nothing else before it is wrong."""
    [item] = [item for item in FAULTS if item.fault.id == "F65"]
    port = item.put_into(load_port("pipeline:2"))
    report = run_checks(Plan(port, (case_named(CASE),), ("float32",), 0), ["end_to_end"])
    missed = [finding for finding in report.failures if "does not show" in finding.note]
    assert missed and all(".layers.4." in finding.tap for finding in missed)


def test_a_wrong_sum_is_also_found_in_the_module_alone():
    [item] = [item for item in FAULTS if item.fault.id == "F62"]
    port = item.put_into(load_port("pipeline:experts=2"))
    report = run_checks(Plan(port, (case_named(CASE),), ("float32",), 0), ["layers"])
    assert {finding.module for finding in report.sources} == {"experts"}
