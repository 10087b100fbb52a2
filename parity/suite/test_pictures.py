"""Tower, projector, merge, and the whole model with pictures: one case for every different vision configuration."""

from __future__ import annotations

import json

import pytest

from fixtures.catalogue import CATALOGUE
from parity.checks import Plan
from parity.checks.plan import case_named
from parity.suite.judge import DTYPES, judge

TOWERS = {
    json.dumps(item.config["vision_config"] | {"text_hidden_size": 0}): name
    for name, item in reversed(CATALOGUE.items())
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(TOWERS.values()))
@pytest.mark.parametrize("check", ["vision", "multimodal"])
def test_pictures(check, name, dtype, port, parity_seed, opened):
    judge(Plan(port, (case_named(name, parity_seed),), (dtype,), parity_seed, None, opened), check)
