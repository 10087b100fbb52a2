import mlx.core as mx
import numpy as np
import pytest

from port.norm import RMSNorm, rms_norm
from port.tests.models import f64, randn, relative_rms


def test_definition():
    x, weight = randn(2, 3, 48), randn(48, seed=1)
    truth = f64(x) / np.sqrt(np.square(f64(x)).mean(-1, keepdims=True) + 1e-5) * f64(weight)
    assert relative_rms(rms_norm(x, weight, 1e-5), truth) < 3e-7


@pytest.mark.parametrize("mean_square, factor", [(1e-5, 1.348), (1e-4, 1.044)])
def test_epsilon_shows_on_small_rows(mean_square, factor):
    x, weight = mx.full((8,), mean_square**0.5), mx.ones(8)
    ratio = rms_norm(x, weight, 1e-6)[0] / rms_norm(x, weight, 1e-5)[0]
    assert ratio.item() == pytest.approx(factor, abs=1e-3)


def test_bfloat16_is_rounded_before_the_weight_and_keeps_its_dtype():
    x, weight = randn(4, 64).astype(mx.bfloat16), (1 + 0.3 * randn(64, seed=1)).astype(mx.bfloat16)
    normalized = f64(x) / np.sqrt(np.square(f64(x)).mean(-1, keepdims=True) + 1e-5)
    rounded = f64(mx.array(normalized.astype(np.float32)).astype(mx.bfloat16))
    expected = mx.array((rounded * f64(weight)).astype(np.float32)).astype(mx.bfloat16)
    norm = RMSNorm(64, 1e-5)
    norm.weight = weight
    assert norm(x).dtype == mx.bfloat16
    assert relative_rms(norm(x), expected) < 1e-4
