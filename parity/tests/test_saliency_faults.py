"""Known ways to get saliency wrong, as faults in either twin, and the checks that see them (K3.md §15)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.build import cached
from fixtures.catalogue import entry
from parity.fault_catalogue.patches import around
from parity.faults import Fault, library
from parity.reap.texts import read_texts
from parity.tests.saliency_models import TWINS, edited, largest_difference, moe_name, streamed, two_domains
from parity.tests.test_saliency import ALLOWED, LAYER, ROW, alike_but_for_the_bias
from reference.tokenizer import Tokenizer

BIASED: dict[str, Any] = {}
"""The biased scores at the chosen experts of the tokens that pass through a layer now."""


def noting_biased_scores(original, package: str, self, x, owner=None):
    indices, weights = original(self, x, owner)
    module, lib = importlib.import_module(f"{package}.moe"), library(package)
    scores = module.routing_scores(module.wide(x) @ module.wide(self.weight).T, "sigmoid")
    biased = scores + self.e_score_correction_bias
    chosen = biased.gather(-1, indices) if package == "reference" else lib.take_along_axis(biased, indices, axis=-1)
    BIASED["scores"] = chosen
    return indices, weights


def weighed_by_biased_scores(original, package: str, self, indices, weights, norms):
    return original(self, indices, BIASED["scores"], norms)


def counted_in_bytes(original, package: str, sequences) -> int:
    tokenizer = Tokenizer.from_folder(cached(entry("mini")))
    return sum(len(tokenizer.token_bytes(int(token))) for sequence in sequences for token in sequence)


F87 = Fault(
    "F87",
    "saliency",
    "saliency weighs an expert by the biased score that chose it",
    "other experts are kept",
    {
        "moe.Router.forward": around(noting_biased_scores),
        "saliency.LayerRecord.__call__": around(weighed_by_biased_scores),
    },
)
F88 = Fault(
    "F88",
    "saliency",
    "the calibration set is counted in bytes, not in tokens",
    "a script with few bytes to a token weighs more than its share",
    {"saliency_result.token_count": around(counted_in_bytes)},
)


def bias_alone_counts(twin: str, folder: Path) -> bool:
    """Whether two experts that differ in nothing but their bias get another saliency."""
    found = streamed(twin, folder, two_domains(entry("mini"))).saliency()[ROW]
    return bool(found[0] != found[1])


@pytest.mark.parametrize("twin", TWINS)
def test_f87_weights_from_biased_scores(twin: str, tmp_path: Path):
    folder = edited(entry("mini"), tmp_path / "alike", alike_but_for_the_bias())
    with F87.applied(twin):
        assert bias_alone_counts(twin, folder)
    assert not bias_alone_counts(twin, folder)


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS)
def test_f87_a_constant_bias_is_felt(twin: str, tmp_path: Path):
    item = entry("mini")
    raised = {moe_name(LAYER, "gate.e_score_correction_bias"): lambda bias: bias + 0.5}
    folder = edited(item, tmp_path / "raised", raised)
    with F87.applied(twin):
        before, after = (streamed(twin, where, two_domains(item)).saliency()[ROW] for where in (cached(item), folder))
    # The biases are about 60 there, so that 0.5 more is 0.8 %; the right saliency does not move by a bit.
    assert largest_difference(after, before) > 100 * ALLOWED


@pytest.mark.parametrize("twin", TWINS)
def test_f88_bytes_in_place_of_tokens(twin: str, tmp_path: Path):
    """As many bytes of Han as of English: equal shares in bytes, not in tokens."""
    for name, text in {"zh": "东京漢字你好" * 8, "en": "the message index " * 8}.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    domains = read_texts([tmp_path / "zh.txt", tmp_path / "en.txt"], cached(entry("mini")), 100)
    tokens = [sum(map(len, rows)) for rows in domains.values()]
    right = streamed(twin, cached(entry("mini")), domains)
    assert right.tokens.tolist() == tokens
    with F88.applied("reference"):
        wrong = streamed(twin, cached(entry("mini")), domains)
    assert wrong.tokens.tolist() == [144, 144] != tokens
    shares = [found.tokens[0] / found.tokens.sum() for found in (right, wrong)]
    assert shares[1] == 0.5 < shares[0] - 0.1
    np.testing.assert_array_equal(right.mass, wrong.mass)
    ratio = right.per_domain().sum() / wrong.per_domain().sum()
    assert ratio > 1.5
    assert (
        largest_difference(wrong.balanced() / wrong.balanced().sum(), right.balanced() / right.balanced().sum()) > 0.01
    )
