import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from port.merge import merge, pads_right, position_ids
from port.projector import Projector
from port.tests.models import MINI, relative_rms
from port.tests.vision_models import CONFIG, INPUTS, golden, loaded
from port.vision import VisionTower
from port.weights import to_mlx
from reference.config import K3Config
from reference.errors import InputError
from reference.shards import Shards

IMG, PAD = 90, 91
RIGHT = ([[1, IMG, 2, PAD], [3, 4, IMG, 5]], [[1, 1, 1, 0], [1, 1, 1, 1]])
LEFT = ([[PAD, 1, IMG, 2], [3, 4, IMG, 5]], [[0, 1, 1, 1], [1, 1, 1, 1]])


def embedded(ids):
    """[B, T] -> [B, T, 2]: the id, and a 1 that padding does not have."""
    return mx.stack([ids.astype(mx.float32), mx.ones(ids.shape)], axis=-1)


def rows_of(count):
    """Feature rows 1000, 1001, …, with a 1 like every real row."""
    return mx.stack([1000.0 + mx.arange(count), mx.ones(count)], axis=-1)


def merged(ids, mask, counts):
    ids, mask = mx.array(ids), mx.array(mask)
    return merge(ids, mask, rows_of(sum(counts)), counts, embedded(ids), IMG, PAD)


def expected_rows(ids, mask, counts):
    """The merge, written token by token: per row (values, mask); padding and pad ids are 0."""
    feature, left = 1000, iter(counts)
    rows = []
    for row, flags in zip(ids, mask, strict=True):
        values, flagged = [], []
        for token, flag in zip(row, flags, strict=True):
            if token == IMG:
                count = next(left)
                values += range(feature, feature + count)
                flagged += [1] * count
                feature += count
            else:
                values.append(0 if token == PAD else token)
                flagged.append(int(flag))
        rows.append((values, flagged))
    length = max(len(values) for values, _ in rows)
    right = any(row[-1] == PAD for row in ids)

    def filled(row):
        padding = [0] * (length - len(row))
        return row + padding if right else padding + row

    return [filled(values) for values, _ in rows], [filled(flags) for _, flags in rows]


def test_right_padded_rows_keep_their_order():
    embeds, mask, positions = merged(*RIGHT, [3, 5])
    assert embeds[0, :, 0].tolist() == [1, 1000, 1001, 1002, 2, 0, 0, 0]
    assert embeds[1, :, 0].tolist() == [3, 4, 1003, 1004, 1005, 1006, 1007, 5]
    assert embeds[0, :, 1].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert mask.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8]
    assert positions.tolist() == [[0, 1, 2, 3, 4, 1, 1, 1], list(range(8))]


def test_left_padded_rows_keep_their_order():
    embeds, mask, positions = merged(*LEFT, [3, 5])
    assert embeds[0, :, 0].tolist() == [0, 0, 0, 1, 1000, 1001, 1002, 2]
    assert embeds[1, :, 0].tolist() == [3, 4, 1003, 1004, 1005, 1006, 1007, 5]
    assert mask.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8]
    assert positions.tolist() == [[1, 1, 1, 0, 1, 2, 3, 4], list(range(8))]


def test_fourteen_ids_with_256_features_become_269():
    ids = [[*range(1, 8), IMG, *range(8, 14)]]
    embeds, mask, positions = merged(ids, [[1] * 14], [256])
    assert embeds.shape == (1, 269, 2)
    assert embeds[0, :, 0].tolist() == [*range(1, 8), *range(1000, 1256), *range(8, 14)]
    assert mask.sum() == 269 and positions[0].tolist() == list(range(269))


def test_two_images_of_different_size_in_one_row():
    embeds, _, _ = merged([[IMG, 1, IMG, 2]], [[1] * 4], [2, 3])
    assert embeds[0, :, 0].tolist() == [1000, 1001, 1, 1002, 1003, 1004, 2]


def test_items_are_consumed_row_by_row():
    embeds, _, _ = merged([[IMG, 1, IMG], [2, IMG, 3]], [[1] * 3] * 2, [1, 2, 1])
    assert embeds[..., 0].tolist() == [[1000, 1, 1001, 1002], [0, 2, 1003, 3]]


def test_text_only_is_unchanged():
    ids = mx.array([[1, 2, 3]])
    embeds, mask, positions = merge(ids, mx.ones((1, 3)), mx.zeros((0, 2)), [], embedded(ids), IMG, PAD)
    assert mx.array_equal(embeds, embedded(ids)) and mask.tolist() == [[1, 1, 1]] and positions.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("poison", [mx.nan, 1e30])
def test_whatever_stands_at_pads_and_placeholders_is_not_used(poison):
    ids = mx.array([[PAD, 1, PAD, IMG, 2], [3, 4, IMG, 5, 6]])
    embeds = embedded(ids)
    clean = merge(ids, ids != PAD, rows_of(4), [1, 3], embeds, IMG, PAD)[0]
    embeds = mx.where(((ids == PAD) | (ids == IMG))[..., None], poison, embeds)
    assert mx.array_equal(merge(ids, ids != PAD, rows_of(4), [1, 3], embeds, IMG, PAD)[0], clean)
    assert clean[0, :, 0].tolist() == [0, 0, 0, 1, 0, 1000, 2]


