"""The strict reader of a checkpoint folder: config, index, shards (K3.md §2). numpy only, no tensor library.

Everything that headers can tell is checked when the folder is opened, before any weight is read; values are checked
as each tensor is read. Nothing is guessed and nothing is left over: the tensors of the folder are exactly those that
its ``config.json`` asks for.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from reference.checkpoint import BYTES, TensorSpec, expert_format_of, tensor_specs
from reference.config import K3Config
from reference.errors import InputError
from reference.mxfp4 import NAN_SCALE

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NUMPY_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype("<f4"), "U8": np.dtype(np.uint8)}
LENGTH_BYTES = 8
FETCH_AGAIN = "fetch the file again"


class Stored(NamedTuple):
    """Where one tensor lies: its file, safetensors dtype, shape, and byte range in that file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Shards:
    """A checkpoint folder whose headers have been checked against its configuration.

    ``config`` K3Config; ``expert_format`` "mxfp4" or "dense", told from the names; ``specs`` name -> TensorSpec of the
    whole checkpoint, vision included; ``names`` in the same fixed order; ``total_size`` bytes of all tensors.

    Raises InputError, naming the file and the tensor, for a missing or unreadable file, a damaged header, an index
    that points outside the folder or disagrees with its shards, and a tensor that is missing, unknown, or of another
    shape or dtype than the configuration asks for.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(folder, "folder", "a checkpoint folder", "no such folder", "check the path")
        self.config = K3Config.from_file(self.folder / "config.json")
        listing = self.folder / INDEX
        if not listing.exists() and (self.folder / SINGLE).exists():
            listing = self.folder / SINGLE
            self._stored = read_header(inside(self.folder, SINGLE, listing))
        else:
            self._stored = read_indexed(self.folder, listing)
        self.expert_format = expert_format_of(self._stored)
        specs = tensor_specs(self.config, self.expert_format, self.folder / "config.json")
        self.specs: dict[str, TensorSpec] = {spec.name: spec for spec in specs}
        self.names = tuple(self.specs)
        self.total_size = sum(spec.nbytes for spec in self.specs.values())
        check_against_specs(self._stored, self.specs, listing)
        self._maps: dict[Path, np.memmap] = {}

    def file_of(self, name: str) -> Path:
        """The shard that holds ``name``."""
        return self._stored[name].file

    def read(self, name: str) -> np.ndarray:
        """One tensor as a read-only, memory-mapped array: bfloat16 (ml_dtypes), float32 or uint8.

        Raises InputError if a float is NaN or infinite, or if a byte of an expert's scale is 255, which is NaN (§8).
        """
        stored = self._stored[name]
        if stored.file not in self._maps:
            self._maps[stored.file] = np.memmap(stored.file, np.uint8, mode="r")
        data = self._maps[stored.file][stored.begin : stored.end]
        array = np.asarray(data).view(NUMPY_DTYPES[stored.dtype]).reshape(stored.shape)
        check_values(array, name, stored.file)
        return array


def read_indexed(folder: Path, index: Path) -> dict[str, Stored]:
    """Every tensor of a sharded checkpoint; index and shards must name the same tensors, and total_size must hold."""
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
    check_total_size(content, stored, index)
    return stored


def check_total_size(content: dict[str, Any], stored: dict[str, Stored], index: Path) -> None:
    metadata = content.get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(tensor.end - tensor.begin for tensor in stored.values())
    if type(claimed) is not int or claimed != found:
        mend = "fetch index and shards of one revision"
        raise InputError(index, "metadata.total_size", f"{found}, the bytes of all tensors", repr(claimed), mend)


def inside(folder: Path, shard: str, index: Path) -> Path:
    """The path of ``shard``, which must be a file in ``folder``; symbolic links may not lead out of it."""
    pure = PurePosixPath(shard)
    outside = pure.is_absolute() or ".." in pure.parts or "\\" in shard or "\0" in shard or not pure.parts
    path = folder / shard
    if outside or not path.resolve().is_relative_to(folder.resolve()):
        mend = "put the shards beside the index and use plain file names"
        raise InputError(index, repr(shard), "a shard inside the checkpoint folder", "a path that leaves it", mend)
    return path


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
    if dtype not in list(BYTES):
        raise InputError(path, name, f"a dtype among {', '.join(BYTES)}", repr(dtype), "convert the tensor")
    if not is_counts(shape) or not is_counts(offsets) or len(offsets) != 2:
        raise InputError(path, name, "a shape and two data offsets", repr((shape, offsets)), FETCH_AGAIN)
    begin, end = offsets
    if end - begin != prod(shape) * BYTES[dtype]:
        expected = f"{prod(shape) * BYTES[dtype]} bytes for {dtype} {shape}"
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


def check_against_specs(stored: dict[str, Stored], specs: dict[str, TensorSpec], listing: Path) -> None:
    """Exactly the tensors of ``specs``, each with its shape and dtype."""
    for name in specs:
        if name not in stored:
            mend = "fetch the whole checkpoint, or the config.json that belongs to it"
            raise InputError(listing, name, "the tensor that config.json asks for", "nothing", mend)
    for name, tensor in stored.items():
        if name not in specs:
            mend = "remove it, or correct the config.json that does not ask for it"
            raise InputError(tensor.file, name, "only tensors that config.json asks for", "this one too", mend)
        spec, mend = specs[name], "fetch the shard again, or the config.json that belongs to it"
        if tensor.shape != spec.shape:
            raise InputError(tensor.file, name, f"shape {list(spec.shape)}", list(tensor.shape), mend)
        if tensor.dtype != spec.dtype:
            raise InputError(tensor.file, name, f"dtype {spec.dtype}", tensor.dtype, "convert the tensor exactly")


def check_values(array: np.ndarray, name: str, file: Path) -> None:
    """No NaN and no infinity in a float tensor, no byte 255 in an E8M0 scale."""
    if array.dtype != np.uint8:
        good, expected = np.isfinite(array), "finite numbers"
    elif name.endswith(".weight_scale"):
        good, expected = array != NAN_SCALE, "E8M0 scales below 255, which is NaN"
    else:
        return
    if not good.all():
        where = tuple(int(axis) for axis in np.unravel_index(int(np.argmin(good)), array.shape))
        raise InputError(file, name, expected, f"{array[where]} at {list(where)}", FETCH_AGAIN)
