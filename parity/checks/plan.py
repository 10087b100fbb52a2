"""What a run of the checks is about: the port, the cases, the dtypes, the seed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from fixtures.build import cached
from fixtures.catalogue import Entry, entry
from fixtures.inputs import token_ids
from parity.protocol import Port
from parity.sides import Sides
from reference.config import K3Config, TextConfig

GOLDEN_IN_REPO = Path(__file__).parents[2] / "fixtures" / "golden" / "mini"
BATCH, TOKENS = 2, 13
"""Odd, longer than every convolution kernel, and not a multiple of any chunk."""


@dataclass(frozen=True)
class Case:
    """One catalogue entry, built: a checkpoint folder and the tokens to run over it."""

    entry: Entry
    seed: int

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def checkpoint(self) -> Path:
        return cached(self.entry, seed=self.seed)

    @property
    def config(self) -> K3Config:
        return self.entry.parsed

    @property
    def text(self) -> TextConfig:
        return self.config.text_config

    def tokens(self, batch: int = BATCH, tokens: int = TOKENS) -> np.ndarray:
        """Token ids [batch, tokens], drawn by the case's name and the seed."""
        return token_ids(self.entry, "check.input_ids", (batch, tokens), self.seed)


@dataclass(frozen=True)
class Plan:
    """Everything a check needs to know. ``golden`` is the golden folder to compare with."""

    port: Port
    cases: tuple[Case, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    seed: int = 0
    golden: Path | None = None
    opened: dict[tuple[str, str], Sides] = field(default_factory=dict)

    def sides(self, case: Case, dtype: str) -> Sides:
        """The three sides of a case, opened once per run."""
        return self.sides_at(case.checkpoint, dtype)

    def sides_at(self, checkpoint: Path, dtype: str) -> Sides:
        key = (str(checkpoint), dtype)
        if key not in self.opened:
            self.opened[key] = Sides(self.port, checkpoint, dtype)
        return self.opened[key]

    def in_short(self, dtype: str) -> bool:
        """Whether ``dtype`` need not repeat every split and every kind of padding: what is carried from step to step is
        the same program in bfloat16, and float32, which sees more, runs them all."""
        return dtype == "bfloat16" and "float32" in self.dtypes

    def each(self) -> Iterator[tuple[Case, str]]:
        for case in self.cases:
            for dtype in self.dtypes:
                yield case, dtype


@cache
def case_named(name: str, seed: int = 0) -> Case:
    """The catalogue's case of this name; raises InputError if there is none."""
    return Case(entry(name), seed)


def golden_root() -> Path | None:
    """Where the larger golden cases lie: $K3_PARITY_GOLDEN, or shared/golden beside the clone; None if nowhere."""
    given = os.environ.get("K3_PARITY_GOLDEN")
    root = Path(given) if given else Path(__file__).parents[3] / "shared" / "golden"
    return root if root.is_dir() else None
