"""Which tensors a checkpoint should have, and which it has: names, shapes, dtypes, shards, bytes.

From a configuration and an index alone the names and the total are checked; from a folder also every shard's header,
without reading a byte of tensor data.
"""

from __future__ import annotations

import gc
import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from port.executors import executor, run_all
from reference.checkpoint import (
    ExpertFormat,
    TensorSpec,
    check_mxfp4_widths,
    expert_format_of,
    names_digest,
    tensor_rows,
    tensor_specs,
)
from reference.config import K3Config
from reference.errors import InputError
from reference.headers import read_header

PRESETS = Path(__file__).parents[1] / "fixtures" / "presets"
SHARD_NAME = re.compile(r"^model-(\d{5,})-of-(\d{5,})\.safetensors$")


@dataclass
class Coverage:
    """``problems`` are (kind, tensor or file, what); kinds: missing, extra, shape, dtype, shard, total."""

    expected: int
    found: int
    expected_bytes: int
    found_bytes: int | None
    digest: str
    problems: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def matched(self) -> int:
        """How many tensors are there as they should be."""
        return self.expected - len({name for kind, name, _ in self.problems if kind in ("missing", "shape", "dtype")})


def load_config(source: str) -> K3Config:
    """The configuration in a file or folder, or the preset of that name; InputError otherwise."""
    preset = PRESETS / f"{source}.json"
    return K3Config.from_file(preset if preset.is_file() and not Path(source).exists() else Path(source))


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: building half a million strings would trigger it hundreds of times."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def load_index(path: Path) -> dict[str, Any]:
    """A ``model.safetensors.index.json``, plain or gzipped; InputError unless it has weight_map and total_size."""
    try:
        raw = path.read_bytes()
        with uncollected():
            document = from_json(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, cache_strings="none")
    except FileNotFoundError:
        raise InputError(path, "file", "an index", "nothing there", "check the path") from None
    except (OSError, EOFError, ValueError, zlib.error, RecursionError) as error:
        raise InputError(path, "content", "a JSON index, plain or gzipped", error, "fetch the file again") from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict):
        found = "no weight_map" if isinstance(document, dict) else type(document).__name__
        raise InputError(path, "weight_map", "tensor name -> shard file", found, "give a safetensors index")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise InputError(path, name, "the name of a shard file", repr(shard), "fetch the index again")
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if type(total) is not int:
        raise InputError(path, "metadata.total_size", "an integer", repr(total), "give a safetensors index")
    return {"weight_map": weight_map, "total_size": total}


def index_coverage(config: K3Config, index: dict[str, Any], source: object) -> Coverage:
    """Names and total of an index against the schema; shard files must be numbered 1..n of n and inside the folder."""
    weight_map = index["weight_map"]
    expert_format = expert_format_of(weight_map)
    check_mxfp4_widths(config.text_config, expert_format, source)
    count, total, missing = 0, 0, []
    with uncollected():
        for names, nbytes in grouped_names(config, expert_format):
            count += len(names)
            total += nbytes
            missing += [name for name in names if name not in weight_map]
    result = Coverage(count, len(weight_map), total, index["total_size"], names_digest(weight_map))
    result.problems += [("missing", name, "the index lacks it") for name in sorted(missing)]
    if len(weight_map) > count - len(missing):
        known = {name for names, _ in grouped_names(config, expert_format) for name in names}
        extra = sorted(weight_map.keys() - known)
        result.problems += [("extra", name, "no such tensor in this configuration") for name in extra]
    if index["total_size"] != total:
        result.problems.append(
            ("total", "metadata.total_size", f"{total:,} bytes expected, {index['total_size']:,} stated")
        )
    result.problems += _shard_name_problems(weight_map)
    return result


def grouped_names(config: K3Config, expert_format: ExpertFormat) -> Iterator[tuple[list[str], int]]:
    """(names, bytes) of every part: half a million names must not take longer than reading them."""
    for prefixes, rows in tensor_rows(config, expert_format):
        endings = [row[0] for row in rows]
        nbytes = sum(TensorSpec(*row).nbytes for row in rows)
        yield [prefix + ending for prefix in prefixes for ending in endings], len(prefixes) * nbytes


def _shard_name_problems(weight_map: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    shards = sorted(set(weight_map.values()))
    outside = [name for name in shards if "/" in name or "\\" in name or name in ("", ".", "..")]
    for name in outside:
        yield "shard", name, "a shard must be a file name inside the folder"
    numbers = [(int(match[1]), int(match[2])) for name in shards if (match := SHARD_NAME.match(name))]
    if len(numbers) == len(shards) and shards and sorted(numbers) != [(i + 1, len(shards)) for i in range(len(shards))]:
        of = {count for _, count in numbers}
        gaps = sorted(set(range(1, max(of) + 1)) - {number for number, _ in numbers})
        yield (
            "shard",
            shards[0],
            f"shards are not 1..n of n: {len(shards)} files say 'of {sorted(of)}', {gaps[:5]} hold no tensor",
        )


def folder_coverage(config: K3Config, folder: Path, workers: int = 1, scheduler: str | None = None) -> Coverage:
    """Index and shard headers of a folder against the schema; tensor data is never read.

    The headers are read by ``workers`` processes, or by the workers of a dask ``scheduler``; the result is the same.
    """
    index_file = folder / "model.safetensors.index.json"
    index = load_index(index_file)
    result = index_coverage(config, index, folder / "config.json")
    specs = {spec.name: spec for spec in tensor_specs(config, expert_format_of(index["weight_map"]))}
    seen: dict[str, str] = {}
    bad = {name for kind, name, _ in result.problems if kind == "shard"}
    shards = [shard for shard in sorted(set(index["weight_map"].values())) if shard not in bad]
    headers = headers_of([folder / shard for shard in shards], workers, scheduler)
    for shard in shards:
        result.problems += _header_problems(folder / shard, headers[folder / shard], specs, index["weight_map"], seen)
    for name, shard in index["weight_map"].items():
        if name not in seen and name in specs:
            result.problems.append(("missing", name, f"the index says {shard}, whose header lacks it"))
    return result


def headers_of(paths: list[Path], workers: int, scheduler: str | None) -> dict[Path, dict | None]:
    """Each shard's header; None where the file is not there."""
    with executor(workers, scheduler) as (pool, ahead):
        return dict(run_all(pool, ahead, _header_of, paths))


def _header_of(path: Path) -> tuple[Path, dict | None]:
    return path, read_header(path) if path.is_file() else None


def _header_problems(
    path: Path, header: dict | None, specs: dict[str, TensorSpec], weight_map: dict[str, str], seen: dict[str, str]
) -> Iterator[tuple[str, str, str]]:
    if header is None:
        yield "shard", path.name, "the file is not there"
        return
    for name, stored in header.items():
        if name in seen:
            yield "shard", name, f"stands in {seen[name]} and in {path.name}"
        seen[name] = path.name
        if name not in specs:
            if name not in weight_map:
                yield "extra", name, f"in {path.name}, not in the index and not in this configuration"
            continue
        if name not in weight_map:
            yield "shard", name, f"in {path.name}, but the index does not list it"
        elif weight_map[name] != path.name:
            yield "shard", name, f"the index says {weight_map[name]}, it is in {path.name}"
        if stored.shape != specs[name].shape:
            yield "shape", name, f"{list(specs[name].shape)} expected, {list(stored.shape)} in {path.name}"
        if stored.dtype != specs[name].dtype:
            yield "dtype", name, f"{specs[name].dtype} expected, {stored.dtype} in {path.name}"
