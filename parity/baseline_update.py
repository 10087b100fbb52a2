"""Measuring baselines anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from parity.baseline import FUNCTIONS, SECTIONS, SEED, Baselines, worst
from parity.baseline_files import EXPECTED
from parity.checks import CHECKS, Plan
from parity.checks.plan import case_named
from parity.findings import Finding, Report
from parity.protocol import Port
from reference.errors import InputError


def updated(
    port: Port, names: Iterable[str], dtypes: tuple[str, ...], progress: Callable[[str], None] = lambda name: None
) -> list[Path]:
    """Run the checks of these files and write them; the ones that changed.

    What is there of other dtypes stays. Raises InputError, and writes nothing, if the port's name cannot name a folder
    or a comparison fails: a baseline is of a port that is right.
    """
    baselines = Baselines(port)
    if Path(port.name).name != port.name or ":" in port.name:
        raise InputError("--port", port.name, "a name that can name a folder", port.name, "give the port a plain name")
    documents = {}
    for name in names:
        progress(name)
        measured = list(findings_of(port, name, dtypes))
        refuse_failures(port, name, measured)
        kept = baselines.documents.get(name, {}) if name in baselines.files else {}
        documents[name] = kept | worst(measured).get(name, {})
    return baselines.write({name: document for name, document in documents.items() if document})


def findings_of(port: Port, name: str, dtypes: tuple[str, ...]) -> Iterator[Finding]:
    """Every finding that a file's lines are made of; each case is run alone, so that no file depends on another."""
    if name == FUNCTIONS:
        yield from CHECKS["modules"](Plan(port, (), dtypes, SEED))
        return
    plan = Plan(port, (case_named(name, SEED),), dtypes, SEED)
    for check in SECTIONS:
        if check != "modules":
            yield from CHECKS[check](plan)


def refuse_failures(port: Port, name: str, findings: Iterable[Finding]) -> None:
    report = Report(port=port.name, header={}, findings=tuple(findings), seconds=0.0)
    if report.failures:
        first = report.sources[0]
        found = f"{len(report.failures)} failures, the first at {first.module} ({first.tap}, {first.dtype})"
        raise InputError("baseline update", name, "a port that agrees", found, "mend it: k3-parity check tells more")


def remove_stale(port: Port) -> list[Path]:
    """Delete the files of cases that are no core cases any more."""
    stale = [path for name, path in Baselines(port).files.items() if name not in EXPECTED]
    for path in stale:
        path.unlink()
    return stale
