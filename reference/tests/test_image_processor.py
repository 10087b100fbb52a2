from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from reference import picture
from reference.errors import InputError
from reference.image_processor import (
    RELEASED,
    ImageProcessor,
    MediaConfig,
    load_picture,
    normalize,
    patch_grid,
    patches,
    prompt,
    resize_scale,
    resized_size,
    token_count,
)
from reference.picture import Background, open_picture
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


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def noise(mode: str, size: tuple[int, int] = (40, 30)) -> Image.Image:
    rgba = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = Image.fromarray(rgba)
    return image.convert("RGB").quantize(16) if mode == "P" else image.convert(mode)


def with_settings(**changes) -> ImageProcessor:
    return ImageProcessor(MediaConfig.from_dict({**RELEASED_SECTION, **changes}))


def corner(image: Image.Image):
    return image.getpixel((0, 0))


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


# colour modes


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_modes_without_transparency_are_converted_as_pillow_does(mode):
    image = noise(mode)
    loaded = load_picture(image)
    assert loaded.mode == "RGB" and loaded.size == image.size
    np.testing.assert_array_equal(np.asarray(loaded), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
def test_modes_with_transparency_are_laid_on_the_background(mode):
    image = Image.new(mode, (2, 1))
    assert corner(load_picture(image)) == (255, 255, 255)
    assert corner(load_picture(image, Background(pattern="black"))) == (0, 0, 0)


@pytest.mark.parametrize("hidden", [(0, 0, 0), (255, 0, 9)])
def test_a_fully_transparent_picture_is_white_whatever_lies_under_it(hidden):
    assert (PROCESSOR.pixel_values(Image.new("RGBA", (28, 28), (*hidden, 0))) == 1).all()


def test_half_transparency_is_a_weighted_mean():
    image = Image.new("RGBA", (1, 1), (200, 100, 0, 51))
    assert corner(load_picture(image)) == (244, 224, 204)
    assert corner(load_picture(image, Background(pattern="gray"))) == (142, 122, 102)


def test_an_opaque_picture_with_an_alpha_channel_is_itself():
    image = noise("RGB")
    np.testing.assert_array_equal(np.asarray(load_picture(image.convert("RGBA"))), np.asarray(image))


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "1"])
def test_a_transparent_colour_is_laid_on_the_background(mode):
    image = Image.new("RGB", (4, 4), (0, 0, 0))
    image.putpixel((0, 0), (255, 255, 255))
    image = image.quantize(2) if mode == "P" else image.convert(mode)
    key = image.getpixel((1, 1))
    read = Image.open(io.BytesIO(encoded(image, transparency=key)))
    assert read.mode == mode and "transparency" in read.info
    loaded = load_picture(read, Background(pattern="gray"))
    assert loaded.getpixel((1, 1)) == (128, 128, 128) and corner(loaded) == (255, 255, 255)


SIXTEEN = np.array([[0, 255, 256, 32768, 65535]], np.uint16)


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "array"])
def test_16_bit_samples_keep_their_upper_byte(mode):
    source = {
        "I;16": Image.fromarray(SIXTEEN),
        "I;16B": Image.frombytes("I;16B", (5, 1), SIXTEEN.astype(">u2").tobytes()),
        "I": Image.fromarray(SIXTEEN.astype(np.int32)),
        "array": SIXTEEN,
    }[mode]
    assert np.asarray(load_picture(source))[0].tolist() == [[v] * 3 for v in (0, 0, 1, 128, 255)]


def test_a_16_bit_file_keeps_its_contrast_and_its_transparent_colour():
    data = encoded(Image.fromarray(SIXTEEN))
    assert np.asarray(load_picture(data))[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    keyed = Image.open(io.BytesIO(data))
    keyed.info["transparency"] = 32768
    assert np.asarray(load_picture(keyed))[0, :, 0].tolist() == [0, 0, 1, 255, 255]


def test_wide_integers_that_are_no_16_bit_samples_are_refused():
    for values in ([[70000]], [[-1]]):
        with raises_one_line("16-bit values 0..65535"):
            load_picture(Image.fromarray(np.array(values, np.int32)))


@pytest.mark.parametrize("mode", ["F", "LAB"])
def test_modes_without_a_plain_conversion_are_refused(mode):
    with raises_one_line("colour mode", f"found {mode}"):
        load_picture(Image.new(mode, (2, 2)))


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


def test_orientation_tags_do_not_turn_the_picture():
    image = Image.new("RGB", (30, 10))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert load_picture(encoded(image, "JPEG", exif=exif)).size == (30, 10)


def test_the_first_frame_of_an_animation_counts():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert corner(load_picture(data)) == (255, 0, 0)


# sources


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "WEBP", "GIF"])
def test_every_source_gives_the_same_picture(tmp_path, format):
    image = noise("P").convert("RGB").quantize(16).convert("RGB")
    data = encoded(image, format, **({"lossless": True} if format == "WEBP" else {}))
    path = tmp_path / "picture"
    path.write_bytes(data)
    uri = f"data:image/x;base64,{base64.b64encode(data).decode()}"
    escaped_uri = "data:," + "".join(f"%{byte:02x}" for byte in data)
    array = np.asarray(image)
    sources = [
        path,
        str(path),
        data,
        bytearray(data),
        memoryview(data),
        uri,
        escaped_uri,
        image,
        array,
        array[::-1][::-1],
    ]
    for source in sources:
        np.testing.assert_array_equal(np.asarray(load_picture(source)), array)


