import math

import mlx.core as mx
import numpy as np
import pytest

from port.cache import KDACache
from port.kda import (
    KimiDeltaAttention,
    gated_output_norm,
    l2_normalize,
    log_decay,
    recurrent_kda,
    scaled_query,
    write_strength,
)
from port.tests.models import f64, filled, mini_text, randn, relative_rms, same_bits

LN2 = math.log(2)
VARIANTS = {
    "k3": {},
    "unbounded": {"gate_lower_bound": None},
    "low-rank gate": {"use_full_rank_gate": None},
    "more heads than head_dim": {"num_heads": 5, "head_dim": 4},
    "kernel 1": {"short_conv_kernel_size": 1},
    "kernel 2": {"short_conv_kernel_size": 2},
}


def gate(z, a_log, bound=-5.0):
    return log_decay(mx.full((1, 1, 1, 1), z), mx.array([a_log]), mx.zeros(1), bound).item()


def attention(**linear):
    return filled(KimiDeltaAttention(mini_text(linear)))


@pytest.mark.parametrize(
    "z, a_log, expected", [(2, 0, -4.40399), (2, LN2, -4.91007), (-4, 0, -0.08993), (-4, LN2, -0.001677)]
)
def test_bounded_gate_values(z, a_log, expected):
    assert gate(z, a_log) == pytest.approx(expected, rel=3e-4)


@pytest.mark.parametrize("z, expected", [(2, -2.12693), (-4, -0.01815)])
def test_unbounded_gate_values(z, expected):
    assert gate(z, 0.0, None) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("a_log", [-3.0, 0.0, 3.0])
def test_zero_logit_gives_half_the_bound(a_log):
    assert gate(0.0, a_log) == -2.5


@pytest.mark.parametrize("bound", [-5.0, None])
def test_a_log_is_per_head_and_its_tail_is_never_read(bound):
    z, dt_bias, a_log = randn(2, 4, 3, 8), randn(24, seed=1), randn(8, seed=2)
    result = log_decay(z, a_log, dt_bias, bound)
    for head in range(3):
        own = log_decay(z[:, :, head : head + 1], a_log[head : head + 1], dt_bias.reshape(3, 8)[head], bound)
        assert same_bits(result[:, :, head : head + 1], own)
    spoilt = mx.concatenate([a_log[:3], mx.full((5,), 1e3)])
    assert same_bits(result, log_decay(z, spoilt, dt_bias, bound))


def test_gate_and_write_strength_do_not_pass_through_bfloat16():
    z, logits = randn(1, 2, 3, 8).astype(mx.bfloat16), randn(1, 2, 3).astype(mx.bfloat16)
    g, beta = log_decay(z, randn(8), randn(24), -5.0), write_strength(logits)
    assert g.dtype == beta.dtype == mx.float32
    assert relative_rms(beta, 1 / (1 + np.exp(-f64(logits)))) < 1e-6
    assert (g.astype(mx.bfloat16).astype(mx.float32) != g).sum().item() > g.size // 2


@pytest.mark.parametrize("length", [1.0, 1e-3, 1e-4])
def test_l2_epsilon_is_inside_the_root_on_the_sum(length):
    x = mx.full((1, 4), length / 2)
    assert l2_normalize(x)[0, 0].item() == pytest.approx(length / 2 / math.sqrt(length**2 + 1e-6), rel=1e-6)


def test_keys_have_at_most_length_one_and_queries_are_scaled_once():
    x = randn(100, 16)
    assert np.linalg.norm(f64(l2_normalize(x)), axis=-1).max() < 1 + 1e-6
    assert relative_rms(scaled_query(x), f64(l2_normalize(x)) / 4) < 1e-6


def test_one_token_on_an_empty_state():
    q, k, v, beta = randn(1, 1, 2, 4), randn(1, 1, 2, 4, seed=1), randn(1, 1, 2, 3, seed=2), mx.array([[[0.3, 0.8]]])
    o, state = recurrent_kda(q, k, v, mx.full(k.shape, -1.0), beta, mx.zeros((1, 2, 4, 3)))
    qk = (f64(q) * f64(k)).sum(-1, keepdims=True)
    assert relative_rms(o, f64(beta)[..., None] * qk * f64(v)) < 1e-6
    truth = f64(beta)[0, 0, :, None, None] * f64(k)[0, 0, :, :, None] * f64(v)[0, 0, :, None]
    assert relative_rms(state, truth[None]) < 1e-6


def test_the_delta_rule_overwrites():
    key = mx.array([0.6, 0.8])
    k = mx.broadcast_to(key, (1, 2, 1, 2))
    v = mx.array([[[[5.0]], [[-2.0]]]])
    o, _ = recurrent_kda(k, k, v, mx.zeros(k.shape), mx.ones((1, 2, 1)), mx.zeros((1, 1, 2, 1)))
    np.testing.assert_allclose(o.flatten().tolist(), [5.0, -2.0], rtol=1e-6)


