"""The image processor (K3.md §12): token counts and pixels that are known, then pictures of every colour mode whose
pixels the reference tells."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image

from parity.cases.pictures import PICTURES, RELEASED, Drawn, draw, file_of
from parity.checks.plan import Plan
from parity.compare import Place, crash_note
from parity.findings import Finding, measure
from parity.protocol import Unsupported
from parity.quantities import Quantity
from reference.image_processor import ImageProcessor, MediaConfig

PROCESSOR = Quantity("image_processor", "§12")
TOKENS = {
    (611, 437): 352, (224, 224): 64, (448, 448): 256, (1920, 1080): 2691, (1024, 768): 1036, (4000, 3000): 15444,
    (1, 1): 1, (28, 29): 2, (20000, 14): 256, (13, 500): 18,
}  # fmt: skip
"""(width, height) -> tokens, as the specification states them."""
SHADES = {"white": (255, 1.0), "black": (0, -1.0), "grey": (128, 2 * 128 / 255 - 1)}


def run(plan: Plan) -> Iterator[Finding]:
    """For a port that has an image processor: pixels of plain pictures, counts of the known sizes, padding, prompts."""
    process = getattr(plan.port, "picture", None)
    place = Place("processor", "pictures", "float32", seed=plan.seed)
    if process is None:
        yield place.finding(PROCESSOR, "picture", "unsupported", note="this port has no image processor")
        return
    for size, tokens in TOKENS.items():
        yield from _size_findings(place._replace(regime=f"{size[0]}x{size[1]}"), process, size, tokens)
    for name, (level, value) in SHADES.items():
        yield from _shade_findings(place._replace(regime=name), process, level, value)
    for name, drawn in PICTURES.items():
        yield from _picture_findings(place._replace(regime=name), process, drawn)


def _size_findings(place: Place, process, size: tuple[int, int], tokens: int) -> Iterator[Finding]:
    width, height = size
    done = _processed(place, process, file_of(Image.new("RGB", size, "white")), RELEASED)
    if isinstance(done, Finding):
        yield done
        return
    prompt = f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"
    yield _equal(place, "tokens", done["tokens"], tokens)
    yield _equal(place, "prompt", done["prompt"], prompt)


def _shade_findings(place: Place, process, level: int, value: float) -> Iterator[Finding]:
    """30×20 pixels become one row of 2×3 patches with padding: the picture's shade, then −1."""
    done = _processed(place, process, file_of(Image.new("RGB", (30, 20), (level,) * 3)), RELEASED)
    if isinstance(done, Finding):
        yield done
        return
    truth = np.full((28, 56, 3), -1.0)
    truth[:20, :30] = value
    patches = truth.reshape(2, 14, 4, 14, 3).transpose(0, 2, 4, 1, 3).reshape(8, 3, 14, 14)
    yield _pixels(place, done["pixel_values"], patches)


def _picture_findings(place: Place, process, drawn: Drawn) -> Iterator[Finding]:
    file, settings = draw(drawn), RELEASED | drawn.settings
    done = _processed(place, process, file, settings)
    if isinstance(done, Finding):
        yield done
        return
    processor = ImageProcessor(MediaConfig.from_dict(settings))
    yield _equal(place, "tokens", done["tokens"], processor.resize_plan(*drawn.size).token_count)
    yield _pixels(place, done["pixel_values"], processor.pixel_values(file))


def _pixels(place: Place, found, truth: np.ndarray) -> Finding:
    """A single pixel that is one of 256 levels off exceeds the limit."""
    result = measure(np.asarray(found), truth)
    status = "pass" if result["error"] <= 1e-6 else "fail"
    return place.finding(PROCESSOR, "pixel_values", status, allowed=1e-6, inputs_agree=True, **result)


def _processed(place: Place, process, file: bytes, settings: dict):
    try:
        return process(file, settings)
    except Unsupported as reason:
        return place.finding(PROCESSOR, "picture", "unsupported", note=str(reason))
    except Exception as error:
        return place.finding(PROCESSOR, "picture", "error", note=crash_note(error), inputs_agree=True)


def _equal(place: Place, tap: str, found, truth) -> Finding:
    if found == truth:
        return place.finding(PROCESSOR, tap, "pass", error=0.0, allowed=0.0, inputs_agree=True)
    note = f"{found!r} where {truth!r} is right"
    return place.finding(PROCESSOR, tap, "fail", error=float("inf"), allowed=0.0, inputs_agree=True, note=note)
