"""``k3-parity coverage``: every name, shape, dtype and byte of a checkpoint, from the configuration alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from parity.cli.common import Json, stderr, stdout
from parity.coverage import Coverage, folder_coverage, index_coverage, load_config, load_index
from parity.exits import EXIT_AGREE, EXIT_DISAGREE
from reference.checkpoint import names_digest, tensor_specs
from reference.errors import InputError

SHOWN = 20


def coverage(
    config: Annotated[
        str | None,
        typer.Option("--config", help="config.json, its folder, or the preset k3. The checkpoint's own unless given."),
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", help="model.safetensors.index.json, plain or gzipped.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="A folder: index and shard headers.")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes that read shard headers.")] = 1,
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", help="tcp://host:port of a dask scheduler, in place of --workers.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the tensors that a configuration asks for with an index, or with a folder's shard headers.

    With --config alone the schema's own counts are shown. Exit 0 if everything matches, 1 if not, 2 on bad input.
    """
    if index is not None and checkpoint is not None:
        raise InputError("--index", "options", "--index or --checkpoint", "both", "give one of the two")
    if config is None and checkpoint is None:
        raise InputError("--config", "options", "a configuration", "nothing", "give --config or --checkpoint")
    parsed = load_config(config or str(checkpoint))
    if checkpoint is not None:
        result = folder_coverage(parsed, checkpoint, workers, scheduler)
    elif index is not None:
        result = index_coverage(parsed, load_index(index), config)
    else:
        result = schema_only(parsed, config)
    if as_json:
        print(json.dumps(as_document(result), indent=1))
    show(stderr if as_json else stdout(), result)
    raise typer.Exit(EXIT_DISAGREE if result.problems else EXIT_AGREE)


def schema_only(config, source: object) -> Coverage:
    names, total = [], 0
    for spec in tensor_specs(config, source=source):
        names.append(spec.name)
        total += spec.nbytes
    return Coverage(len(names), len(names), total, None, names_digest(names))


def as_document(result: Coverage) -> dict:
    return {
        "format": 1,
        "expected": result.expected,
        "matched": result.matched,
        "found": result.found,
        "expected_bytes": result.expected_bytes,
        "found_bytes": result.found_bytes,
        "names_sha256": result.digest,
        "problems": [{"kind": kind, "name": name, "what": what} for kind, name, what in result.problems],
    }


def show(console: Console, result: Coverage) -> None:
    print_line = lambda text, style="": console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    for kind, name, what in result.problems[:SHOWN]:
        print_line(f"{kind}: {name}: {what}", "red")
    if len(result.problems) > SHOWN:
        kinds = Counter(kind for kind, _, _ in result.problems)
        print_line(
            f"… {len(result.problems)} problems: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()), "red"
        )
    print_line(f"{result.matched:,} of {result.expected:,} tensors, {result.expected_bytes:,} bytes")
    print_line(f"sha256 of the sorted names: {result.digest}")
    if result.problems:
        print_line("the checkpoint does not match the configuration", "bold red")
    elif result.found_bytes is not None:
        print_line("all names and the total match", "bold green")
