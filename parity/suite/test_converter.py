"""Round trips through the converter: a few configurations by default, all of them and drawn ones when asked."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.build import build
from fixtures.catalogue import CATALOGUE
from fixtures.strategies import entries
from fixtures.widened import widened
from parity.checks import Plan
from parity.checks.converter import CONVERTER, TIERS, round_trip, run
from parity.checks.plan import case_named
from parity.compare import Place
from parity.suite.judge import judge
from parity.tolerance import GOLDEN_CHAINED_FLOAT32

QUICK = ("quantizable", "kimi-linear")
DENSE_TIER = "3bit"
"""MXFP4 experts go through every tier; bf16 ones through one, by the same code as the other lossy tiers."""


ENDS = ("bytes", "logits", "logits of the source")
"""What a drawn configuration is judged by. Inside it, heads of one channel and the like cancel: a tap between may be
further off than 8 times the reference's own float32 on the same few numbers, which says nothing of the weights."""


def round_trips(port, name: str, seed: int) -> None:
    judge(Plan(port, (case_named(name, seed),), ("float32",), seed), "converter")


@pytest.mark.parametrize("name", QUICK)
def test_round_trip(name, port, parity_seed):
    round_trips(port, name, parity_seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in QUICK])
def test_round_trip_of_the_whole_catalogue(name, port, parity_seed):
    round_trips(port, name, parity_seed)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(drawn=entries(), tier=st.sampled_from(TIERS))
def test_round_trip_of_a_drawn_configuration(port, drawn, tier):
    if not port.capabilities().converted:
        pytest.skip("this port loads no converted folders")
    entry = widened(drawn)
    place = Place("converter", "hypothesis", "float32", DENSE_TIER if entry.expert_format == "dense" else tier)
    with tempfile.TemporaryDirectory() as folder:
        findings = list(round_trip(port, place, entry, build(entry, f"{folder}/drawn")))
    ends = {finding.tap: finding for finding in findings if finding.tap in ENDS}
    assert {"bytes", "logits"} <= ends.keys()
    assert ends["bytes"].status == "pass", ends["bytes"].note
    assert all(finding.error <= GOLDEN_CHAINED_FLOAT32 for finding in ends.values()), ends


def test_a_port_that_loads_no_converted_folders_is_unsupported():
    from parity.ports.reference import PORT

    findings = list(run(Plan(PORT)))
    assert [(finding.status, finding.module) for finding in findings] == [("unsupported", CONVERTER.module)]
