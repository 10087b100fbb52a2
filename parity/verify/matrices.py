"""Whole tensors as float32, of the source and of the folder, for a closer look at one that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parity.verify.compare import DTYPES, Damaged, floats, target
from parity.verify.declared import Entry
from parity.verify.decode import GROUP, MXFP4_GROUP, codes_block, halves, mxfp4_block
from parity.verify.folder import Places
from port.source import Files, Piece, Source
from reference.mxfp4 import SCALE_BIAS


@dataclass
class Coded:
    """A matrix as it is stored: ``words`` uint8 [rows, bytes], ``scales`` [rows, groups], ``biases`` or None."""

    words: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None
    bits: int

    def weights(self) -> np.ndarray:
        """float32 [rows, in]."""
        with np.errstate(all="ignore"):
            if self.biases is None:
                return mxfp4_block(self.words, self.scales, SCALE_BIAS)
            codes = self.codes().reshape(*self.scales.shape, GROUP)
            scale, bias = (halves(part, SCALE_BIAS)[..., None] for part in (self.scales, self.biases))
            return (codes * scale + bias).reshape(len(self.words), -1)

    def codes(self) -> np.ndarray:
        return codes_block(self.words.view("<u4"), self.bits).copy()

    def with_words(self, words: np.ndarray) -> Coded:
        return Coded(np.ascontiguousarray(words), self.scales, self.biases, self.bits)


class Matrices:
    """Reads by entry; ``rows`` picks rows of a matrix, all of them unless given."""

    def __init__(self, source: Source, stored: Places) -> None:
        self.source, self._stored, self._files = source, stored, Files()
        self._packed = source.expert_format == "mxfp4"

    def expert(self, entry: Entry, expert: int, rows: Sequence[int] | None = None) -> np.ndarray:
        """The source's expert, float32 [rows, in]."""
        name, width = entry.source.format(expert=expert), entry.shape[1]
        if not self._packed:
            bits = self._rows(self.source.piece(f"{name}.weight"), entry.shape[0], 2 * width, rows)
            return floats(bits, "BF16").reshape(-1, width)
        pieces = (self.source.piece(f"{name}.{ending}") for ending in ("weight_packed", "weight_scale"))
        packed, scale = (
            self._rows(piece, entry.shape[0], size, rows)
            for piece, size in zip(pieces, (width // 2, width // MXFP4_GROUP), strict=True)
        )
        with np.errstate(all="ignore"):
            return mxfp4_block(packed, scale, SCALE_BIAS)

    def found(self, entry: Entry, slot: int, rows: Sequence[int] | None = None) -> Coded | None:
        """The folder's expert; None where its bytes are missing."""
        return self.coded(entry, entry.module, slot * entry.shape[0], entry.shape, rows)

    def coded(
        self, entry: Entry, module: str, first: int, shape: tuple[int, ...], rows: Sequence[int] | None = None
    ) -> Coded | None:
        count, width = shape[-2:]
        parts: list[np.ndarray] = []
        for name, (dtype, _) in entry.tensors().items():
            if not name.startswith(f"{module}."):
                continue
            is_words = name.endswith(".weight")
            size = width * entry.coding.bits // 8 if is_words else width // entry.coding.group * DTYPES[dtype].itemsize
            try:
                data = self._rows(self._piece(name), count, size, rows, first, damaged=True)
            except Damaged:
                return None
            parts.append(data if is_words else data.view(DTYPES[dtype]))
        words, scales, *biases = parts
        return Coded(words, scales, biases[0] if biases else None, entry.coding.bits)

    def tensor(self, entry: Entry) -> np.ndarray:
        """A source tensor that is no expert's, float32, all its rows."""
        data = self._files.read(self.source.piece(entry.source))
        return floats(data, entry.dtype).reshape(entry.shape)

    def found_tensor(self, entry: Entry) -> np.ndarray | None:
        """The folder's, in the source's layout; None where its bytes are missing."""
        if entry.kind == "same":
            piece = self._piece(entry.source)
            try:
                data = target(self._files, piece, 0, piece.end - piece.begin)
            except Damaged:
                return None
            return floats(data, entry.dtype).reshape(entry.kept(entry.shape))
        if entry.kind == "matrix":
            found = self.coded(entry, entry.module, 0, entry.kept(entry.shape))
            return None if found is None else found.weights()
        parts = []
        for module, half in zip(entry.modules(), entry.halves, strict=True):
            found = self.coded(entry, module, 0, (half[0] * half[1], half[2]))
            if found is None:
                return None
            parts.append(found.weights().reshape(half))
        return np.concatenate([parts[0].swapaxes(1, 2), parts[1]], axis=1).reshape(entry.shape)

    def scales_are_zero(self, entry: Entry) -> bool:
        """Whether all scales of a requantized tensor, without its biases, are zero."""
        names = [name for name in entry.tensors() if name.endswith(".scales")]
        return bool(names) and not any(self._files.read(self._piece(name)).any() for name in names)

    def _piece(self, name: str) -> Piece:
        place = self._stored[name]
        return Piece(name, str(place.file.absolute()), place.begin, place.end)

    def _rows(
        self, piece: Piece, count: int, size: int, rows: Sequence[int] | None, first: int = 0, damaged: bool = False
    ) -> np.ndarray:
        """uint8 [rows, size]: rows of ``size`` bytes, counted from row ``first`` of the tensor."""

        def read(begin: int, length: int) -> np.ndarray:
            return target(self._files, piece, begin, length) if damaged else self._files.read(piece, begin, length)

        if rows is None:
            return read(first * size, count * size).reshape(count, size)
        return np.stack([read((first + row) * size, size) for row in rows])
