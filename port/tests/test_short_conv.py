import mlx.core as mx
import numpy as np
import pytest

from port.short_conv import ShortConv, next_conv_state, short_conv
from port.tests.models import f64, filled, randn, relative_rms, same_bits


def silu(x):
    return x / (1 + np.exp(-x))


def test_an_impulse_meets_the_taps_from_last_to_first():
    weight = mx.array([[[0.1, 0.2, 0.3, 0.4]]])
    x = mx.zeros((1, 9, 1)).at[0, 2, 0].add(1.0)
    y = short_conv(x, weight, mx.zeros((1, 3, 1)))
    np.testing.assert_allclose(f64(y)[0, :, 0], silu(np.array([0, 0, 0.4, 0.3, 0.2, 0.1, 0, 0, 0])), atol=1e-7)


@pytest.mark.parametrize("kernel", [1, 2, 4, 7])
def test_definition_and_state(kernel):
    x, weight, state = randn(2, 5, 3), randn(3, 1, kernel, seed=1), randn(2, kernel - 1, 3, seed=2)
    window = np.concatenate([f64(state), f64(x)], axis=1)
    truth = silu(sum(window[:, tap : tap + 5] * f64(weight)[:, 0, tap] for tap in range(kernel)))
    assert relative_rms(short_conv(x, weight, state), truth) < 1e-6


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("split", [1, 2, 3, 4, 6])
def test_any_split_equals_one_pass(kernel, split):
    conv = filled(ShortConv(3, kernel))
    x, state = randn(2, 7, 3), mx.zeros((2, kernel - 1, 3))
    whole, parts = conv(x, state), []
    for part in (x[:, :split], x[:, split:]):
        parts.append(conv(part, state))
        state = next_conv_state(part, state, mx.array([part.shape[1]] * 2))
    assert same_bits(mx.concatenate(parts, axis=1), whole)


def test_state_is_the_last_real_inputs_of_every_row():
    x, state = mx.arange(1, 6, dtype=mx.float32).reshape(1, 5, 1), mx.array([[[-3.0], [-2.0], [-1.0]]])
    rows = mx.repeat(x, 4, axis=0), mx.repeat(state, 4, axis=0)
    kept = next_conv_state(*rows, mx.array([0, 1, 2, 5]))
    assert kept[..., 0].tolist() == [[-3, -2, -1], [-2, -1, 1], [-1, 1, 2], [3, 4, 5]]


def test_bfloat16_is_summed_in_float32():
    x, weight, state = randn(1, 50, 8).astype(mx.bfloat16), randn(8, 1, 4, seed=1), mx.zeros((1, 3, 8), mx.bfloat16)
    window = np.concatenate([f64(state), f64(x)], axis=1)
    truth = silu(sum(window[:, tap : tap + 50] * f64(weight)[:, 0, tap] for tap in range(4)))
    assert short_conv(x, weight, state).dtype == mx.bfloat16
    assert relative_rms(short_conv(x, weight, state), truth) < 2e-3
