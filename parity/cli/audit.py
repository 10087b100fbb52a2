"""``k3-parity audit``: what shapes, names and manuals suggest, and what is so."""

from __future__ import annotations

import json

from parity.cli.common import Json, stdout


def audit(as_json: Json = False) -> None:
    """Print every audited assumption: the readings, the evidence, the verdict."""
    from parity.audit import ENTRIES

    entries = [entry for measure in ENTRIES for entry in measure()]
    if as_json:
        print(json.dumps({"format": 1, "entries": [entry.model_dump() for entry in entries]}, indent=1))
        return
    console = stdout()
    for entry in entries:
        console.print(f"{entry.name} ({entry.section})", style="bold", highlight=False)
        console.print(f"  {entry.question}", highlight=False)
        for reading, fit in entry.readings.items():
            console.print(f"    {reading}: {fit}", highlight=False)
        console.print(f"  evidence: {entry.evidence}", highlight=False, soft_wrap=True)
        console.print(f"  verdict: {entry.verdict}", style="green", highlight=False)
