"""The result of a comparison, one record each, and of a whole run."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import BaseModel, ConfigDict

from parity.exits import EXIT_AGREE, EXIT_DISAGREE, EXIT_NOTHING, EXIT_PORT
from parity.metrics import cosine, relative_rms, worst_element

FORMAT = 1
OF_THE_REFERENCE = ("anchor", "records")
"""Checks of the reference itself, whatever port is under test."""
Status = Literal["pass", "fail", "unsupported", "error"]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class Worst(Record):
    """The element that is furthest off."""

    index: tuple[int, ...]
    found: float
    truth: float


class Finding(Record):
    """One comparison: where, how much, and whether it is the source of the trouble.

    ``error`` and ``noise`` are relative RMS against float64: the port's, and the reference's in the same dtype.
    ``baseline`` is the committed error of this tap, where the port has one (parity/baseline.py).
    ``isolated``: the module was given the reference's own input, so that a failure is its own; else it stands in a
    chain. ``inputs_agree``: nothing that this quantity is computed from was found wrong.
    """

    check: str
    case: str
    dtype: str
    module: str
    tap: str
    section: str
    status: Status
    regime: str = "natural"
    seed: int = 0
    error: float | None = None
    allowed: float | None = None
    noise: float | None = None
    baseline: float | None = None
    cosine: float | None = None
    worst: Worst | None = None
    isolated: bool = True
    inputs_agree: bool | None = None
    ties: int = 0
    note: str = ""
    command: str = ""


class Guess(Record):
    """Known faults that were put into the reference; ``residual`` is how far its answers are from the port's then."""

    faults: tuple[str, ...]
    claims: tuple[str, ...]
    residual: float


class Diagnosis(Record):
    """What a wrong module looks like. ``error`` is the port's own distance from the right reference, on the same
    answers; ``fits``: the best guess leaves little of it."""

    module: str
    error: float
    fits: bool
    guesses: tuple[Guess, ...]

    @property
    def text(self) -> str:
        """One sentence: the best guess with its residual, and the next best."""
        if not self.guesses:
            return "has no known faults to compare with"
        best, *others = self.guesses
        if not self.fits:
            return (
                f"looks like no known fault: the nearest, {named(best)}, leaves {best.residual:.1g} of {self.error:.2g}"
            )
        next_best = f"; next best {' + '.join(others[0].faults)}, {others[0].residual:.2g}" if others else ""
        return f"looks like {named(best)}, residual {best.residual:.1g} of {self.error:.2g}{next_best}"


def named(guess: Guess) -> str:
    claims = "; ".join(f"“{claim}”" for claim in guess.claims)
    return f"{' + '.join(guess.faults)} ({claims})"


class Report(Record):
    """A whole run; the ``--json`` document."""

    format: int = FORMAT
    port: str
    header: dict[str, str]
    findings: tuple[Finding, ...]
    seconds: float
    diagnoses: tuple[Diagnosis, ...] = ()

    @property
    def counts(self) -> Counter:
        return Counter(finding.status for finding in self.findings)

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status in ("fail", "error")]

    @property
    def sources(self) -> list[Finding]:
        """The failures that name the culprit: isolated ones whose inputs agree, else the first ones of each chain."""
        own = [finding for finding in self.failures if finding.inputs_agree]
        return [finding for finding in own if finding.isolated] or own or self.failures

    @property
    def exit_code(self) -> int:
        """0 agree, 1 disagree, 3 the port crashed, 5 nothing was compared."""
        counts = self.counts
        if counts["fail"]:
            return EXIT_DISAGREE
        if counts["error"]:
            return EXIT_PORT
        return EXIT_AGREE if counts["pass"] else EXIT_NOTHING


def measure(found, truth) -> dict:
    """The fields of a Finding that say how far ``found`` is from ``truth``; a wrong shape is infinitely far."""
    if found.shape != truth.shape:
        return {"error": float("inf"), "note": f"shape {list(found.shape)} where {list(truth.shape)} is right"}
    error = relative_rms(found, truth)
    if error == 0 or not found.size:
        return {"error": error, "cosine": 1.0}
    index, value, expected = worst_element(found, truth)
    return {
        "error": error,
        "cosine": cosine(found, truth),
        "worst": Worst(index=index, found=value, truth=expected),
    }