def test_mask_may_be_bool_and_features_take_the_texts_dtype():
    ids = mx.array([[1, IMG]])
    embeds, mask, positions = merge(ids, ids > 0, rows_of(2), [2], embedded(ids).astype(mx.bfloat16), IMG, PAD)
    assert embeds.dtype == mx.bfloat16 and mask.dtype == positions.dtype == mx.int32
    assert mx.array_equal(embeds[0, 1:], rows_of(2).astype(mx.bfloat16))


def test_side_of_the_padding():
    assert pads_right(np.array([[1, 2], [1, PAD]]), PAD)
    assert not pads_right(np.array([[PAD, 2], [1, 2]]), PAD)


def test_position_ids_count_real_tokens():
    mask = mx.array([[0, 0, 1, 1, 0, 1]])
    assert position_ids(mask).tolist() == [[1, 1, 0, 1, 1, 2]]


tokens = st.sampled_from([1, 2, 3, IMG, PAD])


@given(st.integers(1, 3), st.integers(1, 6), st.data())
@settings(max_examples=60, deadline=None)
def test_every_feature_once_and_in_order(batch, length, data):
    ids = data.draw(st.lists(st.lists(tokens, min_size=length, max_size=length), min_size=batch, max_size=batch))
    mask = [[int(token != PAD) for token in row] for row in ids]
    items = sum(row.count(IMG) for row in ids)
    counts = data.draw(st.lists(st.integers(1, 4), min_size=items, max_size=items))
    embeds, flags, positions = merged(ids, mask, counts)
    values, expected = expected_rows(ids, mask, counts)
    assert embeds[..., 0].tolist() == values and flags.tolist() == expected
    assert embeds[..., 1].tolist() == [[float(value > 0) for value in row] for row in values]
    assert mx.array_equal(positions, position_ids(flags))


@pytest.mark.parametrize(
    "ids, counts, rows, words",
    [
        ([[1, IMG]], [3], 2, "features: rows: expected 3 rows"),
        ([[1, IMG]], [3], 4, "features: rows: expected 3 rows"),
        ([[1, IMG]], [2, 1], 3, "media placeholders"),
        ([[IMG, IMG]], [3], 3, "media placeholders"),
        ([[1, 2]], [3], 3, "media placeholders"),
        ([[1, IMG]], [], 0, "media placeholders"),
        ([[IMG, IMG]], [3, 0], 3, "item 1: expected at least one feature row"),
    ],
)
def test_counts_that_do_not_match_are_refused(ids, counts, rows, words):
    ids = mx.array(ids)
    with pytest.raises(InputError, match=words):
        merge(ids, mx.ones_like(ids), rows_of(rows), counts, embedded(ids), IMG, PAD)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"input_ids": mx.array([1, IMG])}, "input_ids: shape"),
        ({"input_ids": mx.zeros((1, 0), mx.int32)}, "input_ids: shape"),
        ({"attention_mask": mx.ones((1, 3))}, "attention_mask: mask"),
        ({"attention_mask": mx.array([[1, 2]])}, "attention_mask: mask"),
        ({"text_embeds": mx.zeros((1, 3, 2))}, "text_embeds: shape"),
        ({"features": mx.zeros((2, 3))}, "features: shape"),
    ],
)
def test_shapes_that_do_not_match_are_refused(change, words):
    ids = mx.array([[1, IMG]])
    arguments = {
        "input_ids": ids,
        "attention_mask": mx.ones_like(ids),
        "features": rows_of(2),
        "text_embeds": embedded(ids),
    }
    with pytest.raises(InputError, match=words):
        merge(**{**arguments, **change}, feature_counts=[2], placeholder_id=IMG, pad_id=PAD)


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_equals_the_golden_multimodal_run(dtype, limit):
    config, trace = K3Config.from_file(MINI), golden(dtype, "mm/")
    tower = loaded(VisionTower(CONFIG), "vision_tower.", dtype)
    features = loaded(Projector(CONFIG), "mm_projector.", dtype)(
        tower(INPUTS["mm.pixel_values"], INPUTS["mm.grid_thws"])
    )
    table = to_mlx(Shards(MINI).read("language_model.model.embed_tokens.weight")).astype(getattr(mx, dtype))
    ids, counts = INPUTS["mm.input_ids"], [h * w // 4 for _, h, w in INPUTS["mm.grid_thws"].tolist()]
    embeds, mask, positions = merge(
        ids,
        INPUTS["mm.attention_mask"],
        features,
        counts,
        table[ids],
        config.media_placeholder_token_id,
        config.pad_token_id,
    )
    assert embeds.dtype == getattr(mx, dtype)
    assert relative_rms(embeds, trace["merged_embeds"]) < limit
    assert mx.array_equal(mask, trace["attention_mask"]) and mx.array_equal(positions, trace["position_ids"])
