import mlx.core as mx
import numpy as np
import pytest

from port.cache import MLACache
from port.mla import GatedMLA, absorbed_attention, allowed_keys, attention, attention_weights
from port.tests.models import f64, filled, mini_text, randn, relative_rms, same_bits

VARIANTS = {"k3": {}, "direct query": {"q_lora_rank": None}, "no gate": {"mla_use_output_gate": None}}


def mla(**text):
    return filled(GatedMLA(mini_text(**text)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_allowed_keys_are_real_and_not_later():
    allowed = allowed_keys(mx.array([[False, True, True, True], [True, True, False, True]]), 2)
    assert allowed.tolist() == [
        [[False, True, True, False], [False, True, True, True]],
        [[True, True, False, False], [True, True, False, True]],
    ]


def test_attention_by_definition():
    q, k, v = randn(1, 2, 3, 4), randn(1, 5, 3, 4, seed=1), randn(1, 5, 3, 6, seed=2)
    allowed = allowed_keys(mx.array([[True, False, True, True, True]]), 2)
    scores = 0.7 * np.einsum("bthd,blhd->bhtl", f64(q), f64(k))
    weights = np.where(np.array(allowed)[:, None], np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    assert relative_rms(attention(q, k, v, 0.7, allowed), np.einsum("bhtl,blhv->bthv", weights, f64(v))) < 1e-6


def test_a_query_without_keys_gives_zero():
    nothing = mx.zeros((1, 2, 2), mx.bool_)
    o = attention(randn(1, 2, 1, 4), randn(1, 2, 1, 4), randn(1, 2, 1, 4), 1.0, nothing)
    assert mx.all(o == 0).item()
    up = randn(1, 4, 8)
    o = absorbed_attention(randn(1, 2, 1, 6), randn(1, 2, 8), randn(1, 2, 2), up, up, 1.0, nothing)
    assert mx.all(o == 0).item()


def test_softmax_is_in_float32():
    scores = (4 * randn(1, 2, 3, 40)).astype(mx.bfloat16)
    weights = attention_weights(scores, mx.ones((1, 3, 40), mx.bool_))
    truth = np.exp(f64(scores))
    assert weights.dtype == mx.float32
    assert relative_rms(weights, truth / truth.sum(-1, keepdims=True)) < 1e-6


def test_the_scale_is_not_rounded_to_bfloat16():
    """192^-1/2 is 0.0722 and its nearest bfloat16 is 0.16 % off, which a large score feels."""
    q, k = (x.astype(mx.bfloat16) for x in (5 * randn(1, 40, 2, 192), randn(1, 40, 2, 192, seed=1)))
    eye = mx.broadcast_to(mx.eye(40)[None, :, None], (1, 40, 2, 40)).astype(mx.bfloat16)
    scores = f64((q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1)).astype(mx.bfloat16))
    scaled = f64(mx.array((scores * 192**-0.5).astype(np.float32)).astype(mx.bfloat16))
    truth = np.exp(scaled - scaled.max(-1, keepdims=True))
    truth = (truth / truth.sum(-1, keepdims=True)).transpose(0, 2, 1, 3)
    weights = attention(q, k, eye, 192**-0.5, mx.ones((1, 40, 40), mx.bool_))
    assert relative_rms(weights, truth) < 2.5e-3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_absorbed_equals_plain(variant, tokens):
    module, x = mla(**VARIANTS[variant]), randn(2, tokens, 64)
    plain = module(x)
    module.form = "absorbed"
    assert relative_rms(module(x), plain) < 2e-6


def test_the_order_of_earlier_tokens_does_not_matter():
    module, x = mla(), randn(1, 6, 64)
    permuted = mx.concatenate([x[:, mx.array([3, 0, 4, 1, 2])], x[:, 5:]], axis=1)
    assert relative_rms(module(permuted)[:, -1], module(x)[:, -1]) < 1e-6


def test_one_token_reads_its_own_value_through_the_gate():
    module, x = mla(), randn(2, 1, 64)
    latent, _ = module.latent(x)
    value = (f64(latent) @ f64(module.kv_b_proj.weight).T).reshape(2, 1, 4, 32)[..., 16:].reshape(2, 1, -1)
    truth = (value * sigmoid(f64(x) @ f64(module.g_proj.weight).T)) @ f64(module.o_proj.weight).T
    assert relative_rms(module(x), truth) < 1e-6


@pytest.mark.parametrize("mean_square, factor", [(1e-5, 1.348), (1e-4, 1.044)])
def test_latent_norms_have_their_own_epsilon(mean_square, factor):
    module = mla()
    small = mx.full((1, 1, 16), mean_square**0.5)
    with_model_eps = f64(small) / np.sqrt(mean_square + 1e-5) * f64(module.kv_a_layernorm.weight)
    assert (f64(module.kv_a_layernorm(small)) / with_model_eps).mean() == pytest.approx(factor, abs=1e-3)
    assert module.q_a_layernorm.eps == module.kv_a_layernorm.eps == 1e-6


def test_the_scale_counts_both_parts_of_a_head():
    assert mla().scale == 24**-0.5


@pytest.mark.parametrize("form", ["plain", "absorbed"])
@pytest.mark.parametrize("sizes", [[7], [4, 3], [1, 5, 1], [1] * 7])
def test_padded_rows_equal_rows_alone_in_every_split_and_padding_moves_no_bit(form, sizes):
    module, x = mla(), randn(4, 7, 64)
    module.form = form
    mask = mx.array([[0, 0, 0, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0, 0], [1] * 7, [0, 1, 0, 1, 1, 0, 0]]) == 1
    results = []
    for fill in (mx.nan, 1e30):
        padded, cache, parts, start = mx.where(mask[..., None], x, fill), MLACache(mini_text(), 4, mx.float32), [], 0
        for size in sizes:
            piece = slice(start, start + size)
            parts.append(module(padded[:, piece], mask[:, piece], cache))
            start += size
        results.append(mx.where(mask[..., None], mx.concatenate(parts, axis=1), 0))
    assert same_bits(*results)
    for row in range(4):
        real = mx.array(np.flatnonzero(np.array(mask[row])).tolist())
        assert relative_rms(results[0][row, real], module(x[row : row + 1, real])[0]) < 2e-6
