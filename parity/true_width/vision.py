"""The vision tower and the projector at the released size: 447 million parameters, float32, reference against port.

The weights are drawn once; the sides compute at the same time, each on its share of the threads, which wastes less of
two cores than sharing every operation does. The text tower is never built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fixtures import values
from parity.checks.vision import vision_calls
from parity.metrics import relative_rms
from parity.ports.twin import TwinSession
from parity.protocol import Taps
from parity.true_width.cost import Clock, peak_rss
from reference.checkpoint import TensorSpec, vision_rows
from reference.config import K3Config
from reference.image_processor import ImageProcessor
from reference.taps import name_modules

PRESET = Path(values.__file__).parent / "presets" / "k3.json"
PICTURES, FRAME = ((448, 448), (611, 437)), (280, 168)
SMALL_PICTURES, SMALL_FRAME = ((112, 84), (61, 43)), (56, 28)
"""(width, height) in pixels of the pictures, and of each of the two frames of the video."""

DRAWN_AT_ONCE = 1 << 17
CACHE = 1 << 28
"""Bytes of freed arrays that MLX may keep."""
ENDS = ("tower.output", "projector.output")


class Limit(NamedTuple):
    """Relative RMS that is allowed: a module of the tower alone, the projector alone, the whole; and why."""

    tower_module: float
    projector: float
    end_to_end: float
    reason: str


SHARED = Limit(
    1e-6,
    1e-6,
    1.5e-6,
    "one matrix product for both sides; what is left is the rounding of norms, softmax and GELU over 27 blocks",
)
SHARED_SMALL = SHARED._replace(
    end_to_end=2.5e-6,
    reason="one matrix product for both sides; few patches average out less in attention: from float64 the reference is"
    " 1.3e-6 and the port 1.8e-6 away at the projector",
)
OWN = Limit(
    1.5e-6,
    2.5e-6,
    5e-6,
    "MLX's product on Linux sums in order: 4096 terms come out 1.1e-6 off, in blocks 2.6e-7; the projector has"
    " two of them in a row; a block alone is judged as strictly as the whole is with one product for both sides",
)


def limit_for(lent: bool, small: bool) -> Limit:
    """The limits of a run: was the product lent, are the pictures small."""
    if not lent:
        return OWN
    return SHARED_SMALL if small else SHARED


class Item(NamedTuple):
    """One picture or video: patches [L, 3, p, p] float32 and its grid [1, 3] int64."""

    name: str
    pixels: np.ndarray
    grids: np.ndarray


class Row(NamedTuple):
    """One comparison; ``mode`` is "isolated" (the module got the reference's input) or "chained" (the whole)."""

    item: str
    mode: str
    tap: str
    error: float
    limit: float
    agrees: bool


def picture(width: int, height: int, frame: int = 0) -> np.ndarray:
    """A synthetic picture, uint8 [height, width, 3]: gradients, curves and edges, by integer arithmetic alone."""
    row, column, channel = np.ogrid[:height, :width, :3]
    waves = 3 * column + 5 * row + (row * column) // 37 + (column * column) // 101 + 40 * channel
    squares = (row // 24 + (column + 7 * frame) // 24) % 2
    return ((waves + 90 * squares * (channel + 1)) % 256).astype(np.uint8)


def items(small: bool) -> list[Item]:
    """Two pictures and a video of two frames, as the released image processor makes them."""
    processor = ImageProcessor()
    result = []
    for width, height in SMALL_PICTURES if small else PICTURES:
        grid = processor.grid(width, height)
        result.append(Item(f"{width}x{height}", processor.pixel_values(picture(width, height)), np.array([grid])))
    width, height = SMALL_FRAME if small else FRAME
    frames = [processor.pixel_values(picture(width, height, frame)) for frame in range(2)]
    grid = (2, *processor.grid(width, height)[1:])
    return [*result, Item(f"video 2x{width}x{height}", np.concatenate(frames), np.array([grid]))]


def draw_weights(seed: int, config: K3Config, threads: int) -> dict[str, np.ndarray]:
    """The tower's and the projector's tensors in float32, each the bf16 value of the synthetic full checkpoint."""
    specs = [TensorSpec(*row) for row in vision_rows(config.vision_config)]
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip((spec.name for spec in specs), pool.map(partial(_draw, seed, config), specs), strict=True))


def _draw(seed: int, config: K3Config, spec: TensorSpec) -> np.ndarray:
    """One tensor, some rows at a time: what fits the processor's cache is drawn three times as fast."""
    array = np.empty(spec.shape, np.float32)
    rows = max(1, DRAWN_AT_ONCE * len(array) // array.size)
    for start in range(0, len(array), rows):
        part = slice(start, start + rows)
        array[part] = values.tensor(seed, spec, config, part)
    return array


def reference_session(config: K3Config, weights: dict[str, np.ndarray]) -> TwinSession:
    """The reference on the memory of ``weights``."""
    import torch

    from parity.ports.reference import PORT
    from reference.projector import Projector
    from reference.vision import VisionTower

    with torch.device("meta"):
        root = _joined(torch.nn.Module(), VisionTower(config.vision_config), Projector(config.vision_config))
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    root.load_state_dict(tensors, strict=True, assign=True)
    return TwinSession(PORT, root.eval(), config, "float32")


def port_session(config: K3Config, weights: dict[str, Any]) -> TwinSession:
    """The port on ``weights``, MLX's arrays."""
    import mlx.nn as nn

    from parity.ports.mlx import PORT
    from port.projector import Projector
    from port.vision import VisionTower

    root = _joined(nn.Module(), VisionTower(config.vision_config), Projector(config.vision_config))
    root.load_weights(list(weights.items()), strict=True)
    return TwinSession(PORT, root.eval(), config, "float32")


def in_mlx_memory(weights: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """MLX's arrays of ``weights``, which is emptied on the way, and views of the same memory: it is held once."""
    import mlx.core as mx

    from port.weights import to_mlx

    mx.set_cache_limit(CACHE)
    arrays = {name: to_mlx(weights.pop(name)) for name in list(weights)}
    mx.eval(arrays)
    return arrays, {name: np.array(array, copy=False) for name, array in arrays.items()}


def _joined(root: Any, tower: Any, projector: Any) -> Any:
    """A model that is nothing but vision; taps and parameters have the checkpoint's paths."""
    root.vision_tower, root.mm_projector = tower, projector
    root.image_features = lambda pixels, grids: projector(tower(pixels, grids))
    name_modules(root)
    return root


def run(
    seed: int = 0, small: bool = False, threads: int = 2, note: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Compare the twins; the report as one JSON document. ``note`` hears what goes on.

    Lend the BLAS before this (parity/blas.py), if it is to be lent: the report says whether it was.
    """
    from parity.ports.mlx import PORT as PORT_UNDER_TEST
    from parity.ports.reference import PORT as REFERENCE

    clock = Clock(note)
    clock = Clock(note)
    config, given = K3Config.from_file(PRESET), items(small)
    weights = draw_weights(seed, config, threads)
    parameters = sum(array.size for array in weights.values())
    arrays, views = in_mlx_memory(weights)
    clock.lap("weights")

    with ThreadPoolExecutor(1) as pool:  # the port stays in this thread: MLX's streams belong to theirs
        pending = pool.submit(side_taps, "reference", reference_session, config, views, given, Clock(note, clock.laps))
        if threads == 1:
            pending.result()
        side, found = side_taps("port", port_session, config, arrays, given, clock)
        _, truth = pending.result()
    clock.lap("waiting for the reference")

    versions = REFERENCE.versions() | PORT_UNDER_TEST.versions()
    limit = limit_for("lent" in versions["matrix product"], small)
    rows = [
        _row(item.name, "chained", name, found[item.name], truth[item.name], limit.end_to_end)
        for item in given
        for name in ENDS
    ]
    alone = given[-1]
    rows += isolated_rows(side, alone, truth[alone.name], config.vision_config.vt_num_hidden_layers, limit)
    clock.lap("port, every module alone")
    return {
        "format": 1,
        "agree": all(row.agrees for row in rows),
        "seed": seed,
        "parameters": parameters,
        "versions": versions,
        "limits": limit._asdict(),
        "seconds": clock.laps,
        "total_seconds": clock.total(),
        "peak_rss_bytes": peak_rss(),
        "rows": [row._asdict() for row in rows],
    }


def side_taps(
    side: str, session: Callable, config: K3Config, weights: dict[str, Any], given: list[Item], clock: Clock
) -> tuple[TwinSession, dict[str, Taps]]:
    """One side's session and its taps by item: all of the last item's, of the others the ends alone."""
    model, taps = session(config, weights), {}
    for item in given:
        every = model.vision(item.pixels, item.grids)
        taps[item.name] = every if item is given[-1] else {name: every[name] for name in ENDS}
        clock.lap(f"{side} {item.name}")
    return model, taps


def isolated_rows(side: TwinSession, item: Item, truth: Taps, blocks: int, limit: Limit) -> Iterator[Row]:
    """Every module of the tower with the input that it had in the reference."""
    for call in vision_calls(truth, item.pixels, item.grids, "float32", blocks):
        found, allowed = side.module(call), limit.projector if call.kind == "projector" else limit.tower_module
        for name in found:
            yield _row(item.name, "isolated", name, found, truth, allowed)


def _row(item: str, mode: str, name: str, found: Taps, truth: Taps, limit: float) -> Row:
    error = relative_rms(found[name], truth[name])
    return Row(item, mode, name, error, limit, error <= limit)
