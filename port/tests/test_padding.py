import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from port.padding import as_token_mask, back_in_place, real_first, to_front, zero_padding
from reference.errors import InputError

MASKS = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3)


@given(MASKS)
def test_real_tokens_come_first_in_order_and_go_back(rows):
    mask = mx.array(rows)
    order, lengths = real_first(mask)
    for row, real, length in zip(np.array(order), rows, np.array(lengths), strict=True):
        places = [place for place, is_real in enumerate(real) if is_real]
        assert length == len(places)
        assert row.tolist() == places + [place for place in range(5) if place not in places]
    x = mx.arange(mask.size * 2).reshape(*mask.shape, 2)
    assert mx.array_equal(back_in_place(to_front(x, order), order), x).item()
    flat = x[..., 0]
    assert mx.array_equal(back_in_place(to_front(flat, order), order), flat).item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_zero_padding_removes_nan(dtype):
    x = mx.array([[[mx.nan, 1.0], [2.0, 3.0]]]).astype(dtype)
    cleared = zero_padding(x, mx.array([[False, True]]))
    assert cleared.dtype == dtype
    assert cleared.tolist() == [[[0.0, 0.0], [2.0, 3.0]]]


def test_masks_are_zeros_and_ones():
    assert as_token_mask(mx.array([[0, 1]])).tolist() == [[False, True]]
    assert as_token_mask(mx.array([[False, True]])).tolist() == [[False, True]]
    with pytest.raises(InputError, match="only 0 and 1"):
        as_token_mask(mx.array([[0, 2]]))
