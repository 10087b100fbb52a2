"""The kill matrix: every known fault, put into an implementation, must be caught at its module (K3.md throughout).

A fault is caught when the checks find a failure whose source is the fault's module, or one that reads it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from parity.checks import CHECKS, Plan
from parity.checks.plan import case_named
from parity.faults import Fault, FaultyPort
from parity.findings import Finding, Report
from parity.ports import load_port

PACKAGES = {"reference": "reference", "mlx": "port"}
TEXT = ("coverage", "modules", "layers", "end_to_end", "decode", "padding")
PICTURES = ("vision", "multimodal")
BY_MODULE = {
    "vision.patch_embed": PICTURES, "vision.attention": PICTURES, "vision.block": PICTURES, "vision.merge": PICTURES,
    "projector": PICTURES, "merge": PICTURES, "image_processor": ("processor",), "chat": ("chat",),
    "tokenizer": ("tokenizer",),
}  # fmt: skip
"""The checks that can feel a module, in the order in which they are asked; the first that fails says enough."""


class Kill(NamedTuple):
    """What became of one fault in one dtype. ``named`` are the sources that were found, the largest error first."""

    fault: Fault
    port: str
    dtype: str
    status: Literal["caught", "misnamed", "unseen"]
    named: tuple[str, ...]
    check: str
    error: float
    cosine: float | None
    allowed: float


def checks_for(fault: Fault) -> tuple[str, ...]:
    return BY_MODULE.get(fault.module, TEXT)


def kill(fault: Fault, port: str, dtype: str, seed: int = 0) -> Kill:
    """Run ``fault`` in the twin ``port`` through the checks until one fails."""
    faulty = FaultyPort(load_port(port), PACKAGES[port], [fault])
    plan = Plan(faulty, (case_named(fault.case, seed),), (dtype,), seed)
    for check in checks_for(fault):
        report = Report(port=faulty.name, header={}, findings=tuple(CHECKS[check](plan)), seconds=0.0)
        if report.failures:
            return _verdict(fault, port, dtype, check, report.sources)
    return Kill(fault, port, dtype, "unseen", (), "", 0.0, None, 0.0)


def _verdict(fault: Fault, port: str, dtype: str, check: str, sources: Iterable[Finding]) -> Kill:
    ranked = sorted(sources, key=lambda finding: -_size(finding))
    named = tuple(dict.fromkeys(finding.module for finding in ranked))
    right = [finding for finding in ranked if finding.module in (fault.module, *fault.also)]
    worst = (right or ranked)[0]
    status = "caught" if right else "misnamed"
    return Kill(fault, port, dtype, status, named, check, worst.error or 0.0, worst.cosine, worst.allowed or 0.0)


def _size(finding: Finding) -> float:
    """How many times over its limit; what has no number is as wrong as can be."""
    if finding.error is None or not finding.allowed:
        return float("inf")
    return finding.error / finding.allowed


def matrix(faults: Iterable[Fault], ports: Iterable[str], dtypes: Iterable[str]) -> Iterator[Kill]:
    for fault in faults:
        for port in ports:
            for dtype in dtypes:
                yield kill(fault, port, dtype)
