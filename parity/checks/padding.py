"""Padded batches against their rows alone: left, right, longer than a prefill chunk, filled with NaN or 1e30."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.chained import Batch, chained_findings
from parity.checks.plan import TOKENS, Plan
from parity.compare import Place
from parity.findings import Finding

LENGTHS = (TOKENS, 1, 2, 7)
"""One row without padding, two shorter than a convolution window, one ordinary."""


def mask(side: str, lengths: tuple[int, ...] = LENGTHS, tokens: int = TOKENS) -> np.ndarray:
    """[B, T] with each row's real tokens at one end; ``both`` puts padding on either side."""
    position = np.arange(tokens)
    start = {
        "left": [tokens - n for n in lengths],
        "right": [0] * len(lengths),
        "both": [(tokens - n) // 2 for n in lengths],
    }
    return np.stack([(position >= s) & (position < s + n) for s, n in zip(start[side], lengths, strict=True)])


def placed(rows: np.ndarray, real: np.ndarray) -> np.ndarray:
    """The first tokens of each row, put where ``real`` is True; padded positions hold the row's last id."""
    ids = np.repeat(rows[:, -1:], rows.shape[1], axis=1)
    for row, here in enumerate(real):
        ids[row, here] = rows[row, : here.sum()]
    return ids


VARIANTS: dict[str, tuple[str, list[int], float | None]] = {
    "left": ("left", [TOKENS], None),
    "right": ("right", [TOKENS], None),
    "left-nan": ("left", [TOKENS], float("nan")),
    "right-huge": ("right", [TOKENS], 1e30),
    "left-pieces": ("left", [4, 4, 4, 1], None),
    "left-chunked": ("left", [4, 4, 4, 1], float("nan")),
    "right-then-decode": ("right", [TOKENS - 3, 1, 1, 1], None),
    "both-chunked": ("both", [5, 5, 3], float("nan")),
}
"""name -> (side of the padding, pieces of the prefill, what stands in padded positions)."""

IN_SHORT = ("right-huge", "left-chunked", "right-then-decode")
"""The variants that a second dtype runs (``Plan.in_short``)."""


def run(plan: Plan) -> Iterator[Finding]:
    for case, dtype in plan.each():
        rows = case.tokens(batch=len(LENGTHS))
        for name, (side, pieces, fill) in VARIANTS.items():
            if plan.in_short(dtype) and name not in IN_SHORT:
                continue
            place = Place("padding", case.name, dtype, name, plan.seed, False)
            batch = Batch(placed(rows, mask(side)), mask(side), pieces, fill)
            yield from chained_findings(place, plan.sides(case, dtype), case.text, batch)
