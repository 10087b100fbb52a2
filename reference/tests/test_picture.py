from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from reference import picture
from reference.errors import InputError
from reference.picture import Background, load_picture, open_picture
from reference.tests.vocabulary import raises_one_line


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def corner(image: Image.Image):
    return image.getpixel((0, 0))


def noise(mode: str, size: tuple[int, int] = (40, 30)) -> Image.Image:
    rgba = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = Image.fromarray(rgba)
    return image.convert("RGB").quantize(16) if mode == "P" else image.convert(mode)


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
