import mlx.core as mx
import numpy as np
import pytest

from port.activation import gated_activation, silu_glu, situ_glu
from port.tests.models import f64, mini_text, randn


@pytest.mark.parametrize(
    "g, u, expected", [(4, 25, 56.9593), (1, 1, 0.715818), (100, 1000, 100), (-4, 25, -1.04325), (2, 10, 15.46512)]
)
def test_situ_values(g, u, expected):
    assert situ_glu(mx.array(float(g)), mx.array(float(u)), 4.0, 25.0).item() == pytest.approx(expected, rel=1e-5)


def test_without_a_linear_bound_up_stays_as_it_is():
    assert situ_glu(mx.array(4.0), mx.array(25.0), 4.0, None).item() == pytest.approx(74.7896, rel=1e-5)


def test_silu():
    assert silu_glu(mx.array(4.0), mx.array(25.0)).item() == pytest.approx(98.2014, rel=1e-5)


def test_bfloat16_is_computed_in_float32_and_rounded_once():
    gate, up = (3 * randn(500)).astype(mx.bfloat16), (9 * randn(500, seed=1)).astype(mx.bfloat16)
    g, u = f64(gate), f64(up)
    truth = 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)
    assert situ_glu(gate, up, 4.0, 25.0).dtype == mx.bfloat16
    assert np.abs(f64(situ_glu(gate, up, 4.0, 25.0)) / truth - 1).max() < 2.0**-8


def test_silu_in_bfloat16_is_rounded_before_and_after_the_product():
    """As the reference rounds: equal to its two roundings almost everywhere, where one rounding is equal in half."""
    gate, up = (3 * randn(500)).astype(mx.bfloat16), (9 * randn(500, seed=1)).astype(mx.bfloat16)
    silu = mx.array((f64(gate) / (1 + np.exp(-f64(gate)))).astype(np.float32))
    twice, once = silu.astype(mx.bfloat16) * up, (silu * up.astype(mx.float32)).astype(mx.bfloat16)
    found = f64(silu_glu(gate, up))
    assert (found == f64(twice)).mean() > 0.99 and (found == f64(once)).mean() < 0.9


def test_the_configured_function():
    gate, up = mx.array(4.0), mx.array(25.0)
    assert gated_activation(mini_text())(gate, up).item() == pytest.approx(56.9593, rel=1e-5)
    unbounded = mini_text(activation_situ_linear_beta=None)
    assert gated_activation(unbounded)(gate, up).item() == pytest.approx(74.7896, rel=1e-5)
    assert gated_activation(mini_text(hidden_act="silu"))(gate, up).item() == pytest.approx(98.2014, rel=1e-5)
