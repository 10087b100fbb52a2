import mlx.core as mx
import numpy as np
import pytest

from port.attn_res import mix, mix_weights, starts_block
from port.tests.models import f64, randn, relative_rms


def test_zero_projection_gives_the_plain_mean_of_the_sources():
    sources = [7 * randn(2, 3, 8, seed=seed) for seed in range(4)]
    mixed = mix(sources[-1], sources[:-1], mx.ones(8), mx.zeros((1, 8)), 1e-5)
    assert relative_rms(mixed, sum(map(f64, sources)) / 4) < 1e-6


def test_parallel_sources_weigh_the_same_and_stay_unnormalised():
    sources = [mx.array([[[3.0, 4.0]]]), mx.array([[[0.6, 0.8]]])]
    mixed = mix(sources[1], sources[:1], mx.array([0.7, 1.9]), mx.array([[1.3, -0.4]]), 1e-12)
    np.testing.assert_allclose(f64(mixed)[0, 0], [1.8, 2.4], rtol=1e-6)


def test_a_very_large_projection_picks_one_source():
    sources = [mx.array([[[1.0, 0.0]]]), mx.array([[[0.0, 1.0]]])]
    mixed = mix(sources[1], sources[:1], mx.ones(2), mx.array([[1e4, 0.0]]), 1e-5)
    assert mixed.tolist() == [[[1.0, 0.0]]]


def test_definition_and_array_of_blocks():
    sources, norm, proj = randn(3, 2, 5, 8), randn(8, seed=1), randn(1, 8, seed=2)
    v = f64(sources)
    scores = (v / np.sqrt(np.square(v).mean(-1, keepdims=True) + 1e-5) * f64(norm) * f64(proj)[0]).sum(-1)
    weights = np.exp(scores) / np.exp(scores).sum(0)
    assert relative_rms(mix_weights(sources, norm, proj, 1e-5), weights) < 1e-6
    assert relative_rms(mix(sources[-1], sources[:-1], norm, proj, 1e-5), (weights[..., None] * v).sum(0)) < 1e-6


def test_bfloat16_is_mixed_in_float32():
    sources = [randn(1, 6, 8, seed=seed).astype(mx.bfloat16) for seed in range(3)]
    norm, proj = mx.ones(8, mx.bfloat16), randn(1, 8, seed=5).astype(mx.bfloat16)
    mixed = mix(sources[-1], sources[:-1], norm, proj, 1e-5)
    exact = [x.astype(mx.float32) for x in sources]
    wide = mix(exact[-1], exact[:-1], norm, proj, 1e-5)
    assert mixed.dtype == mx.bfloat16
    assert mx.array_equal(mixed, wide.astype(mx.bfloat16)).item()


@pytest.mark.parametrize("layers, appended", [(1, 1), (11, 1), (12, 1), (13, 2), (24, 2), (25, 3)])
def test_appended_blocks(layers, appended):
    assert sum(starts_block(layer, 12) for layer in range(layers)) == appended
