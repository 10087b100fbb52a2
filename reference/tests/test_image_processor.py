from __future__ import annotations

import json
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from reference.image_processor import (
    RELEASED,
    ImageProcessor,
    MediaConfig,
    normalize,
    patch_grid,
    patches,
    prompt,
    resize_scale,
    resized_size,
    token_count,
)
from reference.tests.vocabulary import raises_one_line, small_tokenizer

PROCESSOR = ImageProcessor()
RELEASED_SECTION = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 65536,
    "patch_limit_on_one_side": 512,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "fixed_output_tokens": None,
}
KNOWN_COUNTS = {
    (611, 437): 352,
    (224, 224): 64,
    (448, 448): 256,
    (1920, 1080): 2691,
    (1024, 768): 1036,
    (4000, 3000): 15444,
    (1, 1): 1,
    (28, 29): 2,
    (20000, 14): 256,
    (13, 500): 18,
}


def noise(mode: str, size: tuple[int, int] = (40, 30)) -> Image.Image:
    rgba = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = Image.fromarray(rgba)
    return image.convert("RGB").quantize(16) if mode == "P" else image.convert(mode)


def with_settings(**changes) -> ImageProcessor:
    return ImageProcessor(MediaConfig.from_dict({**RELEASED_SECTION, **changes}))


# sizes


@pytest.mark.parametrize(("size", "count"), KNOWN_COUNTS.items())
def test_known_token_counts(size, count):
    plan = PROCESSOR.resize_plan(*size)
    assert plan.token_count == count == token_count(*size, RELEASED)
    assert plan.grid == PROCESSOR.grid(*size) == (1, plan.padded[1] // 14, plan.padded[0] // 14)


def test_the_scale_obeys_each_of_its_four_limits():
    assert resize_scale(300, 200, RELEASED) == 1
    assert resize_scale(8000, 7000, RELEASED) == sqrt(65536 / (571 * 500))
    assert resize_scale(20000, 14, RELEASED) == 512 * 14 / 20000
    assert resize_scale(3, 14336, RELEASED) == 0.5
    assert resized_size(8000, 7000, RELEASED) == (3832, 3353)
    assert resized_size(3, 14336, RELEASED) == (1, 7168)


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_every_plan_is_legal(width, height):
    plan = PROCESSOR.resize_plan(width, height)
    _, rows, columns = plan.grid
    assert rows % 2 == columns % 2 == 0 and 2 <= rows <= 512 and 2 <= columns <= 512
    assert plan.token_count == rows * columns // 4
    for side, resized, padded in zip((width, height), plan.resized, plan.padded, strict=True):
        assert 1 <= resized <= min(side, 7168)
        assert 0 <= padded - resized < 28 and padded % 28 == 0
    assert PROCESSOR.grid(height, width) == (1, columns, rows)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5), (5.0, 5), (True, 5), ("5", 5), (None, 5)])
def test_a_size_that_is_none_is_refused(size):
    with raises_one_line("a positive number of pixels"):
        PROCESSOR.resize_plan(*size)


# values


@pytest.mark.parametrize(("colour", "value"), [("white", 1.0), ("black", -1.0)])
def test_white_is_one_and_black_is_minus_one(colour, value):
    values = PROCESSOR.pixel_values(Image.new("RGB", (56, 28), colour))
    assert values.dtype == np.float32 and values.shape == (8, 3, 14, 14)
    assert (values == value).all()


def test_mid_grey_is_the_step_above_zero():
    np.testing.assert_allclose(PROCESSOR.pixel_values(Image.new("L", (28, 28), 128)), 128 / 127.5 - 1, atol=1e-7)


def test_channels_are_red_green_blue_and_have_their_own_mean_and_deviation():
    config = MediaConfig.from_dict({**RELEASED_SECTION, "image_mean": [0.0, 0.5, 1.0], "image_std": [1.0, 0.5, 0.25]})
    values = normalize(np.array([[[51, 102, 204]]], np.uint8), config)
    np.testing.assert_allclose(values[0, 0], [0.2, -0.2, -0.8], rtol=1e-6)


