"""One audited assumption."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["decided", "undecided", "needs data", "contradicted"]
"""``undecided``: all that there is to read leaves more than one reading. ``needs data``: there may be more to read, but
it was not given. ``contradicted``: the checkpoint speaks against the reading that K3.md takes."""


class AuditEntry(BaseModel):
    """The readings that are possible, what was measured, and which reading it leaves.

    ``apart`` says for each other reading how far it moves the output of the module that it belongs to, as relative RMS:
    the most over the layers looked at.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    name: str
    question: str
    readings: dict[str, str]
    evidence: tuple[str, ...]
    verdict: str
    section: str
    status: Status
    apart: dict[str, float] = {}
