import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional

from reference import vision, vision_position
from reference.checkpoint import vision_rows
from reference.config import K3Config
from reference.errors import InputError
from reference.shards import Shards
from reference.taps import Recorder, name_modules, recording
from reference.tests.models import MINI, filled, randn, relative_rms
from reference.vision import (
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
from reference.vision_position import (
    apply_rope,
    position_embedding,
    resized_positions,
    rope_angles,
    rope_turns,
    time_embedding,
)
from reference.weights import to_torch

CONFIG = K3Config.from_file(MINI).vision_config
INPUTS = load_file(MINI / "inputs.safetensors")
PATCHES, GRIDS = INPUTS["vision.pixel_values"], INPUTS["vision.grid_thws"]
BLOCKS = [f"encoder.blocks.{block}.output" for block in range(CONFIG.vt_num_hidden_layers)]
grids_of_items = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([2, 4, 6, 8]), st.sampled_from([2, 4, 6, 8])), min_size=1, max_size=3
)


def golden(dtype):
    trace = load_file(MINI / f"trace-{dtype}.safetensors")
    return {name.removeprefix("vision/"): value for name, value in trace.items() if name.startswith("vision/")}


def mini_tower(dtype):
    """The committed checkpoint's tower, its modules named for taps."""
    shards, tower = Shards(MINI), VisionTower(CONFIG)
    state = {name: to_torch(shards.read("vision_tower." + name)).to(dtype) for name in tower.state_dict()}
    tower.load_state_dict(state, strict=True, assign=True)
    name_modules(tower)
    return tower.requires_grad_(False).eval()


def random_tower(dtype=torch.float64):
    return filled(VisionTower(CONFIG), dtype)


def traced(tower):
    recorder = Recorder()
    with recording(recorder):
        tower(PATCHES, GRIDS)
    return {"tower.output": recorder.values.pop("output"), **recorder.values}


def picture(t, h, w, seed=0):
    return randn(t * h * w, 3, CONFIG.patch_size, CONFIG.patch_size, seed=seed)


# What the authors' code computed


def test_float32_equals_the_golden_trace_chained():
    trace, taps = golden("float32"), traced(mini_tower(torch.float32))
    for name in ["patch_embed.output", *BLOCKS, "tower.output"]:
        assert relative_rms(taps[name], trace[name]) < 1e-6, name


def test_float64_is_what_both_golden_traces_round():
    truth = traced(mini_tower(torch.float64))
    assert truth["tower.output"].dtype == torch.float64
    for dtype, limit in (("float32", 1e-6), ("bfloat16", 1e-2)):
        trace = golden(dtype)
        for name in ["patch_embed.output", *BLOCKS, "tower.output"]:
            assert relative_rms(trace[name], truth[name]) < limit, name


def test_bfloat16_rounds_where_the_authors_round():
    """Each module with the trace's own input: ties apart, every value is the same."""
    trace, tower = golden("bfloat16"), mini_tower(torch.bfloat16)
    grids = [tuple(grid) for grid in GRIDS.tolist()]
    turns = rope_turns(grids, CONFIG.head_dim, torch.float32)
    outputs = {"patch_embed.output": tower.patch_embed(PATCHES, grids)}
    for index, (block, name) in enumerate(zip(tower.encoder.blocks, BLOCKS, strict=True)):
        source = trace[BLOCKS[index - 1]] if index else trace["patch_embed.output"]
        outputs[name] = block(source, grids, turns)
    outputs["tower.output"] = tower.finish(trace[BLOCKS[-1]], grids)
    for name, output in outputs.items():
        assert output.dtype == torch.bfloat16
        assert (output != trace[name]).float().mean() < 5e-3, name


def test_bfloat16_chained_errs_like_the_authors():
    trace, truth, taps = golden("bfloat16"), traced(mini_tower(torch.float64)), traced(mini_tower(torch.bfloat16))
    for name in ["patch_embed.output", *BLOCKS, "tower.output"]:
        assert relative_rms(taps[name], truth[name]) < 1.2 * relative_rms(trace[name], truth[name]), name


# Parameters and taps


def test_parameters_have_the_checkpoints_names_and_shapes():
    prefix = "vision_tower."
    expected = {name[len(prefix) :]: shape for name, shape, _ in vision_rows(CONFIG) if name.startswith(prefix)}
    assert {name: tuple(tensor.shape) for name, tensor in VisionTower(CONFIG).state_dict().items()} == expected


