"""Where a patch stands: learned grid, time, rope."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from port.tests.models import f64, randn, relative_rms
from port.vision_position import (
    apply_rope,
    position_embedding,
    resized_positions,
    rope_angles,
    rope_turns,
    time_embedding,
)


def test_table_is_untouched_at_its_own_size():
    table = randn(64, 64, 2).astype(mx.bfloat16)
    assert mx.array_equal(resized_positions(table, 64, 64), table)
    assert mx.array_equal(position_embedding(table, [(1, 64, 64)]), table.flatten(0, 1))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_resizing_is_bilinear_with_half_pixel_centres(rows, columns, h, w):
    """Against numpy's one-dimensional interpolation, which repeats the end points too."""
    table = randn(rows, columns, 3)
    at_column, at_row = (np.arange(w) + 0.5) * columns / w - 0.5, (np.arange(h) + 0.5) * rows / h - 0.5
    along = np.apply_along_axis(lambda line: np.interp(at_column, np.arange(columns), line), 1, f64(table))
    expected = np.apply_along_axis(lambda line: np.interp(at_row, np.arange(rows), line), 0, along)
    assert relative_rms(resized_positions(table, h, w), expected) < 1e-6


@pytest.mark.parametrize("size", [(2, 6), (6, 2)])
def test_resizing_known_values(size):
    """Halving averages neighbours: rows 0…7 at 2 places read 1.5 and 5.5, columns at 6 places 1/6, 1.5, …"""
    table = mx.stack(mx.meshgrid(mx.arange(8.0), mx.arange(8.0), indexing="ij"), axis=-1)
    places = {2: [1.5, 5.5], 6: [1 / 6, 1.5, 17 / 6, 25 / 6, 5.5, 41 / 6]}
    resized = resized_positions(table, *size)
    assert f64(resized[:, 0, 0]) == pytest.approx(places[size[0]], rel=1e-6)
    assert f64(resized[0, :, 1]) == pytest.approx(places[size[1]], rel=1e-6)


def test_bfloat16_positions_are_rounded_once():
    table = randn(8, 8, 4).astype(mx.bfloat16)
    wide = resized_positions(table.astype(mx.float32), 5, 12)
    assert mx.array_equal(resized_positions(table, 5, 12), wide.astype(mx.bfloat16))


def test_time_embedding_closed_form():
    embedding = time_embedding(4, 8)
    assert embedding[0].tolist() == [0.0] * 4 + [1.0] * 4
    for frame in range(4):
        for i in range(4):
            phase = frame * 10000 ** (-i / 4)
            assert embedding[frame, i] == pytest.approx(math.sin(phase), abs=1e-15)
            assert embedding[frame, 4 + i] == pytest.approx(math.cos(phase), abs=1e-15)


def test_only_videos_get_a_time_embedding():
    table = randn(8, 8, 4)
    one, two = position_embedding(table, [(1, 4, 6)]), position_embedding(table, [(2, 4, 6)])
    expected = np.concatenate([f64(one) + time_embedding(2, 4)[0], f64(one) + time_embedding(2, 4)[1]])
    assert relative_rms(two, expected) < 1e-6


def test_rope_columns_turn_even_pairs_and_rows_odd_ones():
    angles = rope_angles(3, 4, 16).reshape(3, 4, 4, 2)
    for row in range(3):
        for column in range(4):
            for i in range(4):
                frequency = 10000 ** (-4 * i / 16)
                assert angles[row, column, i, 0] == pytest.approx(column * frequency, abs=1e-15)
                assert angles[row, column, i, 1] == pytest.approx(row * frequency, abs=1e-15)


def test_rope_turns_complex_pairs_of_neighbours():
    turns = rope_turns([(1, 1, 2)], 4)
    x = mx.broadcast_to(mx.array([1.0, 0.0, 1.0, 0.0]), (2, 1, 4))
    expected = np.array([[1.0, 0.0, 1.0, 0.0], [math.cos(1), math.sin(1), 1.0, 0.0]])
    assert relative_rms(apply_rope(x, turns)[:, 0], expected) < 1e-7


def test_rope_scores_depend_on_distance_only():
    h, w, head_dim = 5, 6, 16
    q, k = (mx.broadcast_to(randn(1, 1, head_dim, seed=seed), (h * w, 1, head_dim)) for seed in (0, 1))
    turns = rope_turns([(1, h, w)], head_dim)
    scores = f64(apply_rope(q, turns)[:, 0] @ apply_rope(k, turns)[:, 0].T).reshape(h, w, h, w)
    assert scores[1, 2, 3, 1] == pytest.approx(scores[2, 5, 4, 4], abs=1e-5)
    assert abs(scores[1, 2, 3, 1] - scores[1, 2, 2, 0]) > 1e-3


def test_far_columns_turn_as_exactly_as_near_ones():
    turns = rope_turns([(1, 1, 512)], 16)
    assert turns[511, 0, 0].item() == pytest.approx(math.cos(511), abs=6e-8)


def test_frames_repeat_the_same_turns():
    turns = rope_turns([(2, 2, 4), (1, 2, 2)], 16)
    assert turns.shape == (20, 8, 2) and turns.dtype == mx.float32
    assert mx.array_equal(turns[:8], turns[8:16])
