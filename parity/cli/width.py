"""``k3-parity width``: the twins at K3's own dimensions, part by part."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from parity.cli.common import Json, Seed, finish, stderr, stdout
from parity.exits import EXIT_AGREE, EXIT_DISAGREE

app = typer.Typer(no_args_is_help=True, help="The twins at K3's own dimensions, part by part.")


@app.callback()
def width() -> None:
    """The twins at K3's own dimensions, part by part."""


@app.command("vision")
def vision(
    lend_blas: Annotated[
        bool,
        typer.Option(
            help="Lend torch's matrix product to MLX (Linux): minutes instead of hours, but a fault in it is invisible."
        ),
    ] = sys.platform.startswith("linux"),
    small: Annotated[
        bool, typer.Option("--small", help="Small pictures: what MLX's own product on Linux can do in minutes.")
    ] = False,
    threads: Annotated[int, typer.Option("--threads", min=1)] = 2,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Vision tower and projector, 447 M parameters in float32: every block alone and the whole. About 5 GB."""
    from parity.blas import LEND

    # Read once, when the libraries are loaded.
    each = str(max(1, threads // 2))  # the sides compute at the same time
    os.environ |= {"OMP_NUM_THREADS": each, "MLX_ENABLE_TF32": "0", LEND: "1" if lend_blas else "0"}
    from parity.true_width.vision import run

    document = run(seed, small, threads, lambda line: stderr.print(line, highlight=False, markup=False))
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        _print(document)
    raise typer.Exit(EXIT_AGREE if document["agree"] else EXIT_DISAGREE)


Layers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        help="At true width, one layer in memory: 0-based numbers (0,1,3), each module alone; or all, in one chain.",
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="With --layers: tokens of the prompt.")]
Decode = Annotated[int, typer.Option("--decode", min=0, help="With --layers all: tokens decoded after the prompt.")]
TruthLayers = Annotated[
    int, typer.Option("--truth-layers", min=0, help="With --layers all: how many layers are carried in float64 too.")
]
Checkpoint = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="With --layers: released shards, all or some, in place of synthetic weights."),
]
StateFolder = Annotated[
    Path | None, typer.Option("--state", help="With --layers all: where the chain is written down after each layer.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from --state.")]
LendBlas = Annotated[
    bool, typer.Option("--lend-blas/--no-lend-blas", help="With --layers: lend torch's matrix product to MLX (Linux).")
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Processes; findings do not depend on them."),
]
Scheduler = Annotated[
    str | None, typer.Option("--scheduler", help="tcp://host:port of a dask scheduler, in place of --workers.")
]
Threads = Annotated[int, typer.Option("--threads", min=1)]
LENT = sys.platform.startswith("linux")


@app.command("text")
def text(
    layers: Layers = "all",
    case: Annotated[str, typer.Option("--case", help="k3, or a case of the catalogue.")] = "k3",
    tokens: Tokens = 8,
    decode: Decode = 2,
    truth_layers: TruthLayers = 4,
    checkpoint: Checkpoint = None,
    state: StateFolder = None,
    resume: Resume = False,
    lend_blas: LendBlas = LENT,
    threads: Threads = 2,
    seed: Seed = 0,
    as_json: Json = False,
    workers: Workers = None,
    scheduler: Scheduler = None,
) -> None:
    """Layers of the text tower, synthetic or from released shards, with the chosen experts alone in memory."""
    from parity.blas import LEND

    # Read once, when the libraries are loaded.
    os.environ |= {"OMP_NUM_THREADS": str(threads), "MLX_ENABLE_TF32": "0", LEND: "1" if lend_blas else "0"}
    from parity.true_width.text import Options, run_text

    options = Options(case, layers or "all", tokens, decode, truth_layers, checkpoint, state, resume, seed, threads)
    note = lambda line: stderr.print(line, highlight=False, markup=False)  # noqa: E731
    finish(run_text(options, note, workers=workers or 1, scheduler=scheduler), as_json)


def _print(document: dict) -> None:
    from rich.table import Table

    table = Table("item", "how", "tap", "relative RMS", "allowed", "")
    for row in document["rows"]:
        verdict = "agrees" if row["agrees"] else "DISAGREES"
        table.add_row(row["item"], row["mode"], row["tap"], f"{row['error']:.2e}", f"{row['limit']:.1e}", verdict)
    console = stdout()
    console.print(table)
    console.print(f"limits: {document['limits']['reason']}", highlight=False)
    peak, total = document["peak_rss_bytes"] / 1e9, document["total_seconds"]
    product = document["versions"]["matrix product"]
    verdict = "agree" if document["agree"] else "disagree"
    console.print(f"{verdict}: {total:.0f} s, {peak:.1f} GB at most, matrix product: {product}", highlight=False)
