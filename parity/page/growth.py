"""Error over layers: which findings make a curve, and where its points lie in a small drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from parity.findings import Finding, Report
from parity.page.numbers import amount
from parity.quantities import layer_of
from parity.report import closeness

CHECKS = {True: ("layers", "golden"), False: ("end_to_end", "golden", "decode", "padding")}
"""The checks that show layers, by ``isolated``, the best one first; others only where none of these ran."""
NATURAL = ("natural", "isolated", "prefill")
"""The regimes of ordinary input, in the words of each check."""
WHOLE_LAYER = "output"
WIDTH, HEIGHT = 440.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 26.0, 34.0
SMALLEST = 1e-10
"""A curve on a logarithmic axis cannot show zero: an exact layer lies at the lower edge."""


class Point(NamedTuple):
    """One layer: the finding that stands for it, and where it is drawn."""

    finding: Finding
    layer: int
    x: float
    y: float
    y_allowed: float

    @property
    def failed(self) -> bool:
        return self.finding.status in ("fail", "error")


class Panel(NamedTuple):
    """One drawing: ``points`` of the case that is nearest to its limit or furthest over it, ``others`` as paths."""

    isolated: bool
    dtype: str
    check: str
    case: str
    points: tuple[Point, ...]
    others: tuple[str, ...]
    decades: tuple[tuple[str, float], ...]
    layers: tuple[tuple[int, float], ...]

    @property
    def path(self) -> str:
        return polyline((point.x, point.y) for point in self.points)

    @property
    def allowed_path(self) -> str:
        return polyline((point.x, point.y_allowed) for point in self.points)

    @property
    def summary(self) -> str:
        """What the drawing shows, for those who do not see it."""
        over = [str(point.layer) for point in self.points if point.failed]
        first, last = self.points[0].finding, self.points[-1].finding
        says = f"layers {', '.join(over)} are over the limit" if over else "every layer is within the limit"
        return (
            f"case {self.case}, {self.dtype}: error {amount(first.error)} at layer {self.points[0].layer}, "
            f"{amount(last.error)} at layer {self.points[-1].layer}, where {amount(last.allowed)} is allowed; {says}"
        )


def panels(report: Report) -> list[Panel]:
    """Isolated and chained, each in every dtype that was run."""
    dtypes = dict.fromkeys(f.dtype for f in report.findings if f.dtype != "any")
    made = (panel(report.findings, isolated, dtype) for isolated in (True, False) for dtype in dtypes)
    return [item for item in made if item is not None]


def panel(findings: Iterable[Finding], isolated: bool, dtype: str) -> Panel | None:
    """None if no layer was compared this way."""
    layered = [
        f
        for f in findings
        if (f.isolated, f.dtype) == (isolated, dtype) and f.error is not None and f.check != "anchor"
        if layer_of(bare(f.tap))[0] is not None
    ]
    present = {f.check for f in layered}
    check = next((name for name in (*CHECKS[isolated], *sorted(present)) if name in present), None)
    layered = [f for f in layered if f.check == check]
    layered = [f for f in layered if f.regime in NATURAL] or layered
    cases: dict[str, list[Finding]] = {}
    for finding in layered:
        cases.setdefault(finding.case, []).append(finding)
    if not cases:
        return None
    curves = {case: curve(members, isolated) for case, members in cases.items()}
    shown = max(curves, key=lambda case: max(map(closeness, curves[case].values())))
    return drawn(isolated, dtype, check, shown, curves)


def bare(tap: str) -> str:
    """A tap's name without its run."""
    return tap.rpartition("/")[2]


def curve(findings: Sequence[Finding], isolated: bool) -> dict[int, Finding]:
    """Per layer one finding. Isolated: the worst of its modules. Chained: its output, where the port shows it."""
    layers: dict[int, list[Finding]] = {}
    for finding in findings:
        layers.setdefault(layer_of(bare(finding.tap))[0], []).append(finding)
    chosen = {}
    for layer, members in sorted(layers.items()):
        outputs = [f for f in members if layer_of(bare(f.tap))[1] == WHOLE_LAYER]
        chosen[layer] = max(members if isolated or not outputs else outputs, key=closeness)
    return chosen


def drawn(isolated: bool, dtype: str, check: str, shown: str, curves: dict[str, dict[int, Finding]]) -> Panel:
    finite = [
        value
        for one in curves.values()
        for finding in one.values()
        for value in (finding.error, finding.allowed)
        if value and math.isfinite(value)
    ]
    low = math.floor(math.log10(max(SMALLEST, min(finite, default=1e-7))))
    high = max(math.ceil(math.log10(max(finite, default=1.0))), low + 1)
    last = max(layer for one in curves.values() for layer in one)

    def x(layer: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (layer / last if last else 0.5), 1)

    def y(value: float | None) -> float:
        decade = low if not value else high if not math.isfinite(value) else min(high, max(low, math.log10(value)))
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - decade) / (high - low), 1)

    points = tuple(Point(f, layer, x(layer), y(f.error), y(f.allowed)) for layer, f in curves[shown].items())
    others = tuple(
        polyline((x(layer), y(f.error)) for layer, f in one.items()) for case, one in curves.items() if case != shown
    )
    step = max(1, (high - low) // 5)
    decades = tuple((f"1e{power}" if power else "1", y(10.0**power)) for power in range(low, high + 1, step))
    every = max(1, math.ceil((last + 1) / 12))
    ticks = tuple((layer, x(layer)) for layer in range(0, last + 1, every))
    return Panel(isolated, dtype, check, shown, points, others, decades, ticks)


def polyline(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in places)
