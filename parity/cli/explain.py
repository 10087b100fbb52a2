"""``k3-parity explain``: what a tap is, what it is allowed, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from parity.cli.common import Json, stderr, stdout
from reference.errors import InputError


def explain(
    tap: Annotated[
        str | None, typer.Argument(help="A tap, e.g. self_attn.log_decay, or a module, e.g. kda.gate.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure both sides of all limits anew; minutes.")] = False,
    workers: Annotated[int, typer.Option("--workers", envvar="K3_PARITY_WORKERS", min=1)] = 2,
    as_json: Json = False,
) -> None:
    """What a tap is computed from, its limit with the reason, and both sides of that limit as measured."""
    from parity.explanation import explained, known_names
    from parity.limits import FILE, measured, save

    if measure:
        save(measured(workers=workers, progress=lambda text: stderr.print(f"… {text}", style="dim")))
        stderr.print(f"written to {FILE}", highlight=False)
    if tap is None:
        if not measure:
            raise InputError("explain", "TAP", f"one of {', '.join(known_names())}", "nothing", "name a tap or module")
        return
    document = explained(tap)
    if as_json:
        print(json.dumps(document, indent=1, ensure_ascii=False))
        return
    for key, value in document.items():
        lines = value if isinstance(value, list) else [value]
        for number, line in enumerate(lines):
            label = key if number == 0 else ""
            stdout().print(f"{label:14}{line}", markup=False, highlight=False, soft_wrap=True)
