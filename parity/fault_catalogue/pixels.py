"""Faults of the image processor (K3.md §12)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from parity.fault_catalogue.patches import around, given, instead
from parity.faults import Fault
from reference.picture import Background

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def smaller_limit(original: Callable, package: str, width, height, config) -> Any:
    return original(width, height, config.model_copy(update={"in_patch_limit": 16384}))


def clip_constants(original: Callable, package: str, pixels, config) -> Any:
    return original(pixels, config.model_copy(update={"image_mean": CLIP_MEAN, "image_std": CLIP_STD}))


def resampled(how: Image.Resampling) -> Callable:
    return instead(lambda package, image, size: image.resize(size, how))


def rounded_size(package: str, width, height, config) -> tuple[int, int]:
    scale = importlib.import_module("reference.image_processor").resize_scale(width, height, config)
    return tuple(min(max(1, round(side * scale)), config.longest_side) for side in (width, height))


def by_256(package: str, pixels, config) -> np.ndarray:
    mean, std = (np.array(values, np.float32) for values in (config.image_mean, config.image_std))
    return (pixels.astype(np.float32) / np.float32(256) - mean) / std


def alpha_dropped(package: str, image, background) -> Image.Image:
    return image.convert("RGB")


def on_black(background: Background) -> Background:
    return background.model_copy(update={"pattern": "black"})


def laid_after_resizing(original: Callable, package: str, image, background) -> Image.Image:
    return original(image, background) if max(image.size) < 150 else image


def channels_last(package: str, pixels, patch_size) -> Any:
    """Patches flattened as (row, column, channel) where (channel, row, column) is right."""
    height, width, channels = pixels.shape
    tiles = pixels.reshape(height // patch_size, patch_size, width // patch_size, patch_size, channels)
    return tiles.transpose(0, 2, 1, 3, 4).reshape(-1, channels, patch_size, patch_size)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "F90",
        "image_processor",
        "pictures are normalised with CLIP's constants",
        "white becomes about 2",
        {"image_processor.normalize": around(clip_constants)},
    ),
    Fault(
        "F91",
        "image_processor",
        "the prompt is the placeholder between its markers",
        "silent loss of quality",
        {"image_processor.prompt": instead(lambda package, *args: "<|media_begin|><|media_pad|><|media_end|>")},
    ),
    Fault(
        "F91b",
        "image_processor",
        "the prompt states the height first",
        "silent loss of quality",
        {"image_processor.prompt": lambda original, package: lambda width, height: original(height, width)},
    ),
    Fault(
        "F93",
        "image_processor",
        "the limit of patches is that of the model before",
        "large pictures lose detail",
        {"image_processor.resize_scale": around(smaller_limit)},
    ),
    Fault(
        "F93b",
        "image_processor",
        "patches are stored with their channels last",
        "noise",
        {"image_processor.patches": instead(channels_last)},
    ),
    Fault(
        "F93c",
        "image_processor",
        "the alpha channel may be dropped",
        "what lies under transparency is seen, mostly black",
        {"picture.composite": instead(alpha_dropped)},
    ),
    Fault(
        "F93d",
        "image_processor",
        "transparent pictures stand on black",
        "dark text on a transparent ground is lost",
        {"picture.composite": given(background=on_black)},
    ),
    Fault(
        "F93e",
        "image_processor",
        "pictures are made smaller bilinearly",
        "blurred detail, in large pictures alone",
        {"image_processor.resize": resampled(Image.Resampling.BILINEAR)},
    ),
    Fault(
        "F93f",
        "image_processor",
        "any filter of good quality will do",
        "edges ring a little more, in large pictures alone",
        {"image_processor.resize": resampled(Image.Resampling.LANCZOS)},
    ),
    Fault(
        "F93g",
        "image_processor",
        "sides are rounded to the nearest pixel",
        "a row or column more, at times a token more",
        {"image_processor.resized_size": instead(rounded_size)},
    ),
    Fault(
        "F93h",
        "image_processor",
        "levels are divided by 256",
        "white becomes 0.992",
        {"image_processor.normalize": instead(by_256)},
    ),
    Fault(
        "F93i",
        "image_processor",
        "16-bit samples are cut off at 255",
        "scans and depth maps are white",
        {"picture.upper_byte": instead(lambda package, samples: np.minimum(samples, 255).astype(np.uint8))},
    ),
    Fault(
        "F93j",
        "image_processor",
        "the ground is laid after resizing, whatever is configured",
        "seams where it has a pattern",
        {"picture.composite": around(laid_after_resizing)},
    ),
)
