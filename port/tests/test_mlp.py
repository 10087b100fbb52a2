import numpy as np

from port.activation import silu_glu
from port.mlp import GatedMLP
from port.tests.models import f64, filled, randn, relative_rms


def test_the_three_products():
    mlp = filled(GatedMLP(6, 10, silu_glu))
    x = randn(2, 3, 6)
    gate, up = (f64(x) @ f64(part.weight).T for part in (mlp.gate_proj, mlp.up_proj))
    truth = (gate / (1 + np.exp(-gate)) * up) @ f64(mlp.down_proj.weight).T
    assert relative_rms(mlp(x), truth) < 1e-6
