"""Pictures as files, in every colour mode, and the settings to read them with (K3.md §12)."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

RELEASED: dict[str, Any] = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 65536,
    "patch_limit_on_one_side": 512,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "fixed_output_tokens": None,
}
"""``media_proc_cfg`` as released."""
SMALL = {"in_patch_limit": 40}
"""So few patches that modest pictures are made smaller."""
OTHER = {"patch_size": 7, "merge_kernel_size": [1, 3], "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}


class Drawn(NamedTuple):
    """One picture: Pillow's mode, (width, height), what it shows, and what differs from the released settings."""

    mode: str
    size: tuple[int, int]
    motif: str
    settings: dict[str, Any] = {}


def background(pattern: str, stage: str = "before_resize") -> dict[str, Any]:
    """What shows through a transparent picture."""
    return {"transparent_bg_config": {"pattern": pattern}, "transparent_bg_fill_stage": stage}


PICTURES = {
    "rgb-noise": Drawn("RGB", (100, 100), "noise"),
    "rgb-smooth": Drawn("RGB", (611, 437), "smooth"),
    "rgb-smaller": Drawn("RGB", (219, 137), "noise", SMALL),
    "rgb-smaller-edges": Drawn("RGB", (150, 301), "edges", SMALL),
    "rgb-long": Drawn("RGB", (7301, 5), "noise"),
    "rgb-tall": Drawn("RGB", (13, 500), "edges"),
    "rgb-settings": Drawn("RGB", (45, 31), "smooth", OTHER),
    "one-pixel": Drawn("RGB", (1, 1), "noise"),
    "rgba-white": Drawn("RGBA", (28, 29), "smooth", background("white")),
    "rgba-gray": Drawn("RGBA", (61, 43), "noise", background("gray")),
    "rgba-board": Drawn("RGBA", (300, 200), "edges", background("chessboard") | SMALL),
    "rgba-board-late": Drawn("RGBA", (300, 200), "edges", background("chessboard", "after_resize") | SMALL),
    "grey-alpha-black": Drawn("LA", (50, 70), "smooth", background("black")),
    "grey": Drawn("L", (99, 57), "smooth", SMALL),
    "palette": Drawn("P", (100, 100), "edges", SMALL),
    "black-and-white": Drawn("1", (31, 33), "edges"),
    "grey-16-bit": Drawn("I;16", (64, 40), "smooth"),
    "cmyk": Drawn("CMYK", (40, 64), "smooth"),
}


def file_of(image: Image.Image) -> bytes:
    """A PNG, which loses nothing; a TIFF for CMYK, which PNG does not have."""
    buffer = io.BytesIO()
    if image.mode == "CMYK":
        image.save(buffer, "TIFF")
    else:
        image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def draw(drawn: Drawn) -> bytes:
    """The picture as a file; alpha runs from 0 to 255 and what lies under it is no shade of grey."""
    width, height = drawn.size
    channels = MOTIFS[drawn.motif](width, height)
    if drawn.mode == "I;16":
        return file_of(Image.fromarray(channels[..., 0].astype(np.uint16) * 257 + 13))
    image = Image.fromarray(channels).convert(drawn.mode)
    if drawn.mode in ("RGBA", "LA"):
        row, column = np.ogrid[:height, :width]
        image.putalpha(Image.fromarray(((11 * row + 7 * column) % 256).astype(np.uint8)))
    return file_of(image)


def noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width * 10_000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth(width: int, height: int) -> np.ndarray:
    """Gradients along both axes; the three channels differ."""
    row, column, channel = np.ogrid[:height, :width, :3]
    return ((2 * column + 3 * row * (channel + 1) + 70 * channel) % 230).astype(np.uint8)


def edges(width: int, height: int) -> np.ndarray:
    """Black, white and coloured stripes."""
    row, column, channel = np.ogrid[:height, :width, :3]
    return (255 * (((row + 2 * column) // 11 + (row * column // 301) * channel) % 2)).astype(np.uint8)


MOTIFS = {"noise": noise, "smooth": smooth, "edges": edges}
