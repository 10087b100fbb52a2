"""One task of verify: some experts of a stack, or one other tensor, against the source's bytes (K3.md §8, §15).

A task is read through byte ranges, a block of rows at a time, in whatever process runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from parity.verify import decode, measure
from parity.verify.declared import BANDS, Coding, Entry
from parity.verify.decode import GROUP, MXFP4_GROUP, Block, mxfp4_block
from parity.verify.findings import Compared
from parity.verify.measure import Measure
from port.source import Files, Piece
from reference.errors import InputError
from reference.headers import FETCH_AGAIN
from reference.mxfp4 import NAN_SCALE

NAN_EXPONENT = 255
STEP = 1 << 22
"""Bytes of a tensor that are compared at once."""
DTYPES = {"BF16": np.dtype("<u2"), "F32": np.dtype("<f4"), "U8": np.dtype(np.uint8), "U32": np.dtype("<u4")}

Rows = Callable[[int, int], Block]
"""(first, end) -> those rows."""


@dataclass(frozen=True)
class Task:
    """``slots`` of a stack (of the folder's numbers), or one other tensor; ``source`` its pieces, for a stack slot by
    slot, packed before scale; ``target`` tensor name -> where it lies in the folder."""

    entry: Entry
    source: tuple[Piece, ...]
    target: Mapping[str, Piece]
    slots: tuple[int, ...] = ()
    mxfp4: bool = False


class Answer(NamedTuple):
    """``compared``: what was measured, each with what is wrong about it, "" where nothing is; ``failure``: the parts of
    the InputError that the source's files gave."""

    task: Task
    compared: list[tuple[Compared, str]]
    failure: tuple[str, ...] | None = None


class Damaged(Exception):
    """The folder's own bytes cannot be had."""


def compare(task: Task) -> Answer:
    """All of a task; bad input in the source comes back as a failure: its error would not survive the way between
    processes."""
    try:
        with Files() as files:
            return Answer(task, list(compared(task, files)))
    except InputError as error:
        parts = (error.where, error.subject, error.expected, str(error.found), error.mend)
        return Answer(task, [], parts)


def compared(task: Task, files: Files) -> Iterator[tuple[Compared, str]]:
    entry = task.entry
    if entry.kind == "experts":
        step = len(task.source) // len(task.slots)
        for place, slot in enumerate(task.slots):
            yield expert(task, slot, task.source[place * step : (place + 1) * step], files)
        return
    try:
        if entry.kind == "same":
            result, wrong = same(task, files)
        else:
            result = kv_b(task, files) if entry.kind == "kv_b" else matrix(task, files)
            wrong = verdict(result, entry.coding)
    except Damaged as damage:
        result, wrong = Measure(1.0, 0.0, 1.0), str(damage)
    bits = entry.coding.bits if entry.coding else None
    yield Compared(entry.source, prod(entry.shape), *figures(result), bits, entry.layer), wrong


def figures(result: Measure) -> tuple[float, float]:
    """Cosine and relative error; equal tensors have 1 and 0, zero ones too."""
    return (1.0, 0.0) if result.difference == 0 else (result.cosine, result.error)


def expert(task: Task, slot: int, pieces: Sequence[Piece], files: Files) -> tuple[Compared, str]:
    """One expert's projection; ``slot`` is its number in the folder."""
    entry = task.entry
    try:
        if entry.coding.mode == "mxfp4":
            result, wrong = packed_expert(task, slot, pieces, files)
        else:
            rows, width = entry.shape
            source = (
                mxfp4_rows(files, *pieces, width) if task.mxfp4 else bf16_rows(files, pieces[0], width)
            )  # fmt: skip
            result = affine(source, task, entry.module, slot * rows, entry.shape, files)
            wrong = verdict(result, entry.coding)
    except Damaged as damage:
        result, wrong = Measure(1.0, 0.0, 1.0), str(damage)
    number = entry.experts[slot]
    name = entry.source.format(expert=number)
    found = Compared(
        name,
        prod(entry.shape),
        *figures(result),
        entry.coding.bits,
        entry.layer,
        entry.projection,
        slot,
        number,
    )
    return found, wrong


def packed_expert(task: Task, slot: int, pieces: Sequence[Piece], files: Files) -> tuple[Measure, str]:
    """Packed bytes and scale bytes, which must be the source's."""
    entry, sides = task.entry, []
    for piece, ending in zip(pieces, ("weight", "scales"), strict=True):
        source = files.read(piece)
        found = target(files, task.target[f"{entry.module}.{ending}"], slot * len(source), len(source))
        sides.append((source, found))
    (packed, found_packed), (scale, found_scale) = sides
    check_scale(pieces[1], scale)
    wrong = [int(np.count_nonzero(source != found)) for source, found in sides]
    if not any(wrong):
        return Measure(1.0, 1.0, 0.0), ""
    shape, groups = (entry.shape[0], -1), max(int(scale.max()), int(found_scale.max()))
    with np.errstate(over="ignore", invalid="ignore"):
        weights = [
            mxfp4_block(codes.reshape(shape), scales.reshape(shape), groups)
            for codes, scales in ((packed, scale), (found_packed, found_scale))
        ]
    what = f"{wrong[0]} of {len(packed)} packed bytes and {wrong[1]} of {len(scale)} scale bytes differ"
    return measure.plain(*weights), what


def verdict(result: Measure, coding: Coding) -> str:
    """What is wrong with a requantized matrix; "" if nothing is."""
    low, high = BANDS[coding.bits]
    wrong = []
    if not (low <= result.error <= high or result.difference == 0):
        wrong.append(f"relative error {result.error:.3g}, expected {low} to {high}")
    if result.grids:
        row, group = result.first_grid
        wrong.append(f"scale or bias of {result.grids} groups wrong, first in row {row}, group {group}")
    if result.codes:
        row, column = result.first_code
        wrong.append(f"{result.codes} weights further off than their codes are apart, first at [{row}, {column}]")
    return "; ".join(wrong)


def affine(source: Rows, task: Task, module: str, first_row: int, shape: tuple[int, ...], files: Files) -> Measure:
    """A matrix [rows, in] against the rows of ``module`` from ``first_row`` on."""
    rows, width = shape
    bits = task.entry.coding.bits
    sizes = {"weight": width * bits // 8, "scales": width // GROUP * 2, "biases": width // GROUP * 2}
    parts = []
    for first, end in measure.row_blocks(rows, width):
        weights = source(first, end)
        found = {
            part: target(files, task.target[f"{module}.{part}"], (first_row + first) * size, (end - first) * size)
            for part, size in sizes.items()
        }
        words, *halves = (
            found[part].view(kind) for part, kind in (("weight", "<u4"), ("scales", "<u2"), ("biases", "<u2"))
        )
        block = measure.affine_block(
            weights, words.reshape(end - first, -1), *(half.reshape(end - first, -1) for half in halves), bits
        )
        parts.append((first, measure.scaled_back(block, weights.shift)))
    return measure.total(parts)


def mxfp4_rows(files: Files, packed: Piece, scale: Piece, width: int) -> Rows:
    def rows(first: int, end: int) -> Block:
        sizes = width // 2, width // MXFP4_GROUP
        codes, scales = (
            files.read(piece, first * size, (end - first) * size).reshape(end - first, size)
            for piece, size in zip((packed, scale), sizes, strict=True)
        )
        check_scale(scale, scales)
        return decode.mxfp4(codes, scales)

    return rows


def bf16_rows(files: Files, piece: Piece, width: int, kept: Sequence[int] | None = None) -> Rows:
    """``kept``: the rows that stay, in their new order."""

    def rows(first: int, end: int) -> Block:
        if kept is None:
            bits = files.read(piece, 2 * width * first, 2 * width * (end - first))
        else:
            bits = np.concatenate([files.read(piece, 2 * width * row, 2 * width) for row in kept[first:end]])
        return widened(piece, bits.view("<u2").reshape(end - first, width))

    return rows


def widened(piece: Piece, bits: np.ndarray) -> Block:
    if decode.exponent(bits) == NAN_EXPONENT:
        raise InputError(piece.file, piece.name, "finite weights", "NaN or infinity", FETCH_AGAIN)
    return decode.bf16(bits)


def matrix(task: Task, files: Files) -> Measure:
    entry = task.entry
    rows, width = entry.kept(entry.shape)
    source = bf16_rows(files, task.source[0], width, entry.experts)
    return affine(source, task, entry.module, 0, (rows, width), files)


def kv_b(task: Task, files: Files) -> Measure:
    """Head by head: the key rows, transposed, are ``embed_q``'s, the value rows ``unembed_out``'s."""
    (heads, rank, keys), (_, values, _) = task.entry.halves
    parts = []
    for head in range(heads):
        size = 2 * rank * (keys + values)
        bits = files.read(task.source[0], head * size, size).view("<u2").reshape(-1, rank)
        sides = (np.ascontiguousarray(bits[:keys].T), bits[keys:])
        for module, side in zip(task.entry.modules(), sides, strict=True):

            def rows(first: int, end: int, side: np.ndarray = side) -> Block:
                return widened(task.source[0], side[first:end])

            found = affine(rows, task, module, head * len(side), side.shape, files)
            parts.append((head * len(side), found))
    return measure.total(parts)


def same(task: Task, files: Files) -> tuple[Measure, str]:
    """A tensor that must have the source's bytes, or of its first axis those of the experts that stay."""
    entry, piece, place = task.entry, task.source[0], task.target[task.entry.source]
    size = piece.end - piece.begin
    row = size // entry.shape[0]
    spans = [(0, size)] if entry.experts is None else [(expert * row, row) for expert in entry.experts]
    wrong, first, at, sums = 0, None, 0, []
    kind = DTYPES[entry.dtype]
    for begin, length in spans:
        for start in range(begin, begin + length, STEP):
            count = min(STEP, begin + length - start)
            source, found = files.read(piece, start, count), target(files, place, at, count)
            differ = (
                source.view(kind) != found.view(kind) if kind.kind != "f" else source.view("<u4") != found.view("<u4")
            )
            if differ.any():
                first = at // kind.itemsize + int(np.argmax(differ)) if first is None else first
                wrong += int(np.count_nonzero(differ))
            sums.append((0, measure.plain(*(floats(side, entry.dtype) for side in (source, found)))))
            at += count
    if not wrong:
        return Measure(1.0, 1.0, 0.0), ""
    shape = entry.kept(entry.shape)
    where = [int(index) for index in np.unravel_index(first, shape)]
    return measure.total(sums), f"{wrong} of {prod(shape)} values differ, first at {where}"


def floats(data: np.ndarray, dtype: str) -> np.ndarray:
    """bytes of bfloat16 or float32 numbers -> float32 [1, n]."""
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)[None]
    return data.view(DTYPES[dtype]).astype(np.float32)[None]


def target(files: Files, piece: Piece, begin: int, size: int) -> np.ndarray:
    """uint8 [size] of the folder's; Damaged where they are missing."""
    try:
        return files.read(piece, begin, size)
    except InputError:
        raise Damaged(f"bytes are missing: {piece.name} is cut off in its shard") from None


def check_scale(piece: Piece, scale: np.ndarray) -> None:
    if scale.max() == NAN_SCALE:
        raise InputError(piece.file, piece.name, "E8M0 scales below 255, which is NaN", NAN_SCALE, FETCH_AGAIN)