def test_long_memory():
    """4,096 steps at 0.999 leave 0.0166 of the state; a decay in bfloat16 would leave all of it."""
    shape = (1, 4096, 1, 2)
    zero = mx.zeros(shape)
    _, state = recurrent_kda(
        zero, zero, zero, mx.full(shape, math.log(0.999)), mx.zeros(shape[:3]), mx.ones((1, 1, 2, 2))
    )
    np.testing.assert_allclose(state.flatten().tolist(), 0.999**4096, rtol=1e-4)
    assert state[0, 0, 0, 0].item() == pytest.approx(0.0166, abs=1e-4)


def test_the_future_does_not_move_a_bit_of_the_past():
    q, k, v = scaled_query(randn(1, 7, 2, 4)), l2_normalize(randn(1, 7, 2, 4, seed=1)), randn(1, 7, 2, 3, seed=2)
    g, beta = -mx.abs(randn(1, 7, 2, 4, seed=3)), mx.sigmoid(randn(1, 7, 2, seed=4))
    start = mx.zeros((1, 2, 4, 3))
    whole, _ = recurrent_kda(q, k, v, g, beta, start)
    past, _ = recurrent_kda(*(x[:, :5] for x in (q, k, v, g, beta)), start)
    assert same_bits(whole[:, :5], past)


def test_gated_output_norm_is_per_head_in_float32_with_one_rounding():
    o, weight, gate_logit = randn(1, 3, 2, 8), 1 + 0.3 * randn(8, seed=1), randn(1, 3, 2, 8, seed=2)
    x = f64(o)
    truth = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * f64(weight) / (1 + np.exp(-f64(gate_logit)))
    assert relative_rms(gated_output_norm(o, weight, gate_logit, 1e-5), truth) < 1e-6
    rounded = gated_output_norm(o, weight, gate_logit.astype(mx.bfloat16), 1e-5)
    expected = gated_output_norm(o, weight, gate_logit.astype(mx.bfloat16).astype(mx.float32), 1e-5)
    assert rounded.dtype == mx.bfloat16
    assert same_bits(rounded, expected.astype(mx.bfloat16))


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_forms_in_every_split_are_one_function(variant):
    module, x = attention(**VARIANTS[variant]), randn(2, 11, 64)
    module.form = "recurrent"
    truth = module(x)
    assert mx.all(mx.isfinite(truth)).item()
    for form, sizes in [("chunked", [11]), ("chunked", [6, 5]), ("chunked", [1, 10]), ("recurrent", [4, 1, 1, 5])]:
        module.form, module.chunk_size = form, 4
        cache, parts, start = KDACache(module.text_config, 2, mx.float32), [], 0
        for size in sizes:
            parts.append(module(x[:, start : start + size], None, cache))
            start += size
        assert relative_rms(mx.concatenate(parts, axis=1), truth) < 3e-6


def test_no_head_of_a_log_is_ignored_and_its_tail_is():
    module, x = attention(), randn(1, 6, 64)
    before = module(x)
    values = module.A_log
    for place in range(values.size):
        module.A_log = values.at[place].add(1.0)
        assert same_bits(module(x), before) == (place >= module.text_config.linear_attn_config.num_heads)


@pytest.mark.parametrize("sizes", [[7], [2, 5], [3, 1, 3], [1] * 7])
@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_padded_rows_equal_rows_alone_and_padding_moves_no_bit(form, sizes):
    """Left, right, both sides, longer than a chunk, and rows shorter than the convolution's window."""
    module = attention()
    module.form, module.chunk_size = form, 4
    x = randn(5, 7, 64)
    mask = (
        mx.array([[0, 0, 0, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0, 0], [1] * 7, [1, 0, 1, 0, 1, 0, 1]])
        == 1
    )
    results = []
    for fill in (mx.nan, 1e30):
        padded, cache = mx.where(mask[..., None], x, fill), KDACache(module.text_config, 5, mx.float32)
        parts, start = [], 0
        for size in sizes:
            piece = slice(start, start + size)
            parts.append(module(padded[:, piece], mask[:, piece], cache))
            start += size
        results.append((mx.concatenate(parts, axis=1), cache))
    (y, cache), (other, other_cache) = results
    assert same_bits(mx.where(mask[..., None], y, 0), mx.where(mask[..., None], other, 0))
    assert all(same_bits(vars(cache)[name], vars(other_cache)[name]) for name in vars(cache))
    for row in range(5):
        real = np.flatnonzero(np.array(mask[row])).tolist()
        alone, own = KDACache(module.text_config, 1, mx.float32), mx.array(real)
        assert relative_rms(y[row, own], module(x[row : row + 1, own], None, alone)[0]) < 3e-6
        assert relative_rms(cache.state[row], alone.state[0]) < 3e-6
        assert relative_rms(cache.conv_k[row] + 1, alone.conv_k[0] + 1) < 3e-6


def test_a_row_that_is_empty_in_a_chunk_keeps_its_state_bit_for_bit():
    module, cache = attention(), KDACache(mini_text(), 2, mx.float32)
    module(randn(2, 6, 64), None, cache)
    before = {name: value[1] for name, value in vars(cache).items()}
    for size in (1, 6):
        module(randn(2, size, 64, seed=1), mx.array([[True] * size, [False] * size]), cache)
        assert all(same_bits(vars(cache)[name][1], value) for name, value in before.items())
