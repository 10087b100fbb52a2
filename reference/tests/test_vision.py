import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from reference import vision_position
from reference.checkpoint import vision_rows
from reference.config import K3Config
from reference.errors import InputError
from reference.shards import Shards
from reference.taps import Recorder, name_modules, recording
from reference.tests.models import MINI, filled, randn, relative_rms
from reference.vision import VisionTower
from reference.vision_position import rope_angles, rope_turns
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


def axes_swapped(h, w, head_dim):
    return rope_angles(h, w, head_dim).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


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
