"""Which layers and experts a rank has, and what passes between ranks (K3.md §6, §7)."""

from __future__ import annotations

import mlx.core as mx
import pytest

from fixtures.catalogue import entry
from port.expert_split import share
from port.pipeline import (
    CODES,
    Described,
    HandOverError,
    agree,
    appended_blocks,
    described,
    handed_over,
    header,
    send_state,
    stages,
    stages_at,
)
from reference.errors import InputError


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_layer_runs_exactly_once_in_order_and_evenly(ranks: int):
    for layers in range(1, 101):
        ranges = stages(layers, ranks)
        assert [layer for stage in ranges for layer in stage] == list(range(layers))
        lengths = [len(stage) for stage in ranges]
        assert len(ranges) == ranks and max(lengths) - min(lengths) <= 1


def test_k3_over_four_ranks():
    assert stages(93, 4) == [range(0, 24), range(24, 47), range(47, 70), range(70, 93)]


def test_cuts_of_ones_own_keep_every_layer_too():
    for first in range(26):
        for second in range(first, 26):
            assert [layer for stage in stages_at([first, second], 25) for layer in stage] == list(range(25))


@pytest.mark.parametrize("cuts", [[7, 3], [-1], [26], [3, 26]])
def test_cuts_that_would_lose_or_repeat_a_layer_are_refused(cuts: list[int]):
    with pytest.raises(InputError, match="ascending numbers from 0 to 25"):
        stages_at(cuts, 25)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_expert_is_on_one_rank(ranks: int):
    for experts in range(ranks, 101):
        shares = [share(experts, ranks, rank) for rank in range(ranks)]
        assert [expert for part in shares for expert in part] == list(range(experts))
        assert all(shares)


def test_a_rank_without_experts_is_refused():
    with pytest.raises(InputError, match="at most 4"):
        share(4, 5, 0)


def test_what_is_handed_over_before_each_layer():
    """Blocks of 12: one is appended by layer 0, the next by layer 12, the last by layer 24."""
    text = entry("long").parsed.text_config
    assert [appended_blocks(text, layer) for layer in range(26)] == [0, *[1] * 12, *[2] * 12, 3]
    one = (2, 7, text.hidden_size)
    assert handed_over(text, 0, 2, 7, mx.float32) == {"prefix_sum": (one, mx.float32)}
    expected = {"prefix_sum": (one, mx.bfloat16), "blocks": ((2, *one), mx.bfloat16)}
    assert handed_over(text, 13, 2, 7, mx.bfloat16) == expected


def test_without_attention_residuals_the_prefix_sum_is_all():
    text = entry("plain-residual").parsed.text_config
    assert set(handed_over(text, 3, 1, 1, mx.float32)) == {"prefix_sum"}


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(2, 7, 48), (3, 2, 7, 48), (1,)])
def test_a_header_says_what_follows(dtype: mx.Dtype, shape: tuple[int, ...]):
    told = Described(92, dtype, shape)
    assert described(header(told).tolist()) == told


def test_numbers_that_are_no_header_are_refused():
    with pytest.raises(HandOverError, match="a header was expected"):
        described([1, 77, 0, 0, 0, 0])


@pytest.mark.parametrize(
    "found",
    [
        Described(3, mx.bfloat16, (1, 2, 8)),
        Described(4, mx.float32, (1, 2, 8)),
        Described(3, mx.float32, (1, 8, 2)),
    ],
)
def test_another_layer_dtype_or_shape_is_named(found: Described):
    with pytest.raises(HandOverError, match="expected mlx.core.float32 .1, 2, 8. for layer 3, found"):
        agree("blocks", Described(3, mx.float32, (1, 2, 8)), found)


def test_a_sender_looks_at_its_own_state_before_anything_leaves():
    state = {"prefix_sum": mx.zeros((1, 2, 8), mx.float32)}
    with pytest.raises(HandOverError, match="prefix_sum: expected mlx.core.bfloat16"):
        send_state(None, 1, 3, state, {"prefix_sum": ((1, 2, 8), mx.bfloat16)})
