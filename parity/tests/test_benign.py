"""No false alarm: changes that are not faults are not reported, and they do change something."""

from __future__ import annotations

import pytest

from parity.benign import BENIGN, judged
from parity.tests.test_faults import snapshot

QUICK = tuple(BENIGN[::10])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("item", QUICK, ids=lambda item: item.id)
def test_change_is_not_reported(item, dtype: str):
    assert judged(item.id, dtype, seed=1).reports == ()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("item", BENIGN, ids=lambda item: item.id)
def test_no_change_is_reported(item, dtype: str):
    assert judged(item.id, dtype, seed=0).reports == ()


def test_changes_are_many_and_each_is_in_force():
    assert len(BENIGN) >= 30 and len({item.claim for item in BENIGN}) == len(BENIGN)
    before = snapshot(BENIGN)
    for item in BENIGN:
        with item.applied("port"):
            assert snapshot(BENIGN) != before, item.claim
    assert snapshot(BENIGN) == before
