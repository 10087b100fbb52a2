"""Heat maps: how much of its limit every tap uses, case by case, and every function, regime by regime."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import NamedTuple

from parity.findings import Finding, Report
from parity.page.numbers import share, share_text

NOT_TAPS = ("modules", "coverage", "twins", "processor", "chat", "anchor")
"""Checks whose findings are no taps of a model: they have the module table, and functions have a map of their own."""
LAYER_NUMBER = re.compile(r"\.(layers|blocks)\.\d+\.")
SHADES = ((0.1, "p0"), (0.6, "p1"), (1.0, "p2"), (30.0, "f0"), (1e4, "f1"))
"""Up to which share of the limit a cell has which shade; beyond the last it is f2."""


class Cell(NamedTuple):
    """The worst of the findings that a cell stands for; ``members`` says how many they are."""

    shade: str
    text: str
    title: str


class Row(NamedTuple):
    label: str
    module: str
    cells: tuple[Cell | None, ...]


class HeatMap(NamedTuple):
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def tap_map(report: Report, isolated: bool) -> HeatMap:
    """Tap × case: the worst over layers, dtypes and regimes."""
    findings = [f for f in report.findings if f.check not in NOT_TAPS and f.isolated == isolated]
    findings.sort(key=lambda finding: finding.check == "golden")  # fewer taps: it must not set the order of the rows
    own = {id(finding) for finding in report.sources}
    columns = tuple(dict.fromkeys(map(column_of, findings)))
    cells: dict[tuple[str, str], dict[str, list[Finding]]] = {}
    for finding in findings:
        cells.setdefault((tap_kind(finding.tap), finding.module), {}).setdefault(column_of(finding), []).append(finding)
    rows = (
        Row(tap, module, tuple(cell_of(by_case.get(column, ()), own) for column in columns))
        for (tap, module), by_case in cells.items()
    )
    return HeatMap(columns, tuple(rows))


def function_rows(report: Report) -> list[tuple[str, str, list[tuple[str, Cell]]]]:
    """(function, module, [(regime, cell)]) of the functions that were given drawn inputs."""
    own = {id(finding) for finding in report.sources}
    functions: dict[tuple[str, str], dict[str, list[Finding]]] = {}
    for finding in report.findings:
        if finding.check == "modules":
            functions.setdefault((finding.case, finding.module), {}).setdefault(finding.regime, []).append(finding)
    return [
        (function, module, [(regime, cell_of(members, own)) for regime, members in regimes.items()])
        for (function, module), regimes in functions.items()
    ]


def column_of(finding: Finding) -> str:
    return f"{finding.case} (golden)" if finding.check == "golden" else finding.case


def tap_kind(tap: str) -> str:
    """A tap without its run and its layer's number: one row stands for all layers."""
    name = tap.rpartition("/")[2]
    name = LAYER_NUMBER.sub(lambda match: f".{match[1]}.", "." + name)[1:]
    return name.replace("language_model.model.layers.", "").replace("language_model.model.", "")


def cell_of(findings: Iterable[Finding], sources: Container[int]) -> Cell | None:
    """None where nothing stands here; unsupported only if nothing was compared. ``sources``: their ids."""
    members = list(findings)
    if not members:
        return None
    compared = [finding for finding in members if finding.status != "unsupported"]
    if not compared:
        return Cell("u", "–", f"unsupported: {members[0].note}")
    worst = max(compared, key=severity)
    used, failed = share(worst), worst.status in ("fail", "error")
    mark = "✗" if failed else "✓"
    text = mark if used is None else share_text(used)
    text += " ◆" if any(id(finding) in sources for finding in members) else ""
    return Cell(shade(used, failed), text, f"{mark} worst of {len(compared)}: {worst.tap} {worst.dtype} {worst.regime}")


def severity(finding: Finding) -> tuple[bool, float]:
    used = share(finding)
    return finding.status in ("fail", "error"), -1.0 if used is None else used


def shade(used: float | None, failed: bool) -> str:
    if used is None:
        return "f2" if failed else "p0"
    name = next((name for limit, name in SHADES if used <= limit), "f2")
    return "f0" if failed and name.startswith("p") else name
