import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten

from port import vision, vision_position
from port.tests.models import f64, filled, randn, relative_rms
from port.tests.vision_models import CONFIG, INPUTS, golden, loaded, share_differing
from port.vision import (
    VISION_NORM_EPS,
    VisionNorm,
    VisionTower,
    attention,
    gelu_tanh,
    merge_patches,
    norm_rounded_once,
    patch_embedding,
    temporal_mean,
)
from port.vision_position import (
    apply_rope,
    position_embedding,
    resized_positions,
    rope_angles,
    rope_turns,
    time_embedding,
)
from reference.checkpoint import vision_rows
from reference.errors import InputError
from reference.taps import Recorder, name_modules, recording

PATCHES, GRIDS = INPUTS["vision.pixel_values"], INPUTS["vision.grid_thws"]
BLOCKS = [f"encoder.blocks.{block}.output" for block in range(CONFIG.vt_num_hidden_layers)]
grids_of_items = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([2, 4, 6, 8]), st.sampled_from([2, 4, 6, 8])), min_size=1, max_size=3
)


def random_tower():
    return filled(VisionTower(CONFIG))


def mini_tower(dtype):
    tower = loaded(VisionTower(CONFIG), "vision_tower.", dtype)
    name_modules(tower)
    return tower


def traced(tower):
    recorder = Recorder()
    with recording(recorder):
        tower(PATCHES, GRIDS)
    return {"tower.output": recorder.values.pop("output"), **recorder.values}


def picture(t, h, w, seed=0):
    return randn(t * h * w, 3, CONFIG.patch_size, CONFIG.patch_size, seed=seed)


# What the authors' code computed


def test_float32_equals_the_golden_trace_chained():
    trace, taps = golden("float32"), traced(mini_tower("float32"))
    for name in ["patch_embed.output", *BLOCKS, "tower.output"]:
        assert taps[name].dtype == mx.float32
        assert relative_rms(taps[name], trace[name]) < 1e-6, name


def test_bfloat16_rounds_where_the_authors_round():
    """Each module with the trace's own input: ties apart, every value is the same."""
    trace, tower = golden("bfloat16"), mini_tower("bfloat16")
    grids = [tuple(grid) for grid in GRIDS.tolist()]
    turns = rope_turns(grids, CONFIG.head_dim)
    outputs = {"patch_embed.output": tower.patch_embed(PATCHES, grids)}
    for index, (block, name) in enumerate(zip(tower.encoder.blocks, BLOCKS, strict=True)):
        source = trace[BLOCKS[index - 1]] if index else trace["patch_embed.output"]
        outputs[name] = block(source, grids, turns)
    outputs["tower.output"] = tower.finish(trace[BLOCKS[-1]], grids)
    for name, output in outputs.items():
        assert output.dtype == mx.bfloat16
        assert share_differing(output, trace[name]) < 1e-2, name


def test_bfloat16_chained_errs_like_the_authors():
    trace, fine, taps = golden("bfloat16"), golden("float32"), traced(mini_tower("bfloat16"))
    for name in ["patch_embed.output", *BLOCKS, "tower.output"]:
        assert relative_rms(taps[name], fine[name]) < 1.2 * relative_rms(trace[name], fine[name]), name


# Parameters and taps


def test_parameters_have_the_checkpoints_names_and_shapes():
    prefix = "vision_tower."
    expected = {name[len(prefix) :]: shape for name, shape, _ in vision_rows(CONFIG) if name.startswith(prefix)}
    assert {name: tensor.shape for name, tensor in tree_flatten(VisionTower(CONFIG).parameters())} == expected


def test_a_tower_that_was_never_loaded_gives_nan():
    assert mx.isnan(VisionTower(CONFIG)(PATCHES, GRIDS)).all()


def test_every_tensor_counts():
    tower = random_tower()
    before = tower(PATCHES, GRIDS)
    for name, saved in tree_flatten(tower.parameters()):
        tower.update(tree_unflatten([(name, saved + 0.1 * randn(*saved.shape, seed=7))]))
        assert relative_rms(tower(PATCHES, GRIDS), before) > 1e-5, name
        tower.update(tree_unflatten([(name, saved)]))


def test_taps_carry_paths_below_the_tower():
    names = {f"encoder.blocks.{block}.{what}" for block in range(3) for what in ("attention", "output")}
    taps = traced(mini_tower("float32"))
    assert set(taps) == {"patch_embed.output", "tower.output", *names}
    assert taps["encoder.blocks.0.attention"].shape == (len(PATCHES), CONFIG.qkv_hidden_size)


# Norm and activation


