"""Diagnosis: a wrong module is recognised by its known fault, alone or as a pair, from a port or from its trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parity.checks import Plan
from parity.checks.plan import GOLDEN_IN_REPO, case_named
from parity.diagnosis import diagnose, diagnose_trace
from parity.fault_catalogue import FAULTS
from parity.fault_catalogue.patches import result
from parity.faults import Fault, FaultyPort, fault
from parity.findings import Report
from parity.kill_matrix import kill
from parity.ports import load_port
from parity.runner import run_checks
from parity.tracing import load_inputs, trace_port

QUICK = tuple(FAULTS[::12])


def plan_of(*faults: Fault) -> Plan:
    return Plan(FaultyPort(load_port("mlx"), "port", faults), (case_named("mini"),), ("float32",))


def diagnosis_of(*faults: Fault, check: str = "modules"):
    plan = plan_of(*faults)
    return diagnose(plan, run_checks(plan, [check]))


@pytest.mark.parametrize("item", QUICK, ids=lambda item: item.id)
def test_fault_is_named_first(item: Fault):
    assert kill(item, "mlx", "float32", diagnosed=True).looks_like == (item.id,)


@pytest.mark.slow
def test_nearly_every_fault_is_named_first():
    named = [item.id for item in FAULTS if kill(item, "mlx", "float32", diagnosed=True).named_first]
    assert len(named) >= 0.95 * len(FAULTS), sorted({item.id for item in FAULTS} - set(named))


@pytest.mark.parametrize("repaired", [(), ("F01",), ("F02",)], ids=lambda ids: "+".join(ids) or "nothing")
def test_the_first_public_port_replayed(repaired: tuple[str, ...]):
    """A_log per channel and the clamp together, then with one of the two repaired."""
    left = tuple(id for id in ("F01", "F02") if id not in repaired)
    (found,) = diagnosis_of(*map(fault, left))
    assert found.module == "kda.gate" and found.fits
    assert found.guesses[0].faults == left
    assert found.guesses[0].residual < 1e-5 < 1e-2 < found.error


def test_a_mistake_that_nobody_made_yet_looks_like_none():
    odd = Fault("X", "kda.gate", "decay is a third stronger", "", {"kda.log_decay": result(lambda g, package: 1.3 * g)})
    (found,) = diagnosis_of(odd)
    assert not found.fits and "no known fault" in found.text


def test_a_function_misused_is_told_from_a_wrong_function():
    """Kernels stored the other way round and a convolution that turns them round give the same layers."""
    for id in ("F28", "F30"):
        assert kill(fault(id), "mlx", "float32", diagnosed=True).looks_like == (id,)


def test_nothing_wrong_nothing_diagnosed():
    assert diagnosis_of() == ()


def trace_of(*faults: Fault) -> tuple[dict, dict]:
    return trace_port(
        plan_of(*faults).port, GOLDEN_IN_REPO, load_inputs(GOLDEN_IN_REPO / "inputs.safetensors"), "float32"
    )


def test_from_a_trace_alone():
    """The tower's own run says so, though its only visible consequence in the text is at the logits."""
    from parity.checks.golden import chained

    found, metadata = trace_of(fault("F99"))
    findings = tuple(chained(GOLDEN_IN_REPO, "float32", found, metadata))
    report = Report(port="trace", header={}, findings=findings, seconds=0.0)
    inputs = load_inputs(GOLDEN_IN_REPO / "inputs.safetensors")
    (diagnosis,) = diagnose_trace(report, found, GOLDEN_IN_REPO, inputs, "float32")
    assert diagnosis.module == "vision.patch_embed" and diagnosis.guesses[0].faults == ("F99",)


@pytest.mark.slow
def test_the_pair_from_a_trace_alone(tmp_path: Path):
    from parity.trace import save_trace

    taps, metadata = trace_of(fault("F01"), fault("F02"))
    save_trace(tmp_path / "t.safetensors", taps, metadata)
    done = subprocess.run(
        [sys.executable, "-m", "parity.cli.main", "diagnose", "--json", str(tmp_path / "t.safetensors"),
         str(GOLDEN_IN_REPO / "trace-float32.safetensors")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (diagnosis,) = json.loads(done.stdout)["diagnoses"]
    assert diagnosis["module"] == "kda" and diagnosis["guesses"][0]["faults"] == ["F01", "F02"]