def test_a_tower_that_was_never_loaded_gives_nan():
    assert VisionTower(CONFIG)(PATCHES, GRIDS).isnan().all()


def test_every_tensor_counts():
    tower = random_tower()
    before = tower(PATCHES.double(), GRIDS)
    for name, parameter in tower.named_parameters():
        saved = parameter.data.clone()
        parameter.data = saved + 0.1 * randn(*saved.shape, seed=7)
        assert relative_rms(tower(PATCHES.double(), GRIDS), before) > 1e-5, name
        parameter.data = saved


def test_taps_carry_paths_below_the_tower():
    names = {f"encoder.blocks.{block}.{what}" for block in range(3) for what in ("attention", "output")}
    taps = traced(mini_tower(torch.float32))
    assert set(taps) == {"patch_embed.output", "tower.output", *names}
    assert taps["encoder.blocks.0.attention"].shape == (len(PATCHES), CONFIG.qkv_hidden_size)


# Norm and activation


@pytest.mark.parametrize("mean_square, factor", [(1e-3, 2.97), (1e-2, 1.335)])
def test_epsilon_is_float32s_not_bfloat16s(mean_square, factor):
    x, weight = torch.full((1, 16), mean_square**0.5, dtype=torch.float64), torch.ones(16, dtype=torch.float64)
    ratio = norm_rounded_once(x, weight, VISION_NORM_EPS) / norm_rounded_once(x, weight, 2.0**-7)
    assert ratio[0, 0].item() == pytest.approx(factor, abs=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-4])
def test_norm_is_the_installed_torchs_norm_without_eps(dtype, scale):
    x, weight = (scale * randn(64, 32)).to(dtype), randn(32, seed=1).to(dtype)
    expected = functional.rms_norm(x, (32,), weight)
    assert relative_rms(norm_rounded_once(x, weight, VISION_NORM_EPS), expected) < (1e-6 if scale == 1 else 1e-4)
    if dtype == torch.bfloat16:
        assert (norm_rounded_once(x, weight, VISION_NORM_EPS) != expected).float().mean() < 5e-3


def test_every_norm_of_the_tower_uses_that_epsilon():
    norms = [module for module in VisionTower(CONFIG).modules() if isinstance(module, VisionNorm)]
    assert len(norms) == 2 * CONFIG.vt_num_hidden_layers + 1
    assert {norm.eps for norm in norms} == {VISION_NORM_EPS}


def test_gelu_is_the_tanh_form():
    x = torch.tensor([-2.7, 0.0, 1.0], dtype=torch.float64)
    assert gelu_tanh(x)[0].item() == pytest.approx(-0.0089, abs=5e-5)
    expected = x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(gelu_tanh(x), expected, rtol=1e-14, atol=1e-14)


# Patches and positions


def test_patch_embedding_is_a_convolution():
    patches, weight = randn(5, 3, 4, 4), randn(8, 3, 4, 4, seed=1)
    expected = functional.conv2d(patches, weight, stride=4).flatten(1)
    torch.testing.assert_close(patch_embedding(patches, weight), expected)


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


# Attention and merge


def test_attention_of_one_item_written_out():
    q, k, v = (randn(6, 2, 4, seed=seed) for seed in range(3))
    expected = torch.zeros(6, 2, 4, dtype=torch.float64)
    for head in range(2):
        for row in range(6):
            weights = torch.softmax(k[:, head] @ q[row, head] / 2, dim=0)
            expected[row, head] = weights @ v[:, head]
    torch.testing.assert_close(attention(q, k, v, [(1, 2, 3)]), expected.flatten(1))


def test_attention_stays_within_an_item():
    q, k, v = (randn(20, 2, 4, seed=seed) for seed in range(3))
    before = attention(q, k, v, [(1, 2, 4), (3, 2, 2)])
    q[8:], k[8:], v[8:] = torch.nan, torch.nan, torch.nan
    assert torch.equal(attention(q, k, v, [(1, 2, 4), (3, 2, 2)])[:8], before[:8])


def test_attention_sees_all_frames_of_a_video():
    q, k, v = (randn(8, 1, 4, seed=seed) for seed in range(3))
    before = attention(q, k, v, [(2, 2, 2)])
    v[-1] += 1
    assert (attention(q, k, v, [(2, 2, 2)]) != before).any(-1).all()


