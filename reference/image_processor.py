"""From a picture to patches, grid and prompt text (K3.md §12). numpy and Pillow only; the port shares this file.

Every quantity that §12 names is one function of the picture's width and height in pixels and of the settings.
"""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from reference.config import Count, Positive, read_json
from reference.errors import InputError
from reference.picture import WHITE, Background, composite, load_picture, open_picture

__all__ = ["ImageProcessor", "MediaConfig", "ResizePlan", "load_picture", "prompt"]

FILE, SECTION = "preprocessor_config.json", "media_proc_cfg"
Channels = Annotated[tuple[float, float, float], Field(strict=False)]
Deviations = Annotated[tuple[Positive, Positive, Positive], Field(strict=False)]
Window = Annotated[
    tuple[Count, Count],
    Field(strict=False),
    BeforeValidator(lambda size: (size, size) if isinstance(size, int) else size),
]


class MediaConfig(BaseModel):
    """``media_proc_cfg`` of ``preprocessor_config.json`` (K3.md §12).

    ``merge_kernel_size`` is one number or (rows, columns) in the file, and (rows, columns) of patches here.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    patch_size: Count
    merge_kernel_size: Window
    in_patch_limit: Count
    patch_limit_on_one_side: Count
    image_mean: Channels
    image_std: Deviations
    fixed_output_tokens: None = None
    transparent_bg_config: Background | None = None
    transparent_bg_fill_stage: Literal["before_resize", "after_resize"] = "before_resize"

    @property
    def longest_side(self) -> int:
        """Pixels."""
        return self.patch_limit_on_one_side * self.patch_size

    @classmethod
    def from_dict(cls, data: Any, source: object = SECTION) -> MediaConfig:
        """Validate a ``media_proc_cfg`` section; raises InputError naming ``source`` and the field."""
        if not isinstance(data, dict):
            raise InputError(source, SECTION, "a JSON object", type(data).__name__, "give the released section")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            if first["type"] == "missing":
                raise InputError(source, field, "the field", "nothing", "add it; there is no default") from None
            expected = first["msg"].removeprefix("Input should be ")
            raise InputError(source, field, expected, repr(first["input"]), "give the released value") from None

    @classmethod
    def from_folder(cls, folder: str | Path) -> MediaConfig:
        """The settings of a checkpoint folder, or RELEASED if it has no ``preprocessor_config.json``."""
        path = Path(folder, FILE)
        if not path.exists():
            return RELEASED
        document = read_json(path)
        if not isinstance(document, dict) or SECTION not in document:
            raise InputError(path, SECTION, "the section", "nothing", "add it; there is no default")
        return cls.from_dict(document[SECTION], path)


RELEASED = MediaConfig(
    patch_size=14,
    merge_kernel_size=(2, 2),
    in_patch_limit=65536,
    patch_limit_on_one_side=512,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
)


def resize_scale(width: int, height: int, config: MediaConfig) -> float:
    """``min(1, sqrt(in_patch_limit / (max(1, w//14)·max(1, h//14))), 512·14/w, 512·14/h)``."""
    patches = max(1, width // config.patch_size) * max(1, height // config.patch_size)
    return min(1.0, sqrt(config.in_patch_limit / patches), config.longest_side / width, config.longest_side / height)


def resized_size(width: int, height: int, config: MediaConfig) -> tuple[int, int]:
    """``max(1, int(side·scale))``, capped at 512·14: (width, height) in pixels before padding."""
    scale = resize_scale(width, height, config)
    return tuple(min(max(1, int(side * scale)), config.longest_side) for side in (width, height))


def padded_size(width: int, height: int, config: MediaConfig) -> tuple[int, int]:
    """The resized (width, height) rounded up to whole merge windows, 28 pixels in the release."""
    rows, columns = (count * config.patch_size for count in config.merge_kernel_size)
    resized_width, resized_height = resized_size(width, height, config)
    return -(-resized_width // columns) * columns, -(-resized_height // rows) * rows


def patch_grid(width: int, height: int, config: MediaConfig) -> tuple[int, int, int]:
    """(1, h, w) in patches."""
    padded_width, padded_height = padded_size(width, height, config)
    return 1, padded_height // config.patch_size, padded_width // config.patch_size


def token_count(width: int, height: int, config: MediaConfig) -> int:
    """Feature rows that the vision tower will give for the picture: (h/28)·(w/28)."""
    _, rows, columns = patch_grid(width, height, config)
    window_rows, window_columns = config.merge_kernel_size
    return (rows // window_rows) * (columns // window_columns)


def prompt(width: int, height: int) -> str:
    """The markup that stands for one picture, with its original size in pixels."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


def resize(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Bicubic, as Pillow does it; a picture that has the size already stays as it is."""
    return image.resize(size, Image.Resampling.BICUBIC)


def normalize(pixels: np.ndarray, config: MediaConfig) -> np.ndarray:
    """uint8 [h, w, 3] -> float32 ``(x/255 − mean) / std``."""
    mean, std = (np.array(values, np.float32) for values in (config.image_mean, config.image_std))
    return (pixels.astype(np.float32) / np.float32(255) - mean) / std


def patches(pixels: np.ndarray, patch_size: int) -> np.ndarray:
    """[h, w, 3] -> [h/p·w/p, 3, p, p], row-major over the grid of patches."""
    height, width, channels = pixels.shape
    tiles = pixels.reshape(height // patch_size, patch_size, width // patch_size, patch_size, channels)
    return np.ascontiguousarray(tiles.transpose(0, 2, 4, 1, 3)).reshape(-1, channels, patch_size, patch_size)


class ResizePlan(NamedTuple):
    """What becomes of a picture, told from its size alone; sizes are (width, height) in pixels."""

    scale: float
    resized: tuple[int, int]
    padded: tuple[int, int]
    grid: tuple[int, int, int]
    token_count: int


class PictureBatch(NamedTuple):
    """``pixel_values`` float32 [L, 3, p, p] of all pictures in turn, ``grid_thws`` int64 [N, 3], and their prompts."""

    pixel_values: np.ndarray
    grid_thws: np.ndarray
    prompts: list[str]


class ImageProcessor:
    """The image processor of one checkpoint (K3.md §12). Every ``source`` is whatever ``load_picture`` takes."""

    def __init__(self, config: MediaConfig = RELEASED) -> None:
        self.config = config

    @classmethod
    def from_folder(cls, folder: str | Path) -> ImageProcessor:
        """With the folder's ``preprocessor_config.json`` if there is one, else with the released settings."""
        return cls(MediaConfig.from_folder(folder))

    def resize_plan(self, width: int, height: int) -> ResizePlan:
        """All derived sizes of a ``width`` x ``height`` picture; raises InputError if one is no positive integer."""
        for name, side in (("width", width), ("height", height)):
            if not isinstance(side, (int, np.integer)) or isinstance(side, bool) or side < 1:
                raise InputError("picture", name, "a positive number of pixels", side, "give the picture's own size")
        size = int(width), int(height), self.config
        return ResizePlan(
            resize_scale(*size), resized_size(*size), padded_size(*size), patch_grid(*size), token_count(*size)
        )

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """(1, h, w) in patches for a picture of this size."""
        return self.resize_plan(width, height).grid

    def prompt(self, width: int, height: int) -> str:
        """The markup text of a picture whose original size is ``width`` x ``height`` pixels."""
        return prompt(width, height)

    def pixels(self, source: object) -> np.ndarray:
        """The resized and padded picture, uint8 [h, w, 3]; the padding, right and below, is 0."""
        return self._pixels(open_picture(source))

    def pixel_values(self, source: object) -> np.ndarray:
        """The picture's patches, float32 [h/p·w/p, 3, p, p]: white is 1, black and padding are −1 in the release."""
        return self._pixel_values(open_picture(source))

    def batch(self, sources: list[object]) -> PictureBatch:
        """Patches, grids and prompts of several pictures, in their order; none at all is legal."""
        p = self.config.patch_size
        opened = [open_picture(source) for source in sources]
        values = [np.empty((0, 3, p, p), np.float32), *map(self._pixel_values, opened)]
        grids = np.array([self.grid(*image.size) for image in opened], np.int64).reshape(-1, 3)
        return PictureBatch(np.concatenate(values), grids, [prompt(*image.size) for image in opened])

    def _pixel_values(self, image: Image.Image) -> np.ndarray:
        return patches(normalize(self._pixels(image), self.config), self.config.patch_size)

    def _pixels(self, image: Image.Image) -> np.ndarray:
        plan = self.resize_plan(*image.size)
        background = self.config.transparent_bg_config or WHITE
        if self.config.transparent_bg_fill_stage == "before_resize":
            image = composite(image, background)
        image = composite(resize(image, plan.resized), background)
        canvas = np.zeros((plan.padded[1], plan.padded[0], 3), np.uint8)
        canvas[: plan.resized[1], : plan.resized[0]] = np.asarray(image)
        return canvas
