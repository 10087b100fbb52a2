"""A port's known failures, with reasons: a file that is strict both ways.

    port = "mlx_lm"
    versions = {"mlx-lm" = "0.32.2"}

    [[known]]
    reason = "the router's logits are rounded to bfloat16"
    worst = 2.2e-3
    [known.failures]
    "layers bfloat16 router" = ["mini", "groups"]

A key names check, dtype and the module that is the source; its list names the cases. What fails and is not in the file
fails; so does what is in the file and agrees, or is more than twice as far off as ``worst``. An entry marked
``sometimes`` stands so near its limit that the CPU decides; it may do either.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from parity.findings import Finding, Report
from parity.protocol import Port
from reference.errors import InputError

MUCH_WORSE = 2.0


class Key(NamedTuple):
    check: str
    dtype: str
    module: str
    case: str


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    reason: str
    failures: dict[str, list[str]]
    worst: float = float("inf")
    sometimes: bool = False


class File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    port: str
    versions: dict[str, str] = {}
    known: list[Entry]


class Known:
    """The entries by key; empty where no file is given."""

    def __init__(self, entries: dict[Key, Entry], source: str = "") -> None:
        self.entries, self.source = entries, source

    @classmethod
    def from_file(cls, path: Path, port: Port) -> Known:
        """Raises InputError for a file that is no such list, or another port's or version's."""
        try:
            file = File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise InputError(path, "--xfails", "a TOML file", "nothing there", "check the path") from None
        except (tomllib.TOMLDecodeError, ValidationError) as error:
            found = " ".join(str(error).split())[:200]
            raise InputError(path, "--xfails", "known failures with reasons", found, "see parity/known.py") from None
        found = {"port": port.name} | {name: port.versions().get(name, "none") for name in file.versions}
        for name, expected in ({"port": file.port} | file.versions).items():
            if found[name] != expected:
                raise InputError(path, name, expected, found[name], "give the file of this port and version")
        return cls(dict(_keys(file, path)), str(path))

    def verdict(self, report: Report) -> Verdict:
        """What is unexpected in a report, and the reasons of what was to be expected."""
        failing: dict[Key, list[Finding]] = {}
        for finding in report.sources if report.failures else ():
            failing.setdefault(key_of(finding), []).append(finding)
        compared = {
            key_of(finding)._replace(module="") for finding in report.findings if finding.status != "unsupported"
        }
        listed = [key for key in self.entries if key._replace(module="") in compared]
        gone = [key for key in listed if key not in failing and not self.entries[key].sometimes]
        new = [finding for key, found in failing.items() for finding in found if not self._covers(key, finding)]
        reasons = dict.fromkeys(self.entries[key].reason for key in failing if key in self.entries)
        return Verdict(new, gone, tuple(reasons), tuple(listed))

    def _covers(self, key: Key, finding: Finding) -> bool:
        entry = self.entries.get(key)
        return entry is not None and (finding.error is None or finding.error <= MUCH_WORSE * entry.worst)


class Verdict(NamedTuple):
    """``new`` failures; keys that are listed and agree now; the reasons of the others; every listed key seen."""

    new: list[Finding]
    gone: list[Key]
    reasons: tuple[str, ...]
    listed: tuple[Key, ...]


def key_of(finding: Finding) -> Key:
    return Key(finding.check, finding.dtype, finding.module, finding.case)


def _keys(file: File, path: Path) -> Iterator[tuple[Key, Entry]]:
    seen: set[Key] = set()
    for entry in file.known:
        for words, cases in entry.failures.items():
            parts = words.split()
            if len(parts) != 3:
                raise InputError(path, repr(words), "check, dtype and module", words, "write three words")
            for case in cases:
                key = Key(*parts, case)
                if key in seen:
                    raise InputError(path, repr(words), "every case once", case, "remove one of the two")
                seen.add(key)
                yield key, entry


def as_toml(port: str, versions: dict[str, str], entries: Iterable[Entry]) -> str:
    """The text of a file; cases sorted, a few on a line."""
    lines = [f'port = "{port}"', "versions = {" + ", ".join(f'"{k}" = "{v}"' for k, v in versions.items()) + "}"]
    for entry in entries:
        lines += ["", "[[known]]", f'reason = "{entry.reason}"', f"worst = {entry.worst:.2g}"]
        lines += ["sometimes = true"] if entry.sometimes else []
        lines.append("[known.failures]")
        for words, cases in sorted(entry.failures.items()):
            lines.append(f'"{words}" = [')
            ordered = sorted(cases)
            for start in range(0, len(ordered), 5):
                lines.append("  " + ", ".join(f'"{case}"' for case in ordered[start : start + 5]) + ",")
            lines.append("]")
    return "\n".join(lines) + "\n"


active = Known({})
"""What this run knows; set from ``--xfails``."""