def test_arrays_of_every_legal_shape():
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    for array in (grey, grey[..., None], np.stack([grey] * 3, -1)):
        np.testing.assert_array_equal(np.asarray(load_picture(array))[..., 0], grey)
    transparent = np.zeros((3, 4, 4), np.uint16)
    assert (np.asarray(load_picture(transparent)) == 255).all()
    assert open_picture(transparent).mode == "RGBA"


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.int8, bool])
def test_arrays_of_other_dtypes_are_refused(dtype):
    with raises_one_line("dtype", "uint8 or uint16", np.dtype(dtype).name):
        load_picture(np.zeros((4, 4, 3), dtype))


@pytest.mark.parametrize("shape", [(), (4,), (4, 4, 2), (4, 4, 5), (3, 4, 4, 3), (3, 4, 4 * 3)])
def test_arrays_of_other_shapes_are_refused(shape):
    with raises_one_line("picture array: shape"):
        load_picture(np.zeros(shape, np.uint8))


@pytest.mark.parametrize(
    "source",
    [np.zeros((0, 4), np.uint8), np.zeros((4, 0, 3), np.uint8), Image.new("RGB", (0, 4)), Image.new("L", (4, 0))],
)
def test_a_picture_without_pixels_is_refused(source):
    with raises_one_line("size: expected at least 1x1 pixels"):
        load_picture(source)


@pytest.mark.parametrize("source", [None, 5, [1, 2], io.BytesIO(b""), {"url": "x"}])
def test_other_sources_are_refused(source):
    with raises_one_line("source: expected a path, bytes, a data URI"):
        load_picture(source)


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"not a picture" * 100, b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"%PDF-1.4"]
)
def test_bytes_that_are_no_picture_are_refused(data):
    with raises_one_line("picture"):
        load_picture(data)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_a_truncated_picture_is_refused(format):
    data = encoded(noise("RGB", (64, 64)), format)
    with raises_one_line("picture"):
        load_picture(data[: len(data) // 2])


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_damaged_bytes_are_read_or_refused_but_never_crash(place, damage):
    data = bytearray(encoded(noise("RGB", (16, 16))))
    place %= len(data)
    data[place : place + len(damage)] = damage
    try:
        assert load_picture(bytes(data)).mode == "RGB"
    except InputError as error:
        assert "\n" not in str(error)


def png_that_claims(width: int, height: int) -> bytes:
    """A 1-pixel PNG whose header gives another size."""
    data = encoded(Image.new("L", (1, 1)))
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


@pytest.mark.parametrize("side", [9_460, 12_000, 20_000, 1_000_000])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side):
    with raises_one_line("size: expected at most 89478485 pixels"):
        load_picture(png_that_claims(side, side))


def test_the_limit_holds_without_pillows_own(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(picture, "PIXEL_LIMIT", 99)
    assert load_picture(encoded(Image.new("L", (11, 9)))).size == (11, 9)
    with raises_one_line("10x10"):
        load_picture(encoded(Image.new("L", (10, 10))))


@pytest.mark.parametrize(
    ("source", "fragment"),
    [
        ("/nowhere/at/all.png", "/nowhere/at/all.png"),
        ("a\0b", "null"),
        ("x" * 5000, "too long"),
        (".", "."),
        ("http://example.org/a.png", "nothing is downloaded"),
        ("data:image/png;base64", "add the comma"),
        ("data:image/png;base64,@@@@", "base64"),
        ("data:image/png;base64,", "0 bytes"),
        ("data:,hello", "a known picture format"),
    ],
)
def test_bad_paths_and_uris_are_refused(source, fragment):
    with raises_one_line(fragment):
        load_picture(source)


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