def test_padding_is_right_and_below_and_minus_one():
    values = PROCESSOR.pixel_values(Image.new("RGB", (30, 15), "white"))
    assert values.shape == (2 * 4, 3, 14, 14)
    whole = values.reshape(2, 4, 3, 14, 14).transpose(2, 0, 3, 1, 4).reshape(3, 28, 56)
    assert (whole[:, :15, :30] == 1).all()
    assert (whole[:, 15:] == -1).all() and (whole[:, :, 30:] == -1).all()


def test_padding_is_zero_before_normalising_not_after():
    values = with_settings(image_mean=[0.25, 0.25, 0.25], image_std=[0.5, 0.5, 0.5]).pixel_values(
        Image.new("RGB", (1, 1))
    )
    assert (values == -0.5).all()


def test_patches_are_row_major_over_the_grid_and_keep_their_pixels():
    pixels = np.arange(4 * 6 * 3).reshape(4, 6, 3)
    cut = patches(pixels, 2)
    assert cut.shape == (6, 3, 2, 2)
    for row in range(2):
        for column in range(3):
            expected = pixels[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].transpose(2, 0, 1)
            np.testing.assert_array_equal(cut[3 * row + column], expected)


def test_a_picture_that_fits_is_not_resampled_and_a_large_one_is_bicubic():
    small = noise("RGB", (56, 28))
    np.testing.assert_array_equal(PROCESSOR.pixels(small), np.asarray(small))
    limited = with_settings(in_patch_limit=2)
    plan = limited.resize_plan(56, 28)
    assert plan.resized == (28, 14) and plan.padded == (28, 28)
    expected = np.asarray(small.resize((28, 14), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(limited.pixels(small)[:14], expected)


def test_a_batch_is_its_pictures_one_after_the_other():
    images = [noise("RGB", (30, 60)), noise("L", (28, 28)), noise("RGBA", (1, 1))]
    batch = PROCESSOR.batch(images)
    np.testing.assert_array_equal(batch.pixel_values, np.concatenate([PROCESSOR.pixel_values(i) for i in images]))
    assert batch.grid_thws.tolist() == [[1, 6, 4], [1, 2, 2], [1, 2, 2]] and batch.grid_thws.dtype == np.int64
    assert batch.prompts == [PROCESSOR.prompt(*image.size) for image in images]
    empty = PROCESSOR.batch([])
    assert empty.pixel_values.shape == (0, 3, 14, 14) and empty.grid_thws.shape == (0, 3) and empty.prompts == []


# the prompt


def test_the_prompt_states_the_original_size():
    assert prompt(20000, 14) == "<|media_begin|>image 20000x14<|media_content|><|media_pad|><|media_end|>"
    assert PROCESSOR.batch([Image.new("L", (7200, 1))]).prompts == [prompt(7200, 1)]


def test_the_prompt_as_ids():
    tokenizer = small_tokenizer()
    begin, content, pad, end = (tokenizer.id_of(f"<|media_{name}|>") for name in ("begin", "content", "pad", "end"))
    ids = tokenizer.encode_segments([(prompt(448, 336), True)])
    assert ids == [begin, *tokenizer.encode("image 448x336"), content, pad, end]


# transparency


@pytest.mark.parametrize("hidden", [(0, 0, 0), (255, 0, 9)])
def test_a_fully_transparent_picture_is_white_whatever_lies_under_it(hidden):
    assert (PROCESSOR.pixel_values(Image.new("RGBA", (28, 28), (*hidden, 0))) == 1).all()


@pytest.mark.parametrize(
    ("pattern", "corners"),
    [
        ({"pattern": "white"}, (255, 255)),
        ({"pattern": "gray"}, (128, 128)),
        ({"pattern": "black"}, (0, 0)),
        ({"pattern": "chessboard"}, (255, 255)),
        ({"pattern": "chessboard", "chessboard_square_size": 1}, (255, 200)),
        ({"pattern": "chessboard", "chessboard_square_size": 1, "chessboard_square_on_top_left": False}, (200, 255)),
        ({"pattern": "chessboard", "chessboard_square_size": 1, "chessboard_gray_value": 7}, (255, 7)),
    ],
)
def test_the_configured_background_shows_through(pattern, corners):
    processor = with_settings(transparent_bg_config=pattern)
    pixels = processor.pixels(Image.new("RGBA", (28, 28), (0, 0, 0, 0)))
    assert (pixels[0, 0, 0], pixels[0, 1, 0]) == corners and pixels[1, 1, 0] == pixels[0, 0, 0]
    assert pixels[0, 16, 0] == (200 if pattern == {"pattern": "chessboard"} else corners[0])


def test_the_background_may_be_laid_after_resizing():
    chess = {"pattern": "chessboard", "chessboard_square_size": 1, "chessboard_white_value": 250}
    image = Image.new("RGBA", (56, 56), (0, 0, 0, 0))
    late = with_settings(transparent_bg_config=chess, in_patch_limit=4, transparent_bg_fill_stage="after_resize")
    early = with_settings(transparent_bg_config=chess, in_patch_limit=4)
    assert set(np.unique(late.pixels(image))) == {200, 250}
    assert 200 < early.pixels(image).mean() < 250 and 250 not in early.pixels(image)[8:20, 8:20]


# settings


def test_a_folder_without_settings_has_the_released_ones(tmp_path):
    assert ImageProcessor.from_folder(tmp_path).config == RELEASED
    assert MediaConfig.from_dict(RELEASED_SECTION) == RELEASED


def test_settings_are_read_from_the_folder(tmp_path):
    section = {**RELEASED_SECTION, "patch_size": 4, "merge_kernel_size": [2, 3], "unused": 1}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": section}))
    processor = ImageProcessor.from_folder(tmp_path)
    assert processor.resize_plan(13, 9).padded == (24, 16)
    assert processor.pixel_values(Image.new("L", (13, 9))).shape == (24, 3, 4, 4)
    assert patch_grid(13, 9, processor.config) == (1, 4, 6) and token_count(13, 9, processor.config) == 4


@pytest.mark.parametrize(
    ("document", "fragment"),
    [
        ("{", "content"),
        ("[]", "media_proc_cfg"),
        ("{}", "media_proc_cfg"),
        ('{"media_proc_cfg": null}', "media_proc_cfg: expected a JSON object"),
    ],
)
def test_unreadable_settings_are_refused(tmp_path, document, fragment):
    (tmp_path / "preprocessor_config.json").write_text(document)
    with raises_one_line("preprocessor_config.json", fragment):
        ImageProcessor.from_folder(tmp_path)


@pytest.mark.parametrize("field", [name for name in RELEASED_SECTION if name != "fixed_output_tokens"])
def test_a_missing_setting_is_named(field):
    with raises_one_line(f"{field}: expected the field, found nothing"):
        MediaConfig.from_dict({name: value for name, value in RELEASED_SECTION.items() if name != field})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("patch_size", 0),
        ("patch_size", "14"),
        ("merge_kernel_size", 0),
        ("merge_kernel_size", [2, 2, 2]),
        ("merge_kernel_size", None),
        ("in_patch_limit", -1),
        ("image_mean", [0.5, 0.5]),
        ("image_mean", 0.5),
        ("image_std", [0.5, 0.0, 0.5]),
        ("fixed_output_tokens", 256),
        ("transparent_bg_config", "white"),
        ("transparent_bg_config", {}),
        ("transparent_bg_config", {"pattern": "pink"}),
        ("transparent_bg_config", {"pattern": "chessboard", "chessboard_square_size": 0}),
        ("transparent_bg_config", {"pattern": "white", "colour": 1}),
        ("transparent_bg_fill_stage", "never"),
    ],
)
def test_an_illegal_setting_is_named(field, value):
    with raises_one_line("media_proc_cfg", field):
        with_settings(**{field: value})
