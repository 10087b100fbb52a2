"""Reports to make pages of: a port with two known faults, one without, and invented ones for the odd corners."""

from __future__ import annotations

from functools import cache

from parity.checks import Plan
from parity.checks.plan import case_named
from parity.faults import Fault, FaultyPort, fault
from parity.findings import Diagnosis, Finding, Guess, Report
from parity.ports import load_port
from parity.runner import run_checks

CHECKS = ("modules", "layers", "end_to_end")
FAULTS = (fault("F01"), fault("F02"))
COMMAND = "k3-parity check --port invented:PORT --check layers --case mini --dtype float32 --seed 0"


@cache
def failing() -> Report:
    """The gate read wrongly twice, as the first public port had it; the diagnosis is the one that ``diagnose`` gives
    (parity/tests/test_diagnosis.py), without its seconds."""
    report = run_checks(Plan(FaultyPort(load_port("mlx"), "port", FAULTS), (case_named("mini"),)), CHECKS)
    guesses = (guess(1.04e-7, *FAULTS), guess(0.368, fault("F01"), fault("F03")))
    return report.model_copy(
        update={"diagnoses": (Diagnosis(module="kda.gate", error=1.8, fits=True, guesses=guesses),)}
    )


def guess(residual: float, *faults: Fault) -> Guess:
    return Guess(
        faults=tuple(item.id for item in faults), claims=tuple(item.claim for item in faults), residual=residual
    )


@cache
def passing() -> Report:
    return run_checks(Plan(load_port("mlx"), (case_named("mini"),), ("float32",)), CHECKS)


def finding(**fields) -> Finding:
    usual = {
        "check": "layers", "case": "mini", "dtype": "float32", "module": "mlp", "section": "§3", "status": "pass",
        "tap": "language_model.model.layers.0.mlp.output", "error": 1e-7, "allowed": 1e-6, "command": COMMAND,
    }  # fmt: skip
    return Finding(**(usual | fields))


def invented(*findings: Finding, **fields) -> Report:
    return Report(port="invented:PORT", header={"seed": "0"}, findings=findings, seconds=1.0, **fields)
