"""Output shards: which outputs share a file, the file's header, and how a shard is written, header first (K3.md §15).

A shard is a unit of work. The cut depends on the outputs alone, never on who writes them, and every byte has its place
before any is written: so the files are the same whoever writes them, in whatever order.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from port.source import Files, Piece, write_all
from port.tiers import Output, OutputTensor
from port.writers import write_output
from reference.checkpoint import ExpertFormat
from reference.errors import InputError
from reference.headers import LENGTH_BYTES

SMALLEST_SHARD, LARGEST_SHARD, SHARDS = 64 << 20, 5 << 30, 32
DISK_MEND = "free disk space or choose another target, then resume"


@dataclass(frozen=True)
class Task:
    """One shard to write: ``pieces`` are the source tensors of each of ``outputs``, in order.

    The file is written in ``scratch`` under a name of its own and then renamed to ``folder``/``name``.
    """

    name: str
    outputs: tuple[Output, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    expert_format: ExpertFormat
    folder: str
    scratch: str
    sync: bool = True


def default_shard_bytes(total: int) -> int:
    """About 32 shards, none above 5 GiB, and no small ones."""
    return min(max(total // SHARDS, SMALLEST_SHARD), LARGEST_SHARD)


def cut(written: Sequence[Output], shard_bytes: int) -> list[tuple[Output, ...]]:
    """Consecutive outputs into shards of at most ``shard_bytes``; a larger output has a shard of its own."""
    shards: list[list[Output]] = []
    room = 0
    for output in written:
        if not shards or output.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(output)
        room -= output.nbytes
    return [tuple(shard) for shard in shards]


def shard_name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def header(outputs: Sequence[Output]) -> tuple[bytes, dict[str, int]]:
    """The header of a shard, its length included, and tensor name -> offset in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, position = {}, 0
    for tensor in (tensor for output in outputs for tensor in output.tensors):
        offsets[tensor.name], end = position, position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]
        }  # fmt: skip
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    start = LENGTH_BYTES + len(text)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, {name: start + at for name, at in offsets.items()}


def shard_size(outputs: Sequence[Output]) -> int:
    return len(header(outputs)[0]) + sum(output.nbytes for output in outputs)


def write_shard(task: Task) -> tuple[str, ...] | None:
    """Write one shard; returns None, or the five parts of the InputError that stopped it: errors of that kind do not
    survive the way back from another process."""
    part = Path(task.scratch, f"{task.name}.{uuid.uuid4().hex}")
    try:
        _write(task, part)
    except InputError as error:
        part.unlink(missing_ok=True)
        return error.where, error.subject, error.expected, str(error.found), error.mend
    return None


def _write(task: Task, part: Path) -> None:
    current = task.outputs[0]
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            first, offsets = header(task.outputs)
            write_all(descriptor, np.frombuffer(first, np.uint8), 0)
            with Files() as files:
                for current, pieces in zip(task.outputs, task.pieces, strict=True):
                    at = [offsets[tensor.name] for tensor in current.tensors]
                    write_output(current, pieces, task.expert_format, files, descriptor, at)
            if task.sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(part, Path(task.folder, task.name))
    except OSError as error:
        where, subject = Path(task.folder, task.name).name, current.tensors[0].name
        raise InputError(where, subject, "room to write it", error.strerror, DISK_MEND) from None


def tensors_of(outputs: Sequence[Output]) -> list[OutputTensor]:
    return [tensor for output in outputs for tensor in output.tensors]
