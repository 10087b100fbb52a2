"""The harness has teeth: known faults are caught at their module, in either twin; the twins themselves are not."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import pytest

from parity.fault_catalogue import FAULTS
from parity.faults import Fault, fault
from parity.kill_matrix import PACKAGES, kill

QUICK = tuple(FAULTS[::5])
"""A part of every module's faults; all of them are asked by ``k3-parity faults run`` and under the marker slow."""


def assert_caught(item: Fault, port: str, dtype: str) -> None:
    result = kill(item, port, dtype)
    assert result.status == "caught", f"{item.id} ({item.claim}): {result.status}, named {result.named or 'nothing'}"


@pytest.mark.parametrize("item", QUICK, ids=lambda item: item.id)
def test_fault_is_caught_at_its_module(item: Fault):
    assert_caught(item, "mlx", "float32")


@pytest.mark.slow
@pytest.mark.parametrize("port", PACKAGES)
@pytest.mark.parametrize("item", FAULTS, ids=lambda item: item.id)
def test_every_fault_is_caught_in_both_twins(item: Fault, port: str):
    assert_caught(item, port, "float32")


@pytest.mark.parametrize("port", PACKAGES)
def test_no_fault_no_alarm(port: str):
    """The checks and cases of the matrix say nothing about the right implementation."""
    for module in ("kda.gate", "projector", "image_processor", "chat", "tokenizer"):
        faultless = Fault("none", module, "", "", {})
        assert kill(faultless, port, "float32").status == "unseen"


def test_faults_are_many_and_told_apart():
    assert len(FAULTS) >= 70
    assert len({item.id for item in FAULTS}) == len({item.claim for item in FAULTS}) == len(FAULTS)
    assert all(item.patches or item.numbers for item in FAULTS)


@pytest.mark.parametrize("item", FAULTS, ids=lambda item: item.id)
@pytest.mark.parametrize("package", PACKAGES.values())
def test_faults_change_something_and_leave_nothing_behind(item: Fault, package: str):
    before = snapshot()
    with item.applied(package):
        assert snapshot() != before, "no target of this fault exists"
    assert snapshot() == before


def snapshot(items: Sequence[Fault] = FAULTS) -> dict[tuple[str, str], int]:
    """What every name of the modules and classes that ``items`` reach into stands for."""
    seen = {}
    for name in sorted({target.split(".")[0] for item in items for target in (*item.patches, *item.numbers)}):
        for package in ("reference", "port"):
            try:
                module = importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError:
                continue
            for key, value in vars(module).items():
                seen[module.__name__, key] = id(value)
                if isinstance(value, type) and value.__module__.startswith(("reference", "port")):
                    seen |= {(f"{module.__name__}.{key}", own): id(it) for own, it in vars(value).items()}
    return seen


def test_fault_is_in_force_for_the_port_only():
    """The truth comes from the same package: a fault that leaked into it would be invisible."""
    result = kill(fault("F02"), "reference", "float32")
    assert result.named == ("kda.gate",)
