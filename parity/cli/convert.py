"""``k3-parity convert``: a released checkpoint to a folder that stock MLX loaders read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parity.cli.common import Json, stderr, stdout
from reference.errors import InputError

if TYPE_CHECKING:
    from parity.dry_run import Size


def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint folder; with --dry-run also a preset, k3.")],
    target: Annotated[Path | None, typer.Argument(help="The folder to write; not needed with --dry-run.")] = None,
    tier: Annotated[
        str | None, typer.Option("--tier", help="mxfp4, 3bit, mixed2 or 2bit; with --dry-run all of them.")
    ] = None,
    nonexpert_bits: Annotated[
        int | None, typer.Option("--nonexpert-bits", help="8: what mxfp4 and mixed2 leave in bf16, in affine 8 bits.")
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="JSON: the experts that each layer keeps.")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes; each writes a shard at a time.")] = 1,
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", help="tcp://host:port of a dask scheduler, in place of --workers.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted conversion.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint in OUT.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be written, from config and index alone.")
    ] = False,
    shard_bytes: Annotated[
        int | None, typer.Option("--shard-bytes", min=1, help="Size of the shards; about 32 of them unless given.")
    ] = None,
    sync: Annotated[
        bool, typer.Option("--sync/--no-sync", help="Wait until every shard is on the disk, for power cuts.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint without ever loading it. OUT appears when it is whole.

    Exit codes: 0 written, 2 bad input, a target that may not be written, a full disk.
    """
    if dry_run:
        from parity.dry_run import sizes

        show_sizes(sizes(source, tier, nonexpert_bits, plan, shard_bytes), as_json)
        return
    if target is None or tier is None:
        missing = "OUT" if target is None else "--tier"
        raise InputError("convert", missing, "a target folder and a tier", "none", f"give {missing}")
    from port.convert import convert as convert_folder
    from port.prune import read_plan
    from reference.config import K3Config

    kept = None if plan is None else read_plan(plan, K3Config.from_file(Path(source)))
    start = time.perf_counter()
    with progress_bar(f"{tier}") as progress:
        result = convert_folder(
            source,
            target,
            tier,
            nonexpert_bits,
            kept,
            workers,
            scheduler,
            resume,
            overwrite,
            shard_bytes,
            sync,
            progress,
        )
    seconds = time.perf_counter() - start
    document = {
        "format": 1,
        "folder": str(result.folder),
        "tier": result.tier,
        "nonexpert_bits": nonexpert_bits,
        "tensors": result.tensors,
        "bytes": result.nbytes,
        "shards": result.shards,
        "shards_kept": result.kept,
        "seconds": round(seconds, 3),
    }
    if as_json:
        print(json.dumps(document, indent=1))
        return
    text = f"{result.tensors:,} tensors, {result.nbytes:,} bytes in {result.shards} shards, {seconds:.1f} s: {target}"
    stdout().print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, in bytes."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=stderr, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_sizes(rows: list[Size], as_json: bool) -> None:
    """The dry run's table, or one JSON document."""
    if as_json:
        tiers = [as_document(row) for row in rows]
        print(json.dumps({"format": 1, "tiers": tiers, "bytes": sum(row.nbytes for row in rows)}, indent=1))
        return
    from rich.table import Table

    table = Table("tier", "other bits", "routed experts", "everything else", "bytes", "TB", "tensors", "shards")
    for row in rows:
        bits = str(row.nonexpert_bits or "")
        if row.refusal:
            table.add_row(row.tier, bits, "refused", "", "", "", "", "")
            continue
        numbers = (row.expert_bytes, row.other_bytes, row.nbytes)
        shown = [f"{number:,}" for number in numbers] + [f"{row.nbytes / 1e12:.2f}"]
        table.add_row(row.tier, bits, *shown, f"{row.tensors:,}", str(row.shards))
    if len(rows) > 1:
        total = sum(row.nbytes for row in rows)
        table.add_row("in all", "", "", "", f"{total:,}", f"{total / 1e12:.2f}", "", "")
    console = stdout()
    console.print(table)
    for row in rows:
        if row.refusal:
            console.print(f"{row.tier}: {row.refusal}", markup=False, highlight=False, soft_wrap=True)


def as_document(row: Size) -> dict[str, Any]:
    return {
        "tier": row.tier,
        "nonexpert_bits": row.nonexpert_bits,
        "expert_bytes": row.expert_bytes,
        "other_bytes": row.other_bytes,
        "bytes": row.nbytes,
        "tensors": row.tensors,
        "shards": row.shards,
        "refusal": row.refusal,
    }
