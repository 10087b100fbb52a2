"""``k3-parity audit``: what shapes, names and manuals suggest, and what is so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from parity.cli.common import Json, stderr, stdout
from parity.exits import EXIT_AGREE, EXIT_DISAGREE

if TYPE_CHECKING:
    from parity.audit import AuditEntry

COLOURS = {"decided": "green", "undecided": "yellow", "needs data": "yellow", "contradicted": "bold red"}


def audit(
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="A folder, or one whose shards are their headers alone.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="config.json, its folder, or the preset k3, which is the default.")
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", help="model.safetensors.index.json, plain or gzipped; with --config.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print every audited assumption: the readings, the evidence, the verdict, how far the readings are apart.

    Exit 1 if the checkpoint contradicts a reading of K3.md, else 0; 2 on bad input.
    """
    from parity.audit import audited, subject_of

    subject = subject_of(checkpoint, config, index)
    entries = list(audited(subject))
    if as_json:
        document = {"format": 2, "subject": subject.source, "level": subject.level}
        print(json.dumps(document | {"entries": [entry.model_dump() for entry in entries]}, indent=1))
    console = stderr if as_json else stdout()
    say(console, f"audited: {subject.source} ({subject.level})", "dim")
    for entry in entries:
        show(console, entry)
    contradicted = any(entry.status == "contradicted" for entry in entries)
    raise typer.Exit(EXIT_DISAGREE if contradicted else EXIT_AGREE)


def show(console: Console, entry: AuditEntry) -> None:
    say(console, f"{entry.name} ({entry.section})", "bold")
    say(console, f"  {entry.question}")
    for reading, fit in entry.readings.items():
        say(console, f"    {reading}: {fit}")
    for line in entry.evidence:
        say(console, f"  evidence: {line}")
    say(console, f"  verdict ({entry.status}): {entry.verdict}", COLOURS[entry.status])


def say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
