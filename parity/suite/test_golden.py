"""Against the authors' own results: the case in this project, and the larger ones where they are at hand."""

from __future__ import annotations

import pytest

from parity.checks import Plan
from parity.checks.plan import GOLDEN_IN_REPO, golden_root
from parity.suite.judge import DTYPES, judge


@pytest.mark.parametrize("dtype", DTYPES)
def test_mini(dtype, port, opened):
    judge(Plan(port, dtypes=(dtype,), golden=GOLDEN_IN_REPO, opened=opened), "golden")


@pytest.mark.golden
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mini-long", "mini-wide"])
def test_larger(name, dtype, port, opened):
    root = golden_root()
    if root is None or not (root / name).is_dir():
        pytest.skip("the larger golden cases are not here; set K3_PARITY_GOLDEN to the folder that holds them")
    judge(Plan(port, dtypes=(dtype,), golden=root / name, opened=opened), "golden")
