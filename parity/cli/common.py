"""What the verbs share: consoles, options, and how an error ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from parity.findings import Report

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else.")]
PortName = Annotated[
    str,
    typer.Option(
        "--port",
        envvar="K3_PARITY_PORT",
        help="A name, traces:DIR, command:LINE, pipeline:RANKS, ring:RANKS or module:ATTRIBUTE.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", envvar="K3_PARITY_SEED", min=0, help="Seed of weights and inputs.")]
Page = Annotated[Path | None, typer.Option("--report", help="Also write the report as one HTML page to this file.")]
OptionalPath = Annotated[Path | None, typer.Option()]

stderr = Console(stderr=True)


def stdout() -> Console:
    """Where results go; a pipe gets full-width lines."""
    return Console(width=None if sys.stdout.isatty() else 160)


def finish(report: Report, as_json: bool, page: Path | None = None) -> None:
    """Show the report, write it as a page if one is wanted, and exit with its code."""
    from parity.report import print_header, print_report

    if as_json:
        print(report.model_dump_json(indent=1))
        print_report(stderr, report)
    else:
        print_header(stderr, report.header)
        print_report(stdout(), report)
    save_page(report, page)
    raise typer.Exit(report.exit_code)


def wanted_page(path: Path | None) -> None:
    """Refuse a place where no page can be written before the long part of a run."""
    if path is not None:
        from parity.page import known_page

        known_page(path)


def save_page(report: Report, path: Path | None) -> None:
    """Write the report as a page, if one is wanted, and say where it is."""
    if path is not None:
        from parity.page import write_page

        write_page(path, report)
        stderr.print(f"the whole report: {path}", markup=False, highlight=False, soft_wrap=True)
