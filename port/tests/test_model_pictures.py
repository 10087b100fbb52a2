"""Pictures within text: the whole port against the authors' code, over caches and padding, and what it refuses."""

import mlx.core as mx
import numpy as np
import pytest

from port.cache import new_cache
from port.model import K3Model
from port.tests.models import MINI, f64, mini_config, randn, random_model, relative_rms, same_bits
from port.tests.vision_models import INPUTS, golden
from port.weights import load_model
from reference.errors import InputError
from reference.taps import Recorder, recording

CONFIG = mini_config()
VOCAB, IMAGE, PAD = CONFIG.text_config.vocab_size, CONFIG.media_placeholder_token_id, CONFIG.pad_token_id
MM = {name.removeprefix("mm."): value for name, value in INPUTS.items() if name.startswith("mm.")}
IDS, MASK, PIXELS, GRIDS = (MM[name] for name in ("input_ids", "attention_mask", "pixel_values", "grid_thws"))
FINAL = ("merged_embeds", "attention_mask", "position_ids", "logits")


def traced(model, **inputs):
    with recording(Recorder()) as recorder:
        model(**inputs)
    return recorder.values


def where(x, flags):
    """The places of ``x`` where the 0/1 array ``flags`` is 1, in float64."""
    return f64(x)[np.array(flags) == 1]


@pytest.fixture(scope="module")
def model():
    """Random weights in float32."""
    return random_model(CONFIG)


def picture(*grid, seed=0):
    """(pixel_values, grid_thws) of one item."""
    t, h, w = grid
    return randn(t * h * w, 3, 4, 4, seed=seed), mx.array([grid])


# What the authors' code computed


def test_golden_multimodal_run():
    expected, found = golden("float32", "mm/"), traced(load_model(MINI), **MM)
    assert set(expected) == set(FINAL)
    real = expected["attention_mask"]
    assert found["attention_mask"].tolist() == real.tolist()
    assert found["position_ids"].tolist() == expected["position_ids"].tolist()
    for name, limit in (("merged_embeds", 5e-6), ("logits", 2e-4)):
        assert relative_rms(where(found[name], real), where(expected[name], real)) < limit, name


def test_golden_vision_run_and_its_taps():
    names = {"tower.output": "vision_tower.output", "projector.output": "mm_projector.output"}
    expected = {names.get(name, f"vision_tower.{name}"): value for name, value in golden("float32").items()}
    with recording(Recorder()) as recorder:
        features, counts = load_model(MINI).image_features(INPUTS["vision.pixel_values"], INPUTS["vision.grid_thws"])
    assert len(expected) == 6 and counts == [6, 16, 6, 6]
    for name, value in expected.items():
        assert relative_rms(recorder.values[name], value) < 5e-6, name
    assert features is recorder.values["mm_projector.output"] and len(features) == sum(counts)


def test_bfloat16_errs_like_the_authors():
    authors, truth = golden("bfloat16", "mm/"), golden("float32", "mm/")
    found, real = traced(load_model(MINI, "bfloat16"), **MM), truth["attention_mask"]
    for name in ("merged_embeds", "logits"):
        assert found[name].dtype == mx.bfloat16
        own = relative_rms(where(authors[name], real), where(truth[name], real))
        assert relative_rms(where(found[name], real), where(truth[name], real)) < 1.5 * own, name


# Caches and padding


def alone(model, row, more):
    """Logits of one row of the golden prompt, without padding, with ``more`` [n] ids after it."""
    ids, mask, sizes = np.array(IDS), np.array(MASK), np.array(GRIDS).prod(-1)
    before = int((ids[:row] == IMAGE).sum())
    items = slice(before, before + int((ids[row] == IMAGE).sum()))
    patches = slice(int(sizes[: items.start].sum()), int(sizes[: items.stop].sum()))
    prompt = mx.array(np.concatenate([ids[row][mask[row] == 1], more])[None])
    return f64(model(prompt, pixel_values=PIXELS[patches], grid_thws=GRIDS[items])[0])


def test_decoding_after_a_padded_prompt_equals_each_row_alone(model):
    more = np.array([[5, 6, 7], [8, 9, 10]])
    cache = new_cache(CONFIG.text_config, 2, "float32")
    prompt = traced(model, **MM, cache=cache)
    steps = mx.concatenate([model(mx.array(more[:, t : t + 1]), cache=cache) for t in range(3)], axis=1)
    assert cache.length == prompt["logits"].shape[1] + 3
    for row in range(2):
        found = [where(prompt["logits"][row], prompt["attention_mask"][row]), f64(steps[row])]
        assert relative_rms(np.concatenate(found), alone(model, row, more[row])) < 2e-5


