import torch

from reference.activation import silu_glu, situ_glu
from reference.mlp import GatedMLP
from reference.tests.models import filled, randn


def test_gate_up_and_down_in_their_places():
    mlp = filled(GatedMLP(6, 10, silu_glu))
    x = randn(2, 3, 6, seed=1)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    expected = (gate / (1 + (-gate).exp()) * up) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected)
    assert not torch.allclose(mlp(x), (up / (1 + (-up).exp()) * gate) @ mlp.down_proj.weight.T)


def test_activation_is_the_one_given():
    mlp = filled(GatedMLP(6, 10, lambda gate, up: situ_glu(gate, up, 4.0, 25.0)))
    x = 50 * randn(2, 3, 6, seed=1)
    bound = 100 * mlp.down_proj.weight.abs().sum(-1)
    assert (mlp(x).abs() <= bound).all()


def test_unloaded_is_nan():
    assert GatedMLP(2, 4, silu_glu)(torch.zeros(1, 1, 2)).isnan().all()
