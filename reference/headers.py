"""What a checkpoint folder says of itself: index and safetensors headers, without reading any weight (K3.md §2).

Standard library only: half a million names are compared in a moment, and nothing else is loaded for it.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from reference.errors import InputError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LENGTH_BYTES = 8
FETCH_AGAIN = "fetch the file again"
HEADER_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of every dtype that a safetensors header may name; which of them are right is the schema's to say."""


class Stored(NamedTuple):
    """Where one tensor lies: its file, safetensors dtype, shape, and byte range in that file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_indexed(folder: Path, index: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Every tensor of a sharded checkpoint, and the index; index and shards must name the same tensors."""
    content = parse_object(read_bytes(index), index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(index, "weight_map", "tensor names with their shards", weight_map, FETCH_AGAIN)
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise InputError(index, name, "the name of a shard", repr(shard), FETCH_AGAIN)
    headers = {shard: read_header(inside(folder, shard, index)) for shard in sorted(set(weight_map.values()))}
    for shard, header in headers.items():
        for name in header:
            if weight_map.get(name) != shard:
                place = f"in {weight_map[name]}" if name in weight_map else "not listed"
                raise InputError(
                    folder / shard, name, f"a tensor that {INDEX} places here", place, "make the index agree"
                )
    stored = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise InputError(folder / shard, name, f"the tensor that {INDEX} places here", "nothing", FETCH_AGAIN)
        stored[name] = headers[shard][name]
    return stored, content


def check_total_size(content: dict[str, Any], stored: dict[str, Stored], index: Path) -> None:
    metadata = content.get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(tensor.end - tensor.begin for tensor in stored.values())
    if type(claimed) is not int or claimed != found:
        mend = "fetch index and shards of one revision"
        raise InputError(index, "metadata.total_size", f"{found}, the bytes of all tensors", repr(claimed), mend)


def inside(folder: Path, shard: str, index: Path) -> Path:
    """The path of ``shard``, whose name must not lead out of ``folder``. The file itself may be a symbolic link: in a
    hub's cache every shard is one."""
    pure = PurePosixPath(shard)
    if pure.is_absolute() or ".." in pure.parts or "\\" in shard or "\0" in shard or not pure.parts:
        mend = "put the shards beside the index and use plain file names"
        raise InputError(index, repr(shard), "a shard inside the checkpoint folder", "a path that leaves it", mend)
    return folder / shard


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> InputError:
    found = "nothing there" if isinstance(error, FileNotFoundError) else type(error).__name__
    return InputError(path, "file", "a readable file", found, "fetch the missing file or check the path")


def parse_object(data: bytes, path: Path) -> dict[str, Any]:
    """A JSON object in which no name stands twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise InputError(path, twice, "each name once", "the name twice", FETCH_AGAIN)
        return result

    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(path, "content", "a JSON object", error, FETCH_AGAIN) from None
    if not isinstance(content, dict):
        raise InputError(path, "content", "a JSON object", type(content).__name__, FETCH_AGAIN)
    return content


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file: 8 bytes of header length, a JSON header, then the data without gaps."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < LENGTH_BYTES or length > size - LENGTH_BYTES:
                found = f"a header of {length} bytes in a file of {size}"
                raise InputError(path, "header", "a whole safetensors header", found, FETCH_AGAIN)
            header = parse_object(file.read(length), path)
    except OSError as error:
        raise unreadable(path, error) from None
    header.pop("__metadata__", None)
    start = LENGTH_BYTES + length
    stored = {name: stored_tensor(path, name, entry, start) for name, entry in header.items()}
    check_gapless(path, stored, start, size)
    return stored


def stored_tensor(path: Path, name: str, entry: Any, start: int) -> Stored:
    """One entry of a header; the byte range must be as long as shape and dtype say."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in HEADER_BYTES:
        raise InputError(path, name, f"a dtype among {', '.join(HEADER_BYTES)}", repr(dtype), "convert the tensor")
    if not is_counts(shape) or not is_counts(offsets) or len(offsets) != 2:
        raise InputError(path, name, "a shape and two data offsets", repr((shape, offsets)), FETCH_AGAIN)
    begin, end = offsets
    if end - begin != prod(shape) * HEADER_BYTES[dtype]:
        expected = f"{prod(shape) * HEADER_BYTES[dtype]} bytes for {dtype} {shape}"
        raise InputError(path, name, expected, f"{end - begin} bytes", FETCH_AGAIN)
    return Stored(path, dtype, tuple(shape), start + begin, start + end)


def is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def check_gapless(path: Path, stored: dict[str, Stored], start: int, size: int) -> None:
    """The tensors must fill the file after its header, without gap or overlap: else it is truncated or damaged."""
    position = start
    for name, tensor in sorted(stored.items(), key=lambda item: item[1].begin):
        if tensor.begin != position:
            raise InputError(path, name, f"data from byte {position}", f"from byte {tensor.begin}", FETCH_AGAIN)
        position = tensor.end
        if position > size:
            found = f"a file of {size} bytes (truncated)"
            raise InputError(path, name, f"data up to byte {position}", found, FETCH_AGAIN)
    if position != size:
        raise InputError(path, "data", f"the file to end at byte {position}", f"{size} bytes", FETCH_AGAIN)
