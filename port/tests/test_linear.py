import mlx.core as mx
import numpy as np
import pytest

from port.linear import Embedding, Linear, StackedLinear, unset
from port.tests.models import f64, filled, randn, relative_rms


def test_a_linear_map_has_no_bias_and_multiplies_by_the_transpose():
    linear = filled(Linear(3, 5))
    x = randn(2, 4, 3)
    assert list(linear.parameters()) == ["weight"]
    assert relative_rms(linear(x), f64(x) @ f64(linear.weight).T) < 1e-6


@pytest.mark.parametrize("module", [Linear(2, 3), StackedLinear(4, 2, 3), Embedding(5, 2)])
def test_parameters_are_nan_until_loaded(module):
    assert mx.all(mx.isnan(module.weight)).item()
    assert unset(2, 3).shape == (2, 3)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_products_are_rounded_once(dtype):
    """A sum kept in bfloat16 would err by more than twice one rounding."""
    x, weight = randn(7, 512).astype(dtype), randn(33, 512, seed=1).astype(dtype)
    linear = Linear(512, 33)
    linear.weight = weight
    assert relative_rms(linear(x), f64(x) @ f64(weight).T) < (2e-6 if dtype == mx.float32 else 2e-3)
    assert linear(x).dtype == dtype


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_stack_gives_every_row_its_own_matrix(tokens, dtype):
    stack = StackedLinear(5, 48, 9)
    stack.weight = randn(5, 9, 48).astype(dtype)
    x, chosen = randn(tokens, 1, 48, seed=1).astype(dtype), mx.array(np.arange(3 * tokens).reshape(tokens, 3) % 5)
    truth = np.einsum("nki,nkoi->nko", np.repeat(f64(x), 3, axis=1), f64(stack.weight)[np.array(chosen)])
    assert stack(x, chosen).dtype == dtype
    assert relative_rms(stack(x, chosen), truth) < (1e-6 if dtype == mx.float32 else 2e-3)
