"""Where the weights of a model that is never whole in memory come from: tensor by tensor, or rows of one (K3.md §2).

Two sources with one interface: the synthetic checkpoint of a configuration and a seed, whose values are computed when
they are asked for and are those that ``fixtures.build`` would have written; and a folder of released shards, of which
headers and the asked byte ranges are read, and of which any part may not be there yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np

from fixtures import values
from port.source import Files, Piece
from reference.checkpoint import (
    LAYERS,
    TEXT,
    ExpertFormat,
    TensorSpec,
    check_mxfp4_widths,
    expert_format_of,
    expert_rows,
    layer_rows,
    text_top_rows,
)
from reference.config import K3Config
from reference.errors import InputError
from reference.headers import FETCH_AGAIN, INDEX, Stored, inside, parse_object, read_bytes, read_header
from reference.shards import NUMPY_DTYPES, check_values


class Missing(InputError):
    """A tensor that a partial download does not hold."""


class Source(Protocol):
    """``name`` says in one word or path what is read; ``read_bytes`` counts all bytes that came from a disk."""

    name: str
    config: K3Config
    expert_format: ExpertFormat
    read_bytes: int

    def has(self, spec: TensorSpec) -> bool:
        """Whether this tensor can be read."""

    def place(self, spec: TensorSpec) -> str:
        """Where a tensor lies, or would lie if it were there; "" where nobody knows."""

    def read(self, spec: TensorSpec, rows: slice | None = None) -> np.ndarray:
        """The tensor, or ``rows`` (a slice of step 1) of its first axis, in its stored dtype."""


class SyntheticSource:
    """The checkpoint (config, seed) of ``fixtures``: every value is computed, none is stored."""

    read_bytes = 0

    def __init__(self, name: str, config: K3Config, expert_format: ExpertFormat, seed: int) -> None:
        check_mxfp4_widths(config.text_config, expert_format, name)
        self.name, self.config, self.expert_format, self.seed = name, config, expert_format, seed

    def has(self, spec: TensorSpec) -> bool:
        return True

    def place(self, spec: TensorSpec) -> str:
        return ""

    def read(self, spec: TensorSpec, rows: slice | None = None) -> np.ndarray:
        return values.tensor(self.seed, spec, self.config, rows)


class ShardSource:
    """A folder in the released format, or a part of it: config.json and at least one shard, index or not.

    Raises InputError, naming file and tensor, for a shard that is damaged or cut short, and for a tensor of another
    shape or dtype than config.json asks for; a shard or a tensor that is not there is no error.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(folder, "folder", "a checkpoint folder", "no such folder", "check the path")
        self.name = str(folder)
        self.config = K3Config.from_file(folder / "config.json")
        self._shard_of = _weight_map(folder)
        named = {inside(folder, shard, folder / INDEX) for shard in self._shard_of.values()}
        files = sorted(path for path in named | set(folder.glob("*.safetensors")) if path.exists())
        if not files:
            raise InputError(folder, "*.safetensors", "at least one shard", "none", "fetch the shards of one layer")
        self._stored: dict[str, Stored] = {}
        self.read_bytes = 0
        for path in files:
            header = read_header(path)
            self._stored |= header
            self.read_bytes += min((tensor.begin for tensor in header.values()), default=0)
        self.expert_format: ExpertFormat = expert_format_of(self._stored)
        check_mxfp4_widths(self.config.text_config, self.expert_format, folder / "config.json")
        self._files, self._lock = Files(), Lock()

    def has(self, spec: TensorSpec) -> bool:
        stored = self._stored.get(spec.name)
        if stored is None:
            return False
        if stored.shape != spec.shape:
            raise InputError(stored.file, spec.name, f"shape {list(spec.shape)}", list(stored.shape), FETCH_AGAIN)
        if stored.dtype != spec.dtype:
            raise InputError(stored.file, spec.name, f"dtype {spec.dtype}", stored.dtype, "convert the tensor exactly")
        return True

    def place(self, spec: TensorSpec) -> str:
        return self._shard_of.get(spec.name, "")

    def read(self, spec: TensorSpec, rows: slice | None = None) -> np.ndarray:
        if not self.has(spec):
            where = self.place(spec) or "a shard that holds it"
            raise Missing(self.name, spec.name, "the tensor that the layer reads", "nothing", f"fetch {where}")
        stored = self._stored[spec.name]
        first, last, _ = (rows or slice(None)).indices(spec.shape[0])
        row = (stored.end - stored.begin) // spec.shape[0]
        piece, size = Piece(spec.name, str(stored.file), stored.begin, stored.end), max(0, last - first) * row
        with self._lock:
            data = self._files.read(piece, first * row, size)
            self.read_bytes += size
        array = data.view(NUMPY_DTYPES[stored.dtype]).reshape(-1, *spec.shape[1:])
        check_values(array, spec.name, stored.file)
        return array


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> shard, of the index if there is one: it also names what has not been fetched."""
    index = folder / INDEX
    if not index.exists():
        return {}
    weight_map = parse_object(read_bytes(index), index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(index, "weight_map", "tensor names with their shards", type(weight_map).__name__, FETCH_AGAIN)
    return weight_map


def top_specs(config: K3Config) -> dict[str, TensorSpec]:
    """The text tensors outside the layers, by their names after "language_model."."""
    return {name: TensorSpec(TEXT + name, shape, dtype) for name, shape, dtype in text_top_rows(config.text_config)}


def layer_specs(config: K3Config, layer: int) -> dict[str, TensorSpec]:
    """The tensors of the 0-based ``layer`` without its routed experts, by their names within it."""
    prefix = f"{LAYERS}{layer}."
    return {
        name: TensorSpec(prefix + name, shape, dtype) for name, shape, dtype in layer_rows(config.text_config, layer)
    }


def expert_specs(config: K3Config, expert_format: ExpertFormat, layer: int, number: int) -> Iterator[TensorSpec]:
    """The tensors of one routed expert."""
    prefix = f"{LAYERS}{layer}.block_sparse_moe.experts.{number}."
    for name, shape, dtype in expert_rows(config.text_config, expert_format):
        yield TensorSpec(prefix + name, shape, dtype)
