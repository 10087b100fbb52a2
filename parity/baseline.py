"""Baselines: how far off a port was when it was last looked at, and a gate for what has become worse since.

A tolerance says what is right; it leaves room in which a port may get worse unseen. So the worst error of every tap
that a case has is committed, per port, case and dtype, layers folded into one, in ``parity/baselines/<port>/``: the
error, and how many times the floor of its own comparison that was (the reference's noise on the same input, on the same
machine). The gate has one side: better is fine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from parity.findings import Finding
from parity.protocol import Port
from parity.tolerance import CHAINED, ISOLATED
from reference.errors import InputError

FOLDER = Path(__file__).with_name("baselines")
SEED = 0
"""Baselines hold for the weights and inputs of this seed alone: another one's are better or worse by up to 11 times,
since some draws amplify rounding and some do not."""
SECTIONS = {
    "modules": "", "layers": "layers", "end_to_end": "passes", "decode": "passes", "padding": "passes",
    "vision": "vision", "multimodal": "multimodal",
}  # fmt: skip
"""Check -> the section of a case's file; a function of ``modules`` has its own section in FUNCTIONS."""
FUNCTIONS = "functions"

FACTOR = {("float32", False): 3.0, ("float32", True): 5.0, ("bfloat16", False): 1.5, ("bfloat16", True): 1.5}
"""(dtype, chained) -> how many times its baseline a tap's error may be; beyond that, and above the floor, it is worse.

It must not cry on another machine, where every sum is rounded in another order. Measured at seed 0 over all core cases
and checks, with torch's BLAS in place of MLX's own (every float32 product of the port is rounded anew), and once more
with that BLAS held to SSE and torch's vector code off (the reference too is rounded anew). Error and error over floor
both come, at once, to at most 1.12 times the baseline for a module alone in float32 and to 2.0 times for a whole pass
(one of the two alone: 2.3); in bfloat16, rounded once from float32, to 1.02. Other seeds draw other inputs and come to
3.6 times: they are not judged.
"""
CHAINED_SECTIONS = ("passes", "multimodal")


class Line(NamedTuple):
    """The worst of one tap: relative RMS, and that over the floor of its comparison; two digits each."""

    error: float
    times: float


class Place(NamedTuple):
    """Where a finding's baseline stands."""

    file: str
    dtype: str
    section: str
    tap: str


Document = dict[str, dict[str, dict[str, Line]]]
"""dtype -> section -> tap -> line."""


def folded(tap: str) -> str:
    """The tap without its layer's or block's number."""
    return re.sub(r"(layers|blocks)\.\d+\.", r"\1.", tap.removeprefix("language_model.model."))


def place_of(finding: Finding) -> Place | None:
    """None for what has no baseline: exact things, other checks, what was not measured."""
    if finding.check not in SECTIONS or finding.error is None or not finding.allowed:
        return None
    if finding.check == "modules":
        return Place(FUNCTIONS, finding.dtype, finding.case, finding.tap)
    return Place(finding.case, finding.dtype, SECTIONS[finding.check], folded(finding.tap))


def floor_of(finding: Finding) -> float:
    """The noise that the finding's limit is a multiple of: an error below it says nothing."""
    tolerance = ISOLATED[finding.module] if finding.isolated else CHAINED
    return (finding.allowed or 0.0) / tolerance.factor[finding.dtype]


def line_of(finding: Finding) -> Line:
    return Line(finding.error, finding.error / floor_of(finding))


def worst(findings: Iterable[Finding]) -> dict[str, Document]:
    """File -> its document, from the findings of whole checks."""
    documents: dict[str, Document] = {}
    for finding in findings:
        if place := place_of(finding):
            section = documents.setdefault(place.file, {}).setdefault(place.dtype, {}).setdefault(place.section, {})
            seen, new = section.get(place.tap, Line(0.0, 0.0)), line_of(finding)
            section[place.tap] = Line(max(seen.error, new.error), max(seen.times, new.times))
    return documents


