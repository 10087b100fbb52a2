"""``k3-parity compare``: one trace against another."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parity.cli.common import Json, Page, finish, wanted_page
from reference.errors import InputError

if TYPE_CHECKING:
    from parity.findings import Report


def compare(
    found: Annotated[Path, typer.Argument(help="The trace under test.")],
    golden: Annotated[Path, typer.Argument(help="The trace that is right.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="Where to measure rounding; the golden trace's folder unless given."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Told from the traces unless given.")] = None,
    part: Annotated[str, typer.Option("--part", help="text, vision, multimodal or all.")] = "all",
    as_json: Json = False,
    page: Page = None,
) -> None:
    """Compare two traces tap by tap; every tap of GOLDEN must be in FOUND, except runs that its port cannot do."""
    wanted_page(page)
    finish(compared(found, golden, checkpoint, dtype, part)[0], as_json, page)


def compared(
    found: Path, golden: Path, checkpoint: Path | None = None, dtype: str | None = None, part: str = "all"
) -> tuple[Report, str]:
    """(report, dtype) of one trace against another."""
    from parity.compare_traces import PARTS, trace_findings, yardstick_for
    from parity.findings import Report
    from parity.trace import load_trace

    started = time.monotonic()
    (taps, metadata), (right, _) = load_trace(found), load_trace(golden)
    if part != "all":
        if part not in PARTS:
            raise InputError("--part", part, f"one of {', '.join(PARTS)} or all", part, "name a part")
        right = {name: array for name, array in right.items() if name.partition("/")[0] in PARTS[part]}
    dtype = dtype or metadata.get("dtype") or told_dtype(golden, right)
    yardstick = yardstick_for(golden, dtype, taps, checkpoint)
    command = repeat_command(found, golden, checkpoint, dtype)
    report = Report(
        port=metadata.get("port", found.name),
        header={"found": str(found), "golden": str(golden), "dtype": dtype, "measured by": yardstick.origin},
        findings=tuple(
            finding.model_copy(update={"command": command})
            for finding in trace_findings(golden.parent.name, dtype, taps, metadata, right, yardstick)
        ),
        seconds=round(time.monotonic() - started, 2),
    )
    return report, dtype


def repeat_command(found: Path, golden: Path, checkpoint: Path | None, dtype: str) -> str:
    where = ["--checkpoint", str(checkpoint)] if checkpoint else []
    return shlex.join(["k3-parity", "compare", str(found), str(golden), *where, "--dtype", dtype])


def told_dtype(path: Path, taps: dict) -> str:
    """bfloat16 if the golden trace holds any such tap."""
    if not taps:
        raise InputError(path, "taps", "at least one tap", "none", "give a trace with taps of this part")
    return "bfloat16" if any(str(array.dtype) == "bfloat16" for array in taps.values()) else "float32"
