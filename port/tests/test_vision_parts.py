"""The small functions of the tower: norm, GELU, patch embedding, attention, merge."""

import math

import mlx.core as mx
import numpy as np
import pytest

from port import vision
from port.tests.models import f64, randn, relative_rms
from port.tests.vision_models import CONFIG, share_differing
from port.vision import (
    VISION_NORM_EPS,
    VisionNorm,
    VisionTower,
    attention,
    exponential,
    gelu_tanh,
    merge_patches,
    norm_rounded_once,
    patch_embedding,
    row_sum,
    softmax,
    temporal_mean,
)


@pytest.mark.parametrize("mean_square, factor", [(1e-3, 2.97), (1e-2, 1.335)])
def test_epsilon_is_float32s_not_bfloat16s(mean_square, factor):
    x, weight = mx.full((1, 16), mean_square**0.5), mx.ones(16)
    ratio = norm_rounded_once(x, weight, VISION_NORM_EPS) / norm_rounded_once(x, weight, 2.0**-7)
    assert ratio[0, 0].item() == pytest.approx(factor, abs=5e-3)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-4])
def test_norm_written_out(scale):
    x, weight = scale * randn(64, 32), randn(32, seed=1)
    expected = f64(x) / np.sqrt(np.square(f64(x)).mean(-1, keepdims=True) + 1.1920929e-7) * f64(weight)
    assert relative_rms(norm_rounded_once(x, weight, VISION_NORM_EPS), expected) < 3e-7


def test_norm_multiplies_by_the_weight_before_it_rounds():
    x, weight = randn(64, 32).astype(mx.bfloat16), randn(32, seed=1).astype(mx.bfloat16)
    once = norm_rounded_once(x, weight, VISION_NORM_EPS)
    wide = norm_rounded_once(x.astype(mx.float32), weight.astype(mx.float32), VISION_NORM_EPS)
    twice = norm_rounded_once(x, mx.ones(32, mx.bfloat16), VISION_NORM_EPS) * weight
    assert mx.array_equal(once, wide.astype(mx.bfloat16))
    assert share_differing(once, twice) > 0.1


def test_every_norm_of_the_tower_uses_that_epsilon():
    norms = [module for module in VisionTower(CONFIG).modules() if isinstance(module, VisionNorm)]
    assert len(norms) == 2 * CONFIG.vt_num_hidden_layers + 1
    assert {norm.eps for norm in norms} == {VISION_NORM_EPS}


def test_gelu_is_the_tanh_form():
    x = np.linspace(-6, 6, 1001).astype(np.float32)
    assert gelu_tanh(mx.array([-2.7])).item() == pytest.approx(-0.0089, abs=5e-5)
    wide = x.astype(np.float64)
    expected = wide / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    assert np.abs(f64(gelu_tanh(mx.array(x))) - expected).max() < 1e-6


def test_gelu_rounds_once():
    x = randn(1000).astype(mx.bfloat16)
    assert mx.array_equal(gelu_tanh(x), gelu_tanh(x.astype(mx.float32)).astype(mx.bfloat16))


def test_patch_embedding_sums_over_channel_row_and_column():
    patches, weight = randn(5, 3, 4, 4), randn(8, 3, 4, 4, seed=1)
    expected = np.einsum("lcij,dcij->ld", f64(patches), f64(weight))
    assert relative_rms(patch_embedding(patches, weight), expected) < 1e-6


def test_attention_of_one_item_written_out():
    q, k, v = (randn(6, 2, 4, seed=seed) for seed in range(3))
    expected = np.zeros((6, 2, 4))
    for head in range(2):
        for row in range(6):
            weights = np.exp(f64(k)[:, head] @ f64(q)[row, head] / 2)
            expected[row, head] = weights @ f64(v)[:, head] / weights.sum()
    assert relative_rms(attention(q, k, v, [(1, 2, 3)]), expected.reshape(6, 8)) < 1e-6


def test_attention_stays_within_an_item():
    parts = [randn(8, 2, 4, seed=seed) for seed in range(3)]
    lone = attention(*parts, [(1, 2, 4)])
    poisoned = [mx.concatenate([part, mx.full((12, 2, 4), mx.nan)]) for part in parts]
    assert mx.array_equal(attention(*poisoned, [(1, 2, 4), (3, 2, 2)])[:8], lone)


def test_attention_sees_all_frames_of_a_video():
    q, k, v = (randn(8, 1, 4, seed=seed) for seed in range(3))
    before, last = attention(q, k, v, [(2, 2, 2)]), mx.arange(8)[:, None, None] == 7
    assert (attention(q, k, v + last, [(2, 2, 2)]) != before).any(-1).all()


def test_scoring_in_pieces_changes_nothing(monkeypatch):
    q, k, v = (randn(24, 2, 4, seed=seed) for seed in range(3))
    whole = attention(q, k, v, [(1, 4, 6)])
    monkeypatch.setattr(vision, "QUERY_ROWS", 5)
    assert relative_rms(attention(q, k, v, [(1, 4, 6)]), whole) < 1e-6


def test_merge_takes_windows_row_by_row_and_means_frames():
    merged = merge_patches(mx.arange(32.0)[:, None], [(2, 4, 4)], (2, 2))
    first = np.array([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])
    assert np.array_equal(f64(merged[..., 0]), first + 8)


def test_merge_window_need_not_be_square():
    merged = merge_patches(mx.arange(12.0)[:, None], [(1, 2, 6)], (1, 3))
    assert np.array_equal(f64(merged[..., 0]), np.arange(12).reshape(4, 3))


def test_mean_over_frames_is_taken_in_wide_precision():
    frames = mx.array([256.0, 1.0, 1.0, 1.0]).astype(mx.bfloat16).reshape(4, 1, 1, 1)
    assert temporal_mean(frames).item() == mx.array(259 / 4).astype(mx.bfloat16).item()


def test_sums_of_a_thousand_terms_are_exact_to_float32():
    x = mx.abs(randn(64, 1408))
    assert row_sum(x).shape == (64, 1)
    assert relative_rms(row_sum(x), f64(x).sum(-1, keepdims=True)) < 2e-6


def test_powers_of_two_are_powers_of_e():
    x = mx.array([-200.0, -87.0, -20.0, -1e-3, 0.0, 1.0, 20.0, 80.0])
    expected = np.exp(f64(x))
    assert np.abs(f64(exponential(x)) / np.where(expected > 1e-38, expected, 1) - (expected > 1e-38)).max() < 1e-5
    assert exponential(mx.array(-np.inf)).item() == 0


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_softmax_written_out(dtype):
    scores = (30 * randn(4, 50)).astype(dtype)
    powers = np.exp(f64(scores) - f64(scores).max(-1, keepdims=True))
    weights = softmax(scores)
    assert weights.dtype == dtype
    assert relative_rms(weights, powers / powers.sum(-1, keepdims=True)) < (1e-6 if dtype == mx.float32 else 3e-3)
    assert relative_rms(softmax(scores.astype(mx.float32) + 1e4), f64(softmax(scores.astype(mx.float32)))) < 1e-2
