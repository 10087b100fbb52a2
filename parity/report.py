"""A report as text: a table by module, the failures with all that is needed to act on them, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.findings import OF_THE_REFERENCE, Diagnosis, Finding, Report
from parity.runner import by_module

SHOWN_FAILURES = 12
VERDICTS = {0: "agree", 1: "disagree", 3: "the port could not load or crashed", 5: "nothing was compared"}


def print_header(console: Console, header: dict[str, str]) -> None:
    console.print(" · ".join(f"{key} {value}" for key, value in header.items()), style="dim", highlight=False)


def print_report(console: Console, report: Report) -> None:
    """The whole report; the verdict comes last, where the eye is."""
    console.print(module_table(report))
    print_failures(console, report)
    counts = report.counts
    summary = ", ".join(f"{counts[status]} {word}" for status, word in WORDS.items() if counts[status])
    ties = sum(finding.ties for finding in report.findings)
    note = f"; {ties} router ties, compared with the reference's choice imposed" if ties else ""
    verdict = Text(
        f"{report.port}: {VERDICTS[report.exit_code]}", style="bold green" if report.exit_code == 0 else "bold red"
    )
    console.print(verdict, f"({summary}{note}; {report.seconds:.1f} s)", highlight=False)


WORDS = {"pass": "passed", "fail": "failed", "error": "crashed", "unsupported": "unsupported"}


def module_table(report: Report) -> Table:
    """Per module and dtype: how many comparisons, and the one that came nearest to its limit."""
    table = Table(title=f"{report.port} against the reference", title_justify="left")
    for name in ("module", "K3.md", "dtype", "compared", "failed", "worst error", "allowed", "at"):
        table.add_column(name, justify="right" if name in ("compared", "failed", "worst error", "allowed") else "left")
    for row in module_rows(report):
        cells = [
            row.module,
            row.section,
            row.dtype,
            str(row.compared),
            Text(str(row.failed), "red" if row.failed else ""),
        ]
        if row.worst is None or row.worst.error is None:
            cells += ["", "", "" if row.compared else "unsupported"]
        else:
            cells += [f"{row.worst.error:.1e}", f"{row.worst.allowed or 0:.1e}", place_text(row.worst)]
        table.add_row(*cells)
    return table


class ModuleRow(NamedTuple):
    """One module in one dtype; ``worst`` is the comparison that came nearest to its limit, or went furthest over it.

    ``sources`` counts the failures that are not the consequence of another.
    """

    module: str
    section: str
    dtype: str
    compared: int
    failed: int
    sources: int
    worst: Finding | None


def module_rows(report: Report) -> Iterator[ModuleRow]:
    own = {id(finding) for finding in report.sources}
    for module, dtype, findings in by_module(report.findings):
        compared = [f for f in findings if f.status in ("pass", "fail", "error")]
        failed = sum(f.status in ("fail", "error") for f in findings)
        worst = max(compared, key=closeness, default=None)
        sources = sum(id(f) in own for f in findings)
        yield ModuleRow(module, findings[0].section, dtype, len(compared), failed, sources, worst)


def place_text(finding: Finding) -> str:
    return f"{finding.case} {short(finding.tap)} {finding.regime}"


def closeness(finding: Finding) -> float:
    """How much of its limit a finding uses up."""
    if finding.error is None:
        return -1.0
    return finding.error / finding.allowed if finding.allowed else finding.error


def short(tap: str) -> str:
    return tap.replace("language_model.model.layers.", "L").replace("language_model.model.", "")


def print_failures(console: Console, report: Report) -> None:
    """Sources first: a module whose inputs agree and whose output does not is to blame for what comes after it."""
    sources, failures = report.sources, report.failures
    if not failures:
        return
    if any(finding.check in OF_THE_REFERENCE for finding in sources):
        text = "the reference itself departs from the authors' own results: mend it before believing anything below"
        console.print(f"\n{text}", style="bold red", highlight=False)
    culprits = sorted({finding.module for finding in sources})
    console.print(f"\nsource of the disagreement: {', '.join(culprits)}", style="bold red", highlight=False)
    print_diagnoses(console, report.diagnoses)
    for finding in sources[:SHOWN_FAILURES]:
        console.print(failure_text(report.port, finding), highlight=False, soft_wrap=True)
    hidden = len(failures) - min(len(sources), SHOWN_FAILURES)
    if hidden:
        console.print(f"{hidden} more failures, most of them downstream; all of them with --json", style="dim")


def print_diagnoses(console: Console, diagnoses: Iterable[Diagnosis]) -> None:
    """One line a module."""
    for item in diagnoses:
        console.print(f"{item.module} {item.text}", style="bold", highlight=False, markup=False, soft_wrap=True)


def failure_text(port: str, finding: Finding) -> str:
    """Where, how much, whether the inputs agree, and the command that repeats it."""
    lines = [f"\n{finding.status.upper()} {finding.module} ({finding.section}) · {short(finding.tap)}"]
    where = f"  port {port} · check {finding.check} · case {finding.case} · {finding.dtype} · {finding.regime}"
    lines.append(f"{where} · seed {finding.seed}")
    if finding.error is not None:
        amount = f"  error {finding.error:.3g}, allowed {finding.allowed or 0:.3g}"
        amount += f", the reference's own {finding.noise:.3g}" if finding.noise is not None else ""
        amount += f", baseline {finding.baseline:.2g}" if finding.baseline is not None else ""
        lines.append(amount + (f", cosine {finding.cosine:.6f}" if finding.cosine is not None else ""))
    if finding.worst is not None:
        worst = finding.worst
        lines.append(f"  worst element {list(worst.index)}: {worst.found:.6g} where {worst.truth:.6g} is right")
    if finding.inputs_agree is not None:
        alone = "alone, on the reference's own input" if finding.isolated else "in a chain"
        agree = "its inputs agree" if finding.inputs_agree else "what it is computed from already differs"
        lines.append(f"  {agree} (compared {alone})")
    lines += [f"  {text}" for text in (finding.note, finding.command and f"repeat: {finding.command}") if text]
    return "\n".join(lines)
