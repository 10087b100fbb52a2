"""The released checkpoint as byte ranges: where each tensor lies, and how its bytes are read or passed on (K3.md §2).

Nothing is memory-mapped: pages of a map would count as this program's memory, pages of the kernel's file cache do not.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from port.source_table import Table
from reference.checkpoint import ExpertFormat
from reference.config import K3Config, read_json
from reference.errors import InputError
from reference.headers import FETCH_AGAIN

OPEN_FILES = 64
COPY_BYTES = 1 << 22
"""Pieces in which bytes pass through memory where the kernel cannot copy them between the files itself."""
NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}


class Piece(NamedTuple):
    """One tensor's bytes: its name, its file, and its byte range in that file."""

    name: str
    file: str
    begin: int
    end: int


class Source:
    """A checkpoint folder whose headers have been checked against its configuration, as ``reference.shards.Shards``.

    ``config`` K3Config, ``document`` the same as JSON, ``expert_format``, ``files`` the listing and all shards.
    Raises InputError naming file and tensor for whatever headers can tell, before any weight is read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(folder, "folder", "a checkpoint folder", "no such folder", "check the path")
        self.config = K3Config.from_file(self.folder / "config.json")
        self.document = read_json(self.folder / "config.json")
        self._table = Table(self.folder, self.config)
        self.expert_format: ExpertFormat = self._table.expert_format
        self.listing = self._table.listing
        self.files = sorted(self._table.files)

    def piece(self, name: str) -> Piece:
        """Where the tensor lies; ``name`` must be one that the configuration asks for."""
        file, begin, end = self._table.place(name)
        return Piece(name, str(file.absolute()), begin, end)


class Files:
    """Open source files, a few at a time. Raises InputError, naming file and tensor, where bytes cannot be had."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, piece: Piece, begin: int = 0, size: int | None = None) -> np.ndarray:
        """``size`` bytes of the tensor from byte ``begin`` of it, else all of it: uint8 [size]."""
        size = piece.end - piece.begin - begin if size is None else size
        data = np.empty(size, np.uint8)
        view, done = memoryview(data), 0
        while done < size:
            try:
                count = os.preadv(self._descriptor(piece), [view[done:]], piece.begin + begin + done)
            except OSError as error:
                raise InputError(piece.file, piece.name, "readable data", error.strerror, FETCH_AGAIN) from None
            if count == 0:
                raise truncated(piece)
            done += count
        return data

    def copy(self, piece: Piece, target: int, offset: int) -> None:
        """The whole tensor into the file ``target`` at ``offset``. An OSError is the target's."""
        done, size = 0, piece.end - piece.begin
        descriptor = self._descriptor(piece)
        while done < size and hasattr(os, "copy_file_range"):
            try:
                count = os.copy_file_range(descriptor, target, size - done, piece.begin + done, offset + done)
            except OSError as error:
                if error.errno not in NO_KERNEL_COPY:
                    raise
                break
            if count == 0:
                raise truncated(piece)
            done += count
        while done < size:
            data = self.read(piece, done, min(COPY_BYTES, size - done))
            write_all(target, data, offset + done)
            done += len(data)

    def _descriptor(self, piece: Piece) -> int:
        if piece.file not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                self._open[piece.file] = os.open(piece.file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                found = "nothing there" if isinstance(error, FileNotFoundError) else error.strerror
                mend = "bring the shard back and resume"
                raise InputError(piece.file, piece.name, "the shard that holds it", found, mend) from None
        return self._open[piece.file]


def write_all(descriptor: int, data: np.ndarray, offset: int) -> None:
    """All bytes of ``data`` at ``offset``; raises OSError."""
    view, done = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8)), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def truncated(piece: Piece) -> InputError:
    found = f"a shard that has become shorter ({os.path.getsize(piece.file)} bytes)"
    return InputError(piece.file, piece.name, f"data up to byte {piece.end}", found, FETCH_AGAIN)
