"""Where a patch stands: learned grid, time embedding, two-dimensional rope (K3.md §9).

``grids`` below is a list of (t, h, w), one per image or video: frames, rows and columns of patches. Patches are
frame-major, then row-major, and all items stand one after the other, so L = sum of t·h·w.

Positions, frequencies and angles are computed in float64 in every model dtype and rounded once: computed in float32,
source rows of a 64-row grid alone would cost 2e-6 of the embedding, and an angle at column 511 would be 3e-5 off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.config import VisionConfig
from reference.errors import InputError
from reference.linear import wide

MAX_SIDE = 512
TIME_BASE = 10000.0
ROPE_BASE = 10000.0

Grid = tuple[int, int, int]


def checked_grids(grid_thws: Tensor, patches: int, config: VisionConfig) -> list[Grid]:
    """``grid_thws`` [N, 3] as plain numbers, after every check that §9 asks for.

    Raises InputError, naming the item, if t exceeds ``init_pos_emb_time``, h or w exceeds 512 or is not a multiple of
    the merge window, or the grids together do not hold exactly ``patches`` patches.
    """
    grid_thws = torch.as_tensor(grid_thws)
    if grid_thws.ndim != 2 or grid_thws.shape[1] != 3 or len(grid_thws) == 0 or grid_thws.is_floating_point():
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


def source_positions(size: int, new_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Half-pixel centres of ``new_size`` points on an axis of ``size``: lower and upper neighbour, and how far between.

    Returns int64 ``low``, ``high`` and float64 ``fraction``, each [new_size]. The end points are repeated outwards.
    """
    position = (torch.arange(new_size, dtype=torch.float64) + 0.5) * size / new_size - 0.5
    position = position.clamp(min=0)
    low = position.floor().long()
    return low, (low + 1).clamp(max=size - 1), position - low


def resized_positions(table: Tensor, h: int, w: int) -> Tensor:
    """The learned grid ``table`` [rows, columns, dim] at (h, w): [h, w, dim], bilinear, no antialiasing (§9).

    Interpolated in wide precision and rounded once; at its own size the table is returned untouched.
    """
    rows, columns, _ = table.shape
    if (h, w) == (rows, columns):
        return table
    low, high, fraction = source_positions(columns, w)
    values, fraction = wide(table), fraction.to(wide(table).dtype)[:, None]
    values = values[:, low] * (1 - fraction) + values[:, high] * fraction
    low, high, fraction = source_positions(rows, h)
    fraction = fraction.to(values.dtype)[:, None, None]
    return (values[low] * (1 - fraction) + values[high] * fraction).to(table.dtype)


def time_embedding(frames: int, dim: int) -> Tensor:
    """``[sin(pos·ω) | cos(pos·ω)]``, ``ω_i = 10000^(-i/(dim/2))``, for frames 0, 1, …: [frames, dim] float64 (§9)."""
    half = dim // 2
    omega = TIME_BASE ** -(torch.arange(half, dtype=torch.float64) / half)
    phase = torch.arange(frames, dtype=torch.float64)[:, None] * omega
    return torch.cat([phase.sin(), phase.cos()], dim=-1)


def position_embedding(table: Tensor, grids: list[Grid]) -> Tensor:
    """What is added to every patch: [L, dim] in ``table``'s dtype. A single frame gets no time embedding (§9)."""
    embeddings = []
    for t, h, w in grids:
        spatial = resized_positions(table, h, w).flatten(0, 1)
        if t == 1:
            embeddings.append(spatial)
        else:
            frames = time_embedding(t, table.shape[-1]).to(table.dtype)
            embeddings.append((spatial + frames[:, None]).flatten(0, 1))
    return torch.cat(embeddings)


def rope_angles(h: int, w: int, head_dim: int) -> Tensor:
    """By how much every pair of a head turns at every place of an h×w grid: [h·w, head_dim/2] float64, radians (§9).

    ``f_i = 10000^(-4i/head_dim)``; pair 2i turns by column·f_i, pair 2i+1 by row·f_i.
    """
    frequency = ROPE_BASE ** -(torch.arange(0, head_dim, 4, dtype=torch.float64) / head_dim)
    row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    by_column = column.flatten()[:, None] * frequency
    by_row = row.flatten()[:, None] * frequency
    return torch.stack([by_column, by_row], dim=-1).flatten(1)


def rope_turns(grids: list[Grid], head_dim: int, dtype: torch.dtype) -> Tensor:
    """Cosine and sine of every patch's angles, [L, head_dim/2, 2]; the frames of a video repeat the same (§9)."""
    angles = torch.cat([rope_angles(h, w, head_dim).repeat(t, 1) for t, h, w in grids])
    return torch.stack([angles.cos(), angles.sin()], dim=-1).to(dtype)


def apply_rope(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the complex pairs (2j, 2j+1) of ``x`` [L, heads, D] by ``turns`` [L, D/2, 2], in wide precision (§9)."""
    real, imaginary = wide(x).unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = turns[:, None].unbind(-1)
    turned = torch.stack([real * cosine - imaginary * sine, real * sine + imaginary * cosine], dim=-1)
    return turned.flatten(-2).to(x.dtype)
