"""Pictures from outside: any source and any colour mode becomes 8-bit RGB (K3.md §12). No tensor library.

What §12 leaves open is decided here, once, for the reference and the port:

- Transparency is composited onto a background, white unless ``transparent_bg_config`` names another. Dropping the
  alpha channel instead would show whatever colour lies under it, usually black.
- 16-bit samples keep their upper byte; Pillow's own conversion would clip everything from 256 on to white.
- A picture is read as it is stored: EXIF orientation is not applied, and of an animation the first frame counts.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import warnings
from pathlib import Path
from typing import Literal
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from reference.errors import InputError

PIXEL_LIMIT = 89_478_485
"""Largest width·height that is decoded: where Pillow by default warns of a decompression bomb, this refuses."""

DIRECT_MODES = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")
ALPHA_MODES = {"LA": "LA", "La": "LA", "PA": "PA", "RGBA": "RGBA", "RGBa": "RGBA"}
SOURCES = "a path, bytes, a data URI, a Pillow image or a numpy array"


class Background(BaseModel):
    """``transparent_bg_config``: what shows through a transparent picture. A chessboard has squares of two greys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    pattern: Literal["white", "gray", "black", "chessboard"]
    chessboard_square_size: int = Field(default=16, ge=1)
    chessboard_square_on_top_left: bool = True
    chessboard_white_value: int = Field(default=255, ge=0, le=255)
    chessboard_gray_value: int = Field(default=200, ge=0, le=255)

    def pixels(self, width: int, height: int) -> np.ndarray:
        """The background as uint8 [height, width, 1]."""
        if self.pattern != "chessboard":
            return np.full((height, width, 1), {"white": 255, "gray": 128, "black": 0}[self.pattern], np.uint8)
        row, column = np.ogrid[:height, :width]
        square = self.chessboard_square_size
        grey = (row // square + column // square) % 2 == (1 if self.chessboard_square_on_top_left else 0)
        return np.where(grey, self.chessboard_gray_value, self.chessboard_white_value).astype(np.uint8)[..., None]


WHITE = Background(pattern="white")


def load_picture(source: object, background: Background = WHITE) -> Image.Image:
    """Read ``source`` as an RGB picture, transparency composited onto ``background``.

    ``source`` is a path, encoded bytes, a ``data:`` URI, a Pillow image, or a uint8 or uint16 array [H, W],
    [H, W, 1], [H, W, 3] or [H, W, 4]. Raises InputError for anything else, for a picture that is empty, damaged or
    larger than PIXEL_LIMIT, and for colour modes without a plain conversion (floats, LAB).
    """
    return composite(open_picture(source), background)


def open_picture(source: object) -> Image.Image:
    """Read ``source`` (see ``load_picture``) as RGB, or as RGBA if it carries transparency."""
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, Image.Image):
        return _to_8_bit(_decoded(source, "picture"), "picture")
    if isinstance(source, str) and source.startswith("data:"):
        source, where = _data_uri(source), "data URI"
    elif isinstance(source, (str, os.PathLike)):
        source, where = _file_bytes(source), str(source)
    elif isinstance(source, (bytes, bytearray, memoryview)):
        source, where = bytes(source), "picture"
    else:
        raise InputError("picture", "source", SOURCES, type(source).__name__, "load the picture first")
    return _to_8_bit(_decoded(_from_bytes(source, where), where), where)


def composite(image: Image.Image, background: Background) -> Image.Image:
    """``alpha·colour + (1 − alpha)·background`` in float32, cut off to 8 bits; an RGB picture is left as it is."""
    if image.mode == "RGB":
        return image
    pixels = np.asarray(image)
    alpha = pixels[..., 3:].astype(np.float32) / 255
    mixed = alpha * pixels[..., :3] + (1 - alpha) * background.pixels(*image.size)
    return Image.fromarray(mixed.astype(np.uint8))


def _file_bytes(path: str | os.PathLike) -> bytes:
    if str(path).startswith(("http://", "https://")):
        raise InputError(path, "picture", SOURCES, "an address", "fetch it first; nothing is downloaded here")
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        raise InputError(path, "picture", "a readable file", found, "check the path") from None


