"""Every catalogue case, on its own: layers, whole passes, decoding, padding."""

from __future__ import annotations

import pytest

from fixtures.catalogue import CATALOGUE
from parity.checks import Plan
from parity.checks.plan import case_named
from parity.runner import CORE_CASES
from parity.suite.judge import DTYPES, judge


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("check", ["layers", "end_to_end"])
def test_case(check, name, dtype, port, parity_seed, opened):
    judge(Plan(port, (case_named(name, parity_seed),), (dtype,), parity_seed, None, opened), check)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CORE_CASES)
@pytest.mark.parametrize("check", ["decode", "padding"])
def test_caches(check, name, dtype, port, parity_seed, opened):
    judge(Plan(port, (case_named(name, parity_seed),), (dtype,), parity_seed, None, opened), check)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in CORE_CASES])
@pytest.mark.parametrize("check", ["decode", "padding"])
def test_caches_of_the_rest(check, name, dtype, port, parity_seed, opened):
    judge(Plan(port, (case_named(name, parity_seed),), (dtype,), parity_seed, None, opened), check)
