"""What a reader must see first: who is to blame, what it looks like, how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from parity.diagnosis import culprits, first_culprits
from parity.findings import Diagnosis, Finding, Report
from parity.likeness import WHOLE, within
from parity.page.numbers import count
from parity.report import ModuleRow, module_rows


class Culprit(NamedTuple):
    """A wrong module: the sections of K3.md that define it, the first failure that shows it, its diagnosis if any."""

    module: str
    sections: tuple[str, ...]
    first: Finding
    sources: int
    diagnosis: Diagnosis | None


class Group(NamedTuple):
    """Failures that one command repeats; ``sources`` are those among them that are not a consequence of another."""

    command: str
    members: tuple[Finding, ...]
    sources: frozenset[int]

    @property
    def summary(self) -> str:
        many, own = len(self.members), len(self.sources)
        failures = "1 failure" if many == 1 else f"{count(many)} failures"
        if not own:
            return failures
        if own < many:
            return f"{failures}, {own} of them sources"
        return f"{failures}, {'a source' if own == 1 else 'all sources'}"


def wrong_modules(report: Report) -> list[Culprit]:
    """Those that were diagnosed first, then the rest, each once; empty when nothing failed.

    A golden trace can only show attention as a whole: where a part of it is named too, the part is the culprit, unless
    it is the whole that was diagnosed, which then stands for its parts.
    """
    sources = report.sources
    diagnoses = {item.module: item for item in report.diagnoses}
    ordered = dict.fromkeys([*diagnoses, *accused(report)])
    wholes = {whole for whole in WHOLE if any(within(whole, module) and module != whole for module in ordered)}
    found = []
    for module in ordered:
        diagnosis = diagnoses.get(module)
        if diagnosis is None and (module in wholes or any(within(whole, module) for whole in diagnoses)):
            continue
        members = [finding for finding in sources if within(module, finding.module)]
        first = (members or sources)[0]
        sections = tuple(sorted({finding.section for finding in members if finding.section.strip("§")}))
        found.append(Culprit(module, sections, first, len(members), diagnosis))
    return found


def accused(report: Report) -> list[str]:
    """The modules that sources name, the most named first. Where only passes of a trace were compared, each part of the
    model has one first wrong tap: a run that shows its logits alone must not accuse the last product."""
    sources = report.sources
    if not any(finding.isolated for finding in sources) and (first := first_culprits(report)):
        return first
    return [*culprits(report), *(finding.module for finding in sources)]


class ModuleTable(NamedTuple):
    title: str
    why: str
    rows: tuple[ModuleRow, ...]
    folded: bool

    @property
    def compared(self) -> int:
        return sum(row.compared for row in self.rows)

    @property
    def failed(self) -> int:
        return sum(row.failed for row in self.rows)


ANCHOR = "reference: "
"""How the modules of the reference itself are called, where it is compared with the authors' own results."""


def module_tables(report: Report) -> list[ModuleTable]:
    """The port's modules, those with sources first; then what is exact, and the reference itself, folded away while
    all is well there."""
    rows = list(module_rows(report))
    order = [item.module for item in wrong_modules(report)]
    order += [row.module for row in rows if row.sources] + [row.module for row in rows]
    places = {module: place for place, module in reversed(list(enumerate(order)))}
    rows.sort(key=lambda row: places[row.module])
    anchor = [row for row in rows if row.module.startswith(ANCHOR)]
    exact = [row for row in rows if row.dtype == "any"]
    numeric = [row for row in rows if row not in anchor and row not in exact]
    return [
        ModuleTable(title, why, tuple(members), folded and not any(row.failed for row in members))
        for title, why, members, folded in (
            ("The port's modules", "", numeric, False),
            ("Exact things", "Names, tensors, words and pixels that must be equal, or nearly so.", exact, True),
            (
                "The reference itself",
                "Against what the model's authors compute: the yardstick, measured.",
                anchor,
                True,
            ),
        )
        if members
    ]


def failure_groups(report: Report) -> list[Group]:
    """Every failure, by the command that repeats it: first the groups that hold a source, in the culprits' order."""
    own = {id(finding) for finding in report.sources}
    groups: dict[str, list[Finding]] = {}
    for finding in report.failures:
        groups.setdefault(finding.command, []).append(finding)
    made = [
        Group(command, tuple(members), frozenset(i for i, finding in enumerate(members) if id(finding) in own))
        for command, members in groups.items()
    ]
    places = {item.module: place for place, item in enumerate(wrong_modules(report))}

    def place(group: Group) -> int:
        return min((places.get(group.members[i].module, len(places)) for i in group.sources), default=len(places) + 1)

    return sorted(made, key=place)


def unsupported(report: Report) -> Iterator[tuple[str, str, str, int]]:
    """(check, module, reason, how many) of what the port does not offer."""
    counted: dict[tuple[str, str, str], int] = {}
    for finding in report.findings:
        if finding.status == "unsupported":
            key = finding.check, finding.module, finding.note
            counted[key] = counted.get(key, 0) + 1
    for key, many in counted.items():
        yield *key, many
