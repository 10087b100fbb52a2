"""``k3-parity fixture``: synthetic checkpoints in the released format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from parity.cli.common import Json, Seed, stderr, stdout

app = typer.Typer(no_args_is_help=True, help="Synthetic mini-K3 checkpoints in the released format.")


@app.command("list")
def list_entries(as_json: Json = False) -> None:
    """Every configuration of the catalogue and why it exists."""
    from fixtures.catalogue import CATALOGUE

    rows = [(name, *_size(name), item.reason) for name, item in CATALOGUE.items()]
    if as_json:
        keys = ("name", "tensors", "bytes", "reason")
        print(json.dumps({"format": 1, "fixtures": [dict(zip(keys, row, strict=True)) for row in rows]}, indent=1))
        return
    table = Table("name", "tensors", "bytes", "why it exists")
    for name, tensors, size, reason in rows:
        table.add_row(name, str(tensors), f"{size:,}", reason)
    stdout().print(table)


@app.command("build")
def build(
    name: Annotated[str, typer.Argument(help="A catalogue name; see list.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it: a new or empty folder.")],
    seed: Seed = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Write one checkpoint: config, shards, index, inputs. The folder appears whole or not at all."""
    from fixtures.build import build as build_folder
    from fixtures.catalogue import entry

    path = build_folder(entry(name), folder, seed, overwrite)
    stderr.print(f"{name} (seed {seed}) written to {path}", highlight=False, markup=False)


@app.command("digests")
def digests(folder: Annotated[Path, typer.Argument(help="A folder that build wrote.")]) -> None:
    """sha256 of every file, as committed in fixtures/digests.json for seed 0."""
    from fixtures.build import digests as folder_digests

    print(json.dumps(folder_digests(folder), indent=1, sort_keys=True))


def _size(name: str) -> tuple[int, int]:
    from fixtures.catalogue import entry
    from reference.checkpoint import tensor_specs

    item = entry(name)
    specs = list(tensor_specs(item.parsed, item.expert_format))
    return len(specs), sum(spec.nbytes for spec in specs)
