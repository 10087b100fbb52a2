import pytest
import torch

from reference.linear import Embedding, Linear, unset, wide


def test_parameters_are_nan_until_loaded():
    assert unset(2, 3).isnan().all()
    assert Linear(3, 2)(torch.zeros(1, 3)).isnan().all()
    assert Embedding(5, 2)(torch.tensor([[0, 4]])).isnan().all()


def test_linear_has_no_bias_and_multiplies_rows():
    linear = Linear(2, 3)
    assert [name for name, _ in linear.named_parameters()] == ["weight"]
    linear.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert linear(torch.tensor([1.0, 10.0])).tolist() == [21.0, 43.0, 65.0]


@pytest.mark.parametrize("given, expected", [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_wide(given, expected):
    assert wide(torch.ones(1, dtype=getattr(torch, given))).dtype == getattr(torch, expected)
