"""Prefill and decode, in several splits, against one full pass, at every tap."""

from __future__ import annotations

from collections.abc import Iterator

from parity.chained import Batch, chained_findings
from parity.checks.plan import Plan
from parity.compare import Place
from parity.findings import Finding

IN_SHORT = ("prefill-then-decode", "chunks-of-3")
"""The splits that a second dtype runs (``Plan.in_short``)."""


def splits(tokens: int) -> dict[str, list[int]]:
    """Prefill then one by one; all one by one; chunked prefill with an odd rest; a last chunk of one token."""
    return {
        "prefill-then-decode": [tokens - 5] + 5 * [1],
        "one-by-one": tokens * [1],
        "chunks-of-3": [3] * (tokens // 3) + ([tokens % 3] if tokens % 3 else []),
        "last-alone": [tokens - 1, 1],
    }


def run(plan: Plan) -> Iterator[Finding]:
    for case, dtype in plan.each():
        ids = case.tokens()
        for name, pieces in splits(ids.shape[1]).items():
            if plan.in_short(dtype) and name not in IN_SHORT:
                continue
            place = Place("decode", case.name, dtype, name, plan.seed, False)
            yield from chained_findings(place, plan.sides(case, dtype), case.text, Batch(ids, None, pieces))
