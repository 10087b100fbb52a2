"""What the experts and tensors that differ look like: each gets a name, if it has one (K3.md §8, §15)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from parity.verify import looks
from parity.verify.declared import BANDS, MXFP4, Entry
from parity.verify.findings import UNDECIDED, Compared, Problem
from parity.verify.folder import Places
from parity.verify.looks import apart, nearest
from parity.verify.matrices import Coded, Matrices
from port.source import Source

LOOKED_AT = 64
"""Whole matrices that are looked at closely; of what differs beyond that, some rows are."""
SOME = 8
"""Rows by which experts are told apart."""
LARGEST = 1 << 27
"""Weights of a tensor that is looked at closely."""
LOSSLESS = 0.05
"""How near a copy must be to be recognised: equal, but for single wrong values."""


class Diagnosis:
    """``add`` what differs, then ask for the ``problems``, each with what it looks like."""

    def __init__(self, source: Source, stored: Places, declared: Sequence[Entry]) -> None:
        self._matrices = Matrices(source, stored)
        self._declared, self._wrong, self._looked_at = list(declared), [], 0
        self._stacks = {(entry.layer, entry.projection): entry for entry in declared if entry.kind == "experts"}
        self._others = {entry.source: entry for entry in declared if entry.kind != "experts"}

    def add(self, item: Compared, wrong: str) -> None:
        self._wrong.append((item, wrong))

    def problems(self) -> Iterator[Problem]:
        self._wrong.sort(key=lambda pair: (pair[0].layer or 0, pair[0].expert or 0, pair[0].name))
        for item, wrong in self._wrong:
            kind = "expert" if item.projection else "tensor"
            looks_like = self._expert(item) if item.projection else self._tensor(item)
            yield Problem(
                kind,
                item.name,
                wrong,
                item.layer,
                item.expert,
                item.source_expert,
                item.projection,
                looks_like,
                item.cosine,
                item.error,
            )

    def _expert(self, item: Compared) -> str:
        entry = self._stacks[item.layer, item.projection]
        limit = limit_of(entry)
        some = spread(entry.shape[0])
        found = self._matrices.found(entry, item.expert, some)
        if found is None:
            return "cut off"
        weights, right = found.weights(), self._matrices.expert(entry, item.source_expert, some)
        self._looked_at += 1
        closely = self._looked_at <= LOOKED_AT
        whole = self._matrices.found(entry, item.expert) if closely else found
        return (
            (self._near(entry, item, whole, limit) if closely else "")
            or looks.nothing(whole.weights())
            or ("scales zeroed" if not whole.scales.any() else "")
            or looks.scaled(weights, right, limit)
            or looks.pairs_swapped(found, right, limit)
            or self._another(entry, item, weights, some, limit)
            or (self._closely(entry, item, whole, limit) if closely else "")
            or UNDECIDED
        )

    def _near(self, entry: Entry, item: Compared, found: Coded, limit: float) -> str:
        """Almost right: single scales or weights."""
        right = self._matrices.expert(entry, item.source_expert)
        if entry.coding == MXFP4:
            pieces = [self._matrices.source.piece(f"{item.name}.{end}") for end in ("weight_packed", "weight_scale")]
            words, scales = (self._matrices._files.read(piece).reshape(len(found.words), -1) for piece in pieces)
            if told := looks.single_scales(found, Coded(words, scales, None, 4)):
                return told
        return "the right expert but for a few values" if apart(found.weights(), right) <= limit else ""

    def _another(self, entry: Entry, item: Compared, weights: np.ndarray, some: Sequence[int], limit: float) -> str:
        """Another expert of the layer, another projection of this one, or this one of another layer."""
        number = nearest(weights, self._some_rows(entry, tuple(some)))
        if apart(weights, self._matrices.expert(entry, number, some)) <= limit:
            place = entry.experts.index(number) if number in entry.experts else None
            told = f"is the source's expert {number}"
            if place is None:
                told += ", which the plan drops"
            elif entry.experts != tuple(range(len(entry.experts))):
                told += f", whose place is {place}"
            return told + (", as if there were no plan" if number == item.expert else "")
        for projection in ("w1", "w2", "w3"):
            other = self._stacks[item.layer, projection]
            if other is not entry and other.shape == entry.shape:
                found = self._matrices.expert(other, item.source_expert, some)
                if apart(weights, found) <= limit:
                    return f"is the source's {projection}: {entry.projection} and {projection} exchanged"
        for (layer, projection), other in self._stacks.items():
            if projection == entry.projection and layer != entry.layer:
                for expert in {item.source_expert, other.experts[min(item.expert, len(other.experts) - 1)]}:
                    if apart(weights, self._matrices.expert(other, expert, some)) <= limit:
                        return f"is expert {expert} of layer {layer}"
        return ""

    def _closely(self, entry: Entry, item: Compared, found: Coded, limit: float) -> str:
        right = self._matrices.expert(entry, item.source_expert)
        weights = found.weights()
        return (
            looks.transposed(found, right, limit)
            or looks.moved(weights, right, limit)
            or looks.partly(weights, right, limit)
        )

    @lru_cache(maxsize=3)  # noqa: B019 - one diagnosis a run
    def _some_rows(self, entry: Entry, some: tuple[int, ...]) -> np.ndarray:
        """Some rows of every expert of the source, [experts, rows, in]."""
        count = self._matrices.source.config.text_config.num_experts
        return np.stack([self._matrices.expert(entry, expert, some) for expert in range(count)])

    def _tensor(self, item: Compared) -> str:
        entry, limit = self._others[item.name], limit_of(self._others[item.name])
        if item.weights > LARGEST:
            return "too large to be looked at closely"
        found = self._matrices.found_tensor(entry)
        if found is None:
            return "cut off"
        if self._matrices.scales_are_zero(entry):
            return "scales zeroed"
        source = self._matrices.tensor(entry)
        right = source if entry.experts is None else source[list(entry.experts)]
        if told := looks.nothing(found) or looks.scaled(found, right, limit):
            return told
        if entry.experts is not None and apart(found, source[: len(found)]) <= limit:
            return "its rows were not renumbered by the plan"
        if apart(found, right) <= limit:
            return "the right tensor but for a few values"
        return looks.moved(found, right, limit) or self._another_tensor(entry, found, limit) or UNDECIDED

    def _another_tensor(self, entry: Entry, found: np.ndarray, limit: float) -> str:
        """Another tensor of the same shape: of the same layer, or of the same name in another one."""
        ending = entry.source.split(".layers.")[-1].split(".", 1)[-1]
        for other in self._declared:
            related = other.layer == entry.layer or other.source.endswith(ending)
            if other is entry or other.kind == "experts" or not related or other.shape != entry.shape:
                continue
            source = self._matrices.tensor(other)
            if apart(found, source if other.experts is None else source[list(other.experts)]) <= limit:
                return f"is {other.source}"
        return ""


def limit_of(entry: Entry) -> float:
    """The relative error up to which a tensor of this kind counts as another one's."""
    return LOSSLESS if entry.coding is None or entry.coding == MXFP4 else BANDS[entry.coding.bits][1]


def spread(rows: int) -> list[int]:
    """Up to SOME rows, from the first to the last."""
    return sorted({round(place) for place in np.linspace(0, rows - 1, min(rows, SOME))})
