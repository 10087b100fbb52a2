import pytest
import torch

from reference.activation import gated_activation, silu_glu, situ_glu
from reference.tests.models import mini_text, randn

VALUES = [(4, 25, 56.9593), (1, 1, 0.715818), (100, 1000, 100), (-4, 25, -1.04325), (2, 10, 15.46512)]


def scalars(*values):
    return [torch.tensor(float(value), dtype=torch.float64) for value in values]


@pytest.mark.parametrize("gate, up, expected", VALUES)
def test_situ_values(gate, up, expected):
    assert situ_glu(*scalars(gate, up), 4, 25).item() == pytest.approx(expected, rel=1e-5)


def test_without_linear_bound_up_is_unchanged():
    assert situ_glu(*scalars(4, 25), 4, None).item() == pytest.approx(74.7896, rel=1e-6)


def test_gate_and_up_are_not_interchangeable():
    assert situ_glu(*scalars(25, 4), 4, 25).item() == pytest.approx(15.8647, rel=1e-5)


def test_silu_value():
    assert silu_glu(*scalars(4, 25)).item() == pytest.approx(98.2014, rel=1e-6)


def test_situ_is_bounded():
    assert situ_glu(1e6 * randn(100), 1e6 * randn(100, seed=1), 4, 25).abs().max() <= 100


def test_bfloat16_is_rounded_once():
    gate, up = randn(500).bfloat16(), randn(500, seed=1).bfloat16()
    assert torch.equal(situ_glu(gate, up, 4, 25), situ_glu(gate.float(), up.float(), 4, 25).bfloat16())


def test_configuration_chooses():
    gate, up = scalars(4, 25)
    assert gated_activation(mini_text())(gate, up).item() == pytest.approx(56.9593, rel=1e-5)
    no_bound = mini_text(activation_situ_linear_beta=None)
    assert gated_activation(no_bound)(gate, up).item() == pytest.approx(74.7896, rel=1e-6)
    other = mini_text(activation_situ_beta=2.0)
    assert gated_activation(other)(gate, up).item() == pytest.approx(situ_glu(gate, up, 2.0, 25.0).item())
    assert gated_activation(mini_text(hidden_act="silu"))(gate, up).item() == pytest.approx(98.2014, rel=1e-6)
