import math

import mlx.core as mx
import numpy as np
import pytest

from port import kda_chunk
from port.kda import recurrent_kda
from port.kda_chunk import chunked_kda, decayed_products, into_chunks, tree_size, write_operator
from port.tests.models import f64, randn, relative_rms
from reference.errors import InputError

HEADS, KEY, VALUE = 2, 16, 12


def unit(x):
    return x / mx.sqrt(mx.sum(x * x, axis=-1, keepdims=True))


def inputs(tokens, decay=None, beta=None, alike=False, amplitude=1.0, batch=1):
    """q, k, v, log_decay, beta, state; D_k != D_v."""
    shape = (batch, tokens, HEADS, KEY)
    k = unit(randn(*shape, seed=1))
    k = mx.broadcast_to(k[:, :1], shape) if alike else k
    g = -5 * mx.sigmoid(2 * randn(*shape, seed=3)) if decay is None else mx.broadcast_to(mx.array(decay), shape)
    b = mx.sigmoid(randn(*shape[:3], seed=4)) if beta is None else mx.full(shape[:3], beta)
    state = 0.3 * randn(batch, HEADS, KEY, VALUE, seed=5)
    return unit(randn(*shape)) / 4, amplitude * k, randn(*shape[:3], VALUE, seed=2), g, b, state


REGIMES = {
    "random": inputs(50, batch=2),
    "at the bound": inputs(130, decay=-5.0),
    "half the bound": inputs(130, decay=-2.5),
    "alike keys": inputs(32, decay=-0.001, beta=0.99, alike=True),
    "alike keys, faster": inputs(64, decay=-0.05, beta=0.99, alike=True),
    "alike keys, nothing forgotten": inputs(64, decay=0.0, beta=1.0, alike=True),
    "tiny keys": inputs(40, amplitude=1e-4),
    "mixed heads": inputs(80, decay=[[-5.0], [-0.001]]),
    "unbounded gate": inputs(40, decay=-50.0),
    "long and slow": inputs(1024, decay=math.log(0.999)),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_equals_the_recurrence_in_every_regime(regime, chunk_size):
    (o, state), (truth_o, truth_state) = chunked_kda(*REGIMES[regime], chunk_size), recurrent_kda(*REGIMES[regime])
    assert mx.all(mx.isfinite(o)).item() and mx.all(mx.isfinite(state)).item()
    assert relative_rms(o, truth_o) < 5e-6
    assert relative_rms(state, truth_state) < 5e-6


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 8])
def test_every_length_from_one_token_to_three_chunks_and_one(chunk_size):
    operands = inputs(3 * chunk_size + 1)
    for tokens in range(1, 3 * chunk_size + 2):
        part = [x[:, :tokens] for x in operands[:5]]
        (o, state), (truth_o, truth_state) = (
            chunked_kda(*part, operands[5], chunk_size),
            recurrent_kda(*part, operands[5]),
        )
        assert o.shape == truth_o.shape
        assert relative_rms(o, truth_o) < 2e-6 and relative_rms(state, truth_state) < 2e-6


@pytest.mark.parametrize("cut", [7, 8, 9, 19])
def test_the_future_does_not_matter(cut):
    operands = inputs(19)
    whole, _ = chunked_kda(*operands, 8)
    past = [x[:, :cut] for x in operands[:5]]
    altered = [mx.concatenate([x[:, :cut], 0.5 * x[:, cut:]], axis=1) for x in operands[:5]]
    assert relative_rms(whole[:, :cut], chunked_kda(*past, operands[5], 8)[0]) < 1e-6
    assert relative_rms(whole[:, :cut], chunked_kda(*altered, operands[5], 8)[0][:, :cut]) < 1e-6


@pytest.mark.parametrize("decay", [-0.001, -0.05])
def test_the_inverse_under_alike_keys(decay):
    """Its strict lower triangle, where the error of repeated squaring hides behind the diagonal of ones."""
    i = np.arange(32)
    products = np.tril(np.exp(decay * (i[:, None] - i)), -1)
    truth = np.linalg.inv(np.eye(32) + 0.99 * products) * 0.99
    operator = f64(write_operator(mx.array(products.astype(np.float32)), mx.full((32,), 0.99)))
    below = np.tril_indices(32, -1)
    assert np.abs(truth[below]).max() < 0.99
    assert relative_rms(operator[below], truth[below]) < 1e-5
    assert np.abs(operator - truth).max() < 1e-6


def test_products_by_definition():
    """Sums of log-decays that reach −320 in a chunk, with pairs in it that hardly decay."""
    readers, keys = randn(2, 3, 8, 4), randn(2, 8, 4, seed=1)
    log_decay = mx.where(mx.arange(8)[:, None] % 3 == 2, -160.0, -0.01) * mx.ones((2, 8, 4))
    products, from_start, to_end, whole = decayed_products(readers, keys, log_decay)
    g = f64(log_decay)
    total = np.array([[[g[n, j + 1 : i + 1].sum(0) for j in range(8)] for i in range(8)] for n in range(2)])
    truth = np.tril(np.einsum("nrid,njd,nijd->nrij", f64(readers), f64(keys), np.exp(total)), -1)
    assert relative_rms(products, truth) < 1e-6
    prefix = np.cumsum(g, axis=1)
    assert relative_rms(from_start, f64(readers) * np.exp(prefix)[:, None]) < 1e-6
    assert relative_rms(to_end, f64(keys) * np.exp([[g[n, j + 1 :].sum(0) for j in range(8)] for n in range(2)])) < 1e-6
    assert mx.all(whole == 0).item()


def test_chunks():
    x = randn(2, 11, 3, 4)
    chunks = into_chunks(x, 4)
    assert chunks.shape == (3, 2, 3, 4, 4)
    assert mx.array_equal(chunks[1, 0, 2], x[0, 4:8, 2]).item()
    assert mx.all(chunks[2, :, :, 3] == 0).item()
    assert [tree_size(*sizes) for sizes in [(64, 150), (48, 150), (64, 1), (64, 5), (1, 9)]] == [64, 64, 1, 8, 1]
    with pytest.raises(InputError, match="at least 1"):
        chunked_kda(*inputs(3), 0)


def test_a_long_prompt_is_worked_off_in_strides(monkeypatch):
    operands = inputs(50)
    o, state = chunked_kda(*operands, 8)
    monkeypatch.setattr(kda_chunk, "CHUNKS_AT_ONCE", 2 * HEADS)
    strided_o, strided_state = chunked_kda(*operands, 8)
    assert relative_rms(strided_o, o) < 1e-6 and relative_rms(strided_state, state) < 1e-6


def test_bfloat16_operands_are_widened():
    operands = inputs(9)
    rounded = [x.astype(mx.bfloat16) for x in operands[:3]]
    wide = [x.astype(mx.float32) for x in rounded]
    o, state = chunked_kda(*rounded, *operands[3:], 4)
    assert o.dtype == state.dtype == mx.float32
    assert mx.array_equal(o, chunked_kda(*wide, *operands[3:], 4)[0]).item()
