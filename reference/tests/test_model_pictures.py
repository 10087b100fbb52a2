"""Pictures within text: the whole model against the authors' code, over caches and padding, and what it refuses."""

import pytest
import torch
from safetensors.torch import load_file

from reference.cache import new_cache
from reference.errors import InputError
from reference.model import K3Model
from reference.taps import Recorder, recording
from reference.tests.models import MINI, mini_config, randn, random_model, relative_rms
from reference.weights import load_model

INPUTS = load_file(MINI / "inputs.safetensors")
CONFIG = mini_config()
VOCAB, IMAGE, PAD = CONFIG.text_config.vocab_size, CONFIG.media_placeholder_token_id, CONFIG.pad_token_id
MM = {name.removeprefix("mm."): value for name, value in INPUTS.items() if name.startswith("mm.")}
IDS, MASK, PIXELS, GRIDS = (MM[name] for name in ("input_ids", "attention_mask", "pixel_values", "grid_thws"))
FINAL = ("merged_embeds", "attention_mask", "position_ids", "logits")


def golden(dtype, run):
    trace = load_file(MINI / f"trace-{dtype}.safetensors")
    return {name.removeprefix(f"{run}/"): value for name, value in trace.items() if name.startswith(f"{run}/")}


def traced(model, **inputs):
    with recording(Recorder()) as recorder:
        model(**inputs)
    return recorder.values


@pytest.fixture(scope="module")
def model():
    """Random weights in float64."""
    return random_model(CONFIG)


def picture(*grid, seed=0):
    """(pixel_values, grid_thws) of one item."""
    t, h, w = grid
    return randn(t * h * w, 3, 4, 4, seed=seed), torch.tensor([grid])


# What the authors' code computed


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_golden_multimodal_run(dtype):
    expected, found = golden("float32", "mm"), traced(load_model(MINI, dtype), **MM)
    assert set(expected) == set(FINAL)
    real = expected["attention_mask"] == 1
    assert torch.equal(found["attention_mask"], expected["attention_mask"])
    assert torch.equal(found["position_ids"], expected["position_ids"])
    assert relative_rms(found["merged_embeds"][real], expected["merged_embeds"][real]) < 5e-6
    assert relative_rms(found["logits"][real], expected["logits"][real]) < 2e-4


def test_golden_vision_run_and_its_taps():
    names = {"tower.output": "vision_tower.output", "projector.output": "mm_projector.output"}
    expected = {names.get(name, f"vision_tower.{name}"): value for name, value in golden("float32", "vision").items()}
    with recording(Recorder()) as recorder:
        features, counts = load_model(MINI).image_features(INPUTS["vision.pixel_values"], INPUTS["vision.grid_thws"])
    assert len(expected) == 6 and counts == [6, 16, 6, 6]
    for name, value in expected.items():
        assert relative_rms(recorder.values[name], value) < 5e-6, name
    assert features is recorder.values["mm_projector.output"] and len(features) == sum(counts)


def test_bfloat16_errs_like_the_authors():
    authors, truth, found = (
        golden("bfloat16", "mm"),
        golden("float32", "mm"),
        traced(load_model(MINI, "bfloat16"), **MM),
    )
    real = truth["attention_mask"] == 1
    for name in ("merged_embeds", "logits"):
        assert found[name].dtype == torch.bfloat16
        own = relative_rms(authors[name][real], truth[name][real])
        assert relative_rms(found[name][real], truth[name][real]) < 1.5 * own, name


def test_bfloat16_equals_the_authors_on_their_own_embeddings():
    authors = golden("bfloat16", "mm")
    logits = load_model(MINI, "bfloat16")(
        inputs_embeds=authors["merged_embeds"], attention_mask=authors["attention_mask"]
    )
    real = authors["attention_mask"] == 1
    assert relative_rms(logits[real], authors["logits"][real]) < 2e-2


# Caches and padding


def alone(model, row, more):
    """Logits of one row of the golden prompt, without padding, with ``more`` [n] ids after it."""
    before = int((IDS[:row] == IMAGE).sum())
    items = slice(before, before + int((IDS[row] == IMAGE).sum()))
    sizes = GRIDS.prod(-1).tolist()
    ids = torch.cat([IDS[row][MASK[row] == 1], more])[None]
    return model(ids, pixel_values=torch.cat(PIXELS.split(sizes)[items]), grid_thws=GRIDS[items])[0]


def test_decoding_after_a_padded_prompt_equals_each_row_alone(model):
    more = torch.tensor([[5, 6, 7], [8, 9, 10]])
    cache = new_cache(CONFIG.text_config, 2, "float64")
    prompt = traced(model, **MM, cache=cache)
    steps = torch.cat([model(step, cache=cache) for step in more.split(1, dim=1)], dim=1)
    assert cache.length == prompt["logits"].shape[1] + 3
    for row in range(2):
        expected, real = alone(model, row, more[row]), prompt["attention_mask"][row] == 1
        torch.testing.assert_close(torch.cat([prompt["logits"][row][real], steps[row]]), expected)


