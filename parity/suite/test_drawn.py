"""Configurations, batches, masks and splits that Hypothesis draws: the whole pass of each must agree."""

from __future__ import annotations

import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.build import build
from fixtures.strategies import configs, masks, splits, token_batches
from parity.chained import Batch, chained_findings
from parity.compare import Place
from parity.sides import Sides
from parity.suite.judge import verdict
from reference.config import K3Config


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_legal_configuration(data, port):
    config = data.draw(configs(), label="config")
    ids = data.draw(token_batches(config), label="ids")
    mask = data.draw(masks(*ids.shape), label="mask")
    pieces = data.draw(splits(ids.shape[1]), label="pieces")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = build(config, f"{folder}/drawn")
        text = K3Config.from_file(checkpoint).text_config
        place = Place("drawn", "hypothesis", "float32", isolated=False)
        batch = Batch(ids, mask, pieces, fill=float("nan"))
        verdict(port.name, chained_findings(place, Sides(port, checkpoint, "float32"), text, batch))
