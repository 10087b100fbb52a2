"""``k3-parity bench``: ratios measured in one run."""

from __future__ import annotations

from typing import Annotated

import typer

from parity.cli.common import Json

app = typer.Typer(no_args_is_help=True, help="Benchmarks: ratios measured in one run.")


@app.callback()
def benchmarks() -> None:
    """Benchmarks: ratios measured in one run."""


@app.command("kda")
def kda(
    lengths: Annotated[
        list[int] | None, typer.Option("--tokens", help="Sequence lengths; 1024 and 4096 unless given.")
    ] = None,
    heads: Annotated[int, typer.Option("--heads", min=1)] = 8,
    head_dim: Annotated[int, typer.Option("--head-dim", min=1)] = 128,
    threads: Annotated[int, typer.Option("--threads", min=1)] = 2,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
    as_json: Json = False,
) -> None:
    """Chunked KDA against the recurrence, fla-core's functions where installed, and its matrix products alone."""
    from parity.bench.kda import report, run

    report(run(tuple(lengths or (1024, 4096)), heads, head_dim, threads, repeats), as_json)


@app.command("convert")
def convert(
    layers: Annotated[int, typer.Option("--layers", min=1, help="19 are 2.2 GB, 57 are 6.9 GB.")] = 19,
    workers: Annotated[int, typer.Option("--workers", min=1)] = 2,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
    tier: Annotated[list[str] | None, typer.Option("--tier", help="May be given again; all unless given.")] = None,
    folder: Annotated[
        str | None, typer.Option("--folder", help="Where to work; the temporary folder unless given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Conversions of a mini-K3 of gigabytes: speed beside the restack bound, and peak resident size."""
    from parity.bench.convert import TIERS, report, run
    from port.tiers import tier_named

    for name in tier or ():
        tier_named(name)
    report(run(layers, workers, repeats, folder, tuple(tier or TIERS)), as_json)


@app.command("verify")
def verify(
    layers: Annotated[int, typer.Option("--layers", min=1, help="4 are 0.4 GB, 19 are 2.2 GB.")] = 4,
    workers: Annotated[int, typer.Option("--workers", min=1)] = 2,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
    tier: Annotated[list[str] | None, typer.Option("--tier", help="May be given again; all unless given.")] = None,
    folder: Annotated[
        str | None, typer.Option("--folder", help="Where to work; the temporary folder unless given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Verifying conversions of a mini-K3: expert weights a second, beside the restack bound and the plain way."""
    from parity.bench.verify import TIERS, report, run
    from port.tiers import tier_named

    for name in tier or ():
        tier_named(name)
    report(run(layers, workers, repeats, folder, tuple(tier or TIERS)), as_json)


@app.command("ratios")
def ratios(repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3, as_json: Json = False) -> None:
    """Coverage, fixtures, MXFP4, conversion and the port, each beside a bound or a peer."""
    from parity.bench.ratios import report, run

    report(run(repeats), as_json)
