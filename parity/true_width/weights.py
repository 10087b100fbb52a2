"""One layer's weights, read once for both twins: float32 arrays in one memory, and the experts that were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np

from parity.true_width.source import Source, expert_specs, layer_specs
from reference.checkpoint import TensorSpec

AT_ONCE = 1 << 17
"""Elements that are read together: what fits the processor's cache is drawn three times as fast."""


class Reader:
    """Reads tensors of a source with several threads; ``needed`` maps what was asked for to its bytes, once each."""

    def __init__(self, source: Source, threads: int) -> None:
        self.source, self.pool = source, ThreadPoolExecutor(threads)
        self.needed: dict[tuple[str, int, int], int] = {}

    def stored(self, spec: TensorSpec, rows: slice | None = None) -> np.ndarray:
        """A tensor, or some of its rows, as it is stored."""
        self._count(spec, rows)
        return self.source.read(spec, rows)

    def fill(self, targets: Mapping[TensorSpec, np.ndarray], rows: slice | None = None) -> None:
        """Read tensors into the float32 arrays given for them, exactly; ``rows`` of the first axis alone if given."""
        tasks = []
        for spec, target in targets.items():
            self._count(spec, rows)
            step, start = max(1, AT_ONCE * len(target) // max(1, target.size)), (rows or slice(0)).start or 0
            for first in range(0, len(target), step):
                part = slice(first, min(first + step, len(target)))
                tasks.append(self.pool.submit(self._fill, spec, target, part, start))
        for task in tasks:
            task.result()

    def _fill(self, spec: TensorSpec, target: np.ndarray, part: slice, start: int) -> None:
        target[part] = self.source.read(spec, slice(start + part.start, start + part.stop))

    def _count(self, spec: TensorSpec, rows: slice | None) -> None:
        first, last, _ = (rows or slice(None)).indices(spec.shape[0])
        self.needed[spec.name, first, last] = (last - first) * spec.nbytes // spec.shape[0]

    def close(self) -> None:
        self.pool.shutdown()


class SharedArrays:
    """float32 tensors in MLX's memory: ``arrays`` are MLX's, ``views`` numpy's of the same bytes."""

    def __init__(self, reader: Reader, specs: Mapping[str, TensorSpec], rows: slice | None = None) -> None:
        import mlx.core as mx

        self.arrays: dict[str, Any] = {}
        self.views: dict[str, np.ndarray] = {}
        for name, spec in specs.items():
            first, last, _ = (rows or slice(None)).indices(spec.shape[0])
            array = mx.zeros((last - first, *spec.shape[1:]), mx.float32)
            mx.eval(array)
            self.arrays[name], self.views[name] = array, np.array(array, copy=False)
        reader.fill({spec: self.views[name] for name, spec in specs.items()}, rows)


class ExpertBank:
    """The routed experts of one layer, as stored, each read when it is first asked for."""

    def __init__(self, reader: Reader, layer: int) -> None:
        self.reader, self.layer = reader, layer
        self._experts: dict[int, dict[str, np.ndarray]] = {}

    def specs(self, number: int) -> dict[str, TensorSpec]:
        """One expert's tensors by their names within it: ``w1.weight_packed``, …"""
        source, layer = self.reader.source, self.layer
        prefix = f"experts.{number}."
        return {
            spec.name.partition(prefix)[2]: spec
            for spec in expert_specs(source.config, source.expert_format, layer, number)
        }

    def has(self, number: int) -> bool:
        return all(self.reader.source.has(spec) for spec in self.specs(number).values())

    def fetch(self, numbers: Iterable[int]) -> None:
        """Read those of ``numbers`` that are not here yet, several at a time."""
        asked = [number for number in sorted({int(number) for number in numbers}) if number not in self._experts]
        for number, tensors in zip(asked, self.reader.pool.map(self._read, asked), strict=True):
            self._experts[number] = tensors

    def __len__(self) -> int:
        return len(self._experts)

    def expert(self, number: int) -> dict[str, np.ndarray]:
        """One expert's tensors as stored, by their names within it."""
        self.fetch([number])
        return self._experts[number]

    def _read(self, number: int) -> dict[str, np.ndarray]:
        return {name: self.reader.stored(spec) for name, spec in self.specs(number).items()}


def missing(source: Source, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Those of ``specs`` that the source lacks."""
    return {name: spec for name, spec in specs.items() if not source.has(spec)}


def layer_arrays(reader: Reader, layer: int, begins: tuple[str, ...] = ("",)) -> SharedArrays:
    """What there is of a layer's tensors whose names within it begin with one of ``begins``; no routed experts."""
    specs = layer_specs(reader.source.config, layer)
    lacking = missing(reader.source, specs)
    chosen = {name: spec for name, spec in specs.items() if name not in lacking and name.startswith(begins)}
    return SharedArrays(reader, chosen)


def parameters(arrays: SharedArrays) -> int:
    return sum(prod(view.shape) for view in arrays.views.values())
