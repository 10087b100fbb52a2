"""Several processes find what one finds, in the same order; what goes wrong in one of them is told as ever."""

from __future__ import annotations

import pickle
import sys

import pytest

from parity import parallel
from parity.checks import CHECKS, Plan
from parity.checks.plan import case_named
from parity.findings import Finding, Report
from parity.parallel import in_workers, jobs_of, joined, workers_for
from parity.ports import load_port
from parity.runner import run_checks
from reference.errors import InputError

SOME = ("coverage", "layers", "end_to_end", "converter")


def plan_of(port: str = "mlx") -> Plan:
    return Plan(load_port(port), (case_named("groups"), case_named("kimi-linear")), ("float32",))


def written(report: Report) -> list[str]:
    """NaN equals NaN here."""
    return [finding.model_dump_json() for finding in report.findings]


def test_two_workers_find_what_one_finds():
    plan, told = plan_of(), []
    alone = run_checks(plan, SOME)
    spread = run_checks(plan, SOME, found=in_workers("mlx", plan, SOME, 2, told.append))
    assert written(spread) == written(alone) and len(spread.findings) > 500
    of_cases = [f"{case}: {' '.join(SOME[1:])}" for case in ("groups", "kimi-linear")]
    assert sorted(told) == sorted(["coverage", *of_cases])


def test_a_wrong_port_is_wrong_in_workers_too(tmp_path, monkeypatch):
    (tmp_path / "wrong_port.py").write_text(
        "from parity.faults import FaultyPort, fault\n"
        "from parity.ports import load_port\n"
        "PORT = FaultyPort(load_port('mlx'), 'port', [fault('F52')])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plan = plan_of("wrong_port:PORT")
    report = run_checks(plan, ("layers",), found=in_workers("wrong_port:PORT", plan, ("layers",), 2, lambda text: None))
    assert {finding.module for finding in report.sources} == {"router"}
    sys.modules.pop("wrong_port")


def test_every_check_is_in_exactly_one_job_for_each_case():
    plan = plan_of()
    seen = [(check, case) for job in jobs_of("mlx", plan, tuple(CHECKS)) for check in job.checks for case in job.cases]
    assert sorted(seen) == sorted((check, case.name) for check in CHECKS for case in plan.cases)


def test_findings_of_no_case_in_particular_are_kept_once():
    def found(case: str, note: str) -> Finding:
        return Finding(
            check="converter", case=case, dtype="float32", regime="2bit", seed=0, module="converter", section="§15",
            tap="experts", status="pass", isolated=True, note=note,
        )  # fmt: skip

    first = [found("experts", "1"), found("mini", "2")]
    second = [found("experts", "3"), found("long", "4"), found("long", "5")]
    assert [finding.note for finding in joined([first, second])] == ["1", "2", "4", "5"]


def test_a_port_of_the_users_is_not_copied_unasked():
    assert workers_for("mine:PORT") == 1 and 1 <= workers_for("mlx") <= parallel.MOST


def test_bad_input_comes_back_from_a_worker():
    error = InputError("folder", "tensor", "this", "that", "mend it")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.mend == "mend it"
    plan = Plan(load_port("mlx"), (case_named("groups"), case_named("mini")), ("float32",), golden=None)
    with pytest.raises(InputError, match="--port"):
        list(in_workers("nonesuch", plan, ("layers",), 2, lambda text: None))