def _data_uri(uri: str) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma:
        raise InputError("data URI", "form", "data:[type][;base64],data", f"{uri[:40]!r}", "add the comma and the data")
    if not header.lower().endswith(";base64"):
        return unquote_to_bytes(payload)
    try:
        return base64.b64decode(unquote_to_bytes(payload), validate=True)
    except binascii.Error as error:
        raise InputError("data URI", "data", "base64", error, "encode the picture again") from None


def _from_bytes(data: bytes, where: str) -> Image.Image:
    if not data:
        raise InputError(where, "picture", "an encoded picture", "0 bytes", "fetch the file again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(data))
    except Image.DecompressionBombError:
        raise _too_large(where, "more") from None
    except Image.UnidentifiedImageError:
        mend = "give a PNG, JPEG, WebP, GIF, BMP or TIFF file"
        raise InputError(where, "picture", "a known picture format", f"{len(data)} other bytes", mend) from None
    except Exception as error:  # a decoder may raise anything on damaged bytes
        raise _damaged(where, error) from None


def _decoded(image: Image.Image, where: str) -> Image.Image:
    """The picture with its pixels in memory, after its size has been checked."""
    width, height = image.size
    if width * height == 0:
        raise InputError(where, "size", "at least 1x1 pixels", f"{width}x{height}", "leave the empty picture out")
    if width * height > PIXEL_LIMIT:
        raise _too_large(where, f"{width}x{height}")
    try:
        image.load()
    except Exception as error:  # a decoder may raise anything on damaged bytes
        raise _damaged(where, error) from None
    return image


def _too_large(where: str, found: str) -> InputError:
    return InputError(where, "size", f"at most {PIXEL_LIMIT} pixels", found, "shrink the picture first")


def _damaged(where: str, error: Exception) -> InputError:
    return InputError(where, "picture", "a whole picture", f"{type(error).__name__}: {error}", "fetch the file again")


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype not in (np.uint8, np.uint16):
        mend = "scale it to 0..255 (or 0..65535) and cast it"
        raise InputError("picture array", "dtype", "uint8 or uint16", array.dtype, mend)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        mend = "transpose or convert it"
        raise InputError("picture array", "shape", "[H, W], [H, W, 1], [H, W, 3] or [H, W, 4]", list(array.shape), mend)
    if array.size == 0:
        raise InputError("picture array", "size", "at least 1x1 pixels", list(array.shape), "leave the picture out")
    if array.dtype == np.uint16:
        array = upper_byte(array)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    return _to_8_bit(Image.fromarray(np.ascontiguousarray(array)), "picture array")


def upper_byte(samples: np.ndarray) -> np.ndarray:
    """16-bit samples as uint8: 0 stays 0 and 65535 becomes 255."""
    return (samples >> 8).astype(np.uint8)


def _to_8_bit(image: Image.Image, where: str) -> Image.Image:
    """A decoded picture as RGB, or as RGBA if it has an alpha channel or a transparent colour."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_16_bit(image, where)
    if image.mode in ALPHA_MODES:
        return image.convert(ALPHA_MODES[image.mode]).convert("RGBA")
    if image.mode in DIRECT_MODES:
        return image.convert("RGBA" if "transparency" in image.info else "RGB")
    mend = "convert it to RGB first"
    raise InputError(where, "colour mode", "grey, RGB, palette, CMYK, YCbCr or HSV", image.mode, mend)


def _from_16_bit(image: Image.Image, where: str) -> Image.Image:
    """Modes I;16 and I, the latter being Pillow's 32-bit home for 16-bit files."""
    samples = np.asarray(image).astype(np.int64)
    if samples.min() < 0 or samples.max() > 65535:
        found = f"{samples.min()}..{samples.max()}"
        raise InputError(where, "samples of mode I", "16-bit values 0..65535", found, "scale the picture first")
    grey = Image.fromarray(upper_byte(samples))
    transparent = image.info.get("transparency")
    if transparent is None:
        return grey.convert("RGB")
    alpha = np.where(samples == transparent, 0, 255).astype(np.uint8)
    return Image.merge("RGBA", (grey, grey, grey, Image.fromarray(alpha)))
