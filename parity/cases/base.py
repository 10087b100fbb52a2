"""The record of one function: how to draw its inputs in each regime, and what comes back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parity.arrays import rounded, wide_dtype


@dataclass(frozen=True)
class Drawn:
    """Arguments of one call: float64 or integer arrays, and plain settings."""

    arrays: Mapping[str, np.ndarray | None]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FunctionCase:
    """``draw(regime, rng)`` makes the inputs. Arguments in ``wide`` stay float32 in a bfloat16 model.

    ``results`` names what comes back, in order; where ``exact``, it must be equal. ``wide_results`` says that the
    function answers in float32 even for bfloat16 arguments.
    """

    function: str
    module: str
    section: str
    results: tuple[str, ...]
    regimes: tuple[str, ...]
    draw: Callable[[str, np.random.Generator], Drawn]
    wide: frozenset[str] = frozenset()
    exact: bool = False

    def drawn(self, regime: str, dtype: str, seed: int) -> Drawn:
        """The inputs of this regime with the values they have in ``dtype``; the same for every side and every order."""
        key = f"{self.function}/{regime}/{seed}"
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
        drawn = self.draw(regime, rng)
        arrays = {
            name: None if array is None else rounded(np.asarray(array), self.dtype_of(name, dtype))
            for name, array in drawn.arrays.items()
        }
        return Drawn(arrays, drawn.settings)

    def dtype_of(self, argument: str, dtype: str) -> str:
        return wide_dtype(dtype) if argument in self.wide else dtype


def unit(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random vectors of length 1 along the last axis."""
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
