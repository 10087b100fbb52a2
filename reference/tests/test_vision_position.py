"""Where a patch stands: learned grid, time, rope."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from reference.tests.models import randn, relative_rms
from reference.vision_position import (
    apply_rope,
    position_embedding,
    resized_positions,
    rope_angles,
    rope_turns,
    time_embedding,
)


def test_table_is_untouched_at_its_own_size():
    table = randn(64, 64, 2).bfloat16()
    assert torch.equal(resized_positions(table, 64, 64), table)
    assert torch.equal(position_embedding(table, [(1, 64, 64)]), table.flatten(0, 1))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_resizing_is_bilinear_with_half_pixel_centres(rows, columns, h, w):
    table = randn(rows, columns, 3)
    expected = functional.interpolate(table.permute(2, 0, 1)[None], size=(h, w), mode="bilinear", align_corners=False)
    torch.testing.assert_close(resized_positions(table, h, w), expected[0].permute(1, 2, 0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(2, 6), (6, 2)])
def test_resizing_known_values(size):
    """Halving averages neighbours: rows 0…7 at 2 places read 1.5 and 5.5, columns at 6 places 1/6, 1.5, …"""
    ramp = torch.arange(8, dtype=torch.float64)
    table = ramp[:, None, None] * torch.tensor([1.0, 0.0]) + ramp[None, :, None] * torch.tensor([0.0, 1.0])
    places = {2: [1.5, 5.5], 6: [1 / 6, 1.5, 17 / 6, 25 / 6, 5.5, 41 / 6]}
    resized = resized_positions(table, *size)
    torch.testing.assert_close(resized[:, 0, 0], torch.tensor(places[size[0]], dtype=torch.float64))
    torch.testing.assert_close(resized[0, :, 1], torch.tensor(places[size[1]], dtype=torch.float64))


def test_float32_positions_are_rounded_once():
    table = randn(64, 64, 32)
    assert (
        relative_rms(resized_positions(table.float(), 32, 44), resized_positions(table.float().double(), 32, 44)) < 2e-7
    )


def test_time_embedding_closed_form():
    embedding = time_embedding(4, 8)
    assert torch.equal(embedding[0], torch.tensor([0.0] * 4 + [1.0] * 4, dtype=torch.float64))
    for frame in range(4):
        for i in range(4):
            phase = frame * 10000 ** (-i / 4)
            assert embedding[frame, i].item() == pytest.approx(math.sin(phase), abs=1e-15)
            assert embedding[frame, 4 + i].item() == pytest.approx(math.cos(phase), abs=1e-15)


def test_only_videos_get_a_time_embedding():
    table = randn(8, 8, 4)
    one, two = position_embedding(table, [(1, 4, 6)]), position_embedding(table, [(2, 4, 6)])
    torch.testing.assert_close(two, torch.cat([one + time_embedding(2, 4)[0], one + time_embedding(2, 4)[1]]))


def test_rope_columns_turn_even_pairs_and_rows_odd_ones():
    angles = rope_angles(3, 4, 16).view(3, 4, 4, 2)
    for row in range(3):
        for column in range(4):
            for i in range(4):
                frequency = 10000 ** (-4 * i / 16)
                assert angles[row, column, i, 0].item() == pytest.approx(column * frequency, abs=1e-15)
                assert angles[row, column, i, 1].item() == pytest.approx(row * frequency, abs=1e-15)


def test_rope_turns_complex_pairs_of_neighbours():
    turns = rope_turns([(1, 1, 2)], 4, torch.float64)
    x = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64).expand(2, 1, 4)
    expected = torch.tensor([[1.0, 0.0, 1.0, 0.0], [math.cos(1), math.sin(1), 1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(apply_rope(x, turns)[:, 0], expected)


def test_rope_scores_depend_on_distance_only():
    h, w, head_dim = 5, 6, 16
    q, k = randn(1, 1, head_dim).expand(h * w, 1, head_dim), randn(1, 1, head_dim, seed=1).expand(h * w, 1, head_dim)
    turns = rope_turns([(1, h, w)], head_dim, torch.float64)
    scores = (apply_rope(q, turns)[:, 0] @ apply_rope(k, turns)[:, 0].T).view(h, w, h, w)
    torch.testing.assert_close(scores[1, 2, 3, 1], scores[2, 5, 4, 4])
    assert (scores[1, 2, 3, 1] - scores[1, 2, 2, 0]).abs() > 1e-3


def test_frames_repeat_the_same_turns():
    turns = rope_turns([(2, 2, 4), (1, 2, 2)], 16, torch.float32)
    assert turns.shape == (20, 8, 2)
    assert torch.equal(turns[:8], turns[8:16])
