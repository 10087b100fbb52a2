"""Every small function in its regimes; the names a port reads; the twins."""

from __future__ import annotations

import pytest

from fixtures.catalogue import CATALOGUE
from parity.baseline import Baselines, judged
from parity.cases import CASES
from parity.checks import Plan
from parity.checks.plan import case_named
from parity.functions import case_findings
from parity.suite.judge import DTYPES, judge, verdict


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.function)
def test_function(case, dtype, port, parity_seed):
    verdict(port.name, judged(port, list(case_findings(port, case, dtype, parity_seed))))


def test_coverage(port, parity_seed):
    cases = tuple(case_named(name, parity_seed) for name in CATALOGUE)
    judge(Plan(port, cases, seed=parity_seed), "coverage")


def test_twins(port):
    if port.name != "mlx":
        pytest.skip("only the MLX port is the reference's twin")
    judge(Plan(port), "twins")


def test_baselines(port):
    if not Baselines(port).files:
        pytest.skip("this port has no baselines")
    judge(Plan(port), "baselines")


@pytest.mark.parametrize("part", ["records", "processor", "chat", "tokenizer", "anchor"])
def test_part(part, port):
    judge(Plan(port), part)
