"""Near-ties of the router are recognised, imposed, and never a way to wave a token through."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fixtures.build import build
from fixtures.catalogue import entry
from fixtures.inputs import token_ids
from parity.chained import Batch, chained_findings
from parity.compare import Place
from parity.findings import Report
from parity.ports import load_port
from parity.routing import compare_choice, own_choice
from parity.sides import Sides

NAME = "language_model.model.layers.1."


def taps(scores: np.ndarray, top_k: int) -> dict[str, np.ndarray]:
    best = -np.sort(-scores, axis=-1)
    margin = best[:, top_k - 1] - best[:, top_k]
    return {
        NAME + "router.scores": scores,
        NAME + "router.margin": margin,
        NAME + "router.indices": own_choice(scores, top_k),
    }


def test_another_choice_away_from_ties_is_wrong_and_within_noise_is_a_tie():
    scores = np.array([[0.9, 0.5, 0.1], [0.9, 0.5, 0.5 - 1e-7]])
    truth, noise = taps(scores, 2), taps(scores + 1e-7, 2)
    found = np.array([[0, 2], [0, 2]])
    choice = compare_choice(found, truth, noise, NAME + "router.indices")
    assert choice.wrong.tolist() == [0] and choice.tied.tolist() == [1]


def test_order_within_the_choice_does_not_matter():
    truth = taps(np.array([[0.9, 0.5, 0.1]]), 2)
    choice = compare_choice(np.array([[1, 0]]), truth, truth, NAME + "router.indices")
    assert not len(choice.wrong) and not len(choice.tied)


def test_masked_scores_do_not_hide_the_noise():
    scores = np.array([[0.9, 0.5, 0.1, -np.inf]])
    noise = taps(scores + [[0, 1e-3, 0, 0]], 2)
    choice = compare_choice(np.array([[0, 2]]), taps(scores, 2), noise, NAME + "router.indices")
    assert choice.threshold == pytest.approx(4e-3) and choice.wrong.tolist() == [0]


@pytest.fixture
def tied_checkpoint(tmp_path: Path) -> Path:
    """Two experts with the same router row and bias: an exact tie wherever both are at the edge of the choice."""
    folder = build(entry("many-experts"), tmp_path / "tied")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for layer in (1, 2):
        gate = f"language_model.model.layers.{layer}.block_sparse_moe.gate."
        for name in (gate + "weight", gate + "e_score_correction_bias"):
            tensors = load_file(folder / index[name])
            rows = tensors[name].copy()
            rows[1::2] = rows[0::2]
            save_file(tensors | {name: rows}, folder / index[name], {"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_ties_are_imposed_and_everything_else_still_compared(tied_checkpoint, dtype):
    """Every pair of experts ties; with an odd top-k each token breaks one tie. Both ports are right."""
    item = entry("many-experts")
    config = json.loads((tied_checkpoint / "config.json").read_text())
    config["text_config"]["num_experts_per_token"] = 7
    (tied_checkpoint / "config.json").write_text(json.dumps(config))
    ids = token_ids(item, "ties", (2, 9))
    text = item.parsed.text_config.model_copy(update={"num_experts_per_token": 7})
    sides = Sides(TieBreaker(), tied_checkpoint, dtype)
    place = Place("end_to_end", "tied", dtype, isolated=False)
    findings = tuple(chained_findings(place, sides, text, Batch(ids, None, [9])))
    report = Report(port="tie-breaker", header={}, findings=findings, seconds=0.0)
    assert report.exit_code == 0, report.sources[0]
    assert sum(finding.ties for finding in findings) > 0


class TieBreaker:
    """The reference, except that among equal scores it prefers the later expert."""

    def __init__(self) -> None:
        self.inner = load_port("reference")
        self.name = "tie-breaker"

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def open(self, checkpoint, dtype):
        from parity.faults import Fault, FaultySession

        def later_first(original, package):
            def select_experts(biased_scores, top_k):
                last = biased_scores.shape[-1] - 1
                return (last - original(biased_scores.flip(-1), top_k)).sort(dim=-1).values

            return select_experts

        change = Fault("benign", "router", "ties go to the later expert", "", {"moe.select_experts": later_first})
        return FaultySession(self.inner.open(checkpoint, dtype), lambda: change.applied("reference"))