def test_a_prompt_in_pieces_equals_one_pass(model):
    """The pictures of a piece come with it; the second row's padding is longer than the first piece."""
    ids = np.array([[1, 2, IMAGE, 3, IMAGE, 4], [PAD, PAD, PAD, 5, IMAGE, 6]])
    mask = (ids != PAD).astype(np.int64)
    items = [picture(1, 2, 4, seed=1), picture(1, 4, 2, seed=2), picture(2, 2, 2, seed=3)]

    def inputs(part, own):
        pixels, grids = (mx.concatenate([items[i][k] for i in own]) if own else None for k in (0, 1))
        text = {"input_ids": mx.array(ids[:, part]), "attention_mask": mx.array(mask[:, part])}
        return text | {"pixel_values": pixels, "grid_thws": grids}

    whole = traced(model, **inputs(slice(None), [0, 1, 2]))
    cache, rows = new_cache(CONFIG.text_config, 2, "float32"), [[], []]
    for part, own in ((slice(0, 2), []), (slice(2, 4), [0]), (slice(4, 6), [1, 2])):
        taps = traced(model, **inputs(part, own), cache=cache)
        real = taps.get("attention_mask", mx.array(mask[:, part]))
        for row in range(2):
            rows[row].append(where(taps["logits"][row], real[row]))
    for row in range(2):
        expected = where(whole["logits"][row], whole["attention_mask"][row])
        assert relative_rms(np.concatenate(rows[row]), expected) < 2e-5


def test_padding_on_the_right_gives_the_same_rows(model):
    """The released merge puts the features of such a row after its text."""
    ids, mask = np.array(IDS), np.array(MASK)
    rolled = np.stack([np.roll(row, flags.sum()) for row, flags in zip(ids, mask, strict=True)])
    flags = mx.array(mask[:, ::-1].copy())
    left = traced(model, **MM)
    right = traced(model, **MM | {"input_ids": mx.array(rolled), "attention_mask": flags})
    assert right["attention_mask"].tolist() == [row[::-1] for row in left["attention_mask"].tolist()]
    for row in range(2):
        rows = [where(taps["logits"][row], taps["attention_mask"][row]) for taps in (right, left)]
        assert relative_rms(*rows) < 2e-5


def test_without_a_mask_every_token_is_real(model):
    pictures = dict(zip(("pixel_values", "grid_thws"), picture(1, 2, 4), strict=True))
    ids = mx.array([[1, IMAGE, 2]])
    assert same_bits(model(ids, **pictures), model(ids, attention_mask=mx.ones((1, 3), mx.bool_), **pictures))


# Every feature once, in order


def test_fourteen_tokens_become_269(model):
    (pixels, grid), ids = picture(1, 32, 32), np.arange(14)[None]
    ids[0, 5] = IMAGE
    ids, cache = mx.array(ids), new_cache(CONFIG.text_config, 1, "float32")
    taps = traced(model, input_ids=ids, pixel_values=pixels, grid_thws=grid, cache=cache)
    assert taps["logits"].shape == (1, 269, VOCAB) and cache.length == 269
    merged, text, features = taps["merged_embeds"][0], model.language_model.model.embed(ids)[0], model.image_features
    assert same_bits(merged, mx.concatenate([text[:5], features(pixels, grid)[0], text[6:]]))


def test_pictures_and_their_order_matter(model):
    (one, grid), (other, _) = picture(1, 2, 2, seed=1), picture(1, 2, 2, seed=2)
    ids, grids = mx.array([[1, IMAGE, 2, IMAGE, 3]]), mx.concatenate([grid, grid])
    pairs = [(one, other), (other, one), (one, one)]
    logits = [model(ids, pixel_values=mx.concatenate(list(pair)), grid_thws=grids)[0, -1] for pair in pairs]
    assert all(relative_rms(logits[i], logits[j]) > 1e-3 for i, j in ((0, 1), (0, 2), (1, 2)))


def test_the_embeddings_of_placeholder_and_pad_are_never_read():
    model = random_model(CONFIG)
    before, embed_tokens = traced(model, **MM), model.language_model.model.embed_tokens
    spoiled = mx.array([id in (IMAGE, PAD) for id in range(VOCAB)])[:, None]
    embed_tokens.weight = mx.where(spoiled, mx.nan, embed_tokens.weight)
    after = traced(model, **MM)
    assert all(same_bits(after[name], before[name]) for name in FINAL)


def test_an_unloaded_tower_gives_nan():
    features, counts = K3Model(CONFIG).image_features(*picture(1, 2, 4))
    assert mx.all(mx.isnan(features)).item() and counts == [2]


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
        ({"input_ids": [[-1, IMAGE]], **PICTURE}, ["token id", "found -1"]),
        ({"input_ids": [[1, IMAGE, VOCAB]], **PICTURE}, ["token id", f"found {VOCAB}"]),
        ({"input_ids": [[VOCAB, IMAGE]], **PICTURE, "pixel_values": [0.0]}, ["token id"]),
    ],
)
def test_bad_input_is_one_line_that_names_it(model, inputs, words):
    with pytest.raises(InputError) as refusal:
        model(**{name: mx.array(value) for name, value in inputs.items()})
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert "\n" not in str(refusal.value)