class Baselines:
    """The committed baselines of one port; ``files`` is empty where it has none."""

    def __init__(self, port: Port) -> None:
        self.port, self.folder = port, FOLDER / port.name
        self.mend = f"run k3-parity baseline update --port {port.name} and commit what it writes"

    @cached_property
    def files(self) -> dict[str, Path]:
        usable = re.fullmatch(r"[\w.-]+", self.port.name) is not None
        return {path.stem: path for path in sorted(self.folder.glob("*.json"))} if usable else {}

    @cached_property
    def documents(self) -> dict[str, Document]:
        return {name: self.read(path)[1] for name, path in self.files.items()}

    @cached_property
    def device(self) -> str:
        return self.port.versions().get("device", "")

    def made_on(self) -> set[str]:
        return {self.read(path)[0] for path in self.files.values()}

    @cached_property
    def other_device(self) -> str | None:
        """The device of the baselines if the port computes on another one: its arithmetic is another."""
        others = sorted(self.made_on() - {self.device})
        return ", ".join(others) or None

    def state(self, seed: int) -> str:
        """For the header of a run."""
        if not self.files:
            return "none for this port"
        if seed != SEED:
            return f"not applied: they hold for seed {SEED}"
        return f"not applied: made on {self.other_device}" if self.other_device else f"{len(self.files)} files"

    def judged(self, finding: Finding) -> Finding:
        """The finding with its baseline; a pass that is worse than its baseline becomes a failure that says so."""
        if not self.files or finding.seed != SEED or self.other_device:
            return finding
        place = place_of(finding)
        if place is None or place.file not in self.documents:
            return finding
        line = self.documents[place.file].get(place.dtype, {}).get(place.section, {}).get(place.tap)
        if line is None:
            note = f"{self.files[place.file]}: no baseline of {place.section} {place.tap} in {place.dtype}; {self.mend}"
            return finding.model_copy(update={"status": "fail", "note": note}) if passed(finding) else finding
        update: dict[str, Any] = {"baseline": line.error}
        if passed(finding) and is_worse(finding, line, place.section in CHAINED_SECTIONS):
            times = finding.error / line.error if line.error else float("inf")
            note = f"worse than its baseline ({times:.2g} times), though inside the tolerance; if meant, {self.mend}"
            update |= {"status": "fail", "note": note}
        return finding.model_copy(update=update)

    def read(self, path: Path) -> tuple[str, Document]:
        """(device, document) of one file; InputError, one line, unless it is one of ours."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            document = {
                dtype: {
                    section: {tap: Line(*map(float, line)) for tap, line in taps.items()}
                    for section, taps in sections.items()
                }
                for dtype, sections in content["errors"].items()
            }
            return str(content["device"]), document
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(path, "content", "a baseline file", found, self.mend) from None

    def write(self, documents: Mapping[str, Document]) -> list[Path]:
        """Write these files, sorted; those whose text has changed."""
        changed = []
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, document in documents.items():
            path, text = self.folder / f"{name}.json", as_text(self.device, document)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
                changed.append(path)
        return changed


def passed(finding: Finding) -> bool:
    return finding.status == "pass"


def is_worse(finding: Finding, line: Line, chained: bool) -> bool:
    """More than the factor beyond the committed error, in itself and over its floor, and above that floor."""
    factor, floor = FACTOR[finding.dtype, chained], floor_of(finding)
    return finding.error > max(factor * line.error, factor * line.times * floor, floor)


def judged(port: Port, findings: Iterable[Finding]) -> Iterator[Finding]:
    baselines = Baselines(port)
    return (baselines.judged(finding) for finding in findings)


def as_text(device: str, document: Document) -> str:
    """One tap a line, everything sorted."""
    dtypes = []
    for dtype, sections in sorted(document.items()):
        rows = []
        for section, taps in sorted(sections.items()):
            lines = ",\n".join(f'    "{tap}": {two_digits(line)}' for tap, line in sorted(taps.items()))
            rows.append(f'   "{section}": {{\n{lines}\n   }}')
        dtypes.append(f'  "{dtype}": {{\n' + ",\n".join(rows) + "\n  }")
    return f'{{\n "device": {json.dumps(device)},\n "errors": {{\n' + ",\n".join(dtypes) + "\n }\n}\n"


def two_digits(line: Line) -> str:
    return f"[{line.error:.1e}, {line.times:.2g}]"
