import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten

from port import vision_position
from port.tests.models import filled, randn, relative_rms
from port.tests.vision_models import CONFIG, INPUTS, golden, loaded, share_differing
from port.vision import VisionTower
from port.vision_position import rope_angles, rope_turns
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


def axes_swapped(h, w, head_dim):
    return rope_angles(h, w, head_dim).reshape(h * w, -1, 2)[..., ::-1].reshape(h * w, -1)


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
