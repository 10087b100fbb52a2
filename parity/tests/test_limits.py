"""Both sides of the limits are measured again, in part; every known fault is well beyond its limit."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from parity.cli.main import app
from parity.faults import fault
from parity.kill_matrix import kill
from parity.limits import BEYOND, noise_side, right_findings, stored
from parity.tolerance import ISOLATED

ROUNDED = 1.05
"""The stored figures have two digits."""


def test_right_ports_stay_within():
    """On a seed that the stored figures have not seen, nothing is nearer to its limit than half again as near."""
    known = stored().noise
    for module, sides in noise_side(right_findings(11, ("mini",), ("float32", "bfloat16"))).items():
        for dtype, side in sides.items():
            assert side.share <= min(1.0, 1.5 * max(known[module][dtype].share, 0.3)), (module, dtype, side)


def test_the_weakest_known_faults_are_well_beyond():
    weakest = sorted(
        (side.times, side.weakest)
        for sides in stored().faults.values()
        for dtype, side in sides.items()
        if dtype == "float32"
    )
    assert weakest[0][0] >= BEYOND
    for times, id in weakest[:4]:
        again = kill(fault(id), "mlx", "float32").times
        assert again >= BEYOND and times / ROUNDED / 2 <= again <= 2 * times * ROUNDED, (id, times, again)


def test_every_module_with_a_limit_has_both_sides():
    """norm, activation and the like have functions only; the rest has taps."""
    limits = stored()
    for module in ISOLATED:
        assert set(limits.noise[module]) == {"float32", "bfloat16"}, module


@pytest.mark.parametrize(
    "name", ["self_attn.log_decay", "kda.gate", "language_model.model.layers.3.mlp.output", "merge"]
)
def test_explain(name: str):
    done = CliRunner().invoke(app, ["explain", name, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    text = json.dumps(document, ensure_ascii=False)
    assert "because: " in text and "of the limit is used up" in text and "known faults" in text


def test_explain_shows_faults_and_reason():
    done = CliRunner().invoke(app, ["explain", "log_decay"])
    assert "F01" in done.stdout and "amplified by exp(A_log)" in done.stdout and "§4.4" in done.stdout