def test_scoring_in_pieces_changes_nothing(monkeypatch):
    q, k, v = (randn(24, 2, 4, seed=seed) for seed in range(3))
    whole = attention(q, k, v, [(1, 4, 6)])
    monkeypatch.setattr(vision, "QUERY_ROWS", 5)
    torch.testing.assert_close(attention(q, k, v, [(1, 4, 6)]), whole)


def test_merge_takes_windows_row_by_row_and_means_frames():
    patches = torch.arange(2 * 4 * 4, dtype=torch.float64)[:, None]
    merged = merge_patches(patches, [(2, 4, 4)], (2, 2))
    first = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]], dtype=torch.float64)
    assert torch.equal(merged[..., 0], first + 8)


def test_merge_window_need_not_be_square():
    merged = merge_patches(torch.arange(12.0)[:, None], [(1, 2, 6)], (1, 3))
    assert torch.equal(merged[..., 0], torch.arange(12.0).view(4, 3))


def test_mean_over_frames_is_taken_in_wide_precision():
    frames = torch.tensor([256.0, 1.0, 1.0, 1.0]).bfloat16().view(4, 1, 1, 1)
    assert temporal_mean(frames).item() == torch.tensor(259 / 4).bfloat16().item()


# The whole tower


@given(grids_of_items)
@settings(max_examples=10, deadline=None)
def test_items_together_equal_each_alone(grids):
    tower = random_tower()
    items = [picture(*grid, seed=seed) for seed, grid in enumerate(grids)]
    together = tower(torch.cat(items), torch.tensor(grids))
    alone = [tower(item, torch.tensor([grid])) for item, grid in zip(items, grids, strict=True)]
    assert together.shape == (sum(h * w // 4 for _, h, w in grids), 4, CONFIG.vt_hidden_size)
    torch.testing.assert_close(together, torch.cat(alone))


def axes_swapped(h, w, head_dim):
    return rope_angles(h, w, head_dim).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def test_a_transposed_picture_is_another_picture(monkeypatch):
    """The same only if table and rope axes are transposed too."""
    tower = random_tower()
    patches, across = picture(1, 2, 6), torch.arange(12).view(2, 6).T.flatten()
    wide_picture = tower(patches, torch.tensor([[1, 2, 6]])).view(3, 2, 2, -1)
    transposed = tower(patches[across], torch.tensor([[1, 6, 2]])).view(3, 2, 2, -1).transpose(1, 2)
    assert relative_rms(transposed, wide_picture) > 1e-2
    tower.patch_embed.pos_emb.weight.data = tower.patch_embed.pos_emb.weight.transpose(0, 1)
    half_way = tower(patches[across], torch.tensor([[1, 6, 2]])).view(3, 2, 2, -1).transpose(1, 2)
    assert relative_rms(half_way, wide_picture) > 1e-3
    monkeypatch.setattr(vision_position, "rope_angles", axes_swapped)
    both = tower(patches[across], torch.tensor([[1, 6, 2]])).view(3, 2, 2, -1).transpose(1, 2)
    torch.testing.assert_close(both, wide_picture)


def test_equal_frames_are_told_apart_by_time():
    tower = random_tower()
    name_modules(tower)
    frame, recorder = picture(1, 4, 4), Recorder()
    with recording(recorder):
        tower(torch.cat([frame, frame]), torch.tensor([[2, 4, 4]]))
    output = recorder.values[BLOCKS[-1]]
    assert relative_rms(output[16:], output[:16]) > 1e-2


def test_two_pictures_give_different_features():
    tower = random_tower()
    one, two = (tower(picture(1, 4, 4, seed=seed), torch.tensor([[1, 4, 4]])) for seed in (0, 1))
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
        (torch.zeros(0, 3, dtype=torch.int64), ["integers [N, 3]"]),
    ],
)
def test_bad_grids_are_refused_by_name(grids, words):
    with pytest.raises(InputError) as error:
        VisionTower(CONFIG)(torch.zeros(8, 3, 4, 4), torch.as_tensor(grids))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("shape", [(8, 3, 4, 5), (8, 1, 4, 4), (8, 48)])
def test_bad_patches_are_refused(shape):
    with pytest.raises(InputError, match=r"pixel_values: shape: expected \[L, 3, 4, 4\]"):
        VisionTower(CONFIG)(torch.zeros(shape), torch.tensor([[1, 2, 4]]))
