import mlx.core as mx
import numpy as np
import pytest

from port.mxfp4 import MXFP4Linear, gather_matmul, unpack, words
from port.tests.models import f64, randn, relative_rms
from reference import mxfp4 as numpy_mxfp4


def random_stack(experts, out, inner, seed=0):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (experts, out, inner // 2), dtype=np.uint8)
    scale = rng.integers(120, 134, (experts, out, inner // 32), dtype=np.uint8)
    weights = np.stack([numpy_mxfp4.unpack(p, s) for p, s in zip(packed, scale, strict=True)])
    return packed, scale, weights


def test_every_byte_under_every_scale():
    """All 256 bytes times all scale bytes below 255, value by value; byte 0 is 2^-127 and not zero."""
    packed = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (255, 16, 16))
    scale = np.broadcast_to(np.arange(255, dtype=np.uint8)[:, None, None], (255, 16, 1))
    with np.errstate(over="ignore"):
        truth = np.stack([numpy_mxfp4.unpack(p, s) for p, s in zip(packed, scale, strict=True)]).astype(np.float32)
    for dtype in (mx.float32, mx.bfloat16):
        weights = unpack(words(mx.array(packed)), mx.array(scale), dtype)
        assert weights.dtype == dtype
        np.testing.assert_array_equal(np.array(weights.astype(mx.float32)), truth)


@pytest.mark.parametrize("byte, values", [(0xA5, [3, -1]), (0x5A, [-1, 3]), (0x80, [0, 0]), (0xF7, [6, -6])])
@pytest.mark.parametrize("scale, factor", [(127, 1.0), (125, 0.25), (129, 4.0)])
def test_known_bytes(byte, values, scale, factor):
    weights = unpack(words(mx.full((1, 16), byte, mx.uint8)), mx.full((1, 1), scale, mx.uint8))
    assert weights[0, :2].tolist() == [value * factor for value in values]


def test_input_32_takes_the_next_scale():
    weights = unpack(words(mx.full((1, 32), 0x22, mx.uint8)), mx.array([[127, 130]], mx.uint8))
    assert weights[0].tolist() == [1.0] * 32 + [8.0] * 32


def test_words_are_the_same_bytes():
    packed = np.random.default_rng(0).integers(0, 256, (3, 5, 16), dtype=np.uint8)
    as_words = np.array(words(mx.array(packed)))
    assert as_words.tobytes() == packed.tobytes()
    assert as_words[0, 0, 0] == int.from_bytes(packed[0, 0, :4].tobytes(), "little")


@pytest.mark.parametrize("dtype, limit", [(mx.float32, 1e-6), (mx.bfloat16, 2e-3)])
@pytest.mark.parametrize("shape", [(8, 32, 32, 1, 3), (8, 32, 32, 7, 3), (5, 33, 96, 5, 2), (3, 64, 512, 3, 2)])
def test_gather_matmul_equals_the_dequantized_product(shape, dtype, limit):
    experts, out, inner, tokens, top_k = shape
    packed, scale, weights = random_stack(experts, out, inner)
    x = randn(tokens, 1, inner).astype(dtype)
    chosen = np.random.default_rng(1).integers(0, experts, (tokens, top_k))
    y = gather_matmul(x, words(mx.array(packed)), mx.array(scale), mx.array(chosen))
    truth = np.einsum("nki,nkoi->nko", np.repeat(f64(x), top_k, axis=1), weights[chosen])
    assert y.dtype == dtype
    assert relative_rms(y, truth) < limit


def test_a_row_per_expert_may_have_its_own_input():
    packed, scale, weights = random_stack(4, 32, 64)
    x, chosen = randn(3, 2, 64), np.array([[0, 3], [2, 1], [3, 3]])
    y = gather_matmul(x, words(mx.array(packed)), mx.array(scale), mx.array(chosen))
    assert relative_rms(y, np.einsum("nki,nkoi->nko", f64(x), weights[chosen])) < 1e-6


def test_unloaded_experts_are_nan():
    y = MXFP4Linear(2, 32, 4)(mx.ones((1, 1, 32)), mx.array([[0, 1]]))
    assert mx.all(mx.isnan(y)).item()
