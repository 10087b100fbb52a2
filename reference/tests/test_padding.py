import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.errors import InputError
from reference.padding import as_token_mask, back_in_place, real_first, to_front, zero_padding
from reference.tests.models import randn

masks = st.integers(1, 6).flatmap(
    lambda tokens: st.lists(st.lists(st.booleans(), min_size=tokens, max_size=tokens), min_size=1, max_size=4)
)


def test_real_tokens_come_first_in_their_order():
    mask = torch.tensor([[False, True, False, True], [True, True, True, True], [False] * 4])
    order, lengths = real_first(mask)
    assert order[0].tolist() == [1, 3, 0, 2] and order[1].tolist() == [0, 1, 2, 3]
    assert lengths.tolist() == [2, 4, 0]
    x = torch.arange(12.0).reshape(3, 4, 1)
    assert to_front(x, order)[0, :, 0].tolist() == [1, 3, 0, 2]


@given(masks)
def test_there_and_back(rows):
    mask = torch.tensor(rows)
    order, lengths = real_first(mask)
    x = randn(*mask.shape, 2, 3)
    front = to_front(x, order)
    assert torch.equal(back_in_place(front, order), x)
    for row, length in enumerate(lengths):
        assert torch.equal(front[row, :length], x[row, mask[row]])


@pytest.mark.parametrize("filling", [torch.nan, torch.inf, 1e30])
def test_padding_becomes_zero_whatever_it_holds(filling):
    mask = torch.tensor([[False, True, True]])
    x = torch.full((1, 3, 2), 5.0)
    x[0, 0] = filling
    assert zero_padding(x, mask).tolist() == [[[0, 0], [5, 5], [5, 5]]]


def test_attention_mask_is_bool_or_zero_and_one():
    assert as_token_mask(torch.tensor([[0, 1]])).tolist() == [[False, True]]
    assert as_token_mask(torch.tensor([[False, True]])).tolist() == [[False, True]]
    with pytest.raises(InputError, match="attention_mask.*only 0 and 1"):
        as_token_mask(torch.tensor([[0, 2]]))
