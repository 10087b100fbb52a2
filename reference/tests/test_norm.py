import pytest
import torch

from reference.norm import RMSNorm, rms_norm
from reference.tests.models import randn


def test_known_values():
    x, weight = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 10.0])
    expected = torch.tensor([3.0, 40.0]) / (12.5 + 1e-5) ** 0.5
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("mean_square, factor", [(1e-5, 1.348), (1e-4, 1.044)])
def test_epsilon_counts_for_small_inputs(mean_square, factor):
    x, weight = torch.full((8,), mean_square**0.5, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    ratio = rms_norm(x, weight, 1e-6) / rms_norm(x, weight, 1e-5)
    assert ratio[0].item() == pytest.approx(factor, abs=1e-3)


def test_zero_gives_zero():
    assert rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6).eq(0).all()


def test_bfloat16_is_normed_in_float32_and_cast_before_the_weight():
    x, weight = randn(64, 32).bfloat16(), randn(32, seed=1).bfloat16()
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5), wide.bfloat16() * weight)
    assert not torch.equal(rms_norm(x, weight, 1e-5), (wide * weight.float()).bfloat16())


def test_module_uses_its_weight_and_eps():
    norm = RMSNorm(4, 0.5)
    assert norm(torch.ones(4)).isnan().all()
    norm.weight.data = torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(norm(torch.ones(4)), norm.weight.data / 1.5**0.5)
