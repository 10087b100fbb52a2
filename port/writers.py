"""How the tensors of one output come to be: source bytes in, bytes at their places in a shard out (K3.md §8, §15).

Memory holds one expert, or a block of a larger tensor, at a time. ``target`` is a file descriptor, ``at`` the offset in
it of each of the output's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from port.requantize import check_finite, quantize, row_blocks, widen
from port.requantize_mxfp4 import requantize
from port.source import COPY_BYTES, Files, Piece, write_all
from port.tiers import WORD_BITS, Output
from reference.checkpoint import ExpertFormat
from reference.errors import InputError
from reference.headers import FETCH_AGAIN
from reference.mxfp4 import GROUP, NAN_SCALE


def write_output(
    output: Output, pieces: Sequence[Piece], expert_format: ExpertFormat, files: Files, target: int, at: Sequence[int]
) -> None:
    """The tensors of one output into the file ``target``, each from its offset in ``at``.

    Raises InputError, naming the source's file and tensor, for values that are not finite; OSError is the target's.
    """
    if output.kind == "stack":
        stack(output, pieces, files, target, at)
    elif output.kind == "quantize_experts":
        quantize_experts(output, pieces, expert_format, files, target, at)
    elif output.kind == "quantize_kv_b":
        quantize_kv_b(output, pieces[0], files, target, at)
    elif output.kind == "quantize":
        kept = row_blocks(*output.shape) if output.experts is None else ((row, row + 1) for row in output.experts)
        quantize_rows(output, pieces[0], kept, files, target, at)
    else:
        copy(output, pieces[0], files, target, at[0])


def copy(output: Output, piece: Piece, files: Files, target: int, at: int) -> None:
    """The tensor's bytes, or of its first axis the rows of the experts that stay."""
    size = piece.end - piece.begin
    row = size // output.shape[0]
    ranges = [(0, size)] if output.experts is None else [(row * expert, row) for expert in output.experts]
    for begin, length in ranges:
        for start in range(begin, begin + length, COPY_BYTES):
            data = files.read(piece, start, min(COPY_BYTES, begin + length - start))
            if output.tensors[0].dtype != "U8":
                checked(piece, check_finite, data.view("<u4" if output.tensors[0].dtype == "F32" else "<u2"))
            write_all(target, data, at)
            at += len(data)


def stack(output: Output, pieces: Sequence[Piece], files: Files, target: int, at: Sequence[int]) -> None:
    """Packed bytes and scale bytes of all experts, untouched; pieces alternate: packed, scale, packed, …"""
    packed_at, scale_at = at
    for packed, scale in zip(pieces[::2], pieces[1::2], strict=True):
        files.copy(packed, target, packed_at)
        data = files.read(scale)
        if data.max() == NAN_SCALE:
            raise InputError(scale.file, scale.name, "E8M0 scales below 255, which is NaN", 255, FETCH_AGAIN)
        write_all(target, data, scale_at)
        packed_at, scale_at = packed_at + packed.end - packed.begin, scale_at + len(data)


def quantize_experts(
    output: Output,
    pieces: Sequence[Piece],
    expert_format: ExpertFormat,
    files: Files,
    target: int,
    at: Sequence[int],
) -> None:
    """One expert after the other; pieces as for ``stack``, or one per dense expert."""
    rows, width = output.shape
    if expert_format == "dense":
        for piece in pieces:
            at = quantize_rows(output, piece, row_blocks(rows, width), files, target, at)
        return
    for packed, scale in zip(pieces[::2], pieces[1::2], strict=True):
        codes = files.read(packed).reshape(rows, width // 2)
        scales = files.read(scale).reshape(rows, width // GROUP)
        at = append(checked(scale, requantize, codes, scales, output.format), target, at)


def quantize_rows(
    output: Output, piece: Piece, blocks: Iterable[tuple[int, int]], files: Files, target: int, at: Sequence[int]
) -> Sequence[int]:
    """These blocks of rows, (first, end) each, of a bf16 matrix; returns the places after them."""
    width = output.shape[1]
    for first, end in blocks:
        weights = checked(piece, widen, files.read(piece, 2 * first * width, 2 * (end - first) * width))
        at = append(quantize(weights.reshape(end - first, width), output.format), target, at)
    return at


def quantize_kv_b(output: Output, piece: Piece, files: Files, target: int, at: Sequence[int]) -> None:
    """``kv_b_proj`` [H·(nope + v), c] -> ``embed_q`` [H, c, nope] and ``unembed_out`` [H, v, c], each quantized."""
    heads, rank = output.tensors[0].shape[:2]
    nope = output.tensors[0].shape[2] * WORD_BITS // output.format.bits
    weights = checked(piece, widen, files.read(piece)).reshape(heads, -1, rank)
    for part, first in ((weights[:, :nope].swapaxes(1, 2), 0), (weights[:, nope:], 3)):
        place = at[first : first + 3]
        for head in part:
            place = append(quantize(np.ascontiguousarray(head), output.format), target, place)


def append(parts: Sequence[np.ndarray], target: int, at: Sequence[int]) -> list[int]:
    """Write codes, scales and biases each at its place; returns the places after them."""
    for part, place in zip(parts, at, strict=True):
        write_all(target, part, place)
    return [place + part.nbytes for part, place in zip(parts, at, strict=True)]


def checked(piece: Piece, function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function`` returns; a ValueError of its becomes an InputError that names file and tensor."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise InputError(piece.file, piece.name, "finite weights", error, FETCH_AGAIN) from None