@pytest.mark.parametrize("mean_square, factor", [(1e-3, 2.97), (1e-2, 1.335)])
def test_epsilon_is_float32s_not_bfloat16s(mean_square, factor):
    x, weight = mx.full((1, 16), mean_square**0.5), mx.ones(16)
    ratio = norm_rounded_once(x, weight, VISION_NORM_EPS) / norm_rounded_once(x, weight, 2.0**-7)
    assert ratio[0, 0].item() == pytest.approx(factor, abs=5e-3)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-4])
def test_norm_written_out(scale):
    x, weight = scale * randn(64, 32), randn(32, seed=1)
    expected = f64(x) / np.sqrt(np.square(f64(x)).mean(-1, keepdims=True) + 1.1920929e-7) * f64(weight)
    assert relative_rms(norm_rounded_once(x, weight, VISION_NORM_EPS), expected) < 3e-7


def test_norm_multiplies_by_the_weight_before_it_rounds():
    x, weight = randn(64, 32).astype(mx.bfloat16), randn(32, seed=1).astype(mx.bfloat16)
    once = norm_rounded_once(x, weight, VISION_NORM_EPS)
    wide = norm_rounded_once(x.astype(mx.float32), weight.astype(mx.float32), VISION_NORM_EPS)
    twice = norm_rounded_once(x, mx.ones(32, mx.bfloat16), VISION_NORM_EPS) * weight
    assert mx.array_equal(once, wide.astype(mx.bfloat16))
    assert share_differing(once, twice) > 0.1


def test_every_norm_of_the_tower_uses_that_epsilon():
    norms = [module for module in VisionTower(CONFIG).modules() if isinstance(module, VisionNorm)]
    assert len(norms) == 2 * CONFIG.vt_num_hidden_layers + 1
    assert {norm.eps for norm in norms} == {VISION_NORM_EPS}


def test_gelu_is_the_tanh_form():
    x = np.linspace(-6, 6, 1001).astype(np.float32)
    assert gelu_tanh(mx.array([-2.7])).item() == pytest.approx(-0.0089, abs=5e-5)
    wide = x.astype(np.float64)
    expected = wide / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    assert np.abs(f64(gelu_tanh(mx.array(x))) - expected).max() < 1e-6


def test_gelu_rounds_once():
    x = randn(1000).astype(mx.bfloat16)
    assert mx.array_equal(gelu_tanh(x), gelu_tanh(x.astype(mx.float32)).astype(mx.bfloat16))


# Patches and positions


def test_patch_embedding_sums_over_channel_row_and_column():
    patches, weight = randn(5, 3, 4, 4), randn(8, 3, 4, 4, seed=1)
    expected = np.einsum("lcij,dcij->ld", f64(patches), f64(weight))
    assert relative_rms(patch_embedding(patches, weight), expected) < 1e-6


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


# Attention and merge


def test_attention_of_one_item_written_out():
    q, k, v = (randn(6, 2, 4, seed=seed) for seed in range(3))
    expected = np.zeros((6, 2, 4))
    for head in range(2):
        for row in range(6):
            weights = np.exp(f64(k)[:, head] @ f64(q)[row, head] / 2)
            expected[row, head] = weights @ f64(v)[:, head] / weights.sum()
    assert relative_rms(attention(q, k, v, [(1, 2, 3)]), expected.reshape(6, 8)) < 1e-6


def test_attention_stays_within_an_item():
    parts = [randn(8, 2, 4, seed=seed) for seed in range(3)]
    lone = attention(*parts, [(1, 2, 4)])
    poisoned = [mx.concatenate([part, mx.full((12, 2, 4), mx.nan)]) for part in parts]
    assert mx.array_equal(attention(*poisoned, [(1, 2, 4), (3, 2, 2)])[:8], lone)


def test_attention_sees_all_frames_of_a_video():
    q, k, v = (randn(8, 1, 4, seed=seed) for seed in range(3))
    before, last = attention(q, k, v, [(2, 2, 2)]), mx.arange(8)[:, None, None] == 7
    assert (attention(q, k, v + last, [(2, 2, 2)]) != before).any(-1).all()


def test_scoring_in_pieces_changes_nothing(monkeypatch):
    q, k, v = (randn(24, 2, 4, seed=seed) for seed in range(3))
    whole = attention(q, k, v, [(1, 4, 6)])
    monkeypatch.setattr(vision, "QUERY_ROWS", 5)
    assert relative_rms(attention(q, k, v, [(1, 4, 6)]), whole) < 1e-6


def test_merge_takes_windows_row_by_row_and_means_frames():
    merged = merge_patches(mx.arange(32.0)[:, None], [(2, 4, 4)], (2, 2))
    first = np.array([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])
    assert np.array_equal(f64(merged[..., 0]), first + 8)


