"""``k3-parity baseline``: what a port's errors were when they were last committed."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from parity.cli.common import Json, PortName, stderr, stdout
from parity.exits import EXIT_DISAGREE
from reference.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Committed errors of a port, and the gate for what got worse since.")
Cases = Annotated[list[str] | None, typer.Option("--case", help="A core case, or functions; may be given again.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="float32 or bfloat16; may be given again.")]


@app.command("show")
def show(port: PortName = "mlx", case: Cases = None, dtype: Dtypes = None, as_json: Json = False) -> None:
    """Print the committed errors: relative RMS, and how many times the floor of its comparison that was."""
    from rich.table import Table

    from parity.baseline import Baselines
    from parity.ports import load_port

    baselines = Baselines(load_port(port))
    if not baselines.files:
        raise InputError(baselines.folder, "baselines", "a file per core case", "none", baselines.mend)
    rows = [
        (name, kind, section, tap, *line)
        for name in known(case) or baselines.documents
        for kind, sections in baselines.documents.get(name, {}).items()
        if not dtype or kind in known_dtypes(dtype)
        for section, taps in sections.items()
        for tap, line in taps.items()
    ]
    if as_json:
        keys = ("case", "dtype", "section", "tap", "error", "times")
        print(json.dumps({"format": 1, "baselines": [dict(zip(keys, row, strict=True)) for row in rows]}, indent=1))
        return
    table = Table("case", "dtype", "section", "tap", "error", "times its floor")
    for *words, error, times in rows:
        table.add_row(*words, f"{error:.1e}", f"{times:.2g}")
    stdout().print(table)


@app.command("update")
def update(port: PortName = "mlx", case: Cases = None, dtype: Dtypes = None) -> None:
    """Measure anew and rewrite the files. A run that rewrites fails: exit 1, so that it cannot pass unnoticed."""
    from parity.baseline_files import EXPECTED
    from parity.baseline_update import remove_stale, updated
    from parity.cli.check import known_dtypes as dtypes_of
    from parity.ports import load_port

    under_test, names = load_port(port), known(case)
    dtypes = dtypes_of(dtype, under_test.capabilities().dtypes)
    changed = updated(under_test, names or EXPECTED, dtypes, lambda name: stderr.print(f"… {name}", style="dim"))
    changed += [] if case or dtype else remove_stale(under_test)
    for path in changed:
        stderr.print(f"rewritten: {path}", highlight=False, soft_wrap=True)
    if changed:
        text = (
            f"{len(changed)} baseline files rewritten: look at the difference and commit it; this run fails on purpose"
        )
        stderr.print(text, style="bold red", highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_DISAGREE)
    stderr.print("the baselines are as they were", style="bold green")


def known(cases: list[str] | None) -> tuple[str, ...]:
    from parity.baseline_files import EXPECTED

    for name in cases or ():
        if name not in EXPECTED:
            raise InputError("--case", name, f"one of {', '.join(EXPECTED)}", name, "name a case that has baselines")
    return tuple(cases or ())


def known_dtypes(dtypes: list[str]) -> list[str]:
    for name in dtypes:
        if name not in ("float32", "bfloat16"):
            raise InputError("--dtype", name, "float32 or bfloat16", name, "choose one of them")
    return dtypes
