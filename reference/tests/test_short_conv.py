import pytest
import torch
from torch.nn import functional as F

from reference.short_conv import ShortConv, next_conv_state, short_conv
from reference.tests.models import randn


def empty_state(batch, kernel, channels):
    return torch.zeros(batch, kernel - 1, channels, dtype=torch.float64)


@pytest.mark.parametrize("at", [0, 2])
def test_impulse_gives_the_taps_from_last_to_first(at):
    weight = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[-1.0, 5.0, 0.5, 2.0]]], dtype=torch.float64)
    x = torch.zeros(1, 8, 2, dtype=torch.float64)
    x[0, at] = 1
    y = short_conv(x, weight, empty_state(1, 4, 2))
    torch.testing.assert_close(y[0, at : at + 4], F.silu(weight[:, 0].flip(-1).T))
    assert y[0, :at].eq(0).all() and y[0, at + 4 :].eq(0).all()


@pytest.mark.parametrize("kernel", [1, 2, 4, 7])
def test_definition(kernel):
    x, weight, state = randn(2, 5, 3), randn(3, 1, kernel, seed=1), randn(2, kernel - 1, 3, seed=2)
    inputs = torch.cat([state, x], dim=1)
    expected = torch.stack(
        [sum(weight[:, 0, tap] * inputs[:, t + tap] for tap in range(kernel)) for t in range(5)], dim=1
    )
    torch.testing.assert_close(short_conv(x, weight, state), F.silu(expected))


@pytest.mark.parametrize("kernel", [1, 2, 4, 7])
@pytest.mark.parametrize("split", [1, 2, 3, 4, 6])
def test_every_split_equals_one_pass(kernel, split):
    x, weight, state = randn(2, 7, 3), randn(3, 1, kernel, seed=1), empty_state(2, kernel, 3)
    first, second = x[:, :split], x[:, split:]
    between = next_conv_state(first, state, torch.full((2,), split))
    parts = [short_conv(first, weight, state), short_conv(second, weight, between)]
    torch.testing.assert_close(torch.cat(parts, dim=1), short_conv(x, weight, state))


def test_state_holds_the_last_real_inputs_of_every_row():
    x = torch.arange(1.0, 13.0).reshape(3, 4, 1)
    state = torch.tensor([[-3.0, -2.0, -1.0]] * 3)[..., None]
    result = next_conv_state(x, state, torch.tensor([4, 1, 0]))
    assert result[..., 0].tolist() == [[2, 3, 4], [-2, -1, 5], [-3, -2, -1]]


def test_state_is_a_copy_not_a_view_of_the_prompt():
    state = next_conv_state(torch.ones(1, 1000, 2), torch.zeros(1, 3, 2), torch.tensor([1000]))
    assert state.untyped_storage().nbytes() == 3 * 2 * 4


def test_module_computes_bfloat16_in_float32_with_float32_taps():
    conv = ShortConv(3, 4)
    assert conv(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3)).isnan().all()
    conv.weight.data = randn(3, 1, 4).float()
    x, state = randn(1, 50, 3, seed=1).bfloat16(), randn(1, 3, 3, seed=2).bfloat16()
    expected = short_conv(x.float(), conv.weight.data, state.float()).bfloat16()
    assert torch.equal(conv(x, state), expected)
