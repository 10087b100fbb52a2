"""The kill matrix: every known fault, put into an implementation, must be caught at its module (K3.md throughout).

A fault is caught when the checks find a failure whose source is the fault's module, or one that reads it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap
from multiprocessing import get_context
from typing import Literal, NamedTuple

from parity.checks import CHECKS, Plan
from parity.checks.plan import case_named
from parity.diagnosis import diagnose
from parity.faults import Fault, FaultyPort, fault
from parity.findings import Finding, Report
from parity.ports import load_port

PACKAGES = {"reference": "reference", "mlx": "port"}
TEXT = ("coverage", "modules", "layers", "end_to_end", "decode", "padding")
PICTURES = ("vision", "multimodal")
BY_MODULE = {
    "vision.patch_embed": PICTURES, "vision.attention": PICTURES, "vision.block": PICTURES, "vision.merge": PICTURES,
    "projector": PICTURES, "merge": PICTURES, "image_processor": ("processor",), "chat": ("chat",),
}  # fmt: skip
"""The checks that can feel a module, in the order in which they are asked; the first that fails says enough."""


class Kill(NamedTuple):
    """What became of one fault in one dtype. ``named`` are the sources that were found, the largest error first;
    ``looks_like`` is the diagnosis of the fault's module, where one was asked for."""

    fault: str
    module: str
    port: str
    dtype: str
    status: Literal["caught", "misnamed", "unseen"]
    named: tuple[str, ...] = ()
    check: str = ""
    tap: str = ""
    regime: str = ""
    error: float = 0.0
    allowed: float = 0.0
    cosine: float | None = None
    looks_like: tuple[str, ...] = ()

    @property
    def named_first(self) -> bool:
        """Whether the diagnosis puts this fault first."""
        return self.looks_like == (self.fault,)

    @property
    def hidden(self) -> str:
        """Why this fault cannot show in this dtype; empty where it can."""
        return fault(self.fault).hidden if self.dtype == "bfloat16" else ""

    @property
    def accounted(self) -> bool:
        return self.status == "caught" or bool(self.hidden)


def checks_for(module: str) -> tuple[str, ...]:
    return BY_MODULE.get(module, TEXT)


def kill(item: Fault, port: str, dtype: str, seed: int = 0, diagnosed: bool = False) -> Kill:
    """Run a fault in the twin ``port`` through the checks until one fails."""
    faulty = FaultyPort(load_port(port), PACKAGES[port], [item])
    plan = Plan(faulty, (case_named(item.case, seed),), (dtype,), seed)
    for check in checks_for(item.module):
        report = Report(port=faulty.name, header={}, findings=tuple(CHECKS[check](plan)), seconds=0.0)
        if report.failures:
            verdict = _verdict(item, port, dtype, check, report.sources)
            return verdict._replace(looks_like=_diagnosis(item, plan, report)) if diagnosed else verdict
    return Kill(item.id, item.module, port, dtype, "unseen")


def _verdict(item: Fault, port: str, dtype: str, check: str, sources: Iterable[Finding]) -> Kill:
    ranked = sorted(sources, key=lambda finding: -times_over(finding))
    right = [finding for finding in ranked if finding.module in (item.module, *item.also)]
    worst = (right or ranked)[0]
    return Kill(
        item.id,
        item.module,
        port,
        dtype,
        "caught" if right else "misnamed",
        tuple(dict.fromkeys(finding.module for finding in ranked)),
        check,
        worst.tap,
        worst.regime,
        worst.error or 0.0,
        worst.allowed or 0.0,
        worst.cosine,
    )


def _diagnosis(item: Fault, plan: Plan, report: Report) -> tuple[str, ...]:
    """What the fault's own module looks like; where another was named, that one."""
    found = diagnose(plan, report)
    own = [one for one in found if one.module in (item.module, *item.also)] or list(found)
    return own[0].guesses[0].faults if own and own[0].guesses else ()


def times_over(finding: Finding) -> float:
    """How many times over its limit; what has no number is as wrong as can be."""
    if finding.error is None or not finding.allowed:
        return float("inf")
    return finding.error / finding.allowed


def matrix(
    faults: Sequence[Fault],
    ports: Sequence[str],
    dtypes: Sequence[str],
    seed: int = 0,
    workers: int = 1,
    diagnosed: bool = False,
) -> Iterator[Kill]:
    """Every fault in every port and dtype, in this order whatever the number of ``workers`` (processes)."""
    tasks = [(item.id, port, dtype, seed, diagnosed) for item in faults for port in ports for dtype in dtypes]
    if workers == 1:
        yield from starmap(kill_by_id, tasks)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        yield from pool.map(kill_by_id, *zip(*tasks, strict=True), chunksize=len(ports) * len(dtypes))


def kill_by_id(id: str, port: str, dtype: str, seed: int, diagnosed: bool) -> Kill:
    """``kill``; a fault's patches are functions and stay in their process, its id travels."""
    return kill(fault(id), port, dtype, seed, diagnosed)
