"""Where each of a checkpoint's tensors lies, in 28 bytes a tensor: names are kept as hashes (K3.md §2).

A dictionary of half a million names takes hundreds of megabytes, more than everything else that a conversion holds.
Headers are read one shard at a time and the index in pieces, and only numbers stay. Everything that the strict reader
``reference.shards.Shards`` checks is checked here too; what does not agree is left to it to name.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from reference.checkpoint import ExpertFormat, expert_format_of, tensor_specs
from reference.config import K3Config
from reference.headers import INDEX, SINGLE, inside, read_header
from reference.shards import Shards

CHUNK = 1 << 18
PAIR = re.compile(rb'"([^"\\]*)"\s*:\s*"([^"\\]*)"')
START, TOTAL = re.compile(rb'"weight_map"\s*:\s*\{'), re.compile(rb'"total_size"\s*:\s*(\d+)')
NOT_THERE = -1


class Disagreement(Exception):
    """Configuration, index and headers do not say the same, or are not written as expected."""


class Table:
    """``files`` the shards; per tensor, sorted by the hash of its name, its shard, its first byte and its length."""

    def __init__(self, folder: Path, config: K3Config) -> None:
        """Raises InputError, as ``Shards`` does, for whatever headers, index and configuration can tell."""
        self.listing = folder / INDEX
        if not self.listing.exists() and (folder / SINGLE).exists():
            self.listing = folder / SINGLE
        try:
            self._read(folder, config)
        except Disagreement:
            shards = Shards(folder)
            self.expert_format = shards.expert_format
            self.files = sorted({shards.file_of(name) for name in shards.names})
            headers = ((number, read_header(file)) for number, file in enumerate(self.files))
            self._keep(headers, config)

    def _read(self, folder: Path, config: K3Config) -> None:
        listed = None
        if self.listing.name == INDEX:
            names, listed, total = read_listing(self.listing)
            self.files = [inside(folder, name, self.listing) for name in names]
        else:
            self.files = [self.listing]
        if not all(file.is_file() for file in self.files):
            raise Disagreement
        self._keep(((number, read_header(file)) for number, file in enumerate(self.files)), config)
        if listed is not None and not (
            np.array_equal(listed[0], self._hashes) and np.array_equal(listed[1], self._shards)
        ):
            raise Disagreement
        if listed is not None and total != int(self._sizes.sum()):
            raise Disagreement

    def _keep(self, headers: Iterable, config: K3Config) -> None:
        """Numbers of every header; Disagreement unless they are exactly what the configuration asks for."""
        columns, kinds, self.expert_format = (array("Q"), array("H"), array("q"), array("q")), array("H"), None
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        for number, header in headers:
            for name, tensor in header.items():
                row = (name_hash(name), number, tensor.begin, tensor.end - tensor.begin)
                for column, value in zip(columns, row, strict=True):
                    column.append(value)
                kinds.append(known.setdefault((tensor.dtype, tensor.shape), len(known)))
                if self.expert_format is None and ".block_sparse_moe.experts." in name:
                    self.expert_format = expert_format_of([name])
        self.expert_format: ExpertFormat = self.expert_format or "mxfp4"
        hashes, shards, begins, sizes = (np.frombuffer(column, column.typecode) for column in columns)
        order = np.argsort(hashes)
        self._hashes, self._shards, self._begins, self._sizes = (c[order] for c in (hashes, shards, begins, sizes))
        asked = asked_for(config, self.expert_format, known)
        if not np.array_equal(self._hashes, asked[0]) or not np.array_equal(
            np.frombuffer(kinds, kinds.typecode)[order], asked[1]
        ):
            raise Disagreement

    def place(self, name: str) -> tuple[Path, int, int]:
        """(file, first byte, byte after the last) of a tensor that the configuration asks for."""
        row = int(np.searchsorted(self._hashes, np.uint64(name_hash(name))))
        begin = int(self._begins[row])
        return self.files[self._shards[row]], begin, begin + int(self._sizes[row])


def name_hash(name: str) -> int:
    """64 bits; two of half a million names share them once in a hundred million checkpoints, and would be refused."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def asked_for(
    config: K3Config, expert_format: ExpertFormat, known: dict[tuple[str, tuple[int, ...]], int]
) -> tuple[np.ndarray, np.ndarray]:
    """Hashes and kinds of the tensors that the configuration asks for, sorted by hash."""
    hashes, kinds = array("Q"), array("i")
    for spec in tensor_specs(config, expert_format):
        hashes.append(name_hash(spec.name))
        kinds.append(known.get((spec.dtype, spec.shape), NOT_THERE))
    return sorted_by_hash(hashes, kinds)


def sorted_by_hash(hashes: array, values: array) -> tuple[np.ndarray, np.ndarray]:
    keys = np.frombuffer(hashes, hashes.typecode)
    order = np.argsort(keys)
    if len(keys) and (np.diff(keys[order]) == 0).any():
        raise Disagreement
    return keys[order], np.frombuffer(values, values.typecode)[order]


def read_listing(index: Path) -> tuple[list[str], tuple[np.ndarray, np.ndarray], int]:
    """(shards, (hashes of the names, numbers of their shards), ``total_size``) of an index, read in pieces."""
    hashes, numbers, shards = array("Q"), array("H"), {}
    for name, shard in pairs(index):
        hashes.append(name_hash(name))
        numbers.append(shards.setdefault(shard, len(shards)))
    if not shards:
        raise Disagreement
    return list(shards), sorted_by_hash(hashes, numbers), total_size(index)


def pairs(index: Path) -> Iterator[tuple[str, str]]:
    """The names and shards that stand behind ``"weight_map"``; Disagreement where a file looks otherwise."""
    try:
        with index.open("rb") as file:
            text, found = b"", None
            while found is None:
                chunk = file.read(CHUNK)
                if not chunk:
                    raise Disagreement
                text += chunk
                found = START.search(text)
            text, more = text[found.end() :], True
            while more:
                chunk = file.read(CHUNK)
                text, more, end = text + chunk, bool(chunk), 0
                for pair in PAIR.finditer(text):
                    if text[end : pair.start()].strip(b" \t\r\n,"):
                        return
                    end = pair.end()
                    yield pair[1].decode(), pair[2].decode()
                text = text[end:]
    except (OSError, UnicodeDecodeError):
        raise Disagreement from None


def total_size(index: Path) -> int:
    """``metadata.total_size``, which stands at one end of the file; every brace of it must be closed."""
    size, opened = index.stat().st_size, 0
    with index.open("rb") as file:
        first = file.read(CHUNK)
        file.seek(max(0, size - CHUNK))
        last = file.read()
        file.seek(0)
        while chunk := file.read(CHUNK):
            opened += chunk.count(b"{") - chunk.count(b"}")
    found = TOTAL.search(first) or TOTAL.search(last)
    if not found or opened:
        raise Disagreement
    return int(found[1])
