import pytest
import torch

from reference.attn_res import mix, mix_weights, starts_block
from reference.tests.models import randn

ONES = torch.ones(2, dtype=torch.float64)


def source(*values):
    return torch.tensor(values, dtype=torch.float64).reshape(1, 1, -1)


def test_zero_projection_gives_the_plain_mean():
    p, blocks = randn(2, 3, 8), [randn(2, 3, 8, seed=1), 5 * randn(2, 3, 8, seed=2)]
    mixed = mix(p, blocks, randn(8, seed=3), torch.zeros(1, 8, dtype=torch.float64), 1e-5)
    torch.testing.assert_close(mixed, (p + blocks[0] + blocks[1]) / 3)


@pytest.mark.parametrize("proj", [(1.0, 2.0), (-30.0, 7.0)])
def test_parallel_sources_weigh_equally_and_are_mixed_unnormalised(proj):
    mixed = mix(source(0.6, 0.8), [source(3.0, 4.0)], ONES, source(*proj)[0], 1e-12)
    torch.testing.assert_close(mixed, source(1.8, 2.4), atol=1e-9, rtol=1e-9)


def test_very_large_projection_picks_one_source_exactly():
    p, block = source(1.0, 0.0), source(0.0, 3.0)
    assert torch.equal(mix(p, [block], ONES, source(1e6, 0.0)[0], 1e-5), p)
    assert torch.equal(mix(p, [block], ONES, source(0.0, 1e6)[0], 1e-5), block)


def test_weights_by_definition():
    sources, norm, proj = randn(3, 2, 4, 8), randn(8, seed=1), randn(1, 8, seed=2)
    rms = (sources.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    scores = (sources / rms * norm * proj[0]).sum(-1)
    weights = mix_weights(sources, norm, proj, 1e-5)
    torch.testing.assert_close(weights, scores.exp() / scores.exp().sum(0))


def test_bfloat16_is_mixed_in_float32_and_rounded_once():
    p, blocks = randn(2, 3, 64).bfloat16(), [randn(2, 3, 64, seed=1).bfloat16()]
    norm, proj = randn(64, seed=2).bfloat16(), randn(1, 64, seed=3).bfloat16()
    wide = mix(p.float(), [blocks[0].float()], norm.float(), proj.float(), 1e-5)
    assert torch.equal(mix(p, blocks, norm, proj, 1e-5), wide.bfloat16())


@pytest.mark.parametrize("layers, blocks", [(1, 1), (11, 1), (12, 1), (13, 2), (24, 2), (25, 3), (93, 8)])
def test_number_of_blocks(layers, blocks):
    assert sum(starts_block(layer, 12) for layer in range(layers)) == blocks
