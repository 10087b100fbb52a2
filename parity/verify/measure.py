"""How far coded weights are from the source's: cosine, relative error, and whether every group is as it must be.

Sums are float32 over 64 weights and float64 beyond: over a whole expert float32 sums are wrong in the second digit.
Beside the sums, which one wrong group among thousands hardly moves, every group of 64 is judged by itself:

- its *grid*: scale and bias follow from the largest and least weight of the group and from the number of levels;
- its *codes*: no weight is further from its source than half a step, or, at the far end of the grid, than the range
  goes beyond the grid. So a weight halfway between two codes may have either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from parity.verify.decode import GROUP, Block, codes_block, halves, scratch
from reference.mxfp4 import SCALE_BIAS

BLOCK = 1 << 18
"""Weights in work at once: their float32 arrays stay within a processor's own cache."""
LEAST_STEP = 1e-7
"""The least scale of a group, whose weights may all be equal."""
HALF_ULP = 2.0**-8
"""What rounding to bfloat16 adds to a number at most, relative to it."""
FLOAT32_SLACK = 2.0**-21


class Measure(NamedTuple):
    """Squares of the source, of what was found and of their difference, float64; how many groups have another grid and
    how many weights lie too far, and where the first of either is, [row, group] and [row, input]."""

    source: float = 0.0
    found: float = 0.0
    difference: float = 0.0
    grids: int = 0
    codes: int = 0
    first_grid: tuple[int, int] | None = None
    first_code: tuple[int, int] | None = None

    @property
    def cosine(self) -> float:
        """NaN where one side is zero or not finite."""
        size = np.sqrt(self.source * self.found)
        return float((self.source + self.found - self.difference) / (2 * size)) if 0 < size < np.inf else float("nan")

    @property
    def error(self) -> float:
        """RMS of the difference over RMS of the source; of a source that is zero, 0 if nothing differs."""
        if self.source == 0:
            return 0.0 if self.difference == 0 else float("inf")
        ratio = self.difference / self.source
        return float(np.sqrt(ratio)) if np.isfinite(ratio) else float("inf")

    def plus(self, other: Measure, row: int) -> Measure:
        """Together with a further block, whose first row is ``row``."""
        moved = [None if at is None else (at[0] + row, at[1]) for at in other[5:]]
        firsts = [mine if mine is not None else theirs for mine, theirs in zip(self[5:], moved, strict=True)]
        return Measure(*(mine + theirs for mine, theirs in zip(self[:5], other[:5], strict=True)), *firsts)


def squares(weights: np.ndarray) -> float:
    """float32 [rows, in] -> the sum of squares, float64."""
    groups = weights.reshape(-1, GROUP) if weights.shape[-1] % GROUP == 0 else weights
    return float(np.vecdot(groups, groups).sum(dtype=np.float64))


def plain(source: np.ndarray, found: np.ndarray) -> Measure:
    """Of two float32 matrices, without grids and codes."""
    with np.errstate(over="ignore", invalid="ignore"):
        return Measure(squares(source), squares(found), squares(found - source))


def affine_block(block: Block, words: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> Measure:
    """Against words uint32 [rows, in·bits/32], scales and biases bfloat16 in uint16 [rows, in/64]."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scale, bias = halves(scales, block.shift)[..., None], halves(biases, block.shift)[..., None]
        found = codes_block(words, bits).reshape(*scales.shape, GROUP)
        found *= scale
        found += bias
        source = block.weights.reshape(found.shape)
        sums = squares(source), squares(found)
        found -= source
        difference = squares(found)
        grid, reach = grids(block, scale[..., 0], bias[..., 0], bits)
        near = scratch.array("near", found.shape, bool)
        np.less_equal(np.abs(found, out=found), reach[..., None], out=near)
    wrong_codes = 0 if near.all() else int(near.size - np.count_nonzero(near))
    wrong_grids = int(grid.size - np.count_nonzero(grid))
    first_grid = first_false(grid) if wrong_grids else None
    first_code = first_false(near.reshape(len(near), -1)) if wrong_codes else None
    return Measure(*sums, difference, wrong_grids, wrong_codes, first_grid, first_code)


def grids(block: Block, scale: np.ndarray, bias: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """scale and bias float32 [rows, groups] -> whether each group's are right, and each group's reach.

    The grid starts at the group's *edge*, whichever of its extremes is larger, and has a code for zero: its step is the
    edge over a whole number, the one nearest to edge over range/levels.
    """
    levels, high, low = (1 << bits) - 1, block.high, block.low
    below = np.abs(low) > np.abs(high)
    edge = np.where(below, low, high)
    least = np.ldexp(np.float32(LEAST_STEP), SCALE_BIAS - block.shift)
    step = np.maximum((high - low) / np.float32(levels), least)
    step = np.where(below, step, -step)
    steps = np.rint(edge / step)
    without_edge = steps == 0
    if without_edge.any():
        step, edge = np.where(without_edge, step, edge / steps), np.where(without_edge, 0, edge)
    else:
        step = edge / steps
    right = (rounded(step) == scale) & (rounded(edge) == bias)
    size = np.abs(scale)
    reach = np.maximum(size / 2, (high - low) - levels * size)
    return right, reach + size * (levels * HALF_ULP) + np.abs(edge) * FLOAT32_SLACK


def rounded(values: np.ndarray) -> np.ndarray:
    """float32, rounded to bfloat16."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def first_false(flags: np.ndarray) -> tuple[int, int]:
    row, column = np.unravel_index(int(np.argmin(flags)), flags.shape)
    return int(row), int(column)


def scaled_back(measure: Measure, shift: int) -> Measure:
    """The sums of squares without ``decode``'s division, so that experts can be added up."""
    factor = float(np.ldexp(1.0, 2 * (shift - SCALE_BIAS)))
    return measure._replace(**{name: getattr(measure, name) * factor for name in ("source", "found", "difference")})


def total(parts: Iterable[tuple[int, Measure]]) -> Measure:
    """Blocks, each with its first row, as one."""
    whole = Measure()
    for row, part in parts:
        whole = whole.plus(part, row)
    return whole


def row_blocks(rows: int, width: int) -> Iterable[tuple[int, int]]:
    step = max(1, BLOCK // width)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]
