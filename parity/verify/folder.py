"""The converted folder's index and headers, read so that one damaged shard does not hide the rest (K3.md §2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parity.verify.declared import LAYER, Entry
from parity.verify.findings import Problem
from reference.errors import InputError
from reference.headers import (
    INDEX,
    LENGTH_BYTES,
    Stored,
    check_gapless,
    inside,
    parse_object,
    read_bytes,
    stored_tensor,
)

Places = Mapping[str, Stored]


def read_folder(folder: Path) -> tuple[dict[str, Stored], list[Problem]]:
    """Every tensor that the shards have, and what is wrong with index and headers.

    Raises InputError where there is no index to go by. A tensor's bytes may lie beyond the end of a truncated file.
    """
    index = folder / INDEX
    content = parse_object(read_bytes(index), index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(index, "weight_map", "tensor names with their shards", repr(weight_map)[:60], "convert again")
    stored: dict[str, Stored] = {}
    problems: list[Problem] = []
    for shard in sorted(set(weight_map.values())):
        found = read_shard(inside(folder, shard, index), problems)
        for name in sorted(found.keys() & stored.keys()):
            problems.append(
                Problem("index", name, f"stands in {stored[name].file.name} and in {shard}", layer_of(name))
            )
        stored |= found
    problems += index_problems(weight_map, stored)
    problems += total_problems(content, stored)
    stray = {path.name for path in folder.glob("*.safetensors")} - set(weight_map.values())
    problems += [Problem("shard", name, f"no tensor of {INDEX} lies there") for name in sorted(stray)]
    return stored, problems


def read_shard(path: Path, problems: list[Problem]) -> dict[str, Stored]:
    """The tensors of one shard; what is wrong goes to ``problems``, and as much as can be told is returned."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = parse_object(file.read(min(length, size)), path)
    except FileNotFoundError:
        problems.append(Problem("shard", path.name, f"not there, though {INDEX} names it"))
        return {}
    except InputError as error:
        problems.append(Problem("shard", path.name, f"no safetensors header: {error.found}"))
        return {}
    except OSError as error:
        problems.append(Problem("shard", path.name, f"cannot be read: {error.strerror}"))
        return {}
    header.pop("__metadata__", None)
    stored = {}
    for name, entry in header.items():
        try:
            stored[name] = stored_tensor(path, name, entry, LENGTH_BYTES + length)
        except InputError as error:
            problems.append(Problem("shard", name, f"expected {error.expected}, found {error.found}", layer_of(name)))
    try:
        check_gapless(path, stored, LENGTH_BYTES + length, size)
    except InputError as error:
        layer = layer_of(error.subject)
        problems.append(
            Problem("shard", path.name, f"{error.subject}: expected {error.expected}, found {error.found}", layer)
        )
    return stored


def index_problems(weight_map: Mapping[str, str], stored: Places) -> Iterator[Problem]:
    """Index and headers must name the same tensors in the same shards; whether they are the right ones is not asked."""
    for name, place in stored.items():
        if name not in weight_map:
            yield Problem("index", name, f"lies in {place.file.name}, but not in {INDEX}", layer_of(name))
        elif weight_map[name] != place.file.name:
            what = f"lies in {place.file.name}, in {weight_map[name]} by {INDEX}"
            yield Problem("index", name, what, layer_of(name))
    for name, shard in weight_map.items():
        if name not in stored:
            yield Problem("index", name, f"not in {shard}, where {INDEX} has it", layer_of(name))


def total_problems(content: dict[str, Any], stored: Places) -> Iterator[Problem]:
    metadata = content.get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(tensor.end - tensor.begin for tensor in stored.values())
    if claimed != found:
        yield Problem("index", INDEX, f"metadata.total_size is {claimed!r}, all tensors have {found} bytes")


def coverage_problems(stored: Places, declared: list[Entry]) -> Iterator[Problem]:
    """Exactly the tensors that the tier promises, each with its dtype and shape."""
    expected = {}
    for entry in declared:
        for name, (dtype, shape) in entry.tensors().items():
            expected[name] = entry
            place = {"layer": entry.layer, "projection": entry.projection}
            found = stored.get(name)
            if found is None:
                yield Problem("missing", name, f"not there; {dtype} {list(shape)} is due", **place)
                continue
            if found.dtype != dtype:
                yield Problem("dtype", name, f"expected {dtype}, found {found.dtype}", **place)
            if found.shape != shape:
                what = f"expected {list(shape)}, found {list(found.shape)}"
                yield Problem("shape", name, what, looks_like=other_shape(entry, shape, found.shape), **place)
    for name in stored.keys() - expected.keys():
        yield Problem("extra", name, "a tensor that the tier does not have", layer_of(name))


def other_shape(entry: Entry, expected: tuple[int, ...], found: tuple[int, ...]) -> str:
    """What a wrong shape tells: other experts' count, another width of codes, or the axes exchanged."""
    if len(found) != len(expected):
        return ""
    if entry.experts is not None and found[1:] == expected[1:]:
        whole = "the plan was not followed here" if found[0] > expected[0] else "experts are missing"
        return f"{found[0]} experts where {expected[0]} stay: {whole}"
    if entry.coding is not None and found[:-1] == expected[:-1]:
        bits = entry.coding.bits * found[-1] / expected[-1]
        return f"codes of {bits:g} bits where the tier has {entry.coding.bits}"
    return "transposed" if found[-2:] == expected[-2:][::-1] else ""


def layer_of(name: str) -> int | None:
    found = LAYER.match(name)
    return int(found[1]) if found else None
