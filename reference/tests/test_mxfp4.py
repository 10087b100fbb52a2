from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.mxfp4 import CODE_VALUES, nearest_codes, pack, pack_codes, scale_values, unpack, unpack_codes


def values_of(byte: int) -> list[float]:
    row = np.full((1, 16), byte, np.uint8)
    return unpack(row, np.full((1, 1), 127, np.uint8))[0, :2].tolist()


@pytest.mark.parametrize("byte, pair", [(0xA5, [3, -1]), (0x5A, [-1, 3]), (0x80, [0, -0.0]), (0xF7, [6, -6])])
def test_low_nibble_first(byte, pair):
    found = values_of(byte)
    assert found == pair and np.signbit(found).tolist() == np.signbit(pair).tolist()


@pytest.mark.parametrize("byte, value", [(127, 1.0), (125, 0.25), (129, 4.0), (254, 2.0**127), (0, 2.0**-127)])
def test_scale_byte(byte, value):
    assert scale_values(np.array([byte], np.uint8)).tolist() == [value]


def test_scale_byte_255_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"255.*\(1, 2\)"):
        scale_values(np.array([[1, 2, 3], [4, 5, 255]], np.uint8))


def test_every_byte_under_every_scale():
    """Against the table written out: sign, two exponent bits, one mantissa bit."""
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = [sign * value for sign in (1, -1) for value in table]
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for scale in range(255):
        found = unpack(packed, np.full((16, 1), scale, np.uint8)).reshape(-1)
        true = [expected[code] * 2.0 ** (scale - 127) for byte in range(256) for code in (byte & 15, byte >> 4)]
        assert found.tolist() == true


def test_index_32_takes_the_next_scale():
    packed = np.full((1, 32), 0x22, np.uint8)
    found = unpack(packed, np.array([[127, 129]], np.uint8))[0]
    assert found.tolist() == 32 * [1.0] + 32 * [4.0]


@given(st.integers(0, 2**32 - 1))
def test_codes_round_trip(seed):
    codes = np.random.default_rng(seed).integers(0, 16, (3, 64)).astype(np.uint8)
    assert (unpack_codes(pack_codes(codes)) == codes).all()


@given(st.integers(0, 2**32 - 1), st.floats(1e-20, 1e20))
def test_packing_is_idempotent_and_close(seed, scale):
    weight = scale * np.random.default_rng(seed).standard_normal((4, 96))
    packed, scales = pack(weight)
    once = unpack(packed, scales)
    assert (unpack(*pack(once)) == once).all()
    largest = np.abs(weight).reshape(4, 3, 32).max(-1)
    assert (np.abs(weight - once).reshape(4, 3, 32) <= largest[..., None] / 4).all()


def test_nearest_code_ties_to_even_and_saturates():
    codes = nearest_codes(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 100.0, -0.3, -0.0]))
    assert CODE_VALUES[codes].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6, -0.5, -0.0]


def test_zero_group_has_scale_one():
    packed, scales = pack(np.zeros((1, 32)))
    assert packed.tolist() == [16 * [0]] and scales.tolist() == [[127]]


def test_rows_must_fill_whole_groups():
    with pytest.raises(ValueError, match="33"):
        pack(np.zeros((1, 33)))
