"""One audited assumption."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class AuditEntry(BaseModel):
    """The readings that are possible, what was measured, and which reading it leaves."""

    model_config = ConfigDict(frozen=True, strict=True)

    name: str
    question: str
    readings: dict[str, str]
    evidence: str
    verdict: str
    section: str
