"""Where a patch stands: learned grid, time embedding, two-dimensional rope (K3.md §9).

``grids`` below is a list of (t, h, w), one per image or video: frames, rows and columns of patches. Patches are
frame-major, then row-major, and all items stand one after the other, so L = sum of t·h·w.

Positions, frequencies and angles are computed in float64 in every model dtype and rounded once: computed in float32,
source rows of a 64-row grid alone would cost 2e-6 of the embedding, and an angle at column 511 would be 3e-5 off.
MLX has float64 on no GPU, so that these few numbers are made on the host, by numpy.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from port.linear import wide
from reference.config import VisionConfig
from reference.errors import InputError

MAX_SIDE = 512
TIME_BASE = 10000.0
ROPE_BASE = 10000.0

Grid = tuple[int, int, int]


def checked_grids(grid_thws: mx.array, patches: int, config: VisionConfig) -> list[Grid]:
    """``grid_thws`` [N, 3] as plain numbers, after every check that §9 asks for.

    Raises InputError, naming the item, if t exceeds ``init_pos_emb_time``, h or w exceeds 512 or is not a multiple of
    the merge window, or the grids together do not hold exactly ``patches`` patches.
    """
    grid_thws = np.asarray(grid_thws)
    if grid_thws.ndim != 2 or grid_thws.shape[1] != 3 or len(grid_thws) == 0 or grid_thws.dtype.kind not in "iu":
        found = f"{grid_thws.dtype} {list(grid_thws.shape)}"
        raise InputError("grid_thws", "grids", "integers [N, 3], N at least 1", found, "give (t, h, w) per item")
    grids = [tuple(row) for row in grid_thws.tolist()]
    end = 0
    for item, grid in enumerate(grids):
        check_grid(item, grid, config)
        end += grid[0] * grid[1] * grid[2]
        if end > patches or (item == len(grids) - 1 and end < patches):
            subject, found = f"item {item}, grid {grid}", f"{patches} in pixel_values"
            raise InputError(
                "grid_thws", subject, f"{end} patches up to this item", found, "give the patches' own grids"
            )
    return grids


def check_grid(item: int, grid: Grid, config: VisionConfig) -> None:
    """Raise InputError unless (t, h, w) is a grid that the tower can hold."""
    subject = f"item {item}, grid {grid}"
    limits = (config.init_pos_emb_time, MAX_SIDE, MAX_SIDE)
    for axis, size, limit, window in zip("thw", grid, limits, (1, *config.merge_kernel_size), strict=True):
        if not 1 <= size <= limit:
            raise InputError(
                "grid_thws", subject, f"{axis} in 1..{limit}", size, "use fewer frames or a smaller picture"
            )
        if size % window:
            expected = f"{axis} a multiple of {window}, the merge window"
            raise InputError("grid_thws", subject, expected, size, "pad the picture as the image processor does")


def source_positions(size: int, new_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Half-pixel centres of ``new_size`` points on an axis of ``size``: lower and upper neighbour, and how far between.

    Returns integer ``low``, ``high`` and float64 ``fraction``, each [new_size]. The end points are repeated outwards.
    """
    position = (np.arange(new_size, dtype=np.float64) + 0.5) * size / new_size - 0.5
    position = position.clip(min=0)
    low = np.floor(position).astype(np.int32)
    return low, (low + 1).clip(max=size - 1), position - low


def resized_positions(table: mx.array, h: int, w: int) -> mx.array:
    """The learned grid ``table`` [rows, columns, dim] at (h, w): [h, w, dim], bilinear, no antialiasing (§9).

    Interpolated in wide precision and rounded once; at its own size the table is returned untouched.
    """
    rows, columns, _ = table.shape
    if (h, w) == (rows, columns):
        return table
    low, high, fraction = source_positions(columns, w)
    values, fraction = wide(table), mx.array(fraction, mx.float32)[:, None]
    values = values[:, mx.array(low)] * (1 - fraction) + values[:, mx.array(high)] * fraction
    low, high, fraction = source_positions(rows, h)
    fraction = mx.array(fraction, mx.float32)[:, None, None]
    return (values[mx.array(low)] * (1 - fraction) + values[mx.array(high)] * fraction).astype(table.dtype)


def time_embedding(frames: int, dim: int) -> np.ndarray:
    """``[sin(pos·ω) | cos(pos·ω)]``, ``ω_i = 10000^(-i/(dim/2))``, for frames 0, 1, …: [frames, dim] float64 (§9)."""
    half = dim // 2
    omega = TIME_BASE ** -(np.arange(half, dtype=np.float64) / half)
    phase = np.arange(frames, dtype=np.float64)[:, None] * omega
    return np.concatenate([np.sin(phase), np.cos(phase)], axis=-1)


def position_embedding(table: mx.array, grids: list[Grid]) -> mx.array:
    """What is added to every patch: [L, dim] in ``table``'s dtype. A single frame gets no time embedding (§9)."""
    embeddings = []
    for t, h, w in grids:
        spatial = resized_positions(table, h, w).flatten(0, 1)
        if t == 1:
            embeddings.append(spatial)
        else:
            frames = mx.array(time_embedding(t, table.shape[-1]), mx.float32).astype(table.dtype)
            embeddings.append((spatial + frames[:, None]).flatten(0, 1))
    return mx.concatenate(embeddings)


def rope_angles(h: int, w: int, head_dim: int) -> np.ndarray:
    """By how much every pair of a head turns at every place of an h×w grid: [h·w, head_dim/2] float64, radians (§9).

    ``f_i = 10000^(-4i/head_dim)``; pair 2i turns by column·f_i, pair 2i+1 by row·f_i.
    """
    frequency = ROPE_BASE ** -(np.arange(0, head_dim, 4, dtype=np.float64) / head_dim)
    row, column = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
    by_column = column.reshape(-1, 1) * frequency
    by_row = row.reshape(-1, 1) * frequency
    return np.stack([by_column, by_row], axis=-1).reshape(h * w, -1)


def rope_turns(grids: list[Grid], head_dim: int) -> mx.array:
    """Cosine and sine of every patch's angles, [L, head_dim/2, 2]; the frames of a video repeat the same (§9)."""
    angles = np.concatenate([np.tile(rope_angles(h, w, head_dim), (t, 1)) for t, h, w in grids])
    return mx.array(np.stack([np.cos(angles), np.sin(angles)], axis=-1), mx.float32)


def apply_rope(x: mx.array, turns: mx.array) -> mx.array:
    """Turn the complex pairs (2j, 2j+1) of ``x`` [L, heads, D] by ``turns`` [L, D/2, 2], in wide precision (§9)."""
    pairs = mx.unflatten(wide(x), -1, (-1, 2))
    real, imaginary = pairs[..., 0], pairs[..., 1]
    cosine, sine = turns[:, None, :, 0], turns[:, None, :, 1]
    turned = mx.stack([real * cosine - imaginary * sine, real * sine + imaginary * cosine], axis=-1)
    return turned.flatten(-2).astype(x.dtype)
