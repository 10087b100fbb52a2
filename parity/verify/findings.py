"""What verify found: problems, the measures of every expert and matrix, and the verdict."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from parity.exits import EXIT_AGREE, EXIT_DISAGREE, EXIT_NOTHING

FORMAT = 1
UNDECIDED = "nothing that is known"


@dataclass(frozen=True)
class Problem:
    """``kind``: config, index, shard, missing, extra, dtype, shape, file, expert or tensor; ``where`` a tensor or file.

    ``expert`` is the folder's number, ``kept`` the source's number of the expert that belongs there, ``projection`` w1,
    w2 or w3; ``looks_like`` says what was found in its place.
    """

    kind: str
    where: str
    what: str
    layer: int | None = None
    expert: int | None = None
    kept: int | None = None
    projection: str | None = None
    looks_like: str = ""
    cosine: float | None = None
    error: float | None = None

    def line(self) -> str:
        """One line for people: where, what, what it looks like."""
        names = [("layer", self.layer), ("expert", self.expert), ("", self.projection)]
        place = ", ".join(f"{name} {value}".strip() for name, value in names if value is not None)
        if self.kept is not None and self.kept != self.expert:
            place += f" (the source's expert {self.kept})"
        looks = f"; looks like: {self.looks_like}" if self.looks_like else ""
        return f"{self.kind}: {place + ': ' if place else ''}{self.where}: {self.what}{looks}"


@dataclass(frozen=True)
class Compared:
    """One expert's projection, or one other tensor, against the source: ``cosine`` is 1 and ``error`` 0 where the bytes
    are the same."""

    name: str
    weights: int
    cosine: float
    error: float
    bits: int | None = None
    layer: int | None = None
    projection: str | None = None
    expert: int | None = None
    source_expert: int | None = None


@dataclass
class Verdict:
    """``total_experts``: how many experts' projections there are, of which a sample leaves some out."""

    folder: str
    source: str
    tier: str
    nonexpert_bits: int | None
    pruned: bool
    problems: list[Problem] = field(default_factory=list)
    experts: list[Compared] = field(default_factory=list)
    tensors: list[Compared] = field(default_factory=list)
    total_experts: int = 0
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        if self.problems:
            return EXIT_DISAGREE
        return EXIT_AGREE if self.experts or self.tensors else EXIT_NOTHING

    @property
    def weights(self) -> int:
        """Of experts alone."""
        return sum(item.weights for item in self.experts)

    def document(self) -> dict[str, Any]:
        """For ``--json``: numbers that JSON has no word for are null."""
        rows = {name: [finite(asdict(item)) for item in getattr(self, name)] for name in ("experts", "tensors")}
        return {
            "format": FORMAT,
            "folder": self.folder,
            "source": self.source,
            "tier": self.tier,
            "nonexpert_bits": self.nonexpert_bits,
            "pruned": self.pruned,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "expert_weights": self.weights,
            "experts_in_all": self.total_experts,
            "problems": [finite(asdict(problem)) for problem in self.problems],
            **rows,
        }


def finite(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
