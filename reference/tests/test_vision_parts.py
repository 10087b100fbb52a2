"""The small functions of the tower: norm, GELU, patch embedding, attention, merge."""

import math

import pytest
import torch
from torch.nn import functional

from reference import vision
from reference.config import K3Config
from reference.tests.models import MINI, randn, relative_rms
from reference.vision import (
    VISION_NORM_EPS,
    VisionNorm,
    VisionTower,
    attention,
    gelu_tanh,
    merge_patches,
    norm_rounded_once,
    patch_embedding,
    temporal_mean,
)

CONFIG = K3Config.from_file(MINI).vision_config


@pytest.mark.parametrize("mean_square, factor", [(1e-3, 2.97), (1e-2, 1.335)])
def test_epsilon_is_float32s_not_bfloat16s(mean_square, factor):
    x, weight = torch.full((1, 16), mean_square**0.5, dtype=torch.float64), torch.ones(16, dtype=torch.float64)
    ratio = norm_rounded_once(x, weight, VISION_NORM_EPS) / norm_rounded_once(x, weight, 2.0**-7)
    assert ratio[0, 0].item() == pytest.approx(factor, abs=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-4])
def test_norm_is_the_installed_torchs_norm_without_eps(dtype, scale):
    x, weight = (scale * randn(64, 32)).to(dtype), randn(32, seed=1).to(dtype)
    expected = functional.rms_norm(x, (32,), weight)
    assert relative_rms(norm_rounded_once(x, weight, VISION_NORM_EPS), expected) < (1e-6 if scale == 1 else 1e-4)
    if dtype == torch.bfloat16:
        assert (norm_rounded_once(x, weight, VISION_NORM_EPS) != expected).float().mean() < 5e-3


def test_every_norm_of_the_tower_uses_that_epsilon():
    norms = [module for module in VisionTower(CONFIG).modules() if isinstance(module, VisionNorm)]
    assert len(norms) == 2 * CONFIG.vt_num_hidden_layers + 1
    assert {norm.eps for norm in norms} == {VISION_NORM_EPS}


def test_gelu_is_the_tanh_form():
    x = torch.tensor([-2.7, 0.0, 1.0], dtype=torch.float64)
    assert gelu_tanh(x)[0].item() == pytest.approx(-0.0089, abs=5e-5)
    expected = x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(gelu_tanh(x), expected, rtol=1e-14, atol=1e-14)


def test_patch_embedding_is_a_convolution():
    patches, weight = randn(5, 3, 4, 4), randn(8, 3, 4, 4, seed=1)
    expected = functional.conv2d(patches, weight, stride=4).flatten(1)
    torch.testing.assert_close(patch_embedding(patches, weight), expected)


def test_attention_of_one_item_written_out():
    q, k, v = (randn(6, 2, 4, seed=seed) for seed in range(3))
    expected = torch.zeros(6, 2, 4, dtype=torch.float64)
    for head in range(2):
        for row in range(6):
            weights = torch.softmax(k[:, head] @ q[row, head] / 2, dim=0)
            expected[row, head] = weights @ v[:, head]
    torch.testing.assert_close(attention(q, k, v, [(1, 2, 3)]), expected.flatten(1))


def test_attention_stays_within_an_item():
    q, k, v = (randn(20, 2, 4, seed=seed) for seed in range(3))
    before = attention(q, k, v, [(1, 2, 4), (3, 2, 2)])
    q[8:], k[8:], v[8:] = torch.nan, torch.nan, torch.nan
    assert torch.equal(attention(q, k, v, [(1, 2, 4), (3, 2, 2)])[:8], before[:8])


def test_attention_sees_all_frames_of_a_video():
    q, k, v = (randn(8, 1, 4, seed=seed) for seed in range(3))
    before = attention(q, k, v, [(2, 2, 2)])
    v[-1] += 1
    assert (attention(q, k, v, [(2, 2, 2)]) != before).any(-1).all()


def test_scoring_in_pieces_changes_nothing(monkeypatch):
    q, k, v = (randn(24, 2, 4, seed=seed) for seed in range(3))
    whole = attention(q, k, v, [(1, 4, 6)])
    monkeypatch.setattr(vision, "QUERY_ROWS", 5)
    torch.testing.assert_close(attention(q, k, v, [(1, 4, 6)]), whole)


def test_merge_takes_windows_row_by_row_and_means_frames():
    patches = torch.arange(2 * 4 * 4, dtype=torch.float64)[:, None]
    merged = merge_patches(patches, [(2, 4, 4)], (2, 2))
    first = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]], dtype=torch.float64)
    assert torch.equal(merged[..., 0], first + 8)


def test_merge_window_need_not_be_square():
    merged = merge_patches(torch.arange(12.0)[:, None], [(1, 2, 6)], (1, 3))
    assert torch.equal(merged[..., 0], torch.arange(12.0).view(4, 3))


def test_mean_over_frames_is_taken_in_wide_precision():
    frames = torch.tensor([256.0, 1.0, 1.0, 1.0]).bfloat16().view(4, 1, 1, 1)
    assert temporal_mean(frames).item() == torch.tensor(259 / 4).bfloat16().item()