def test_a_prompt_in_pieces_equals_one_pass(model):
    """The pictures of a piece come with it; the second row's padding is longer than the first piece."""
    ids = torch.tensor([[1, 2, IMAGE, 3, IMAGE, 4], [PAD, PAD, PAD, 5, IMAGE, 6]])
    mask = (ids != PAD).long()
    items = [picture(1, 2, 4, seed=1), picture(1, 4, 2, seed=2), picture(2, 2, 2, seed=3)]
    pixels, grids = torch.cat([item[0] for item in items]), torch.cat([item[1] for item in items])
    whole = traced(model, input_ids=ids, attention_mask=mask, pixel_values=pixels, grid_thws=grids)
    cache, rows = new_cache(CONFIG.text_config, 2, "float64"), [[], []]
    for part, own in ((slice(0, 2), []), (slice(2, 4), [0]), (slice(4, 6), [1, 2])):
        pictures = {"pixel_values": torch.cat([items[i][0] for i in own]), "grid_thws": grids[own]} if own else {}
        taps = traced(model, input_ids=ids[:, part], attention_mask=mask[:, part], cache=cache, **pictures)
        real = taps.get("attention_mask", mask[:, part]) == 1
        for row in range(2):
            rows[row].append(taps["logits"][row][real[row]])
    for row in range(2):
        torch.testing.assert_close(torch.cat(rows[row]), whole["logits"][row][whole["attention_mask"][row] == 1])


def test_padding_on_the_right_gives_the_same_rows(model):
    """The released merge puts the features of such a row after its text."""
    rolled = [torch.roll(x, int(mask.sum()), 0) for x, mask in zip(IDS, MASK, strict=True)]
    right = {"input_ids": torch.stack(rolled), "attention_mask": MASK.flip(1)}
    left, right = traced(model, **MM), traced(model, **MM | right)
    assert right["attention_mask"].tolist() == left["attention_mask"].flip(1).tolist()
    for row in range(2):
        rows = [taps["logits"][row][taps["attention_mask"][row] == 1] for taps in (left, right)]
        torch.testing.assert_close(*rows)


def test_without_a_mask_every_token_is_real(model):
    pictures = dict(zip(("pixel_values", "grid_thws"), picture(1, 2, 4), strict=True))
    ids = torch.tensor([[1, IMAGE, 2]])
    assert torch.equal(model(ids, **pictures), model(ids, attention_mask=torch.ones(1, 3).bool(), **pictures))


# Every feature once, in order


def test_fourteen_tokens_become_269(model):
    ids, (pixels, grid) = torch.arange(14)[None].clone(), picture(1, 32, 32)
    ids[0, 5] = IMAGE
    cache = new_cache(CONFIG.text_config, 1, "float64")
    taps = traced(model, input_ids=ids, pixel_values=pixels, grid_thws=grid, cache=cache)
    assert taps["logits"].shape == (1, 269, VOCAB) and cache.length == 269
    merged, text, features = taps["merged_embeds"][0], model.language_model.model.embed(ids)[0], model.image_features
    assert torch.equal(merged, torch.cat([text[:5], features(pixels, grid)[0], text[6:]]))


def test_pictures_and_their_order_matter(model):
    (one, grid), (other, _) = picture(1, 2, 2, seed=1), picture(1, 2, 2, seed=2)
    ids, grids = torch.tensor([[1, IMAGE, 2, IMAGE, 3]]), torch.cat([grid, grid])
    pairs = [(one, other), (other, one), (one, one)]
    logits = [model(ids, pixel_values=torch.cat(pair), grid_thws=grids)[0, -1] for pair in pairs]
    assert all(relative_rms(logits[i], logits[j]) > 1e-3 for i, j in ((0, 1), (0, 2), (1, 2)))


def test_the_embeddings_of_placeholder_and_pad_are_never_read():
    model = random_model(CONFIG)
    before = traced(model, **MM)
    model.language_model.model.embed_tokens.weight[[IMAGE, PAD]] = torch.nan
    after = traced(model, **MM)
    assert all(torch.equal(after[name], before[name]) for name in FINAL)


def test_an_unloaded_tower_gives_nan():
    features, counts = K3Model(CONFIG).image_features(*picture(1, 2, 4))
    assert features.isnan().all() and counts == [2]


# What is refused


PICTURE = dict(zip(("pixel_values", "grid_thws"), picture(1, 2, 4), strict=True))


@pytest.mark.parametrize(
    "inputs, words",
    [
        ({"input_ids": [[1, 2]], **PICTURE}, ["media placeholders", "found 0"]),
        ({"input_ids": [[1, IMAGE], [2, IMAGE]], **PICTURE}, ["media placeholders", "found 2"]),
        (
            {"input_ids": [[1, IMAGE]], "pixel_values": PICTURE["pixel_values"]},
            ["both or neither", "pixel_values alone"],
        ),
        ({"input_ids": [[1, 2]], "grid_thws": PICTURE["grid_thws"]}, ["both or neither", "grid_thws alone"]),
        (PICTURE, ["input_ids and no inputs_embeds"]),
        ({"input_ids": [[IMAGE]], "inputs_embeds": [[[0.0] * 80]], **PICTURE}, ["input_ids and no inputs_embeds"]),
        ({"input_ids": [[1, IMAGE]], "attention_mask": [[2, 1]], **PICTURE}, ["attention_mask", "zeros and ones"]),
        ({"input_ids": [[1, IMAGE]], "attention_mask": [[1]], **PICTURE}, ["attention_mask", "[1, 2]"]),
        ({"input_ids": [[1, IMAGE]], **PICTURE, "grid_thws": [[1, 2, 2]]}, ["grid_thws", "4 patches"]),
        ({"input_ids": [[-1, IMAGE]], **PICTURE}, ["token id", "-1 at [0, 0]"]),
        ({"input_ids": [[1, IMAGE, VOCAB]], **PICTURE}, ["token id", f"{VOCAB} at [0, 2]"]),
        ({"input_ids": [[VOCAB, IMAGE]], **PICTURE, "pixel_values": [0.0]}, ["token id"]),
    ],
)
def test_bad_input_is_one_line_that_names_it(model, inputs, words):
    with pytest.raises(InputError) as refusal:
        model(**{name: torch.as_tensor(value) for name, value in inputs.items()})
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert "\n" not in str(refusal.value)