def test_merge_window_need_not_be_square():
    merged = merge_patches(mx.arange(12.0)[:, None], [(1, 2, 6)], (1, 3))
    assert np.array_equal(f64(merged[..., 0]), np.arange(12).reshape(4, 3))


def test_mean_over_frames_is_taken_in_wide_precision():
    frames = mx.array([256.0, 1.0, 1.0, 1.0]).astype(mx.bfloat16).reshape(4, 1, 1, 1)
    assert temporal_mean(frames).item() == mx.array(259 / 4).astype(mx.bfloat16).item()


# The whole tower


@given(grids_of_items)
@settings(max_examples=10, deadline=None)
def test_items_together_equal_each_alone(grids):
    tower = random_tower()
    items = [picture(*grid, seed=seed) for seed, grid in enumerate(grids)]
    together = tower(mx.concatenate(items), mx.array(grids))
    alone = [tower(item, mx.array([grid])) for item, grid in zip(items, grids, strict=True)]
    assert together.shape == (sum(h * w // 4 for _, h, w in grids), 4, CONFIG.vt_hidden_size)
    assert relative_rms(together, mx.concatenate(alone)) < 2e-6


def axes_swapped(h, w, head_dim):
    return rope_angles(h, w, head_dim).reshape(h * w, -1, 2)[..., ::-1].reshape(h * w, -1)


def test_a_transposed_picture_is_another_picture(monkeypatch):
    """The same only if table and rope axes are transposed too."""
    tower, across = random_tower(), mx.arange(12).reshape(2, 6).T.flatten()
    patches = picture(1, 2, 6)
    wide_picture = tower(patches, mx.array([[1, 2, 6]])).reshape(3, 2, 2, -1)
    transposed = tower(patches[across], mx.array([[1, 6, 2]])).reshape(3, 2, 2, -1).swapaxes(1, 2)
    assert relative_rms(transposed, wide_picture) > 1e-2
    tower.patch_embed.pos_emb.weight = tower.patch_embed.pos_emb.weight.swapaxes(0, 1)
    half_way = tower(patches[across], mx.array([[1, 6, 2]])).reshape(3, 2, 2, -1).swapaxes(1, 2)
    assert relative_rms(half_way, wide_picture) > 1e-3
    monkeypatch.setattr(vision_position, "rope_angles", axes_swapped)
    both = tower(patches[across], mx.array([[1, 6, 2]])).reshape(3, 2, 2, -1).swapaxes(1, 2)
    assert relative_rms(both, wide_picture) < 2e-6


def test_equal_frames_are_told_apart_by_time():
    tower, frame, recorder = random_tower(), picture(1, 4, 4), Recorder()
    name_modules(tower)
    with recording(recorder):
        tower(mx.concatenate([frame, frame]), mx.array([[2, 4, 4]]))
    output = recorder.values[BLOCKS[-1]]
    assert relative_rms(output[16:], output[:16]) > 1e-2


def test_two_pictures_give_different_features():
    tower = random_tower()
    one, two = (tower(picture(1, 4, 4, seed=seed), mx.array([[1, 4, 4]])) for seed in (0, 1))
    assert relative_rms(one, two) > 0.1


@pytest.mark.parametrize(
    "grids, words",
    [
        ([[1, 2, 2], [5, 2, 2]], ["item 1", "t in 1..4"]),
        ([[1, 514, 2]], ["item 0", "h in 1..512"]),
        ([[1, 2, 514]], ["item 0", "w in 1..512"]),
        ([[1, 2, 2], [1, 3, 2]], ["item 1", "h a multiple of 2"]),
        ([[1, 2, 5]], ["item 0", "w a multiple of 2"]),
        ([[0, 2, 2]], ["item 0", "t in 1..4"]),
        ([[1, 2, -2]], ["item 0", "w in 1..512"]),
        ([[1, 2, 4], [1, 2, 2], [1, 2, 2]], ["item 1", "12 patches", "8 in pixel_values"]),
        ([[1, 2, 2]], ["item 0", "4 patches", "8 in pixel_values"]),
        ([[1.0, 2.0, 4.0]], ["integers [N, 3]"]),
        ([[1, 8]], ["integers [N, 3]"]),
        (np.zeros((0, 3), np.int64), ["integers [N, 3]"]),
    ],
)
def test_bad_grids_are_refused_by_name(grids, words):
    with pytest.raises(InputError) as error:
        VisionTower(CONFIG)(mx.zeros((8, 3, 4, 4)), mx.array(grids))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("shape", [(8, 3, 4, 5), (8, 1, 4, 4), (8, 48)])
def test_bad_patches_are_refused(shape):
    with pytest.raises(InputError, match=r"pixel_values: shape: expected \[L, 3, 4, 4\]"):
        VisionTower(CONFIG)(mx.zeros(shape), mx.array([[1, 2, 4]]))
