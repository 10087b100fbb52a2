"""A second oracle for whole layers and a whole small model: transformers' Kimi-Linear, K3's parent architecture.

The case ``kimi-linear`` has its settings: KDA with the unbounded gate and a low-rank output gate, MLA without q-LoRA or
output gate, SiLU experts in groups on the full width, the ordinary residual.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from parity.cases import CASES
from parity.checks import CHECKS, Plan
from parity.checks.plan import case_named
from parity.findings import Finding
from parity.functions import expected
from parity.metrics import relative_rms
from parity.ports import load_port

pytestmark = pytest.mark.peers

ISOLATED, CHAINED = 1e-5, 2e-4
PASSES = ("layers", "end_to_end", "decode")
NEEDED = {
    "self_attn.log_decay", "self_attn.core", "self_attn.state", "self_attn.output", "self_attn.latent",
    "self_attn.attention", "router.weights", "router.indices", "moe.routed", "mlp.output", "logits",
}  # fmt: skip


@cache
def findings(check: str) -> tuple[Finding, ...]:
    pytest.importorskip("transformers.models.kimi_linear")
    return tuple(CHECKS[check](Plan(load_port("transformers"), (case_named("kimi-linear"),), ("float32",))))


@pytest.mark.parametrize("check", PASSES)
def test_layers_and_the_whole_model_agree(check: str):
    found = findings(check)
    assert not [finding for finding in found if finding.status in ("fail", "error")]
    compared = [finding for finding in found if finding.status == "pass"]
    assert max(finding.error for finding in compared) <= (ISOLATED if check == "layers" else CHAINED)
    seen = {finding.tap.rpartition("layers.")[2].partition(".")[2] or finding.tap for finding in compared}
    assert seen >= NEEDED


@pytest.mark.parametrize("regime", ["left", "left-pieces"])
def test_left_padding_agrees(regime: str):
    found = [finding for finding in findings("padding") if finding.regime == regime]
    assert found and {finding.status for finding in found} <= {"pass", "unsupported"}


def test_right_padding_decays_their_state():
    """Padded tokens after the text are zeroed, but the gate of a zero input still forgets: only the state differs."""
    wrong = {
        finding.tap.rpartition(".")[2]
        for finding in findings("padding")
        if finding.regime == "right" and finding.status == "fail"
    }
    assert wrong == {"state"}


def test_their_softplus_loses_digits_where_the_decay_is_slow():
    """log(1 + exp z) in float32: 4e-4 of the log-decay at z near −14, where log1p has 2e-7."""
    pytest.importorskip("transformers.models.kimi_linear")
    case = next(case for case in CASES if case.function == "kda.log_decay")
    drawn, (truth,), (own,) = expected(case, "unbounded-slow", "float32", 0)
    arrays = {name: array.astype(np.float32) for name, array in drawn.arrays.items()}
    (theirs,) = load_port("transformers").call("kda.log_decay", arrays, drawn.settings)
    assert relative_rms(own, truth) < 1e-6
    assert 1e-4 < relative_rms(theirs, truth) < 1e-3
